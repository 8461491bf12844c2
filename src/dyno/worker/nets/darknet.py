"""Darknet networks as PyTorch modules, with their weights and facts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dyno.worker.inspection import Purpose
from dyno.worker.nets.model_source import ImageConfig, ModelSource, check_unchanged
from dyno.worker.spec import Dims, ModelSpec, UserError
from dyno.worker.tasks import find_task as find_task

# Darknet's .cfg files: sections of options, line by line

Value = TypeVar("Value", int, float)
MAX_SECTIONS = 1_000
MAX_BYTES = 1 << 20
NETWORK_SECTIONS = ("net", "network")


@dataclass
class CfgSection:
    """A section `[kind]` with its options as text; `line` is its first line in the file `path`, counted from 1."""

    kind: str
    path: str
    line: int
    options: dict[str, str] = field(default_factory=dict)

    def make_error(self, text: str) -> UserError:
        """Return an error with the section's place."""
        return UserError(f"{self.path}, [{self.kind}] in line {self.line}: {text}")

    def text(self, name: str, default: str = "") -> str:
        """Return an option, or its default if it isn't set."""
        return self.options.get(name, default)

    def read_number(self, name: str, default: Value, minimum: float = 0, maximum: float = 1 << 16) -> Value:
        """Return an option as a number, whole if the default is.

        Raise an error if it isn't a number or is out of range.
        """
        text = self.options.get(name)
        if text is None:
            return default
        value = self._parse_value(name, text, type(default))
        if not minimum <= value <= maximum:
            raise self.make_error(f"{name}={text} must be between {minimum:g} and {maximum:g}")
        return value

    def read_numbers(self, name: str, kind: type[Value]) -> list[Value]:
        """Return an option's numbers, separated by commas; [] if it isn't set."""
        parts = [part.strip() for part in self.text(name).split(",")]
        return [self._parse_value(name, part, kind) for part in parts if part]

    def _parse_value(self, name: str, text: str, read: Callable[[str], Value]) -> Value:
        try:
            return read(text)
        except (ValueError, OverflowError):
            raise self.make_error(f"{name}={text[:40]} is not a number") from None


def read_cfg(path: str) -> list[CfgSection]:
    """Read the sections of the file, `[net]` first; raise a `UserError` for a file that isn't Darknet's."""
    file = Path(path)
    try:
        if file.stat().st_size > MAX_BYTES:
            raise UserError(f"{path} is larger than any architecture; give Darknet's .cfg")
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path} can't be read: {e}; give Darknet's .cfg") from e
    sections: list[CfgSection] = []
    for line_number, line in enumerate(lines, 1):
        text = line.split("#")[0].split(";")[0].strip()
        if text.startswith("[") and text.endswith("]"):
            sections.append(CfgSection(text[1:-1].strip(), path, line_number))
        elif text:
            name, equals, value = text.partition("=")
            if not equals or not sections:
                raise UserError(f"{path}, line {line_number}: {text[:60]!r} is neither [SECTION] nor NAME=VALUE")
            sections[-1].options[name.strip()] = value.strip()
    if not sections or sections[0].kind not in NETWORK_SECTIONS:
        raise UserError(f"{path} doesn't begin with [net], so it is not a network of Darknet's")
    if not 1 < len(sections) <= MAX_SECTIONS:
        raise UserError(f"{path} has {len(sections) - 1} layers; it must have between 1 and {MAX_SECTIONS - 1}")
    return sections


# Darknet's layers, by its documentation and C code, made of PyTorch's modules
#
# The network is a `torch.fx` graph, so no class here derives from one of torch, which is imported late.

EPSILON = 1e-5  # of AlexeyAB's Darknet (YOLOv4)
LEAKY_SLOPE = 0.1
MAX_WEIGHTS = 1 << 29  # per layer
BOX_VALUES = 4
ACTIVATIONS = {
    "linear": "Identity", "leaky": "LeakyReLU", "relu": "ReLU", "relu6": "ReLU6", "mish": "Mish", "swish": "SiLU",
    "logistic": "Sigmoid", "tanh": "Tanh", "elu": "ELU",
}  # fmt: skip


@dataclass(frozen=True)
class LayerOutput:
    """A layer's output: its graph node, its channels, its pixels' side in image pixels, and a yolo layer's classes."""

    node: Any
    channels: int
    stride: float
    classes: int = 0


