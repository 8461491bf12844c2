"""A module in memory is a model: stored by its content, found again, and run by processes without its code."""

import subprocess
import sys
import types
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import described_nets
import dyno
from dyno import Study, UserError
from dyno.runner.run_folder import choose_folder
from dyno.worker.nets import saved_modules

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")

torch = pytest.importorskip("torch")
nn = torch.nn
QUICK: dict[str, Any] = {"rounds": 1, "seconds": 0.05, "block": 0.01, "warmup": 0.02, "compared": 4, "threads": 1}


class Small(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.drop(self.norm(self.conv(x))).mean((2, 3))


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("nets") / "nets.py"
    path.write_text(described_nets.TEXT)
    module = types.ModuleType("nets")
    module.__file__ = str(path)
    import sys

    sys.modules["nets"] = module
    exec(compile(described_nets.TEXT, str(path), "exec"), module.__dict__)
    return module


def test_equal_modules_are_one_file_and_stay_unchanged() -> None:
    net = Small().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    (one,), (again,) = Study(models=net, sizes="8").models, Study(models=[net], sizes=["8"]).models
    assert one == again and Path(one).name == "Small.pt2"
    assert net.training and net.drop.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    with torch.no_grad():
        net.conv.weight += 1
    assert Study(models=net, sizes="8").models != (one,)


class Scaled(nn.Module):  # type: ignore[misc, name-defined]
    """A module with differences outside its state dict."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.line, self.scale, self.table, self.both = nn.Linear(4, 4), scale, torch.full((4,), scale), [1.0, scale]
        self.register_buffer("shift", torch.full((4,), scale), persistent=False)


class ByAttribute(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) * self.table


class ByBuffer(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) + self.shift


class ByList(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) * torch.tensor(self.both)[1]


class ByBranch(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 1e9):
            return self.line(x)
        return self.line(x) * self.scale


@pytest.mark.parametrize("kind", [ByAttribute, ByBuffer, ByList, ByBranch])
@pytest.mark.parametrize("scripted", [False, True])
def test_modules_that_differ_outside_their_state_dict_are_two_files(kind: Any, scripted: bool) -> None:
    x, line, stored = torch.ones(2, 4), nn.Linear(4, 4), []
    for scale in (1.0, 3.0, 1.0):
        net = kind(scale).eval()
        net.line = line
        stored += Study(models=(torch.jit.script(net) if scripted else net, x)).models
        with torch.inference_mode():
            assert torch.allclose(saved_modules.load(stored[-1])(x), net(x))
    assert stored[0] == stored[2] != stored[1]


class Tied(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Any) -> Any:
        return self.head(self.embed(ids).mean(1))


def test_shared_weights_count_once(tmp_path: Path) -> None:
    study = Study(models=(Tied(), torch.ones(2, 7, dtype=torch.int64)), backends=("pytorch", "onnxruntime"), **QUICK)
    table = study.run(tmp_path / "run", quiet=True).to_pandas()
    assert list(table["status"]) == ["ok", "ok"] and list(table["parameters"]) == [400, 400]


def test_a_study_of_modules_is_stored_as_text_and_resumes(tmp_path: Path) -> None:
    study = Study(models=Small().eval(), backends="pytorch", sizes=[8], batches=(1, 3), **QUICK)
    path = tmp_path / "study.toml"
    path.write_text(study.to_toml())
    assert Study.from_toml(path) == study and choose_folder(study)[0].name == "Small"
    result = study.run(tmp_path / "run", quiet=True)
    assert list(result.to_pandas()["status"]) == ["ok", "ok"] and set(result.to_pandas()["model"]) == {"Small"}
    records = sorted(tmp_path.glob("run/trials/*/r0/record.json"))
    written = [record.stat().st_mtime_ns for record in records]
    study.run(tmp_path / "run", quiet=True)
    assert [record.stat().st_mtime_ns for record in records] == written


def test_threads_may_create_studies_in_parallel() -> None:
    nets = [Small().eval() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        studies = [*pool.map(lambda net: Study(models=net, sizes=[8]), nets)]
    assert len({study.models for study in studies}) == 3


@pytest.mark.slow
def test_a_thread_may_store_a_module_after_another_thread_ended(tmp_path: Path) -> None:
    """Without a GPU, PyTorch alone ends with a segmentation fault here."""
    program = """
import threading, torch, dyno

def store(net):
    print(dyno.Study(models=net, size=8).models)

for outputs in (3, 4):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, outputs, 3), torch.nn.Flatten())
    thread = threading.Thread(target=store, args=(net,))
    thread.start()
    thread.join()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and len({*done.stdout.split()}) == 2


