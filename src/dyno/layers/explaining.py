"""`dyno explain`: why one engine is faster than another, in microseconds by the parts of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from dyno.jobs.progress import Progress
from dyno.layers import cures, files, forms, graph_page, pairs, profiling, reasons
from dyno.layers.cures import PrescriptionResult
from dyno.layers.pairs import FormPair, PairSide
from dyno.layers.reasons import Reason
from dyno.layers.times import Times
from dyno.layers.waterfall import Waterfall, draw_waterfall, list_waterfall_tables, make_waterfall
from dyno.report.export import export, make_page, with_sentences
from dyno.report.style import laid_out
from dyno.report.style import save as save_figure
from dyno.results.blocks import quiet_medians
from dyno.results.stats import find_center
from dyno.results.trial_result import find_trial, load_run
from dyno.store import check_writable
from dyno.study.defaults import one_model
from dyno.study.model_names import no_such
from dyno.study.study import Choice, Study
from dyno.table import Table
from dyno.winner import measured_file
from dyno.worker.facts.job import LayerGraph
from dyno.worker.option_values import at_least
from dyno.worker.record import refuse_links, write_text
from dyno.worker.spec import UserError, to_json

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_ROUNDS, DEFAULT_RUNS, DEFAULT_TOP = 5, 50, 20  # processes per side; profiled runs per process; parts listed
JSON_SUFFIX = ".json"
PAGE_SUFFIX = ".html"
SAVED_FORMATS = {
    JSON_SUFFIX: "what was measured",
    ".svg": "the waterfall",
    ".png": "the waterfall",
    PAGE_SUFFIX: "a page with all of it",
}


class ExplanationDescription(TypedDict):
    """The head of an explanation's tables in JSON: `attributed` and `named` are missing without a proven difference."""

    reasons: list[Reason]
    a: str
    b: str
    attributed: NotRequired[float]
    named: NotRequired[float]
    tried: NotRequired[list[str]]


@dataclass(frozen=True)
class ExplanationResult:
    """Explanation why the latencies of two forms differ, without measuring. `top` parts are listed (0: all); `tried`
    has the results of prescriptions, if they were tried."""

    pair: FormPair
    top: int = DEFAULT_TOP
    tried: PrescriptionResult | None = None

    @cached_property
    def waterfall(self) -> Waterfall:
        """Steps from A's latency to B's, as numbers."""
        return make_waterfall(self.pair)

    @cached_property
    def reasons(self) -> list[Reason]:
        """Actionable sentences, each with its evidence."""
        return reasons.list_reasons_why(self.waterfall)

    @cached_property
    def tables(self) -> list[Table]:
        """A row per cause; a row per part of the model; a row per prescription, if any was tried."""
        tried = [self.tried.table] if self.tried and self.tried.outcomes else []
        return [*list_waterfall_tables(self.waterfall, self.top), *tried]

    @property
    def sentences(self) -> list[str]:
        """The reasons in words, and the results of prescriptions."""
        return [reason.text for reason in self.reasons] + (self.tried.sentences if self.tried else [])

    def to_pandas(self) -> pd.DataFrame:
        """Return the rows of the parts."""
        return self.tables[1].to_pandas()

    def save(self, path: str | Path) -> list[Path]:
        """Save the measurement, its waterfall, or a page, depending on the suffix; return the written files.

        `.json` stores the measurement, which `dyno.explain(path)` reads; `.svg` and `.png` draw the waterfall; `.html`
        is a page with the tables and also the graphs of the layers.
        """
        target = Path(path)
        check_saved(target)
        if target.suffix == JSON_SUFFIX:
            pairs.write_pair(target, self.pair)
        elif target.suffix == ".png":
            figure = draw_waterfall(self.waterfall)
            save_figure(figure, target, laid_out(figure))
        elif target.suffix == PAGE_SUFFIX:
            write_text(target, graph_page.make_explained_page(self.waterfall, self.tables, self.sentences))
        else:
            write_text(target, graph_page.draw_explained_chart(self.waterfall))
        return [target]

    @property
    def html(self) -> str:
        """The chart, the tables and the sentences as an HTML fragment."""
        return graph_page.make_explained_fragment(self.waterfall, self.tables, self.sentences)

    def export(self, format: str = "text") -> str:
        """Return the tables and sentences in one of the table formats."""
        if format == "html":
            a, b = self.pair.titles
            return make_page(f"From {a} to {b}", self.html) + "\n"
        if format != "json":
            return with_sentences(self.tables, self.sentences, format)
        waterfall, (a, b) = self.waterfall, self.pair.titles
        description: dict[str, Any] = {"reasons": to_json(self.reasons), "a": a, "b": b}
        description |= (
            {"attributed": waterfall.attributed, "named": waterfall.named_share} if waterfall.gap.proven else {}
        )
        return export(self.tables, format, head=description | ({"tried": self.tried.sentences} if self.tried else {}))


