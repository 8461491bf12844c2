"""After how many images the time to export, build, calibrate and compile has paid for itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dyno.analysis import stats
from dyno.analysis.formatting import limits, significant
from dyno.analysis.ranking.frontier import usable
from dyno.analysis.ranking.references import INCOMPARABLE
from dyno.analysis.records.results import Results, TrialResult
from dyno.analysis.tables.render import Column, number
from dyno.analysis.tables.trial_table import REFERENCE, build_seconds

if TYPE_CHECKING:
    import pandas as pd

# What each maker's seconds are called; every other maker builds.
PARTS = {"onnx_export": "export_s", "onnx_precision": "convert_s", "onnx_modelopt": "convert_s",
         "onnx_sensitivity": "ranking_s"}  # fmt: skip
PREPARATION = ("export_s", "ranking_s", "convert_s", "engine_s", "compile_s")
IDENTITY = ("model", "size", "batch", "device", "backend", "precision", "runtime", "options")
COLUMNS = (*IDENTITY, "trial", "reference", *PREPARATION, "prepare_s", "extra_s", "gain_us_per_image", "speedup",
           "speedup_low", "speedup_high", "images", "images_low", "images_high", "pays_off")  # fmt: skip
NEVER, PERHAPS, AT_ONCE = "never", "not shown to", "at once"


@dataclass(frozen=True)
class BreakEven:
    """Seconds of preparation beyond the reference's, seconds gained per image, and how many images make up for them.

    `images` is None where nothing is gained; `high` is infinite where the interval of the speed-up contains 1, and the
    limits are NaN where there is no interval.
    """

    extra: float
    gain: float
    images: float | None
    low: float
    high: float

    @property
    def words(self) -> str:
        """When it pays off, in words."""
        if self.images is None:
            return NEVER if not math.isinf(self.high) else PERHAPS
        if self.extra <= 0:
            return AT_ONCE
        if math.isinf(self.high):
            return f"{_count(self.images)} images, or never"
        return f"{_count(self.images)} images{limits(self.low, self.high, _count)}"


def against(row: pd.Series, trial: TrialResult, reference: TrialResult) -> BreakEven | None:
    """The trial of a table's row against a reference, per image at the row's boundary; None without latencies.

    The interval is that of the speed-up between processes, with the reference's time as it is, so that no limit says
    that more than all of it is gained. Preparation is measured once and counts as exact.
    """
    boundary, clock = str(row["boundary"]), str(row["clock"])
    own = [m / trial.batch for m in trial.medians(boundary, clock)]
    theirs = [m / reference.batch for m in reference.medians(boundary, clock)]
    found = stats.speedup(own, theirs)
    if math.isnan(found.value):
        return None
    seconds = stats.center(theirs).value
    extra = (build_seconds(trial) or 0.0) - (build_seconds(reference) or 0.0)
    most, least = _images(extra, seconds, found.low), _images(extra, seconds, found.high)
    gain = seconds * (1 - 1 / found.value)
    if found.value <= 1:
        return BreakEven(extra, gain, None, math.nan, math.inf if found.high > 1 else math.nan)
    return BreakEven(extra, gain, _images(extra, seconds, found.value), least, most)


def _images(extra: float, seconds: float, speedup: float) -> float:
    if math.isnan(speedup):
        return math.nan
    return max(0.0, extra) / (seconds * (1 - 1 / speedup)) if speedup > 1 else math.inf


def parts(t: TrialResult) -> dict[str, float]:
    """Seconds of each part of a trial's preparation, by PREPARATION; those it has none of are left out.

    Calibration is a part of the conversion, which can't do without it.
    """
    found: dict[str, float] = {}
    made = t.artifact.get("made_by") or {}
    for step in made.get("steps") or ():
        name = PARTS.get(str(step.get("maker")), "engine_s")
        found[name] = found.get(name, 0.0) + float(step.get("seconds") or 0)
    inside = (build_seconds(t) or 0.0) - sum(found.values())
    if inside > 0 and any(r.value("build") is not None for r in t.good):
        found["compile_s"] = inside
    return found


def table(results: Results, frame: pd.DataFrame) -> pd.DataFrame:
    """One row per trial that has a reference of its own batch and size, columns COLUMNS; seconds, microseconds, images.

    `pays_off` says it in words; `images_high` is infinite where it may never.
    """
    import pandas as pd

    trials = {t.id: t for t in results}
    rows = []
    for _, row in usable(frame).iterrows():
        reference = trials.get(row["reference"])
        if reference is None or row["verdict"] == REFERENCE or str(row["verdict"]).startswith(INCOMPARABLE):
            continue
        if (found := against(row, trials[row["trial"]], reference)) is not None:
            rows.append(_row(row, trials[row["trial"]], found))
    return pd.DataFrame.from_records(rows, columns=list(COLUMNS))


def _row(row: pd.Series, t: TrialResult, found: BreakEven) -> dict[str, Any]:
    own = {name: row[name] for name in (*IDENTITY, "trial", "reference", "speedup", "speedup_low", "speedup_high")}
    return own | parts(t) | {
        "prepare_s": build_seconds(t) or 0.0, "extra_s": found.extra, "gain_us_per_image": 1e6 * found.gain,
        "images": math.nan if found.images is None else found.images, "images_low": found.low,
        "images_high": found.high, "pays_off": found.words,
    }  # fmt: skip


def _count(value: float) -> str:
    return significant(value, 2)


PRINTED = (
    *(number(name.removesuffix("_s") + " s", name, 3) for name in PREPARATION),
    number("more than reference, s", "extra_s", 1),
    number("gain, µs/image", "gain_us_per_image", 2),
    Column("pays off after", lambda r: str(r["pays_off"]), 0, right=False, sort="images"),
)
