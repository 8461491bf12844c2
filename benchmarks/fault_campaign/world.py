"""Faults around a study: kills, a full disk, concurrent studies, a clock set back, read-only folders."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
from benchmarks.fault_campaign.campaign import STUDY, Campaign

from dyno.results.files import read_npz

# Sets the C library's clock back a year at a given second of the monotonic clock, for a process and its children.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

int clock_gettime(clockid_t which, struct timespec *at) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(which, at);
    const char *from = getenv("CLOCK_SET_BACK");
    struct timespec now;
    if (which != CLOCK_REALTIME || !from || real(CLOCK_MONOTONIC, &now) || now.tv_sec < atol(from)) return code;
    at->tv_sec -= 365 * 86400;
    return code;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    int code = clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return code;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""
CAPABILITIES_TO_IGNORE_PERMISSIONS = 1, 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
DROP_FROM_BOUNDING_SET = 24  # prctl's PR_CAPBSET_DROP


def good(run: Path) -> dict[str, bytes]:
    """Return the run's successful records, by relative path."""
    found = {}
    for path in run.glob("trials/*/r*/record.json"):
        content = path.read_bytes()
        if json.loads(content)["status"] == "ok":
            found[str(path.relative_to(run))] = content
    return found


def not_whole(run: Path) -> Iterator[str]:
    """Yield the defects of a finished study: two trials should have three successful rounds each, with readable
    samples."""
    records = good(run)
    if len(records) != 6:
        yield f"{run.name}: {len(records)} of 6 rounds are there"
    for place in records:
        names = {m["samples"] for m in json.loads(records[place])["measurements"] if m["samples"]}
        if not names <= read_npz(run / Path(place).with_name("samples.npz")).keys():
            yield f"{run.name}: {place} has no samples"


def kills(campaign: Campaign, count: int) -> str:
    """Kill parents and workers at random moments; return the outcome in a sentence."""
    whom: Counter[str] = Counter()
    number = 0
    study = campaign.folder / "study.toml"
    begin = time.monotonic()
    campaign.ended(campaign.start("run", study, "--out", campaign.folder / "undisturbed"), "nothing is killed")
    whole_s = time.monotonic() - begin
    while sum(whom[who] for who in ("parent", "worker")) < count:
        run = campaign.folder / f"killed{number}"
        number += 1
        code, victim = -1, ""
        while code != 0 and victim != "nothing" and whom["parent"] + whom["worker"] < count:
            before = good(run)
            process = campaign.start("run", study, "--out", run)
            victim = _strike(campaign, process, whole_s)
            if victim == "parent":
                process.communicate()
            else:
                code, _, _ = campaign.ended(process, f"kill of a {victim}")
            whom[victim] += 1
            after = good(run)
            lost = [place for place, content in before.items() if after.get(place) != content]
            campaign.wrong += [f"kill of a {victim}: {place} was lost or measured twice" for place in lost]
        campaign.run("the end", "run", study, "--out", run, "--retry-failed")
        campaign.wrong += list(not_whole(run))
    left = list((campaign.folder / "cache").glob("artifacts/.*.*"))
    campaign.wrong += [f"{path.name} stays in the cache" for path in left]
    return f"kills: {whom['parent']} of parents, {whom['worker']} of workers in {number} studies"


def _strike(campaign: Campaign, process: subprocess.Popen[str], whole_s: float) -> str:
    """Wait for a random moment within `whole_s`, kill the command or a worker, and return the victim's name."""
    parent, of_a_worker = psutil.Process(process.pid), campaign.chance.random() < 0.5
    time.sleep(campaign.chance.uniform(0, whole_s))
    while process.poll() is None:
        try:
            workers = parent.children(recursive=True) if of_a_worker else [parent]
            if workers:
                campaign.chance.choice(workers).send_signal(signal.SIGKILL)
                return "worker" if of_a_worker else "parent"
        except psutil.NoSuchProcess:
            continue
        time.sleep(0.01)
    return "nothing"


def full_disk(campaign: Campaign, powers: Iterable[int] = range(0, 18, 2)) -> str:
    """Limit the size of files to each power of two in turn; return the outcome in a sentence."""
    ended: Counter[int] = Counter()
    words = ["run", campaign.folder / "study.toml", "--rounds", 1, "--out"]
    for power in powers:
        run = campaign.folder / f"full{power}"
        process = campaign.start(*words, run, preexec_fn=_limited(1 << power))
        code, _, err = campaign.ended(process, f"files of at most {1 << power} bytes")
        ended[code] += 1
        if code == 0 and len(good(run)) != 2:
            campaign.wrong.append(f"files of at most {1 << power} bytes: ended well without its records: {err[-200:]}")
        code, _, err = campaign.run("with room again", *words, run, "--retry-failed")
        if code or len(good(run)) != 2:
            campaign.wrong.append(f"after files of at most {1 << power} bytes: exit code {code}: {err[-200:]}")
    codes = ", ".join(f"{n} with exit code {code}" for code, n in sorted(ended.items()))
    return f"full disk: {sum(ended.values())} limits, {codes}; all were finished with room again"


