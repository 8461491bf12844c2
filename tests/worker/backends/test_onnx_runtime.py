"""ONNX Runtime: right answers at every batch and precision, true types, and bad files reported in one line."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from dyno.worker.backend import answer_feeds
from dyno.worker.backends import onnx_runtime
from dyno.worker.backends.onnx_runtime import OnnxRuntime, describe_fallback, find_provider
from dyno.worker.makers.precision import OnnxPrecision
from dyno.worker.spec import Artifact, DataSpec, Dims, ModelSpec, Recipe, Runtime, Tensor, Trial, Unavailable
from refusals import refuses


def load(digits: Any, artifact: Artifact | None = None, precision: str = "fp32", batch: int = 1, **options: Any) -> Any:
    return OnnxRuntime().load(digits.trial("onnxruntime", precision, batch, **options), artifact or digits.artifact)


def test_streams_run_as_concurrent_slots(digits: Any) -> None:
    images, _ = digits.images()
    session = load(digits, batch=2, streams=2)
    assert session.slots == 2
    for turn in range(3):  # repeated use of the slots, never with another slot's images
        parts = [images[4 * turn + 2 * slot : 4 * turn + 2 * slot + 2].copy() for slot in (0, 1)]
        for slot in (0, 1):
            session.bind({"input": parts[slot]}, slot)
            session.run(slot)
        for slot in (0, 1):
            session.wait(slot)
        both = np.concatenate([session.fetch(slot)["output"] for slot in (0, 1)])
        alone = load(digits, batch=4)
        np.testing.assert_allclose(both, digits.outputs(alone, images[4 * turn : 4 * turn + 4])["output"], atol=1e-4)
    assert session.facts().options["streams"] == 2
    session.close()
    refuses("streams must be from 1 to the number of threads", load, digits, streams=3)
    trial = digits.trial("onnxruntime", streams=2)
    on_gpu = replace(trial, runtime=replace(trial.runtime, device="cuda:0"))
    assert "give slots" in OnnxRuntime().refuse(on_gpu)


def quantised(digits: Any, folder: Path, target: str = "onnxruntime") -> Artifact:
    data = replace(digits.data, split="calibration")
    recipe = Recipe("onnx_precision", "onnx", "int8", digits.model, Dims(0, 8, 8), {"target": target}, data)
    return OnnxPrecision().make(recipe, digits.artifact, folder)


@pytest.fixture(scope="module")
def int8(digits: Any, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return quantised(digits, tmp_path_factory.mktemp("int8"))


def file_trial(path: Path | str, batch: int = 1, **shapes: tuple[int, ...]) -> Trial:
    dims = Dims(batch, 8, 8, shapes)
    return Trial(ModelSpec("made", f"file:{path}"), "onnxruntime", "fp32", dims, runtime=Runtime(threads=1))


def test_the_probe_runs_a_real_operation() -> None:
    found = OnnxRuntime().probe()
    assert found.devices == ("cpu",)
    assert "CPUExecutionProvider" in found.detail


def test_int8_accuracy_is_within_a_point_of_fp32(digits: Any, int8: Artifact) -> None:
    reference, lowered = (digits.accuracy(load(digits, a, p), 1) for a, p in ((None, "fp32"), (int8, "int8")))
    assert reference > 0.95
    assert lowered > reference - 0.01


def test_each_run_reads_the_last_bound_feed_of_any_dtype(digits: Any) -> None:
    images, _ = digits.images()
    session = load(digits)
    first = digits.outputs(session, images[:1])["output"].copy()
    again = digits.outputs(session, images[1:2].astype(np.float64))["output"].copy()
    assert np.abs(first - again).max() > 0.1
    np.testing.assert_allclose(digits.outputs(session, images[:1])["output"], first)


def test_the_session_keeps_its_feed_alive(digits: Any) -> None:
    images, _ = digits.images()
    session = load(digits, batch=4)
    expected = digits.outputs(session, images[:4])["output"].copy()
    session.bind({"input": images[:4].copy()})
    for _ in range(20):  # allocations that would overwrite the feed if the session hadn't kept it
        np.full((4, 1, 8, 8), np.nan, np.float32)
    session.run()
    np.testing.assert_array_equal(session.fetch()["output"], expected)


def test_facts_report_layers_types_providers_and_settings(digits: Any) -> None:
    facts = load(digits, optimization="basic", spinning=False).facts()
    assert facts.layers_by_type == {"float32": 4}
    assert facts.nodes_by_provider == {"CPUExecutionProvider": facts.layers}
    assert facts.operators["Conv"] == 3
    assert facts.precision_truth.ok
    assert facts.threads == 2
    assert facts.options["optimization"] == "basic"
    assert facts.options["spinning"] is False
    assert sum(facts.time_by_operator.values()) == pytest.approx(1, abs=0.01)


def test_a_provider_without_nodes_is_reported_as_cpu_fallback(digits: Any) -> None:
    """The usual build has a provider for a cloud service, which takes no node of this network."""
    if "AzureExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this build of ONNX Runtime has no second provider")
    session = load(digits, provider="azure")
    facts = session.facts()
    assert session._session.get_providers()[0] == "AzureExecutionProvider"
    if hasattr(session._session, "get_provider_graph_assignment_info"):
        total = facts.nodes_by_provider["CPUExecutionProvider"]
        assert facts.fallback == f"0 of {total} nodes on AzureExecutionProvider: this is the CPU's speed"
    assert load(digits).facts().fallback == ""


def test_an_unavailable_provider_is_refused_by_name(digits: Any) -> None:
    for name, cure in (("xnnpack", "another build may have it"), ("mlx", "pip install onnxruntime-ep-mlx")):
        with pytest.raises(Unavailable, match=rf"^this onnxruntime has no provider {name} \(it has .*cpu.*\); {cure}$"):
            load(digits, provider=name)
    refuse = OnnxRuntime().refuse
    assert refuse(digits.trial("onnxruntime", provider="cuda")) == "provider=cuda is for --device cuda:0"
    on_gpu = replace(digits.trial("onnxruntime", provider="openvino"), runtime=Runtime(device="cuda:0"))
    assert refuse(on_gpu) == "provider=openvino is for --device cpu, as it takes host memory"
    assert refuse(digits.trial("onnxruntime", provider="openvino")) == ""


def test_an_unknown_provider_is_an_error_before_any_run(digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse, trial = OnnxRuntime().refuse, digits.trial("onnxruntime", provider="nonsense")
    refuses(r"^provider=nonsense: ONNX Runtime has no such provider, .*; known: acl, .*cpu", refuse, trial)
    with monkeypatch.context() as later:
        release = SimpleNamespace(get_all_providers=lambda: ["NonsenseExecutionProvider", "CPUExecutionProvider"])
        later.setattr(onnx_runtime, "import_library", lambda: release)
        assert refuse(trial) == "", "a later release has it"
    refuses(r"did you mean xnnpack\?$", refuse, digits.trial("onnxruntime", provider="xnpack"))
    elsewhere = replace(trial, runtime=Runtime(name="other", python="/other/python"))
    assert refuse(elsewhere) == "", "the plug-ins of another Python are known there only"
    for name in onnxruntime.get_all_providers():
        refuse(digits.trial("onnxruntime", provider=name))


class Library:
    """The plug-in interface of ONNX Runtime: a registered plug-in finds one device or none."""

    __version__ = "1.30.0"

    def __init__(self, finds: bool) -> None:
        self.finds, self.registered = finds, dict[str, str]()

    def get_available_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]

    def register_execution_provider_library(self, name: str, path: str) -> None:
        self.registered[name] = path

    def get_ep_devices(self) -> list[SimpleNamespace]:
        names = ["CPU", *(["Some"] if self.finds and self.registered else [])]
        return [SimpleNamespace(ep_name=f"{name}ExecutionProvider") for name in names]


@pytest.mark.parametrize("finds", [True, False])
def test_a_plug_in_provider_is_registered_and_needs_a_device(finds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = SimpleNamespace(get_ep_names=lambda: ["SomeExecutionProvider"], get_library_path=lambda: "some.so")
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_some", plugin)
    ort, trial = Library(finds), replace(file_trial("m.onnx"), options={"provider": "some"})
    if finds:
        found = find_provider(ort, trial)
        assert found is not None and (found.name, len(found.devices)) == ("SomeExecutionProvider", 1)
    else:
        with pytest.raises(Unavailable, match=r"^SomeExecutionProvider is registered, but finds no device here"):
            find_provider(ort, trial)
    assert ort.registered == {"onnxruntime_ep_some": "some.so"}


@pytest.mark.parametrize(
    ("own", "headline"), [(3, "3 of 412 nodes on X: this is the CPU's speed"), (206, ""), (412, "")]
)
def test_a_fallback_is_reported_below_half_of_the_nodes(own: int, headline: str) -> None:
    assert describe_fallback("X", {"X": own, "CPUExecutionProvider": 412 - own}) == headline
    assert describe_fallback("X", {}) == ""


def test_int8_runs_in_int8_unless_optimisation_is_disabled(digits: Any, int8: Artifact) -> None:
    facts = load(digits, int8, "int8").facts()
    assert facts.layers_by_type == {"int8": 4}
    assert facts.precision_truth.ok
    unfused = load(digits, int8, "int8", optimization="disable").facts()
    assert not unfused.precision_truth.ok
    assert any("4 of 4 compute layers stayed in float32" in note for note in unfused.notes)
    assert any("QuantizeLinear" in note for note in unfused.notes)


def test_fp16_truth_matches_the_counted_layers_on_any_cpu(digits: Any, tmp_path: Path) -> None:
    recipe = Recipe("onnx_precision", "onnx", "fp16", digits.model, Dims(0, 8, 8))
    session = load(digits, OnnxPrecision().make(recipe, digits.artifact, tmp_path), "fp16")
    truth = session.facts().precision_truth
    # The outcome depends on the CPU; the sentence must agree with the counts in both cases.
    assert truth.ok == (truth.share.get("float16", 0) >= 0.5)
    assert digits.accuracy(session, 1) > 0.95


def test_a_fixed_batch_runs_and_other_batches_are_refused(digits: Any, static_file: Path) -> None:
    artifact = digits.described(static_file, batch=1)
    assert digits.accuracy(load(digits, artifact), 1) > 0.95
    refuses("fixed batch 1, not 4; export it with --batch dynamic", load, digits, artifact, batch=4)


def test_shapes_are_read_from_a_file_without_a_description(digits: Any) -> None:
    assert OnnxRuntime().load(digits.trial("onnxruntime", batch=2), None).inputs[0].shape == (2, 1, 8, 8)


def test_an_unnamed_free_dimension_takes_the_batch(onnx_file: Any) -> None:
    path = onnx_file("(float[?, 3] x) => (float[?, 3] output) { output = Relu(x) }")
    described = Artifact("onnx", str(path), "", 0, "fp32", (Tensor("x", "float32", ("x_0", 3)),), (), 0.0)
    for artifact in (None, described):
        session = OnnxRuntime().load(file_trial(path, batch=2), artifact)
        assert session.inputs[0].shape == (2, 3)
        np.testing.assert_array_equal(
            answer_feeds(session, {"x": np.array([[-1, 2, -3], [4, -5, 6]], np.float32)})["output"],
            [[0, 2, 0], [4, 0, 6]],
        )


def test_token_ids_need_a_length(onnx_file: Any) -> None:
    text = "(int64[batch, length] ids) => (float[batch, length, 2] output) { output = Gather(table, ids) }"
    path = onnx_file(text, table=np.arange(20, dtype=np.float32).reshape(10, 2))
    refuses("'ids' has a free dimension 'length'", OnnxRuntime().load, file_trial(path), None)
    session = OnnxRuntime().load(file_trial(path, ids=(1, 3)), None)
    np.testing.assert_array_equal(
        answer_feeds(session, {"ids": np.array([[1.0, 0.0, 2.0]], np.float32)})["output"], [[[2, 3], [0, 1], [4, 5]]]
    )


def test_outputs_of_dynamic_shape_are_fetched(onnx_file: Any) -> None:
    path = onnx_file("(float[batch, 4] x) => (int64[2, found] where) { where = NonZero(x) }")
    session = OnnxRuntime().load(file_trial(path), None)
    for row, count in (([0, 1, 0, 1], 2), ([1, 1, 1, 0], 3)):
        assert answer_feeds(session, {"x": np.array([row], np.float32)})["where"].shape == (2, count)


def test_an_input_can_also_be_an_output(onnx_file: Any) -> None:
    path = onnx_file("(float[batch, 4] x) => (float[batch, 4] y, float[batch, 4] x) { y = Relu(x) }")
    session = OnnxRuntime().load(file_trial(path), None)
    for row in [0, -1, 0, 1], [-2, 3, 1, 0]:
        given = np.array([row], np.float32)
        session.bind({"x": given})
        session.run()
        fetched = session.fetch()
        assert np.array_equal(fetched["x"], given) and np.array_equal(fetched["y"], np.maximum(given, 0))


def test_outputs_keep_their_names_with_or_without_known_shapes(onnx_file: Any) -> None:
    # The library places `where`; `looped` is of unknown rank, described like a scalar.
    path = onnx_file("""(float[1, 4] x) => (int64[2, found] where, float[1, 4] relu, float sum, float[] looped) {
        where = NonZero(x)
        relu = Relu(x)
        sum = ReduceSum<keepdims = 0>(x)
        looped = Loop<body = body (int64 i, bool go, float[] h) => (bool on, float[] twice) {
            twice = Add(h, h) on = Identity(go)
        }>(trips, yes, x)
    }""", trips=np.array(3), yes=np.array(True))  # fmt: skip
    session = OnnxRuntime().load(file_trial(path, x=(1, 4)), None)
    for row in ([0, 1, 0, -1], [1, -1, 1, 0]):
        found = answer_feeds(session, {"x": np.array([row], np.float32)})
        np.testing.assert_array_equal(found["where"], np.nonzero([row]))
        np.testing.assert_array_equal(found["relu"], np.maximum([row], 0))
        np.testing.assert_array_equal(found["looped"], 8 * np.array([row]))
        assert found["sum"] == sum(row) and found["sum"].shape == ()


def test_running_out_of_memory_is_a_memory_error(onnx_file: Any) -> None:
    path = onnx_file("""(float[batch, 2] x) => (float[batch, 2] output) {
        huge = ConstantOfShape(size) sum = ReduceSum<keepdims = 0>(huge) output = Add(x, sum)
    }""", size=np.array([1 << 44]))  # fmt: skip

    def load_and_run() -> None:  # old versions compute constants at load time
        session = OnnxRuntime().load(file_trial(path), None)
        session.bind({"x": np.zeros((1, 2), np.float32)})
        session.run()

    with pytest.raises(MemoryError, match="could not allocate memory"):
        load_and_run()


def test_bad_files_and_feeds_are_reported_in_one_line(digits: Any, tmp_path: Path) -> None:
    whole = Path(digits.artifact.path).read_bytes()
    cases = {"text.onnx": b"not a model", "empty.onnx": b"", "short.onnx": whole[: len(whole) // 2]}
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
    for name in (*cases, "missing.onnx"):
        refuses(name, OnnxRuntime().load, file_trial(tmp_path / name), None)
    session = load(digits)
    refuses("wants 1x1x8x8, but got 2x1x8x8", session.bind, {"input": np.zeros((2, 1, 8, 8), np.float32)})
    refuses("'input' was not fed", session.bind, {"image": np.zeros((1, 1, 8, 8), np.float32)})
    refuses("unknown optimization 'most'", load, digits, optimization="most")


def test_unsupported_trials_are_refused(digits: Any) -> None:
    engine = OnnxRuntime()
    good = digits.trial("onnxruntime", "int8")
    assert engine.refuse(good) == ""
    assert "give --data" in engine.refuse(replace(good, data=DataSpec()))
    assert "no bf16" in engine.refuse(replace(good, precision="bf16"))
    assert "can't run on tpu:0" in engine.refuse(replace(good, runtime=Runtime(device="tpu:0")))
    assert "reads .onnx files, not model.xml" in engine.refuse(replace(good, model=ModelSpec("m", "file:/a/model.xml")))


SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from dyno.worker.backends.onnx_runtime import OnnxRuntime
from dyno.worker.spec import Dims, ModelSpec, Runtime, Trial
trial = Trial(ModelSpec("m", "file:" + sys.argv[2]), "onnxruntime", "fp32", Dims(2, 8, 8), runtime=Runtime(threads=1))
session = OnnxRuntime().load(trial, None)
session.bind({"input": np.zeros((2, 1, 8, 8), np.float32)})
session.run()
session.fetch()
session.facts()
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules} & {"onnx", "torch", "onnxconverter_common"})))
"""


def test_loading_and_facts_import_only_numpy_and_onnxruntime(digits: Any, root: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(root / "src"), digits.artifact.path]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200).stdout.strip() == "[]"


def test_index_operators_do_not_count_as_a_precision(onnx_file: Any) -> None:
    text = "{ where = NonZero(x) pairs = Transpose(where) y = GatherND(x, pairs) }"
    session = OnnxRuntime().load(file_trial(onnx_file("(float[1, 4] x) => (float[some, 1] y)" + text)), None)
    session.bind({"x": np.array([[1, 2, 0, 4]], np.float32)})
    facts = session.facts()
    assert "Transpose" in facts.operators and facts.layers_by_type == {}
    assert not facts.precision_truth.ok and not facts.precision_truth.refuted