@pytest.mark.parametrize("name", ["tokens", "data", "lstm", "quantised", "script"])
def test_stored_modules_answer_like_the_original(nets: Any, name: str, tmp_path: Path) -> None:
    net = getattr(nets, name)().eval()
    rng = np.random.default_rng(0)
    arrays = {
        "tokens": {"input_ids": rng.integers(0, 50, (4, 12)), "attention_mask": np.ones((4, 12), np.int64)},
        "data": {"x": rng.standard_normal((4, 3, 8, 8), np.float32)},
        "lstm": {"input": rng.standard_normal((4, 7, 6), np.float32)},
        # Layers take their ranges from the whole batch, with one far larger input.
        "quantised": {"input": rng.standard_normal((4, 3, 8, 8), np.float32) * np.float32([[[[1]]], [[[8]]]] * 2)},
        "script": {"x": rng.standard_normal((4, 12), np.float32)},
    }[name]
    examples = {key: torch.from_numpy(array) for key, array in arrays.items()}
    given = examples if name == "tokens" else next(iter(examples.values()))
    (model,) = Study(models=(net, given)).models
    feeds = tmp_path / "feeds.npz"
    np.savez(feeds, **arrays)
    study = Study(models=model, backends="pytorch", batches=4, inputs=[feeds], **QUICK)
    (trial,) = study.run(tmp_path / "run", quiet=True).records
    assert trial.status == "ok", trial.reason
    with torch.inference_mode():
        want = net(**given) if isinstance(given, dict) else net(given)
    first = want.logits if name == "data" else want[0] if isinstance(want, tuple) else want
    np.testing.assert_allclose(trial.outputs()["output"], first.numpy(), 1e-3, 1e-4)
    assert trial.facts.precision_truth.ok == (name not in ("lstm", "quantised")), "those of the others are seen"


def test_size_and_batch_come_from_the_example(tmp_path: Path) -> None:
    study = Study(models=(Small().eval(), torch.randn(2, 3, 16, 24)), backends="pytorch", **QUICK)
    (trial,) = study.run(tmp_path / "run", quiet=True).records
    assert (trial.status, trial.batch, trial.size) == ("ok", 2, "16x24")
    assert trial.facts.layers_by_type == {"float32": 1} and trial.facts.precision_truth.ok


def test_modules_and_paths_can_be_mixed(nets: Any) -> None:
    given = [(nets.lstm(), nets.lstm_inputs()), (nets.two(), nets.two_inputs()), Path("somewhere/m.onnx")]
    assert [Path(model).name for model in Study(models=given).models] == ["LSTM.pt2", "Two.pt2", "m.onnx"]


def test_a_container_is_one_module() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    assert [Path(model).name for model in Study(models=net, sizes="8").models] == ["Sequential.pt2"]


@pytest.mark.parametrize("inputs", [torch.zeros(1, 4), [torch.zeros(1, 4)], {"input": torch.zeros(1, 4)}, 5])
def test_example_inputs_are_given_with_their_module(inputs: Any) -> None:
    with pytest.raises(UserError, match=r"give example inputs beside their module: \(net, x\)"):
        Study(models=nn.Linear(4, 3), inputs=inputs)


def test_paths_are_accepted_as_text(tmp_path: Path) -> None:
    study = Study(models=Path("m.onnx"), data=tmp_path, weights=tmp_path / "w.pt", calibration=tmp_path / "c")
    assert (study.models, study.data) == (("m.onnx",), str(tmp_path))
    assert (study.weights, study.calibration) == (str(tmp_path / "w.pt"), str(tmp_path / "c"))


class Counting(nn.Module):  # type: ignore[misc, name-defined]
    """A module that changes one buffer in place, and replaces the second."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.last = x.mean()
        return x / self.calls


def test_buffers_changed_by_calls_are_restored() -> None:
    net, x = Counting(), torch.randn(2, 3)
    last, (one,) = net.last, Study(models=(net, x)).models
    assert (net.calls.item(), net.last.item()) == (0, 0) and net.last is last
    assert torch.export.load(one).state_dict["calls"] == 0
    assert (one,) == Study(models=(net, x)).models


Pair = namedtuple("Pair", "first second")


class Worded(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        return {"result": x + 1, "kind": "plain"}


class Paired(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        return Pair(x + 1, x + 2)


@pytest.mark.parametrize(("kind", "count"), [(Worded, 1), (Paired, 2)])
def test_unsupported_result_types_are_stored_as_tensors(kind: Any, count: int) -> None:
    x = torch.randn(2, 3)
    (path,) = Study(models=(kind(), x)).models
    results = saved_modules.load(path)(x)
    assert len(results) == count and all(torch.equal(result, x + (1 + k)) for k, result in enumerate(results))


class Bad(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        import random

        return x * 2 if x.sum() > random.random() else x


class Sloped(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        return torch.autograd.grad((x * x).sum(), x.requires_grad_())[0]


def test_exported_programs_and_frozen_scripts_are_models() -> None:
    net, x = nn.Conv2d(3, 4, 3).eval(), torch.randn(2, 3, 8, 8)
    program = torch.export.export(net, (x,))
    scripted = torch.jit.freeze(torch.jit.script(net))
    for given in (program, (program, (x,)), (program.module(), (x,)), (scripted, (x,))):
        (path,) = Study(models=given).models
        assert torch.allclose(saved_modules.load(path)(x), net(x), atol=1e-5)


class Alone(nn.Module):  # type: ignore[misc, name-defined]
    """A module with another answer for a single row, which torch.export assumes to equal that of a batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3 if x.shape[0] == 1 else x * 2


