"""How much faster the second build of a TensorRT engine is, with the timing cache of the first: at least 5 x.

    python benchmarks/timing_cache.py [MODEL] [--precision fp16] [--batch 1] [--python PATH]

Both builds share a new cache folder, so that nothing built before can help the first.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace

from dyno import Study
from dyno.jobs.progress import Progress
from dyno.runner.execute import Files
from dyno.study.plan import expand
from dyno.worker.facts.files import TimingUse
from dyno.worker.record import Record

WANTED = 5.0


def build_seconds(study: Study, files: Files, number: int) -> tuple[float, TimingUse]:
    """Return TensorRT's seconds for build `number`, and its report on the timing cache."""
    (planned,) = expand(replace(study, backends=(f"{study.backends[0]}@build={number}",)))
    if planned.refusal or planned.trial.recipe is None:
        print(f"not measured: {planned.refusal}")
        sys.exit(0)
    made = files.make_file(planned.trial.recipe)
    if isinstance(made, Record):
        sys.exit(f"not measured: {made.reason}")
    return made.made_by.build_s or 0.0, made.made_by.timing_cache or TimingUse()


def main() -> int:
    """Print both times and their ratio; return 1 if it misses the limit."""
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("model", nargs="?", default="torchvision:resnet18")
    args.add_argument("--precision", default="fp16")
    args.add_argument("--batch", type=int, default=1)
    args.add_argument("--python", default=os.environ.get("DYNO_TENSORRT_PYTHON", ""))
    given = args.parse_args()
    study = Study(
        models=(given.model,), backends=("tensorrt",), precisions=(given.precision,), batches=(given.batch,),
        device="cuda:0", runtime={"tensorrt": {"python": given.python}} if given.python else {},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as cache:
        os.environ["DYNO_CACHE"] = cache
        files = Files(Progress(quiet=True))
        (first, timed), (second, timed_again) = (build_seconds(study, files, k) for k in (1, 2))
    print(f"first build {first:.2f} s, second {second:.2f} s: {first / second:.1f} x faster (wanted {WANTED:g})")
    print(f"tactics timed: {timed.timed}, then {timed_again.timed}. {timed_again.complaint}")
    return int(first / second < WANTED)


if __name__ == "__main__":
    sys.exit(main())