def check_saved(path: Path) -> None:
    """Raise `UserError` for a file with an unknown suffix, a missing library or no write permission."""
    if path.suffix not in SAVED_FORMATS:
        endings = ", ".join(f"{ending} ({content})" for ending, content in SAVED_FORMATS.items())
        raise UserError(f"{str(path)!r} can't be saved; end its name in one of {endings}")
    if path.suffix != JSON_SUFFIX:
        files.check_library(files.CHART_LIBRARY)
    check_writable(path)


def explain(
    model: Any,
    *sides: Any,
    batch: int = 1,
    rounds: int = DEFAULT_ROUNDS,
    runs: int = DEFAULT_RUNS,
    top: int = DEFAULT_TOP,
    save: str | Path | Sequence[str | Path] = (),
    prescriptions: bool = False,
    report: Callable[[ExplanationResult], None] = lambda explained: None,
    quiet: bool = True,
    **settings: Any,
) -> ExplanationResult:
    """Explain why B is faster or slower than A, with a waterfall in µs from A's latency to B's by parts of the model.

    `explain(model, a, b)` takes two forms of a model like `dyno.profile`; `explain(a, b)` two models or files as they
    are; `explain(run, a, b)` two trials of a run folder, by BACKEND/PRECISION or id; `explain(file)` a pair stored by
    `ExplanationResult.save`, without measuring. Both sides are profiled alternately in `rounds` processes each, with
    `runs` profiled runs per process. `top` parts are listed (0: all). `save` names files to write (see
    `ExplanationResult.save`), checked first. With `prescriptions`, variants of B that may be faster are then measured
    with it (see `ExplanationResult.tried`). As that may take long, the result so far is saved before, and passed to
    `report`. `settings` are fields of `dyno.Study`. Raises `UserError` if layers have no times.
    """
    batch, rounds = at_least(1, batch=batch, rounds=rounds)
    (runs,), (top,) = at_least(5, runs=runs), at_least(0, top=top)
    paths = files.list_paths(save)
    for path in paths:
        check_saved(path)
    # A model with a colon is a source, not a path.
    if len(sides) == 2 and isinstance(model, (str, Path)) and ":" not in str(model) and not Path(model).exists():
        raise UserError(no_such(str(model)))
    progress = Progress(quiet=quiet)
    if prescriptions:
        cures.check_cures(model, sides)
    result = ExplanationResult(_find_pair(model, sides, batch, rounds, runs, settings, progress), top)
    for path in paths:
        result.save(path)
    if not prescriptions:
        return result
    report(result)
    study = one_model(model, settings)
    tried = cures.try_cures(result.waterfall, forms.list_forms(study, sides), study, batch, rounds, progress)
    result = replace(result, tried=tried)
    for path in paths:
        result.save(path)
    return result


def _find_pair(
    model: Any, sides: Sequence[Any], batch: int, rounds: int, runs: int, settings: dict[str, Any], progress: Progress
) -> FormPair:
    if not sides and Path(str(model)).suffix == JSON_SUFFIX:
        try:
            return pairs.read_pair(Path(model))
        except (OSError, ValueError) as e:
            raise UserError(f"{model} can't be read: {getattr(e, 'strerror', e)}") from e
    if len(sides) not in (1, 2) or (len(sides) == 1 and forms.is_form(sides[0])):
        raise UserError("give a model and the two forms to explain, a run folder and two of its trials, two models, or "
                        "a file that `dyno explain --save FILE.json` wrote")  # fmt: skip
    if len(sides) == 2 and isinstance(model, (str, Path)) and Path(model).is_dir():
        return _of_run(Path(model), sides, rounds, runs, settings, progress)
    study = one_model(model, settings)
    if len(sides) == 1:  # both models in their own form
        listing = [forms.request_own_form(source) for source in (study.models[0], Study(models=tuple(sides)).models[0])]
    else:
        listing = forms.list_forms(study, sides)
    requests = profiling.choose_engines(listing)[-2:]
    for request in requests:
        profiling.check(request, study.device)
    profiler = PairProfiler(study, batch, progress, runs)
    for request in requests:
        profiler.read(request)
    return profiler.build_pair(
        rounds, [request.source for request in requests], [request.precision for request in requests]
    )


