"""Shared helpers for studies spread over places: records' modification times, and a driver that can be killed."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil

from dyno import Study
from dyno.devices import spread
from dyno.results.trial_result import Results, TrialResult, load_run
from dyno.study.plan import expand
from logged import Log

PATIENCE_S = 600  # limit for steps that take seconds on an idle machine
MODULE = "dyno.devices.blocks"
MARK = "DYNO_TESTS_OF_SPREADING"
TWO_BLOCKS = {"batches": (1, 2), "backends": ("fake@latency_ms=0.1", "fake@latency_ms=0.4"), "rounds": 2}
DRIVER = """
import sys; from pathlib import Path; from dyno import Study; from dyno.jobs.progress import Progress
from dyno.devices import one_host, spread
one_host.measure_devices = lambda *asked: one_host.StudyPlaces(asked[2])
spread.run(Study.from_toml(Path(sys.argv[1])), Path(sys.argv[2]), Progress(quiet=True))
"""


def records(folder: Path) -> dict[str, int]:
    """Return each record's modification time (ns) by trial and round."""
    return {"/".join(path.parts[-3:-1]): path.stat().st_mtime_ns for path in folder.glob("trials/*/*/record.json")}


def expected(study: Study) -> set[str]:
    """Return the records that the study has on one device, by trial and round."""
    return {f"{one.trial.id}/r{number}" for one in expand(study) for number in range(study.rounds)}


def run_twice(fake_study: Callable[..., Study], folder: Path, **where: str) -> Results:
    """Run a study of two blocks twice: the rows equal those of one device, and the second run measures nothing."""
    study, log, again = fake_study(**TWO_BLOCKS, **where), Log(), Log()
    spread.run(study, folder, log)
    assert records(folder).keys() == expected(fake_study(**TWO_BLOCKS)), log.said
    results, before = load_run(folder), records(folder)
    assert {t.status for t in results} == {"ok"} and not [*folder.glob("blocks/*")]
    spread.run(study, folder, again)
    assert (records(folder), again.said) == (before, [])
    return results


def run_on_two_places(fake_study: Callable[..., Study], folder: Path, cluster: str) -> None:
    """Run a study on two places of the cluster as in `run_twice`; the places share no processors."""
    results = run_twice(fake_study, folder, on=cluster)
    own = {p.place: {cpu for t in results if t.placement == p for r in t.rounds for cpu in r.facts.affinity}
           for p in {t.placement for t in results} if p is not None}  # fmt: skip
    assert len(own) == 2 and not set.intersection(*own.values())


def find_moved(folder: Path, rounds: int) -> TrialResult:
    """Return the trial that lost its place, in a run with all rounds of all trials."""
    results = load_run(folder)
    assert {t.status for t in results} == {"ok"} and all(len(t.rounds) == rounds for t in results)
    (moved,) = [t for t in results if t.placement and t.placement.lost]
    return moved


def wait_for(find: Callable[[], object], command: subprocess.Popen[Any], what: str) -> None:
    """Wait until `find` is true; fail if the command ends first or after PATIENCE_S."""
    until = time.monotonic() + PATIENCE_S
    while not find():
        assert command.poll() is None, f"the command ended without {what}"
        assert time.monotonic() < until, f"the command had no {what} in {PATIENCE_S} s"
        time.sleep(0.05)


def list_measured(folder: Path) -> list[Path]:
    """Return the records of unfinished blocks."""
    return [*folder.glob("blocks/*/trials/*/*/record.json")]


def stop(study: Study, folder: Path, send: Callable[[subprocess.Popen[str]], None]) -> str:
    """Send a signal to `dyno run` after the first record; assert the one-line end, and return standard error."""
    (folder.parent / "study.toml").write_text(study.to_toml())
    command = subprocess.Popen(
        [sys.executable, "-m", "dyno", "run", str(folder.parent / "study.toml"), "--out", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    wait_for(lambda: list_measured(folder), command, "a first record")
    send(command)
    _, said = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 130
    assert said.splitlines()[-1].startswith("dyno: stopped; what was measured is stored") and "Traceback" not in said
    return said


def blocks() -> list[psutil.Process]:
    """Return this machine's processes of blocks."""
    return [p for p in psutil.process_iter(["cmdline"]) if MODULE in (p.info["cmdline"] or ())]


def kill(process: psutil.Process) -> None:
    """Kill the process and its descendants, some of which may already be gone."""
    for one in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            one.kill()


@contextmanager
def environments() -> Iterator[list[dict[str, str]]]:
    """Collect the environments of block processes started by this process meanwhile, one per process and look (every
    20 ms)."""
    seen, over, mark = list[dict[str, str]](), Event(), secrets.token_hex()
    os.environ[MARK] = mark

    def look() -> None:
        while not over.wait(0.02):
            for process in blocks():
                with suppress(psutil.Error):  # the process is just ending
                    environment = process.environ()
                    still = MODULE in process.cmdline()  # else a block's job, which had this command line before exec
                    ours = environment.get(MARK) == mark  # else a process of another test suite on this machine
                    seen.extend([environment] if still and ours else [])

    thread = Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
        del os.environ[MARK]


def kill_a_driver(
    study: Study, folder: Path, before: Callable[[subprocess.Popen[bytes]], None] = lambda _: None
) -> dict[str, int]:
    """Run the study in a process, kill it after the first record of a block, and assert that its blocks end.
    Return the records' modification times (ns) by trial and round. `before` is called with the stopped process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.parent / "study.toml"
    file.write_text(study.to_toml())
    others = {p.pid for p in blocks()}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(file), str(folder)])
    try:
        wait_for(lambda: list_measured(folder), driver, "a first record")
        driver.send_signal(signal.SIGSTOP)  # stopped, so that it neither ends nor moves records before the kill
        kept = {"/".join(path.parts[-3:-1]): path.stat().st_mtime_ns for path in list_measured(folder)}
        measuring = [p for p in blocks() if p.pid not in others]
        assert measuring
        before(driver)
    finally:
        driver.kill()
        driver.wait()
    assert not psutil.wait_procs(measuring, timeout=180)[1], "none goes on without the driver"
    return kept
