"""Reproduction of a pack's study on this machine: whether the same engine wins, and the ratios agree."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from dyno.formatting import UNCLEAR_WORD, format_count, format_ratio, join_names, show
from dyno.packs.opening import OpenPack, open_pack
from dyno.packs.verification import read_results, verify_opened
from dyno.results.run_data import RunData
from dyno.results.trial_result import Results, TrialResult, load_run
from dyno.runner.run_folder import RUNS_DIR, choose_folder
from dyno.store import sha256_of
from dyno.study.plan import expand
from dyno.study.study import Choice, Study
from dyno.table import is_missing
from dyno.worker import registry
from dyno.worker.nets.local_code import sha256_with_imports
from dyno.worker.option_values import check_types, native, several
from dyno.worker.spec import DECIDED, UserError, shorten

LIBRARY_SOURCE = re.compile(r"(torchvision|timm|fake):[\w.]+")  # sources with installed code, not in a file
FUNCTION_NAME = re.compile(r"[^\W\d]\w*(\([\w .,=+-]*\))?")
PLAIN_VALUE = re.compile(r"[\w.:+-]*")  # option value that is no path
BUILT_IN = "digits"  # data set included in Dyno
# Settings taken from an untrusted pack: no paths, commands or addresses.
KEPT_FIELDS = (
    "precisions batches sizes routes reference shapes pretrained classes channels mean std task seed unreadable "
    "compared budget limit search rounds builds seconds warmup samples interval confirm sustained boundaries turns "
    "block until minutes equivalent peak energy timeout build_timeout device threads"
).split()
REPLACED_FIELDS = {"models", "backends", "data", "runtime", "on"}  # fields replaced by this machine's settings
SHOWN_HASH_LENGTH = 12  # characters of a hash
COMPARED_FACTS = ("cpu", "cores", "memory_bytes", "gpu", "os", "machine", "governor", "python")

Key = tuple[str, ...]


@dataclass(frozen=True)
class RatioPair:
    """A configuration's speed-up over its reference in the pack and here, each as (low, value, high).

    `agrees` is whether the intervals overlap; None if one of them is missing, or overlaps because it is too wide.
    """

    where: str
    configuration: str
    reference: str
    pack: tuple[float, float, float]
    here: tuple[float, float, float]

    @property
    def agrees(self) -> bool | None:
        ranges = self.pack, self.here
        if self.pack[2] < self.here[0] or self.here[2] < self.pack[0]:
            return False
        are_clear = all(format_ratio(value, low, high) != UNCLEAR_WORD for low, value, high in ranges)
        return True if are_clear and not any(math.isnan(low) for low, _, _ in ranges) else None

    @property
    def sentence(self) -> str:
        ranges = self.pack, self.here
        ratios = [format_ratio(value, low, high) for low, value, high in ranges]
        outcomes = {True: "the intervals overlap", None: "too little evidence to compare them"}
        outcome = outcomes.get(self.agrees, "a difference larger than the noise of both")
        name = f"{self.where}: {self.configuration} over {self.reference}"
        return f"{name}: {ratios[0]} in the pack, {ratios[1]} here: {outcome}."


@dataclass(frozen=True)
class RankingPair:
    """Candidates for the fastest in the pack and here, the winner first."""

    where: str
    by: str
    pack: tuple[str, ...]
    here: tuple[str, ...]

    @property
    def agrees(self) -> bool | None:
        """Whether both winners are the same; None if a side has no candidate, or several that allow the same winner."""
        if not (self.pack and self.here):
            return None
        if len(self.pack) == len(self.here) == 1:
            return self.pack == self.here
        return None if {*self.pack} & {*self.here} else False

    @property
    def sentence(self) -> str:
        if not (self.pack and self.here):
            return f"{self.where}, {self.by}: the winners can't be compared."
        outcomes = {True: "the same ranking", False: "another ranking", None: "not both runs name one winner"}
        outcome, pack, here = outcomes[self.agrees], *(join_names(list(names)) for names in (self.pack, self.here))
        return f"{self.where}, {self.by}: {outcome}: {pack} in the pack, {here} here."


class RankingDescription(TypedDict):
    """A pair of rankings as data."""

    where: str
    by: str
    pack: list[str]
    here: list[str]
    agrees: bool | None


class RatioDescription(TypedDict):
    """A pair of ratios as data, each as low, value and high."""

    where: str
    configuration: str
    reference: str
    pack: list[float]
    here: list[float]
    agrees: bool | None


class ReproductionDescription(TypedDict):
    """A reproduction as data."""

    outcome: str
    rankings: list[RankingDescription]
    ratios: list[RatioDescription]
    unavailable: dict[str, str]
    failed: dict[str, str]
    differences: dict[str, dict[str, Any]]
    sentences: list[str]


@dataclass(frozen=True)
class Reproduction:
    """A pack's study measured again: rankings, ratios, and differences between the machines.

    `unavailable` and `failed` have the reasons for configurations that can't run here, or that didn't finish.
    """

    folder: Path
    rankings: tuple[RankingPair, ...]
    ratios: tuple[RatioPair, ...]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    differences: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """ "reproduced", "not reproduced", "unfinished", or "undecided" if nothing can be compared."""
        answers = [*(pair.agrees for pair in self.rankings), *(pair.agrees for pair in self.ratios)]
        if False in answers:
            return "not reproduced"
        return "unfinished" if self.failed else "reproduced" if True in answers else "undecided"

    @property
    def exit_code(self) -> int:
        """0 if reproduced, 1 if not reproduced, 3 if unfinished or undecided."""
        return {"reproduced": 0, "not reproduced": 1}.get(self.outcome, 3)

    @property
    def sentences(self) -> list[str]:
        """Sentences on the outcome, each pair, and the differences."""
        lines = [f"{self.outcome}: {self._describe_counts()}."]
        lines += [pair.sentence for pair in self.rankings] + [pair.sentence for pair in self.ratios]
        lines += [f"{name} didn't finish here: {reason}." for name, reason in self.failed.items()]
        lines += [f"{name} can't run here: {reason}." for name, reason in self.unavailable.items()]
        changes = [
            f"{name.removesuffix('_bytes')} {_format_value(name, a)} (here {_format_value(name, b)})"
            for name, (a, b) in self.differences.items()
        ]
        return [*lines, f"What differs: {'; '.join(changes) or 'nothing that the records have'}."]

    def _describe_counts(self) -> str:
        groups = (("ranking", self.rankings), ("ratio", self.ratios))
        counts = [f"{sum(pair.agrees is True for pair in p)} of {format_count(len(p), name)}" for name, p in groups]
        unclear_count = sum(pair.agrees is None for _, pairs in groups for pair in pairs)
        text = f"{' and '.join(counts)} agree" + (f", {unclear_count} can't be compared" if unclear_count else "")
        advice = "; pack a run of 3 or more rounds, and reproduce it on an idle machine"
        return text + (advice if self.outcome == "undecided" else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as data, for JSON."""
        return {
            "outcome": self.outcome,
            "rankings": [{**vars(pair), "agrees": pair.agrees} for pair in self.rankings],
            "ratios": [
                {
                    **vars(pair), "agrees": pair.agrees,
                    **{key: [x if math.isfinite(x) else None for x in vars(pair)[key]] for key in ("pack", "here")},
                }
                for pair in self.ratios
            ],
            "unavailable": dict(self.unavailable),
            "failed": dict(self.failed),
            "differences": {name: {"pack": a, "here": b} for name, (a, b) in self.differences.items()},
            "sentences": self.sentences,
        }  # fmt: skip


