"""Searches that add trials: mixed precisions within a budget, and other routes to ONNX."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dyno.jobs.progress import Progress
from dyno.results import ranking, stats
from dyno.results.correctness import OUTPUTS_AGREE
from dyno.results.metrics.accuracy import KEEP_OPTION, MAX_CANDIDATES, confirm
from dyno.results.notes import (
    ROUTE_FAILED,
    ROUTE_KEPT,
    ROUTE_NOT_FASTER,
    ROUTE_SLOWER,
    ROUTE_WRONG,
    Attempt,
    RouteAttempt,
    read_attempts,
    store,
)
from dyno.results.trial_result import TrialResult
from dyno.study.interpreters import place_recipe
from dyno.study.model_info import model_spec
from dyno.study.plan import ROUTE_OPTIONS, USUAL_ROUTE, list_other_routes, options_of
from dyno.study.study import Choice, Study
from dyno.worker import registry
from dyno.worker.record import Record
from dyno.worker.spec import FIXED, Artifact, DataSpec, ModelSpec, Recipe, Trial, UserError, digest

# Mixed precision if int8 or fp16 fails the budget: the fewest sensitive layers to keep in a higher precision.


MeasurePrecisions = Callable[
    [list[Trial], list[Trial]], None
]  # measures all rounds of the first list, beside the second


def search_precisions(study: Study, folder: Path, trials: list[Trial], measure: MeasurePrecisions) -> list[Trial]:
    """Try mixed precisions for every trial excluded by the budget; return the added trials.

    Each candidate is a trial of the same run with the option `keep`. The search depends only on stored answers, so a
    resumed search takes the same steps.
    """
    from dyno.report.tables import trial_table
    from dyno.report.verdict import findings

    if not (folder / "trials").is_dir():
        return []
    failing_ids = findings.list_failing(trial_table.read_trials(folder))
    new_trials: list[Trial] = []
    for trial in trials:
        if trial.id in failing_ids and with_kept_layers(study, trial, 1) is not None:
            batches = [other for other in trials if _hash_series(other) == _hash_series(trial)]
            new_trials += _PrecisionSearch(study, folder, trial, batches, trials, measure).run()
    return new_trials


def with_kept_layers(study: Study, trial: Trial, layers: int) -> Trial | None:
    """Return the trial with `layers` layers kept in higher precision; None if its backend or file can't."""
    engine = registry.find(trial.backend)
    if KEEP_OPTION not in engine.options:
        return None
    candidate = replace(trial, options={**trial.options, KEEP_OPTION: layers}, recipe=None)
    try:
        recipe = engine.recipe(candidate)
    except UserError:
        return None
    is_unchanged = recipe == engine.recipe(replace(trial, recipe=None))
    return None if is_unchanged else replace(candidate, recipe=place_recipe(recipe, study))


def _hash_series(trial: Trial) -> str:
    return digest(replace(trial, dims=replace(trial.dims, batch=0), recipe=None))


