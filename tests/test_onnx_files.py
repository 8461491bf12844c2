"""Users' ONNX files through the command line: each runs, or ends in one clear line."""

import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnxruntime
import pytest
from onnx import helper as h
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

import drawn
import dyno
import onnx_text

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")

SHORT = "--rounds 1 --seconds 0.05 --block 0.01 --warmup 0.02 --boundaries model".split()
QUICK = [*SHORT, "--backend", "onnxruntime,openvino"]
KINDS = onnx.TensorProto


def network(
    shape: list[Any], *, channels: int = 3, opset: int = 17, ir: int = 8, kind: int = KINDS.FLOAT, more: str = ""
) -> Any:
    """Return a network of a convolution, a ReLU and a mean over the image; `more`: a custom operator after the ReLU."""
    rng = np.random.default_rng(0)
    dtype = h.tensor_dtype_to_np_dtype(kind)
    weights = {"w": rng.standard_normal((6, channels, 3, 3)), "b": rng.standard_normal(6)}
    last = shape[-1] == channels
    nodes = [
        *([h.make_node("Transpose", ["image"], ["x"], perm=[0, 3, 1, 2])] if last else []),
        h.make_node("Conv", ["x" if last else "image", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
        h.make_node("Relu", ["c"], ["r"]),
        *([h.make_node(more, ["r"], ["own"], domain="my.ops")] if more else []),
        h.make_node("GlobalAveragePool", ["own" if more else "r"], ["g"]),
        h.make_node("Flatten", ["g"], ["y"]),
    ]
    settings = {"kind": kind, "opset": opset, "ir": ir, "domains": ["my.ops"] if more else []}
    stored = {name: array.astype(dtype) for name, array in weights.items()}
    return onnx_text.of_nodes(nodes, {"image": shape}, {"y": [shape[0], 6]}, stored, **settings)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return drawn.photographs(tmp_path / "photos", count=6, height=45, width=54, block=9)


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "results.csv", newline="") as f:
        return list(csv.DictReader(f))


def measured(call: Any, model: Any, *words: object, backends: str = "onnxruntime,openvino") -> list[dict[str, str]]:
    onnx.save(model, "net.onnx")
    code, _, err = call("run", "net.onnx", *SHORT, "--backend", backends, "--out", "run", *words)
    found = rows(Path("run"))
    assert code == 0, (err, [row["reason"] for row in found])
    return found


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (network(["n", 24, 32, 3]), "24x32"),
        (network([1, 24, 24, 1], channels=1), "24"),
        (network(["n", 1, 24, 24], channels=1), "24"),
        (network([-1, 3, 24, 24]), "24"),
        (network(["n", 3, 24, 24], kind=KINDS.FLOAT16), "24"),
        (network(["n", 3, 24, 24], kind=KINDS.DOUBLE), "24"),
    ],
    ids="NHWC, grey NHWC, grey, batch -1, half precision, double precision".split(", "),
)
def test_files_of_many_kinds_run_in_fp32_and_int8(call: Any, photos: Path, model: Any, size: str) -> None:
    found = measured(call, model, "--precision", "fp32,int8", "--data", photos)
    assert [(row["status"], row["size"]) for row in found] == [("ok", size)] * 4
    if model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == -1:
        jobs = [json.loads(path.read_text()) for path in Path("run").glob("trials/*/r0/job.json")]
        assert all(any("(-1)" in line for line in job["artifact"]["made_by"]["warnings"]) for job in jobs)


def test_int8_needs_only_calibration_images(call: Any, photos: Path) -> None:
    found = measured(call, network(["n", 3, 24, 24]), "--precision", "fp32,int8", "--calibration", photos)
    assert [row["status"] for row in found] == ["ok"] * 4
    assert {row["top1"] for row in found} == {""}
    code, out, _ = call("export", "net.onnx", "-o", "q.onnx", "--precision", "int8", "--calibration", photos)
    assert code == 0 and "q.onnx" in out


def test_a_detector_in_int8_needs_only_calibration_images(call: Any, photos: Path) -> None:
    """The boxes are in pixels of the image before the letterbox, so image sizes are stored."""
    text = "(float[n, 3, 24, 24] image) => (float[n, 6, 576] boxes) { c = Conv(image, w) boxes = Reshape(c, shape) }"
    weight = np.random.default_rng(0).standard_normal((6, 3, 1, 1), np.float32)
    model = onnx_text.model(text, w=weight, shape=np.array([0, 6, -1]))
    found = measured(call, model, "--task", "detect", "--classes", 2, "--calibration", photos)
    assert [row["status"] for row in found] == ["ok"] * 2


@pytest.mark.parametrize(("change", "said"), [
    (lambda m: setattr(m.graph.output[0].type.tensor_type, "elem_type", -1), "'y' is of a type that onnx"),
    (lambda m: setattr(m.graph.node[0], "op_type", "Conv\N{SNOWMAN}"), "ONNX graph: a name in it is not UTF-8"),
])  # fmt: skip
def test_damaged_types_and_names_are_refused_in_one_line(call: Any, change: Callable[[Any], None], said: str) -> None:
    model = network(["n", 3, 24, 24])
    change(model)
    Path("net.onnx").write_bytes(model.SerializeToString().replace("\N{SNOWMAN}".encode(), b"\xd4at"))
    code, _, err = call("time", "net.onnx", "--out", "timed")
    assert code == 2 and said in err and len(err.strip().splitlines()) == 1, err


@pytest.mark.parametrize("opset", [9, 13, 24])
def test_opsets_old_and_new(call: Any, photos: Path, opset: int) -> None:
    model = network(["n", 3, 24, 24], opset=opset, ir=10)
    found = measured(call, model, "--precision", "fp32,int8", "--calibration", photos)
    assert [row["status"] for row in found] == ["ok"] * 4


def test_the_size_comes_from_shapes_or_metadata(call: Any) -> None:
    model = network(["n", 3, "h", "w"])
    h.set_model_props(model, {"imgsz": "[16, 32]", "batch": "2", "stride": "16"})
    onnx.save(model, "net.onnx")

    def dry(*words: object) -> tuple[int, str]:
        code, out, err = call("run", "net.onnx", "--backend", "onnxruntime", "--dry-run", *words)
        return code, " ".join((out + err).split())

    assert " 2 16x32 " in dry()[1]
    assert " 2 32x48 " in dry("--size", "32x48")[1]
    assert " 1 48 " in dry("--shapes", "image:1x3x48x48")[1]
    code, said = dry("--size", "40")
    assert code == 2 and "multiples of 16, not 40x40" in said
    code, said = dry("--shapes", "image:1x3x48x48", "--size", "32")
    assert code == 2 and "shapes give the image 48x48 pixels, and sizes 32x32; omit one of them" in said


def test_unknown_operators_are_named_in_each_row(call: Any) -> None:
    onnx.save(network(["n", 3, 24, 24], more="Swishy"), "net.onnx")
    call("run", "net.onnx", *QUICK, "--out", "run", code=3)
    found = rows(Path("run"))
    assert [row["status"] for row in found] == ["failed"] * 2
    assert all("Swishy" in row["reason"] and "\n" not in row["reason"] for row in found)


def test_invalid_files_stop_the_study_in_one_line(call: Any, photos: Path) -> None:
    whole = network(["n", 3, 24, 24]).SerializeToString()
    for content, said in ((b"", "is empty"), (whole[:-400], "is not a whole ONNX file"), (b"text" * 99, "whole ONNX")):
        Path("net.onnx").write_bytes(content)
        code, _, err = call("run", "net.onnx", *QUICK)
        assert code == 2 and said in err and err.count("\n") == 1
    onnx_text.write("net.onnx", "(float[n, 4] v) => (float[n, 4] y) { y = Relu(v) }")
    code, _, err = call("run", "net.onnx", *QUICK, "--data", photos)
    assert code == 2 and "has no image input (N x C x H x W, in floating point or bytes) that images" in err


