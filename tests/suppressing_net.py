"""An ONNX detector with non-maximum suppression inside and many boxes of equal scores."""

from pathlib import Path

import numpy as np
import onnx
from onnx import helper as h
from onnx import numpy_helper, parser

SIZE, CELL, CLASSES = 64, 8, 3
# Scores of only four values, for ties. Engines return the kept boxes by class or by score.
BODY = """
    c = Conv<strides = [8, 8]>(image, w)
    p = Sigmoid(c)
    p4 = Mul(p, steps)
    whole = Round(p4)
    stepped = Div(whole, steps)
    every = Reshape(stepped, by_class)
    d = Conv<strides = [8, 8]>(image, v)
    t = Tanh(d)
    t4 = Reshape(t, by_side)
    moved = Transpose<perm = [0, 2, 1]>(t4)
    off = Mul(moved, cell)
    shift, bulk = Split<axis = 2, num_outputs = 2>(off)
    more = Abs(bulk)
    half = Add(more, cell)
    mid = Add(centre, shift)
    low = Sub(mid, half)
    high = Add(mid, half)
    corners = Concat<axis = 2>(low, high)
    kept = NonMaxSuppression(corners, every, most, iou, least)
    label = Gather<axis = 1>(kept, second)
    place = Gather<axis = 1>(kept, third)
    flat = Squeeze(corners, first_axis)
    found = Gather(flat, place)
    pair = Slice(kept, one, three, one)
    table = Squeeze(every, first_axis)
    score = GatherND(table, pair)
    n = Shape(score)
    scores, order = TopK(score, n)
    boxes = Gather(found, order)
    labels = Gather(label, order)
"""
ONE = """
    column = Unsqueeze(scores, one)
    named = Cast<to = 1>(labels)
    named2 = Unsqueeze(named, one)
    rows = Concat<axis = 1>(boxes, column, named2)
    boxes6 = Unsqueeze(rows, first_axis)
"""
OUTPUTS = {
    "separate": "float[n, 4] boxes, int64[n] labels, float[n] scores",  # as in torchvision
    "one": "float[1, n, 6] boxes6",
}


def write(path: Path, outputs: str = "separate") -> Path:
    """Write the network with separate boxes, labels and scores as outputs, or with six columns as "one"."""
    rng = np.random.default_rng(0)
    cells = SIZE // CELL
    grid = (np.stack(np.meshgrid(np.arange(cells), np.arange(cells)), -1).reshape(1, -1, 2) + 0.5) * CELL
    stored = {
        "w": (rng.normal(size=(CLASSES, 3, CELL, CELL)) / 6).astype(np.float32),
        "v": (rng.normal(size=(4, 3, CELL, CELL)) / 20).astype(np.float32),
        "centre": grid.astype(np.float32),
        "steps": np.float32(4), "cell": np.float32(CELL), "iou": np.float32(0.5), "least": np.float32(0.5),
        "by_class": np.int64([1, CLASSES, -1]), "by_side": np.int64([1, 4, -1]), "most": np.int64(100),
        "second": np.int64(1), "third": np.int64(2), "first_axis": np.int64([0]), "one": np.int64([1]),
        "three": np.int64([3]),
    }  # fmt: skip
    body = BODY + (ONE if outputs == "one" else "")
    graph = parser.parse_graph(f"det (float[1, 3, {SIZE}, {SIZE}] image) => ({OUTPUTS[outputs]}) {{{body}}}")
    graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items())
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return path
