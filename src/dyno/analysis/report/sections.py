"""The parts of a report as plain data: what the template prints, computed from stored records alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyno.analysis.formatting import counting, moment, short, show
from dyno.analysis.metrics.precision import truth
from dyno.analysis.presentation.export import page_part
from dyno.analysis.records import remarks
from dyno.analysis.records.results import Results, TrialResult
from dyno.analysis.tables.gpu_table import ROUND_COLUMNS, ROUNDS, doubts, rounds_of
from dyno.analysis.tables.trial_table import build_seconds
from dyno.analysis.verdict.about import began

NUMBERS = re.compile(r"\d+([.,]\d+)*")
LONGEST = 60  # characters of the name of a layer, which names all nodes that it was fused from
MOST_DETAILS = 300  # trials with a separate section


def machine(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the environment as terms and values; nested tables become one row each."""
    return [
        (key.removesuffix("_bytes").replace("_", " "), _format_value(key, v)) for key, v in environment.items() if v
    ]


def _format_value(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_format_value(k, v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(str(v) for v in value)
    return show(float(value), "bytes") if key.endswith("_bytes") else str(value)


def about(results: Results) -> list[str]:
    """Describe when, on which machine and with which version the run was measured; "" for unknown facts."""
    environment = results.environment
    cores = environment.get("cores")
    return [
        moment(began(results)),
        str(environment.get("cpu") or ""),
        counting(int(cores), "core") if cores else "",
        str(environment.get("gpu") or ""),
        f"Dyno {version}" if (version := (environment.get("versions") or {}).get("inference-dyno")) else "",
        counting(len(results.trials), "trial"),
    ]


@dataclass(frozen=True)
class Complaint:
    """What went wrong in one trial or in several: its kind, their labels, and one line."""

    kind: str
    trials: str
    text: str


def complaints(results: Results) -> list[Complaint]:
    """Return unreadable files, then failures, then warnings.

    Those that differ only in numbers are one line, with the first one's numbers.
    """
    failed = [(t.status, t.label, t.reason) for t in results if t.status != "ok"]
    warnings = [("warning", t.label, " ".join(w.split())) for t in results for w in remarks.list_warnings(t)]
    alike: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for kind, label, text in (*(("unreadable", "", p) for p in results.problems), *failed, *warnings):
        alike.setdefault((kind, NUMBERS.sub("#", text)), []).append((label, text))
    return [_make_complaint(kind, group) for (kind, _), group in alike.items()]


def _make_complaint(kind: str, group: list[tuple[str, str]]) -> Complaint:
    labels = list(dict.fromkeys(label for label, _ in group))
    numbers = "; other trials in other numbers" if len({text for _, text in group}) > 1 else ""
    count = f"{len(labels)} trials: " if len(labels) > 1 else ""
    return Complaint(kind, count + "; ".join(labels), group[0][1] + numbers)


@dataclass(frozen=True)
class Detail:
    """One trial's own section: its folder as seen from the page, facts as terms and values, and a table of its rounds
    as HTML."""

    label: str
    id: str
    status: str
    folder: str
    facts: list[tuple[str, str]]
    rounds: Any


def details(results: Results, page: Path) -> list[Detail]:
    """Return a section per trial, at most MOST_DETAILS, of a page in the folder `page`."""
    from markupsafe import Markup

    trial_details = []
    for t in results.trials[:MOST_DETAILS]:
        table = ROUNDS.of([c for c in ROUND_COLUMNS if c.name not in ("label", "trial")], rounds_of(t), below=doubts)
        parts = [Markup(page_part(table, part, heading="")) for part in table.parts()]
        place = t.rounds[0].folder.parent if t.rounds else results.folder / "trials" / t.id
        folder = Path(os.path.relpath(place, page)).as_posix()
        trial_details.append(Detail(t.label, t.id, t.status, folder, list(_list_facts(t)), Markup("").join(parts)))
    return trial_details


def _list_facts(t: TrialResult) -> Iterator[tuple[str, str]]:
    if t.reason:
        yield "reason", t.reason
    types = truth(t)
    facts: list[tuple[str, Any]] = [
        ("options", t.facts.options or t.options),
        ("layers by type", str(types) if types else ""),
        ("precision", types.sentence if types else ""),
        ("nodes by provider", t.facts.nodes_by_provider),
        ("threads", t.facts.threads),
        ("slowest layers", _format_slowest(t)),
        ("notes", "; ".join(remarks.list_notes(t))),
        ("GPU meanwhile", _describe_gpu(t)),
        ("made by", _format_steps(t)),
        ("ready after", show(build_seconds(t), "duration")),
        ("import", show(t.value("import"), "duration")),
        ("load", show(t.value("load"), "duration")),
        ("first call", show(t.value("first_call"), "duration")),
        ("peak memory", show(t.value("peak_memory"), "bytes")),
        ("weights sha256", t.facts.weights_sha256[:16]),
        ("inputs sha256", t.facts.inputs_sha256[:16]),
    ]
    yield from ((name, _format_value("", value)) for name, value in facts if value)


def _format_steps(t: TrialResult) -> str:
    return " → ".join(
        f"{s.maker}: {s.format} {s.precision} in {show(s.seconds, 'duration')} ({show(s.bytes, 'bytes')})"
        for s in t.made_by.steps
    )


def _format_slowest(t: TrialResult) -> str:
    return "; ".join(
        f"{layer.share:.0%} {short(layer.name, LONGEST)} ({layer.operator}, {layer.dtype})"
        for layer in t.facts.slowest_layers
    )


def _describe_gpu(t: TrialResult) -> str:
    if t.gpu is None:
        return ""
    values = [(f"{show(t.gpu.memory, 'bytes')} of memory", t.gpu.memory), (f"busy for {t.gpu.utilisation:.0f} % of "
             "the timing", t.gpu.utilisation), (f"{t.gpu.clock:,.0f} MHz", t.gpu.clock),
             (f"{t.gpu.power:.0f} W", t.gpu.power), (f"{t.gpu.temperature:.0f} °C", t.gpu.temperature)]  # fmt: skip
    parts = [text for text, value in values if value == value]
    return ", ".join([*parts, *([f"clock limited by {t.gpu.throttle}"] if t.gpu.throttle else [])])
