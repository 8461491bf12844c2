"""The commands that run or read studies: options become a `Study`, records become tables."""

from __future__ import annotations

import os
import sys
import time as time_module
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from dyno.cli import options, run_folders
from dyno.cli.exits import INTERRUPTED, left_out
from dyno.cli.options import Overrides
from dyno.formatting import format_bullet, format_count, make_console, wrap_text
from dyno.layers import commands as layers_commands
from dyno.store import check_own, check_writable, is_run
from dyno.study.defaults import (
    EVALUATION_SETTINGS,
    ONE_ROUND,
    PARQUET_FORMAT,
    QUICK_SETTINGS,
    SELF_TEST_MINUTES,
    check_several,
    each_of,
    each_with,
    find_format,
    missing_gpu,
    new_folder,
    parse_trackers,
    study_of,
)
from dyno.study.model_names import model_name
from dyno.study.options import MODEL_HELP
from dyno.study.study import Study
from dyno.worker.extras import name_lacking
from dyno.worker.option_values import check_range, option
from dyno.worker.record import write_text
from dyno.worker.spec import ADAPTIVE_RULES, Trial, UserError, clean_text

if TYPE_CHECKING:
    from dyno.results.run_data import RunData

MAX_PROBLEMS = 5  # unreadable files named in a message
UNFINISHED = 3  # exit code if some models could not be measured
CHART_SUFFIXES = (".svg", ".png", ".html")  # suffixes of charts of a history
PROBE_S, MIN_BUSY_CORES = 2.0, 0.5  # seconds of a check for other programs; smallest reported number of busy processors
POLL_INTERVAL_S, MAX_WAIT_S = 10.0, 600.0  # seconds between polls; longest wait for a quiet machine
# Defaults that depend on the kind of file.
BY_FILE = {**ONE_ROUND, "backends": "the one for this kind of file", "device": "cpu, cuda:0 for TensorRT's engines"}
# Options of commands that measure one configuration per model.
MODEL_OPTIONS = f"{options.MODEL_FIELDS} {options.IMAGE_FIELDS} {options.RUNTIME_FIELDS}"
TIMING_OPTIONS = (
    f"{options.CONFIGURATION_FIELDS} {MODEL_OPTIONS} {options.EFFORT_FIELDS} boundaries timeout build_timeout"
)


@options.accept_options(Study, rare="retry_failed wait log format")
def run(
    overrides: Overrides,
    models: options.Studied,
    quick: options.Quick = False,
    wait: options.Wait = False,
    out: options.Out = "",
    log: options.Log = "",
    format: options.Format = "text",
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Measure failed trials again.", rich_help_panel=options.WHERE)
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the trials and why any is refused.", rich_help_panel=options.WHERE)
    ] = False,
) -> None:
    """Measure models in every configuration, and say which is fastest. The same command continues a stopped run."""
    study = _build_study(Overrides({**(QUICK_SETTINGS if quick else {}), **overrides}), models)
    if dry_run:
        if log or format != "text":
            raise UserError("--dry-run lists the trials in text alone; omit --format and --log, or --dry-run")
        _list_plan(study)
    else:
        folder = _find_folder(study, models, out)
        look_for_others(wait)
        code = run_study(study, folder, retry_failed=retry_failed, format=format)
        _log(folder, log)
        raise typer.Exit(code)


def look_for_others(wait: bool) -> None:
    """Print the number of busy processors before a study, or wait up to `MAX_WAIT_S` until they are free.

    Without a terminal or `wait` nothing is checked: the records have each job's disturbances.
    """
    if not (wait or sys.stderr.isatty()):
        return
    from dyno.jobs import telemetry

    cores, start = len(os.sched_getaffinity(0)), time_module.monotonic()
    while (busy := telemetry.count_busy(PROBE_S)) >= MIN_BUSY_CORES:
        line = f"dyno: {busy:.1f} of {cores} processors are busy with other programs"
        if not wait or time_module.monotonic() - start > MAX_WAIT_S:
            print(
                f"{line}, so latencies may differ from a quiet machine's" + ("" if wait else "; --wait waits"),
                file=sys.stderr,
            )
            return
        print(f"{line}: waiting, for {MAX_WAIT_S / 60:g} minutes at most", file=sys.stderr)
        time_module.sleep(POLL_INTERVAL_S)