class Halves(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) if x.shape[2] * x.shape[3] % 32 else x.mean((2, 3)) * 2


def test_stored_modules_answer_alike_at_one_row_and_every_size() -> None:
    (path,) = Study(models=(Alone(), torch.randn(2, 3))).models
    for rows in (1, 2):
        assert torch.equal(saved_modules.load(path)(torch.ones(rows, 3)), Alone()(torch.ones(rows, 3)))
    net = Halves().eval()
    for sizes in (["8"], ["8", "5"]):  # the first is stored as a program, found by the second
        (path,) = Study(models=net, sizes=sizes).models
    for size in (8, 5):
        assert torch.equal(saved_modules.load(path)(torch.ones(2, 3, size, size)), net(torch.ones(2, 3, size, size)))
    sides = {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    program = torch.export.export(net, (torch.ones(2, 3, 8, 8),), dynamic_shapes=(sides,))
    if hasattr(program.module(), "_guards_fn"):
        with pytest.raises(UserError, match=r"holds for the shapes of its example and not for .*3x5x5"):
            Study(models=program, sizes=["5"])


class Noisy(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        import random

        return x + random.random()


class Growing(nn.Module):  # type: ignore[misc, name-defined]
    calls: Any = ()

    def forward(self, x: Any) -> Any:
        self.calls = (*self.calls, x)
        return x + len(self.calls)


class Dropping(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        return nn.functional.dropout(x, 0.5, training=True)


@pytest.mark.parametrize("kind", [Noisy, Growing])
def test_modules_that_change_between_calls_are_not_frozen(kind: Any) -> None:
    said = r"can't be handed to other processes .*the same at each call, and the module's change.* FILE.py:FUNCTION"
    with pytest.raises(UserError, match=said):
        Study(models=(kind(), torch.randn(2, 3)))
    (path,) = Study(models=(Dropping(), torch.randn(2, 300))).models
    dropping, x = saved_modules.load(path), torch.ones(2, 300)
    assert not torch.equal(dropping(x), dropping(x)), "what PyTorch draws is drawn again"


@pytest.mark.parametrize("models", [(torch.nn.ReLU(), torch.zeros(1, 3), torch.zeros(1)), torch.zeros(1, 3)])
def test_a_tensor_is_not_a_model(models: Any) -> None:
    with pytest.raises(UserError, match=r"a tensor is not a model; .* models=\(net, \(x, y\)\)"):
        Study(models=models)


def test_unexportable_modules_are_refused_in_one_line(nets: Any) -> None:
    with pytest.raises(UserError, match=r"Bad can't be handed to other processes .* give that as FILE.py:FUNCTION"):
        dyno.Study(models=(Bad(), torch.randn(2, 3)))
    with pytest.raises(UserError, match=r"Tokens refuses input.*; give example inputs too: models=\(module, inputs\)"):
        dyno.Study(models=nets.tokens(), sizes="8")
    for given, said in (
        (lambda x: x, "the model <lambda> is not a torch.nn.Module; call it"),
        (Bad, "the model Bad is not a torch.nn.Module; call it"),
        ((nn.Linear(4, 4).half(), torch.randn(1, 4).half()), r"its weights are float16: give module\.float\(\), since"),
        (nn.LazyConv2d(4, 3), "LazyConv2d has lazy weights, which its first call makes; call it once on an input"),
        (Sloped(), "Sloped refuses .*; it computes gradients, which are off while it is measured"),
        ((nn.Bilinear(4, 4, 2), None), r"Bilinear takes input1, input2, .*; give example inputs too: models=\(module"),
        ((nn.Linear(4, 4), torch.zeros(0, 4)), "an example input of Linear has no elements"),
        ((nn.Linear(4, 4, device="meta"), torch.randn(1, 4)), r"Linear has no weights yet \(device meta\)"),
        ((nn.Linear(4, 4), torch.randn(1, 5)), r"Linear refuses input 1x5 float32: [^;]*$"),
    ):
        with pytest.raises(UserError, match=said):
            dyno.Study(models=given)