def drawing(operator: str) -> Any:
    """Return the network with noise in front of the mean."""
    model = network(["n", 3, 24, 24])
    more = {
        "Dropout": [h.make_node("Dropout", ["r", "share", "training"], ["noisy"])],
        "RandomNormalLike": [
            h.make_node("RandomNormalLike", ["r"], ["noise"], scale=3.0, dtype=KINDS.FLOAT),
            h.make_node("Add", ["r", "noise"], ["noisy"]),
        ],
    }[operator]
    nodes = [*model.graph.node]
    nodes[-2].input[0] = "noisy"
    del model.graph.node[:]
    model.graph.node.extend([*nodes[:-2], *more, *nodes[-2:]])
    values = {"share": np.float32(0.5), "training": np.bool_(True)}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), name) for name, v in values.items())
    return model


@pytest.mark.parametrize("operator", ["Dropout", "RandomNormalLike"])
def test_graphs_with_random_operators_are_not_called_wrong(call: Any, operator: str) -> None:
    onnx.save(drawing(operator), "net.onnx")
    backends = ("--backend", "onnxruntime,onnxruntime@optimization=disable")
    code, out, err = call("run", "net.onnx", *QUICK[:-2], *backends, "--out", "run")
    first, second = rows(Path("run"))
    assert (first["status"], second["status"], code) == ("ok", "ok", 0), (out, err)
    assert second["verdict"] == "not comparable: outputs change from call to call" and second["outputs"] == ""
    assert "outputs change from call to call" in " ".join(out.split())


@pytest.mark.parametrize("name", ["?", "None", "-1", "N", "unk__5"])
def test_a_name_shared_by_batch_and_image_sides_is_ignored(call: Any, name: str) -> None:
    found = measured(call, network([name, 3, name, name]), "--size", "16x24")
    assert [(row["status"], row["size"]) for row in found] == [("ok", "16x24")] * 2


def products(weights: list[np.ndarray], name: str = "x") -> tuple[list[Any], list[Any]]:
    """Return nodes that multiply x by each weight in turn, and the weights; the last output is `name`_out."""
    names = [name, *(f"{name}{k}" for k in range(1, len(weights))), f"{name}_out"]
    nodes = [
        h.make_node("MatMul", [names[k] if k else "x", f"{name}w{k}"], [names[k + 1]]) for k in range(len(weights))
    ]
    return nodes, [numpy_helper.from_array(w, f"{name}w{k}") for k, w in enumerate(weights)]


def from_x(nodes: list[Any], stored: list[Any], out: str, kind: int = KINDS.FLOAT) -> Any:
    x, y = (h.make_tensor_value_info(name, kind, ["batch", 64]) for name in ("x", out))
    opsets = [h.make_opsetid("", 21), h.make_opsetid("com.microsoft", 1)]
    return h.make_model(h.make_graph(nodes, "net", [x], [y], stored), opset_imports=opsets, ir_version=10)


def branching(weights: list[np.ndarray], before: int = 0) -> Any:
    """Return a network with `before` products and the rest in two branches, chosen by the input's sum."""
    kind = KINDS.FLOAT16 if weights[0].dtype == np.float16 else KINDS.FLOAT
    first, stored = products(weights[:before], "a") if before else ([h.make_node("Identity", ["x"], ["a_out"])], [])
    sides = {}
    for side in ("then", "else"):
        nodes, own = products(weights[before:], side)
        nodes[0].input[0] = "a_out"
        result = h.make_tensor_value_info(f"{side}_out", kind, None)
        sides[f"{side}_branch"] = h.make_graph(nodes, side, [], [result], own)
    flag = [h.make_node("ReduceSum", ["x"], ["sum"], keepdims=0), h.make_node("Cast", ["sum"], ["flag"], to=KINDS.BOOL)]
    return from_x([*first, *flag, h.make_node("If", ["flag"], ["y"], name="choice", **sides)], stored, "y", kind)


def random_weights(count: int, dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((64, 64)) / 8).astype(dtype) for _ in range(count)]


def test_fp16_constants_are_treated_like_fp16_initialisers(call: Any) -> None:
    nodes, stored = products(random_weights(2, np.float16))
    lifted = [h.make_node("Constant", [], [tensor.name], value=tensor) for tensor in stored]
    onnx.save(from_x(nodes, stored, "x_out", KINDS.FLOAT16), "initialisers.onnx")
    onnx.save(from_x([*lifted, *nodes], [], "x_out", KINDS.FLOAT16), "constants.onnx")
    call("run", "initialisers.onnx", "constants.onnx", *QUICK, "--out", "run", code=0)
    found = {tuple(row[key] for key in ("status", "precision", "parameters")) for row in rows(Path("run"))}
    assert len(rows(Path("run"))) == 4 and found == {("ok", "fp16", "8192")}
    said = {w for job in Path("run").glob("trials/*/r0/job.json")
            for w in json.loads(job.read_text())["artifact"]["made_by"].get("warnings", [])}  # fmt: skip
    assert said == {"made from a file in fp16: its weights have that file's rounding in every precision"}


@pytest.mark.parametrize("level", [0, 4])
def test_four_bit_weights_are_named_with_their_compute_type(call: Any, level: int) -> None:
    """ONNX Runtime's own outputs show that accuracy level 4 rounds activations to eight bits."""
    rng = np.random.default_rng(1)
    packed, scale = rng.integers(0, 256, (64, 2, 16), np.uint8), rng.random((64, 2, 1), np.float32)
    values = np.stack([packed & 15, packed >> 4], -1).reshape(64, 2, 32).astype(np.float32) - 8  # 8 is the zero point
    node = h.make_node("MatMulNBits", ["x", "q", "s"], ["y"], domain="com.microsoft", K=64, N=64, bits=4,
                       block_size=32, accuracy_level=level)  # fmt: skip
    stored = [numpy_helper.from_array(packed, "q"), numpy_helper.from_array(scale.ravel(), "s")]
    (row, other) = measured(call, from_x([node], stored, "y"))
    x = rng.standard_normal((4, 64)).astype(np.float32)
    exact = x @ (values * scale).reshape(64, 64).T
    (y,) = onnxruntime.InferenceSession("net.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x})
    rounded = np.linalg.norm(y - exact) > 1e-3 * np.linalg.norm(exact)
    assert (row["precision"], row["precision_ok"], row["ran_as"]) == ("int4", "yes", "1 int8" if rounded else "1 fp32")
    assert row["parameters"] == other["parameters"] == "4096" and rounded == bool(level)
    assert (other["backend"], other["precision"], other["outputs"]) == ("openvino", "int4", "agree")
    code, *_ = call("run", "net.onnx", "--precision", "int8", "--input", "x=-3..3", *QUICK, "--out", "lower")
    assert code == 3 and {row["reason"] for row in rows(Path("lower"))} == {
        "the file's weights are int4 already; run it as int4, or give the float file for int8"
    }


def test_four_bit_weights_run_in_batches(call: Any) -> None:
    rng = np.random.default_rng(3)
    packed, scale = rng.integers(0, 256, (64, 2, 16), np.uint8), rng.random(128, np.float32)
    node = h.make_node("MatMulNBits", ["x", "q", "s"], ["y"], domain="com.microsoft", K=64, N=64, bits=4, block_size=32)
    stored = [numpy_helper.from_array(packed, "q"), numpy_helper.from_array(scale, "s")]
    found = measured(call, from_x([node], stored, "y"), "--batch", "1,4")
    assert [(row["status"], row["precision"]) for row in found] == [("ok", "int4")] * 4


def test_widened_eight_bit_weights_are_not_called_int8(call: Any) -> None:
    """OpenVINO widens such weights; ONNX Runtime multiplies them as integers."""
    q = np.random.default_rng(2).integers(-127, 128, (64, 64)).astype(np.int8)
    stored = [numpy_helper.from_array(q, "q"), numpy_helper.from_array(np.full((2, 64), 0.01, np.float32), "s")]
    nodes = [h.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=0, block_size=32),
             h.make_node("MatMul", ["x", "w"], ["y"])]  # fmt: skip
    found = {row["backend"]: row for row in measured(call, from_x(nodes, stored, "y"))}
    assert {row["precision"] for row in found.values()} == {"int8"}
    assert (found["openvino"]["ran_as"], found["openvino"]["precision_ok"]) == ("1 fp32", "no")