def _build_study(overrides: Overrides, models: Sequence[str]) -> Study:
    """Build the study from the command line: a TOML file with options on top, or models and options."""
    files = [model for model in models if model.endswith(".toml")]
    if not files:
        return Study(models=tuple(models), **overrides)
    if len(models) > 1:
        raise UserError(f"give either one study file or models, not {files[0]} and {len(models) - 1} more")
    return Study.from_toml(Path(files[0]), **overrides)


def _find_folder(study: Study, models: Sequence[str], out: str) -> Path:
    """Return `--out`, else runs/NAME after the study file or the models, with a suffix if that folder is taken."""
    from dyno.runner.run_folder import RUNS_DIR, choose_folder

    if out:
        return Path(out)
    first = None
    if len(models) == 1 and models[0].endswith(".toml"):
        path = Path(models[0])
        if path.name == "study.toml" and is_run(path.parent):
            return path.parent
        first = RUNS_DIR / path.stem
    folder, notice = choose_folder(study, first)
    if notice:
        print(f"dyno: {notice}", file=sys.stderr)
    return folder


def _list_plan(study: Study) -> None:
    """List the trials, with the reasons for refusals."""
    from rich.table import Table

    from dyno.devices import places, spread
    from dyno.study.plan import expand

    if places.is_several(study):
        with spread.expected_places(study) as study_places:
            entries = expand(places.at_one(study, study_places))
    else:
        entries = expand(study)
    models = list(dict.fromkeys(entry.trial.model.name for entry in entries))
    table = Table(box=None, pad_edge=False)
    for heading in (*["model"][: len(models) - 1], "trial", "backend", "precision", "batch", "size", "file"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "model")
    by_reason: dict[str, list[str]] = {}
    for entry in entries:
        t = entry.trial
        file = f"{t.recipe.format} {t.recipe.precision}" if t.recipe else ""
        row = (t.id, t.variant, t.precision, str(t.dims.batch), t.dims.label, "refused" if entry.refusal else file)
        # A model's name may look like rich's markup.
        table.add_row(*(escape(clean_text(cell)) for cell in ((t.model.name, *row) if len(models) > 1 else row)))
        if entry.refusal:
            by_reason.setdefault(entry.refusal, []).append(f"{t.variant} {t.precision}")
    console = make_console()
    console.print(table)
    for reason, rows in by_reason.items():
        console.print(escape(clean_text(f"refused: {', '.join(dict.fromkeys(rows))}: {reason}")))
    rounds = format_count(study.rounds, "round") + (" in turns" if study.turns else "")
    scope = f" of {escape(clean_text(models[0]))}" if len(models) == 1 else ""
    count = sum(map(len, by_reason.values()))
    console.print(f"{format_count(len(entries), 'trial')}{scope}, {count} refused; {rounds} each. Nothing was run.")
    console.print(_at_most(study, [entry.trial for entry in entries if not entry.refusal]))
    if missing_gpu(study.device):
        console.print(f"There is no {study.device} here, so a run would be refused.")


def _at_most(study: Study, trials: Sequence[Trial]) -> str:
    """Return a sentence with an upper bound on the measuring time."""
    from dyno.formatting import show

    rounds = sum(trial.plan.rounds for trial in trials)
    seconds = rounds * len(study.boundaries) * (study.warmup + study.seconds)
    text = f"Warm-up and sampling take {show(seconds, 'duration')} at most"
    if study.samples:
        text = f"Each boundary takes {study.samples} samples, however long that takes"
    text += "; starting, loading and evaluating come on top."
    if study.until in ADAPTIVE_RULES and not study.samples and seconds > 60 * study.minutes:
        text += f" --minutes {study.minutes:g} ends it sooner: then a trial has two rounds, or three if it may win."
    elif study.until in ADAPTIVE_RULES:
        text += f" Undecided comparisons get further rounds, until {study.minutes:g} minutes were measured in all."
    return text


