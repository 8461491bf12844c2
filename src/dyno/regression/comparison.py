"""`dyno compare`: verdict on two stored runs, or on two sides measured here, interleaved if possible."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as Xml

from dyno.api import Result
from dyno.formatting import clean_text, format_bullet, format_count, format_points
from dyno.jobs.progress import Progress
from dyno.regression import compare_table as tables
from dyno.regression.compare_table import (
    MISSING,
    RATIO_SHOWN,
    SAME_MEASUREMENT,
    TWO_SESSIONS,
    describe_outcome,
    floor_percent,
)
from dyno.regression.rules import (
    LESS_ACCURATE,
    SLOWER,
    STATUS,
    TARGET_POWER,
    WRONG_OUTPUTS,
    GateRules,
    format_slowdown,
    list_changes,
)
from dyno.report.export import export
from dyno.results import stats
from dyno.results.correctness import INCOMPARABLE, OUTPUTS_WRONG
from dyno.results.ranking import configuration_of
from dyno.results.trial_result import Results, load_run
from dyno.runner import self_test
from dyno.runner.execute import execute
from dyno.runner.run_folder import find_overwritten, list_stored, read_earlier
from dyno.study import commits
from dyno.study.defaults import default_runner, folder_for
from dyno.study.model_names import keeps_weights
from dyno.study.plan import TrialSelection
from dyno.study.study import Study, name_fields
from dyno.table import Row, Table, is_missing
from dyno.video import tables as videos
from dyno.worker.option_values import check_types
from dyno.worker.record import write_text
from dyno.worker.spec import UserError
from dyno.worker.spec import clean_text as drop_controls

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_ROUNDS = 5
DEFAULTS: dict[str, Any] = {"rounds": DEFAULT_ROUNDS, "boundaries": ("model",)}
# Fields of a study that a comparison doesn't take: the gate sets its limit and its number of rounds.
REFUSED_OPTIONS = (
    "budget", "limit", "search", "confirm", "sustained", "reference", "peak", "energy", "routes", "baseline", "until",
    "minutes", "equivalent",
)  # fmt: skip
LIMITS_ADVICE = "its limits are fail_on and tolerance, and its length is rounds and seconds"
RULE_NAMES = tuple(f.name for f in dataclasses.fields(GateRules) if f.name != "gate")


@dataclass(frozen=True)
class Comparison:
    """B compared with A: `table` has a row per pair of trials. `folder` is the run folder with its measurements (None:
    two stored runs). For two runs of a video, `video` compares them end to end and by stage."""

    table: Table
    folder: Path | None = None
    video: Table | None = None

    @property
    def rows(self) -> list[Row]:
        """Rows of the table, as dicts."""
        return self.table.rows

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on other explanations of a difference."""
        return self.table.notes

    @property
    def verdicts(self) -> list[str]:
        """Sentences on the comparison, the most important first."""
        return [*list_comparison(self.table, is_stored=self.folder is None), *self._sides]

    @property
    def exit_code(self) -> int:
        """0 without a regression, 1 if a condition failed, 3 if undecided."""
        return exit_code(self.table)

    @cached_property
    def result(self) -> Result | None:
        """The measured result, with its tables and its report; None for two stored runs."""
        return Result(self.folder) if self.folder else None

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per pair of trials."""
        return self.table.to_pandas()

    def junit(self, path: str | Path) -> None:
        """Write JUnit's XML: a test case per pair, with a failure for a regression and an error for an undecided one.

        The format is small enough for the standard library.
        """
        counts = {"failures": sum(bool(row["failed"]) for row in self.rows),
                  "errors": sum(bool(not row["failed"] and explain_undecided(row)) for row in self.rows)}  # fmt: skip
        attributes = {"name": "dyno compare", "tests": str(len(self.rows)), **{k: str(n) for k, n in counts.items()}}
        suites = Xml.Element("testsuites", attributes)
        suite = Xml.SubElement(suites, "testsuite", attributes)
        for row in self.rows:
            seconds = "0" if is_missing(row["latency_b_ms"]) else f"{row['latency_b_ms'] / 1e3:.9f}"
            labels = {"classname": "dyno.compare", "name": describe_where(row), "time": seconds}
            case = Xml.SubElement(suite, "testcase", labels)
            if row["failed"]:
                Xml.SubElement(case, "failure", {"type": row["failed"], "message": drop_controls(explain_failure(row))})
            elif reason := explain_undecided(row):
                Xml.SubElement(case, "error", {"type": "undecided", "message": drop_controls(reason)})
            ratio = "" if is_missing(row["ratio"]) else f"{RATIO_SHOWN.text(row)} the latency, "
            Xml.SubElement(case, "system-out").text = drop_controls(f"{ratio}{describe_outcome(row)}")
        Xml.SubElement(suite, "system-out").text = "\n".join(map(drop_controls, self.verdicts))
        Xml.indent(suites)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(path), Xml.tostring(suites, encoding="unicode", xml_declaration=True) + "\n")

    def summary(self, path: str | Path) -> None:
        """Append a summary in Markdown for a pull request, in the format of `$GITHUB_STEP_SUMMARY`."""
        title = f"### Dyno: {HEADINGS[self.exit_code]} in {format_count(len(self.rows), 'pair')}"
        text = "\n".join(
            [title, "", export([self.table], "markdown").strip(), "", *map(format_bullet, self.verdicts), "", ""]
        )
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:  # other steps of the build write there too
            file.write(text)

    @property
    def _sides(self) -> list[str]:
        """Identity of A and B, and other differences between them."""
        if self.folder is None or (study := read_earlier(self.folder)) is None or self.result is None:
            return []
        a, b = (_describe_side(side) for side in study.sides.values())
        sentences = [f"A is {a}, B is {b}."]
        for row in self.rows:
            pair = [self.result.records.trial(row[name]) for name in ("trial_a", "trial_b")]
            if differences := list_changes(pair[0], pair[1]):
                prefix = f"{describe_where(row)}: " if len(self.rows) > 1 else ""
                sentences.append(f"{prefix}besides the speed, these changed: {'; '.join(differences)}.")
        return sentences


def _describe_side(side: Study) -> str:
    pythons = {str(table["python"]): None for table in side.runtime.values() if table.get("python")}
    weights = f" with {side.weights}" if side.weights and not keeps_weights(side.models[0]) else ""
    return f"{side.models[0]}{weights}" + (f" under {', '.join(pythons)}" if pythons else "")


def compare(
    a: Any,
    b: Any = None,
    *,
    remeasure: bool = False,
    baseline_python: Mapping[str, Mapping[str, Any]] | None = None,
    commits: str = "",
    out: str | Path | None = None,
    quiet: bool = True,
    **settings: Any,
) -> Comparison:
    """Compare B with A, trial by trial: speed, accuracy, outputs, status.

    `a` and `b` are two run folders (or `Result`s), or any models that a study takes; models are measured here,
    interleaved. A run folder together with a model, or two run folders with `remeasure`, are measured again as well. If
    `a` and `b` are one model, `baseline_python` has the interpreters of A, {"onnxruntime": {"python": PATH}}, or
    `commits` the git commits of A and B, "main..HEAD". The single run folder of an earlier comparison is read again.
    `settings` are fields of `dyno.Study` and of the rules: fail_on, tolerance, least, rtol, atol, any_outputs. The run
    folder is `out`, or a new one below runs/compare. Raises `UserError` if nothing can be compared.
    """
    check_types({"remeasure": remeasure, "commits": commits}, {"remeasure": bool, "commits": str})
    settings = name_fields(settings)
    rules = GateRules(**{name: settings.pop(name) for name in RULE_NAMES if name in settings})
    sources = [source for source in (a, b) if source is not None]
    if not sources:
        raise UserError("there is nothing to compare; give two run folders or models")
    if refused_name := next((name for name in settings if name in REFUSED_OPTIONS), ""):
        raise UserError(f"a comparison doesn't take {refused_name}; {LIMITS_ADVICE}")
    runs = [_load_run(source) for source in sources]
    if None not in runs and not (remeasure or baseline_python or commits or settings):
        results = [self_test.renew(run) for run in runs if run is not None]
        if len(results) == 1:
            return Comparison(tables.compare_sides(results[0], rules), results[0].folder)
        pairs = tables.pair_trials(results[0], results[1])
        return Comparison(tables.compare_runs(results[0], results[1], rules), video=videos.make_comparison_table(pairs))
    if len(runs) == 2 and None not in runs and not remeasure:
        raise UserError("two stored runs are compared as they are; --remeasure measures both here, with other settings")
    study = _build_study(sources, remeasure, baseline_python, commits, settings)
    models = dict.fromkeys(model for side in study.sides.values() for model in side.models)
    folder = folder_for(out, "compare", list(models))
    return measure_missing(study, folder, rules, Progress(quiet=quiet))


def measure_missing(study: Study, folder: Path, rules: GateRules, progress: Progress) -> Comparison:
    """Measure the parts of the comparison that the folder lacks, and judge it.

    Pairs that fail a gate, or are undecided, get the same number of fresh rounds again and are judged by all rounds:
    false alarms are then no likelier than in a comparison with twice the rounds.
    """
    if rules.gate and study.rounds < 2:
        raise UserError("one round can't show how much rounds differ, so slower=… needs --rounds 2 or more")
    execute(study, folder, progress)
    comparison = Comparison(tables.compare_sides(load_run(folder), rules), folder)
    suspects = [r for r in comparison.rows if SLOWER in r["failed"] or r["undecided"].startswith(tables.TOO_FEW_ROUNDS)]
    suspects = [r for r in suspects if min(r["rounds_a"], r["rounds_b"]) < 2 * study.rounds]
    if not (rules.gate and suspects):
        return comparison
    progress.note(f"measured again before it is judged: {', '.join(map(describe_where, suspects))}")
    ids = {r[name] for r in suspects for name in ("trial_a", "trial_b")}
    execute(replace(study, rounds=2 * study.rounds), folder, progress, only=TrialSelection(ids))
    return Comparison(tables.compare_sides(load_run(folder), rules), folder)


def _load_run(source: Any) -> Results | None:
    """Return the stored run at `source`; None for anything else."""
    if isinstance(source, Result):
        return source.records
    if isinstance(source, (str, Path)) and Path(source).is_dir():
        return load_run(Path(source))
    return None


def _build_study(
    sources: list[Any],
    remeasure: bool,
    baseline_python: Mapping[str, Any] | None,
    span: str,
    settings: Mapping[str, Any],
) -> Study:
    runs = [_load_run(source) for source in sources]
    first, last = _build_side(sources[0]), _build_side(sources[-1])
    if len(sources) == 1 and not (baseline_python or span):
        raise UserError(
            f"there is nothing to compare {first.models[0]} with; give another run or model, "
            "--baseline-python BACKEND=PYTHON or --commits A..B"
        )
    if remeasure and not any(run is not None for run in runs):
        raise UserError("--remeasure measures stored runs again; give at least one run folder")
    if (baseline_python is not None or span) and len(sources) > 1:
        raise UserError("--baseline-python and --commits compare one model with itself; give one model")
    if span:
        before, after = _at_commits(first.models[0], span)
        first, last = replace(first, models=(before,)), replace(last, models=(after,))
    template = last if runs[0] is None and runs[-1] is not None else first  # a stored study's settings are kept
    defaults = {**template.to_table(), "turns": None, **settings}
    b = {name: getattr(last, name) for name in ("models", "weights", "pretrained", "runtime")}
    b |= {name: settings[name] for name in b if name in settings}
    a = {name: getattr(first, name) for name in b} | {name: settings[name] for name in b if name in settings}
    a |= {"models": first.models} | ({"runtime": dict(baseline_python)} if baseline_python is not None else {})
    baseline = {name: a[name] for name in a if name == "models" or a[name] != b[name]}
    return Study(**{**defaults, **b, "models": last.models, "baseline": baseline})


def _build_side(source: Any) -> Study:
    """Return one side as a study: the stored run's, or the model's with the defaults of a comparison."""
    run = _load_run(source)
    if run is None:
        (source,) = Study(models=(source,)).models
        path, _ = commits.split_commit(source)
        backend, device = default_runner(path)
        return Study(models=(source if path == source else commits.fix_commit(source),), backends=(backend,),
                     device=device, **DEFAULTS)  # fmt: skip
    study = read_earlier(run.folder)
    if study is None:
        raise UserError(f"{run.folder} has no study.toml, so it can't be measured again")
    if len(study.models) > 1 or study.baseline:
        raise UserError(f"{run.folder} has several models; a comparison that measures has one on each side")
    for trial in list_stored(run.folder / "trials"):
        if file := find_overwritten(trial.trial.model):
            raise UserError(f"{file} has changed since {run.folder} was measured, so it can't be measured again")
    settings = {name: value for name, value in study.to_table().items() if name not in REFUSED_OPTIONS}
    return Study(**{**settings, "rounds": max(DEFAULT_ROUNDS, study.rounds), "boundaries": study.boundaries})


def _at_commits(model: str, span: str) -> tuple[str, str]:
    """Return the model at both commits of `A..B`; without B, the second is the file in its current state."""
    before, dots, after = span.partition("..")
    if not (before and dots) or after.startswith(".") or commits.split_commit(model)[1]:
        advice = "write main..HEAD, or main.. for the file as it is"
        raise UserError(f"--commits {span!r} is not A..B, two commits of {model}; {advice}")
    sources = [commits.fix_commit(f"{model}@{commit}") if commit else model for commit in (before, after)]
    for commit, source in zip((before, after), sources, strict=True):
        if commit and not commits.split_commit(source)[1]:
            raise UserError(f"{model} is not a file, so it has no commits; give FILE.py:FUNCTION or a model's file")
    return sources[0], sources[1]


GOOD, REGRESSION, UNDECIDED = 0, 1, 3  # exit codes
HEADINGS = {GOOD: "no regression", REGRESSION: "regression", UNDECIDED: "undecided"}
STORED_NOTE = "Two stored runs, measured one after the other; --remeasure measures both here in turns."
SESSIONS_NOTE = (
    "Not comparable: measured in two sessions, and rounds don't show differences between sessions. Measure them again "
    "side by side (dyno compare A B --remeasure), or keep three self-tests of this machine (dyno selftest)."
)
COPIED_NOTE = "Nothing was compared where both runs hold the same measurement: one is a copy of the other."
WIDENED_NOTE = "Measured in two sessions: intervals include the differences between this machine's self-tests."


def list_comparison(table: Table, is_stored: bool = True) -> list[str]:
    """Describe the comparison: wrong outputs, counts of verdicts, and each failed trial with the reason.

    Then the way of measuring (`is_stored`: as two runs), and the smallest slow-down that it would have caught.
    """
    rows = table.rows
    counts = Counter(describe_outcome(r).partition(":")[0] for r in rows)
    lines = [f"{describe_where(r)}: {r['verdict']}, so the speed is not judged."
             for r in rows if r["verdict"].startswith(OUTPUTS_WRONG)]  # fmt: skip
    verdicts = ", ".join(f"{n} {name}" for name, n in counts.most_common())
    shared_count = sum(r["status"] != MISSING for r in rows)
    missing_text = f", {len(rows) - shared_count} only in A" if shared_count < len(rows) else ""
    lines += [f"{format_count(shared_count, 'shared trial' if is_stored else 'pair')}{missing_text}: {verdicts}."]
    lines += [f"failed: {describe_where(r)}: {explain_failure(r)}" for r in rows if r["failed"]]
    lines += [f"undecided: {describe_where(r)}: {r['undecided']}" for r in rows if r["undecided"]]
    if not any(map(_has_run, rows)):
        lines.append("Nothing was compared: in no pair did both A and B run.")
    if counts[stats.ONE_ROUND]:
        lines.append("One round can't show that a difference is real: measure both with two rounds or more.")
    return [*lines, *_describe_method(rows, is_stored), *_describe_power(rows)]


def _describe_method(rows: list[Row], is_stored: bool) -> list[str]:
    methods = {r["measured"] for r in rows if r["measured"]}
    if not methods:
        return []
    rounds = max((min(r["rounds_a"], r["rounds_b"]) for r in rows), default=0)
    note = WIDENED_NOTE if stats.IN_TWO_SESSIONS in methods else STORED_NOTE
    note = SESSIONS_NOTE if any(r["verdict"] == TWO_SESSIONS for r in rows) else note
    note = COPIED_NOTE if any(r["verdict"] == SAME_MEASUREMENT for r in rows) else note
    sentences = [note if is_stored else f"Measured {' or '.join(sorted(methods))}, {format_count(rounds, 'round')}."]
    builds = [int(r["builds"]) for r in rows if not is_missing(r["builds"])]
    if 1 in builds:
        sentences.append("One build of each engine tuned by timing: another may differ; see --builds.")
    elif builds:
        sentences.append(f"Over {min(builds)} builds of each engine tuned by timing.")
    if (count := sum(1 for r in rows if not is_missing(r["p_value"]))) > 1:
        sentences.append(f"The {count} pairs are one family (Holm): all verdicts together hold in 95 % of comparisons.")
    return sentences


def _describe_power(rows: list[Row]) -> list[str]:
    slowdowns = [r["smallest"] for r in rows if not is_missing(r["smallest"])]
    if not slowdowns:
        return []
    min_slowdown, max_slowdown = format_slowdown(min(slowdowns) / 100), format_slowdown(max(slowdowns) / 100)
    span = min_slowdown if min_slowdown == max_slowdown else f"{min_slowdown.removesuffix(' %')} to {max_slowdown}"
    text = f"a slow-down of {span} is caught in {100 * TARGET_POWER:g} % of comparisons"
    return [f"With these rounds and this spread, {text}."]


def describe_where(row: Row) -> str:
    """Return a short name of the row's trial."""
    return f"{clean_text(row['model'])} {clean_text(configuration_of(row))} b{row['batch']} {row['size']}"


