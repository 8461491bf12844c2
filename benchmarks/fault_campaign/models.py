"""Model files and weights, each read and timed briefly by a command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.fault_campaign.campaign import Campaign
from benchmarks.fault_campaign.changes import (
    Change,
    inside_zip,
    mutated,
    planted,
    rearranged,
    regraphed,
    reheaded,
    retold,
)
from benchmarks.fault_campaign.mutations import Subject
from benchmarks.fault_campaign.stored import SHORT, write_onnx

NET = "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4))\n"
TOGETHER = 5  # number of files of a command
LOG = """[I] === Performance summary ===
[I] Throughput: 900.5 qps
[I] Latency: min = 1.0 ms, max = 2.0 ms, mean = 1.1 ms, median = 1.1 ms, percentile(90%) = 1.2 ms
[I] Enqueue Time: min = 0.1 ms, max = 0.2 ms, mean = 0.1 ms, median = 0.1 ms, percentile(90%) = 0.2 ms
[I] H2D Latency: min = 0.1 ms, max = 0.2 ms, mean = 0.1 ms, median = 0.1 ms, percentile(90%) = 0.1 ms
[I] GPU Compute Time: min = 0.9 ms, max = 1.8 ms, mean = 1.0 ms, median = 1.0 ms, percentile(90%) = 1.1 ms
[I] D2H Latency: min = 0.01 ms, max = 0.02 ms, mean = 0.01 ms, median = 0.01 ms, percentile(90%) = 0.01 ms
"""


def subjects(campaign: Campaign) -> Iterator[Subject]:
    """Yield engine files, checkpoints, and the files that accompany a model."""
    folder = campaign.folder / "models"
    made = folder / "out"

    def timed(*more: Any) -> Callable[[Sequence[Path]], list[list[Any]]]:
        return lambda files: [["time", *files, *SHORT, *more, "--out", made]]

    def several(kind: str, files: Sequence[Path], changes: Sequence[Change], share: int, *more: Any) -> Subject:
        return Subject(kind, files, timed(*more), changes, share, [made])

    graphs = [write_onnx(folder / f"{number}.onnx") for number in range(TOGETHER)]
    yield several("ONNX", graphs, [mutated, regraphed, regraphed], 20)
    looked = [write_onnx(folder / f"inspected{number}.onnx") for number in range(1)]
    yield Subject("ONNX, inspected", looked, lambda files: [["inspect", *files]], [mutated, regraphed, regraphed], 6)
    yield from _beside(folder, made)
    irs = [_ir(folder, number) for number in range(TOGETHER)]
    yield several("OpenVINO .xml", irs, [mutated, retold, retold], 6)
    bins = [path.with_suffix(".bin") for path in irs]
    xml: Any = lambda files: timed()([path.with_suffix(".xml") for path in files])  # noqa: E731
    yield Subject("OpenVINO .bin", bins, xml, [mutated], 2, [made])
    yield from _pytorch(folder, made, timed)
    yield from _darknet(folder, made, timed)


def unrunnable(campaign: Campaign) -> Iterator[Subject]:
    """Yield TensorRT engines and trtexec logs for a machine without TensorRT: any content must end in one line."""
    made = campaign.folder / "models" / "out"
    file = campaign.folder / "models" / "m.engine"
    file.write_bytes(b"ftrt" + bytes(range(256)) * 40)
    commands: Any = lambda files: [["time", *files, "--out", made], ["inspect", *files]]  # noqa: E731
    yield Subject("TensorRT .engine", [file], commands, [mutated], 3, [made])
    log, graph = campaign.folder / "models" / "log", write_onnx(campaign.folder / "models" / "logged.onnx")
    log.write_text(LOG)
    compared = [["time", graph, *SHORT, "--trtexec", log, "--out", made]]
    yield Subject("trtexec log", [log], compared, [mutated, retold, retold], 3, [made])


def _beside(folder: Path, made: Path) -> Iterator[Subject]:
    """Yield external weights, arrays for described inputs, and arrival times."""
    import onnx

    outside = write_onnx(folder / "outside.onnx")
    weights = folder / "outside.data"
    onnx.save(onnx.load(outside), outside, save_as_external_data=True, location=weights.name, size_threshold=0)
    words = ["time", outside, *SHORT, "--out", made]
    yield Subject("ONNX weights", [weights], [words], [mutated], 1, [made])
    whole = [mutated, regraphed]
    yield Subject("ONNX with weights beside", [outside], [words], whole, 2, [made])
    graph = write_onnx(folder / "fed.onnx")
    arrays = folder / "fed.npz"
    np.savez(arrays, input=np.ones((4, 3, 8, 8), np.float32))
    fed = ["time", graph, "--input", arrays, *SHORT, "--out", made]
    yield Subject("described inputs .npz", [arrays], [fed], [mutated, rearranged, planted], 4, [made])
    calibrated = [[*fed, "--precision", "int8"]]
    yield Subject("calibration .npz", [arrays], calibrated, [mutated, rearranged, planted], 2, [made])
    times = folder / "arrivals"
    times.write_text("".join(f"{0.01 * k:.3f}\n" for k in range(30)))
    serve = ["bench", "serve", graph, "--trace", times, "--threads", 1, "--out", made]
    yield Subject("arrival times", [times], [serve], [mutated, retold, retold], 1, [made])


def _ir(folder: Path, number: int) -> Path:
    import openvino

    path = folder / f"ir{number}.xml"
    openvino.save_model(openvino.convert_model(write_onnx(folder / "ir.onnx")), path, compress_to_fp16=False)
    return path


def _pytorch(folder: Path, made: Path, timed: Any) -> Iterator[Subject]:
    import torch
    from safetensors.torch import save_file

    code = folder / "net.py"
    code.write_text(NET)
    state = {"1.weight": torch.zeros(4, 192), "1.bias": torch.zeros(4)}
    checkpoints = {name: folder / name for name in ("net.pth", "net.pt", "net.safetensors")}
    torch.save(state, checkpoints["net.pth"])
    torch.save({"state_dict": state, "epoch": 3}, checkpoints["net.pt"], _use_new_zipfile_serialization=False)
    save_file(state, checkpoints["net.safetensors"])
    of: dict[str, list[Change]] = {
        "net.pth": [mutated, inside_zip, planted], "net.pt": [mutated, planted],
        "net.safetensors": [mutated, reheaded, reheaded],
    }  # fmt: skip
    for name, path in checkpoints.items():
        words = ["time", f"{code}:net", "--weights", path, "--size", 8, "--backend", "pytorch", *SHORT, "--out", made]
        yield Subject(f"checkpoint {path.suffix}", [path], [words], of[name], 5, [made])
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4)).eval()
    example = (torch.zeros(2, 3, 8, 8),)
    for suffix in (".pt2", ".torchscript"):
        files = [folder / f"net{number}{suffix}" for number in range(TOGETHER)]
        for path in files:
            if suffix == ".pt2":
                torch.export.save(torch.export.export(net, example), path)
            else:
                torch.jit.trace(net, example).save(path)
        yield Subject(
            suffix, files, timed("--size", 8, "--batch", 2), [mutated, inside_zip, inside_zip, planted], 2, [made]
        )


def _darknet(folder: Path, made: Path, timed: Any) -> Iterator[Subject]:
    import darknet_files

    files = [darknet_files.write(folder, "classifier")]
    cfg, weights = files[0]
    words = ["time", cfg, "--weights", weights, *SHORT, "--out", made]
    yield Subject("Darknet .cfg", [cfg], [words], [mutated, retold, retold], 5, [made])
    yield Subject("Darknet .weights", [weights], [words], [mutated], 2, [made])