def run_study(study: Study, folder: Path, *, retry_failed: bool = False, format: str = "text") -> int:
    """Run the study, print its trials and the verdict, write its report; return the exit code.

    It is 0, 1 (no trial within the budget and the limits) or 3 (unfinished).
    """
    from dyno import api

    try:
        api.run(study, folder, retry_failed=retry_failed)
    except KeyboardInterrupt:
        show_stopped(folder, format)
        raise
    return finish(folder, format)


def show_stopped(folder: Path, format: str = "text") -> None:
    """Print the preliminary answer of an interrupted study, if it has a stored round."""
    try:
        run = _read_run(folder)
    except UserError:
        return
    if any(t.status == "ok" for t in run.records):
        print(_format_answer(run, format), end="")


def _format_answer(run: RunData, format: str) -> str:
    """Return the trials and the verdict as `dyno show` prints them (in JSON as data; in CSV and HTML no verdict)."""
    from dyno.report.export import export
    from dyno.report.tables.trial_table import TRIALS
    from dyno.report.verdict import verdict

    text = export([TRIALS.table(run)], format, head=verdict.describe_run(run) if format == "json" else None)
    if format in ("text", "markdown"):
        lines = map(wrap_text if format == "text" else format_bullet, verdict.read_verdict(run).lines)
        text += "\n" + "\n".join(lines) + "\n"
    return text


def finish(folder: Path, format: str = "text") -> int:
    """Print the trials and the verdict of an ended study, write its report, and return its exit code."""
    from dyno.report import report as page
    from dyno.report import tables
    from dyno.report.tables import trial_table
    from dyno.results import ranking

    run = _read_run(folder)
    answer = (_describe_visible(run) if format == "text" else "") + _format_answer(run, format)
    try:  # first of all, as the reader of a pipe may be gone
        if libraries := page.list_missing():
            page.write_tables([run], [tables.make_tables(run, "all")], folder)
            note = f"no report: {name_lacking(libraries)}"
        else:
            note = f"report: {page.write_report([run], folder)}"
    except (UserError, OSError):  # the disk may be full, but the answer can be printed
        print(answer, end="")
        raise
    print(answer, end="")
    print(f"\n{note}" if format == "text" else f"dyno: {note}", file=sys.stdout if format == "text" else sys.stderr)
    code = trial_table.exit_code(
        run.frame, budget=bool(run.budgets), unasked=[t.id for t in run.records.failed_additions]
    )
    return code or int(bool(run.limits) and not ranking.is_within_limits(run))


def _read_run(folder: Path, overrides: Overrides | None = None) -> RunData:
    """Read the run with its table; attach this machine's self-test if the run has none stored."""
    from dyno.report.tables import trial_table
    from dyno.results.trial_result import load_run
    from dyno.runner import self_test

    settings = overrides or Overrides()
    results = self_test.attach(load_run(folder))
    return trial_table.read_trials(
        results, settings.get("reference"), settings.get("budget"), settings.get("equivalent"), settings.get("limit")
    )


def _describe_visible(run: RunData) -> str:
    """Return the smallest detectable differences and an empty line; "" without a self-test of the machine."""
    from dyno.report import self_test as report_self_test

    sentence = report_self_test.of_run(run.records)
    return f"{wrap_text(sentence)}\n\n" if sentence else ""


def _log(folder: Path, trackers: str, overrides: Overrides | None = None) -> None:
    """Log a stored run to the trackers, and print its new places on standard error."""
    if names := parse_trackers(trackers):
        from dyno.report import tracking

        for sentence in tracking.log_run(_read_run(folder, overrides), names):
            print(f"dyno: {clean_text(sentence)}", file=sys.stderr)


