"""The highest rates of a device: of arithmetic by type, and of memory; measured ones, and those of a data sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dyno.analysis.presentation.table import PERCENT, TEXT, Column, Row, Table
from dyno.analysis.presentation.table_kind import TableKind
from dyno.worker.facts.job import CopyRate, PeakOfType
from dyno.worker.spec import UserError

CEILINGS = TableKind("ceilings", "Ceilings", "The highest rates that were measured on this device.",
                     command="dyno profile")  # fmt: skip
TYPES = ("fp32", "tf32", "fp16", "bf16", "int8")
MEMORY = "memory"
RATES = (
    Column("tflops", "operations in that time, 10¹² a second", "10¹² 1/s", title="TFLOPS", rank=2),
    Column("gb_s", "bytes of weights and tensors in that time, each counted once", "GB/s", title="GB/s", rank=2),
)
COLUMNS = (
    Column("ceiling", "what was measured", kind=TEXT),
    *RATES,
    Column("sheet", "the data sheet's, in the same unit", title="data sheet"),
    Column("of_sheet", "what was measured, over the data sheet's", "%", PERCENT, title="of it, %"),
    Column("of", "size of the matrices, or of what was copied", kind=TEXT),
    Column("clock", "median SM clock meanwhile", "MHz", title="clock, MHz"),
    Column("remark", "why there is none", kind=TEXT),
)
NOTE = (
    "Measured by PyTorch on the same device with the same threads, right after the layers: the fastest of the "
    "repetitions."
)


@dataclass(frozen=True)
class Rates:
    """Operations/s by type and bytes/s of memory; None: unknown."""

    products: Mapping[str, float]
    memory: float | None = None


@dataclass(frozen=True)
class Ceilings:
    """What was measured: matrix products by type, and a copy; `warnings` say what disturbed it.

    `sheet` has the data sheet's, as far as it was given, and `clocks` the SM clock in MHz by type and of the copy.
    """

    products: Mapping[str, PeakOfType]
    copy: CopyRate
    warnings: tuple[str, ...] = ()
    sheet: Rates = field(default_factory=lambda: Rates({}))
    clocks: Mapping[str, float] = field(default_factory=dict)

    @property
    def rates(self) -> Rates:
        """The measured ones."""
        found = {name: one.flops_per_s for name, one in self.products.items() if one.flops_per_s}
        return Rates(found, self.copy.bytes_per_s)

    def table(self) -> Table:
        """Build a row for each ceiling; a type that the device or PyTorch lacks has the reason as its remark."""
        rows: list[Row] = [
            {"ceiling": f"matrix product, {name}", "tflops": (one.flops_per_s or math.nan) / 1e12,
             "of": f"{one.side} x {one.side}" if one.side else "", "remark": one.missing,
             **self._compare_with_sheet(name, one.flops_per_s, self.sheet.products.get(name), 1e12)}
            for name, one in self.products.items()
        ]  # fmt: skip
        rows.append({"ceiling": "copy, read and written", "gb_s": self.copy.bytes_per_s / 1e9,
                     "of": f"{self.copy.bytes / 1e6:,.0f} MB",
                     **self._compare_with_sheet(MEMORY, self.copy.bytes_per_s, self.sheet.memory, 1e9)})  # fmt: skip
        cache = f" The device's last cache has {self.copy.cache / 1e6:.3g} MB." if self.copy.cache else ""
        return CEILINGS.of(COLUMNS, rows, notes=(NOTE + cache, *self.warnings))

    def _compare_with_sheet(self, name: str, measured: float | None, sheet: float | None, unit: float) -> Row:
        cells: Row = {"clock": self.clocks[name]} if name in self.clocks else {}
        if sheet:
            cells |= {"sheet": sheet / unit, "of_sheet": 100 * (measured or math.nan) / sheet}
        return cells


def data_sheet(texts: Sequence[str]) -> Rates:
    """Parse texts such as `fp16=989` (TFLOPS) and `memory=4800` (GB/s) into rates; UserError for any other."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in (*TYPES, MEMORY):
            raise UserError(f"--data-sheet {text}: unknown ceiling {name!r}; give one of {', '.join(TYPES)}, {MEMORY}")
        if name in found:
            raise UserError(f"--data-sheet has {name} twice; give it once")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            unit = "GB/s" if name == MEMORY else "TFLOPS"
            raise UserError(f"--data-sheet {text}: give {name} as a number of {unit}, such as {name}=100")
        found[name] = value * (1e9 if name == MEMORY else 1e12)
    memory = found.pop(MEMORY, None)
    return Rates(found, memory)
