"""Real engines: TensorRT-RTX's builder works without a GPU, with the interface of TensorRT 10 and 11."""

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.worker.backends.tensor_rt import layers, library
from dyno.worker.facts.engine import Probe
from dyno.worker.facts.files import MakerFacts, RankedLayer
from dyno.worker.makers.precision import convert_recipe
from dyno.worker.registry import find, get_maker
from dyno.worker.spec import (
    Artifact,
    Dims,
    ModelSpec,
    Recipe,
    Runtime,
    Tensor,
    Trial,
    Unavailable,
    UserError,
    from_json,
    to_json,
)
from refusals import refuses

onnx = pytest.importorskip("onnx")
NAME = "tensorrt_rtx"
GPU = Runtime(device="cuda:0")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec(NAME), reason="tensorrt-rtx is not installed"),
]


def recipe(precision: str = "fp32", batch: int = 4, size: int = 8, **options: Any) -> Recipe:
    """Return a recipe that takes any file."""
    model = ModelSpec("net", "file:net.onnx", precision="" if precision in ("fp32", "tf32") else precision)
    trial = Trial(model, NAME, precision, Dims(batch, size, size), options, runtime=GPU)
    made = find(NAME).recipe(trial)
    assert made is not None
    return made


def make(parent: Artifact, folder: Path, precision: str = "fp32", batch: int = 4, **options: Any) -> Artifact:
    return get_maker(NAME).make(recipe(precision, batch, **options), parent, folder)


def described(path: Path) -> Artifact:
    """Return the file's artifact, as the exporter describes it."""
    from dyno.worker.onnx_graph.file import read_io

    return Artifact("onnx", str(path), "abc", path.stat().st_size, "fp32", *read_io(str(path)), 0.0)