@options.accept_options("reference budget limit equivalent", show_all=True)
def show(
    overrides: Overrides,
    runs: options.SomeRuns = None,
    format: Annotated[
        str, typer.Option(help="text, markdown, csv, json, html; parquet with -o.", show_default="text, or the file's")
    ] = "",
    out: Annotated[str, typer.Option("--out", "-o", help="Write into a file.", metavar="FILE.csv|json|parquet|…")] = "",
    log: options.Log = "",
    by: Annotated[str, typer.Option(help="Columns to group by, e.g. backend,batch.")] = "",
    table: Annotated[str, typer.Option(help="One table: frontier, break-even, latency-model, sizes…; or all.")] = "",
    columns: Annotated[str, typer.Option(help="Columns to print, e.g. backend,latency_ms; or all.")] = "",
    list_all: Annotated[bool, typer.Option("--list", help="List every table, with a sentence on each.")] = False,
    over_time: Annotated[
        str,
        typer.Option(
            help="Instead write memory, utilisation, power and clock of trials over time, on one axis.",
            metavar="FILE.svg|png|csv",
        ),
    ] = "",
    trials: Annotated[
        str,
        typer.Option(
            help="With --over-time: ids or BACKEND/PRECISION, with commas.",
            show_default="the reference, the fastest three",
        ),
    ] = "",
) -> None:
    """Print a run's trials and the verdict, or another table. Several runs: their history, trial by trial."""
    from dyno.report import tables
    from dyno.report.export import export

    runs = runs or ([] if list_all else [run_folders.find_latest()])
    is_drawn = len(runs) > 1 and not format and Path(out).suffix in CHART_SUFFIXES
    format = "html" if is_drawn else find_format(out, format)
    if out:
        check_writable(Path(out))
    if list_all:
        if format == PARQUET_FORMAT:
            raise UserError("--list can't be written as Parquet; give another format")
        _put_text(export([tables.list_tables()], format), out)
        return
    if over_time or trials:
        _write_over_time(_take_one(runs, "--over-time"), over_time, trials, overrides)
        return
    if len(runs) > 1:
        for option in ["--table"] * bool(table) + ["--limit"] * ("limit" in overrides):
            _take_one(runs, option)
        _show_history(runs, out, "" if is_drawn else format, by, columns, overrides)
    else:
        _show_run(runs[0], out, format, by, table, columns, overrides)
    for run in runs:
        _log(run, log, overrides)


def _take_one(runs: Sequence[Path], option: str) -> Path:
    if len(runs) > 1:
        raise UserError(f"{option} is for one run, not for {len(runs)}; give one, or omit {option}")
    return runs[0]


def _show_history(runs: Sequence[Path], out: str, format: str, by: str, columns: str, overrides: Overrides) -> None:
    """Print the trials of several runs, with their changes from run to run; without a format draw them."""
    from dyno.regression import history
    from dyno.report.export import export, write_parquet

    run_data = [_read_run(run, overrides) for run in runs]
    table = history.make_history(run_data)
    if not format and (by or columns):
        raise UserError("a chart of a history takes no --by and no --columns; omit them, or give --format html")
    if not format:
        history.write_chart(table, Path(out))
    elif format == PARQUET_FORMAT:
        write_parquet(Path(out), table)
    _put_text("" if format in ("", PARQUET_FORMAT) else export([table], format, by, subset=columns), out)
    _warn_of_problems(run_data)


def _show_run(run: Path, out: str, format: str, by: str, table: str, columns: str, overrides: Overrides) -> None:
    """Print a table of a stored run, or `all`; without a name the leading tables, or the trials with the verdict."""
    from dyno.report import tables
    from dyno.report.export import export, write_parquet
    from dyno.report.tables import trial_table
    from dyno.report.verdict import verdict
    from dyno.report.verdict.verdict import describe_run

    data = _read_run(run, overrides)
    leaders, sentences = tables.list_leading(data) if not (table or by) else ([], [])
    selection, text = leaders or tables.make_tables(data, table or trial_table.TRIALS.name), ""
    if format == PARQUET_FORMAT:
        if len(selection) != 1:
            raise UserError(f"a Parquet file has one table, not {len(selection)}; choose it with --table NAME")
        if not selection[0].rows:
            raise UserError(f"{run} has no table to write: {tables.explain_absence(table)}")
        write_parquet(Path(out), selection[0], describe_run(data))
    else:
        text = export(selection, format, by, describe_run(data) if format == "json" else None, columns)
        text = text or f"{tables.explain_absence(table)}\n"
    if format in ("text", "markdown") and not (table or by):
        lines = map(wrap_text if format == "text" else format_bullet, sentences or verdict.read_verdict(data).lines)
        text = ("" if leaders else _describe_visible(data)) + text + "\n" + "\n".join(lines) + "\n"
    _put_text(text, out)
    _warn_of_problems([data])


