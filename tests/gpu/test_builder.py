"""TensorRT's builder in its Python: timing cache, layer listing, and errors of a version or a file."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from dyno.jobs.launcher import launch
from dyno.worker.onnx_graph.file import read_io
from dyno.worker.onnx_graph.repair import convert_opset
from dyno.worker.record import Record
from dyno.worker.registry import find
from dyno.worker.spec import Artifact, Dims, Job, ModelSpec, Runtime, Trial

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
SIZE = 64


@pytest.fixture(scope="module")
def old_onnx(onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network's ONNX file in an opset that every version reads."""
    import onnx as library

    path = tmp_path_factory.mktemp("old") / "small.onnx"
    library.save(convert_opset(library.load(str(onnx)), 17), path)
    return path


@pytest.fixture
def make(tensorrt_python: str, old_onnx: Path, tmp_path: Path) -> Any:
    """Make an engine in a separate job and return its record."""

    def job(path: Path = old_onnx, precision: str = "fp32", size: int = SIZE, **options: Any) -> Record:
        runtime = Runtime("there", tensorrt_python, {"DYNO_TIMING": str(tmp_path / "timing")}, "cuda:0", threads=4)
        model = ModelSpec("net", f"file:{path}", precision="" if precision == "fp32" else precision)
        recipe = find("tensorrt").recipe(
            Trial(model, "tensorrt", precision, Dims(2, size, size), options, runtime=runtime)
        )
        assert recipe is not None
        parent = Artifact("onnx", str(path), "abc", path.stat().st_size, precision, *read_io(str(path)), 0.0)
        folder = tmp_path / f"made{len(list(tmp_path.iterdir()))}"
        return launch(Job("make", runtime, recipe=recipe, artifact=parent), folder, 300)

    return job


def told(record: Record) -> dict[str, Any]:
    assert record.status == "ok" and record.artifact is not None, record.reason
    return record.artifact.made_by


def test_the_timing_cache_speeds_up_the_second_build(make: Any, tmp_path: Path) -> None:
    first, second, off = told(make()), told(make(build=1)), told(make(build=2, timing_cache=False))
    assert [one.timing_cache.used for one in (first, second, off)] == [False, True, False]
    assert second.timing_cache.timed < first.timing_cache.timed
    assert second.build_s < first.build_s and second.build_s < off.build_s
    assert [path.suffix for path in (tmp_path / "timing").glob("*.timing")] == [".timing"]


def test_a_damaged_timing_cache_is_ignored(make: Any, tmp_path: Path) -> None:
    told(make())
    (path,) = (tmp_path / "timing").glob("*.timing")
    path.write_bytes(b"no timing cache")
    assert not told(make(build=1)).timing_cache.used
    assert told(make(build=2)).timing_cache.used, "and written anew"


def test_the_layers_are_listed(make: Any) -> None:
    record = make()
    listed = json.loads((Path(record.artifact.path).parent / "layers.json").read_text())
    found = told(record)
    assert found.layers == len(listed) > 3
    assert set(found.layers_by_type) == {"float32"} and found.layers_by_type["float32"] >= 3
    assert found.precision_truth.ok and found.gpu.capability
    assert found.engine_parameters > 3 * 32 * 9


def test_flags_have_their_effect(make: Any, tmp_path: Path) -> None:
    """A flag only permits a type; the builder takes the fastest kernel, always float16 in these wide convolutions."""
    import numpy as np
    import onnx as library

    weights = np.random.default_rng(0).normal(0, 0.02, (256, 256, 3, 3)).astype(np.float32)
    names = ["x", "a", "b", "y"]
    graph = library.helper.make_graph(
        [library.helper.make_node("Conv", [x, "w"], [y], pads=[1] * 4) for x, y in itertools.pairwise(names)],
        "wide",
        *([library.helper.make_tensor_value_info(name, 1, [2, 256, SIZE, SIZE])] for name in ("x", "y")),
        [library.numpy_helper.from_array(weights, "w")],
    )
    opset = [library.helper.make_opsetid("", 17)]
    library.save(library.helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "wide.onnx")
    found = told(make(tmp_path / "wide.onnx", precision="fp16", route="flags", allow_mixed=True))
    assert found.flags == ("FP16",)
    assert found.typed == "weakly" and found.layers_by_type.get("float16", 0) >= 2


def test_options_missing_in_this_version_are_skipped(make: Any) -> None:
    old = told(make()).versions["tensorrt"].startswith("8.")
    record = make(weight_streaming=True)
    assert record.status == ("skipped" if old else "ok")
    assert (" has no weight_streaming" in record.reason) == old


def test_a_graph_in_another_type_gives_no_engine(make: Any) -> None:
    old = told(make()).versions["tensorrt"].startswith("8.")
    record = make(precision="bf16")
    assert record.status == ("skipped" if old else "failed")
    assert ("has no builder flag for bf16" if old else "ran 0 of 4 compute layers in bfloat16") in record.reason


def test_unsupported_operators_are_named_with_their_node(make: Any, tmp_path: Path) -> None:
    import onnx as library

    def value(name: str, shape: list[Any]) -> Any:
        return library.helper.make_tensor_value_info(name, library.TensorProto.FLOAT, shape)

    nodes = [
        library.helper.make_node("Relu", ["x"], ["z"], "first"),
        library.helper.make_node("Det", ["z"], ["y"], "odd_one"),
    ]
    graph = library.helper.make_graph(nodes, "made", [value("x", ["n", 4, 4])], [value("y", ["n"])])
    path = tmp_path / "odd.onnx"
    library.save(
        library.helper.make_model(graph, opset_imports=[library.helper.make_opsetid("", 17)], ir_version=8), path
    )
    record = make(path, profile="x:2x4x4")
    assert record.status == "failed" and "Det" in record.reason and "'odd_one'" in record.reason, record.reason


def test_a_dynamic_engine_keeps_the_batch_name_of_the_file(make: Any) -> None:
    record = make(profile="1:2:8")
    assert record.artifact is not None, record.reason
    assert [t.shape for t in (*record.artifact.inputs, *record.artifact.outputs)] == [
        ("batch", 3, SIZE, SIZE),
        ("batch", 10),
    ]