@dataclass
class _PrecisionSearch:
    study: Study
    folder: Path
    plain: Trial
    batches: list[Trial]
    other_trials: list[Trial]
    measure: MeasurePrecisions

    def run(self) -> list[Trial]:
        """Return the measured candidates: those within the budget in all rounds, the best one at all batches."""
        self.p_values: dict[int, float] = {}  # p-value of a loss beyond the budget, by kept layers
        self._find_fewest()
        confirmed_counts = self.list_confirmed()
        min_layers = min(confirmed_counts, default=None)
        trials = [self._make_candidate(self.plain, layers) for layers in self.p_values if layers in confirmed_counts]
        if min_layers is not None:
            trials += [self._make_candidate(trial, min_layers) for trial in self.batches if trial.id != self.plain.id]
            self.measure(trials, self.other_trials)
        failed = [
            self._make_candidate(self.plain, layers) for layers in self.p_values if layers not in confirmed_counts
        ]
        return [*trials, *(replace(t, plan=replace(t.plan, rounds=1)) for t in failed)]

    def _find_fewest(self) -> int | None:
        """Double the layers until the budget holds, then bisect; None if half of the layers are not enough."""
        if self._is_within_budget(1):
            return 1
        max_layers = self._count_layers() // 2
        low, high = 1, min(2, max_layers)
        while high > low and not self._is_within_budget(high):
            low, high = high, min(2 * high, max_layers)
            if len(self.p_values) >= MAX_CANDIDATES:
                return None
        if high <= low:
            return None
        while high - low > 1 and len(self.p_values) < MAX_CANDIDATES:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_within_budget(middle) else (middle, high)
        return high

    def list_confirmed(self) -> set[int]:
        """Return the layer counts of candidates within the budget, allowing for the number of candidates tried."""
        return {
            layers for layers, holds in zip(self.p_values, confirm([*self.p_values.values()]), strict=True) if holds
        }

    def _is_within_budget(self, layers: int) -> bool:
        self.p_values[layers] = self._find_chance(layers)
        return layers in self.list_confirmed()

    def _find_chance(self, layers: int) -> float:
        """Return the candidate's p-value of a loss beyond the budget, from one round (it answers all images)."""
        from dyno.report.tables import trial_table

        candidate = self._make_candidate(self.plain, layers)
        self.measure([replace(candidate, plan=replace(candidate.plan, rounds=1))], [])
        frame = trial_table.read_trials(self.folder).frame
        row = frame[frame["trial"] == candidate.id]
        return float(row["budget_p"].min()) if (row["status"] == "ok").any() and row["budget_p"].notna().any() else 1.0

    def _count_layers(self) -> int:
        """Return how many layers can be kept in higher precision; 0 if the first candidate could not be made."""
        from dyno.results import trial_result

        trial = next(
            (t for t in trial_result.load_run(self.folder) if t.id == self._make_candidate(self.plain, 1).id), None
        )
        return (trial.made_by.ranked or 0) if trial is not None else 0

    def _make_candidate(self, trial: Trial, layers: int) -> Trial:
        candidate = with_kept_layers(self.study, trial, layers)
        assert candidate is not None
        return candidate


# Other routes to the ONNX file, if they may give this network another graph than the usual one. They run beside the
# usual route, in a separate folder. The fastest with correct outputs becomes an ordinary trial if its gain is proven.

ROUTES_DIR = "routes"  # subfolder of a run folder
SEARCH_BOUNDARY = "model"
MIN_GAIN = 1.05  # speed-up of a route worth a separate row; if one round shows it, PROOF_ROUNDS must prove it
PROOF_ROUNDS = 3
MAX_PROCESS_S = 1.0  # per process
ONNX_STATIC = "onnx_static"  # maker of files with fixed shapes
# precisions that use the route of a floating-point type, chosen in the order of BASE_PRECISIONS
LOWERED_PRECISIONS = ("int8", "fp8")
BASE_PRECISIONS = ("fp16", "bf16", "fp32", "tf32")

FileOf = Callable[[Recipe], "Artifact | Record"]
MeasureRoutes = Callable[[Study, Path], None]


@dataclass(frozen=True)
class Configuration:
    """A backend with its options in one floating-point type, at one shape of a model, and the routes to try."""

    trial: Trial
    routes: tuple[str, ...]

    @property
    def name(self) -> str:
        return _format_name(self.trial, self.trial.precision)

    @property
    def key(self) -> str:
        return _hash_trial(self.trial)

    def choose_trial(self, route: str) -> Trial:
        """Return the configuration's trial by this route."""
        return replace(self.trial, options={**self.trial.options, **(options_of(route) if route else {})})

    def describe_place(self, route: str = "") -> tuple[str, str]:
        """Return variant and precision, which identify this route's row."""
        return self.choose_trial(route).variant, self.trial.precision

    def write_form(self, route: str = "") -> str:
        """Format the configuration with this route as for `--backend`."""
        trial = self.choose_trial(route)
        runtime = "" if trial.runtime.name == "main" else trial.runtime.name
        return Choice(trial.backend, trial.options, (trial.precision,), runtime).text