def _put_text(text: str, out: str) -> None:
    """Print the text, or write it to the file `out` and name the file; "" if the file is already written."""
    if not out:
        print(text, end="")
        return
    if text:
        write_text(Path(out), text)
    print(f"dyno: wrote {clean_text(out)}", file=sys.stderr)


def _warn_of_problems(runs: Sequence[RunData]) -> None:
    problems = [problem for run in runs for problem in run.records.problems]
    if (count := len(problems) - MAX_PROBLEMS) > 0:
        problems[MAX_PROBLEMS:] = [f"{count} more lines like these are in the report"]
    for problem in problems:
        Console(stderr=True).print(f"dyno: {escape(clean_text(problem))}", style="yellow", soft_wrap=True)


def _write_over_time(run: Path, file: str, trials: str, overrides: Overrides) -> None:
    from dyno.report.charts.over_time import save

    if not file:
        raise UserError("--trials is for --over-time; add --over-time FILE.svg")
    check_writable(Path(file))
    names = [name for name in map(str.strip, trials.split(",")) if name]
    print(f"saved {save(_read_run(run, overrides), Path(file), names)}", file=sys.stderr)


def report(
    runs: options.SomeRuns = None,
    out: Annotated[str, typer.Option("--out", "-o", help="Folder to write into.", show_default="the run's own")] = "",
    show: Annotated[
        bool, typer.Option("--open/--no-open", help="Open it in the browser.", show_default="on a terminal")
    ] = True,
) -> None:
    """Write one HTML page, charts and results.csv, and open the page."""
    from dyno.report import report as page

    runs = runs or [run_folders.find_latest()]
    folder = Path(out) if out else runs[0]
    if folder.suffix == ".html" and not folder.is_dir():
        raise UserError(
            f"--out {out} is the folder for the page, its charts and tables; give a folder, such as {folder.stem}"
        )
    if {run.resolve() for run in runs} != {folder.resolve()}:
        if (folder / "trials").is_dir():
            raise UserError(
                f"{folder} is a run folder with its own report and results.csv; give another folder with -o"
            )
        check_own(folder)
    readable, problems = [], []
    for run in runs:
        try:
            readable.append(_read_run(run))
        except UserError as e:
            problems.append(e)
    if not readable:
        raise problems[0]
    path = page.write_report(readable, folder)
    print(path)
    if show and is_terminal():
        with suppress(webbrowser.Error):  # without a browser the path is printed
            webbrowser.open(path.resolve().as_uri())
    raise typer.Exit(left_out(map(str, problems)))  # 3 if one of several can't be read


def is_terminal() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout.isatty()


def _measure_models(overrides: Overrides, models: Sequence[str], out: str, command: str, **defaults: Any) -> list[Path]:
    """Measure each model with its format's backend or the requested ones; return the run folders."""
    from dyno import api

    folder, pairs = Path(out) if out else new_folder(command, models), each_with(models, overrides)

    def measure_model(number: int, _: str) -> Path:
        source, settings = pairs[number]
        return api.run(study_of(source, defaults, settings), _choose_folder(folder, models, number)).folder

    return each_of(models, measure_model, required_count=1 if command == "diff" else 0)  # `diff` needs the first model


def _choose_folder(out: Path, models: Sequence[str], number: int) -> Path:
    """Return the run folder of one of several models; a number distinguishes files of the same name."""
    return out if len(models) == 1 else out / f"{number}-{model_name(models[number]).replace('/', '-')}"