def reproduce(
    file: str | Path,
    *,
    model: str | Path | Sequence[str | Path] = (),
    data: str | Path = "",
    out: str | Path | None = None,
    minutes: float | None = None,
    quiet: bool = True,
    confirm: Callable[[str], bool] | None = None,
) -> Reproduction:
    """Verify a pack, run its study on this machine, and compare both.

    Nothing in the pack is executed: `model` are your own files of its models, and `data` your folder of its images;
    both are checked by hash. `minutes` limits the measuring time, `out` is the run folder. `confirm` gets a sentence on
    the planned run, and returns whether to start it. Raises `UserError` for a pack that can't be read, is not verified,
    or needs a file that is not here.
    """
    models = several(native(model))
    check_types(
        {"model": models, "data": data, "out": out},
        {"model": tuple[str, ...], "data": str | Path, "out": str | Path | None},
    )
    with open_pack(file) as pack:
        verification = verify_opened(pack, Path(file))
        if verification.exit_code:
            raise UserError(f"{file} is not verified, so it isn't run; see `dyno verify {shlex.quote(str(file))}`")
        pack_run = load_run(pack.run)
        study, unavailable = _make_study(pack, pack_run, models, data)
        if minutes is not None:
            study = replace(study, minutes=minutes, until=DECIDED, rounds=max(2, study.rounds))
        folder = Path(out) if out else _choose_folder(study, pack)
        plan = f"This runs {', '.join(study.models)} with {', '.join(study.backends)} into {folder}."
        if confirm is not None and not confirm(plan):
            raise UserError("nothing was run")
        _check_data(study, pack_run)
        from dyno import api

        own_run = api.run(study, folder, quiet=quiet)
        return _compare_runs(read_results(pack_run), own_run.data, folder, unavailable)