def test_fp8_weights_run_widened_and_unrunnable_files_say_why(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(4).standard_normal((64, 64)).astype(np.float32)
    weights = h.make_tensor("q", KINDS.FLOAT8E4M3FN, values.shape, values.ravel().tolist())
    q = numpy_helper.to_array(weights)
    weights.ClearField("int32_data")  # OpenVINO 2026.4 reads wrong values from this field
    weights.raw_data = q.tobytes()
    nodes = [h.make_node("DequantizeLinear", ["q", "s"], ["w"]), h.make_node("MatMul", ["x", "w"], ["y"])]
    model = from_x(nodes, [weights, numpy_helper.from_array(np.float32(0.1), "s")], "y")
    found = measured(call, model)
    assert {(row["backend"], row["status"], row["precision"], row["ran_as"]) for row in found} == {
        ("onnxruntime", "ok", "fp8", "1 fp32"), ("openvino", "ok", "fp8", "1 fp32")
    }  # fmt: skip
    assert found[1]["outputs"] == "agree"
    for backend in ("onnx_runtime.OnnxRuntime", "open_vino.OpenVino"):
        monkeypatch.setattr(f"dyno.worker.backends.{backend}.file_precisions", ())
    code, *_ = call("run", "net.onnx", *QUICK, "--out", "none")
    assert code == 3 and ["no fp8 here" in row["reason"] for row in rows(Path("none"))] == [True, True]


def test_layers_in_branches_stay_unquantised_and_each_row_says_so(call: Any) -> None:
    onnx.save(branching(random_weights(2)), "net.onnx")
    words = ("--precision", "fp32,fp16,int8", "--input", "x=-3..3", *SHORT, "--backend", "onnxruntime", "--out", "run")
    code, _, _ = call("run", "net.onnx", *words)
    full, half, eight = rows(Path("run"))
    assert (code, full["ran_as"], full["parameters"]) == (3, "2 fp32", str(4 * 64 * 64))
    assert "4 of its 4 layers with weights are inside If operators, whose graphs are not converted" in half["reason"]
    assert "all of its 4 layers with weights stay in fp32 (4 are inside If operators)" in eight["reason"]


def test_unquantised_layers_in_branches_are_named(call: Any) -> None:
    model = branching(random_weights(3), before=2)
    (row,) = measured(call, model, "--precision", "int8", "--input", "x=-3..3", backends="onnxruntime")
    assert row["precision"] == "int8" and "int8" in row["ran_as"] and "fp32" in row["ran_as"]
    job = json.loads(next(Path("run").glob("trials/*/r0/job.json")).read_text())
    warning = "2 of 4 layers with weights are not in int8 (2 are inside If operators)"
    assert warning in job["artifact"]["made_by"]["warnings"]


def test_without_multiplying_layers_no_precision_is_confirmed(call: Any) -> None:
    """Bytes, a boolean and integers are not INT8 computation."""
    model = onnx_text.model("""(uint8[n, 3, 8, 8] image) => (float[n, 3, 1, 1] y) {
        x = Cast<to = 1>(image) m = GlobalAveragePool(x) flag = Greater(m, one) y = Where(flag, m, one)
    }""", one=np.float32(1))  # fmt: skip
    found = measured(call, model)
    assert {(row["precision"], row["precision_ok"], row["ran_as"]) for row in found} == {("fp32", "unconfirmed", "")}
    code, out, _ = call("show", "run")
    assert code == 0 and "fp32 (unconfirmed)" in out and "shows no layer that multiplies" in out


@pytest.mark.parametrize(("compressed", "precision"), [(True, "fp16"), (False, "fp32")])
def test_an_ir_has_the_precision_of_its_stored_weights(
    call: Any, compressed: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openvino

    monkeypatch.setattr("dyno.worker.system.has_arithmetic", lambda _: False)  # else bf16 has a row, too
    nodes, stored = products(random_weights(2))
    onnx.save(from_x(nodes, stored, "x_out"), "net.onnx")
    openvino.save_model(openvino.Core().read_model("net.onnx"), "net.xml", compress_to_fp16=compressed)
    code, _, err = call("run", "net.xml", *QUICK[:-2], "--out", "run")
    (row,) = rows(Path("run"))
    assert (code, row["precision"], row["status"]) == (0, precision, "ok"), err


def _hub(folder: Path, files: dict[str, Path]) -> Path:
    """Write a snapshot as in the hub's cache: links to blobs named by hash, without a suffix."""
    snapshot = folder / "models--me--net" / "snapshots" / ("a" * 40)
    for name, file in files.items():
        blob = folder / "models--me--net" / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, blob)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    return snapshot


def test_files_in_the_hub_cache_run_under_their_own_names(call: Any, tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    model = onnx_text.model("(float[batch, 16] x) => (float[batch, 16] y) { m = MatMul(x, w) y = Relu(m) }", w=weights)
    onnx.save(model, tmp_path / "single.onnx")
    beside = {"save_as_external_data": True, "location": "data/apart.bin", "size_threshold": 0}
    (tmp_path / "data").mkdir()
    onnx.save(model, tmp_path / "apart.onnx", **beside)
    names = ("single.onnx", "apart.onnx", "data/apart.bin")
    snapshot = _hub(tmp_path / "hub", {name: tmp_path / name for name in names})
    x = np.random.default_rng(1).standard_normal((3, 16)).astype(np.float32)
    np.savez(tmp_path / "feeds.npz", x=x)
    (tmp_path / "linked.npz").symlink_to("feeds.npz")
    hashes = []
    for name in ("single", "apart"):
        for place, out in ((snapshot, f"linked-{name}"), (tmp_path, f"plain-{name}")):
            words = ("--input", "linked.npz", "--compared", 3, "--out", out)
            call("run", place / f"{name}.onnx", *QUICK, "--no-turns", *words, code=0)
            results = dyno.load(out).records
            assert {trial.model for trial in results} == {name}
            hashes.append({trial.spec.model.source_sha256 for trial in results})
            for trial in results:
                np.testing.assert_allclose(trial.outputs()["y"], np.maximum(x @ weights, 0), 1e-4, 1e-5)
    assert hashes[0] == hashes[1] and hashes[2] == hashes[3], "the same content is the same model"
    code, out, err = call("inspect", snapshot / "apart.onnx")
    assert code == 0 and "MatMul" in out, err


def test_linked_module_code_and_weights_are_found_by_link_name(call: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save = pytest.importorskip("safetensors.torch").save_file
    (tmp_path / "code.py").write_text(
        "from sizes import WIDTH\nimport torch\n\ndef build():\n    return torch.nn.Linear(WIDTH, 3)\n"
    )
    (tmp_path / "sizes.py").write_text("WIDTH = 4\n")
    weight = torch.arange(12.0).reshape(3, 4)
    save({"weight": weight, "bias": torch.ones(3)}, tmp_path / "w.safetensors")
    snapshot = _hub(tmp_path / "hub", {name: tmp_path / name for name in ("code.py", "sizes.py", "w.safetensors")})
    for name in ("code.py", "sizes.py", "w.safetensors"):
        (tmp_path / name).unlink()
    words = ("--weights", snapshot / "w.safetensors", "--shapes", "input:batchx4", "--input", "input=1", "--out", "r")
    call("run", f"{snapshot / 'code.py'}:build", *QUICK[:-1], "pytorch", *words, code=0)
    (trial,) = dyno.load("r").records
    assert (trial.outputs()["output"] == weight.sum(axis=1).numpy() + 1).all()


def test_changed_class_map_pixels_count_as_labels_in_every_comparison(call: Any, tmp_path: Path) -> None:
    for name, bias in (("a", 0.0), ("b", 0.02), ("c", 9.0)):
        model = network(["batch", 3, 32, 32])
        graph = model.graph
        offset = np.array([bias, 0, 0, 0, 0, 0], np.float32).reshape(1, 6, 1, 1)
        graph.initializer.append(numpy_helper.from_array(offset, "offset"))
        del graph.node[2:], graph.output[:]
        graph.node.append(h.make_node("Add", ["r", "offset"], ["logits"]))
        graph.node.append(h.make_node("ArgMax", ["logits"], ["map"], axis=1, keepdims=0))
        graph.output.append(h.make_tensor_value_info("map", KINDS.INT64, ["batch", 32, 32]))
        onnx.save(model, tmp_path / f"{name}.onnx")
    x = np.random.default_rng(1).standard_normal((4, 3, 32, 32)).astype(np.float32)
    np.savez(tmp_path / "feeds.npz", image=x)
    maps = {n: ReferenceEvaluator(str(tmp_path / f"{n}.onnx")).run(None, {"image": x})[0] for n in "abc"}
    for name in "bc":
        differs = float((maps[name] != maps["a"]).mean())
        assert differs < 0.05 if name == "b" else differs > 0.3
        words = ("--input", "feeds.npz", "--compared", 4, "--threads", 1, "--format", "json")
        _, out, err = call("diff", "a.onnx", f"{name}.onnx", *words)
        (row,) = json.loads(out)["tables"]["agreement"]["rows"]
        assert row["close"] == pytest.approx(1 - differs, abs=1e-3), err
        assert row["labels_changed"] == pytest.approx(100 * differs, abs=0.1)


def saved(text: str, **stored: np.ndarray) -> Any:
    """Return the model of a text and save it as net.onnx."""
    model = onnx_text.model(text, **stored)
    onnx.save(model, "net.onnx")
    return model


def recurrent(last: bool = True) -> Any:
    """Return an ONNX LSTM, time x batch x features, with scores of the last step or of all."""
    rng = np.random.default_rng(0)
    stored = {"w": (1, 32, 3), "r": (1, 32, 8), "g": (8, 5)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in stored.items()}
    text = f"""(float[time, batch, 3] x) => (float[{"" if last else "time, "}batch, 5] y) {{
        {", s0" if last else "s0"} = LSTM<hidden_size = 8>(x, w, r) s = Squeeze(s0, one) y = MatMul(s, g)
    }}"""
    return saved(text, one=np.array([0 if last else 1]), **arrays)


@pytest.mark.parametrize("last", [True, False])
def test_the_batch_is_the_axis_named_by_the_file(call: Any, last: bool) -> None:
    """Outputs in batches of two equal onnx.reference's outputs for each sequence."""
    model = recurrent(last)
    steps = np.random.default_rng(1).standard_normal((6, 8, 3)).astype(np.float32)
    np.savez("x.npz", x=steps)
    call("run", "net.onnx", *QUICK, "--input", "x.npz", "--batch", 2, "--compared", 8, "--out", "run", code=0)
    (want,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": steps})
    found = list(dyno.load("run").records)
    assert [trial.batch for trial in found] == [2, 2]
    for trial in found:
        np.testing.assert_allclose(trial.outputs()["y"], want if last else want.transpose(1, 0, 2), 1e-3, 1e-4)


def test_a_fixed_batch_after_the_time_axis_counts_sequences(call: Any) -> None:
    recurrent()
    call("run", "net.onnx", *QUICK, "--shapes", "x:6x4x3", "--out", "run", code=0)
    assert [row["batch"] for row in rows(Path("run"))] == ["4", "4"]
    code, _, err = call("run", "net.onnx", *QUICK, "--shapes", "x:6x4x3", "--batch", 8, "--out", "other")
    assert code == 2 and "--shapes gives a batch of 4; omit the batch, 8" in err
    code, _, err = call("run", "net.onnx", *QUICK, "--out", "other")
    assert code == 2 and "unknown length: time (x); give numbers for the names in --shapes x:<time>xbatchx3" in err


def test_a_graph_with_an_inner_batch_of_1_fails_at_larger_batches(call: Any) -> None:
    weights = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    text = """(float[batch, 3, 8, 8] x) => (float[batch, 5] y) {
        f = Reshape(x, shape) m = ReduceMean<axes = [2], keepdims = 0>(f) y = MatMul(m, g)
    }"""
    model = saved(text, shape=np.array([1, 3, -1]), g=weights)
    (one,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": np.ones((4, 3, 8, 8), np.float32)})
    assert one.shape == (1, 5), "onnx.reference mixes them too"
    code, _, _ = call("run", "net.onnx", *QUICK, "--batch", "1,4", "--out", "run")
    found = {(row["batch"], row["status"]) for row in rows(Path("run"))}
    assert code == 3 and found == {("1", "ok"), ("4", "failed")}
    reasons = {row["reason"] for row in rows(Path("run")) if row["batch"] == "4"}
    assert all("the file says batch x 5, but gave 1 x 5 for a batch of 4" in reason for reason in reasons)


def decoder() -> None:
    """Save an attention step that appends its keys to a cache of 4 heads; heads look like channels."""
    text = """(int64[batch, sequence_length] ids, float[batch, 4, past_length, 8] past_key)
        => (float[batch, 8] y, float[batch, 4, "past_length + sequence_length", 8] present_key) {
        x = Gather(e, ids)
        k0 = Unsqueeze(x, one)
        k = Expand(k0, heads)
        present_key = Concat<axis = 2>(past_key, k)
        y = ReduceSum<keepdims = 0>(present_key, axes)
    }"""
    table = np.random.default_rng(0).standard_normal((10, 8)).astype(np.float32)
    saved(text, e=table, one=np.array([1]), heads=np.array([1, 4, 1, 1]), axes=np.array([1, 2]))


@pytest.mark.parametrize("past", [0, 3])
def test_caches_are_not_images_and_may_be_empty(call: Any, past: int) -> None:
    decoder()
    code, _, err = call("run", "net.onnx", *QUICK, "--shapes", "ids:batchx2", "--out", "run")
    assert code == 2 and "unknown length: past_length (past_key)" in err and "past_key:batchx4x<past_length>x8" in err
    shapes = ("--shapes", "ids:batchx2", "--shapes", f"past_key:batchx4x{past}x8", "--batch", 2)
    call("run", "net.onnx", *QUICK, *shapes, "--out", "run", code=0)
    assert {row["size"] for row in rows(Path("run"))} == {"0"}
    for trial in dyno.load("run").records:
        assert trial.outputs()["present_key"].shape[1:] == (4, past + 2, 8)
    code, _, err = call("run", "net.onnx", *QUICK, *shapes, "--size", 32, "--out", "sized")
    assert code == 2 and "net takes no image, so a size doesn't apply to it; omit it" in err


def test_an_empty_cache_may_come_from_an_array(call: Any) -> None:
    decoder()
    np.savez("first.npz", ids=np.array([[1, 2], [3, 4]]), past_key=np.zeros((2, 4, 0, 8), np.float32))
    call("run", "net.onnx", *QUICK, "--input", "first.npz", "--batch", 2, "--out", "run", code=0)
    assert {row["status"] for row in rows(Path("run"))} == {"ok"}


def test_a_size_applies_only_to_image_models(call: Any) -> None:
    weights = np.random.default_rng(0).standard_normal((12, 5)).astype(np.float32)
    saved("(float[batch, 12] x) => (float[batch, 5] y) { y = MatMul(x, g) }", g=weights)
    onnx.save(network(["n", 3, "h", "w"]), "image.onnx")
    words = (*SHORT, "--backend", "onnxruntime", "--size", 16)
    call("run", "net.onnx", "image.onnx", *words, "--out", "run", code=0)
    assert {(row["model"], row["size"], row["status"]) for row in rows(Path("run"))} == {
        ("net", "0", "ok"), ("image", "16", "ok"),
    }  # fmt: skip
    code, _, err = call("run", "net.onnx", *words, "--out", "alone")
    assert code == 2 and "net takes no image, so a size doesn't apply to it; omit it" in err


def test_a_chosen_default_size_is_a_warning(call: Any) -> None:
    onnx.save(network(["n", 3, "h", "w"]), "image.onnx")
    words = ("run", "image.onnx", *SHORT, "--backend", "onnxruntime")
    for size, is_warned in ((), True), (("--size", "24x32"), False), (("--shapes", "image:batchx3x24x32"), False):
        _, out, _ = call(*words, *size, "--out", "run" + "".join(size)[2:6], code=0)
        assert ("the file leaves the image's size free; 224 was chosen" in " ".join(out.split())) == is_warned, out
    weights = np.ones((24, 5), np.float32)
    saved("(float[1, 3, h, w] x) => (float[1, 3, h, 5] y) { y = MatMul(x, g) }", g=weights)
    code, out, _ = call("run", "net.onnx", *words[2:], "--out", "failed")
    assert code == 3 and "the file leaves the image's size free; 224 was chosen" in " ".join(out.split())


def test_the_number_of_boxes_per_image_is_not_a_batch(call: Any) -> None:
    """As in a detector's second stage: the image's batch is fixed, and the boxes' free axis is not a batch."""
    text = """(float[1, 3, 16, 16] x, float[boxes, 4] at, float[boxes, 1] weight) => (float[boxes, 3] y) {
        p = GlobalAveragePool(x) f = Flatten(p) b = MatMul(at, w) s = Add(b, f) y = Mul(s, weight)
    }"""
    saved(text, w=np.ones((4, 3), np.float32))
    words = (*QUICK, "--shapes", "at:7x4", "--compared", 4)
    call("run", "net.onnx", *words, "--out", "run", code=0)
    assert {(row["batch"], row["outputs"]) for row in rows(Path("run"))} == {("1", ""), ("1", "agree")}
    assert {trial.outputs()["y"].shape for trial in dyno.load("run").records} == {(4 * 7, 3)}
    code, _, err = call("run", "net.onnx", *words, "--batch", 7, "--out", "other")
    assert code == 2 and "the file's batch is fixed at 1, not 7" in err


def test_a_stacked_state_keeps_its_given_shape(call: Any) -> None:
    """As in a voice detector: no axis is named, two layers of state are not a batch of two, and 0 is no sample rate."""
    stored = {"rate": np.array([16000]), "one": np.ones(1, np.float32), "w": np.ones((2, 3), np.float32)}
    words = (*SHORT, "--backend", "onnxruntime", "--shapes", "x:1x8", "--shapes", "state:2x1x4")
    for layers, out in ("2", "fixed"), ("?", "free"):
        saved(
            f"""(float[?, ?] x, float[{layers}, ?, 4] state, int64[1] sr) => (float[?, ?] y, float[?, ?, ?] s) {{
            k = Sub(sr, rate) f = Gather(one, k) y = Mul(x, f) t = Transpose<perm = [1, 2, 0]>(state) s = MatMul(t, w)
            }}""",
            **stored,
        )
        call("run", "net.onnx", *words, "--input", "sr=16000", "--out", out, code=0)
        assert [row["status"] for row in rows(Path(out))] == ["ok"]
    code, out, _ = call("run", "net.onnx", *words, "--out", "unset")
    assert code == 3 and "sr held random zeros and ones: --input sr=VALUE gives others" in " ".join(out.split())
    saved("(float[batch, 4] x, float[batch, 4] y) => (float[batch, 4] z) { z = Add(x, y) }")
    code, _, err = call("run", "net.onnx", *SHORT, "--shapes", "x:1x4", "--shapes", "y:2x4", "--out", "two")
    assert code == 2 and "the shapes give batches of 1 and 2; give all inputs one batch" in err


@pytest.mark.parametrize(("time", "batch", "last"), [("time", 1, False), (5, 1, False), (5, 4, False), (5, 4, True)])
def test_state_layers_are_not_the_batch(call: Any, time: str | int, batch: int, last: bool) -> None:
    """The state has two layers; reading them as a batch of two would double the inputs per second."""
    shape = f"{batch}, {time}" if last else f"{time}, {batch}"
    weights = np.ones((8, 8), np.float32)
    model = saved(
        f"(float[{shape}, 8] x, float[2, {batch}, 8] h) => (float[{shape}, 8] y, float[2, {batch}, 8] next) "
        "{ y = MatMul(x, w) next = MatMul(h, w) }",
        w=weights,
    )
    words = ("--shapes", f"x:5x{batch}x8") if time == "time" else ()
    assert [row["batch"] for row in measured(call, model, *words, backends="onnxruntime")] == [str(batch)]


def test_axes_that_share_a_question_mark_may_differ(call: Any) -> None:
    """PaddlePaddle writes `?` for every free axis."""
    found = measured(call, network(["n", 3, "?", "?"]), "--shapes", "image:batchx3x16x24", "--batch", 2)
    assert [(row["status"], row["size"], row["batch"]) for row in found] == [("ok", "16x24", "2")] * 2


def test_intended_infinities_and_nan_agree_with_the_reference(call: Any) -> None:
    mask = np.zeros(10, np.float32)
    mask[[2, 5]], mask[1] = -np.inf, np.nan
    weights = np.random.default_rng(0).standard_normal((8, 10)).astype(np.float32)
    saved("(float[N, 8] x) => (float[N, 10] y) { z = MatMul(x, w) y = Add(z, m) }", w=weights, m=mask)
    _, out, _ = call("run", "net.onnx", *QUICK, "-o", "run", code=0)
    assert "10.00% of the output values are NaN, where agreement proves nothing" in out
    assert dict(dyno.load("run").to_pandas()[["backend", "outputs"]].to_numpy())["openvino"] == "agree"
    (warning,) = {w for t in dyno.load("run").records for w in t.rounds[0].warnings if "not finite" in w}
    assert "10.00% are NaN and 20.00% are infinite" in warning
    call("run", "net.onnx", *QUICK[:-1], "openvino", "-o", "alone", code=0)


def test_float64_computed_in_float32_is_reported(call: Any) -> None:
    onnx.save(network(["n", 3, 24, 24], kind=KINDS.DOUBLE), "double.onnx")
    _, out, _ = call("run", "double.onnx", *QUICK[:-1], "onnxruntime", "-o", "run", code=0)
    assert "double: the graph was in float64, in part or as a whole, and is computed in float32" in " ".join(
        out.split()
    )


def test_exports_accept_the_length_of_a_free_axis(call: Any) -> None:
    saved("(float[N, length, 8] x) => (float[N, length, 4] y) { y = MatMul(x, w) }", w=np.ones((8, 4), np.float32))
    words = ("export", "net.onnx", "--precision", "fp16", "-o", "half.onnx")
    call(*words, "--shapes", "x:batchx16x8", code=0)
    assert onnx.load("half.onnx").graph.input[0].type.tensor_type.shape.dim[1].dim_param == "length"


def test_labels_ordered_by_text_are_reported(call: Any) -> None:
    for k, name in enumerate(("1", "2", "3", "4", "5", "10")):
        drawn.photographs(Path("photos") / name, count=2, height=45, width=54, block=9 + k)
    onnx.save(network(["n", 3, 24, 24]), "net.onnx")
    _, out, _ = call("run", "net.onnx", *QUICK[:-1], "onnxruntime", "--data", "photos", "-o", "run", code=0)
    assert "Labels: classes are numbered in the order of their names as text, so class 1 is '10'" in out


def test_graphs_in_training_mode_are_reported(call: Any) -> None:
    model = network(["n", 3, 24, 24], opset=13)
    model.graph.node[1].input[0] = "normal"
    normalised = h.make_node("BatchNormalization", ["c", *"kkkk"], ["normal", "mean", "var", "saved_mean", "saved_var"])
    model.graph.node.insert(1, normalised)
    model.graph.initializer.append(numpy_helper.from_array(np.ones(6, np.float32), "k"))
    onnx.save(model, "training.onnx")
    _, out, _ = call("run", "training.onnx", *QUICK[:-1], "onnxruntime", "-o", "run", code=0)
    assert "training: the graph runs as in training (BatchNormalization): its outputs" in " ".join(out.split())


def test_outputs_below_the_absolute_tolerance_are_not_called_close(call: Any) -> None:
    """The second network's outputs are -5 times the first's, which are around 1e-29."""
    weights = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32) * np.float32(1e-30)
    for name, factor in (("first.onnx", 1), ("second.onnx", -5)):
        text = "(float[n, 8] x) => (float[n, 4] y) { y = MatMul(x, w) }"
        onnx_text.write(name, text, w=np.float32(factor) * weights)
    words = ("diff", "first.onnx", "second.onnx", "--backend", "onnxruntime", "--out", "d")
    assert "so --atol 1e-08 would call any outputs close; give e.g. --atol " in call(*words, code=2)[2]
    assert call(*words, "--atol", "0", "--least", "0.5")[0] == 1


def test_empty_outputs_are_not_called_agreeing(call: Any) -> None:
    """A detector that finds no object has such outputs."""
    ends = {"first": 3, "last": 3, "axis": 1}
    saved("(float[n, 8] x) => (float[n, m] y) { y = Slice(x, first, last, axis) }", **{k: [v] for k, v in ends.items()})
    _, out, _ = call("run", "net.onnx", *QUICK, "--out", "run", code=0)
    assert "the outputs have no values for any input, so nothing is compared" in " ".join(out.split())
    assert "agree" not in out
    words = ("diff", "net.onnx", "onnxruntime", "openvino", "--out")
    assert call(*words, "d", code=0)[1].count("net onnxruntime fp32: the outputs have no values for any input") == 1
    call(*words, "e", "--least", "0.5", code=1)
    _, _, err = call("diff", "net.onnx", "openvino", "--layers", code=2)
    assert "the outputs have no values for any input, so nothing can be compared" in err
    call("export", "run", "-o", "best", code=0)
    done = subprocess.run([sys.executable, "best.py"], capture_output=True, text=True, check=True)
    assert done.stdout == "y float32 1x0\n"


def test_outputs_may_differ_from_their_declared_shape(call: Any) -> None:
    """onnxmltools declares LightGBM's labels as [1] for any batch."""
    model = onnx_text.model("(float[?, 8] x) => (int64[1] y) { y = ArgMax <axis = 1, keepdims = 0>(x) }", opset=13)
    model.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    found = measured(call, model, "--batch", "1,4", backends="onnxruntime")
    assert [row["status"] for row in found] == ["ok"] * 2
    assert dyno.load("run").records[1].outputs()["y"].shape == (32,)


def test_unsupported_opsets_are_named_with_the_supported_one(call: Any) -> None:
    onnx_text.write("net.onnx", "(float[n, 8] x) => (float[n, 8] y) { y = Relu(x) }", opset=99)
    _, _, err = call("run", "net.onnx", *QUICK[:-1], "onnxruntime", "--out", "run", code=3)
    assert re.search(r"it is in opset 99 of ai\.onnx, and this version reads up to \d+; export it for that one", err)


def test_outputs_with_variable_rows_are_compared_by_input(call: Any) -> None:
    nodes = [h.make_node("NonZero", ["x"], ["where"]), h.make_node("Transpose", ["where"], ["y"], perm=[1, 0])]
    x, y = h.make_tensor_value_info("x", KINDS.FLOAT, ["n", 4]), h.make_tensor_value_info("y", KINDS.INT64, ["k", 2])
    onnx.save(
        h.make_model(h.make_graph(nodes, "net", [x], [y]), opset_imports=[h.make_opsetid("", 17)], ir_version=8),
        "net.onnx",
    )
    _, out, _ = call("diff", "net.onnx", "onnxruntime", "openvino", "--format", "csv", code=0)
    assert [row["inputs"] for row in csv.DictReader(out.splitlines())] == ["32", "32"]  # four rows each


def test_outputs_may_lack_a_shape_but_inputs_need_one(call: Any, photos: Path) -> None:
    """TensorFlow's converter writes them; ONNX's checker rejects them, the standard and the engines don't."""
    model = network(["n", 3, 24, 24])
    model.graph.output[0].type.tensor_type.ClearField("shape")
    found = measured(call, model, "--precision", "fp32,int8", "--calibration", photos, "--batch", "1,2")
    assert [row["status"] for row in found] == ["ok"] * 8
    assert {row["outputs"] for row in found if row["backend"] == "openvino"} == {"agree"}
    assert json.loads(Path("run/models.json").read_text())["models"][0]["signature"][1] == [["n", 6]]
    model.graph.input[0].type.tensor_type.ClearField("shape")
    onnx.save(model, "net.onnx")
    code, _, err = call("run", "net.onnx", *QUICK)
    assert code == 2 and "net.onnx's input 'image' may have any number of axes; export it with a shape" in err


@pytest.mark.parametrize("bounds", [(-0.5, 0.7), (0.2, 6.0)])
def test_clips_not_covered_by_the_int8_range_are_kept(call: Any, photos: Path, bounds: tuple[float, float]) -> None:
    """ONNX Runtime's quantiser drops such clips, although the int8 range must contain zero."""
    text = """(float[n, 3, 24, 24] x) => (float[n, 4, 24, 24] y, float[n, 8, 24, 24] z) {
        c = Conv<pads = [1, 1, 1, 1]>(x, w) k = Clip(c, low, high) y = Conv(k, v)
        d = Conv<pads = [1, 1, 1, 1]>(x, w) z = Clip(d, low, high) }"""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((8, 3, 3, 3), np.float32), "v": rng.standard_normal((4, 8, 1, 1), np.float32)}
    low, high = map(np.float32, bounds)
    model = onnx_text.model(text, **weights, low=low, high=high)
    found = measured(call, model, "--precision", "fp32,int8", "--calibration", photos)
    assert [row["status"] for row in found] == ["ok"] * 4
    exact, *others = (t.outputs() for t in dyno.load("run").records)
    errors = [np.linalg.norm(own[name] - exact[name]) / np.linalg.norm(exact[name]) for own in others for name in "yz"]
    assert max(errors) < 0.03, errors


def test_grouped_transposed_convolutions_do_not_stop_quantisation(call: Any) -> None:
    text = """(float[n, 8, 8, 8] x) => (float[n, 4, 17, 17] y) {
        c = Conv<pads = [1, 1, 1, 1]>(x, w) y = ConvTranspose<strides = [2, 2], group = 2>(c, v, b) }"""
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 8, 3, 3), "v": (8, 2, 3, 3), "b": (4,)}
    model = onnx_text.model(text, **{name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()})
    found = measured(call, model, "--precision", "fp32,int8", "--input", "x=-3..3", backends="onnxruntime")
    assert [(row["status"], row["outputs"]) for row in found] == [("ok", ""), ("ok", "agree")]


def test_batched_matrix_products_do_not_stop_quantisation(call: Any) -> None:
    text = "(float[n, 4, 5, 8] x) => (float[n, 4, 5, 3] y) { a = MatMul(x, w) r = Relu(a) y = MatMul(r, v) }"
    rng = np.random.default_rng(0)
    model = onnx_text.model(
        text, w=rng.standard_normal((4, 8, 6), np.float32), v=rng.standard_normal((6, 3), np.float32)
    )
    found = measured(call, model, "--precision", "fp32,int8", "--input", "x=-2..2")
    assert [(row["status"], row["outputs"]) for row in found] == [("ok", "")] + [("ok", "agree")] * 3
    assert "int8" in found[1]["ran_as"] and "fp32" in found[1]["ran_as"]


def test_weights_that_are_also_outputs_run_in_every_precision(call: Any) -> None:
    text = "(float[n, 8] x) => (float[n, 3] y, float[8, 3] w) { y = MatMul(x, w) }"
    weights = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    words = ("--precision", "fp32,fp16,int8", "--input", "x=-2..2", "--compared", 2)
    found = measured(call, onnx_text.model(text, w=weights), *words, backends="onnxruntime")
    assert [(row["status"], row["outputs"]) for row in found] == [("ok", "")] + [("ok", "agree")] * 2
    for trial in dyno.load("run").records:
        np.testing.assert_allclose(trial.outputs()["w"].reshape(2, 8, 3)[0], weights, atol=0.02)


def test_unnamed_nodes_beyond_the_fp16_range_stay_in_fp32(call: Any) -> None:
    """They were said to, under no name, and overflowed."""
    text = (
        "(float[n, 8] x) => (float[n, 8] y) { c = MatMul(x, w) a = Mul(c, large) b = MatMul(a, v) y = Mul(b, small) }"
    )
    unit = np.eye(8, dtype=np.float32)
    model = onnx_text.model(text, large=np.float32(6e4), small=np.float32(1e-4), w=unit, v=unit)
    found = measured(call, model, "--precision", "fp32,fp16", "--input", "x=-2..2", backends="onnxruntime")
    assert [(row["status"], row["outputs"]) for row in found] == [("ok", ""), ("ok", "agree")]
    warnings = [w for path in Path("run").glob("trials/*/r0/job.json")
                for w in json.loads(path.read_text())["artifact"]["made_by"].get("warnings", [])]  # fmt: skip
    assert warnings == ["kept in FP32, as their values exceed FP16's range: Mul_1, MatMul_2, Mul_3"]


def test_operators_without_fp16_in_the_opset_stay_in_fp32(call: Any) -> None:
    """As the operators that quantise, until opset 19."""
    model = onnx_text.model("""(float[n, 8] x) => (float[n, 3] y) {
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = MatMul(d, w)
    }""", s=np.float32(0.02), z=np.int8(0), w=np.ones((8, 3), np.float32))  # fmt: skip
    words = ("--precision", "fp32,fp16", "--input", "x=-2..2")
    found = measured(call, model, *words, backends="onnxruntime")
    assert [(row["status"], row["outputs"]) for row in found] == [("ok", ""), ("ok", "agree")]


def test_a_branch_that_fp16_breaks_is_named(call: Any) -> None:
    """It reads what an operator in FP32 reads too, in whose type the converter leaves it."""
    sides = {}
    for side, number in ("then", 2), ("else", 3):
        factor = h.make_node("Constant", [], [f"{side}_c"], value_float=float(number))
        result = h.make_tensor_value_info(f"{side}_y", KINDS.FLOAT, None)
        nodes = [factor, h.make_node("Mul", ["x", f"{side}_c"], [f"{side}_y"])]
        sides[f"{side}_branch"] = h.make_graph(nodes, side, [], [result])
    nodes = [h.make_node("ReduceSum", ["x"], ["s"], keepdims=0), h.make_node("Cast", ["s"], ["b"], to=KINDS.BOOL),
             h.make_node("If", ["b"], ["p"], **sides), h.make_node("MatMul", ["p", "w"], ["y"])]  # fmt: skip
    stored = [numpy_helper.from_array(random_weights(1)[0], "w")]
    onnx.save(from_x(nodes, stored, "y"), "net.onnx")
    call("run", "net.onnx", *SHORT, "--backend", "onnxruntime", "--precision", "fp32,fp16", "--out", "run", code=3)
    full, half = rows(Path("run"))
    assert full["status"] == "ok" and "breaks what the graphs inside its If operators read" in half["reason"], half


def test_int8_keeps_gemm_factors_and_bias(call: Any) -> None:
    """ONNX Runtime's quantiser drops beta: the outputs were off by 40 % of their size."""
    text = """(float[n, 8] x) => (float[n, 6] y, float[n, 6] z) {
        y = Gemm<transB = 1, alpha = 0.5, beta = 2.0>(x, w, b)
        own = Gemm(x, v) z = Gemm<transB = 1, beta = 2.0>(x, w, own)
    }"""
    rng = np.random.default_rng(0)
    shapes = {"w": (6, 8), "v": (8, 6), "b": (6,)}
    model = onnx_text.model(text, **{name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()})
    measured(call, model, "--precision", "fp32,int8", "--input", "x=-2..2", "--compared", 32)
    exact, *others = (t.outputs() for t in dyno.load("run").records)
    errors = [np.linalg.norm(own[name] - exact[name]) / np.linalg.norm(exact[name]) for own in others for name in "yz"]
    assert len(others) == 3 and max(errors) < 0.03, errors


def test_a_name_shared_by_batch_and_length_is_ignored(call: Any) -> None:
    """As of dynamic_axes={0: "dynamic", 1: "dynamic"}: the tokens were as many as the inputs."""
    rng = np.random.default_rng(0)
    text = """(int64[dynamic, dynamic] ids, int64[dynamic, dynamic] mask) => (float[dynamic, dynamic, 4] y) {
        e = Gather(table, ids) m = Cast<to = 1>(mask) u = Unsqueeze(m, two) p = Mul(e, u) y = MatMul(p, w)
    }"""
    table, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((50, 8), (8, 4)))
    model = saved(text, table=table, w=w, two=np.array([2]))
    words = (*QUICK, "--batch", "1,4", "--compared", 4)
    code, _, err = call("run", "net.onnx", *words, "--out", "run")
    assert code == 2 and "unknown length: dynamic (ids, mask); give numbers" in err and "ids:batchx<dynamic>" in err
    call("run", "net.onnx", *words, "--shapes", "ids:batchx7", "--out", "run", code=0)
    assert sorted((row["batch"], row["status"]) for row in rows(Path("run"))) == [("1", "ok")] * 2 + [("4", "ok")] * 2
    ids, mask = rng.integers(0, 50, (4, 7)), np.ones((4, 7), np.int64)
    np.savez("x.npz", ids=ids, mask=mask)
    call("run", "net.onnx", *words, "--input", "x.npz", "--out", "arrays", code=0)
    (want,) = ReferenceEvaluator(model).run(None, {"ids": ids, "mask": mask})
    for trial in dyno.load("arrays").records:
        np.testing.assert_allclose(trial.outputs()["y"], want, 1e-4, 1e-5)


