"""Energy of an image and memory, each by its counter, from telemetry with known contents."""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import synthetic
from dyno.report.tables import make_tables, trial_table
from dyno.results import energy
from dyno.results.energy import Energy, Meter, estimate_power
from dyno.results.trial_result import load_run
from synthetic import Way
from synthetic_card import Card

RATE, IDLE_W = 50.0, 40.0
WATTS = (140.0, 150.0, 145.0)  # watts of the rounds, while images run


@dataclass
class Machine:
    """A stored run with one trial that also measured its energy."""

    folder: Path
    counter: str = "cpu_energy"

    def write(self, watts: tuple[float, ...] = WATTS, others: float = 0.0) -> None:
        """Write each round: 5 s at half the power, then 3 s at full load."""
        at = np.arange(0.25, 8.0, 0.25)
        for number, each in enumerate(watts):
            joules = np.where(at < 5, each / 2 * at, each / 2 * 5 + each * (at - 5))
            self._telemetry(self._round(number), at, 1000.0 + joules, np.zeros(len(at)), 1 + math.ceil(others))
            path = self._round(number) / "record.json"
            record = json.loads(path.read_text())
            begin = 500.0 if self.counter == "cpu_energy" else self._epoch(number)
            record["facts"]["sustained"] = {"window": [begin + 5, begin + 8], "images_per_s": RATE,
                                            "others_busy": others}  # fmt: skip
            record["facts"]["contention_threshold"] = 0.2
            path.write_text(json.dumps(record))

    def idle(self, watts: float = IDLE_W, others: float = 0.0) -> None:
        at = np.arange(0.25, 3.1, 0.25)
        (self.folder / "idle").mkdir(exist_ok=True)
        self._telemetry(self.folder / "idle", at, 7.0 + watts * at, np.full(len(at), others), 2 * math.ceil(others))

    def _round(self, number: int) -> Path:
        return next((self.folder / "trials").iterdir()) / f"r{number}"

    def _epoch(self, number: int) -> float:
        with np.load(self._round(number) / "telemetry.npz") as stored:
            return float(stored["epoch"])

    def _telemetry(
        self, folder: Path, at: np.ndarray, joules: np.ndarray, others: np.ndarray, processes: int = 0
    ) -> None:
        path, had = folder / "telemetry.npz", {"epoch": np.float64(500.0)}
        if self.counter == "gpu_energy":
            more = {"gpu_memory": np.full(len(at), 1e9), "gpu_processes": np.full(len(at), processes)}
            once = {"gpu_before_memory": 1e9, "gpu_before_processes": 0.0}
            had |= {k: np.asarray(v) for k, v in {**more, **once}.items()}
        if path.is_file():
            with np.load(path) as stored:
                had["epoch"] = stored["epoch"]
        np.savez(path, **{**had, "at": at, self.counter: joules, "others": others})  # type: ignore[arg-type]

    @property
    def energy(self) -> Energy:
        return Meter(self.folder).measure(load_run(self.folder).trials[0])


@pytest.fixture(params=["cpu_energy", "gpu_energy"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    card = Card() if request.param == "gpu_energy" else None
    return Machine(synthetic.write_run(tmp_path / "run", [Way("pytorch", card=card)], samples=50), request.param)


def test_energy_per_image_is_power_above_idle_over_images(machine: Machine) -> None:
    machine.write()
    machine.idle()
    found = machine.energy
    each = [(watts - IDLE_W) / RATE for watts in WATTS]
    assert found.missing_reason == "" and found.rounds == 3 and found.rate == RATE
    assert found.net.value == pytest.approx(math.exp(np.log(each).mean()))
    assert min(found.net.low, 2.0) < min(each) and found.net.high > max(each), "three rounds say little"
    assert (found.watts, found.idle) == (pytest.approx(145), pytest.approx(IDLE_W))
    assert found.gross == pytest.approx(found.net.value + IDLE_W / RATE, rel=0.01)


def test_energy_is_a_column_and_a_table(machine: Machine) -> None:
    machine.write()
    machine.idle()
    run = trial_table.read_trials(machine.folder)
    row = run.frame.iloc[0]
    assert row["energy_j_low"] < row["energy_j"] < row["energy_j_high"] and row["energy_missing"] == ""
    (table,) = make_tables(run, "energy")
    assert table.rows[0]["energy_j"] == row["energy_j"] and table.rows[0]["power_w"] == pytest.approx(145)


def test_unrequested_energy_is_marked_and_has_no_table(machine: Machine) -> None:
    run = trial_table.read_trials(machine.folder)
    assert math.isnan(run.frame["energy_j"][0]) and run.frame["energy_missing"][0] == energy.NOT_ASKED
    assert not make_tables(run, "energy")[0].rows


def test_missing_energy_is_explained(machine: Machine) -> None:
    machine.write()
    assert machine.energy.missing_reason == energy.NO_IDLE
    machine.idle(watts=142.0)
    assert machine.energy.missing_reason == energy.NO_MORE and math.isnan(machine.energy.net.value)
    machine.idle()
    for path in (machine.folder / "trials").rglob("telemetry.npz"):
        path.write_bytes(b"PK")
    kind = "cuda" if machine.counter == "gpu_energy" else "cpu"
    assert machine.energy.missing_reason == energy.NO_COUNTER[kind]


def test_other_programs_invalidate_the_energy(machine: Machine) -> None:
    machine.write(others=0.7)
    machine.idle()
    assert machine.energy.missing_reason == energy.OTHERS_BUSY
    machine.write()
    assert machine.energy.missing_reason == ""
    machine.idle(others=0.5)
    assert machine.energy.missing_reason == energy.NOT_IDLE
    shutil.rmtree(machine.folder / "idle")
    assert machine.energy.missing_reason == energy.NO_IDLE


def test_a_rarely_updated_counter_still_gives_its_rate() -> None:
    at = np.arange(0.1, 3.05, 0.1)
    seldom = 250.0 * np.floor(at / 0.3) * 0.3
    assert estimate_power({"at": at, "gpu_energy": seldom}, "gpu_energy") == pytest.approx(250, rel=0.03)
    assert math.isnan(estimate_power({"at": at[:4], "gpu_energy": seldom[:4]}, "gpu_energy"))
    assert math.isnan(estimate_power({"at": at, "gpu_energy": seldom}, "gpu_energy", (1.0, 1.9))), "too short"
    assert math.isnan(estimate_power({"at": at}, "gpu_energy"))


def test_gpu_memory_is_shown_with_allocator_memory(tmp_path: Path) -> None:
    ways = [
        Way("pytorch", card=Card(before=600e6), facts={"allocated": 300_000_000, "reserved": 900_000_000}),
        Way("tensorrt", card=Card(), facts={"engine_memory": 50_000_000}),
        Way("onnxruntime", card=Card()),
    ]
    run = trial_table.read_trials(load_run(synthetic.write_run(tmp_path / "run", ways, samples=50)))
    torch, ort, trt = sorted(
        make_tables(run, "gpu-memory")[0].rows, key=lambda row: (row["label"].split()[1] != "pytorch", row["label"])
    )
    assert (torch["before_mb"], torch["peak_mb"], torch["net_mb"]) == pytest.approx((600, 3100, 2500))
    assert (torch["given_mb"], torch["counted_mb"], torch["rest_mb"]) == pytest.approx((300, 900, 1600))
    assert torch["counter"] == "PyTorch's allocator"
    assert (trt["counter"], trt["counted_mb"]) == ("scratch of a context", pytest.approx(50)) and "given_mb" not in trt
    assert ort["net_mb"] == pytest.approx(2500) and "counted_mb" not in ort
