"""trtexec's measurements, read from its log or its exported times.

Forms and definitions are from NVIDIA's TensorRT documentation ("Command-Line Programs", section trtexec, and
"Performance Benchmarking"), releases 8.6 and 10. A query is one inference of the whole batch.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.record import check_regular
from dyno.worker.spec import UserError

UTF16_MARKS = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE  # PowerShell redirects in UTF-16
LOG_LINE = re.compile(r"\[[VIWEF]\] (.*)")
RUNNING_LINE = re.compile(r"&&&& RUNNING \S+ (?:\[TensorRT v(\d+)\])?.*?# (.*)")
# Tools put prefixes before lines, but no quotes.
FAILED_LINE = re.compile(r"^[^\"'\n]*&&&& FAILED", re.M)
ERROR_LINE = re.compile(r"^[^\"'\n]*\[E\] (.*)", re.M)
BINDING_LINE = re.compile(r"Input binding for (.+) with dimensions ([\dx]+)(?: and type \S+)? is created")
MEDIAN_VALUE = re.compile(r"median = (\S+) ms")
EXPORTED_TIMES = re.compile(r"\s*\[\s*[{\]]")
SUMMARY_HEADING = "=== Performance summary ==="
METRIC_NAMES = {
    "Latency": "latency",
    "Enqueue Time": "enqueue",
    "H2D Latency": "h2d",
    "GPU Compute Time": "compute",
    "D2H Latency": "d2h",
}
# Flag that reverses the default of a listed option: up to TensorRT 10, and from 11 on.
SWITCH_NAMES = {
    "CUDA Graph": ("useCudaGraph", "noCudaGraph"),
    "Data transfers": ("noDataTransfers", "includeDataTransfers"),
    "Spin-wait": ("useSpinWait", "noSpinWait"),
}
# trtexec's messages if it could not record the requested graph.
NO_GRAPH = ("--useCudaGraph flag has been ignored", "graph capture on the stream has failed")
ENGINE_FLAGS = ("loadEngine", "saveEngine")
LOG_ADVICE = "give the log that trtexec prints, or the file it writes with --exportTimes"


def has_defaults_of_11(version: str) -> bool:
    """Return whether trtexec replays a CUDA graph, spins and copies nothing by default, as from TensorRT 11 on."""
    major = version.partition(".")[0]
    return major.isdecimal() and int(major) >= 11


@dataclass(frozen=True)
class TrtexecReport:
    """One run of trtexec; None or empty: not in the file.

    Times are medians over all queries, in seconds. `rate` is queries/s. `graph`, `transfers` (host-device copies) and
    `spin` (spin-wait) are modes of the run, `streams` is the number of parallel inferences. `onnx` is set if trtexec
    built the engine itself. `clock`, the GPU's in MHz, is known only from sampling: rates in a log are the GPU's
    limits, not the run's.
    """

    compute: float
    latency: float | None = None
    enqueue: float | None = None
    h2d: float | None = None
    d2h: float | None = None
    rate: float | None = None
    graph: bool | None = None
    transfers: bool | None = None
    spin: bool | None = None
    streams: int = 1
    engine: str = ""
    onnx: str = ""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    device: str = ""
    version: str = ""
    clock: float | None = None
    warnings: tuple[str, ...] = ()


def read_log(path: Path) -> TrtexecReport:
    """Read the log or the exported times in the file; raise `UserError` for other files."""
    try:
        data = check_regular(path, "log").read_bytes()
        text = data.decode("utf-16" if data.startswith(UTF16_MARKS) else "utf-8-sig")
    except OSError as e:
        raise UserError(f"{path} can't be read ({e.strerror}); {LOG_ADVICE}") from e
    except UnicodeError as e:
        raise UserError(f"{path} is not a text file; {LOG_ADVICE}") from e
    return parse_log(text, str(path))


def parse_log(text: str, name: str = "the file") -> TrtexecReport:
    """Parse the report in a log's or an exported file's text; `name` is its name in errors."""
    return _parse_times(text, name) if EXPORTED_TIMES.match(text) else _parse_log(text, name)


def _parse_log(text: str, name: str) -> TrtexecReport:
    lines = [match[1].rstrip() for line in text.splitlines() if (match := LOG_LINE.search(line))]
    summaries = lines.count(SUMMARY_HEADING)
    runs = max(summaries, len(RUNNING_LINE.findall(text)))  # one without a summary would lend the other its flags
    if runs > 1:
        raise UserError(f"{name} holds {runs} runs of trtexec; give the log of one")
    if not summaries or FAILED_LINE.search(text):
        raise UserError(f"{name} {_explain_no_summary(text)}")
    start = lines.index(SUMMARY_HEADING)
    medians = dict(_parse_medians(lines[start:], name))
    if "compute" not in medians:
        raise UserError(f"{name} ends before trtexec's summary does; run trtexec again")
    run = RUNNING_LINE.search(text)
    options = re.findall(r"--(\w+)(?:=(.*?))?(?=\s--|\s*$)", run[2] if run else "")  # values may hold spaces
    flags = {key: (value or "").strip() for key, value in options}
    version = _find_echo(lines, "TensorRT version") or _format_version(run[1] if run else None)
    return TrtexecReport(
        **{**medians, **_read_run_options(flags, lines, version)},
        rate=_find_rate(lines, name),
        engine=next(filter(None, (_find_echo(lines, "Load engine"), *(flags.get(f) for f in ENGINE_FLAGS))), ""),
        onnx=flags.get("onnx") or _find_echo(lines, "Model"),
        shapes=_find_shapes(lines, flags),
        device=_find_echo(lines, "Selected Device"),
        version=version,
        warnings=tuple(line[2:].strip() for line in lines[start:] if line.startswith("* ")),  # the advice is left out
    )


def _explain_no_summary(text: str) -> str:
    """Return the reason why a log has no summary, or one of a failed run, as the end of a sentence."""
    error = ERROR_LINE.search(text)
    if error or FAILED_LINE.search(text):
        return f"is the log of a run that failed: {error[1].strip() if error else 'trtexec gives no reason'}"
    if re.search("^&&&& RUNNING", text, re.M):
        return "is a trtexec log without a performance summary: it was cut off, or only an engine was built"
    return f"is neither a trtexec log (8.x to 11.x) nor its exported times; {LOG_ADVICE}"


def _parse_medians(lines: Iterable[str], name: str) -> Iterable[tuple[str, float]]:
    for line in lines:
        label, _, rest = line.partition(": ")
        if label in METRIC_NAMES and rest.startswith("min = "):  # --verbose explains each metric below, after its name
            match = MEDIAN_VALUE.search(rest)
            if match is None:
                raise UserError(f"{name} has a metric without median; {LOG_ADVICE}")
            yield METRIC_NAMES[label], _parse_number(match[1], name) / 1e3


def _parse_number(text: Any, name: str) -> float:
    """Parse a finite, non-negative number; raise `UserError` for others."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise UserError(f"{name} has {str(text)[:40]!r} where trtexec writes a time; {LOG_ADVICE}")
    return value


