"""Networks with inputs other than one image run in every engine from one description of the inputs."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import described_nets
import dyno

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")
pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")

ENGINES = ("pytorch", "onnxruntime", "openvino")
QUICK = ("--routes", "usual", "--compared", 4, "--threads", 1,
         "--rounds", 1, "--seconds", 0.02, "--block", 0.01, "--warmup", 0.01, "--boundaries", "model")  # fmt: skip


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(described_nets.TEXT)
    return tmp_path / "nets.py"


def table(folder: Path) -> pd.DataFrame:
    return dyno.load(folder).to_pandas().set_index("backend")


def outputs(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    return {trial.backend: trial.outputs() for trial in dyno.load(folder).records}


@pytest.mark.parametrize(
    ("name", "words", "batch", "size", "shape"),
    [
        ("two", (), 2, "16", (4, 4)),
        ("tokens", ("--batch", 3), 3, "", (4, 3)),
        ("bare", ("--shapes", "input_ids:batchx8:int64"), 1, "", (4, 3)),
        ("lstm", (), 3, "", (4, 7, 5)),
        ("audio", ("--shapes", "input:2x1x16000"), 2, "", (4, 3)),
        ("keyword", ("--size", 16), 1, "16", (4, 4)),
        ("data", ("--size", 16), 1, "16", (4, 4)),
        ("dictionary", ("--size", 16), 1, "16", (4, 4)),
        ("cond", ("--size", 16), 1, "16", (4, 4)),
        ("script", ("--shapes", "x:2x12"), 2, "", (4, 3)),
        ("rate", ("--shapes", "x:1x1x400", "--input", "sr=8000"), 1, "", (4, 4)),
    ],
)
def test_every_engine_runs_described_inputs_and_agrees(
    call: Any, nets: Path, name: str, words: tuple[Any, ...], batch: int, size: str, shape: tuple[int, ...]
) -> None:
    call("run", f"nets.py:{name}", "--backend", ",".join(ENGINES), *QUICK, "--out", "r", *words, code=0)
    rows = table(Path("r"))
    assert sorted(rows.index) == sorted(ENGINES) and set(rows["status"]) == {"ok"}
    assert set(rows["batch"]) == {batch} and set(rows["size"].astype(str)) == {size or "0"}
    found = outputs(Path("r"))
    assert found["pytorch"]["output"].shape == shape
    for engine in ENGINES[1:]:
        assert found[engine].keys() == found["pytorch"].keys()
        for output, want in found["pytorch"].items():
            np.testing.assert_allclose(found[engine][output], want, 1e-3, 1e-4)
    assert len({trial.facts.inputs_sha256 for trial in dyno.load("r").records}) == 1


def test_a_pytorch_quantised_module_runs_in_pytorch_and_fails_to_export(call: Any, nets: Path) -> None:
    call("run", "nets.py:quantised", "--backend", "pytorch,onnxruntime", *QUICK, "--size", 8, "--out", "r", code=3)
    rows = table(Path("r"))
    assert dict(rows["status"]) == {"pytorch": "ok", "onnxruntime": "failed"}
    assert "quantised dynamically by PyTorch, and such layers have no ONNX form" in rows["reason"]["onnxruntime"]
    (trial,) = [t for t in dyno.load("r").records if t.backend == "pytorch"]
    assert trial.facts.weights_sha256 and trial.facts.layers_by_type == {"float32": 1, "int8": 2}


def test_a_statically_quantised_module_gets_the_int8_tolerance(call: Any, nets: Path) -> None:
    backends = ("--backend", "pytorch,onnxruntime,openvino")
    call("run", "nets.py:statically", *backends, *QUICK, "--size", 8, "--out", "r", code=0)
    rows = table(Path("r"))
    assert set(rows["status"]) == {"ok"} and rows["outputs"].tolist() == ["", "agree", "agree"]
    assert rows["ran_as"]["pytorch"] == "8 int8"


def test_compiled_with_several_inputs_and_keywords(call: Any, nets: Path) -> None:
    call("run", "nets.py:tokens", "--backend", "pytorch,compile", *QUICK, "--out", "r", code=0)
    found = outputs(Path("r"))
    np.testing.assert_allclose(found["compile"]["output"], found["pytorch"]["output"], 1e-3, 1e-4)


def test_exports_keep_input_names_and_a_free_batch(call: Any, nets: Path) -> None:
    call("export", "nets.py:tokens", "-o", "t.onnx", code=0)
    inputs = onnx.load("t.onnx").graph.input
    assert [value.name for value in inputs] == ["input_ids", "attention_mask"]
    assert {value.type.tensor_type.elem_type for value in inputs} == {onnx.TensorProto.INT64}
    assert {value.type.tensor_type.shape.dim[0].dim_param for value in inputs} == {"batch"}
    alike = ("--compared", 4, "--threads", 1, "--least", 1)
    call("diff", "nets.py:tokens", "t.onnx", "--input", "input_ids=0..49", *alike, code=0)


def test_only_axes_that_follow_the_batch_are_free(call: Any, nets: Path) -> None:
    assert call("export", "nets.py:unbatched", "-o", "u.onnx")[0] == 0
    x, table = onnx.load("u.onnx").graph.input
    assert x.type.tensor_type.shape.dim[0].dim_param == "batch"
    assert [dim.dim_value for dim in table.type.tensor_type.shape.dim] == [5, 4]


def test_a_batch_unsupported_by_the_model_is_refused(call: Any, refused: Any, nets: Path) -> None:
    usual = ("nets.py:fixed", "--backend", "pytorch", *QUICK)
    assert "the model takes only batch 2, not 3" in refused("run", *usual, "--batch", 3)
    assert call("run", *usual, "--out", "r")[0] == 0
    assert set(table(Path("r"))["batch"]) == {2}


def test_every_engine_takes_an_input_of_length_0(call: Any, tmp_path: Path) -> None:
    """A cache is empty at the first step; ONNX Runtime once treated that axis as free and asked for its shape."""
    (tmp_path / "step.py").write_text(
        "import torch\n\nclass Step(torch.nn.Module):\n    def forward(self, x, past):\n"
        "        return torch.cat([x, past], 1) * 2\n\ndef step(): return Step()\n\n"
        "def step_inputs(): return torch.ones(1, 3, 4), torch.zeros(1, 0, 4)\n"
    )
    engines = ("--backend", "pytorch,onnxruntime,openvino", "--precision", "fp32")
    call("run", "step.py:step", *engines, *QUICK, "--out", "r", code=0)
    assert {name: found["output"].shape for name, found in outputs(Path("r")).items()} == dict.fromkeys(
        ("pytorch", "onnxruntime", "openvino"), (4, 3, 4)
    )
    call("export", "step.py:step", "-o", "step.onnx", "--batch", 1, code=0)
    call("run", "step.onnx", "--backend", "onnxruntime,openvino", *QUICK, "--out", "f", code=0)


def test_an_array_named_input_feeds_the_only_input(call: Any, tmp_path: Path) -> None:
    (tmp_path / "double.py").write_text(
        "import torch\n\nclass Double(torch.nn.Module):\n    def forward(self, pixels):\n        return 2 * pixels\n"
    )
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    np.savez("feeds.npz", input=x)
    call("run", "double.py:Double", "--backend", "pytorch", *QUICK, "--input", "feeds.npz", "--out", "r", code=0)
    np.testing.assert_allclose(outputs(Path("r"))["pytorch"]["output"][:4], 2 * x)


def test_arrays_from_a_file_are_fed(call: Any, nets: Path) -> None:
    x = np.random.default_rng(0).standard_normal((4, 1, 400)).astype(np.float32)
    np.savez("feeds.npz", x=x)
    words = ("--input", "feeds.npz", "--input", "sr=16000", "--batch", 2)
    call("run", "nets.py:rate", "--backend", "pytorch", *QUICK, *words, "--out", "r", code=0)
    import torch

    from dyno.worker.nets import models
    from dyno.worker.spec import ModelSpec

    net = models.load(ModelSpec("rate", "nets.py:rate"))
    with torch.inference_mode():
        want = net(torch.from_numpy(x), 16000).numpy()
    np.testing.assert_allclose(outputs(Path("r"))["pytorch"]["output"], want, 1e-4, 1e-5)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("nets.py:rate",), "rate takes x, sr, whose shapes and types are unknown; give --shapes x:1x3x224x224"),
        (("nets.py:rate", "--shapes", "y:1x2"), "the model has no input 'y'; its inputs: x, sr"),
        (("nets.py:audio",), "with --shapes input:SHAPE (followed by :int64 for token ids), or by"),
        (("nets.py:bare", "--input", "input_ids=0..9"), "'input_ids' has a range, but no shape; give --shapes"),
        (("nets.py:tokens", "--size", "32"), "tokens takes no image, so a size doesn't apply to it; omit it"),
        (("nets.py:two", "--shapes", "left:1x3x8x8", "--size", "16"), "an input of 8x8 pixels, and sizes 16x16"),
        (("nets.py:tokens", "--input", "absent.npz"), "absent.npz can't be read as arrays by input name"),
    ],
)  # fmt: skip
def test_unknown_inputs_are_refused_in_one_line(refused: Any, nets: Path, words: tuple[str, ...], line: str) -> None:
    assert line in refused("run", *words, "--backend", "pytorch", *QUICK)


TYPES = {
    "bool": 1, "int8": -128, "int16": -32768, "int32": -(2**31), "int64": 2**40 + 1, "uint8": 255, "uint16": 65535,
    "uint32": 2**32 - 1, "uint64": 2**63 + 2**40, "float16": -2.5, "float32": 0.125, "float64": -0.5,
}  # fmt: skip


def write_net_of_every_type(path: Path) -> None:
    """Write an ONNX network with an input of each type; the output is each value in float32, negated."""
    helper, kinds = onnx.helper, onnx.TensorProto
    of_type = {name: helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in TYPES}
    nodes = [helper.make_node("Cast", [name], [f"{name}_f"], to=kinds.FLOAT) for name in TYPES]
    nodes.append(helper.make_node("Concat", [f"{name}_f" for name in TYPES], ["all"], axis=1))
    nodes.append(helper.make_node("Neg", ["all"], ["y"]))
    inputs = [helper.make_tensor_value_info(name, kind, ["batch", 1]) for name, kind in of_type.items()]
    output = helper.make_tensor_value_info("y", kinds.FLOAT, ["batch", len(TYPES)])
    graph = helper.make_graph(nodes, "types", inputs, [output])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def test_inputs_of_every_type_take_values_and_arrays(call: Any, tmp_path: Path) -> None:
    write_net_of_every_type(tmp_path / "types.onnx")
    want = -np.array([[np.dtype(name).type(value) for name, value in TYPES.items()]], np.float64).astype(np.float32)
    fixed = [
        word for name, value in TYPES.items() for word in ("--input", f"{name}={value if name != 'bool' else 'true'}")
    ]
    run = ("run", "types.onnx", "--backend", "onnxruntime,openvino", *QUICK)
    call(*run, *fixed, "--out", "r", code=0)
    for backend, found in outputs(Path("r")).items():
        np.testing.assert_allclose(found["y"], want.repeat(4, axis=0), 1e-6, err_msg=backend)
    np.savez("feeds.npz", **{name: np.full((3, 1), value, name) for name, value in TYPES.items()})
    call(*run, "--input", "feeds.npz", "--out", "r2", code=0)
    for backend, found in outputs(Path("r2")).items():
        np.testing.assert_allclose(found["y"], want.repeat(4, axis=0), 1e-6, err_msg=backend)


def test_a_boolean_argument_gets_the_given_value(call: Any, tmp_path: Path) -> None:
    (tmp_path / "flag.py").write_text(
        "import torch\n\nclass Flag(torch.nn.Module):\n    def forward(self, x, flag):\n"
        "        return torch.where(flag, x * 2, x * 0)\n\ndef build():\n    return Flag()\n\n"
        "def build_inputs():\n    return {'x': torch.rand(2, 8) + 1, 'flag': torch.tensor(True)}\n"
    )
    for value, zero in (("true", False), ("false", True)):
        words = ("--input", f"flag={value}", "--backend", "pytorch", *QUICK, "--out", value)
        call("run", "flag.py:build", *words, code=0)
        assert (outputs(Path(value))["pytorch"]["output"] == 0).all() == zero


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("uint8=300", "input 'uint8' is uint8, whose values are 0 to 255, not 300"),
        ("int64=1.5", "input 'int64' is int64, so its values are whole numbers, not 1.5"),
        ("bool=2", "input 'bool' is bool, whose values are true or false, not 2"),
        ("float16=70000", "input 'float16' is float16, whose values are -65504 to 65504, not 70000"),
        ("feeds.npz", "has the value 0.5, which int64 doesn't have"),
    ],
)
def test_values_outside_the_type_are_refused(refused: Any, tmp_path: Path, word: str, line: str) -> None:
    write_net_of_every_type(tmp_path / "types.onnx")
    np.savez(tmp_path / "feeds.npz", int64=np.full((3, 1), 0.5))
    assert line in refused("run", "types.onnx", "--input", word)


TIME_FIRST = """
import torch
from torch import nn

