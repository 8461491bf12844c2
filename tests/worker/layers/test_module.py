"""Calls of a module's parts: shapes, operations, times, ranges around them, and launched kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dyno.layers.counters import Kernel, find_owners
from dyno.worker.layers import module
from dyno.worker.nets import flops
from dyno.worker.spec import Unavailable, UserError

IMAGE = torch.zeros(1, 3, 224, 224)


def checked(net: Any, *args: Any) -> Any:
    """Read the net; check its totals against PyTorch's."""
    found = module.read(net, *args)
    count = sum(p.numel() for p in net.parameters())
    assert found.parameters == count == sum(layer.added for layer in found.layers)
    assert sum(layer.flops or 0 for layer in found.layers) == flops.of_module(net, *args)
    return found


def test_resnet18_rows_match_the_reference() -> None:
    torchvision = pytest.importorskip("torchvision")
    found = checked(torchvision.models.resnet18().eval().to("meta"), IMAGE.to("meta"))
    assert len(found.layers) == 68 and found.parameters == 11_689_512
    first, relu = found.layers[0], found.layers[2]
    assert (first.name, first.type, first.parameters) == ("conv1", "Conv2d", 9408)
    assert first.outputs[0].shape == (1, 64, 112, 112) and first.outputs[0].dtype == "float32"
    assert first.flops == 2 * 64 * 112 * 112 * 3 * 7 * 7
    assert relu.inputs[0].name == found.layers[1].outputs[0].name  # overwritten in place


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224"])
def test_totals_match_pytorch(name: str) -> None:
    checked(pytest.importorskip("timm").create_model(name).eval().to("meta"), IMAGE.to("meta"))


def test_totals_of_a_yolo_model_match_pytorch() -> None:
    pytest.importorskip("ultralytics")
    from ultralytics.nn.tasks import ClassificationModel

    checked(ClassificationModel("yolov8n-cls.yaml", verbose=False).eval(), torch.zeros(1, 3, 64, 64))