def _find_rate(lines: list[str], name: str) -> float | None:
    """Return queries/s; None for an implicit batch of TensorRT 8, as trtexec then counts each image as a query."""
    if _find_echo(lines, "Batch") not in ("", "1", "Explicit"):
        return None
    matches = (re.fullmatch(r"Throughput: (\S+) qps", line) for line in lines)
    return next((_parse_number(match[1], name) for match in matches if match), None)


def _find_echo(lines: Iterable[str], key: str) -> str:
    """Return the log's line on an option, without its key; "" if it is missing."""
    return next((line[len(key) + 1 :].strip() for line in lines if line.startswith(key + ":")), "")


def _read_run_options(flags: Mapping[str, str], lines: list[str], version: str) -> dict[str, Any]:
    """Return the options of the run, from the log's list or else from the command line."""

    def is_enabled(key: str) -> bool | None:
        answer = _find_echo(lines, key)
        if answer in ("Enabled", "Disabled"):
            return answer == "Enabled"
        flag = SWITCH_NAMES[key][has_defaults_of_11(version)]
        return (flag in flags) != flag.startswith("no") if flags else None

    graph = is_enabled("CUDA Graph")
    if flags.get("rtxCudaGraphStrategy", "disable").startswith("whole"):
        graph = True
    if any(sentence in line for line in lines for sentence in NO_GRAPH):
        graph = False
    flag_value = flags.get("infStreams") or flags.get("streams", "")  # the name up to 8.5
    streams = _find_echo(lines, "Inference Streams") or _find_echo(lines, "Streams") or flag_value
    return {
        "graph": graph,
        "transfers": is_enabled("Data transfers"),
        "spin": is_enabled("Spin-wait"),
        "streams": int(streams) if streams.isdecimal() else 1,
    }