class Recurrent(nn.Module):
    def __init__(self, last):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.last = nn.LSTM(3, 5), last
    def forward(self, x):
        steps, (state, _) = self.lstm(x)
        return state[0] if self.last else steps

def last(): return Recurrent(True)
def steps(): return Recurrent(False)
def last_inputs(): return torch.randn(7, 4, 3)

steps_inputs = last_inputs

class Merged(nn.Module):
    def forward(self, image): return image.mean((0, 2, 3), keepdim=True)

def merged(): return Merged()
"""


@pytest.mark.parametrize("name", ["last", "steps"])
def test_a_time_first_network_has_its_batch_on_the_second_axis(call: Any, tmp_path: Path, name: str) -> None:
    """Outputs in batches of three equal the module's outputs for all sequences at once."""
    import torch

    (tmp_path / "first.py").write_text(TIME_FIRST)
    call("run", f"first.py:{name}", "--backend", "pytorch", *QUICK, "--out", "r", code=0)
    assert [trial.batch for trial in dyno.load("r").records] == [4]
    arrays = np.random.default_rng(1).standard_normal((7, 9, 3)).astype(np.float32)
    np.savez("x.npz", x=arrays)
    words = ("--input", "x.npz", "--shapes", "x:7xbatchx3", "--batch", 3, "--compared", 9, "--out", "named")
    call("run", f"first.py:{name}", "--backend", "pytorch,onnxruntime", *QUICK, *words, code=0)
    nets: dict[str, Any] = {}
    exec(TIME_FIRST, nets)
    with torch.no_grad():
        want = nets[name]()(torch.from_numpy(arrays)).numpy()
    for trial in dyno.load("named").records:
        found = trial.outputs()["output"]
        np.testing.assert_allclose(found, want if name == "last" else want.transpose(1, 0, 2), 1e-3, 1e-4)


def test_a_time_first_module_in_memory_counts_sequences(tmp_path: Path) -> None:
    import torch

    net = torch.nn.LSTM(3, 5), torch.randn(7, 4, 3)
    result = dyno.Study(models=net, backends="pytorch", rounds=1, seconds=0.02, warmup=0.02).run(tmp_path / "r")
    assert [trial.batch for trial in result.records] == [4]


def test_a_module_that_merges_its_batch_fails_at_larger_batches(call: Any, tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(TIME_FIRST)
    words = ("--backend", "pytorch", *QUICK, "--size", 8, "--batch", "1,4", "--out", "r")
    code, _, err = call("run", "first.py:merged", *words)
    rows = dyno.load("r").to_pandas().set_index("batch")
    assert code == 3 and rows["status"].to_dict() == {1: "ok", 4: "failed"}, err
    assert "the outputs are 1 x 3 x 1 x 1 for a batch of 4, which has no row for each input" in rows["reason"][4]