def _of_run(
    folder: Path, names: Sequence[Any], rounds: int, runs: int, settings: dict[str, Any], progress: Progress
) -> FormPair:
    """Profile two trials of a run with their own options and files; add the run's medians and store the pair there."""
    if settings:
        raise UserError(f"{', '.join(settings)} can't be given for a run: its trials say how they are measured")
    refuse_links(folder, [pairs.PAIRS_DIR])  # before measuring, as pairs are stored there
    records = load_run(folder)
    results = [find_trial(records, str(name)) for name in names]
    if failure := next((result for result in results if not result.good), None):
        raise UserError(f"{failure.label} did not run ({failure.status}: {failure.reason}), so it can't be explained")
    if results[0].id == results[1].id:
        raise UserError(f"{names[0]} and {names[1]} are the same trial of {folder}, {results[0].label}")
    keys = [k for k in ("model", "size", "batch") if getattr(results[0], k) != getattr(results[1], k)]
    if keys:
        raise UserError(f"{results[0].label} and {results[1].label} differ in {' and '.join(keys)}; give their ids")
    trials = [result.spec for result in results]
    for trial in trials:
        profiling.check(forms.FormRequest("", Choice(trial.backend), trial.precision), trial.runtime.device)
    study = Study(models=(trials[0].model.source or trials[0].model.file,))
    profiler, notes = PairProfiler(study, results[0].batch, progress, runs), list[str]()
    for result, trial in zip(results, trials, strict=True):
        file, remarks = measured_file(result, trial)
        notes += [f"{result.label}: {note}" for note in remarks]
        profiler.read_trial(trial, trial.recipe, file)
    pair = profiler.build_pair(rounds, [t.model.source or t.model.file for t in trials], [t.precision for t in trials])
    a, b = (find_center(quiet_medians(result, "model")).value for result in results)
    stored_pair = replace(pair, a=replace(pair.a, stored=a), b=replace(pair.b, stored=b), notes=tuple(notes))
    path = pairs.name_file(folder, *(result.id for result in results))
    with suppress(OSError):  # a read-only run stores no pair
        path.parent.mkdir(exist_ok=True)
        pairs.write_pair(path, stored_pair)
    return stored_pair


class PairProfiler(profiling.FormProfiler):
    """Profiler of two forms, in several processes each, interleaved."""

    def build_pair(self, rounds: int, sources: Sequence[str], precisions: Sequence[str]) -> FormPair:
        """Return the pair of forms read, with the times of all rounds.

        `sources` and `precisions` are each side's source and requested precision.
        """
        times = self.repeat_rounds(rounds)
        source_of = dict(zip(self.requested, sources, strict=True))
        module_of = self.module_of(source_of)
        sides = [
            PairSide(k, precision, processes, self.graph_of.get(k), module_of.get(k))
            for k, precision, processes in zip(self.requested, precisions, times, strict=True)
        ]
        return FormPair(forms.number_titles(self.forms, source_of), sides[0], sides[1], sources[0])

    def repeat_rounds(self, rounds: int) -> list[tuple[Times, ...]]:
        """Return the times of each form by process: the first round, then further rounds.

        Each round reverses the order of the forms. Raises `UserError` if a form's layers differ between processes.
        """
        times_by_form = [[times] for times in self.times]
        for round_index in range(1, rounds):
            order = range(len(times_by_form)) if round_index % 2 == 0 else reversed(range(len(times_by_form)))
            for k in order:
                form = self.read_form(*self.trials[k])
                times_by_form[k].append(reorder_times(self.forms[self.requested[k]], form, self.times[-1]))
        return [tuple(processes) for processes in times_by_form]


def reorder_times(first: LayerGraph, form: LayerGraph, times: Times) -> Times:
    """Return the times of a form in another process, in the layer order of the first process.

    Engines number inserted conversions anew in each process, so conversions are identified by the writers of their
    inputs. Raises `UserError` if the layers differ.
    """
    index_of = {key: k for k, key in enumerate(_make_keys(form))}
    keys = _make_keys(first)
    if index_of.keys() != set(keys):
        raise UserError(f"{form.library} has different layers in each process; explain one process with rounds=1")
    return replace(times, layers=times.layers[:, [index_of[key] for key in keys]])


def _make_keys(form: LayerGraph) -> list[tuple[str, str, int]]:
    """Return a key per layer that is stable across processes."""
    writers = {port.name: layer for layer in form.layers for port in layer.outputs}
    counts: Counter[tuple[str, str]] = Counter()
    keys = []
    for layer in form.layers:
        sources = [w.type if w.moves else w.name for p in layer.inputs if (w := writers.get(p.name))]
        key = (layer.type, " ".join(sources)) if layer.moves else (layer.type, layer.name)
        keys.append((*key, counts[key]))
        counts[key] += 1
    return keys