def _choose_folder(study: Study, pack: OpenPack) -> Path:
    name = str(pack.metadata.get("run", ""))
    stem = name if re.fullmatch(r"[\w+=@-][\w.+=@-]{0,79}", name) else "pack"
    return choose_folder(study, RUNS_DIR / f"{stem}-reproduced")[0]


# A pack's study with this machine's files.


def _make_study(
    pack: OpenPack, pack_run: Results, paths: Sequence[str | Path], data: str | Path
) -> tuple[Study, dict[str, str]]:
    """Return the pack's study for this machine, and the reasons for configurations left out, by name."""
    table = Study.from_toml(pack.run / "study.toml").to_table()
    if other_names := sorted(table.keys() - {*KEPT_FIELDS, *REPLACED_FIELDS}):
        text = join_names(other_names)
        raise UserError(f"a study with {text} can't be reproduced from a pack; run it from its study file")
    models = _find_models(pack_run, table["models"], list(map(str, paths)))
    backends, unavailable = _choose_backends(table, pack_run)
    images = str(table.get("data", ""))
    if images and images != BUILT_IN and not data:
        datasets = {(t.spec.data.name, t.spec.data.sha256) for t in pack_run if t.spec.data.sha256}
        names = ", ".join(
            f"{shorten(name)} (sha256 {sha256[:SHOWN_HASH_LENGTH]}…)" for name, sha256 in sorted(datasets)
        )
        raise UserError(f"the pack was measured on images: {names or images}; give their folder with --data")
    if data and (not images or images == BUILT_IN):
        raise UserError(f"the pack was measured on {images or 'random inputs'}; omit --data")
    device = str(table.get("device", "cpu")).partition(",")[0]
    settings = {name: value for name, value in table.items() if name in KEPT_FIELDS and name != "device"}
    settings |= {"models": models, "backends": backends, "data": str(data) or images, "device": device}
    return Study(**settings), unavailable


def _find_models(pack_run: Results, sources: Sequence[str], paths: Sequence[str]) -> tuple[str, ...]:
    """Return the source of each model here: a library's name, or the user's file with the same content."""
    hashes = dict[str, list[str]]()  # lists, as files in several folders may have one name
    for model in (t.spec.model for t in pack_run):
        candidates = hashes.setdefault(_shorten_source(model.source), [])
        candidates += [] if model.source_sha256 in candidates else [model.source_sha256]
    local_hashes = {path: _hash_source(path) for path in paths}
    used_paths, models = set(), []
    for source in sources:
        if LIBRARY_SOURCE.fullmatch(source):
            models.append(source)
            continue
        name = _shorten_source(source)
        candidates = hashes.get(name, [""])
        expected = candidates.pop(0) if len(candidates) > 1 else candidates[0]
        if not expected:
            raise UserError(f"the pack has no hash of its model {shorten(name)!r}, so it can't be reproduced")
        path = next((path for path, sha256 in local_hashes.items() if sha256 == expected), "")
        if not path:
            files = "".join(f"; {path} has {sha256[:SHOWN_HASH_LENGTH]}…" for path, sha256 in local_hashes.items())
            pack_file = f"{shorten(name)!r} with sha256 {expected[:SHOWN_HASH_LENGTH]}…"
            raise UserError(f"the pack needs your own file of its model {pack_file}{files}: give it with --model")
        used_paths.add(path)
        function = name.rpartition(":")[2] if ".py:" in name else ""
        if function and not FUNCTION_NAME.fullmatch(function):
            raise UserError(f"the pack's model {shorten(name)!r} names no plain function, so it isn't called")
        models.append(f"{path}:{function}" if function and path.endswith(".py") else path)
    if unused_paths := [path for path in paths if path not in used_paths]:
        raise UserError(f"{unused_paths[0]} is not a model of the pack; omit it")
    return tuple(models)


