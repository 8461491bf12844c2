"""trtexec's logs and exported times are read; other files are refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from dyno.trtexec import log
from dyno.worker.spec import UserError
from refusals import refuses

LOGS = Path(__file__).parent
OLD, NEW = ((LOGS / f"{release}.log").read_text(encoding="utf-8") for release in ("8.6", "10"))


def row(start: float = 0.0, **changes: Any) -> dict[str, Any]:
    """Return one query as `--exportTimes` writes it, in ms: 0.04 in, 0.17 on the GPU, 0.01 out."""
    times = {"startEnqMs": start, "endEnqMs": start + 0.02, "startH2dMs": start, "endH2dMs": start + 0.04}
    times |= {"startComputeMs": start + 0.04, "endComputeMs": start + 0.21, "startD2hMs": start + 0.21}
    times |= {"endD2hMs": start + 0.22, "h2dMs": 0.04, "computeMs": 0.17, "d2hMs": 0.01, "latencyMs": 0.22}
    return {**times, **changes}


def test_a_log_of_release_8() -> None:
    found = log.parse_log(OLD)
    medians = [found.compute, found.latency, found.enqueue, found.h2d, found.d2h]
    assert medians == pytest.approx([211e-6, 256e-6, 196e-6, 39e-6, 6e-6])
    assert found.rate == 4500
    assert (found.graph, found.transfers, found.spin, found.streams) == (False, True, True, 1)
    assert found.engine == "engines/net b8.engine"
    assert found.shapes == {"input": (8, 3, 64, 64)}
    assert (found.device, found.version, found.onnx, found.clock) == ("NVIDIA Example", "8.6.1", "", None)
    assert [w.partition(" ")[0] for w in found.warnings] == ["Throughput", "GPU"]


def test_a_log_of_release_10() -> None:
    found = log.parse_log(NEW)
    assert found.compute == pytest.approx(170e-6)
    assert (found.graph, found.transfers, found.spin) == (True, False, True)
    assert found.engine == "engines/net b8.engine"  # without build options, so taken from the command line
    assert found.version == "10.13.0"
    assert found.warnings == ()


def test_a_verbose_log_explains_its_metrics_below_the_summary() -> None:
    """Logs of 8.2 and 10.10 contain lines with a metric's name and no times."""
    end = "[01/02/2026-03:04:10] [I] Explanations of the performance metrics are printed in the verbose logs.\n"
    names = ["Total Host Walltime", "GPU Compute Time", "Throughput", "Enqueue Time", "H2D Latency", "Latency"]
    below = "".join(f"[01/02/2026-03:04:10] [V] {name}: what it is of a query.\n" for name in names)
    assert log.parse_log(NEW.replace(end, end + below)) == log.parse_log(NEW)


def test_bindings_with_their_type_give_the_shapes() -> None:
    """Logs of 10.16 and 11 have them."""
    text = NEW.replace("8x3x64x64 is created", "8x3x64x64 and type fp32 is created").replace("--shapes=input", "--y=")
    assert log.parse_log(text).shapes == {"input": (8, 3, 64, 64)}


def test_the_old_name_of_streams_is_read_up_to_8_5() -> None:
    text = OLD.replace("--useSpinWait", "--streams=8").replace("[I] Streams: 1", "[I]")
    assert log.parse_log(text).streams == 8


def test_implicit_batches_give_no_query_rate() -> None:
    """In logs of 8.4 with --batch=16 each query counts sixteen times."""
    text = OLD.replace("Batch: Explicit", "Batch: 16").replace("Throughput: 4500", "Throughput: 72000")
    assert log.parse_log(text).rate is None and log.parse_log(text).compute == pytest.approx(211e-6)
    assert log.parse_log(OLD.replace("Batch: Explicit", "Batch: 1")).rate == 4500


@pytest.mark.parametrize(
    ("version", "flags", "expected"),
    [
        ("101300", "", (False, True, False)),
        ("110000", "", (True, False, True)),
        ("110000", "--noCudaGraph --includeDataTransfers --noSpinWait", (False, True, False)),
    ],
)
def test_tensorrt_11_defaults_to_graph_no_transfers_and_spin(
    version: str, flags: str, expected: tuple[bool, ...]
) -> None:
    listed = ("CUDA Graph", "Data transfers", "Spin-wait", "TensorRT version", "&&&& RUNNING")
    lines = [line for line in NEW.splitlines() if not line.split("[I] ")[-1].startswith(listed)]
    running = f"&&&& RUNNING TensorRT.trtexec [TensorRT v{version}] # trtexec --loadEngine=x {flags}"
    found = log.parse_log("\n".join([running, *lines]))
    assert (found.graph, found.transfers, found.spin) == expected


def test_flags_come_from_the_command_line_without_an_options_list() -> None:
    lines = OLD.splitlines()
    echoed = lines.index("[01/02/2026-03:04:05] [I] === Model Options ===")
    summary = lines.index("[01/02/2026-03:04:10] [I] === Performance summary ===")
    found = log.parse_log("\n".join(lines[:echoed] + lines[summary:]))
    assert (found.graph, found.transfers, found.spin) == (False, True, True)
    assert found.shapes == {"input": (8, 3, 64, 64)}
    assert found.version == "8.6.1"


def test_a_bare_summary_leaves_flags_unknown() -> None:
    found = log.parse_log(OLD[OLD.index("[01/02/2026-03:04:10] [I] === Perf") : OLD.index("&&&& PASSED")])
    assert (found.graph, found.transfers, found.spin, found.engine, found.shapes) == (None, None, None, "", {})