def test_image_sides_may_share_the_name_of_the_batch(call: Any) -> None:
    saved("(float[N, 3, N, N] x) => (float[N, 2, N, N] y) { y = Conv(x, w) }", w=np.ones((2, 3, 1, 1), np.float32))
    call("run", "net.onnx", *QUICK, "--size", "16x24", "--batch", 2, "--out", "run", code=0)
    assert [row["status"] for row in rows(Path("run"))] == ["ok"] * 2


def test_a_one_letter_axis_is_not_the_batch_if_another_is_named_batch(call: Any) -> None:
    """As of an image and n boxes of it: 5 of those were a batch of 5 images."""
    text = """(float[batch, 3, 8, 8] x, float[n, 4] boxes, float[n, 1] weight) => (float[n, 3] y) {
        p = GlobalAveragePool(x) f = Flatten(p) b = MatMul(boxes, w) s = Add(b, f) y = Mul(s, weight)
    }"""
    saved(text, w=np.ones((4, 3), np.float32))
    code, _, err = call("run", "net.onnx", *QUICK, "--out", "run")
    assert code == 2 and "unknown length: n (boxes, weight); give numbers" in err
    call("run", "net.onnx", *QUICK, "--shapes", "boxes:5x4", "--compared", 3, "--out", "run", code=0)
    assert {(row["batch"], row["outputs"]) for row in rows(Path("run"))} == {("1", ""), ("1", "agree")}
    assert {trial.outputs()["y"].shape for trial in dyno.load("run").records} == {(15, 3)}


