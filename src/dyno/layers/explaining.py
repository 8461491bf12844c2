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
from dyno.study.model_source import no_such
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
        place = Path(path)
        check_saved(place)
        if place.suffix == JSON_SUFFIX:
            pairs.write_pair(place, self.pair)
        elif place.suffix == ".png":
            figure = draw_waterfall(self.waterfall)
            save_figure(figure, place, laid_out(figure))
        elif place.suffix == PAGE_SUFFIX:
            write_text(place, graph_page.make_explained_page(self.waterfall, self.tables, self.sentences))
        else:
            write_text(place, graph_page.draw_explained_chart(self.waterfall))
        return [place]

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
        found, (a, b) = self.waterfall, self.pair.titles
        about: dict[str, Any] = {"reasons": to_json(self.reasons), "a": a, "b": b}
        about |= {"attributed": found.attributed, "named": found.named_share} if found.gap.proven else {}
        return export(self.tables, format, about=about | ({"tried": self.tried.sentences} if self.tried else {}))


def check_saved(path: Path) -> None:
    """Raise `UserError` for a file with an unknown suffix, a missing library or no write permission."""
    if path.suffix not in SAVED_FORMATS:
        known = ", ".join(f"{ending} ({what})" for ending, what in SAVED_FORMATS.items())
        raise UserError(f"{str(path)!r} can't be saved; end its name in one of {known}")
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
    first: Callable[[ExplanationResult], None] = lambda explained: None,
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
    `first`. `settings` are fields of `dyno.Study`. Raises `UserError` if layers have no times.
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
    found = ExplanationResult(_find_pair(model, sides, batch, rounds, runs, settings, progress), top)
    for path in paths:
        found.save(path)
    if not prescriptions:
        return found
    first(found)
    study = one_model(model, settings)
    tried = cures.try_cures(found.waterfall, forms.list_forms(study, sides), study, batch, rounds, progress)
    found = replace(found, tried=tried)
    for path in paths:
        found.save(path)
    return found


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
        asked = [forms.request_own_form(source) for source in (study.models[0], Study(models=tuple(sides)).models[0])]
    else:
        asked = forms.list_forms(study, sides)
    chosen = profiling.choose_engines(asked)[-2:]
    for side in chosen:
        profiling.check(side, study.device)
    reading = PairProfiler(study, batch, progress, runs)
    for side in chosen:
        reading.read(side)
    return reading.build_pair(rounds, [side.source for side in chosen], [side.precision for side in chosen])


def _of_run(
    folder: Path, names: Sequence[Any], rounds: int, runs: int, settings: dict[str, Any], progress: Progress
) -> FormPair:
    """Profile two trials of a run with their own options and files; add the run's medians and store the pair there."""
    if settings:
        raise UserError(f"{', '.join(settings)} can't be given for a run: its trials say how they are measured")
    refuse_links(folder, [pairs.PAIRS_DIR])  # before measuring, as pairs are stored there
    records = load_run(folder)
    found = [find_trial(records, str(name)) for name in names]
    if failed := next((each for each in found if not each.good), None):
        raise UserError(f"{failed.label} did not run ({failed.status}: {failed.reason}), so it can't be explained")
    if found[0].id == found[1].id:
        raise UserError(f"{names[0]} and {names[1]} are the same trial of {folder}, {found[0].label}")
    apart = [k for k in ("model", "size", "batch") if getattr(found[0], k) != getattr(found[1], k)]
    if apart:
        raise UserError(f"{found[0].label} and {found[1].label} differ in {' and '.join(apart)}; give their ids")
    trials = [each.spec for each in found]
    for trial in trials:
        profiling.check(forms.FormRequest("", Choice(trial.backend), trial.precision), trial.runtime.device)
    study = Study(models=(trials[0].model.source or trials[0].model.file,))
    reading, notes = PairProfiler(study, found[0].batch, progress, runs), list[str]()
    for measured, trial in zip(found, trials, strict=True):
        file, remarks = measured_file(measured, trial)
        notes += [f"{measured.label}: {note}" for note in remarks]
        reading.read_trial(trial, trial.recipe, file)
    pair = reading.build_pair(rounds, [t.model.source or t.model.file for t in trials], [t.precision for t in trials])
    a, b = (find_center(quiet_medians(each, "model")).value for each in found)
    whole = replace(pair, a=replace(pair.a, stored=a), b=replace(pair.b, stored=b), notes=tuple(notes))
    path = pairs.name_file(folder, *(each.id for each in found))
    with suppress(OSError):  # a read-only run stores no pair
        path.parent.mkdir(exist_ok=True)
        pairs.write_pair(path, whole)
    return whole


class PairProfiler(profiling.FormProfiler):
    """Profiler of two forms, in several processes each, interleaved."""

    def build_pair(self, rounds: int, sources: Sequence[str], precisions: Sequence[str]) -> FormPair:
        """Return the pair of forms read, with the times of all rounds.

        `sources` and `precisions` are each side's source and requested precision.
        """
        times = self.repeat_rounds(rounds)
        by_form = dict(zip(self.requested, sources, strict=True))
        module_of = self.module_of(by_form)
        sides = [
            PairSide(k, precision, each, self.graph_of.get(k), module_of.get(k))
            for k, precision, each in zip(self.requested, precisions, times, strict=True)
        ]
        return FormPair(forms.number_titles(self.forms, by_form), sides[0], sides[1], sources[0])

    def repeat_rounds(self, rounds: int) -> list[tuple[Times, ...]]:
        """Return the times of each form by process: the first round, then further rounds.

        Each round reverses the order of the forms. Raises `UserError` if a form's layers differ between processes.
        """
        found = [[times] for times in self.times]
        for number in range(1, rounds):
            order = range(len(found)) if number % 2 == 0 else reversed(range(len(found)))
            for k in order:
                inside = self.read_form(*self.trials[k])
                found[k].append(reorder_times(self.forms[self.requested[k]], inside, self.times[-1]))
        return [tuple(each) for each in found]


def reorder_times(first: LayerGraph, inside: LayerGraph, times: Times) -> Times:
    """Return the times of a form in another process, in the layer order of the first process.

    Engines number inserted conversions anew in each process, so conversions are identified by the writers of their
    inputs. Raises `UserError` if the layers differ.
    """
    places = {key: k for k, key in enumerate(_make_keys(inside))}
    keys = _make_keys(first)
    if places.keys() != set(keys):
        raise UserError(f"{inside.library} has different layers in each process; explain one process with rounds=1")
    return replace(times, layers=times.layers[:, [places[key] for key in keys]])


def _make_keys(form: LayerGraph) -> list[tuple[str, str, int]]:
    """Return a key per layer that is stable across processes."""
    writers = {port.name: layer for layer in form.layers for port in layer.outputs}
    seen: Counter[tuple[str, str]] = Counter()
    keys = []
    for layer in form.layers:
        sources = [w.type if w.moves else w.name for p in layer.inputs if (w := writers.get(p.name))]
        key = (layer.type, " ".join(sources)) if layer.moves else (layer.type, layer.name)
        keys.append((*key, seen[key]))
        seen[key] += 1
    return keys
