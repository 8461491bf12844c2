"""Synthetic GPU telemetry: the columns that `dyno.jobs.telemetry` stores, with known contents."""

from dataclasses import dataclass

import numpy as np

from dyno.jobs.nvml import NVML_COLUMNS

STEP = 0.1  # seconds between two samples
IDLE_W = 90.0
IMPORTING, BETWEEN = 1.0, 0.3  # seconds before the job takes memory, and between two windows

Window = tuple[float, float]


@dataclass
class Card:
    """Behaviour of a GPU in every round of a trial.

    `gap`: launch overhead on the host's clock (s). `copies`: copies of a batch (s; longer than the model, they bound
    the throughput). `enqueue`: time inside run() (0: not measured). `held`: part of each window (from, to; shares)
    with `reasons` limiting the clock. `others`: earlier processes. `busy`: utilisation (%) without the job.
    """

    gap: float = 0.0
    copies: float = 0.0
    enqueue: float = 0.0
    events: bool = True
    reasons: int = 0
    held: tuple[float, float] = (0.0, 0.0)
    others: int = 0
    busy: float = 0.0
    visible: bool = True  # whether the driver reports the job's own process id
    before: float = 1e9
    memory: float = 2.5e9
    utilisation: float = 90.0
    power: float = 412.5

    def timed(self, spans: dict[str, float], number: int) -> dict[str, Window]:
        """Return consecutive windows with the lengths `spans`, in CLOCK_MONOTONIC."""
        at, found = self.epoch(number) + IMPORTING + BETWEEN, {}
        for boundary, span in spans.items():
            found[boundary] = (at, at + span)
            at += span + BETWEEN
        return found

    @staticmethod
    def epoch(number: int) -> float:
        """Return the start time of the round."""
        return 5000.0 + 100 * number

    def telemetry(self, timed: dict[str, Window], number: int) -> dict[str, np.ndarray]:
        """Return the arrays of telemetry.npz."""
        epoch = self.epoch(number)
        at = np.arange(STEP, max(end for _, end in timed.values()) - epoch + 2 * STEP, STEP)
        running = at > IMPORTING
        working, held = (np.zeros(len(at), bool) for _ in range(2))
        for begin, end in timed.values():
            working |= (epoch + at >= begin) & (epoch + at <= end)
            low, high = (begin + share * (end - begin) for share in self.held)
            held |= (epoch + at > low) & (epoch + at < high)
        power = np.where(working, self.power, IDLE_W)
        columns = {
            "gpu_memory": np.where(running, self.before + self.memory, self.before),
            "gpu_util": np.where(working, self.utilisation, self.busy),
            "gpu_clock": np.where(held, 1200.0, 1755.0),
            "gpu_memory_clock": np.full(len(at), 2619.0),
            "gpu_power": power,
            "gpu_energy": 1e6 + np.cumsum(power) * STEP,
            "gpu_temperature": np.linspace(35, 61, len(at)),
            "gpu_throttle": np.where(held, self.reasons, np.where(working, 0, 1)),
            "gpu_processes": running + float(self.others),
            "gpu_own": running * float(self.visible),
        }
        assert set(columns) == set(NVML_COLUMNS)
        host = {name: np.ones(len(at)) for name in ("rss", "cpu", "others", "frequency")} | {
            "cpu_energy": np.full(len(at), np.nan)
        }
        once = {"epoch": epoch, "gpu_before_memory": self.before, "gpu_before_util": self.busy,
                "gpu_before_processes": float(self.others), "gpu_name": "NVIDIA Test", "gpu_uuid": "GPU-1"}  # fmt: skip
        arrays = {"at": at, **host, **{name: np.asarray(a, np.float64) for name, a in columns.items()}}
        return arrays | {name: np.asarray(value) for name, value in once.items()}