def test_the_onnx_domain_has_two_names(call: Any) -> None:
    weights = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    for written in ("node", "import", "both"):
        model = saved("(float[n, 4] x) => (float[n, 3] y) { m = MatMul(x, w) y = Relu(m) }", w=weights)
        for node in model.graph.node[: 2 * (written != "import")]:
            node.domain = "ai.onnx"
        if written != "node":
            model.opset_import[0].domain = "ai.onnx"
        onnx.save(model, "net.onnx")
        x = np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)
        np.savez("x.npz", x=x)
        words = ("--input", "x.npz", "--compared", 2)
        call("run", "net.onnx", *QUICK, *words, "--out", written, code=0)
        for trial in dyno.load(written).records:
            np.testing.assert_allclose(trial.outputs()["y"], np.maximum(x @ weights, 0), 1e-4, 1e-5)


@pytest.mark.parametrize("imported", [True, False])
def test_tensorrt_operators_are_refused_by_each_engine(call: Any, imported: bool) -> None:
    """Its tools put plug-ins into ONNX's own domain, or into one without a version: its parser goes by the name."""
    model = network(["n", 3, 24, 24])
    model.graph.node[1].op_type, model.graph.node[1].domain = "EfficientNMS_TRT", "" if imported else "TRT"
    onnx.save(model, "net.onnx")
    call("run", "net.onnx", *QUICK, "--out", "run", code=3)
    assert all("EfficientNMS_TRT" in row["reason"] for row in rows(Path("run"))), rows(Path("run"))