def _limited(most: int) -> Callable[[], None]:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write then fails with EFBIG, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    return limit


def two_studies(campaign: Campaign, times: int = 3) -> str:
    """Run a study twice and another once at one time, in one folder: one measures, the others must be refused."""
    other = campaign.folder / "other.toml"
    other.write_text(STUDY.replace("latency_ms=0.2", "latency_ms=0.3"))
    refused = 0
    for number in range(times):
        run = campaign.folder / f"shared{number}"
        files = [campaign.folder / "study.toml", campaign.folder / "study.toml", other]
        started = [campaign.start("run", file, "--out", run) for file in files]
        ends = [campaign.ended(process, "a study into a folder in use") for process in started]
        refused += sum(code == 2 for code, _, _ in ends)
        for code, _, err in ends:
            if code == 2 and "in use" not in err and "another study" not in err:
                campaign.wrong.append(f"a study into a folder in use: {err[-200:]}")
        if not any(code == 0 for code, _, _ in ends):
            campaign.wrong.append(f"{run.name}: all three studies at once failed")
        campaign.run("the end", "run", files[0], "--out", run)
        if len(good(run)) < 6:
            campaign.wrong.append(f"{run.name}: {len(good(run))} rounds are there after studies at once")
    return f"two studies: {times} folders with three at once, {refused} told that it is in use"


def clock_set_back(campaign: Campaign) -> str:
    """Set the clock back a year in mid-study, so that earlier files lie in the future; return the outcome."""
    source, shim = campaign.folder / "clock.c", campaign.folder / "clock.so"
    source.write_text(CLOCK)
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return "clock set back: no C compiler here, so not tried"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    run = campaign.folder / "set_back"
    words = ["run", campaign.folder / "study.toml", "--out", run]
    campaign.prepare(*words, "--rounds", 1)
    before = good(run)
    preloaded = ":".join(filter(None, [str(shim), campaign.environment().get("LD_PRELOAD", "")]))
    back = {"LD_PRELOAD": preloaded, "CLOCK_SET_BACK": str(int(time.monotonic()) + 4)}
    process = campaign.start(*words, env={**campaign.environment(), **back})
    code, _, err = campaign.ended(process, "the clock is set back")
    if code:
        campaign.wrong.append(f"the clock is set back: exit code {code}: {err[-200:]}")
    after = good(run)
    lost = [place for place, content in before.items() if after.get(place) != content]
    campaign.wrong += [f"the clock is set back: {place} was measured again" for place in lost]
    campaign.wrong += list(not_whole(run))
    years = Counter(json.loads(content)["started"][:4] for content in after.values())
    if len(years) < 2:
        campaign.wrong.append(f"the clock is set back: nothing was measured after it: {dict(years)}")
    for command in ("show", "report", "list"):
        campaign.run("after the clock was set back", command, run)
    return f"clock set back: rounds in {' and '.join(sorted(years))}, all kept"


def read_only(campaign: Campaign) -> str:
    """Run commands on read-only folders: readers must succeed, writers must end with one line; return a count."""
    run, place = campaign.folder / "kept_run", campaign.folder / "closed"
    study = campaign.folder / "study.toml"
    campaign.prepare("run", study, "--out", run)
    records = good(run)
    place.mkdir()
    cache = campaign.folder / "closed_cache"
    cache.mkdir()
    for path in [run, *run.rglob("*"), place, cache]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    expected: list[tuple[int, list[object], Path | None]] = [
        (0, ["show", run], None), (0, ["runs", "list", run], None), (2, ["report", run], None),
        (0, ["report", run, "--out", campaign.folder / "page"], None),
        (2, ["run", study, "--rounds", 4, "--out", run], None), (2, ["run", study, "--out", place / "run"], None),
        (0, ["run", study, "--rounds", 1, "--out", campaign.folder / "beside_closed"], cache),
        (2, ["runs", "rm", run], None),
    ]  # fmt: skip
    for wanted, words, closed in expected:
        environment = campaign.environment(closed)
        process = campaign.start(*words, env=environment, preexec_fn=_obey_permissions)
        code, _, err = campaign.ended(process, f"read-only: dyno {words[0]}")
        if code != wanted:
            campaign.wrong.append(f"read-only: dyno {words[0]}: exit code {code}, not {wanted}: {err[-300:]}")
    for path in [run, *run.rglob("*"), place, cache]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    if good(run) != records:
        campaign.wrong.append("read-only: records have changed")
    return f"read-only: {len(expected)} commands"


def _obey_permissions() -> None:
    """Drop the capabilities by which root ignores permissions."""
    if os.geteuid() == 0:
        for capability in CAPABILITIES_TO_IGNORE_PERMISSIONS:
            ctypes.CDLL(None).prctl(DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
