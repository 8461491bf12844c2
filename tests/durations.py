"""Test durations, which assign each test to `make check`, `make test` or `make test-all`.

    PYTEST='--durations=0 --durations-min=0.1' make test-all > LOG; python tests/durations.py LOG

writes durations.csv: seconds per test function from MIN_SECONDS on, all parameters together, with three groups on two
cores.
"""

import csv
import re
import sys
from collections import defaultdict
from pathlib import Path

FILE = Path(__file__).with_suffix(".csv")
MIN_SECONDS = 0.5
SLOW_S, RARE_S = 0.7, 4.0  # from here on `make check` skips a test; from here on `make test` does too
LINE = re.compile(r"^([\d.]+)s (?:call|setup|teardown) +(tests/[^\s:]+::\w+)", re.MULTILINE)


def read_durations() -> dict[str, float]:
    """Return seconds by test name, `tests/test_x.py::test_y`."""
    with FILE.open(newline="") as file:
        return {row["test"]: float(row["seconds"]) for row in csv.DictReader(file)}


def write_durations(log: str) -> None:
    """Sum pytest's lines of slowest durations per function and write durations.csv."""
    found: dict[str, float] = defaultdict(float)
    for seconds, name in LINE.findall(log):
        found[name] += float(seconds)
    with FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("test", "seconds"))
        writer.writerows((name, f"{found[name]:.1f}") for name in sorted(found) if found[name] >= MIN_SECONDS)


if __name__ == "__main__":
    write_durations(Path(sys.argv[1]).read_text(errors="replace"))