def _shorten_source(source: str) -> str:
    return source.removeprefix("file:").removeprefix("saved:").rpartition("/")[2]


def _hash_source(text: str) -> str:
    path = Path(text.rpartition(":")[0] if ".py:" in text else text)
    if not path.is_file():
        raise UserError(f"there is no file {path}; give the pack's model with --model")
    return sha256_with_imports(path) if path.suffix == ".py" else sha256_of(path)


def _choose_backends(table: Mapping[str, Any], pack_run: Results) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the backends to run, with their options, and the reasons for others left out."""
    texts = table.get("backends") or _name_backends(pack_run, bool(table.get("precisions")))
    backends, unavailable = [], {}
    for text in texts:
        choice = Choice.parse(text)
        if not _is_known(choice.name):
            unavailable[text] = "this Dyno has no such backend"
        elif choice.runtime or choice.name in table.get("runtime", {}):
            unavailable[text] = "it was measured in another Python"
        elif any(
            isinstance(v, str) and (not PLAIN_VALUE.fullmatch(v) or Path(v).exists()) for v in choice.options.values()
        ):
            unavailable[text] = "its options name a file"
        else:
            backends.append(text)
    if not backends:
        reasons = "; ".join(f"{shorten(name)}: {reason}" for name, reason in unavailable.items())
        raise UserError(f"no configuration of the pack can run here ({reasons})")
    return tuple(backends), unavailable


def _is_known(backend: str) -> bool:
    try:
        return ":" not in backend and bool(registry.find(backend))  # with a colon it would be imported
    except UserError:
        return False


def _name_backends(pack_run: Results, has_precisions: bool) -> list[str]:
    """Return the backends of a study that didn't name any, each with the precisions that it ran in."""
    runs: dict[str, list[str]] = {}
    for t in pack_run:
        if t.good and not t.options:
            runs.setdefault(t.backend, []).append(t.precision)
    return [name if has_precisions else f"{name}@precision={'+'.join(dict.fromkeys(p))}" for name, p in runs.items()]


def _check_data(study: Study, pack_run: Results) -> None:
    """Raise `UserError` if the images here differ from the pack's."""
    if not study.data:
        return
    expected = {t.spec.data.sha256 for t in pack_run} - {""}
    actual = {entry.trial.data.sha256 for entry in expand(study)} - {""}
    if actual != expected:
        texts = [
            join_names([f"sha256 {each[:SHOWN_HASH_LENGTH]}…" for each in sorted(each)]) for each in (actual, expected)
        ]
        difference = f"other images ({texts[0]}) than the pack ({texts[1]})"
        raise UserError(f"{study.data} has {difference}; give theirs with --data")


# Comparison of both runs.


def _make_key(t: TrialResult) -> Key:
    return t.spec.model.source_sha256 or t.model_name, t.size, str(t.batch), t.variant, t.precision


