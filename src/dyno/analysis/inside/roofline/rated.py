"""Layers under the ceilings: how near each comes to them, which one bounds it, and in words what that means."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from dyno.analysis.inside.roofline.ceilings import MEMORY, RATES, Ceilings, Rates
from dyno.analysis.inside.roofline.work import ARITHMETIC, LayerWork, counted
from dyno.analysis.presentation.table import PERCENT, TEXT, Column, Row
from dyno.worker.facts.job import LayerGraph

NEAR = 50.0  # percent of the roof from which the nearer ceiling explains most of the time
NEITHER = "neither"
DISTURBED = "ceilings disturbed"
CACHED = "may be in the cache"
BEYOND_COPY = "faster than the copy"
BEYOND_PRODUCT = "fewer operations, or a better kernel"
COLUMNS = (
    *RATES,
    Column("intensity", "operations for each byte", title="FLOP/B", rank=3),
    Column("reached", "the least time that the ceilings allow, over the time it took", "%", PERCENT,
           title="of the roof, %", rank=1),
    Column("bound", "which ceiling bounds it: the nearer one, if it explains at least half of the time", kind=TEXT,
           title="bound by", rank=1),
    Column("above", "how it can be above its ceiling", kind=TEXT, title="above the roof", rank=1),
    Column("of_sheet", "the same of the data sheet's ceilings", "%", PERCENT, title="of the data sheet, %", rank=2),
)  # fmt: skip
OF_LATENCY = (
    RATES[0],
    Column("roof_ms", "sum of the least times that the ceilings allow the layers", "ms", title="roof, ms", rank=1),
    Column("reached", "that over the unprofiled latency", "%", PERCENT, title="of the roof, %", rank=1),
    Column("of_sheet", "the same of the data sheet's ceilings", "%", PERCENT, title="of the data sheet, %", rank=2),
)
NOTE = (
    "Bound by: the nearer ceiling, where it explains at least half of a layer's time. Neither: the layer takes more "
    "than twice what both ceilings allow; the rest is overhead, or a kernel that uses the device badly."
)
ABOVE = {
    DISTURBED: "other programs were busy while the ceilings were measured, so that these are too low; measure again",
    CACHED: "all its bytes fit in the device's cache, which may still have held them, and is faster than the copy",
    BEYOND_COPY: "memory gave it more than the copy, which reads and writes as much: a read alone may be faster, and a "
    "part may still have been in a cache",
    BEYOND_PRODUCT: "a kernel may need fewer operations than are counted (Winograd's convolution, zeros left out), or "
    "be better than PyTorch's product",
}


@dataclass(frozen=True)
class RooflineRating:
    """The work of each layer of one form, under the ceilings; `flops` are all operations, of whichever layer."""

    work: Sequence[LayerWork]
    ceilings: Ceilings
    flops: int | None = None

    def cells(self, chosen: Collection[int], seconds: float) -> Row:
        """Return the cells of COLUMNS for these layers together, which took `seconds`.

        The roof of several is the sum over those with a known one, so it is never too high.
        """
        if not seconds:
            return {}
        known = [self.work[i] for i in chosen if len(chosen) == 1 or self.work[i] != NOTHING_KNOWN]
        flops, moved = _sum_known(each.flops for each in known), _sum_known(each.bytes for each in known)
        cells: Row = {"tflops": flops / seconds / 1e12} if flops else {}
        if moved:
            cells |= {"gb_s": moved / seconds / 1e9, "intensity": flops / moved if flops is not None else None}
        if (reached := self._compute_reached(chosen, seconds, self.ceilings.rates)) is not None:
            cells |= {"reached": reached, "bound": self._find_bound(chosen, reached)}
            cells["above"] = self._explain_excess(chosen, cells["bound"]) if reached > 100 else ""
        if (of_sheet := self._compute_reached(chosen, seconds, self.ceilings.sheet)) is not None:
            cells["of_sheet"] = of_sheet
        return cells

    def of_latency(self, chosen: Collection[int], latency: float) -> Row:
        """Return the cells of OF_LATENCY, for the layers that ran."""
        cells: Row = {"tflops": self.flops / latency / 1e12} if self.flops else {}
        if (reached := self._compute_reached(chosen, latency, self.ceilings.rates)) is not None:
            cells |= {"roof_ms": 1e3 * latency * reached / 100, "reached": reached}
        if (of_sheet := self._compute_reached(chosen, latency, self.ceilings.sheet)) is not None:
            cells["of_sheet"] = of_sheet
        return cells

    def sentence(self, seconds: Sequence[float]) -> str:
        """Describe how much of the layers' time, by layer, each ceiling bounds; "" where no layer has a time."""
        shares = dict.fromkeys((ARITHMETIC, MEMORY, NEITHER, ""), 0.0)
        for i, time in enumerate(seconds):
            shares[self.cells([i], time).get("bound", "")] += time / (sum(seconds) or 1.0)
        if not sum(shares.values()):
            return ""
        words = {ARITHMETIC: "bound by arithmetic", MEMORY: "bound by memory", NEITHER: "bound by neither"}
        parts = [f"{100 * shares[name]:.0f} % of the time in layers {word}" for name, word in words.items()]
        unknown = f", {100 * shares['']:.0f} % in layers of which that isn't known" if shares[""] >= 0.005 else ""
        return ", ".join([parts[0], *(part.replace("of the time in layers ", "") for part in parts[1:])]) + unknown

    def _compute_reached(self, chosen: Collection[int], seconds: float, rates: Rates) -> float | None:
        """Return the sum of the known least times, in percent of the seconds; None where none is known."""
        least = [each for i in chosen if (each := self.work[i].least(rates)) is not None]
        return 100 * sum(time for time, _ in least) / seconds if least else None

    def _find_bound(self, chosen: Collection[int], reached: float) -> str:
        """Return the ceiling that accounts for most of the least times, if these are near the seconds."""
        if reached < NEAR:
            return NEITHER
        least = [each for i in chosen if (each := self.work[i].least(self.ceilings.rates)) is not None]
        return max((ARITHMETIC, MEMORY), key=lambda name: sum(time for time, bound in least if bound == name))

    def _explain_excess(self, chosen: Collection[int], bound: str) -> str:
        """Return the explanation in ABOVE that may apply."""
        if self.ceilings.warnings:
            return DISTURBED
        if bound == ARITHMETIC:
            return BEYOND_PRODUCT
        largest = max(self.work[i].bytes or 0 for i in chosen)
        return CACHED if largest <= self.ceilings.copy.cache else BEYOND_COPY


NOTHING_KNOWN = LayerWork(0, None)  # no products, and an unknown number of bytes


def _sum_known(values: Iterable[int | None]) -> int | None:
    each = [*values]
    return None if None in each else sum(value for value in each if value is not None)


def rated(forms: Sequence[LayerGraph], k: int, graph: int | None, precision: str, ceilings: Ceilings) -> RooflineRating:
    """Rate form `k` under the ceilings; `graph` is the one that an engine was made from."""
    flops = _sum_known(layer.flops for layer in forms[k if graph is None else graph].layers)
    return RooflineRating(counted(forms, k, graph, precision), ceilings, flops)


def notes(rows: Iterable[Row]) -> list[str]:
    """Explain the words in these rows of COLUMNS."""
    found = dict.fromkeys(row["above"] for row in rows if row.get("above"))
    return [NOTE, *(f"Above the roof, {name}: {ABOVE[name]}." for name in found)]