@options.accept_options(TIMING_OPTIONS, **BY_FILE)
def time(
    overrides: Overrides,
    models: options.Models,
    out: options.NewOut = "",
    format: options.Format = "text",
    trtexec: Annotated[str, typer.Option(help="A trtexec log, or its exported times, to compare with.")] = "",
) -> None:
    """Time a module, an ONNX file, an engine or an OpenVINO IR. Inputs are random, or yours."""
    from dyno.report.export import export
    from dyno.report.tables import trial_table
    from dyno.report.verdict.verdict import describe_run
    from dyno.results.ranking import cpu_contention
    from dyno.table import join_tables
    from dyno.trtexec import log as logs
    from dyno.trtexec.cross_check import cross_check, is_engine

    log = Path(trtexec) if trtexec else None
    if log:
        logs.read_log(log)  # a file that is not a log is refused before anything is timed
    folders = _measure_models(overrides, models, out, "time")
    runs = [trial_table.read_trials(folder) for folder in folders]
    table = join_tables([trial_table.TRIALS.table(run) for run in runs])
    print(export([table], format, head=describe_run(runs[0]) if len(runs) == 1 else {}), end="")
    for run in runs:
        engines = [t for t in run.records if is_engine(t)]
        if log or (engines and format == "text"):  # an engine's number is explained in trtexec's terms
            print("\n".join(map(wrap_text, cross_check(engines, log))))
        if contention := cpu_contention(run.records, compared=False):
            print(wrap_text(f"dyno: {contention.sentence}"), file=sys.stderr)
    raise typer.Exit(trial_table.exit_code(table.to_pandas()) or UNFINISHED * (len(folders) < len(models)))


@options.accept_options(f"backends precisions sizes {MODEL_OPTIONS}", **BY_FILE)
def stress(
    overrides: Overrides,
    models: options.Models,
    phases: Annotated[
        str,
        typer.Option(
            help="Phases, by batch: min, opt or max of the engine's profile (a file's: 1, 4, 8), random, or a number."
        ),
    ] = "min,opt,max,random",
    iterations: Annotated[int, typer.Option(help="Batches in each phase.")] = 10_000,
    out: options.NewOut = "",
    format: options.Format = "text",
) -> None:
    """Run a dynamic engine or ONNX file at changing batches for a long time. Check every output, and watch memory."""
    from dyno.report.export import export
    from dyno.runner import stress as module
    from dyno.table import join_tables

    folder = Path(out) if out else new_folder("stress", models)
    phase_list = module.phases_of(phases)
    pairs = each_with(models, overrides)

    results: list[module.StressResult] = []

    def stress_model(number: int, _: str) -> int:
        source, settings = pairs[number]
        run_folder = _choose_folder(folder, models, number)
        for result in module.run(study_of(source, {}, settings), phase_list, iterations, run_folder):
            results.append(result)
            if format == "text":
                print("\n".join([export([result.table]).rstrip("\n"), *map(wrap_text, result.sentences)]))
        return 0

    done = each_of(models, stress_model)
    if format != "text":
        sentences = [sentence for result in results for sentence in result.sentences]
        print(export([join_tables([r.table for r in results])], format, head={"sentences": sentences}), end="")
    raise typer.Exit(max([*(result.exit_code for result in results), UNFINISHED * (len(done) < len(models))]))


@options.accept_options(
    f"{TIMING_OPTIONS} budget",
    data=...,
    **{**BY_FILE, **EVALUATION_SETTINGS, "batches": "8; for a file its own batch, else 1"},
)
def eval(
    overrides: Overrides,
    models: options.Models,
    per_class: Annotated[bool, typer.Option("--per-class", help="Show every class, not only the worst.")] = False,
    out: options.NewOut = "",
    format: options.Format = "text",
) -> None:
    """Measure accuracy on labelled images, and speed. Print intervals, classes, confusions and the pipeline's rate."""
    from dyno import evaluation

    folders = _measure_models(overrides, models, out, "eval", **EVALUATION_SETTINGS)
    code = evaluation.show_evaluation(folders, format, per_class)
    raise typer.Exit(code or UNFINISHED * (len(folders) < len(models)))


