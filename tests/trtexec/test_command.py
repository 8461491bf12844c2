"""The commands name the same engine, shapes, flags and times as the trial."""

from pathlib import Path

import pytest

import engine_run
from dyno.trtexec import command
from dyno.trtexec.command import TrtexecBuild
from dyno.worker.spec import UserError


def test_a_dynamic_engine_at_latency_model(tmp_path: Path) -> None:
    assert command.read_timing(engine_run.trial(tmp_path / "run")) == [
        "trtexec",
        "--loadEngine=/cache/net b8.engine",
        "--shapes=input:8x3x64x64",
        "--device=1",
        "--useCudaGraph",
        "--noDataTransfers",
        "--useSpinWait",
        "--warmUp=1000",
        "--duration=2",
        "--iterations=30",
        "--percentile=90,95,99",
        "--exportTimes=times.json",
    ]


def test_latency_all_needs_the_transfers(tmp_path: Path) -> None:
    assert "--noDataTransfers" not in command.read_timing(engine_run.trial(tmp_path / "run"), "all")


def test_a_static_engine_takes_no_shapes(tmp_path: Path) -> None:
    trial = engine_run.trial(tmp_path / "run", shape=(8, 3, 64, 64))
    assert not [word for word in command.read_timing(trial) if word.startswith("--shapes")]


def test_without_a_graph_there_is_no_flag(tmp_path: Path) -> None:
    assert "--useCudaGraph" not in command.read_timing(engine_run.trial(tmp_path / "run", graph=False))


def test_rtx_has_its_own_tool_and_flag(tmp_path: Path) -> None:
    words = command.read_timing(engine_run.trial(tmp_path / "run", backend="tensorrt_rtx"))
    assert words[0] == "tensorrt_rtx"
    assert "--rtxCudaGraphStrategy=wholeGraph" in words
    assert "--useCudaGraph" not in words


def test_a_record_without_an_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="names no engine"):
        command.read_timing(engine_run.trial(tmp_path / "run", engine=""))


@pytest.mark.parametrize(
    ("precision", "version", "typed", "flags"),
    [
        ("fp32", "8.6.1", False, ["--noTF32"]),
        ("tf32", "8.6.1", False, []),
        ("fp16", "8.6.1", True, ["--noTF32", "--fp16"]),  # 8.6 knows no strongly typed networks
        ("int8", "8.6.1", False, ["--noTF32", "--int8", "--fp16"]),
        ("fp32", "10.13.0", True, ["--noTF32", "--stronglyTyped"]),
        ("fp16", "10.13.0", True, ["--noTF32", "--stronglyTyped"]),
        ("bf16", "10.13.0", False, ["--noTF32", "--bf16"]),
        ("fp8", "", False, ["--noTF32", "--fp8", "--fp16"]),
        ("tf32", "11.0.0", False, []),
        ("fp32", "11.0.0", True, ["--noTF32"]),
    ],
)
def test_precisions_by_release(precision: str, version: str, typed: bool, flags: list[str]) -> None:
    build = TrtexecBuild("m.onnx", "m.engine", precision, version=version, typed=typed)
    words = [word for word in build.command() if not word.startswith("--tacticSources")]
    assert words == ["trtexec", "--onnx=m.onnx", "--saveEngine=m.engine", *flags, "--skipInference"]


def test_every_option_of_a_build() -> None:
    profile = {"x": [(1, 3, 8, 8), (4, 3, 8, 8), (8, 3, 8, 8)], "y": [(1, 2), (4, 2), (8, 2)]}
    made = {"level": 4, "workspace": 2**31, "calibration": "c.cache"}
    words = TrtexecBuild("m.onnx", "m.engine", "int8", version="8.6.1", typed=False, profile=profile, **made).command()
    assert words[3:] == [
        "--noTF32",
        "--int8",
        "--fp16",
        "--calib=c.cache",
        "--minShapes=x:1x3x8x8,y:1x2",
        "--optShapes=x:4x3x8x8,y:4x2",
        "--maxShapes=x:8x3x8x8,y:8x2",
        "--builderOptimizationLevel=4",
        "--memPoolSize=workspace:2048",
        "--tacticSources=-CUBLAS,-CUBLAS_LT,-CUDNN",
        "--skipInference",
    ]


def test_rtx_has_neither_precision_flags_nor_levels() -> None:
    words = TrtexecBuild("m.onnx", "m.engine", "fp16", version="1.7", rtx=True, level=3).command()
    assert words == ["tensorrt_rtx", "--onnx=m.onnx", "--saveEngine=m.engine", "--noTF32", "--skipInference"]


def made_by(**changes: object) -> dict[str, object]:
    """What the builder keeps of an engine with one profile."""
    profile = {"input": [[1, 3, 64, 64], [8, 3, 64, 64], [16, 3, 64, 64]]}
    made = {"route": "flags", "typed": "weakly", "options": {"optimization": 5, "workspace_mb": 512}}
    return {**made, "profiles": [profile], "versions": {"tensorrt": "8.6.1"}, **changes}


def test_an_engine_that_dyno_built_is_repeated(tmp_path: Path) -> None:
    build = command.is_built(engine_run.trial(tmp_path / "run", made_by=made_by(), source="file:m/net.onnx"))
    assert build and build.command() == [
        "trtexec",
        "--onnx=m/net.onnx",
        "--saveEngine=net b8.engine",
        "--noTF32",
        "--fp16",
        "--minShapes=input:1x3x64x64",
        "--optShapes=input:8x3x64x64",
        "--maxShapes=input:16x3x64x64",
        "--builderOptimizationLevel=5",
        "--memPoolSize=workspace:512",
        "--tacticSources=-CUBLAS,-CUBLAS_LT,-CUDNN",
        "--skipInference",
    ]


def test_types_in_the_graph_need_the_converted_file(tmp_path: Path) -> None:
    typed = made_by(route="graph", typed="strongly")
    build = command.is_built(
        engine_run.trial(tmp_path / "run", made_by=typed, source="file:m/net.onnx", version="10.13.0")
    )
    assert build and build.command()[1:4] == ["--onnx=net.fp16.onnx", "--saveEngine=net b8.engine", "--noTF32"]


def test_a_static_file_takes_no_shapes(tmp_path: Path) -> None:
    static = made_by(profiles=[{"input": [[8, 3, 64, 64]] * 3}])
    build = command.is_built(engine_run.trial(tmp_path / "run", made_by=static))
    assert build and not build.profile


def test_a_given_engine_has_no_build(tmp_path: Path) -> None:
    assert command.is_built(engine_run.trial(tmp_path / "run")) is None


def test_tactic_sources_that_were_asked_for_stay_on() -> None:
    words = TrtexecBuild("m.onnx", "m.engine", "fp16", version="8.6.1", tactics=("CUDNN",)).command()
    assert "--tacticSources=-CUBLAS,-CUBLAS_LT,+CUDNN" in words
