"""Prescriptions tried: each variant of an engine is a trial beside it, in turns, and kept where it is proven."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dyno.analysis import stats
from dyno.analysis.formatting import counting
from dyno.analysis.inside.cures import prescriptions, tried
from dyno.analysis.inside.cures.prescriptions import IndicatedPrescription
from dyno.analysis.inside.cures.tried import Outcome
from dyno.analysis.inside.waterfall import Waterfall
from dyno.analysis.metrics import speedups
from dyno.analysis.presentation.export import with_sentences
from dyno.analysis.presentation.table import Table
from dyno.analysis.ranking.correctness import AGREE
from dyno.analysis.records.results import TrialResult
from dyno.analysis.records.run_data import RunData
from dyno.analysis.tables import trial_table
from dyno.api.inside.forms import FormRequest
from dyno.engine.execute import execute
from dyno.jobs.progress import Progress
from dyno.planning.defaults import new_folder
from dyno.study import Choice, Study
from dyno.worker import registry
from dyno.worker.spec import FIXED, UserError

BOUNDARY = "model"


@dataclass(frozen=True)
class PrescriptionResult:
    """What came of the prescriptions for B; `folder` is the run folder with their trials, None where none was called
    for."""

    title: str
    outcomes: tuple[Outcome, ...]
    folder: Path | None = None

    @property
    def table(self) -> Table:
        """A row for each prescription."""
        return tried.table(self.outcomes, self.title)

    @property
    def sentences(self) -> list[str]:
        """How many helped, and the best of them."""
        where = [f"The trials are in {self.folder}."] if self.folder else []
        return [*tried.sentences(self.outcomes, self.title), *where]

    def export(self, format: str = "text") -> str:
        """Return the table and the sentences, in text or Markdown."""
        return with_sentences([self.table] if self.outcomes else [], self.sentences, format)


def check(model: Any, sides: Sequence[Any]) -> None:
    """Raise `UserError` if no variant of B can be made: there is no module, or A and B aren't two forms of it."""
    if len(sides) != 2 or not isinstance(model, str) or registry.format_of(model) is not None or Path(model).is_dir():
        raise UserError("--try makes variants of an engine from its module; give the module and two forms of it: "
                        "torchvision:resnet18 onnxruntime onnxruntime/int8")  # fmt: skip


def run(
    waterfall: Waterfall, sides: Sequence[FormRequest], study: Study, batch: int, rounds: int, progress: Progress
) -> PrescriptionResult:
    """Try the variants that the waterfall from A to B suggests: measure A, B and each variant interleaved.

    `study` has the model, the data and the measurement settings; `rounds` is the number of rounds. A prescription is
    kept if its variant is proven faster than B, all of them as one family, and its outputs are right.
    """
    a, b = ((side.choice, side.precision) for side in sides[-2:])
    title = _format_choice(*b)
    called = prescriptions.called_for(waterfall, b[0].name, b[1], study.device, b[0].options)
    variants = {
        _format_choice(*variant): (variant, one)
        for one in called
        if (variant := _apply_prescription(*b, one)) not in (a, b)
    }
    if not variants:
        return PrescriptionResult(title, ())
    asked = tuple(dict.fromkeys((_format_choice(*a), _format_choice(*b), *variants)))
    own = replace(study, backends=asked, precisions=(), batches=(batch,), rounds=rounds, until=FIXED,
                  boundaries=(BOUNDARY,))  # fmt: skip
    folder = new_folder("explain", study.models)
    wanted = "; ".join(one.prescription.text for _, one in variants.values())
    progress.other(f"trying {counting(len(variants), 'prescription')} for {title}, in {folder}: {wanted}")
    execute(own, folder, progress)
    data = trial_table.read(folder)
    trials = {_make_trial_key(t): t for t in data.records}
    beside = trials.get(_make_choice_key(*b))
    if beside is None or not beside.good:
        show = f"dyno show {shlex.quote(str(folder))}"
        raise UserError(f"{title} did not run beside its variants; `{show}` has the reason")
    pairs = [(one, _format_choice(*v), trials.get(_make_choice_key(*v))) for v, one in variants.values()]
    return PrescriptionResult(title, _decide_outcomes(pairs, beside, data), folder)


def _decide_outcomes(
    pairs: Sequence[tuple[IndicatedPrescription, str, TrialResult | None]], beside: TrialResult, data: RunData
) -> tuple[Outcome, ...]:
    """Return the outcome of each variant, all decided as one family."""
    rows = {row["trial"]: row for row in data.frame.to_dict("records")}
    evidence = [
        speedups.evidence(t, beside, BOUNDARY, rule=data.rule) if t is not None and t.good else None
        for _, _, t in pairs
    ]
    decided = stats.decide_family(evidence, data.rule)
    return tuple(
        Outcome(called, text, speedup if e else None, *_judge_trial(t, rows))
        for (called, text, t), e, speedup in zip(pairs, evidence, decided, strict=True)
    )


def _judge_trial(t: TrialResult | None, rows: Mapping[str, Mapping[str, Any]]) -> tuple[str, bool, str]:
    """Return the state of the trial's outputs, whether they are right, and why it has no speed."""
    if t is None:
        return "", False, "no such engine was planned"
    outputs = str(rows[t.id]["outputs"] or "")
    return outputs, outputs in ("", AGREE), "" if t.good else f"{t.status}: {t.reason}"


def _apply_prescription(choice: Choice, precision: str, called: IndicatedPrescription) -> tuple[Choice, str]:
    """Return B's configuration with the prescription applied."""
    new = called.prescription
    kept = choice.options if new.backend in ("", choice.name) else {}
    return replace(choice, name=new.backend or choice.name, options={**kept, **new.options}), new.precision or precision


def _format_choice(choice: Choice, precision: str) -> str:
    """Return a configuration in the notation of `--backends`."""
    return replace(choice, precisions=(precision,), rounds=0).text


def _make_choice_key(choice: Choice, precision: str) -> tuple[Any, ...]:
    return choice.name, precision, tuple(sorted((k, str(v)) for k, v in choice.options.items()))


def _make_trial_key(t: TrialResult) -> tuple[Any, ...]:
    return t.spec["backend"], t.precision, tuple(sorted((k, str(v)) for k, v in t.options.items()))
