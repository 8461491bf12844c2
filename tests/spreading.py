"""What tests of studies spread over places share: when records were written, and a driver that can be killed."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import psutil

from dyno import Study
from dyno.study.plan import expand

MODULE = "dyno.devices.blocks"
MARK = "DYNO_TESTS_OF_SPREADING"
DRIVER = """
import sys; from pathlib import Path; from dyno import Study; from dyno.jobs.progress import Progress
from dyno.devices import one_host, spread
one_host.measure_devices = lambda *asked: one_host.StudyPlaces(asked[2])
spread.run(Study.from_toml(Path(sys.argv[1])), Path(sys.argv[2]), Progress(quiet=True))
"""


def records(folder: Path) -> dict[str, int]:
    """When every record was written, by trial and round."""
    return {"/".join(path.parts[-3:-1]): path.stat().st_mtime_ns for path in folder.glob("trials/*/*/record.json")}


def expected(study: Study) -> set[str]:
    """The records that the study has where it runs on one device, by trial and round."""
    return {f"{one.trial.id}/r{number}" for one in expand(study) for number in range(study.rounds)}


def blocks() -> list[psutil.Process]:
    """The processes of blocks on this machine."""
    return [p for p in psutil.process_iter(["cmdline"]) if MODULE in (p.info["cmdline"] or ())]


def kill(process: psutil.Process) -> None:
    """Kill the process with all that it started, of which some may end at that by themselves."""
    for one in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            one.kill()


@contextmanager
def environments() -> Iterator[list[dict[str, str]]]:
    """What the processes of blocks that are started meanwhile from here have around them, of each moment at which one
    ran."""
    seen, over, mark = list[dict[str, str]](), Event(), secrets.token_hex()
    os.environ[MARK] = mark

    def look() -> None:
        while not over.wait(0.02):
            for process in blocks():
                with suppress(psutil.Error):  # it just ends
                    environment = process.environ()
                    still = MODULE in process.cmdline()  # else it was a job of a block, called so until it is executed
                    ours = environment.get(MARK) == mark  # else another suite's on this machine
                    seen.extend([environment] if still and ours else [])

    thread = Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
        del os.environ[MARK]


def kill_a_driver(study: Study, folder: Path) -> Collection[str]:
    """Run the study in a process that is killed once a block has something measured, and see that nothing of it goes
    on; what was measured by then, by trial and round."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.parent / "study.toml"
    file.write_text(study.to_toml())
    before = {p.pid for p in blocks()}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(file), str(folder)])
    while not (kept := [*folder.glob("blocks/*/trials/*/*/record.json")]):
        assert driver.poll() is None, "the driver has a block measured first"
        time.sleep(0.05)
    measuring = [p for p in blocks() if p.pid not in before]
    assert measuring
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    assert not psutil.wait_procs(measuring, timeout=180)[1], "none goes on without the driver"
    return {"/".join(path.parts[-3:-1]) for path in kept}