@pytest.mark.parametrize("channels", [1, 3])
def test_free_channels_are_taken_from_the_first_convolution(call: Any, photos: Path, channels: int) -> None:
    """As in every image model of Hugging Face's exporter."""
    model = network(["batch_size", channels, 24, 24], channels=channels)
    for axis, name in enumerate(("num_channels", "height", "width"), 1):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    node = h.make_node("Cast", ["image"], ["cast"], to=KINDS.FLOAT)
    model.graph.node[0].input[0] = "cast"
    model.graph.node.insert(0, node)
    words = ("--size", "24x32", "--batch", 2, "--precision", "fp32,int8", "--data", photos)
    found = measured(call, model, *words)
    assert [(row["status"], row["size"], row["parameters"]) for row in found] == [
        ("ok", "24x32", str(54 * channels + 6))
    ] * 4
    call("run", "net.onnx", *QUICK, "--out", "plain", code=0)
    assert {(row["status"], row["size"]) for row in rows(Path("plain"))} == {("ok", "224")}


def test_the_shape_suggested_by_a_refusal_works(call: Any) -> None:
    saved("(float[batch, c, height, width] x) => (float[batch, c, height, width] y) { y = Relu(x) }")
    code, _, err = call("run", "net.onnx", *QUICK, "--out", "run")
    assert code == 2 and "--shapes x:batchx<c>xheightxwidth" in err
    call(
        "run",
        "net.onnx",
        *QUICK,
        "--size",
        16,
        "--shapes",
        "x:batchx5xheightxwidth",
        "--batch",
        2,
        "--out",
        "run",
        code=0,
    )
    for trial in dyno.load("run").records:
        assert trial.outputs()["y"].shape[1:] == (5, 16, 16)
    code, _, err = call("run", "net.onnx", *QUICK, "--shapes", "x:batchx5xwidthxheight", "--out", "other")
    assert code == 2 and "shape has 'width'" in err


