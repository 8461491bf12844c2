"""The commands repeat the trial's engine, shapes, flags and times."""

from pathlib import Path
from typing import Any

import pytest

import engine_run
from dyno.trtexec import command
from refusals import refuses


def test_a_dynamic_engine_at_latency_model(tmp_path: Path) -> None:
    assert command.read_timing(engine_run.trial(tmp_path / "run")) == [
        "trtexec", "--loadEngine=/cache/net b8.engine", "--shapes=input:8x3x64x64", "--device=1", "--useCudaGraph",
        "--noDataTransfers", "--useSpinWait", "--warmUp=1000", "--duration=2", "--iterations=30",
        "--percentile=90,95,99", "--exportTimes=times.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "boundary", "has", "lacks"),
    [
        ({}, "all", "trtexec", "--noDataTransfers"),
        ({"shape": (8, 3, 64, 64)}, "model", "trtexec", "--shapes"),  # a static engine
        ({"graph": False}, "model", "trtexec", "--useCudaGraph"),
        ({"version": "11.0.0"}, "all", "--includeDataTransfers", "--use"),  # it spins and replays a graph by default
        ({"version": "11.0.0"}, "model", "trtexec", "--noDataTransfers"),
        ({"version": "11.0.0", "graph": False}, "model", "--noCudaGraph", "--includeDataTransfers"),
        ({"backend": "tensorrt_rtx"}, "model", "tensorrt_rtx", "--useCudaGraph"),
        ({"backend": "tensorrt_rtx"}, "model", "--rtxCudaGraphStrategy=wholeGraph", "trtexec"),
    ],
)
def test_flags_match_the_trial(changes: dict[str, Any], boundary: str, has: str, lacks: str, tmp_path: Path) -> None:
    words = command.read_timing(engine_run.trial(tmp_path / "run", **changes), boundary)
    assert has in words and not [word for word in words if word.startswith(lacks)]


def test_a_record_without_an_engine_is_refused(tmp_path: Path) -> None:
    refuses("names no engine", command.read_timing, engine_run.trial(tmp_path / "run", engine=""))


def read_build(folder: Path, made_by: dict[str, object], **changes: object) -> list[str]:
    """Return the words of the command that builds a trial's engine, from its builder's facts."""
    made = {"route": "flags", "typed": "weakly", "versions": {"tensorrt": "8.6.1"}, **made_by}
    return command.read_build(engine_run.trial(folder, made_by=made, **changes))


RANGES = {"x": [[1, 3, 8, 8], [4, 3, 8, 8], [8, 3, 8, 8]], "y": [[1, 2], [4, 2], [8, 2]]}


@pytest.mark.parametrize(
    ("precision", "version", "typed", "flags"),
    [
        ("fp32", "8.6.1", "weakly", ["--noTF32"]),
        ("tf32", "8.6.1", "weakly", []),
        ("fp16", "8.6.1", "strongly", ["--noTF32", "--fp16"]),  # 8.6 has no strongly typed networks
        ("int8", "8.6.1", "weakly", ["--noTF32", "--int8", "--fp16"]),
        ("fp32", "10.13.0", "strongly", ["--noTF32", "--stronglyTyped"]),
        ("fp16", "10.13.0", "strongly", ["--noTF32", "--stronglyTyped"]),
        ("bf16", "10.13.0", "weakly", ["--noTF32", "--bf16"]),
        ("fp8", "", "weakly", ["--noTF32", "--fp8", "--fp16"]),
        ("tf32", "11.0.0", "weakly", []),
        ("fp32", "11.0.0", "strongly", ["--noTF32"]),
    ],
)
def test_precisions_by_release(precision: str, version: str, typed: str, flags: list[str], tmp_path: Path) -> None:
    made = {"typed": typed, "versions": {}}
    words = read_build(tmp_path / "run", made, precision=precision, version=version, source="file:m.onnx")
    words = [word for word in words if not word.startswith("--tacticSources")]
    assert words == ["trtexec", "--onnx=m.onnx", "--saveEngine=net b8.engine", *flags, "--skipInference"]


def test_every_option_of_a_build(tmp_path: Path) -> None:
    options = {"optimization": 4, "workspace_mb": 2048, "tactics": "cudnn"}
    made = {"route": "calibrator", "options": options, "profiles": [RANGES]}
    assert read_build(tmp_path / "run", made, precision="int8", source="file:m/net.onnx") == [
        "trtexec", "--onnx=m/net.onnx", "--saveEngine=net b8.engine", "--noTF32", "--int8", "--fp16",
        "--calib=calibration.cache", "--minShapes=x:1x3x8x8,y:1x2", "--optShapes=x:4x3x8x8,y:4x2",
        "--maxShapes=x:8x3x8x8,y:8x2", "--builderOptimizationLevel=4", "--memPoolSize=workspace:2048",
        "--tacticSources=-CUBLAS,-CUBLAS_LT,+CUDNN", "--skipInference",
    ]  # fmt: skip


def test_rtx_has_neither_precision_flags_nor_levels(tmp_path: Path) -> None:
    made = {"options": {"optimization": 3}}
    words = read_build(tmp_path / "run", made, backend="tensorrt_rtx", version="1.7", source="file:m.onnx")
    assert words[0] == "tensorrt_rtx" and words[3:] == ["--noTF32", "--skipInference"]


def test_types_in_the_graph_need_the_converted_file(tmp_path: Path) -> None:
    made = {"route": "graph", "typed": "strongly"}
    words = read_build(tmp_path / "run", made, source="file:m/net.onnx", version="10.13.0")
    assert words[1:4] == ["--onnx=net.fp16.onnx", "--saveEngine=net b8.engine", "--noTF32"]


def test_a_static_file_takes_no_shapes(tmp_path: Path) -> None:
    words = read_build(tmp_path / "run", {"profiles": [{"input": [[8, 3, 64, 64]] * 3}]})
    assert words and not [word for word in words if "Shapes" in word]


def test_a_given_engine_has_no_build(tmp_path: Path) -> None:
    assert command.read_build(engine_run.trial(tmp_path / "run")) == []
