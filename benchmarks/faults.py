"""A fault campaign: does anything break, hang, lose or invent a measurement when the world around Dyno misbehaves?

    python benchmarks/faults.py [--kills 100] [--mutations 10000] [--beside 1] [--only PART,…] [--started]

- kills: a study is killed with SIGKILL at a random moment, the parent alone or one of its workers, and started again,
  `--kills` times. Records that ended well before a kill must be there after it, byte for byte; at the end every round
  is there once and whole, and no scratch folder is left.
- disk: the same study under a limit on how large a file may grow (RLIMIT_FSIZE), at every power of four from 1 byte,
  ends in one line or in rows that say why, and goes on to its end once there is room.
- together: three studies into one folder at the same moment. clock: the clock goes back a year in the middle of a
  study. readonly: run folders, caches and places for them that may not be written to.
- mutations: copies of every kind of file that Dyno reads, in which bytes are flipped, cut, doubled or replaced, or in
  which a value has another type or size, `--mutations` in all. The command that reads them must end by itself, without
  a traceback, and say at most a line of what is wrong with a file. It may look up no host, and start, unpickle or run
  nothing that it doesn't with whole files (tests/watched.py); what is planted in pickles, YAML and text must not run.

Commands that read mutated files are forked from a process that has imported the libraries (tests/preloaded.py), as are
their jobs: still separate processes, which end, crash or hang by themselves, and may write to 6 GiB of memory. With
--started they are started. A command reads several such files where it can; where one ends badly or early, each file
is tried alone. Commands of `--beside` kinds of files run at a time.

Prints a line per part and what failed; exit code 1 where anything did. `mutations.csv` in the folder counts how
commands ended by kind of file, and `wrong/` there has the files that broke something. The seed makes a campaign
repeatable but for the moments of the kills, which depend on the machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.fault_campaign import data, models, stored, world  # noqa: E402
from benchmarks.fault_campaign.campaign import STUDY, Campaign, bounded_memory  # noqa: E402
from benchmarks.fault_campaign.mutations import Subject, learn, mutate  # noqa: E402

import preloaded  # noqa: E402
from dyno.worker.system import SILENCING_VARIABLES  # noqa: E402
from watched import Watch  # noqa: E402

PARTS = "kills disk together clock readonly mutations".split()


def subjects(campaign: Campaign, kinds: str = "") -> list[Subject]:
    """Return every kind of file that can be made here; with `kinds`, those with a matching name."""
    found: list[Subject] = []
    for make in (stored.subjects, data.subjects, models.subjects):
        found += _made(make, campaign)
    chosen = [one for one in found if not kinds or any(kind in one.kind for kind in kinds.split(","))]
    return [*learn(campaign, chosen), *models.unrunnable(campaign)]


def _made(make: Callable[[Campaign], Iterator[Subject]], campaign: Campaign) -> Iterator[Subject]:
    try:
        yield from make(campaign)
    except ImportError as e:
        print(f"without {e.name}: the kinds of files that need it, and those after them, are left out")


def mutations(campaign: Campaign, count: int, beside: int, kinds: str, *, started: bool) -> str:
    """Run forked, watched commands on mutated files; return the outcome in a sentence."""
    campaign.watch = Watch(campaign.folder, started=True)
    os.environ |= {
        **SILENCING_VARIABLES,
        **{name: campaign.watch.env.get(name, "") for name in ("PYTHONPATH", "LD_PRELOAD")},
    }
    with bounded_memory():
        server = preloaded.Server()  # imports of that process are not watched
    try:
        campaign.server = "" if started else server.path
        return mutate(campaign, subjects(campaign, kinds), count, beside)
    finally:
        server.stop()


def main() -> int:
    """Run the requested parts; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas: " + ", ".join(PARTS))
    parser.add_argument("--kinds", default="", help="only kinds of files with one of these words in their names")
    parser.add_argument("--beside", type=int, default=1, help="commands at a time that read mutated files")
    parser.add_argument("--started", action="store_true", help="start every command anew, which takes far longer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for everything that was made (default: a temporary one)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "study.toml").write_text(STUDY)
        campaign = Campaign(folder, given.seed)
        begin = time.monotonic()
        parts: dict[str, Callable[[], str]] = {
            "kills": lambda: world.kills(campaign, given.kills),
            "disk": lambda: world.full_disk(campaign),
            "together": lambda: world.two_studies(campaign),
            "clock": lambda: world.clock_set_back(campaign),
            "readonly": lambda: world.read_only(campaign),
            "mutations": lambda: mutations(campaign, given.mutations, given.beside, given.kinds, started=given.started),
        }
        for name in given.only.split(","):
            print(parts[name](), flush=True)
        for line in campaign.wrong:
            print(f"WRONG {line}")
        print(f"{len(campaign.wrong)} wrong in {time.monotonic() - begin:.0f} s (seed {given.seed})")
    return int(bool(campaign.wrong))


if __name__ == "__main__":
    sys.exit(main())