class Residual(nn.Module):
    """A residual sum with parts that are called twice, never, or do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.drop = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Dropout()
        self.unused, self.scale = nn.Linear(5, 6), nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.drop(self.relu(self.conv(x))) + x)


def test_repeated_calls_have_separate_rows() -> None:
    found = checked(nn.Sequential(Residual(), nn.Conv2d(4, 2, 1)).eval(), torch.zeros(2, 4, 8, 8))
    rows = {layer.name: layer for layer in found.layers}
    assert [layer.name for layer in found.layers] == ["0.conv", "0.relu", "0.drop", "0.relu", "0", "1", "0.unused"]
    assert rows["0.drop"].skipped and rows["0.unused"].skipped and not rows["0.unused"].outputs
    assert rows["0"].parameters == 7 and not rows["0"].skipped
    # The sum follows the second ReLU, which reads the first one's output through the dropout.
    first, second = found.layers[1], found.layers[3]
    assert second.inputs[0].name == first.outputs[0].name


def test_a_shared_weight_counts_once() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = one.weight
    found = checked(nn.Sequential(one, other), torch.zeros(1, 4))
    assert [layer.added for layer in found.layers] == [20, 4]
    assert [layer.parameters for layer in found.layers] == [20, 20]  # each part reads its weight


def test_a_part_that_is_called_again_reads_its_weights_again() -> None:
    one = nn.Linear(4, 4)
    found = checked(nn.Sequential(one, nn.ReLU(), one), torch.zeros(1, 4))
    assert [(layer.parameters, layer.added) for layer in found.layers] == [(20, 20), (0, 0), (20, 0)]


def test_attention_weights_belong_to_the_attention_layer() -> None:
    found = checked(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.zeros(1, 5, 16))
    rows = {layer.name: layer for layer in found.layers}
    assert rows["self_attn"].parameters == 3 * 16 * 17 and rows["self_attn"].flops


def test_modules_without_observable_parts_are_refused() -> None:
    net, image = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval(), torch.zeros(1, 2)
    with pytest.raises(UserError, match=r"it is TorchScript, .* dyno inspect MODEL onnx"):
        module.read(torch.jit.script(net), image)
    with pytest.raises(UserError, match=r"it is a program of torch.export, .* dyno inspect MODEL onnx"):
        module.read(torch.export.export(net, (image,)).module(), image)


def test_a_scripted_part_counts_for_its_caller() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
            self.body = torch.jit.script(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()).eval())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.body(self.first(x)).mean((2, 3)))

    rows = {layer.name: layer for layer in checked(Outer().eval(), torch.zeros(1, 3, 8, 8)).layers}
    assert [*rows] == ["first", "last", "", "body.0"] and rows[""].flops == 2 * 16 * 4 * 4 * 9
    assert (rows["body.0"].type, rows["body.0"].parameters, rows["body.0"].skipped) == ("Conv2d", 148, True)


def test_a_single_part_module_has_its_own_row() -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(1)

    assert [(layer.type, layer.skipped) for layer in module.read(Mean(), IMAGE).layers] == [("Mean", False)]
    assert [(layer.type, layer.skipped) for layer in module.read(nn.Identity(), IMAGE).layers] == [("Identity", True)]
    net = nn.Sequential(nn.ReLU())
    net.again = net[0]
    assert [layer.modules for layer in module.read(net, IMAGE).layers] == [("0", "again")] * 2


def test_own_time_excludes_the_time_of_parts() -> None:
    # The model calls a, then b, which calls a again; b has no row, so the model gets b's own 4 ns.
    marks = [(None, 0), (None, 1), ("a", 11), (None, 20), (None, 22), ("a", 25), ("b", 27), ("", 30)]
    rows = {("a", 0): 0, ("a", 1): 1, ("", 0): 2}
    assert module.sum_own_seconds(marks, rows, 3) == pytest.approx([10e-9, 3e-9, 17e-9])


class Calls(nn.Module):
    """A part called twice, a part never called, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.unused = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.relu(self.conv(x)) + x)


def test_every_call_is_timed_and_hooks_are_removed() -> None:
    net, x = Calls().eval(), torch.zeros(1, 4, 8, 8)
    found = module.measure_modules(net, lambda: net(x), lambda: net(x), 5)
    assert [layer.name for layer in found.graph.layers] == ["conv", "relu", "relu", "unused", ""]
    assert found.layers.shape == (5, 5) and found.run_seconds.shape == (5,)
    assert (found.layers[:, [0, 1, 2, 4]] > 0).all() and not found.layers[:, 3].any()
    assert (found.layers.sum(axis=1) <= found.run_seconds).all()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


Notes = list[tuple[str, str]]