def _compare_runs(pack_run: RunData, own_run: RunData, folder: Path, unavailable: Mapping[str, str]) -> Reproduction:
    own_trials = {_make_key(trial): trial for trial in own_run.records}
    absent, failed = dict(unavailable), {}
    missing_backends = tuple(name.partition("@")[0] for name in unavailable)
    for trial in pack_run.records:
        own_trial = own_trials.get(_make_key(trial))
        if trial.status != "ok" or (own_trial is None and trial.backend in missing_backends):
            continue
        if own_trial is None or own_trial.status == "skipped":
            absent[trial.label] = own_trial.reason if own_trial else "this machine's study has no such trial"
        elif own_trial.status != "ok":
            failed[trial.label] = f"{own_trial.status}, {own_trial.reason}"
    rankings, ratios = tuple(_pair_rankings(pack_run, own_run)), tuple(_pair_ratios(pack_run, own_run, own_trials))
    return Reproduction(folder, rankings, ratios, absent, failed, _find_differences(pack_run.records, own_run.records))


def _pair_ratios(pack_run: RunData, own_run: RunData, own_trials: Mapping[Key, TrialResult]) -> Iterator[RatioPair]:
    own_rows = {row["trial"]: row for row in own_run.frame.to_dict("records")}
    for row in pack_run.frame.to_dict("records"):
        t, reference = pack_run.trials[row["trial"]], pack_run.references.get(row["trial"])
        own_trial = own_trials.get(_make_key(t))
        if reference is None or reference.id == t.id or own_trial is None or not (t.good and own_trial.good):
            continue
        own_row, own_reference = own_rows[own_trial.id], own_run.references.get(own_trial.id)
        if own_reference is None or _make_key(own_reference) != _make_key(reference):
            continue
        where = f"{t.model} at size {t.size}, batch {t.batch}" if t.size != "0" else f"{t.model}, batch {t.batch}"
        yield RatioPair(where, t.configuration, reference.configuration, _read_limits(row), _read_limits(own_row))


def _read_limits(row: Mapping[str, Any]) -> tuple[float, float, float]:
    cells = (row[name] for name in ("speedup_low", "speedup", "speedup_high"))
    low, value, high = (math.nan if is_missing(cell) else float(cell) for cell in cells)
    return low, value, high


def _pair_rankings(pack_run: RunData, own_run: RunData) -> Iterator[RankingPair]:
    """Yield both runs' decisions on the same model, size and measure; each winner must have run in both."""
    keys = [{_make_key(t) for t in run.records if t.status == "ok"} for run in (pack_run, own_run)]
    own_decisions = {subject: trials for subject, _, trials in _list_decisions(own_run)}
    for subject, where, trials in _list_decisions(pack_run):
        own_trials = own_decisions.get(subject, [])
        is_comparable = own_trials and _make_key(trials[0]) in keys[1] and _make_key(own_trials[0]) in keys[0]
        by = subject[-1]
        yield RankingPair(where, by, _name_trials(trials, by), _name_trials(own_trials, by) if is_comparable else ())


def _name_trials(trials: Sequence[TrialResult], by: str) -> tuple[str, ...]:
    return tuple(t.configuration + (f" at batch {t.batch}" if by == "throughput" else "") for t in trials)


def _list_decisions(run: RunData) -> Iterator[tuple[Key, str, list[TrialResult]]]:
    from dyno.report.verdict.verdict import read_verdict

    for decision in read_verdict(run).decisions:
        if trials := [run.trials[id] for id in decision.candidates]:
            name, size, *_ = _make_key(trials[0])
            yield (name, size, decision.by), decision.where, trials


def _format_value(name: str, value: Any) -> str:
    if value in (None, ""):
        return "unknown" if name in (*COMPARED_FACTS, "threads") else "not installed"
    return show(value, "bytes") if name == "memory_bytes" else str(value)


def _find_differences(pack_run: Results, own_run: Results) -> dict[str, tuple[Any, Any]]:
    runs = pack_run, own_run
    versions = [r.environment.get("versions") or {} for r in runs]
    counts = [{t.facts.threads for t in r if t.good and t.facts.threads is not None} for r in runs]
    a, b = ({**r.environment, **libraries, "threads": ", ".join(map(str, sorted(threads)))}
            for r, libraries, threads in zip(runs, versions, counts, strict=True))  # fmt: skip
    names = dict.fromkeys((*COMPARED_FACTS, "threads", *versions[0], *versions[1]))
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}