def search_routes(
    study: Study, run: Path, trials: Sequence[Trial], file_of: FileOf, progress: Progress, measure: MeasureRoutes
) -> list[Trial]:
    """Try other routes for a study's trials; return the added trials, with routes that are faster.

    `file_of` makes a file, `measure` runs a study in a folder. Attempts are stored in the run folder, so that a resumed
    study takes the same routes.
    """
    attempts = {(one.key, one.configuration): one for one in read_attempts(run)}
    new_trials: list[Trial] = []
    for group in _by_model(trials):
        configs = [one for one in _iter_configurations(group, file_of) if (one.key, one.name) not in attempts]
        if configs:
            results = _try_routes(study, run / ROUTES_DIR / configs[0].key, configs, progress, measure)
            attempts |= {(one.key, one.configuration): one for one in results}
            store(run, tuple(attempts.values()))
        for trial in filter(_is_open, group):
            attempt = attempts.get((_hash_trial(group[0]), _format_name(trial, _choose_float(trial, group))))
            if (
                attempt
                and attempt.kept_route
                and (new_trial := _reroute_trial(trial, attempt.kept_route.route, study)) is not None
            ):
                new_trials.append(new_trial)
    return new_trials


def _hash_trial(trial: Trial) -> str:
    """Return the key of stored attempts: a hash of the model's content and the trial's shape."""
    return digest([trial.model, trial.dims])[:12]


def _format_name(trial: Trial, precision: str) -> str:
    return f"{trial.variant} {precision}"


def _by_model(trials: Sequence[Trial]) -> list[list[Trial]]:
    by_model: dict[str, list[Trial]] = {}
    for trial in trials:
        by_model.setdefault(digest(trial.model), []).append(trial)
    return [*by_model.values()]


def _iter_configurations(group: Sequence[Trial], file_of: FileOf) -> Iterator[Configuration]:
    """Yield the configurations of one model's trials that may gain by another route, with the routes to try."""
    keys = set()
    for trial in group:
        if (
            not _is_open(trial)
            or (probe := _make_probe(trial, group)) is None
            or probe.variant + probe.precision in keys
        ):
            continue
        keys.add(probe.variant + probe.precision)
        assert trial.recipe is not None
        chain = trial.recipe.chain
        artifact = file_of(chain[-1])
        if isinstance(artifact, Artifact):
            folds = any(recipe.maker == ONNX_STATIC for recipe in chain)
            if routes := list_other_routes(artifact.made_by, folds, trial.model.source.endswith(".pt2")):
                yield Configuration(probe, routes)


def _is_open(trial: Trial) -> bool:
    """Return whether the trial's file is exported by a route that the user did not choose."""
    reads = "exporter" in registry.find(trial.backend).options
    return reads and trial.recipe is not None and not trial.model.file and not trial.options.keys() & set(ROUTE_OPTIONS)


def _make_probe(trial: Trial, trials: Sequence[Trial]) -> Trial | None:
    """Return the trial for testing routes: at the model's first shape, in the type that decides the route.

    None for a trial at another shape, because the first shape represents it.
    """
    if trial.dims != trials[0].dims:
        return None
    return replace(trial, precision=_choose_float(trial, trials), recipe=None, data=DataSpec())


def _choose_float(trial: Trial, trials: Sequence[Trial]) -> str:
    """Return the floating-point type that decides the trial's route.

    A quantised trial takes the first of BASE_PRECISIONS in which the study runs its configuration, else fp32.
    """
    if trial.precision not in LOWERED_PRECISIONS:
        return trial.precision
    precisions = {other.precision for other in trials if other.variant == trial.variant}
    return next((precision for precision in BASE_PRECISIONS if precision in precisions), "fp32")


