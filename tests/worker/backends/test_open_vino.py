"""OpenVINO: exactly the requested precision, an IR on the way, and no telemetry."""

import hashlib
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.worker.backends import open_vino
from dyno.worker.backends.open_vino import PRECISION_HINTS, OpenVino, _create_core
from dyno.worker.backends.open_vino_files import IR_MAKER
from dyno.worker.facts.engine import PrecisionTruth
from dyno.worker.makers.precision import OnnxPrecision
from dyno.worker.spec import Artifact, DataSpec, Dims, ModelSpec, Recipe, Runtime, Tensor, Trial, Unavailable
from refusals import refuses


def ir(digits: Any, folder: Path, parent: Artifact | None = None) -> Artifact:
    parent = parent or digits.artifact
    recipe = Recipe("openvino", "openvino", parent.precision, digits.model, Dims(0, 8, 8))
    return IR_MAKER.make(recipe, parent, folder)


def quantised(digits: Any, folder: Path, parent: Artifact) -> Artifact:
    data = replace(digits.data, split="calibration")
    recipe = Recipe("onnx_precision", "onnx", "int8", digits.model, Dims(0, 8, 8), {"target": "openvino"}, data)
    return OnnxPrecision().make(recipe, parent, folder)


@pytest.fixture(scope="module")
def fp32(digits: Any, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return ir(digits, tmp_path_factory.mktemp("fp32"))


@pytest.fixture(scope="module")
def int8(digits: Any, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("int8")
    return ir(digits, folder, quantised(digits, folder, digits.artifact))


def load(digits: Any, artifact: Artifact | None, precision: str = "fp32", batch: int = 1, **options: Any) -> Any:
    return OpenVino().load(digits.trial("openvino", precision, batch, **options), artifact)


def capabilities() -> list[str]:
    return list(_create_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))


def test_a_signal_after_repeated_use_does_not_kill_the_process() -> None:
    """OpenVINO lends the main thread a signal stack; after its unmapping the next signal would kill the process."""
    code = (
        "import gc, os, signal; from dyno.worker.backends.open_vino import OpenVino\n"
        "for _ in range(3): OpenVino().probe(); gc.collect()\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('handled')); os.kill(os.getpid(), signal.SIGUSR1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1200)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


def test_the_probe_runs_a_real_operation() -> None:
    found = OpenVino().probe()
    assert found.devices == ("cpu",)
    assert "FP32" in found.detail


def test_the_ir_is_described_and_keeps_float32_weights(digits: Any, fp32: Artifact) -> None:
    path = Path(fp32.path)
    both = path.read_bytes() + path.with_suffix(".bin").read_bytes()
    assert fp32.bytes == len(both) > 4 * 18_000
    assert fp32.sha256 == hashlib.sha256(both).hexdigest()
    assert fp32.inputs == digits.artifact.inputs
    assert fp32.seconds > 0
    assert fp32.made_by.parameters == 1234
    assert fp32.parent_sha256 == digits.artifact.sha256


def test_fp32_is_float32_on_every_cpu(digits: Any, fp32: Artifact) -> None:
    facts = load(digits, fp32).facts()
    assert facts.layers_by_type == {"float32": 4}
    assert facts.precision_truth == PrecisionTruth(
        requested="fp32",
        share={"float32": 1.0},
        ok=True,
        refuted=False,
        sentence="asked for fp32: OpenVINO ran 4 of 4 compute layers in float32; measured: products keep 24 bits",
    )
    assert facts.options["INFERENCE_PRECISION_HINT"] == "f32"
    assert facts.options["NUM_STREAMS"] == 1
    assert facts.threads == 2
    assert facts.operators["Convolution"] == 3
    assert sum(facts.time_by_operator.values()) == pytest.approx(1, abs=0.01)


def test_an_ir_converted_by_openvino_runs(digits: Any, tmp_path: Path) -> None:
    """Its output has no name, and `save_model` stores FP16 weights by default."""
    import openvino as ov
    import torch

    net = torch.nn.Sequential(torch.nn.Conv2d(1, 16, 3), torch.nn.Flatten(), torch.nn.Linear(16 * 36, 10)).eval()
    path = tmp_path / "net.xml"
    ov.save_model(ov.convert_model(net, example_input=torch.zeros(1, 1, 8, 8), input=[-1, 1, 8, 8]), path)
    model = replace(digits.model, source=f"file:{path}")
    artifact = IR_MAKER.make(Recipe("openvino", "openvino", "fp32", model, Dims(0, 8, 8)), None, tmp_path)
    assert [tensor.name for tensor in artifact.outputs] == ["output"], "as a module's"
    session = load(digits, artifact)
    image = np.random.default_rng(0).standard_normal((1, 1, 8, 8), np.float32)
    session.bind({artifact.inputs[0].name: image})
    session.run()
    session.wait()
    with torch.inference_mode():
        expected = net(torch.from_numpy(image)).numpy()
    np.testing.assert_allclose(session.fetch()["output"], expected, atol=2e-3)
    truth = session.facts().precision_truth
    assert truth.share == {"float32": 1.0}, "weights stored in FP16 are computed with in FP32"


def test_an_fp32_trial_that_ran_in_bfloat16_is_detected(
    digits: Any, fp32: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "BF16" not in capabilities():
        pytest.skip("this CPU has no bfloat16 for OpenVINO to slip into")
    monkeypatch.setitem(PRECISION_HINTS, "fp32", "bf16")
    truth = load(digits, fp32).facts().precision_truth
    assert not truth.ok
    assert "4 in bfloat16" in truth.sentence


@pytest.mark.parametrize(
    ("precision", "capability", "kind"), [("bf16", "BF16", "bfloat16"), ("fp16", "FP16", "float16")]
)
def test_16_bit_precisions_run_in_16_bits_or_are_unavailable(
    digits: Any, fp32: Artifact, precision: str, capability: str, kind: str
) -> None:
    if capability not in capabilities():
        with pytest.raises(Unavailable, match=f"doesn't compute in {precision} on this CPU"):
            load(digits, fp32, precision)
        return
    session = load(digits, fp32, precision)
    assert session.facts().layers_by_type == {kind: 4}
    assert digits.accuracy(session, 1) > 0.95


def test_int8_runs_in_int8_within_a_point_of_fp32_accuracy(digits: Any, fp32: Artifact, int8: Artifact) -> None:
    session = load(digits, int8, "int8")
    facts = session.facts()
    assert facts.layers_by_type == {"int8": 4}
    assert facts.precision_truth.ok
    assert digits.accuracy(session, 1) > digits.accuracy(load(digits, fp32), 1) - 0.01
    assert int8.made_by.calibration.samples == 128
    assert int8.made_by.scheme.startswith("U8S8")


def test_int8_is_correct_where_asymmetric_activations_would_fail(digits: Any, tmp_path: Path) -> None:
    """With zero points other than 0, OpenVINO's outputs for this network are more than 100 % off."""
    import torch
    from torchvision.models import mobilenet_v3_small

    torch.manual_seed(0)
    digits.export(mobilenet_v3_small(num_classes=10).eval(), tmp_path / "mobilenet.onnx", (3, 32, 32))
    rng = np.random.default_rng(0)
    np.save(tmp_path / "images.npy", rng.integers(0, 256, (12, 3, 32, 32), dtype=np.uint8))
    for name in ("labels", "calibration"):
        np.save(tmp_path / f"{name}.npy", np.arange(12))
    model, dims = ModelSpec("mobilenet", "file:mobilenet.onnx"), Dims(1, 32, 32)
    parent = replace(
        digits.described(tmp_path / "mobilenet.onnx"), inputs=(Tensor("input", "float32", ("n", 3, 32, 32)),)
    )
    data = DataSpec("noise", str(tmp_path), split="calibration")
    recipe = Recipe("onnx_precision", "onnx", "int8", model, dims, {"target": "openvino"}, data)
    image = rng.standard_normal((1, 3, 32, 32)).astype(np.float32)
    outputs = []
    for file, precision in ((parent, "fp32"), (OnnxPrecision().make(recipe, parent, tmp_path), "int8")):
        session = OpenVino().load(Trial(model, "openvino", precision, dims), file)
        outputs.append(digits.outputs(session, image)["output"].copy())
    assert np.abs(outputs[1] - outputs[0]).mean() < 0.2 * np.abs(outputs[0]).mean()


def test_an_int8_trial_of_a_float_graph_is_detected(digits: Any, fp32: Artifact) -> None:
    facts = load(digits, fp32, "int8").facts()
    assert not facts.precision_truth.ok
    assert any("stayed in float32" in note for note in facts.notes)


def test_streams_run_as_concurrent_slots(digits: Any, fp32: Artifact) -> None:
    images, _ = digits.images()
    session = load(digits, fp32, batch=2, streams=2)
    assert session.slots == 2
    for slot in (0, 1):
        session.bind({"input": images[2 * slot : 2 * slot + 2].copy()}, slot)
        session.run(slot)
    for slot in (0, 1):
        session.wait(slot)
    both = np.concatenate([session.fetch(slot)["output"] for slot in (0, 1)])
    alone = load(digits, fp32, batch=4)
    np.testing.assert_allclose(both, digits.outputs(alone, images[:4])["output"], atol=1e-3)
    refuses("streams must be from 1 to the number of threads", load, digits, fp32, streams=3)


def test_an_ir_runs_as_a_model_and_needs_its_weights(digits: Any, fp32: Artifact, tmp_path: Path) -> None:
    copy = tmp_path / "mine.xml"
    shutil.copy(fp32.path, copy)
    trial = replace(digits.trial("openvino"), model=ModelSpec("mine", f"file:{copy}"))
    assert OpenVino().refuse(trial) == ""
    recipe = OpenVino().recipe(trial)
    for fails in (lambda: OpenVino().load(trial, None), lambda: IR_MAKER.make(recipe, None, tmp_path)):
        refuses(r"mine\.bin is missing", fails)
    shutil.copy(Path(fp32.path).with_suffix(".bin"), tmp_path / "mine.bin")
    given = IR_MAKER.make(recipe, None, tmp_path)
    assert given.path == str(copy)
    assert given.bytes == copy.stat().st_size + (tmp_path / "mine.bin").stat().st_size
    session = OpenVino().load(trial, None)
    assert session.inputs[0].name == "input"
    assert digits.accuracy(session, 1) > 0.95


def test_a_path_with_commas_is_read_as_one_path(static_file: Path, tmp_path: Path) -> None:
    """Trainers' sweeps name folders that way; OpenVINO's converter takes such a path for a list."""
    path = tmp_path / "lr=0.1,bs=32/net,v2.onnx"
    path.parent.mkdir()
    shutil.copy(static_file, path)
    assert len(open_vino.read_model(open_vino.import_library(), str(path)).inputs) == 1


def test_bad_files_are_reported_in_one_line(digits: Any, fp32: Artifact, tmp_path: Path) -> None:
    text = Path(fp32.path).read_text()
    weights = Path(fp32.path).with_suffix(".bin").read_bytes()
    files = {
        "cut.xml": (text[: len(text) // 2], weights),
        "empty.xml": ("", b""),
        "short.xml": (text, weights[:1000]),
        "text.onnx": ("not a model", None),
    }
    for name, (content, binary) in files.items():
        (tmp_path / name).write_text(content)
        if binary is not None:
            (tmp_path / name).with_suffix(".bin").write_bytes(binary)
    for name in (*files, "missing.xml"):
        trial = replace(digits.trial("openvino"), model=ModelSpec("bad", f"file:{tmp_path / name}"))
        refuses(name, OpenVino().load, trial, None)


@pytest.mark.slow
def test_a_fixed_batch_is_refused_at_another(digits: Any, static_file: Path, tmp_path: Path) -> None:
    artifact = ir(digits, tmp_path, digits.described(static_file, batch=1))
    assert digits.accuracy(load(digits, artifact), 1) > 0.95
    refuses("fixed batch 1, not 4", load, digits, artifact, batch=4)


def test_running_out_of_memory_is_a_memory_error(digits: Any, onnx_file: Any) -> None:
    path = onnx_file("""(float[batch, 1, 8, 8] input) => (float[batch, 1, 8, 8] output) {
                     huge = ConstantOfShape(size) sum = ReduceSum<keepdims = 0>(huge) output = Add(input, sum)
                 }""", size=np.array([1 << 44]))  # fmt: skip
    trial: Trial = replace(digits.trial("openvino"), model=ModelSpec("huge", f"file:{path}"))
    with pytest.raises(MemoryError, match="could not allocate memory"):
        OpenVino().load(trial, None)


def test_unsupported_trials_are_refused(digits: Any) -> None:
    good = digits.trial("openvino", "int8")
    assert OpenVino().refuse(good) == ""
    assert "give --data" in OpenVino().refuse(replace(good, data=DataSpec()))
    assert "no fp8" in OpenVino().refuse(replace(good, precision="fp8"))
    assert "not model.pt" in OpenVino().refuse(replace(good, model=ModelSpec("m", "file:/a/model.pt")))


SILENT = """
import socket, sys, time
sys.path.insert(0, sys.argv[1])
asked = []
def refuse(*args, **kwargs):
    asked.append(args[0])
    raise socket.gaierror("no such host")
socket.getaddrinfo = refuse
from pathlib import Path
import numpy as np
from dyno.worker.backends.open_vino_files import IR_MAKER
from dyno.worker.backends.open_vino import OpenVino
from dyno.worker.spec import Artifact, Dims, ModelSpec, Recipe, Runtime, Trial
onnx = Artifact("onnx", sys.argv[2], "", 0, "fp32", (), (), 0.0)
model = ModelSpec("m", "file:m.onnx")
made = IR_MAKER.make(Recipe("openvino", "openvino", "fp32", model, Dims(0, 8, 8)), onnx, Path(sys.argv[3]))
session = OpenVino().load(Trial(model, "openvino", "fp32", Dims(1, 8, 8), runtime=Runtime(threads=1)), made)
session.bind({"input": np.zeros((1, 1, 8, 8), np.float32)})
session.run()
session.wait()
session.facts()
time.sleep(0.5)  # the telemetry thread would ask now
print(asked)
"""


def test_no_host_is_resolved_and_nothing_is_written_to_home(digits: Any, root: Path, tmp_path: Path) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    out.mkdir()
    command = [sys.executable, "-c", SILENT, str(root / "src"), digits.artifact.path, str(out)]
    env = {"HOME": str(home), "ORT_DISABLE_TELEMETRY": "1"}  # as in every job: the IR is compared with ONNX Runtime
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200, env=env)
    assert done.stdout.strip() == "[]"
    assert list(home.iterdir()) == []


@pytest.mark.slow
def test_loops_and_conditions_run_and_do_not_count_as_a_precision(onnx_file: Any) -> None:
    path = onnx_file("""(int64 times, float[3] x) => (float[3] y) {
                     sum = ReduceSum<keepdims = 0>(x)
                     positive = Greater(sum, zero)
                     chosen = If<then_branch = up () => (float[3] up) { up = Exp(x) },
                                 else_branch = down () => (float[3] down) { down = Neg(x) }>(positive)
                     y = Loop<body = body (int64 k, bool on, float[3] state) => (bool go, float[3] next) {
                         next = Add(state, state) go = Identity(on)
                     }>(times, , chosen)
                 }""", zero=np.float32(0))  # fmt: skip
    trial = Trial(ModelSpec("made", f"file:{path}"), "openvino", "fp32", Dims(3, 8, 8), runtime=Runtime(threads=1))
    session = OpenVino().load(trial, None)
    session.bind({"times": np.array(2, np.int64), "x": np.array([-1, -2, -3], np.float32)})
    session.run()
    session.wait()
    np.testing.assert_allclose(session.fetch()["y"], [4, 8, 12])
    facts = session.facts()  # layers in the branches aren't reported
    assert facts.layers_by_type.keys() == {"unknown"} and facts.precision_truth is not None
    assert not facts.precision_truth.ok and not facts.precision_truth.refuted


@pytest.mark.parametrize(
    ("counted", "kernel", "runs"),
    [("not_executed", "jit_avx512_f32", True), ("not_executed", "unknown_f32", False), ("not_executed", "undef", False),
     ("7", "unknown_i32", True), ("not_executed", "reorder_f32", False)],
)  # fmt: skip
def test_a_layer_under_a_microsecond_is_not_skipped(counted: str, kernel: str, runs: bool) -> None:
    assert open_vino._is_skipped({"execTimeMcs": counted, "primitiveType": kernel}) is not runs


def test_layers_renumbered_by_each_compilation_are_still_timed(onnx_file: Any) -> None:
    """OpenVINO splits a bidirectional LSTM into two layers, named by a running number."""
    text = """(float[64, 1, 64] x) => (float[64, 2, 1, 64] y) {
        y = LSTM<hidden_size = 64, direction = "bidirectional">(x, w, r)
    }"""
    path = onnx_file(text, **dict.fromkeys("wr", np.full((2, 256, 64), 0.01, np.float32)))
    trial = Trial(ModelSpec("made", f"file:{path}"), "openvino", "fp32", Dims(1, 8, 8), runtime=Runtime(threads=1))
    times = OpenVino().load(trial, None).profile(5)
    counted = [k for k, layer in enumerate(times.graph.layers) if layer.computes_in]
    assert len(counted) == 2 and (times.layers[:, counted] > 0).all()


def test_an_input_can_also_be_an_output(digits: Any, onnx_file: Any, tmp_path: Path) -> None:
    """OpenVINO's converter adds another input to the graph, one without a feed."""
    ends = "(float[batch, 1, 8, 8] x) => (float[batch, 1, 8, 8] y, float[batch, 1, 8, 8] x)"
    path = onnx_file(ends + "{ y = Relu(x) }")
    session = load(digits, ir(digits, tmp_path, replace(digits.artifact, path=str(path))))
    assert [tensor.name for tensor in session.inputs] == ["x"]
    given = np.random.default_rng(0).standard_normal((1, 1, 8, 8), np.float32)
    session.bind({"x": given})
    session.run()
    session.wait()
    fetched = session.fetch()
    assert list(fetched) == ["y", "x"]
    assert np.array_equal(fetched["x"], given) and np.array_equal(fetched["y"], np.maximum(given, 0))
