"""Several runs as one table: each trial's latency from run to run, and what changed with it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dyno.formatting import moment, plain, significant
from dyno.report.report import names_of
from dyno.report.tables import TableKind, trial_table
from dyno.report.tables.trial_table import IDENTITY, pick
from dyno.report.verdict.verdict import began
from dyno.results.correctness import WRONG
from dyno.results.ranking import LATENCY
from dyno.results.run_data import RunData
from dyno.results.trial_result import TrialResult
from dyno.table import FINE, TEXT, Column, Row, Table, missing
from dyno.worker.option_values import check_types
from dyno.worker.spec import UserError

SHORT = 8  # characters of a hash
MACHINE = ("cpu", "gpu", "cores", "governor")  # facts of a run's environment that may change its latencies
AT_COMMIT = re.compile(r"(.+)@([^@/\s()]+)")  # a model's name and the commit that it was measured at
MOST = 3  # steps that are named
COLUMNS = (
    *pick(*IDENTITY),
    Column("run", "its folder's name", kind=TEXT),
    Column("date", "start of the run's first job", kind=TEXT),
    *pick("status", "reason", "latency_ms", "latency_ms_low", "latency_ms_high"),
    Column("step", "latency over that of the run before: above 1 is slower", kind=FINE, title="over the last"),
    Column("changed", "versions, weights, code, commit or machine that differ from the run before", kind=TEXT, rank=1),
    Column("commit", "of the model's file, else of the folder that the run began in (+: changed)", kind=TEXT, rank=3),
    Column("weights", "beginning of their sha256", kind=TEXT, rank=4),
    Column("dyno", "version of Dyno that began the run", kind=TEXT, rank=5),
    Column("versions", "of the libraries in the trial's process", kind=TEXT, rank=6),
    *pick("boundary", "clock", "verdict", "trial"),
)
PRINTED = (*IDENTITY, "run", "date", "status", "latency_ms", "step", "changed")
HISTORY = TableKind(
    "history", "History", "Several runs: a row per trial and run, in the order of dates, with what changed.",
    command="dyno show RUN RUN …",
)  # fmt: skip


def read_history(*folders: str | Path) -> Table:
    """Return the trials of several run folders as one table, as `dyno show RUN RUN …` prints it: see `make_history`."""
    for folder in folders:
        check_types({"folders": folder}, {"folders": str | Path})
    if len(folders) < 2:
        raise UserError(f"a history is of two runs or more, not of {len(folders)}")
    return make_history([trial_table.read_trials(Path(folder)) for folder in folders])


def make_history(runs: Sequence[RunData]) -> Table:
    """Return the trials of all runs as a table, by configuration and date; its notes name the largest steps.

    A `step` is a trial's latency over that in the run before that has it, at the same boundary and clock; it is missing
    where one of both failed or gave wrong outputs. UserError for a run that is named twice, and without a common trial.
    """
    dated = sorted(zip(names_of(runs), runs, strict=True), key=lambda pair: began(pair[1].records))
    series: dict[tuple[str, ...], list[tuple[Row, dict[str, str]]]] = {}
    for name, run in dated:
        cells = run.frame.to_dict("records")
        count = Counter(map(_make_key, cells))
        for row in cells:
            trial, key = run.trials[row["trial"]], _make_key(row)
            key = key if count[key] == 1 else (*key, trial.id)  # of several alike only the same id is the same
            facts = _read_facts(trial, row, run)
            own = {"run": name, "date": moment(began(run.records)), "model": key[0]}
            own |= {column: facts.get(column, "") for column in ("commit", "dyno")}
            own |= {"weights": facts.get("weights", ""), "versions": trial.described_versions}
            series.setdefault(key, []).append((row | own, facts))
    if not any(len(rows) > 1 for rows in series.values()):
        raise UserError(f"the {len(runs)} runs have no trial in common; `dyno report` shows them side by side")
    rows = [row for each in series.values() for row in _add_steps(each)]
    several = ("device",) if len({row["device"] for row in rows}) > 1 else ()
    notes = tuple(_list_steps(rows, dict(dated)))
    return HISTORY.of(COLUMNS, rows, notes=notes, group=("model", "size", "batch", *several), printed=PRINTED)


def _make_key(row: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return what a trial is called in every run: its identity, without the commit of its model."""
    model = AT_COMMIT.fullmatch(str(row["model"]))
    return (model[1] if model else str(row["model"]), *(str(row[name]) for name in IDENTITY if name != "model"))


def _read_facts(trial: TrialResult, row: Mapping[Any, Any], run: RunData) -> dict[str, str]:
    """Return the facts whose change may explain another latency, by name."""
    model, environment = trial.spec["model"], run.records.environment
    commit = AT_COMMIT.fullmatch(str(row["model"]))
    facts = {
        "commit": commit[2] if commit else environment.get("commit"),
        "code": str(model.get("source_sha256") or "")[:SHORT],
        "weights": str(trial.facts.weights_sha256 or model.get("weights_sha256") or "")[:SHORT],
        "dyno": (environment.get("versions") or {}).get("inference-dyno", ""),
        **trial.versions,
        "threads": trial.facts.threads,
        **{name: environment.get(name) for name in MACHINE},
    }
    return {name: plain(value) for name, value in facts.items() if value not in (None, "", [])}


def _add_steps(series: Sequence[tuple[Row, dict[str, str]]]) -> Iterator[Row]:
    """Yield the rows of one trial, each with its step from the last one that was measured, and with what changed."""
    last: tuple[Row, dict[str, str]] | None = None
    for row, facts in series:
        if not _has_speed(row):
            yield row
            continue
        if last is not None:
            before, known = last
            names = dict.fromkeys((*known, *facts))
            changed = [
                f"{n} {known.get(n, 'none')} to {facts.get(n, 'none')}" for n in names if known.get(n) != facts.get(n)
            ]
            row["changed"] = "; ".join(changed)
            if all(before[name] == row[name] for name in ("boundary", "clock")):
                row |= {"step": row[LATENCY] / before[LATENCY], "#before": before}
        last = row, facts
        yield row


def _has_speed(row: Row) -> bool:
    return row["status"] == "ok" and not missing(row[LATENCY]) and not str(row["verdict"]).startswith(WRONG)


def _list_steps(rows: Sequence[Row], runs: Mapping[str, RunData]) -> Iterator[str]:
    """Yield a sentence on each of the largest steps up whose intervals don't overlap, and on what they prove."""
    slower = [row for row in rows if "#before" in row and row["latency_ms_low"] > row["#before"]["latency_ms_high"]]
    for row in sorted(slower, key=lambda row: row["step"], reverse=True)[:MOST]:
        name = " ".join(str(row[key]) for key in ("model", "backend", "options", "precision") if row[key])
        why = f"with it changed {row['changed']}" if row["changed"] else "nothing that is recorded changed"
        before = row["#before"]
        yield (
            f"{name} at batch {row['batch']} took {row['step']:.2f}x as long from {row['run']} ({row['date']}) on: "
            f"{significant(before[LATENCY])} to {significant(row[LATENCY])} ms; {why}."
        )
    if not slower:
        bounded = any("#before" in row and not missing(row["latency_ms_low"]) for row in rows)
        yield (
            "No latency rose beyond the intervals of two runs."
            if bounded
            else "Single rounds have no interval, so no step can be told from noise; measure more --rounds."
        )
        return
    first, then = (runs[name].records.folder for name in (slower[0]["#before"]["run"], slower[0]["run"]))
    yield f"Runs of different sessions prove no cause; measured side by side: dyno compare {first} {then} --remeasure"