def _try_routes(
    study: Study, folder: Path, configs: Sequence[Configuration], progress: Progress, measure: MeasureRoutes
) -> list[Attempt]:
    """Measure each configuration's routes beside its usual one; return the attempts, empty if they can't be planned."""
    model, dims = configs[0].trial.model, configs[0].trial.dims
    backends = dict.fromkeys(one.write_form(route) for one in configs for route in ("", *one.routes))
    route_study = replace(
        study, models=(_find_source(study, model),), backends=tuple(backends), precisions=(), batches=(dims.batch,),
        sizes=(dims.size,) if dims.height else (), data="", calibration="", budget={}, limit={}, reference="",
        routes=(USUAL_ROUTE,), confirm=0, sustained=0, search=False, peak=False, energy=False, builds=1, until=FIXED,
        boundaries=(SEARCH_BOUNDARY,), seconds=min(study.seconds, MAX_PROCESS_S),
    )  # fmt: skip
    names = ", ".join(dict.fromkeys(route for one in configs for route in one.routes))
    progress.show_step(f"other routes of {model.name}: {names}")
    attempts: list[Attempt] = []
    for rounds in (1, PROOF_ROUNDS):
        try:
            measure(replace(route_study, rounds=rounds), folder)
        except UserError as e:
            progress.note(f"other routes of {model.name} can't be tried: {e}")
            return []
        attempts = _decide_attempts(configs, folder)
        if not any(route.ratio >= MIN_GAIN for one in attempts for route in one.routes):
            break
    return attempts


def _find_source(study: Study, model: ModelSpec) -> str:
    """Return the model's source as written in the study."""
    return next(source for source in study.models if model_spec(study, source).source == model.source)


def _decide_attempts(configs: Sequence[Configuration], folder: Path) -> list[Attempt]:
    """Return the attempts, with all routes decided as one family; each configuration keeps its fastest proven route."""
    from dyno.report.tables import trial_table

    data = trial_table.read_trials(folder)
    trials = {(t.variant, t.precision): t for t in data.records}
    outputs = {row["trial"]: str(row["outputs"] or "") for row in data.frame.to_dict("records")}
    pairs = [
        (config, name, trials.get(config.describe_place(name)), trials.get(config.describe_place()))
        for config in configs
        for name in config.routes
    ]
    evidence = [
        ranking.gather_evidence(t, usual_trial, SEARCH_BOUNDARY, rule=data.rule)
        if t and usual_trial and t.good and usual_trial.good
        else None
        for _, _, t, usual_trial in pairs
    ]
    speedups = stats.decide_family(evidence, data.rule)
    routes: dict[str, list[RouteAttempt]] = {}
    for (config, name, t, _), speedup in zip(pairs, speedups, strict=True):
        routes.setdefault(config.name, []).append(_judge_route(name, t, speedup, outputs))
    return [
        Attempt(
            config.key,
            config.trial.model.name,
            config.name,
            config.trial.dims.batch,
            tuple(_best_kept(routes[config.name])),
        )
        for config in configs
    ]


def _judge_route(name: str, t: TrialResult | None, speedup: stats.Speedup, outputs: Mapping[str, str]) -> RouteAttempt:
    if t is None or not t.good:
        return RouteAttempt(name, 0.0, ROUTE_FAILED, f"{t.status}: {t.reason}" if t is not None else "not planned")
    if outputs[t.id] not in ("", OUTPUTS_AGREE):
        return RouteAttempt(name, 0.0, ROUTE_WRONG)
    if math.isnan(speedup.value):
        return RouteAttempt(name, 0.0, ROUTE_NOT_FASTER, "the usual route failed when measured with it")
    is_proven = speedup.verdict == stats.FASTER and speedup.value >= MIN_GAIN
    return RouteAttempt(name, speedup.value, ROUTE_KEPT if is_proven else ROUTE_NOT_FASTER)


def _best_kept(routes: Sequence[RouteAttempt]) -> list[RouteAttempt]:
    """Return the routes with only the fastest kept one still kept; the others are marked ROUTE_SLOWER."""
    best = max((route for route in routes if route.outcome == ROUTE_KEPT), key=lambda route: route.ratio, default=None)
    return [
        replace(one, outcome=ROUTE_SLOWER) if one.outcome == ROUTE_KEPT and one is not best else one for one in routes
    ]


def _reroute_trial(trial: Trial, route: str, study: Study) -> Trial | None:
    """Return the trial by this route; None if its backend refuses it."""
    engine = registry.find(trial.backend)
    candidate = replace(trial, options={**trial.options, **options_of(route)}, recipe=None)
    if engine.refuse(candidate):
        return None
    return replace(candidate, recipe=place_recipe(engine.recipe(candidate), study))
