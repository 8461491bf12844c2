"""What the commands that run or read studies do: flags become a `Study`, records become tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dyno.single import new_folder, study_of
from dyno.study import Study, model_name, parse_budget
from dyno.worker.spec import UserError

if TYPE_CHECKING:
    import typer

LISTS = {"backends": "backends", "precision": "precisions", "batch": "batches", "size": "sizes"}
PLAIN = (
    "shapes inputs weights pretrained channels seed data calibration unreadable compared reference device threads "
    "rounds seconds warmup samples timeout task confirm search peak"
).split()


def _written(ctx: typer.Context, name: str) -> bool:
    """Whether the user wrote the flag, which may say what its default says."""
    source = ctx.get_parameter_source(name)
    # By name: typer brings a click of its own, whose enumeration is another object than click's.
    return source is not None and source.name == "COMMANDLINE"


def given(ctx: typer.Context) -> dict[str, Any]:
    """Study fields for the flags that the user wrote, by the study's own names; defaults are left to the study."""
    flags = {name: value for name, value in ctx.params.items() if _written(ctx, name)}
    found: dict[str, Any] = {name: flags[name] for name in PLAIN if name in flags}
    for flag, field in LISTS.items():
        if flag in flags:
            found[field] = tuple(part.strip() for part in flags[flag].split(",") if part.strip())
    if "batches" in found:
        found["batches"] = tuple(_batch(text) for text in found["batches"])
    for name in ("mean", "std"):
        if name in flags:
            found[name] = numbers(flags[name])
    if flags.get("classes"):
        found["classes"] = flags["classes"]
    if "budget" in flags:
        found["budget"] = parse_budget(flags["budget"])
    if "python" in flags:
        found["runtime"] = pythons(flags["python"])
    return found


def _batch(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"batch {text!r} is not a whole number from 1 on")
    return int(text)


def numbers(text: str) -> tuple[float, ...]:
    """Mean or std from `0.485,0.456,0.406`; none from ""."""
    return tuple(_number(part) for part in text.split(",")) if text else ()


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{text!r} is not a number; mean and std are numbers such as 0.485,0.456,0.406") from None