@dataclass(frozen=True)
class LayerContext:
    """A layer's context: the graph, a function that adds a module and returns its call's node, and torch.nn."""

    graph: Any
    call: Callable[[Any, Any], Any]
    nn: Any


Layer = Callable[[LayerContext, CfgSection, Sequence[LayerOutput]], LayerOutput]


def convolutional(context: LayerContext, section: CfgSection, inputs: Sequence[LayerOutput]) -> LayerOutput:
    """Add a convolution with batch norm or bias, and an activation."""
    (value,) = inputs
    filters, size = section.read_number("filters", 1, 1), section.read_number("size", 1, 1, 64)
    groups, dilation = section.read_number("groups", 1, 1), section.read_number("dilation", 1, 1, 64)
    if value.channels % groups or filters % groups:
        raise section.make_error(
            f"groups={groups} divides {value.channels} input channels and {filters} filters unevenly"
        )
    if value.channels // groups * filters * size * size > MAX_WEIGHTS:
        raise section.make_error(f"{filters} filters of {value.channels // groups}x{size}x{size} are too many weights")
    padding = size // 2 * dilation if section.read_number("pad", 0) else section.read_number("padding", 0)
    stride, has_norm = section.read_number("stride", 1, 1, 64), bool(section.read_number("batch_normalize", 0))
    layer = context.nn.Sequential()
    convolution = context.nn.Conv2d(value.channels, filters, size, stride, padding, dilation, groups, not has_norm)
    layer.add_module("conv", convolution)
    if has_norm:
        layer.add_module("norm", context.nn.BatchNorm2d(filters, EPSILON))
    layer.add_module("activation", _make_activation(context, section, "logistic"))
    return LayerOutput(context.call(layer, value.node), filters, value.stride * stride)


def maxpool(context: LayerContext, section: CfgSection, inputs: Sequence[LayerOutput]) -> LayerOutput:
    """Add a maximum pooling.

    Darknet pads `padding` pixels in total; left and top get the smaller half.
    """
    (value,) = inputs
    stride = section.read_number("stride", 1, 1, 64)
    size = section.read_number("size", stride, 1, 64)
    padding = section.read_number("padding", size - 1, 0, 63)
    before, after = padding // 2, padding - padding // 2
    if size == stride == 2 and padding == 1:  # PyTorch's ceil mode: only the last window reaches the padding
        layer = context.nn.MaxPool2d(2, 2, ceil_mode=True)
    elif before == after and before <= size // 2:
        layer = context.nn.MaxPool2d(size, stride, before)
    else:
        pad = context.nn.ConstantPad2d((before, after, before, after), float("-inf"))
        layer = context.nn.Sequential(pad, context.nn.MaxPool2d(size, stride))
    return LayerOutput(context.call(layer, value.node), value.channels, value.stride * stride)


def upsample(context: LayerContext, section: CfgSection, inputs: Sequence[LayerOutput]) -> LayerOutput:
    """Add an upsampling that repeats each pixel `stride` times along both sides."""
    (value,) = inputs
    stride = section.read_number("stride", 2, 1, 64)
    layer = context.nn.Upsample(scale_factor=stride, mode="nearest")
    return LayerOutput(context.call(layer, value.node), value.channels, value.stride / stride)