def _find_shapes(lines: Iterable[str], flags: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return the input shapes, from the created bindings or else from `--shapes`."""
    matches = (BINDING_LINE.match(line) for line in lines)
    from_bindings = {match[1]: _parse_dims(match[2]) for match in matches if match}
    from_flags = re.findall(r"([^,]+):([\dx]+)(?:,|$)", flags.get("shapes", ""))
    return from_bindings or {name.strip("'\\"): _parse_dims(text) for name, text in from_flags}


def _parse_dims(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split("x") if n)


def _format_version(code: str | None) -> str:
    """Format a version code: 8601 is 8.6.1, 101300 is 10.13.0."""
    if not code:
        return ""
    number = int(code)
    if number < 10_000:
        return f"{number // 1000}.{number // 100 % 10}.{number % 100}"
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"


def _parse_times(text: str, name: str) -> TrtexecReport:
    """Parse exported times: an object per query, without shapes, engine or flags."""
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{name} is not a complete JSON file ({e}); run trtexec again") from e
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{name} holds no times; {LOG_ADVICE}")
    columns = {key: _read_column(rows, key, name) for key in ("enq", "h2d", "compute", "d2h")}
    if columns["compute"] is None:
        raise UserError(f"{name} holds no computeMs, so trtexec did not write it; {LOG_ADVICE}")
    copies = [values for key in ("h2d", "d2h") if (values := columns[key]) is not None]
    enqueue, h2d, compute, d2h = (None if each is None else float(np.median(each)) for each in columns.values())
    assert compute is not None
    return TrtexecReport(
        compute,
        latency=float(np.median(np.sum([columns["compute"], *copies], axis=0))),
        enqueue=enqueue,
        h2d=h2d,
        d2h=d2h,
        rate=_compute_exported_rate(rows),
        transfers=any(values.any() for values in copies) if copies else None,
    )


def _read_column(rows: list[dict[str, Any]], key: str, name: str) -> np.ndarray | None:
    """Return the seconds per query of one part, from its duration or start and end; None if the file lacks it."""
    title = key.capitalize()
    spans = {"enq": "enqueueMs"}.get(key, f"{key}Ms"), f"start{title}Ms", f"end{title}Ms"
    if all(spans[0] in row for row in rows):
        values = [_parse_number(row[spans[0]], name) for row in rows]
    elif all(spans[1] in row and spans[2] in row for row in rows):
        values = [_parse_number(row[spans[2]], name) - _parse_number(row[spans[1]], name) for row in rows]
    else:
        return None
    if min(values) < 0:
        raise UserError(f"{name} has {spans[2]} before {spans[1]}; run trtexec again")
    return np.asarray(values, np.float64) / 1e3


def _compute_exported_rate(rows: list[dict[str, Any]]) -> float | None:
    """Compute queries/s from the first copy in to the last copy out, like trtexec; None without those times."""
    first, last = rows[0].get("startH2dMs"), rows[-1].get("endD2hMs")
    if not isinstance(first, (int, float)) or not isinstance(last, (int, float)) or last <= first:
        return None
    return 1e3 * len(rows) / (last - first)
