"""A study on a Ray cluster of two nodes, each a share of this machine: every block runs on one node."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import spreading
from dyno import UserError
from dyno.devices import spread
from dyno.devices.clusters import ray_cluster
from dyno.jobs.progress import Progress
from dyno.results import remarks
from dyno.results.trial_result import load_run
from dyno.worker import system
from logged import Log
from refusals import refuses
from spreading import kill_a_driver, records

pytest.importorskip("ray")
two_cores = pytest.mark.skipif(system.physical_cores() < 2, reason="two nodes need two physical cores")
pytestmark = [pytest.mark.slow, two_cores]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray cluster of two nodes with one processor each."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ray_cluster.RAY_VARIABLES.items():
            patch.setenv(name, value)
        two = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        two.add_node(num_cpus=1)
        two.wait_for_nodes(spreading.PATIENCE_S)
        yield two
        two.shutdown()


@pytest.mark.usefixtures("undisturbed")
def test_a_study_on_two_nodes_differs_only_in_its_places(
    fake_study: Any, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    spreading.run_on_two_places(fake_study, tmp_path / "two", f"ray={cluster.address}")
    assert "OMP_NUM_THREADS" not in next((tmp_path / "two").glob("trials/*/r0/job.json")).read_text()
    with pytest.raises(UserError, match=r"on=ray=.*this command says no on"):
        spread.run(fake_study(**spreading.TWO_BLOCKS), tmp_path / "two", Log())


@pytest.mark.usefixtures("undisturbed")
def test_the_block_of_a_lost_node_moves_and_its_rows_say_so(fake_study: Any, tmp_path: Path, cluster: Any) -> None:
    third, gone = cluster.add_node(num_cpus=1), []
    cluster.wait_for_nodes(spreading.PATIENCE_S)

    def kill(place: str, line: str) -> None:
        if place.endswith("#3") and "after round 1" in line and not gone:
            gone.append(place)
            cluster.remove_node(third, allow_graceful=False)

    log = Log(kill)
    fields = {"batches": (1, 2, 3), "rounds": 5, "seconds": 0.2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system, "core_threads", lambda: [(k,) for k in range(3)])
        patch.setattr(ray_cluster, "_choose_processors", _anywhere)
        spread.run(fake_study(on=f"ray={cluster.address}", **fields), tmp_path, log)
    assert gone, log.said
    moved = spreading.find_moved(tmp_path, 5)
    assert moved.placement is not None and not moved.placement.place.endswith("#3")
    assert any("lost with its node" in warning for warning in remarks.list_warnings(moved))


def _anywhere(about: Any, count: int, taken: Any, host: Any) -> Any:
    """Return a place with shared processors, as there may be more nodes than cores."""
    return ray_cluster.Place(about.host, "cpu", about.card, threads=1, host=host)


def test_a_node_that_just_died_is_not_used(cluster: Any) -> None:
    third = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes(spreading.PATIENCE_S)
    cluster.remove_node(third, allow_graceful=False)
    with ray_cluster.hold_places(cluster.address, "cpu") as places:  # Ray still lists it
        assert len(places) == 2


@pytest.mark.usefixtures("undisturbed")
def test_blocks_end_with_a_killed_driver_and_the_study_resumes(fake_study: Any, tmp_path: Path, cluster: Any) -> None:
    study = fake_study(on=f"ray={cluster.address}", batches=(1, 2), rounds=4, seconds=0.2)
    folder = tmp_path / "run"
    before = kill_a_driver(study, folder).keys()
    spread.run(study, folder, Log())
    assert before <= records(folder).keys() and len(records(folder)) == 8
    assert not [*folder.glob("blocks/*")]


def test_a_terminated_command_reports_it_in_one_line(fake_study: Any, tmp_path: Path, cluster: Any) -> None:
    """Ray's signal handler prints traces and exits at once."""
    study = fake_study(on=f"ray={cluster.address}", rounds=50, until="rounds")
    assert "SIGTERM" not in spreading.stop(study, tmp_path / "run", subprocess.Popen.terminate)
    assert load_run(tmp_path / "run").trials, "what was measured can be read before its block is at its end"


def test_termination_while_ray_starts_is_reported_in_one_line(fake_study: Any, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(fake_study(on="ray=local").to_toml())
    words = [sys.executable, "-m", "dyno", "run", str(tmp_path / "study.toml"), "--out", str(tmp_path / "run")]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    spreading.wait_for(lambda: "gcs_server" in "".join(_children(command.pid)), command, "process of Ray")
    command.terminate()
    _, said = command.communicate(timeout=spreading.PATIENCE_S)
    assert command.returncode == 130
    assert said.splitlines() == ["dyno: stopped; what was measured is stored, the same command continues from there"]


def _children(pid: int) -> list[str]:
    """Return the names of the process's living children."""
    names = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):
            names.append(child.name())
    return names


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"on": "rey"}, "unknown cluster 'rey'; did you mean 'ray'"),
        ({"on": "ray", "device": "cuda:0"}, "give --device cpu or cuda"),
        ({"on": "ray", "energy": True}, "energy is for a study on one device"),
        ({"on": "ray="}, "--cluster ray= names nothing; write ray=HOST:PORT"),
        ({"on": "ray=:6379"}, "':6379' is not the address of a Ray cluster; write --cluster ray=HOST:PORT"),
        ({"on": "ray=127.0.0.1"}, "'127.0.0.1' is not the address of a Ray cluster"),
        ({"on": "ray=http://127.0.0.1:1"}, "'http://127.0.0.1:1' is not the address of a Ray cluster"),
        ({"on": "ray=127.0.0.1:99999"}, "'127.0.0.1:99999' is not the address of a Ray cluster"),
        ({"on": "ray=127.0.0.1:1"}, "no Ray cluster answers at 127.0.0.1:1: "),
    ],
)
def test_invalid_settings_are_refused(fake_study: Any, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    refuses(message, spread.run, fake_study(**fields), tmp_path, Progress(quiet=True))


def test_a_cluster_without_the_device_is_refused(fake_study: Any, tmp_path: Path, cluster: Any) -> None:
    with pytest.raises(UserError, match="no node of the Ray cluster has a GPU"):
        spread.run(fake_study(on=f"ray={cluster.address}", device="cuda"), tmp_path, Progress(quiet=True))


def test_a_missing_ray_is_reported_with_its_extra(
    fake_study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refuses(r"inference-dyno\[ray\]", spread.run, fake_study(on="ray"), tmp_path, Progress(quiet=True))
