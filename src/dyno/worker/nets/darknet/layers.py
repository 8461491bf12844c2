"""Darknet's layers, as its documentation and its C code define them, of PyTorch's own modules.

The network is a `torch.fx` graph: so it has no classes of its own, which a module of the worker couldn't define without
importing torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dyno.worker.nets.darknet.cfg import CfgSection

EPSILON = 1e-5  # AlexeyAB's Darknet, which YOLOv4 comes from, adds it to the variance
LEAKY = 0.1
MOST_WEIGHTS = 1 << 29  # of one layer
BOX = 4
ACTIVATIONS = {
    "linear": "Identity", "leaky": "LeakyReLU", "relu": "ReLU", "relu6": "ReLU6", "mish": "Mish", "swish": "SiLU",
    "logistic": "Sigmoid", "tanh": "Tanh", "elu": "ELU",
}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """What a layer gives: its node in the graph, its channels, how many image pixels one of its pixels has along a
    side, and of a yolo layer its classes."""

    node: Any
    channels: int
    stride: float
    classes: int = 0


@dataclass(frozen=True)
class LayerContext:
    """Where a layer stands: the graph, what adds a module to it and returns the node of its call, and the torch.nn."""

    graph: Any
    call: Callable[[Any, Any], Any]
    nn: Any


Layer = Callable[[LayerContext, CfgSection, Sequence[Value]], Value]


def convolutional(place: LayerContext, section: CfgSection, inputs: Sequence[Value]) -> Value:
    """Add a convolution with batch norm or bias, and an activation."""
    (value,) = inputs
    filters, size = section.number("filters", 1, 1), section.number("size", 1, 1, 64)
    groups, dilation = section.number("groups", 1, 1), section.number("dilation", 1, 1, 64)
    if value.channels % groups or filters % groups:
        raise section.error(f"groups={groups} divides {value.channels} input channels and {filters} filters unevenly")
    if value.channels // groups * filters * size * size > MOST_WEIGHTS:
        raise section.error(f"{filters} filters of {value.channels // groups}x{size}x{size} are too many weights")
    padding = size // 2 * dilation if section.number("pad", 0) else section.number("padding", 0)
    stride, normalised = section.number("stride", 1, 1, 64), bool(section.number("batch_normalize", 0))
    layer = place.nn.Sequential()
    convolution = place.nn.Conv2d(value.channels, filters, size, stride, padding, dilation, groups, not normalised)
    layer.add_module("conv", convolution)
    if normalised:
        layer.add_module("norm", place.nn.BatchNorm2d(filters, EPSILON))
    layer.add_module("activation", _make_activation(place, section, "logistic"))
    return Value(place.call(layer, value.node), filters, value.stride * stride)


def maxpool(place: LayerContext, section: CfgSection, inputs: Sequence[Value]) -> Value:
    """Add a maximum pooling.

    Darknet pads `padding` pixels in all, of which the left and the upper side have the smaller half.
    """
    (value,) = inputs
    stride = section.number("stride", 1, 1, 64)
    size = section.number("size", stride, 1, 64)
    padding = section.number("padding", size - 1, 0, 63)
    before, after = padding // 2, padding - padding // 2
    if size == stride == 2 and padding == 1:  # what is added is only ever reached by the last window: PyTorch's ceil
        layer = place.nn.MaxPool2d(2, 2, ceil_mode=True)
    elif before == after and before <= size // 2:
        layer = place.nn.MaxPool2d(size, stride, before)
    else:
        pad = place.nn.ConstantPad2d((before, after, before, after), float("-inf"))
        layer = place.nn.Sequential(pad, place.nn.MaxPool2d(size, stride))
    return Value(place.call(layer, value.node), value.channels, value.stride * stride)


def upsample(place: LayerContext, section: CfgSection, inputs: Sequence[Value]) -> Value:
    """Add an upsampling that repeats each pixel `stride` times along both sides."""
    (value,) = inputs
    stride = section.number("stride", 2, 1, 64)
    layer = place.nn.Upsample(scale_factor=stride, mode="nearest")
    return Value(place.call(layer, value.node), value.channels, value.stride / stride)


def route(place: LayerContext, section: CfgSection, inputs: Sequence[Value]) -> Value:
    """Add the channels of several layers behind each other, or one group of the channels of each."""
    import torch

    groups, group = section.number("groups", 1, 1), section.number("group_id", 0)
    if group >= groups:
        raise section.error(f"group_id={group} must be less than groups={groups}")
    if any(value.channels % groups for value in inputs):
        channels = " and ".join(str(value.channels) for value in inputs)
        raise section.error(f"groups={groups} divides {channels} channels unevenly")
    nodes = [value.node for value in inputs]
    if groups > 1:
        parts = [place.graph.call_method("chunk", (node, groups, 1)) for node in nodes]
        nodes = [place.graph.call_function(operator.getitem, (part, group)) for part in parts]
    node = place.graph.call_function(torch.cat, (nodes, 1)) if len(nodes) > 1 else nodes[0]
    return Value(node, sum(value.channels for value in inputs) // groups, inputs[0].stride)


def shortcut(place: LayerContext, section: CfgSection, inputs: Sequence[Value]) -> Value:
    """Add the sum of layers of one shape."""
    if len({value.channels for value in inputs}) > 1:
        channels = " and ".join(str(value.channels) for value in inputs)
        raise section.error(f"it adds layers of {channels} channels; they must be equal")
    if section.text("weights_type", "none") != "none":
        raise section.error(f"weights_type={section.text('weights_type')} isn't supported; only none is")
    node = inputs[0].node
    for value in inputs[1:]:
        node = place.graph.call_function(operator.add, (node, value.node))
    layer = _make_activation(place, section, "linear")
    return Value(place.call(layer, node), inputs[0].channels, inputs[0].stride)


def yolo(place: LayerContext, section: CfgSection, inputs: Sequence[Value]) -> Value:
    """Add the boxes of a grid's cells: see `boxes`."""
    (value,) = inputs
    classes, pixels = section.number("classes", 20, 1), section.reals("anchors")
    if len(pixels) % 2:
        raise section.error(f"anchors are pairs of width and height, and {len(pixels)} numbers are given")
    anchors = [*zip(pixels[::2], pixels[1::2], strict=True)]
    mask = section.numbers("mask") or list(range(len(anchors)))
    if not anchors or not all(0 <= k < len(anchors) for k in mask):
        raise section.error(f"mask={section.text('mask')} must name some of the {len(anchors)} anchors, from 0")
    needed = len(mask) * (BOX + 1 + classes)
    if value.channels != needed:
        raise section.error(
            f"the layer before it has {value.channels} channels; {len(mask)} anchors of {classes} classes need {needed}"
        )
    scale, activated = section.real("scale_x_y", 1.0), bool(section.number("new_coords", 0))
    chosen = [anchors[k] for k in mask]
    node = place.graph.call_function(boxes, (value.node, chosen, int(value.stride), scale, activated))
    return Value(node, BOX + classes, value.stride, classes)