@pytest.fixture(scope="module")
def engine(digits: Any, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The digits' engine in fp32 at batch 4, for tests that only read it."""
    return make(digits.artifact, tmp_path_factory.mktemp("engine"), optimization=1)


def test_a_dynamic_file_becomes_a_static_engine(digits: Any, engine: Artifact) -> None:
    made, content = engine, Path(engine.path).read_bytes()
    assert (made.format, made.bytes, made.sha256) == ("engine", len(content), hashlib.sha256(content).hexdigest())
    assert made.inputs == (Tensor("input", "float32", (4, 1, 8, 8)),)
    assert made.outputs == (Tensor("output", "float32", (4, 10)),)
    assert made.parent_sha256 == digits.artifact.sha256
    assert made.made_by.parameters == 1234, "the model's, from the file's maker"


def test_a_dynamic_engine_keeps_the_batch_axis_name_of_the_file(digits: Any, tmp_path: Path) -> None:
    made = make(digits.artifact, tmp_path, profile="1:8:16")
    assert made.inputs == (Tensor("input", "float32", ("batch", 1, 8, 8)),)
    assert made.outputs == (Tensor("output", "float32", ("batch", 10)),)
    assert made.made_by.profiles == ({"input": [[1, 1, 8, 8], [8, 1, 8, 8], [16, 1, 8, 8]]},)


def test_a_profile_with_one_shape_makes_a_static_engine(digits: Any, tmp_path: Path) -> None:
    made = make(digits.artifact, tmp_path, profile="input:2x1x8x8")
    assert made.inputs == (Tensor("input", "float32", (2, 1, 8, 8)),)


def test_an_engine_can_have_several_profiles(digits: Any, tmp_path: Path) -> None:
    made = make(digits.artifact, tmp_path, profile="1|16:32:64")
    assert [sorted(p) for p in made.made_by.profiles] == [["input"], ["input"]]
    assert made.inputs[0].shape == ("batch", 1, 8, 8)


def test_the_layers_are_listed(engine: Artifact) -> None:
    listed, told = json.loads(Path(engine.path).with_name("layers.json").read_text()), engine.made_by
    assert told.layers == len(listed) > 5
    assert told.operators["correlation"] == 3, "three convolutions"
    assert told.layers_by_type == {"float32": 4}, "and a matrix product"
    assert told.precision_truth.ok
    convolutions = [one for one in listed if one["type"] == "correlation"]
    assert convolutions[0]["inputs"][0]["shape"] == [4, 1, 8, 8]
    assert {one["weights"]["dtype"] for one in convolutions} == {"float32"}
    assert any("Conv" in node for node in convolutions[0]["nodes"])


def test_the_record_describes_the_build(engine: Artifact) -> None:
    told = engine.made_by
    assert from_json(MakerFacts, json.loads(json.dumps(to_json(told)))) == told
    assert (told.backend, told.route, told.typed, told.flags) == (NAME, "graph", "strongly", ())
    assert told.options == {"optimization": 1}
    assert told.versions == {"tensorrt-rtx": library.load(NAME).__version__}
    assert told.build_s > 0 and not told.timing_cache.used
    assert any("compared with TensorRT's" in note for note in told.notes)


def test_tf32_is_off_by_default(digits: Any, tmp_path: Path) -> None:
    assert make(digits.artifact, tmp_path, "tf32").made_by.flags == ("TF32",)


def lowered(digits: Any, precision: str, folder: Path, ranking: tuple[RankedLayer, ...] = ()) -> Artifact:
    """Return the digits' file in another precision for TensorRT, with the layers of a ranking kept in float."""
    keep = {"keep": len(ranking)} if ranking else {}
    trial = digits.trial(NAME, precision, batch=0, target="tensorrt", samples=32, **keep)
    recipe = convert_recipe(trial, "tensorrt", trial.dims.batch)
    file = replace(digits.artifact, made_by=replace(digits.artifact.made_by, ranking=ranking))
    return get_maker("onnx_precision").make(recipe, file, folder)


@pytest.mark.parametrize(("precision", "kind"), [("fp16", "float16"), ("bf16", "bfloat16"), ("int8", "int8")])
def test_the_engine_keeps_the_types_of_the_graph(digits: Any, tmp_path: Path, precision: str, kind: str) -> None:
    parent = lowered(digits, precision, tmp_path)
    made = make(parent, tmp_path, precision)
    told = made.made_by
    assert told.precision_truth.ok, told.precision_truth.sentence
    assert told.layers_by_type.get(kind, 0) >= 3
    assert made.inputs[0].dtype == "float32" and made.precision == precision
    assert told.scheme == parent.made_by.scheme, "the engine's facts name what shaped the file, too"


def test_an_engine_of_the_wrong_precision_is_an_error(digits: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        make(digits.artifact, tmp_path, "fp16")
    said = str(caught.value)
    assert "ran 0 of 4 compute layers in float16, 4 in float32" in said
    assert "Conv" in said and said.endswith("give allow_mixed=true to accept the engine as it is") and "\n" not in said


def test_opaque_subgraphs_cause_at_most_a_warning(digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = layers.from_log
    closed = layers.EngineLayer("{ForeignNode[softmax]}", "Myelin", (), (), "")
    monkeypatch.setattr(layers, "from_log", lambda text: [*listed(text), closed])
    truth = make(digits.artifact, tmp_path, "fp32").made_by.precision_truth
    assert truth.ok and "4 of 4 compute layers in float32; parts of the graph that it doesn't open: 1" in truth.sentence
    monkeypatch.setattr(layers, "from_log", lambda text: [*listed(text), *[closed] * 9])
    told = make(digits.artifact, tmp_path, "fp32").made_by
    assert not told.precision_truth.ok and "so fp32 is not confirmed" in told.warnings[0]


def test_mixed_precision_can_be_allowed(digits: Any, tmp_path: Path) -> None:
    told = make(digits.artifact, tmp_path, "fp16", allow_mixed=True).made_by
    assert len(told.kept_float32) == 4
    assert told.warnings[0] == told.precision_truth.sentence


def test_the_largest_layer_can_be_kept_in_float(digits: Any, tmp_path: Path) -> None:
    graph = onnx.load(digits.artifact.path).graph
    sizes = {weights.name: np.prod(weights.dims) for weights in graph.initializer}
    largest = max((node for node in graph.node if node.op_type == "Conv"), key=lambda node: sizes[node.input[1]])
    parent = lowered(digits, "int8", tmp_path, (RankedLayer(largest.name, "Conv"),))
    told = make(parent, tmp_path, "int8").made_by
    assert told.layers_by_type == {"int8": 3, "float32": 1}
    # Multiply-adds by the layers' shapes; the third stays in FP32. The builder may pad the first one's single channel.
    lower, higher = 64 * 16 * 9 + 16 * 32 * 16 * 9 + 512 * 10, 16 * 32 * 32 * 9
    assert lower / (lower + higher) - 1e-9 < told.precision_truth.share["int8"] < 0.5
    assert told.warnings[0] == told.precision_truth.sentence
    with pytest.raises(UserError, match=r"3 of 4 compute layers in int8, 1 in float32: ..% of the arithmetic in int8"):
        make(replace(parent, made_by=replace(parent.made_by, kept=())), tmp_path, "int8")


@pytest.mark.parametrize("route", ["flags", "calibrator"])
def test_routes_removed_after_tensorrt_10_are_unavailable(digits: Any, tmp_path: Path, route: str) -> None:
    precision = "fp16" if route == "flags" else "int8"
    asked = replace(recipe(), precision=precision, options={"route": route}, data=digits.data)
    with pytest.raises(Unavailable, match=r"TensorRT-RTX .* has no builder flag for .*; give route=graph"):
        get_maker(NAME).make(asked, digits.artifact, tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty, not an ONNX file"),
        (b"no protobuf", "Failed to parse the ONNX model"),
        (b"\x08\x08", "no outputs"),
    ],
)
def test_a_non_onnx_file_is_refused(digits: Any, tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        make(replace(digits.artifact, path=str(path)), tmp_path)
    assert said in str(caught.value) and "broken.onnx" in str(caught.value) and "\n" not in str(caught.value)


def test_a_truncated_file_is_refused(digits: Any, tmp_path: Path) -> None:
    path = tmp_path / "short.onnx"
    path.write_bytes(Path(digits.artifact.path).read_bytes()[:-4000])
    refuses(r"can't read short\.onnx", make, replace(digits.artifact, path=str(path)), tmp_path)


def test_a_build_without_a_file_is_refused() -> None:
    refuses("an engine is built from an ONNX file", get_maker(NAME).make, recipe(), None, Path())


def test_an_unsupported_operator_is_named_with_its_node(onnx_file: Any, tmp_path: Path) -> None:
    path = onnx_file("(float[n, 4, 4] x) => (float[n] y) { [first] z = Relu(x) [odd_one] y = Det(z) }")
    with pytest.raises(
        UserError, match=r"can't read made\.onnx: it doesn't support the operator Det of node 'odd_one'"
    ):
        make(described(path), tmp_path, profile="4", size=4)


def test_an_invalid_node_is_named(onnx_file: Any, tmp_path: Path) -> None:
    path = onnx_file("(float[n, 4] x) => (float[n, 4] y) { [mixed] y = MatMul(x, w) }", w=np.ones((4, 4), np.float16))
    refuses(r"node 'mixed' \(MatMul\).*same input types", make, described(path), tmp_path)


def test_shape_inputs_are_refused(onnx_file: Any, tmp_path: Path) -> None:
    path = onnx_file("(float[n, 4] x, int64[2] sizes) => (float[a, b] y) { [reshape] y = Reshape(x, sizes) }")
    refuses("input 'sizes' decides the shapes of others", make, described(path), tmp_path)


def test_int64_inputs_are_kept(onnx_file: Any, tmp_path: Path) -> None:
    text = "(int64[n, 3] ids) => (float[n, 3, 4] y) { [lookup] y = Gather(table, ids) }"
    path = onnx_file(text, table=np.ones((10, 4), np.float32))
    made = make(described(path), tmp_path, profile="ids:1x3,2x3,8x3")
    assert made.inputs == (Tensor("ids", "int64", ("n", 3)),)
    assert made.outputs == (Tensor("y", "float32", ("n", 3, 4)),)


def test_a_static_file_accepts_only_its_own_batch(static_file: Path, tmp_path: Path) -> None:
    parent = described(static_file)
    assert make(parent, tmp_path, batch=1).inputs[0].shape == (1, 1, 8, 8)
    for options in ({"batch": 2}, {"profile": "1:2:4"}, {"profile": "input:2x1x8x8"}):
        with pytest.raises(UserError, match=r"fixed.*export it") as caught:
            make(parent, tmp_path, **options)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tactics": "cublas"}, "has no tactic source CUBLAS; it has "),
        ({"hardware_compatible": "turing"}, "has no hardware compatibility level 'turing'; it has none, ampere_plus"),
    ],
)
def test_options_missing_from_this_version_are_refused(
    digits: Any, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as caught:
        make(digits.artifact, tmp_path, **options)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["version_compatible", "refit"])
def test_an_option_takes_effect_or_names_the_missing_requirement(digits: Any, tmp_path: Path, option: str) -> None:
    try:
        made = make(digits.artifact, tmp_path, **{option: True})
    except Unavailable as e:
        reason = str(e)
    else:
        reason = "" if made.made_by.options == {option: True} else "the option was lost"
    assert reason == "" or re.search("TensorRT-RTX .*(Unable to load library|only on a machine with a GPU)", reason)


INTERRUPTED = """
import json, signal, sys
from pathlib import Path

from dyno.worker.backends.tensor_rt.build import build
from dyno.worker.spec import Artifact, Recipe, from_json

name, told, folder = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
recipe, parent, said = from_json(Recipe, told["recipe"]), from_json(Artifact, told["parent"]), []
before = signal.getsignal(signal.SIGINT)
try:
    build(name, recipe, parent, folder, lambda text: signal.raise_signal(signal.SIGINT))
except KeyboardInterrupt:
    assert signal.getsignal(signal.SIGINT) is before
    assert build(name, recipe, parent, folder, said.append).bytes, "the library is as good as before"
    assert any(text.startswith("Building engine ") for text in said), said
    sys.exit(42)
"""


def test_a_build_reports_progress_and_can_be_interrupted(digits: Any, tmp_path: Path) -> None:
    """Build in a separate process, as always: with OpenVINO loaded, an interrupted build crashes the process."""
    told = {"recipe": to_json(recipe()), "parent": to_json(digits.artifact)}
    (tmp_path / "told.json").write_text(json.dumps(told))
    command = [sys.executable, "-c", INTERRUPTED, NAME, str(tmp_path / "told.json"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 42, done.stderr


def test_the_job_stage_shows_the_build_phase(engine: Artifact) -> None:
    assert Path(engine.path).with_name("stage").read_text().startswith("build fp32: ")


def test_the_probe_builds_an_engine() -> None:
    found = find(NAME).probe()
    assert found.version == library.load(NAME).__version__
    assert from_json(Probe, json.loads(json.dumps(to_json(found)))) == found
    assert found.devices or found.detail.startswith("builds engines but can't run them here: ")


def test_reading_a_given_engine_needs_a_gpu(engine: Artifact, tmp_path: Path) -> None:
    model = ModelSpec("net", f"file:{engine.path}", "abc")
    asked = find(NAME).recipe(Trial(model, NAME, "fp32", Dims(4, 8, 8), runtime=GPU))
    assert asked is not None
    with pytest.raises((Unavailable, UserError)) as caught:  # no GPU, or none that RTX supports
        get_maker(NAME).make(asked, None, tmp_path)
    assert "\n" not in str(caught.value)


def test_failed_builds_are_classified_as_memory_or_user_errors() -> None:
    from types import SimpleNamespace

    from dyno.worker.backends.tensor_rt.build import _make_error

    none_left = "Error Code 10: Internal Error (Could not find any implementation for node conv.)"
    skipped = "Skipping tactic 2 due to insufficient memory on requested size of 4294967296 detected"

    def failed(reason: str, warning: str = "", free: int = 10**10) -> type[Exception]:
        log, device = SimpleNamespace(warnings=[warning]), SimpleNamespace(memory=lambda: (free, 144 * 10**9))
        return type(_make_error(SimpleNamespace(log=log, device=device), "can't", reason))  # type: ignore[arg-type]

    assert failed(none_left, skipped) is MemoryError
    assert failed(none_left) is UserError
    assert failed(none_left, free=10**8) is MemoryError
    assert failed("Cask (no further information)", free=10**8) is MemoryError, "as 8.6 says it when nothing is left"
    assert failed("1:", skipped) is MemoryError
    assert failed("API Usage Error", skipped, free=10**8) is UserError
    assert failed("Cuda Runtime (out of memory)") is MemoryError