@pytest.mark.parametrize(
    "sentence",
    [
        "The CUDA graph capture on the stream has failed.",
        "The specified --useCudaGraph flag has been ignored. The inference will be launched without using CUDA graph.",
    ],
)
def test_a_failed_graph_capture_counts_as_no_graph(sentence: str) -> None:
    text = NEW.replace("[I] Starting inference", f"[I] Starting inference\n[01/02/2026-03:04:06] [W] {sentence}")
    assert log.parse_log(text).graph is False


def test_the_rtx_tool_has_its_own_graph_flag() -> None:
    text = OLD.replace("--useSpinWait", "--rtxCudaGraphStrategy=wholeGraph", 1).replace("CUDA Graph: Disabled", "")
    assert log.parse_log(text).graph is True


@pytest.mark.parametrize(("code", "version"), [("8003", "8.0.3"), ("8601", "8.6.1"), ("100200", "10.2.0")])
def test_versions_are_decoded(code: str, version: str) -> None:
    text = OLD.replace("v8601", f"v{code}").replace("[I] TensorRT version: 8.6.1", "")
    assert log.parse_log(text).version == version


def test_exported_times() -> None:
    found = log.parse_log(json.dumps([row(0.2 * i) for i in range(5)]))
    assert found.compute == pytest.approx(170e-6)
    assert found.latency == pytest.approx(220e-6)
    assert found.enqueue == pytest.approx(20e-6)
    assert found.rate == pytest.approx(5 / (0.8e-3 + 0.22e-3))
    assert (found.transfers, found.graph, found.engine, found.shapes) == (True, None, "", {})
    text = "[\n  " + "\n, ".join(json.dumps(row(i)).replace(":", " :") for i in range(3)) + "\n]\n"
    assert log.parse_log(text).compute == pytest.approx(170e-6), "as trtexec lays them out"


def test_exported_times_may_lack_transfers_and_durations() -> None:
    found = log.parse_log(json.dumps([row(h2dMs=0.0, d2hMs=0.0)]))
    assert found.transfers is False and found.latency == found.compute
    found = log.parse_log(json.dumps([{key: row()[key] for key in ("startComputeMs", "endComputeMs")}]))
    assert found.compute == pytest.approx(170e-6)
    assert (found.enqueue, found.h2d, found.rate, found.transfers) == (None, None, None, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "neither a trtexec log"),
        ("Hello\nworld\n", "neither a trtexec log"),
        ('{"status": "ok"}', "neither a trtexec log"),
        ("[]", "holds no times"),
        ("[1, 2]", "neither a trtexec log"),
        ('[{"name": "conv", "averageMs": 1.0}]', "no computeMs"),
        (json.dumps([row(), row()])[:-9], "not a complete JSON"),
        (json.dumps([row(computeMs="soon")]), "'soon' where trtexec writes a time"),
        (json.dumps([row(computeMs=-1)]), "'-1' where"),
        (json.dumps([row(computeMs=float("nan"))]), "'nan' where"),
        (OLD + NEW, "holds 2 runs"),
        (OLD[: OLD.index("[01/02/2026-03:04:10] [I] === Perf")] + NEW, "holds 2 runs"),
        (NEW + OLD[: OLD.index("[01/02/2026-03:04:10] [I] === Perf")], "holds 2 runs"),
        (OLD.replace("&&&& PASSED", "&&&& FAILED"), "of a run that failed: trtexec gives no reason"),
        (
            OLD.replace("&&&& PASSED", "x | [01/02/2026-03:04:10] [E] Error[1]: lost\n&&&& FAILED"),
            "of a run that failed: Error[1]: lost",
        ),
        (json.dumps([{"startComputeMs": 5, "endComputeMs": 1}]), "has endComputeMs before startComputeMs"),
        (OLD[: OLD.index("[01/02/2026-03:04:10] [I] === Perf")], "without a performance summary"),
        (OLD[: OLD.index("[01/02/2026-03:04:10] [I] GPU Compute")], "ends before"),
        (OLD.replace("median = 0.211 ms", "median = inf ms"), "'inf' where"),
        (OLD.replace(", median = 0.211 ms", ""), "without median"),
        (
            "&&&& RUNNING TensorRT.trtexec [TensorRT v8601] # trtexec --loadEngine=x\n"
            "[01/02/2026-03:04:05] [E] Error[1]: engine is of another version\n&&&& FAILED TensorRT.trtexec",
            "failed: Error[1]: engine is of another version",
        ),
    ],
)
def test_files_in_other_formats_are_refused_in_one_line(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "given.txt"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        log.read_log(file)
    said = str(error.value)
    assert reason in said and "given.txt" in said and "\n" not in said


def test_binary_files_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "net.engine"
    binary.write_bytes(b"ptrt\xff\xfe\x00\x80")
    refuses("not a text file", log.read_log, binary)
    binary.write_bytes(b"\xff\xfeodd")
    refuses("not a text file", log.read_log, binary)
    refuses("can't be read", log.read_log, tmp_path / "absent.log")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_logs_in_powershell_encoding_are_read(encoding: str, tmp_path: Path) -> None:
    exported = json.dumps([row(0.2 * i) for i in range(5)])
    for text in (OLD, exported):
        (tmp_path / "given").write_text(text, encoding=encoding)
        assert log.read_log(tmp_path / "given") == log.parse_log(text)


def test_half_a_log_never_raises_an_unhandled_error() -> None:
    def outcome(text: str) -> object:
        try:
            return log.parse_log(text).compute
        except UserError as e:
            return "refused" if "\n" not in str(e) else str(e)

    halves = [half for cut in range(0, len(OLD), 97) for half in (OLD[:cut], OLD[cut:])]
    assert {outcome(half) for half in halves} == {"refused", 0.211 / 1e3}