class Twice(nn.Module):
    """A part called twice, a part that only calls others, and an operation of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.relu = nn.ReLU()

    def forward(self, x: Any) -> Any:
        return self.relu(self.relu(self.stem(x)) + 1)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Notes:
    notes: Notes = []

    @contextmanager
    def profile() -> Iterator[None]:
        notes.append(("start", ""))
        yield
        notes.append(("stop", ""))

    monkeypatch.setattr(torch.cuda.profiler, "profile", profile)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: notes.append(("push", name)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: notes.append(("pop", "")))
    return notes


def test_every_call_has_a_named_profiler_range(noted: Notes) -> None:
    net, x = Twice().eval(), torch.zeros(1, 3, 8, 8)
    module.run_ranges(net, lambda: net(x))
    assert noted[0] == ("start", "") and noted[-1] == ("stop", "")
    names = [name for kind, name in noted if kind == "push"]
    assert names == ["(model)", "stem.0", "stem.1", "relu", "relu#2"]
    depth = [sum((kind == "push") - (kind == "pop") for kind, _ in noted[: k + 1]) for k in range(len(noted))]
    assert min(depth) == depth[-1] == 0 and max(depth) == 2
    noted.clear()
    net(x)
    assert noted == [], "nothing of it is left on the module"


def test_hooks_are_removed_after_a_failed_call(noted: Notes) -> None:
    net = nn.Sequential(nn.Linear(3, 4)).eval()
    with pytest.raises(RuntimeError):
        module.run_ranges(net, lambda: net(torch.zeros(1, 5)))
    noted.clear()
    net(torch.zeros(1, 3))
    assert noted == []


def resnet() -> tuple[Any, Any]:
    return pytest.importorskip("torchvision").models.resnet18().eval(), torch.zeros(1, 3, 32, 32)


def vit() -> tuple[Any, Any]:
    return pytest.importorskip("timm").create_model("test_vit").eval(), torch.zeros(1, 3, 160, 160)


def mobile() -> tuple[Any, Any]:
    return pytest.importorskip("torchvision").models.mobilenet_v3_small().eval(), torch.zeros(1, 3, 32, 32)


@pytest.mark.parametrize("made", [resnet, vit, mobile])
def test_every_executed_layer_has_a_profiler_range(made: Callable[[], tuple[Any, Any]], noted: Notes) -> None:
    net, x = made()
    with torch.no_grad():
        inside = module.add_whole(module.read(net, x), net)
        module.run_ranges(net, lambda: net(x))
    open_ranges: list[str] = []
    kernels = []
    for kind, name in noted:  # one kernel launched at the end of each call
        if kind == "push":
            open_ranges.append(name)
        elif kind == "pop":
            kernels.append(Kernel("k", tuple(open_ranges)))
            open_ranges.pop()
    owners = find_owners(inside, kernels)
    ran = {k for k, layer in enumerate(inside.layers) if not layer.skipped}
    assert ran <= set(owners) and None not in owners


NET, X = Calls().eval(), torch.zeros(1, 4, 8, 8)


@torch.inference_mode()
def once() -> None:
    NET(X)


def measure(monkeypatch: pytest.MonkeyPatch, kernels: dict[str, float]) -> Any:
    """Simulate a GPU: each operator named in `kernels` launches a kernel of that many microseconds."""
    traced = module.trace_kernels

    def with_kernels(*args: Any) -> Any:
        events, whole = traced(*args)
        operators = [e for e in events if e.get("cat") == "cpu_op" and e["name"] in kernels]
        for k, operator in enumerate(operators):
            numbers = {"External id": operator["args"]["External id"], "correlation": k}
            base = {"ph": "X", "pid": 1, "tid": 1, "args": numbers}
            events.append({**base, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": operator["ts"], "dur": 2.0})
            events.append({**base, "cat": "kernel", "name": f"k_{operator['name']}", "ts": operator["ts"] + 1e5 * k,
                           "dur": kernels[operator["name"]]})  # fmt: skip
        return events, whole

    monkeypatch.setattr(module, "trace_kernels", with_kernels)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return module.measure_kernels(NET, once, lambda: NET(X), 5)


def test_layers_list_their_kernels_and_gpu_work(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure(monkeypatch, {"aten::conv2d": 7.0, "aten::relu": 3.0, "aten::add": 2.0})
    assert [(layer.name, layer.tactic) for layer in found.graph.layers] == [
        ("conv", "k_aten::conv2d"), ("relu", "k_aten::relu"), ("relu", "k_aten::relu"), ("unused", ""),
        ("", "k_aten::add"),
    ]  # fmt: skip
    assert found.layers == pytest.approx(np.tile([7e-6, 3e-6, 3e-6, 0, 2e-6], (5, 1))) and found.run_seconds.shape == (
        5,
    )
    assert found.work.busy == pytest.approx(np.full(5, 15e-6)) and found.work.calls == pytest.approx(np.full(5, 8e-6))
    assert found.work.kernels.tolist() == [4] * 5
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in NET.modules())


def test_a_profiler_that_sees_no_kernel_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="saw no kernel on the GPU"):
        measure(monkeypatch, {})