@pytest.mark.parametrize("shape", ["", "x:batchx8"])
def test_arrays_are_fed_in_the_fixed_batch_of_a_file(call: Any, shape: str) -> None:
    """They were refused as not of a batch of 1."""
    weights = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    saved("(float[4, 8] x) => (float[4, 3] y) { y = MatMul(x, w) }", w=weights)
    x = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)
    np.savez("x.npz", x=x)
    given = ("--shapes", shape) if shape else ("--input", "x.npz")
    call("run", "net.onnx", *QUICK, *given, "--compared", 8, "--out", "run", code=0)
    assert [(row["batch"], row["status"]) for row in rows(Path("run"))] == [("4", "ok")] * 2
    for trial in dyno.load("run").records:
        assert trial.outputs()["y"].shape == (8, 3)
        assert shape or np.allclose(trial.outputs()["y"], x @ weights, 1e-4, 1e-5)
    code, _, err = call("run", "net.onnx", *QUICK, *given, "--batch", 2, "--out", "other")
    assert code == 2 and "the file's batch is fixed at 4, not 2" in err


@pytest.mark.parametrize("edges", ["float[nodes, nodes] by", "int64[2, num_edges] by"])
def test_graph_network_nodes_are_one_input(call: Any, edges: str) -> None:
    take = {"float": "m = MatMul(by, x)", "int64": "f = Gather(by, zero) g = Gather(x, f) m = ReduceMean(g, zeros)"}
    text = f"(float[nodes, 5] x, {edges}) => (float[nodes, 3] y) {{ {take[edges[:5]]} s = Add(x, m) y = MatMul(s, w) }}"
    weights = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    model = onnx_text.model(text, w=weights, zero=np.array(0), zeros=np.array([0]), opset=18)
    onnx.save(model, "net.onnx")
    code, _, err = call("run", "net.onnx", *QUICK, "--out", "run")
    assert code == 2 and "nodes (x" in err and "--shapes x:<nodes>x5" in err
    shapes = ("--shapes", "x:6x5", *(("--shapes", "by:2x9") if "num_edges" in edges else ()))
    call("run", "net.onnx", *QUICK, *shapes, "--compared", 2, "--out", "run", code=0)
    assert {(row["batch"], row["outputs"]) for row in rows(Path("run"))} == {("1", ""), ("1", "agree")}
    assert {trial.outputs()["y"].shape for trial in dyno.load("run").records} == {(12, 3)}


