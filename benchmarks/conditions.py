"""Conditions that spoil a measurement, each injected beside a real `dyno time`: each must raise its own warning.

    python benchmarks/conditions.py [--only NAME]

A quiet machine must raise no warning. The quota is a real control group. Unequal cores and heat are files in a folder
mounted over /sys/devices/system/cpu in the command's own namespace; both need root. Products in TF32 and bfloat16
inside an FP32 engine are PyTorch's own, with factors rounded beforehand. Not injected: a GPU's throttle reasons.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dyno.formatting import markdown_table
from dyno.worker import system

SOURCE = Path(__file__).resolve().parents[1] / "src"
NETWORK = "from torch import nn\n\n\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU())\n"
HEAT = "thermal_throttle/core_throttle_count"
Wrap = Callable[[list[str]], list[str]]  # wraps a command so that it runs under the condition


@dataclass(frozen=True)
class Condition:
    """A condition, the pattern of its warning, and the context that injects it into a command."""

    name: str
    warning: str
    inject: Callable[[Path], AbstractContextManager[Wrap]]


@contextmanager
def leave_quiet(_: Path) -> Iterator[Wrap]:
    """Inject nothing."""
    yield lambda command: command


@contextmanager
def limit_processors(_: Path) -> Iterator[Wrap]:
    """Limit the command to half a processor by a control group, version 1 or 2."""
    versions = {"cpu": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}, "": {"cpu.max": "50000 100000"}}
    version = next(name for name in versions if (system.CGROUPS_DIR / name / "cgroup.procs").is_file())
    group = system.CGROUPS_DIR / version / f"dyno-conditions-{os.getpid()}"
    group.mkdir()
    try:
        for name, text in versions[version].items():
            (group / name).write_text(text)
        yield lambda command: ["sh", "-c", f"echo $$ > {group}/cgroup.procs; exec {shlex.join(command)}"]
    finally:
        group.rmdir()


def keep_busy(cpu: int) -> None:
    """Compute on one processor until killed."""
    os.sched_setaffinity(0, {cpu})
    while True:
        pass


@contextmanager
def burn_last_processor(_: Path) -> Iterator[Wrap]:
    """Keep the last processor busy with another program."""
    burner = multiprocessing.get_context("fork").Process(target=keep_busy, args=(max(os.sched_getaffinity(0)),))
    burner.start()
    try:
        yield lambda command: command
    finally:
        burner.kill()
        burner.join()


def fake_processors(folder: Path, name: str, values: list[int]) -> Wrap:
    """Write a file per processor; return a wrapper that shows the command this folder as the system's."""
    for cpu, value in enumerate(values):
        file = folder / f"cpu{cpu}" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    mount = f"mount --bind {shlex.quote(str(folder))} {system.CPUS_DIR}"
    return lambda command: ["unshare", "-m", "sh", "-c", f"{mount} && exec {shlex.join(command)}"]


@contextmanager
def mix_cores(folder: Path) -> Iterator[Wrap]:
    """Give every second core half the capacity."""
    yield fake_processors(folder, "cpu_capacity", [1024 >> cpu % 2 for cpu in range(os.cpu_count() or 1)])


@contextmanager
def overheat(folder: Path) -> Iterator[Wrap]:
    """Raise the count of thermal throttling ten times a second."""
    wrap, ended = fake_processors(folder, HEAT, [0] * (os.cpu_count() or 1)), threading.Event()

    def count() -> None:
        events = 0
        while not ended.wait(0.1):
            events += 1
            beside = folder / "next"
            beside.write_text(f"{events}\n")
            beside.replace(folder / "cpu0" / HEAT)

    counting = threading.Thread(target=count)
    counting.start()
    try:
        yield wrap
    finally:
        ended.set()
        counting.join()


ROUND_FACTORS = """
import torch

def round_bits(values):
    # Round float32 to {bits} bits, as the engine's units do.
    lost = 24 - {bits}
    return ((values.view(torch.int32) + (1 << lost - 1)) >> lost << lost).view(torch.float32)

def round_factors(multiply):
    return lambda a, b, *more, **named: multiply(round_bits(a.contiguous()), round_bits(b.contiguous()), *more, **named)

torch.matmul = round_factors(torch.matmul)
torch.nn.functional.conv2d = torch.conv2d = round_factors(torch.conv2d)
"""


def round_products(bits: int) -> Callable[[Path], AbstractContextManager[Wrap]]:
    """Return a context in which PyTorch multiplies with `bits` bits and reports nothing."""

    @contextmanager
    def inject(folder: Path) -> Iterator[Wrap]:
        (folder / "sitecustomize.py").write_text(ROUND_FACTORS.replace("{bits}", str(bits)))
        yield lambda command: ["env", f"PYTHONPATH={folder}{os.pathsep}{SOURCE}", *command]

    return inject


CONDITIONS = (
    Condition("quiet", "", leave_quiet),
    Condition("quota of half a processor", "the limit of 0.5 processors", limit_processors),
    Condition("another program on one processor", "other programs kept", burn_last_processor),
    Condition("unequal cores", "cores of different speed", mix_cores),
    Condition("clock lowered against heat", "lowered their clock against heat", overheat),
    Condition("TF32 inside an FP32 engine", "products keep 11 bits of 24", round_products(11)),
    Condition("bfloat16 inside an FP32 engine", "products keep 8 bits of 24", round_products(8)),
)


def collect_warnings(condition: Condition) -> list[str]:
    """Run `dyno time` under the condition; return its warnings."""
    with tempfile.TemporaryDirectory() as scratch:
        work, folder = Path(scratch), Path(scratch) / "cpu"
        (work / "net.py").write_text(NETWORK)
        (work / "cpu").mkdir()
        run = (
            "-m dyno time net.py:build --size 64 --backend pytorch --rounds 1 --seconds 1 --warmup 1 --out run".split()
        )
        with condition.inject(folder) as wrap:
            done = subprocess.run(
                wrap([sys.executable, *run]),
                cwd=work,
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "PYTHONPATH": str(SOURCE)},
            )
        records = [json.loads(file.read_text()) for file in work.glob("run/trials/*/r*/record.json")]
        if done.returncode or not records:
            raise SystemExit(f"{condition.name}: dyno time failed: {(done.stderr or done.stdout)[-800:]}")
        return [text for record in records for text in record["warnings"]]


def is_as_expected(condition: Condition, warnings: list[str]) -> bool:
    """Return whether the condition raised its warning, or the quiet machine raised none."""
    if condition.warning:
        return any(re.search(condition.warning, text) for text in warnings)
    return not any(re.search(other.warning, text) for other in CONDITIONS if other.warning for text in warnings)


def main() -> int:
    """Print a row for each condition; return 1 if any is not as expected."""
    parser = argparse.ArgumentParser(description="Injected conditions and the warnings they raise.")
    parser.add_argument("--only", choices=[each.name for each in CONDITIONS])
    only = parser.parse_args().only
    rows, good = [], True
    for condition in CONDITIONS:
        if only in (None, condition.name):
            warnings = collect_warnings(condition)
            is_good = is_as_expected(condition, warnings)
            good = good and is_good
            wanted = condition.warning or "none"
            rows.append([condition.name, wanted, "yes" if is_good else "NO", "; ".join(warnings) or "none"])
    print(markdown_table(["condition", "warning expected", "as expected", "seen"], rows, [False] * 4))
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