def explain_failure(row: Row) -> str:
    """Return the reason for a row's failure."""
    return "; ".join(_explain_failure(condition, row) for condition in row["failed"].split(", "))


def _explain_failure(condition: str, row: Row) -> str:
    if condition == SLOWER:
        return f"slower, {RATIO_SHOWN.text(row)} the latency"
    if condition == LESS_ACCURATE:
        low, value, high = (format_points(row[f"{row['judged_by']}{x}"] / 100) for x in ("_low", "", "_high"))
        return f"less accurate, {value} points [{low}, {high}] on the same images"
    if condition == STATUS:
        return f"was ok, now {row['status']}: {clean_text(row['reason'])}"
    if condition == WRONG_OUTPUTS:
        return str(row["verdict"])
    if is_missing(row["close"]):
        return "no outputs to compare with A's"
    return f"only {floor_percent(row['close'])} % of values agree"


def explain_undecided(row: Row) -> str:
    """Return the reason why a row is undecided; "" if it is decided."""
    reason = row["verdict"] if row["verdict"].startswith((INCOMPARABLE, OUTPUTS_WRONG)) else ""
    return str(row["undecided"] or reason)


def exit_code(table: Table) -> int:
    """Return 1 if a condition failed, 3 if a row is undecided, incomparable or wrong, or no pair ran, else 0."""
    if any(r["failed"] for r in table.rows):
        return REGRESSION
    return UNDECIDED if any(map(explain_undecided, table.rows)) or not any(map(_has_run, table.rows)) else GOOD


def _has_run(row: Row) -> bool:
    return bool(row["status"] == row["status_a"] == "ok")