def test_a_size_input_is_named_where_random_values_fail(call: Any) -> None:
    """As of a mask's decoder, which enlarges to the size of the image."""
    saved("""(float[1, 2, 4, 4] x, float[2] size) => (float[1, 2, h, w] y) {
        s = Cast<to = 7>(size) all = Concat<axis = 0>(ones, s) y = Resize<mode = "linear">(x, , , all)
    }""", ones=np.array([1, 2]))  # fmt: skip
    call("run", "net.onnx", *QUICK, "--out", "run", code=3)
    reasons = [row["reason"] for row in rows(Path("run"))]
    assert all("size held random numbers: --input size=VALUE gives others" in reason for reason in reasons), reasons
    call("run", "net.onnx", *QUICK, "--input", "size=8", "--compared", 2, "--out", "sized", code=0)
    assert {trial.outputs()["y"].shape for trial in dyno.load("sized").records} == {(2, 2, 8, 8)}


def test_a_random_number_of_steps_has_a_warning_and_a_given_one_none(call: Any) -> None:
    flag, state = h.make_tensor_value_info("on", 9, []), h.make_tensor_value_info("state", 1, None)
    outputs = [h.make_tensor_value_info("still_on", 9, []), h.make_tensor_value_info("next", 1, None)]
    nodes = [h.make_node("Identity", ["on"], ["still_on"]), h.make_node("MatMul", ["state", "w"], ["next"])]
    body = h.make_graph(nodes, "body", [h.make_tensor_value_info("step", 7, []), flag, state], outputs)
    nodes = [h.make_node("Squeeze", ["steps"], ["count"]), h.make_node("Loop", ["count", "", "x"], ["y"], body=body)]
    x, y = (h.make_tensor_value_info(name, 1, ["n", 8]) for name in "xy")
    weight = numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")
    graph = h.make_graph(nodes, "g", [x, h.make_tensor_value_info("steps", 7, [1])], [y], [weight])
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8), "loop.onnx")
    run = ("run", "loop.onnx", *QUICK[:-1], "onnxruntime")
    _, out, _ = call(*run, "-o", "drawn", code=0)
    assert "loop: the number of steps is a random 0 or 1 (steps): give it with --input steps=VALUE" in out
    _, out, _ = call(*run, "--input", "steps=5", "-o", "given", code=0)
    assert "number of steps" not in out