def pythons(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`[runtime]` tables from `BACKEND=/path/to/python`."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path:
            raise UserError(f"--python {text!r} is not BACKEND=PATH, e.g. onnxruntime=/usr/bin/python3.10")
        if not Path(path).is_file():
            raise UserError(f"--python {name}: there is no interpreter {path}")
        found[name] = {"python": str(Path(path).absolute())}
    return found


def study(ctx: typer.Context, models: Sequence[str], **defaults: Any) -> Study:
    """The study that the command line describes: a TOML file with flags on top, or models and flags."""
    flags = {**defaults, **given(ctx)}
    files = [model for model in models if model.endswith(".toml")]
    if not files:
        return Study(models=tuple(models), **flags)
    if len(models) > 1:
        raise UserError(f"give either one study file or models, not {files[0]} and {len(models) - 1} more")
    return Study.from_toml(Path(files[0]), **flags)


def folder(ctx: typer.Context, study: Study) -> Path:
    """`--out`, else runs/NAME: the study file's name, else the models' names."""
    if ctx.params.get("out"):
        return Path(ctx.params["out"])
    models = ctx.params["models"]
    if len(models) == 1 and models[0].endswith(".toml"):
        path = Path(models[0])
        return path.parent if path.name == "study.toml" else Path("runs") / path.stem
    return study.folder


def dry_run(study: Study) -> int:
    """List the trials and why any is refused."""
    from dyno.analysis.formatting import console
    from dyno.expand import expand
    from dyno.store import card

    planned = expand(study)
    table = Table(box=None, pad_edge=False)
    for heading in ("trial", "model", "backend", "precision", "batch", "size", "file", "refused because"):
        table.add_column(heading, overflow="fold")
    for one in planned:
        t = one.trial
        made = f"{t.recipe.format} {t.recipe.precision}" if t.recipe else ""
        row = (t.id, t.model.name, t.variant, t.precision, str(t.dims.batch), t.dims.shown, made, one.refusal)
        table.add_row(*map(escape, row))  # a model may be called what rich takes for markup
    out = console()
    out.print(table)
    refused = sum(1 for one in planned if one.refusal)
    out.print(f"{len(planned)} trials, {refused} refused; {study.rounds} rounds each. Nothing was run.")
    if study.device != "cpu" and not card(study.device):
        out.print(f"NVML sees no {study.device} here; without one a run skips every trial.")
    return 0


def run(study: Study, folder: Path) -> int:
    """Run the study, print its tables, write its report; exit code 0, 1 (no trial within budget) or 3 (unfinished)."""
    study.run(folder)
    return finish(folder)


def finish(folder: Path) -> int:
    """Tables, verdict and report of a study that has just ended, and its exit code."""
    from dyno.analysis import reference_tables, tables, verdict
    from dyno.analysis.render import render
    from dyno.result import Result

    result = Result(folder)
    frame = result.to_pandas()
    print(render(frame))
    for sentence in verdict.sentences(result.records, frame):
        print(sentence)
    frame.to_csv(folder / "results.csv", index=False)
    try:
        print(f"\nreport: {result.report()}")
    except ImportError as e:
        records = result.records
        reference_tables.write([(records, reference_tables.sheets(records, frame))], folder)
        print(f"\nno report: {e.name} is not installed; pip install 'inference-dyno[report]'")
    return tables.exit_code(frame)


def show(
    run: Path, format: str, by: str, reference: str, budget: Sequence[str], view: str = "", table: str = ""
) -> None:
    """Print the tables of a stored run, one `view` of it (frontier, break-even), or one `table` side by side."""
    from dyno.analysis import reference_tables, results, tables, views
    from dyno.analysis.render import PRINTED, render

    loaded = results.load(run)
    frame = tables.frame(loaded, reference or None, parse_budget(budget) or None)
    printed: Sequence[Any] = PRINTED
    if view:
        chosen = views.view(view)
        frame, printed, by = chosen.table(loaded, frame), chosen.printed, by or chosen.by
        if frame.empty and format in ("text", "markdown"):
            print(chosen.nothing)
    if table:
        print(reference_tables.render(reference_tables.named(loaded, frame, table), format), end="")
    else:
        print(render(frame, format, by or None, printed=printed), end="")
    for problem in loaded.problems:
        Console(stderr=True).print(f"dyno: {escape(problem)}", style="yellow", soft_wrap=True)


def compare(run_a: Path, run_b: Path, format: str, fail_on: str, tolerance: float, least: float, rtol: float) -> int:
    """Hold a stored run against another; exit code 1 when a condition failed, 2 when a trial can't be compared."""
    from dyno.analysis import compare as module
    from dyno.analysis import results
    from dyno.analysis.render import render

    conditions = tuple(name.strip() for name in fail_on.split(",") if name.strip())
    rules = module.Rules(conditions, tolerance, least, rtol)
    frame = module.compare(results.load(run_a), results.load(run_b), rules)
    print(render(frame, format, printed=module.PRINTED), end="")
    if format in ("text", "markdown"):
        print("\n" + "\n".join(module.sentences(frame)))
    for note in frame.attrs["notes"]:
        Console(stderr=True).print(f"dyno: {escape(note)}", style="yellow", soft_wrap=True)
    return module.exit_code(frame)


def report(runs: Sequence[Path], out: Path) -> None:
    """Write the report of one or several runs."""
    from dyno.analysis import report as page
    from dyno.analysis import results

    if out.suffix == ".html" and not out.is_dir():
        raise UserError(f"--out {out} is the folder for the page, its charts and tables; give one, like {out.stem}")
    print(page.write([results.load(run) for run in runs], out))


def _single(ctx: typer.Context, models: Sequence[str], command: str, **defaults: Any) -> Path:
    """Measure each model under the backend its kind of file is for (or the ones asked for), in a folder of its own."""
    out = Path(ctx.params["out"]) if ctx.params.get("out") else new_folder(command, models)
    for number, model in enumerate(models):
        alone(ctx, model, **defaults).run(_part(out, models, number))
    return out


def alone(ctx: typer.Context, model: str, **defaults: Any) -> Study:
    """The study of one model under the backend its kind of file is for, or the ones asked for."""
    return study_of(model, defaults, given(ctx))


def _part(out: Path, models: Sequence[str], number: int) -> Path:
    """The run folder of one of several models: two files may have one name."""
    return out if len(models) == 1 else out / f"{number}-{model_name(models[number])}"


def time(ctx: typer.Context, models: Sequence[str], format: str, trtexec: Path | None) -> int:
    """Time each model and print its rows; an engine's number is explained in trtexec's terms."""
    from dyno.analysis import results
    from dyno.analysis import trtexec as logs
    from dyno.cross_check import cross_check

    if trtexec:
        logs.read(trtexec)  # a file that is none is said before anything is timed
    out = _single(ctx, models, "time")
    code = _print_runs(out, models, format)
    for number in range(len(models)):
        trials = results.load(_part(out, models, number)).trials
        engines = [t for t in trials if t.good and t.backend.startswith("tensorrt")]
        if trtexec or (engines and format == "text"):
            print("\n".join(cross_check(engines, trtexec)))
    return code


def endure(ctx: typer.Context, models: Sequence[str], kinds: str, iterations: int) -> int:
    """The hard test of each model's engine."""
    from dyno import endurance

    written = [name for name in ("rounds", "seconds", "samples", "warmup", "format", "trtexec") if _written(ctx, name)]
    if written:
        raise UserError(f"--{written[0]} says nothing of the hard test that --batches asks for; leave one of them out")
    out = Path(ctx.params["out"]) if ctx.params.get("out") else new_folder("time", models)
    asked = endurance.kinds_of(kinds)
    codes = [
        endurance.run(alone(ctx, model), asked, iterations, _part(out, models, number))
        for number, model in enumerate(models)
    ]
    return max(codes)


def evaluate(ctx: typer.Context, models: Sequence[str], format: str, per_class: bool) -> int:
    """Accuracy of each model on labelled images, beside its speed."""
    from dyno import evaluation

    out = _single(ctx, models, "eval", **evaluation.DEFAULTS)
    return evaluation.show([_part(out, models, number) for number in range(len(models))], format, per_class)


def _print_runs(out: Path, models: Sequence[str], format: str) -> int:
    import pandas as pd

    from dyno.analysis import results, tables
    from dyno.analysis.render import render

    folders = [_part(out, models, number) for number in range(len(models))]
    frames = [tables.frame(results.load(folder)) for folder in folders]
    frame = pd.concat(frames, ignore_index=True)
    print(render(frame, format), end="")
    return tables.exit_code(frame)


def agree(ctx: typer.Context, models: Sequence[str], rtol: float, atol: float, least: float, format: str) -> int:
    """Outputs of every model and backend against the first one's."""
    from dyno.analysis import agreement_table

    out = _single(ctx, models, "agree", boundaries=())
    folders = [_part(out, models, number) for number in range(len(models))]
    return agreement_table.show(folders, rtol, atol, least, format)