@options.accept_options(
    layers_commands.LayerOptions, f"{options.CONFIGURATION_FIELDS} {MODEL_OPTIONS} compared", **BY_FILE
)
def diff(
    overrides: Overrides,
    models: options.Models,
    rtol: Annotated[float, typer.Option(help="Relative difference of two outputs that still agree.")] = 1e-3,
    atol: Annotated[float, typer.Option(help="Absolute difference of two outputs that still agree.")] = 1e-8,
    least: Annotated[float, typer.Option(help="Exit 1 when a smaller share of values agrees (0 to 1).")] = 0.0,
    out: options.NewOut = "",
    format: options.Format = "text",
) -> None:
    """Compare the outputs of several files or backends, or their layers. Print errors, agreement and the top-10."""
    from dyno.report.export import export
    from dyno.report.tables import accuracy_tables
    from dyno.results import trial_result
    from dyno.study.model_info import model_spec
    from dyno.study.plan import USUAL_ROUTE

    for name, value, max_value in (("rtol", rtol, 1e9), ("atol", atol, 1e9), ("least", least, 1)):
        check_range(name, value, 0, max_value)
    if overrides.pop("layers", False):
        raise typer.Exit(layers_commands.diff_layers(overrides, models, out, rtol, atol, least, format))
    if name := next((name for name in ("top", "order") if name in overrides), ""):
        raise UserError(f"--{name} is for --layers; add that, or omit it")
    defaults: dict[str, Any] = {"boundaries": (), "routes": (USUAL_ROUTE,)}
    studies = [study_of(source, defaults, settings) for source, settings in each_with(models, overrides)]
    check_several(studies)
    for study in studies:  # check every study before the first is measured
        model_spec(study, study.models[0])
    folders = _measure_models(overrides, models, out, "diff", **defaults)
    values, ranks, failures = accuracy_tables.compare_with_first(
        [trial_result.load_run(folder) for folder in folders], rtol, atol
    )
    print(export([values, *([ranks] if ranks.rows else [])], format), end="")
    if least and not all(row["close"] >= least for row in values.rows):  # NaN where nothing was compared
        raise typer.Exit(1)
    raise typer.Exit(UNFINISHED * (bool(failures) or len(folders) < len(models)))


@dataclass(frozen=True)
class SelfTestOptions:
    """What is measured, and for how long."""

    minutes: float = option(SELF_TEST_MINUTES, "Minutes to measure; longer gives more certain figures.", common=True)
    rounds: int = option(0, "Rounds at most; at least 3.", "as many as fit", common=True)
    backend: str = option("", "Backend, with options as NAME@option=value.", "one that is installed", common=True)
    rebuild: bool = option(False, "Build the engine anew in each round, as part of the noise.", common=True)


@options.accept_options(SelfTestOptions, f"precisions batches sizes {options.MODEL_FIELDS} {options.RUNTIME_FIELDS}")
def selftest(
    overrides: Overrides,
    model: Annotated[
        str, typer.Argument(help=MODEL_HELP, show_default="a small network of Dyno's", metavar="MODEL")
    ] = "",
    format: options.Format = "text",
) -> None:
    """Measure how small a difference can be seen on this machine. Print the rate of false alarms, and a grade."""
    from dyno.regression import selftest as module
    from dyno.report import self_test as report_self_test
    from dyno.report.export import export
    from dyno.report.self_test import make_tables

    try:
        result = module.selftest(model, **overrides)
    except KeyboardInterrupt:
        print("dyno: stopped; an unfinished self-test is not stored", file=sys.stderr)
        sys.exit(INTERRUPTED)
    print(export(make_tables(result), format, head=report_self_test.describe_self_test(result)), end="")
    if format in ("text", "markdown"):
        print(
            "\n"
            + "\n".join(map(wrap_text if format == "text" else format_bullet, report_self_test.list_sentences(result)))
        )