def boxes(x: Any, anchors: Sequence[tuple[float, float]], stride: int, scale: float, activated: bool) -> Any:
    """Decode boxes: B x (anchors * (5 + classes)) x H x W to B x (4 + classes) x (anchors * H * W).

    Centre, width and height are in input pixels, of which a cell has `stride` along a side; a score is the objectness
    times the class's probability, as in Darknet's detections. `activated`: by the convolution before (`new_coords`).
    """
    import torch

    batch, channels, height, width = x.shape
    count = len(anchors)
    x = x.reshape(batch, count, channels // count, height, width)
    centre, extent, scores = x[:, :, :2], x[:, :, 2:BOX], x[:, :, BOX:]
    if activated:
        extent = (extent * 2) ** 2
    else:
        centre, extent, scores = centre.sigmoid(), extent.exp(), scores.sigmoid()
    rows = torch.arange(height, device=x.device, dtype=x.dtype).reshape(1, 1, height, 1).expand(1, 1, height, width)
    columns = torch.arange(width, device=x.device, dtype=x.dtype).reshape(1, 1, 1, width).expand(1, 1, height, width)
    cells = torch.cat([columns, rows], 1).unsqueeze(1)
    centre = (centre * scale - (scale - 1) / 2 + cells) * stride
    extent = extent * torch.tensor(anchors, device=x.device, dtype=x.dtype).reshape(1, count, 2, 1, 1)
    every = torch.cat([centre, extent, scores[:, :, :1] * scores[:, :, 1:]], 2)
    return every.permute(0, 2, 1, 3, 4).reshape(batch, channels // count - 1, count * height * width)


def avgpool(place: LayerContext, section: CfgSection, inputs: Sequence[Value]) -> Value:
    """Add the mean over the image."""
    (value,) = inputs
    return Value(place.call(place.nn.AdaptiveAvgPool2d(1), value.node), value.channels, value.stride)


def softmax(place: LayerContext, section: CfgSection, inputs: Sequence[Value]) -> Value:
    """Add the probabilities of the classes."""
    (value,) = inputs
    return Value(place.call(place.nn.Softmax(1), value.node), value.channels, value.stride)


def dropout(place: LayerContext, section: CfgSection, inputs: Sequence[Value]) -> Value:
    """Add nothing: dropout is off in inference."""
    return inputs[0]


LAYERS: dict[str, Layer] = {
    layer.__name__: layer
    for layer in (convolutional, maxpool, upsample, route, shortcut, yolo, avgpool, softmax, dropout)
}


def _make_activation(place: LayerContext, section: CfgSection, default: str) -> Any:
    name = section.text("activation", default)
    if name not in ACTIVATIONS:
        raise section.error(f"the activation {name!r} isn't supported; supported are {', '.join(ACTIVATIONS)}")
    layer = getattr(place.nn, ACTIVATIONS[name])
    return layer(LEAKY) if name == "leaky" else layer()
