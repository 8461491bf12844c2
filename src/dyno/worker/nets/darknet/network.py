"""A network of Darknet's as a module, and what Dyno needs to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dyno.worker.inspection import Purpose
from dyno.worker.nets.darknet import cfg, weights
from dyno.worker.nets.darknet.cfg import CfgSection
from dyno.worker.nets.darknet.layers import LAYERS, LayerContext, Value
from dyno.worker.spec import ModelSpec, Preprocess, UserError
from dyno.worker.tasks import find as find_task

LARGEST = 1 << 14  # pixels of a side
REFERS = {"route": "layers", "shortcut": "from"}  # where a section names other layers


def reads(model: ModelSpec) -> bool:
    """Return whether the model's weights are Darknet's.

    Raises a `UserError` without the .cfg, which alone can place them.
    """
    stored = model.weights.endswith(weights.SUFFIX)
    if stored and not model.source.startswith("darknet:"):
        raise UserError(f"{model.weights} has Darknet's weights, which need the .cfg that they belong to as the model")
    return stored


def build(model: ModelSpec, path: str, state: Mapping[str, Any] | None = None, *, free_batch: bool = False) -> Any:
    """Build the network of a .cfg with random weights, or those of a .weights file; others are applied to it later."""
    network = _build_network(path)
    about: Purpose = network.purpose
    if model.channels != network.channels:
        raise UserError(f"{path} takes images of {network.channels} channels; give --channels {network.channels}")
    if model.classes is not None and about.classes and model.classes != about.classes:
        raise UserError(f"{path} has {about.classes} classes, not {model.classes}; change classes and filters there")
    if model.pretrained:
        raise UserError(f"{path} has no published weights here; give them with --weights FILE.weights")
    if reads(model):
        weights.load(network.layers, model.weights, network.lines, path)
    return network


def facts(module: Any) -> Purpose:
    """Return the task, the classes and the stride; no task if the network has no boxes."""
    purpose: Purpose = module.purpose
    return purpose


def image_config(model: ModelSpec, path: str) -> tuple[Preprocess | None, tuple[int, int]]:
    """Return the preprocessing of images (None without a yolo layer), and the height and width in its [net]."""
    head, *sections = cfg.read(path)
    boxes = any(section.kind == "yolo" for section in sections)
    return find_task("detect").preprocess(model.channels) if boxes else None, _read_size(head)


def _read_size(head: CfgSection) -> tuple[int, int]:
    return head.number("height", 416, 1, LARGEST), head.number("width", 416, 1, LARGEST)


def _build_network(path: str) -> Any:
    """Build the module: B x channels x H x W to B x (4 + classes) x boxes, or to B x classes without a yolo layer."""
    import torch

    head, *sections = cfg.read(path)
    graph, root = torch.fx.Graph(), torch.nn.Module()
    root.layers = torch.nn.ModuleDict()
    image = Value(graph.placeholder("image"), head.number("channels", 3, 1, 1 << 10), 1.0)
    values: list[Value] = []
    for number, section in enumerate(sections):
        if section.kind not in LAYERS:
            raise section.error(f"this layer isn't supported; supported are {', '.join(LAYERS)}")

        def add_call(module: Any, node: Any, number: int = number) -> Any:
            root.layers[str(number)] = module
            return graph.call_module(f"layers.{number}", (node,))

        inputs = _find_inputs(number, section, image, values)
        values.append(LAYERS[section.kind](LayerContext(graph, add_call, torch.nn), section, inputs))
    heads = [value for value in values if value.classes]
    nodes = [value.node for value in heads]
    result = graph.call_function(torch.cat, (nodes, 2)) if len(nodes) > 1 else (nodes or [values[-1].node])[0]
    graph.output(result if heads else graph.call_function(torch.flatten, (result, 1)))
    network = torch.fx.GraphModule(root, graph, "Darknet")
    network.channels, network.lines = image.channels, [section.line for section in sections]
    network.purpose = _find_purpose(path, values)
    return network


def _find_inputs(number: int, section: CfgSection, image: Value, values: list[Value]) -> list[Value]:
    """Return the values that the section's layer reads; negative numbers in the file count back from it."""
    before = values[-1] if values else image
    if section.kind not in REFERS:
        return [before]
    option = REFERS[section.kind]
    named = section.numbers(option)
    places = [number + k if k < 0 else k for k in named]
    if not places or not all(0 <= k < number for k in places):
        raise section.error(f"{option}={section.text(option)} must name layers before it, which are 0 to {number - 1}")
    inputs = [values[k] for k in places]
    inputs = inputs if section.kind == "route" else [before, *inputs]
    if len({value.stride for value in inputs}) > 1:
        raise section.error(f"{option}={section.text(option)} puts layers of different sizes together")
    return inputs


def _find_purpose(path: str, values: list[Value]) -> Purpose:
    classes = {value.classes for value in values if value.classes}
    if len(classes) > 1:
        raise UserError(f"{path} has yolo layers of {' and '.join(map(str, sorted(classes)))} classes; make them equal")
    stride = max(1, *(int(value.stride) for value in values))
    return Purpose(task="detect", classes=classes.pop(), stride=stride) if classes else Purpose(stride=1)
