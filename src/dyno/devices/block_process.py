"""The process of one block: confined to its place, it measures the block's trials into a separate run folder.

python -m dyno.devices.block_process FOLDER reads block.json there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from dyno.jobs.progress import Progress
from dyno.runner.execute import execute
from dyno.study.plan import TrialSelection
from dyno.study.study import Study
from dyno.worker import system
from dyno.worker.record import read_json
from dyno.worker.spec import UserError

ORDER = "block.json"
BAD_INPUT = 2


def main(folder: Path) -> int:
    """Measure the trials that the folder's block.json asks for and the folder lacks; return the exit code."""
    order: dict[str, Any] = read_json(folder / ORDER)
    system.die_with_parent(order["driver"])
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])
    progress = Progress(console=Console(stderr=True, no_color=True, soft_wrap=True))
    try:
        study = Study.from_toml(folder / order["study"])
        execute(
            study,
            folder,
            progress,
            retry_failed=order["retry_failed"],
            only=TrialSelection(order["trials"], order["sources"]),
        )
    except UserError as e:
        print(e, file=sys.stderr)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