def route(context: LayerContext, section: CfgSection, inputs: Sequence[LayerOutput]) -> LayerOutput:
    """Add the concatenated channels of several layers, or one group of each layer's channels."""
    import torch

    groups, group = section.read_number("groups", 1, 1), section.read_number("group_id", 0)
    if group >= groups:
        raise section.make_error(f"group_id={group} must be less than groups={groups}")
    if any(value.channels % groups for value in inputs):
        channels = " and ".join(str(value.channels) for value in inputs)
        raise section.make_error(f"groups={groups} divides {channels} channels unevenly")
    nodes = [value.node for value in inputs]
    if groups > 1:
        parts = [context.graph.call_method("chunk", (node, groups, 1)) for node in nodes]
        nodes = [context.graph.call_function(operator.getitem, (part, group)) for part in parts]
    node = context.graph.call_function(torch.cat, (nodes, 1)) if len(nodes) > 1 else nodes[0]
    return LayerOutput(node, sum(value.channels for value in inputs) // groups, inputs[0].stride)


def shortcut(context: LayerContext, section: CfgSection, inputs: Sequence[LayerOutput]) -> LayerOutput:
    """Add the sum of layers of equal shape."""
    if len({value.channels for value in inputs}) > 1:
        channels = " and ".join(str(value.channels) for value in inputs)
        raise section.make_error(f"it adds layers of {channels} channels; they must be equal")
    if section.text("weights_type", "none") != "none":
        raise section.make_error(f"weights_type={section.text('weights_type')} isn't supported; only none is")
    node = inputs[0].node
    for value in inputs[1:]:
        node = context.graph.call_function(operator.add, (node, value.node))
    layer = _make_activation(context, section, "linear")
    return LayerOutput(context.call(layer, node), inputs[0].channels, inputs[0].stride)


def yolo(context: LayerContext, section: CfgSection, inputs: Sequence[LayerOutput]) -> LayerOutput:
    """Add the boxes of a grid's cells: see `decode_boxes`."""
    (value,) = inputs
    classes, pixels = section.read_number("classes", 20, 1), section.read_numbers("anchors", float)
    if len(pixels) % 2:
        raise section.make_error(f"anchors are pairs of width and height, and {len(pixels)} numbers are given")
    anchors = [*zip(pixels[::2], pixels[1::2], strict=True)]
    mask = section.read_numbers("mask", int) or list(range(len(anchors)))
    if not anchors or not all(0 <= k < len(anchors) for k in mask):
        raise section.make_error(f"mask={section.text('mask')} must name some of the {len(anchors)} anchors, from 0")
    count = len(mask) * (BOX_VALUES + 1 + classes)
    if value.channels != count:
        raise section.make_error(
            f"the layer before it has {value.channels} channels; {len(mask)} anchors of {classes} classes need {count}"
        )
    scale, is_activated = section.read_number("scale_x_y", 1.0, -1e9, 1e9), bool(section.read_number("new_coords", 0))
    subset = [anchors[k] for k in mask]
    node = context.graph.call_function(decode_boxes, (value.node, subset, int(value.stride), scale, is_activated))
    return LayerOutput(node, BOX_VALUES + classes, value.stride, classes)


def decode_boxes(x: Any, anchors: Sequence[tuple[float, float]], stride: int, scale: float, is_activated: bool) -> Any:
    """Decode boxes: B x (anchors * (5 + classes)) x H x W to B x (4 + classes) x (anchors * H * W).

    Centre, width and height are in input pixels; a cell's side is `stride` pixels. A score is objectness times class
    probability, as in Darknet's detections. `is_activated`: already by the previous convolution (`new_coords`).
    """
    import torch

    batch, channels, height, width = x.shape
    count = len(anchors)
    x = x.reshape(batch, count, channels // count, height, width)
    centre, extent, scores = x[:, :, :2], x[:, :, 2:BOX_VALUES], x[:, :, BOX_VALUES:]
    if is_activated:
        extent = (extent * 2) ** 2
    else:
        centre, extent, scores = centre.sigmoid(), extent.exp(), scores.sigmoid()
    rows = torch.arange(height, device=x.device, dtype=x.dtype).reshape(1, 1, height, 1).expand(1, 1, height, width)
    columns = torch.arange(width, device=x.device, dtype=x.dtype).reshape(1, 1, 1, width).expand(1, 1, height, width)
    cells = torch.cat([columns, rows], 1).unsqueeze(1)
    centre = (centre * scale - (scale - 1) / 2 + cells) * stride
    extent = extent * torch.tensor(anchors, device=x.device, dtype=x.dtype).reshape(1, count, 2, 1, 1)
    boxes = torch.cat([centre, extent, scores[:, :, :1] * scores[:, :, 1:]], 2)
    return boxes.permute(0, 2, 1, 3, 4).reshape(batch, channels // count - 1, count * height * width)


def avgpool(context: LayerContext, section: CfgSection, inputs: Sequence[LayerOutput]) -> LayerOutput:
    """Add the mean over the image."""
    (value,) = inputs
    return LayerOutput(context.call(context.nn.AdaptiveAvgPool2d(1), value.node), value.channels, value.stride)


def softmax(context: LayerContext, section: CfgSection, inputs: Sequence[LayerOutput]) -> LayerOutput:
    """Add the class probabilities."""
    (value,) = inputs
    return LayerOutput(context.call(context.nn.Softmax(1), value.node), value.channels, value.stride)


def dropout(context: LayerContext, section: CfgSection, inputs: Sequence[LayerOutput]) -> LayerOutput:
    """Return the input: dropout is off in inference."""
    return inputs[0]


LAYER_KINDS: dict[str, Layer] = {
    layer.__name__: layer
    for layer in (convolutional, maxpool, upsample, route, shortcut, yolo, avgpool, softmax, dropout)
}


def _make_activation(context: LayerContext, section: CfgSection, default: str) -> Any:
    name = section.text("activation", default)
    if name not in ACTIVATIONS:
        raise section.make_error(f"the activation {name!r} isn't supported; supported are {', '.join(ACTIVATIONS)}")
    layer = getattr(context.nn, ACTIVATIONS[name])
    return layer(LEAKY_SLOPE) if name == "leaky" else layer()


# Darknet's .weights files: a header, then the values of each convolution in the order of the layers

WEIGHTS_SUFFIX = ".weights"
WEIGHT_TYPE = np.dtype("<f4")


class WeightReader:
    """Sequential reader of a file's values, which are read only on demand."""

    def __init__(self, path: str) -> None:
        self.path, file = path, Path(path)
        size = file.stat().st_size if file.is_file() else -1
        if size < 0:
            raise UserError(f"checkpoint {path} doesn't exist")
        header = np.fromfile(file, "<i4", 3)
        if header.size < 3:
            raise UserError(f"checkpoint {path} is too short to be weights of Darknet's")
        major, minor, _ = (int(n) for n in header)
        # The number of seen images has eight bytes since version 0.2.
        start = 12 + (8 if major * 10 + minor >= 2 and major < 1000 and minor < 1000 else 4)
        if size < start or (size - start) % WEIGHT_TYPE.itemsize:
            raise UserError(f"checkpoint {path} is cut short or not Darknet's: its {size} bytes end within a value")
        self.remaining = (size - start) // WEIGHT_TYPE.itemsize
        self._values = (
            np.memmap(file, WEIGHT_TYPE, "r", start, (self.remaining,)) if self.remaining else np.empty(0, WEIGHT_TYPE)
        )

    def take(self, shape: tuple[int, ...], label: str) -> np.ndarray:
        """Return the next values in that shape; raise a `UserError` that names `label` if too few remain."""
        count = int(np.prod(shape))
        if count > self.remaining:
            raise UserError(
                f"the weights in {self.path} don't fit the model: they end in {label}, which needs {count:,} values "
                f"where {self.remaining:,} are left"
            )
        start = len(self._values) - self.remaining
        self.remaining -= count
        return np.array(self._values[start : start + count]).reshape(shape)


def load_weights(layers: Any, path: str, lines: Sequence[int], cfg: str) -> None:
    """Load the file's values into a network's convolutions; `lines` are its layers' lines in the .cfg.

    Raise a `UserError` that names the layer in which the values end, or the number left over.
    """
    import torch

    values = WeightReader(path)
    for key, layer in layers.named_children():
        convolution = getattr(layer, "conv", None)
        if convolution is None:
            continue
        label = f"layer {key} ([convolutional] in line {lines[int(key)]} of {cfg})"
        norm = getattr(layer, "norm", None)
        # Darknet's order: bias, then scale, mean and variance of a batch norm, then the weights.
        first = [convolution.bias] if norm is None else [norm.bias, norm.weight, norm.running_mean, norm.running_var]
        with torch.no_grad():
            for target in (*first, convolution.weight):
                target.copy_(torch.from_numpy(values.take(tuple(target.shape), label)))
    if values.remaining:
        raise UserError(
            f"the weights in {path} don't fit the model: {values.remaining:,} values are left over after the last "
            f"layer of {cfg}"
        )


MAX_SIDE = 1 << 14  # pixels of a side
LAYER_REFERENCES = {"route": "layers", "shortcut": "from"}  # keys with numbers of other layers


def is_supported(model: ModelSpec) -> bool:
    """Return whether the model's weights are Darknet's.

    Raise a `UserError` if they lack the .cfg, which is needed to load them.
    """
    is_darknet = model.weights.endswith(WEIGHTS_SUFFIX)
    if is_darknet and not model.source.startswith("darknet:"):
        raise UserError(f"{model.weights} has Darknet's weights, which need the .cfg that they belong to as the model")
    return is_darknet


class Darknet(ModelSource):
    """`darknet:FILE.cfg`: the network of a .cfg with random weights or a .weights file's or checkpoint's."""

    name = "darknet"
    form = "darknet:FILE.cfg"
    takes_image = True
    says_purpose = True

    def build(self, model: ModelSpec, rest: str, dims: Dims | None, state: Mapping[str, Any] | None) -> Any:
        check_unchanged(rest, model.source_sha256, "model file")
        network = _build_network(rest)
        purpose: Purpose = network.purpose
        if model.channels != network.channels:
            raise UserError(f"{rest} takes images of {network.channels} channels; give --channels {network.channels}")
        if model.classes is not None and purpose.classes and model.classes != purpose.classes:
            raise UserError(
                f"{rest} has {purpose.classes} classes, not {model.classes}; change classes and filters there"
            )
        if model.pretrained:
            raise UserError(f"{rest} has no published weights here; give them with --weights FILE.weights")
        if is_supported(model):
            load_weights(network.layers, model.weights, network.lines, rest)
        return network

    def read_image_config(self, model: ModelSpec, rest: str) -> ImageConfig:
        """Return the preprocessing of images (None without a yolo layer), and the size in [net]."""
        head, *sections = read_cfg(rest)
        has_boxes = any(section.kind == "yolo" for section in sections)
        size = head.read_number("height", 416, 1, MAX_SIDE), head.read_number("width", 416, 1, MAX_SIDE)
        return find_task("detect").preprocess(model.channels) if has_boxes else None, size

    def read_purpose(self, model: ModelSpec, rest: str, module: Any) -> Purpose:
        """Return task, classes and stride; no task if the network has no boxes."""
        purpose: Purpose = module.purpose
        return purpose


DARKNET = Darknet()


def _build_network(path: str) -> Any:
    """Build the module: B x channels x H x W to B x (4 + classes) x boxes, or to B x classes without a yolo layer."""
    import torch

    head, *sections = read_cfg(path)
    graph, root = torch.fx.Graph(), torch.nn.Module()
    root.layers = torch.nn.ModuleDict()
    image = LayerOutput(graph.placeholder("image"), head.read_number("channels", 3, 1, 1 << 10), 1.0)
    values: list[LayerOutput] = []
    for index, section in enumerate(sections):
        if section.kind not in LAYER_KINDS:
            raise section.make_error(f"this layer isn't supported; supported are {', '.join(LAYER_KINDS)}")

        def add_call(module: Any, node: Any, index: int = index) -> Any:
            root.layers[str(index)] = module
            return graph.call_module(f"layers.{index}", (node,))

        inputs = _find_inputs(index, section, image, values)
        values.append(LAYER_KINDS[section.kind](LayerContext(graph, add_call, torch.nn), section, inputs))
    heads = [value for value in values if value.classes]
    nodes = [value.node for value in heads]
    result = graph.call_function(torch.cat, (nodes, 2)) if len(nodes) > 1 else (nodes or [values[-1].node])[0]
    graph.output(result if heads else graph.call_function(torch.flatten, (result, 1)))
    network = torch.fx.GraphModule(root, graph, "Darknet")
    network.channels, network.lines = image.channels, [section.line for section in sections]
    network.purpose = _find_purpose(path, values)
    return network


def _find_inputs(index: int, section: CfgSection, image: LayerOutput, values: list[LayerOutput]) -> list[LayerOutput]:
    """Return the inputs of the section's layer; negative numbers in the file are relative to it."""
    previous = values[-1] if values else image
    if section.kind not in LAYER_REFERENCES:
        return [previous]
    option = LAYER_REFERENCES[section.kind]
    references = section.read_numbers(option, int)
    indices = [index + k if k < 0 else k for k in references]
    if not indices or not all(0 <= k < index for k in indices):
        raise section.make_error(
            f"{option}={section.text(option)} must name layers before it, which are 0 to {index - 1}"
        )
    inputs = [values[k] for k in indices]
    inputs = inputs if section.kind == "route" else [previous, *inputs]
    if len({value.stride for value in inputs}) > 1:
        raise section.make_error(f"{option}={section.text(option)} puts layers of different sizes together")
    return inputs


def _find_purpose(path: str, values: list[LayerOutput]) -> Purpose:
    classes = {value.classes for value in values if value.classes}
    if len(classes) > 1:
        raise UserError(f"{path} has yolo layers of {' and '.join(map(str, sorted(classes)))} classes; make them equal")
    stride = max(1, *(int(value.stride) for value in values))
    return Purpose(task="detect", classes=classes.pop(), stride=stride) if classes else Purpose(stride=1)
