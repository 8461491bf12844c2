"""A study on Slurm jobs: as two local processes through submitit, and on a fake Slurm of shell scripts."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import spreading
from dyno import UserError
from dyno.devices import blocks, spread
from dyno.devices.clusters import slurm_cluster
from dyno.devices.clusters.node import Node, NodeLost
from dyno.devices.clusters.slurm_cluster import SlurmHost, parse
from dyno.devices.clusters.slurm_job import DRIVER, LEFT, STARTED, Mail, Pilot
from dyno.devices.places import RunningBlock
from dyno.jobs.progress import Progress
from dyno.results import remarks
from dyno.worker import system
from dyno.worker.spec import Unfinished
from logged import Log
from refusals import refuses
from spreading import environments, kill_a_driver, records

pytest.importorskip("submitit")
LOCAL = "slurm=2,cluster=local"
two_cores = pytest.mark.skipif(system.physical_cores() < 2, reason="two jobs need two physical cores")
FAKE = {
    "srun": "",
    # The first job runs from a copy of the script, as in Slurm: submitit moves the original meanwhile.
    "sbatch": """
n=$(ls "$FAKE_SLURM"/*.sbatch 2>/dev/null | wc -l); n=$((n + 1)); cp "$1" "$FAKE_SLURM/$n.sbatch"
if [ $n = 1 ] && [ -z "$FAKE_DEAF" ]; then
  log=$(sed -n 's/^#SBATCH --error=//p' "$1")
  SLURM_JOB_ID=$n OMP_NUM_THREADS=3 setsid bash "$FAKE_SLURM/$n.sbatch" >>"${log//%j/$n}" 2>&1 &
  echo $! > "$FAKE_SLURM/$n.pid"
fi
echo "Submitted batch job $n"
""",
    "squeue": """
echo . >> "$FAKE_SLURM/asked"
[ $(wc -l < "$FAKE_SLURM/asked") -lt 3 ] && two="PENDING|Resources" || two="CANCELLED|None"
case "$*" in *--jobs=2*|*,2*) echo "2|$two";; esac
[ -n "$FAKE_DEAF" ] || kill -0 $(cat "$FAKE_SLURM/1.pid") 2>/dev/null && one=RUNNING || one=FAILED
case "$*" in *--jobs=1*) echo "1|$one|None";; esac
""",
    "scancel": """
echo "$*" >> "$FAKE_SLURM/cancelled"
""",
}


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a fake Slurm with scripts as commands."""
    fake = tmp_path / "slurm"
    fake.mkdir()
    for name, text in FAKE.items():
        (fake / name).write_text(f"#!/bin/bash\n{text}")
        (fake / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(fake))
    monkeypatch.setattr(slurm_cluster, "QUEUE_POLL_INTERVAL_S", 0.2)
    return fake


@two_cores
@pytest.mark.usefixtures("undisturbed")
def test_a_study_on_two_jobs_differs_only_in_its_places(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with environments() as around:
        spreading.run_on_two_places(fake_study, tmp_path / "two", LOCAL)
    assert around
    for env in around:
        assert env["OMP_NUM_THREADS"] == "7" and "CUDA_VISIBLE_DEVICES" not in env, "as where the command was given"
        assert not [name for name in env if name.startswith(("SUBMITIT_", "SLURM_"))]
    assert not (tmp_path / "two" / "slurm").exists()


@two_cores
@pytest.mark.usefixtures("undisturbed")
def test_the_block_of_a_killed_job_moves_and_its_rows_say_so(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, gone, start = list[RunningBlock](), list[str](), blocks.start_process

    def noted(*arguments: Any, **named: Any) -> RunningBlock:
        started.append(start(*arguments, **named))
        return started[-1]

    def kill(place: str, line: str) -> None:
        if place.endswith("#2") and "after round 1" in line and not gone:
            gone.append(place)
            host: Any = next(one for one in started if one.place.name == place).place.host
            spreading.kill(psutil.Process(int(host.id)))

    monkeypatch.setattr(blocks, "start_process", noted)
    log = Log(kill)
    spread.run(fake_study(on=LOCAL, batches=(1, 2, 3), rounds=4, seconds=0.2), tmp_path, log)
    assert gone, log.said
    moved = spreading.find_moved(tmp_path, 4)
    assert moved.placement is not None and not moved.placement.place.endswith("#2")
    assert any("lost with its node: job" in warning for warning in remarks.list_warnings(moved))


def test_losing_all_jobs_is_reported_and_keeps_measurements(fake_study: Any, tmp_path: Path) -> None:
    gone: list[str] = []

    def kill(place: str, line: str) -> None:
        if "after round 1" in line and not gone:
            gone.append(place)
            (host,) = [p for p in psutil.Process().children() if "submitit.local._local" in p.cmdline()]
            spreading.kill(host)

    log, study = Log(kill), fake_study(on="slurm=1,cluster=local", rounds=8, seconds=0.2)
    with pytest.raises(Unfinished, match="every device of the study was lost; the same command measures"):
        spread.run(study, tmp_path / "run", log)
    assert "its process was killed" in log.said[-1]
    before = _unfinished(tmp_path / "run")
    assert before
    spread.run(study, tmp_path / "run", Log())
    assert before.items() <= records(tmp_path / "run").items() and len(records(tmp_path / "run")) == 8


@two_cores
@pytest.mark.usefixtures("undisturbed")
def test_jobs_end_with_a_killed_driver_and_rounds_are_not_repeated(fake_study: Any, tmp_path: Path) -> None:
    study = fake_study(on=LOCAL, batches=(1, 2), rounds=4, seconds=0.2)
    folder = tmp_path / "run"
    measured = kill_a_driver(study, folder)
    before = {name: time for name, time in _unfinished(folder).items() if name in measured}
    log = Log()
    spread.run(study, folder, log)
    after = records(folder)
    assert before.items() <= after.items() and len(after) == 8, log.said
    assert not [*folder.glob("blocks/*")] and not (folder / "slurm").exists()
    assert not [line for line in log.said if "restarted, as" in line]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_process_group_is_reported_in_one_line(fake_study: Any, tmp_path: Path, number: int) -> None:
    """Local jobs receive the signal too, but leave the message to the command, which ends them."""
    study, folder = fake_study(on="slurm=1,cluster=local", rounds=50, until="rounds"), tmp_path / "run"
    spreading.stop(study, folder, lambda command: os.killpg(command.pid, number))
    assert not (folder / "slurm").exists(), "the jobs have ended"


def test_a_job_folder_that_cannot_be_removed_does_not_block_a_new_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed(folder: Path, ignore_errors: bool) -> None:
        (folder / "jobs-earlier" / "0").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(shutil, "rmtree", removed)
    monkeypatch.setattr(slurm_cluster, "_submit_job", _refuse)
    with (
        pytest.raises(UserError, match="handed in"),
        slurm_cluster.slurm_places("1,cluster=local", "cpu", tmp_path, Log()),
    ):
        pass
    assert len([*(tmp_path / "slurm").glob("jobs-*")]) == 2


def _refuse(*_: object) -> None:
    raise UserError("handed in")


def _unfinished(folder: Path) -> dict[str, int]:
    found = folder.glob("blocks/*/trials/*/*/record.json")
    return {"/".join(path.parts[-3:-1]): path.stat().st_mtime_ns for path in found}


@pytest.mark.usefixtures("undisturbed")
def test_waiting_jobs_are_reported_and_jobs_that_never_start_left_out(
    fake_study: Any, tmp_path: Path, fake_slurm: Path
) -> None:
    log = Log()
    study = fake_study(on="slurm=2,partition=fast,time=30,reservation=mine", rounds=2)
    spread.run(study, tmp_path / "run", log)
    said = "\n".join(log.said)
    assert "job 2 waits in the queue (Resources)" in said
    assert "job 2 did not start: it is cancelled (it wrote no log" in said
    assert len(records(tmp_path / "run")) == 2
    given = (fake_slurm / "1.sbatch").read_text()
    for option in ("--partition=fast", "--time=30", "--reservation=mine", "--exclusive", "--no-requeue"):
        assert f"#SBATCH {option}\n" in given
    assert {"1", "2"} <= set((fake_slurm / "cancelled").read_text().split())
    pid = int((fake_slurm / "1.pid").read_text())
    with suppress(psutil.NoSuchProcess):  # already ended
        job = psutil.Process(pid)
        assert job.status() == psutil.STATUS_ZOMBIE or not psutil.wait_procs([job], timeout=300)[1]


def test_a_silent_job_does_not_block_the_study(
    fake_study: Any, tmp_path: Path, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DEAF", "1")
    monkeypatch.setattr(slurm_cluster, "MINUTE_S", 0.01)
    said = r"no job .* can take part: job 1 did not respond within 2 min \(it wrote no"
    refuses(said, spread.run, fake_study(on="slurm=1,wait=2"), tmp_path / "run", Progress(quiet=True))
    assert "1" in (fake_slurm / "cancelled").read_text().split()


def test_a_job_ends_without_its_driver_or_when_slurm_ends_it(tmp_path: Path) -> None:
    folder = tmp_path / "0"
    folder.mkdir()
    Mail(tmp_path).send(DRIVER, 0, 1)
    Pilot(folder, 0.3, 0).serve()
    assert "did not respond" in str(Mail(folder).read(LEFT))
    stopped = Pilot(folder, 100.0, 0)
    stopped.interrupt(signal.SIGTERM, None)
    stopped.serve()
    assert "ended by SIGTERM" in str(Mail(folder).read(LEFT))
    shutil.rmtree(folder)
    Pilot(folder, 100.0, 0).serve()  # ends, as the study's folder is gone


def test_a_lost_idle_job_is_detected(tmp_path: Path, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake_slurm / "1.pid").write_text("none")  # makes Slurm report a failure
    monkeypatch.setattr(slurm_cluster, "QUEUE_POLL_INTERVAL_S", 0.0)
    host = SlurmHost(SimpleNamespace(job_id=1), Mail(tmp_path), "cpu", local=False)
    assert not host.gone, "what became of a job that hasn't started, the queue says"
    host.description = Node().describe("cpu")
    with pytest.raises(NodeLost, match="job 1: Slurm says that it is failed"):
        host.answer()
    assert host.gone


def test_a_second_start_of_a_job_does_nothing(tmp_path: Path) -> None:
    (tmp_path / STARTED).touch()
    code = f"from dyno.devices.clusters import slurm_job; slurm_job.main({str(tmp_path)!r}, {{'silent_s': 100.0}})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
    assert [path.name for path in tmp_path.iterdir()] == [STARTED]


def test_slurm_options_are_parsed() -> None:
    assert parse("").jobs == parse("cluster=local").jobs == 1
    wanted = parse("4, partition=gpu,time=60")
    assert (wanted.jobs, wanted.sbatch, wanted.minutes) == (4, {"partition": "gpu"}, {"time": 60, "wait": 10})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"on": "slrum=2"}, "unknown cluster 'slrum'; did you mean 'slurm'"),
        ({"on": "slurm=two"}, "whole number of jobs of at least 1, not 'two'; write e.g. --cluster slurm=4,part"),
        ({"on": "slurm=0"}, "needs a whole number of jobs of at least 1, not '0'"),
        ({"on": "slurm=2,partion=gpu"}, "unknown option 'partion' of --cluster slurm; did you mean 'partition'"),
        ({"on": "slurm=2,gpu"}, "'gpu' of --cluster slurm is not NAME=VALUE"),
        ({"on": "slurm=2,,time=1"}, "'' of --cluster slurm is not NAME=VALUE"),
        ({"on": "slurm=2,time=1:00"}, "time of --cluster slurm must be a whole number of minutes, not '1:00'"),
        ({"on": "slurm=2,time=1,time=2"}, "time is given twice"),
        ({"on": "slurm=2,cluster=locl"}, "unknown cluster 'locl' of --cluster slurm; did you mean 'local'"),
        ({"on": "slurm=2,cluster=local,partition=gpu"}, "where partition has no meaning"),
        ({"on": "slurm=99999,cluster=local"}, "99999 shares of the processor need as many physical cores"),
        ({"on": "slurm=2", "device": "cuda:0"}, "give --device cpu or cuda"),
        ({"on": "slurm=2", "peak": True}, "peak is for a study on one device"),
        ({"on": "slurm=2"}, "needs Slurm's commands"),
    ],
)
def test_invalid_settings_are_refused(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refuses(message, spread.run, fake_study(**fields), tmp_path / "run", Progress(quiet=True))
    assert not (tmp_path / "run").exists()


def test_a_linked_slurm_folder_is_not_followed(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    other = tmp_path / "other" / "jobs-1" / "0"
    other.mkdir(parents=True)
    (other / "id").write_text("--user=me")
    (tmp_path / "run" / "slurm").symlink_to(tmp_path / "other")
    asked: list[list[str]] = []
    monkeypatch.setattr(slurm_cluster, "cancel", asked.append)
    with pytest.raises(UserError, match=r"run holds files that Dyno did not write \(slurm\)"):
        spread.run(fake_study(on="slurm=1,cluster=local"), tmp_path / "run", Progress(quiet=True))
    assert (other / "id").is_file() and not asked


def test_a_plan_needs_no_job(fake_study: Any) -> None:
    with spread.expected_places(fake_study(on="slurm=9,partition=gpu", device="cuda")) as found:
        assert [(place.device, place.host) for place in found] == [("cuda:0", None)]


def test_a_missing_submitit_is_reported_with_its_extra(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    refuses(r"inference-dyno\[slurm\]", spread.run, fake_study(on="slurm"), tmp_path / "run", Progress(quiet=True))
