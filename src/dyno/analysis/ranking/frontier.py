"""What is worth choosing: the frontier of accuracy and speed, the fastest within the budget, and saturation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dyno.analysis.formatting import significant
from dyno.analysis.metrics.accuracy import WITHIN
from dyno.analysis.metrics.precision import named
from dyno.analysis.ranking.correctness import WRONG
from dyno.analysis.stats import TURNS

if TYPE_CHECKING:
    import pandas as pd

LATENCY, THROUGHPUT = "latency_ms", "throughput_ips"
SATURATED = 0.95  # share of the best throughput beyond which a larger batch gains little (R37)
SERIES = ("model", "size", "device", "backend", "precision", "runtime", "options")


@dataclass(frozen=True)
class Saturation:
    """How the throughput of one configuration grows with the batch: where it reaches 95 % of its best."""

    model: str
    configuration: str
    size: str
    batch: int
    images_per_s: float
    best_batch: int
    best_images_per_s: float
    largest: int

    @property
    def description(self) -> str:
        """Where throughput saturates, as text."""
        if self.batch == self.largest:
            return f"throughput still rises at batch {self.largest}, the largest tried"
        if self.batch == self.best_batch:
            return f"throughput is highest at batch {self.batch}, of up to {self.largest}"
        share = f"{100 * self.images_per_s / self.best_images_per_s:.0f} %"
        best = f"{significant(self.best_images_per_s)} images/s at batch {self.best_batch}"
        return f"throughput saturates at batch {self.batch} ({share} of the best, {best})"


def usable(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the trials that could be chosen: every round succeeded, and no check found wrong outputs."""
    return frame[(frame["status"] == "ok") & (frame["outputs"] != WRONG)]


def throughput(frame: pd.DataFrame) -> pd.Series:
    """Return images per second as measured; where it was not, batch / latency, which is a lower bound for it."""
    return frame[THROUGHPUT].fillna(fps(frame))


def fps(frame: pd.DataFrame) -> pd.Series:
    """Return images per second of one batch after another: batch / median latency (R34)."""
    return frame["batch"].astype(float) * 1e3 / frame[LATENCY]


def pareto(frame: pd.DataFrame, speed: str, quality: str = "top1") -> pd.DataFrame:
    """Return the rows that no other row beats at both: fastest first, accuracy strictly rising.

    `speed` is LATENCY (less is better) or THROUGHPUT (more is better). Rows without either number are left out.
    """
    rows = usable(frame).dropna(subset=[speed, quality])
    rows = rows.sort_values([speed, quality], ascending=[speed != THROUGHPUT, False], kind="stable")
    best, positions = -math.inf, []
    for position, value in enumerate(rows[quality]):
        if value > best:
            best = value
            positions.append(position)
    return rows.iloc[positions]


def within(frame: pd.DataFrame) -> pd.DataFrame:
    """Return usable rows that are within the accuracy budget with confidence; all of them where there is no budget."""
    rows = usable(frame)
    return rows[rows["budget"] == WITHIN] if (rows["budget"] != "").any() else rows


def ranked(frame: pd.DataFrame, speed: str = LATENCY) -> pd.DataFrame:
    """Return the rows that have the speed, fastest first.

    Rows that were all measured in turns with one reference are sorted by their speed-ups, not by latencies, which the
    machine's own changes of speed affect.
    """
    rows = frame.assign(**{THROUGHPUT: throughput(frame)}) if speed == THROUGHPUT else frame
    rows = rows.dropna(subset=[speed])
    if speed == LATENCY and in_turns(rows):
        return rows.sort_values("speedup", ascending=False, kind="stable")
    return rows.sort_values(speed, ascending=speed != THROUGHPUT, kind="stable")


def in_turns(rows: pd.DataFrame) -> bool:
    """Return whether every row is the reference or was measured in turns with it."""
    beside = rows[rows["trial"] != rows["reference"]]
    return bool(
        rows["reference"].nunique() == 1 and (beside["measured"] == TURNS).all() and rows["speedup"].notna().all()
    )


def saturation(frame: pd.DataFrame) -> list[Saturation]:
    """Return the smallest batch reaching SATURATED of the best throughput, per configuration with several batches."""
    saturations = []
    rows = usable(frame).assign(ips=throughput(usable(frame))).dropna(subset=["ips"])
    for key, series in rows.groupby(list(SERIES), sort=False):
        ordered = series.sort_values("batch")
        if ordered["batch"].nunique() < 2:
            continue
        best = ordered.loc[ordered["ips"].idxmax()]
        first = ordered[ordered["ips"] >= SATURATED * best["ips"]].iloc[0]
        identity = dict(zip(SERIES, key, strict=True))
        saturations.append(
            Saturation(
                model=str(identity["model"]),
                configuration=configuration(first),
                size=str(identity["size"]),
                batch=int(first["batch"]),
                images_per_s=float(first["ips"]),
                best_batch=int(best["batch"]),
                best_images_per_s=float(best["ips"]),
                largest=int(ordered["batch"].max()),
            )
        )
    return saturations


def describe(row: pd.Series) -> str:
    """Return the same as `configuration` for a sentence, with the precision that it really ran in."""
    return configuration(row).removesuffix(str(row["precision"])) + named(row.to_dict())


def configuration(row: pd.Series) -> str:
    """Return backend with its options, and precision: a row's name within its group."""
    options = f"@{str(row['options']).replace(' ', '@')}" if row["options"] else ""
    runtime = f"@runtime={row['runtime']}" if row["runtime"] != "main" else ""
    return f"{row['backend']}{options}{runtime} {row['precision']}"
