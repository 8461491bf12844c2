"""Settings of a training job, checked before anything is decoded or started."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dyno.worker.option_values import option
from dyno.worker.spec import UserError, check_known

# Default peak learning rate and weight decay of each optimiser.
OPTIMIZERS = {"sgd": (0.05, 1e-4), "adamw": (1e-3, 0.01), "adam": (1e-3, 0.0), "rmsprop": (1e-4, 0.0)}
SCHEDULES = ("onecycle", "cosine", "step", "constant")
AUGMENTATIONS = ("none", "shift", "light", "standard")
MIXED_PRECISIONS = ("none", "fp16", "bf16")
CHANGEABLE_OPTIONS = ("workers",)  # options without effect on the result, changeable on resuming


@dataclass(frozen=True)
class TrainOptions:
    """How to train a classifier."""

    epochs: int = option(20, "Passes over the training images.", common=True)
    batch: int = option(32, "Images per step.", common=True)
    optimizer: str = option("adamw", f"Optimiser: {', '.join(OPTIMIZERS)}.", common=True)
    lr: float | None = option(None, "Highest learning rate of the schedule.", "the optimiser's usual", common=True)
    momentum: float = option(0.9, "Momentum of sgd and rmsprop.")
    weight_decay: float | None = option(None, "Weight decay.", "the optimiser's usual")
    schedule: str = option(
        "onecycle",
        "Learning rate over time: onecycle (up, then down along a cosine), or after a linear warm-up cosine, step (a "
        "tenth after each third) or constant.",
    )
    warmup_epochs: float = option(0.0, "Epochs in which the rate rises.", "none; 30 % of the training for onecycle")
    augment: str = option(
        "light",
        "Augmentation: none; shift (by up to a tenth, never mirrored: digits, letters, signs); light (random crop, "
        "mirrored); standard (random resized crop, mirrored).",
        "light; shift for digits",
        common=True,
    )
    label_smoothing: float = option(0.1, "Label smoothing, from 0 to less than 1.")
    mixed_precision: str = option("none", f"torch.autocast: {', '.join(MIXED_PRECISIONS)}; fp16 needs a GPU.")
    freeze: bool = option(False, "Train the classifier layer alone.")
    workers: int = option(0, "Processes that read images; they don't change the result.", "the training's own")
    seed: int = option(0, "Seed of weights, split, order and augmentation.")
    device: str = option("cpu", "Device: cpu, or cuda:0, cuda:1…", common=True)

    def __post_init__(self) -> None:
        check_known("optimizer", self.optimizer, OPTIMIZERS)
        check_known("schedule", self.schedule, SCHEDULES)
        check_known("augment", self.augment, AUGMENTATIONS)
        check_known("mixed_precision", self.mixed_precision, MIXED_PRECISIONS)
        for name, minimum in (("epochs", 1), ("batch", 2), ("workers", 0), ("warmup_epochs", 0), ("seed", 0)):
            if not getattr(self, name) >= minimum:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least {minimum}")
        self._check_ranges()

    def _check_ranges(self) -> None:
        if not self.peak > 0:
            raise UserError(f"lr is {self.peak:g}; it must be more than 0")
        if not self.decay >= 0:
            raise UserError(f"weight_decay is {self.decay:g}; it must be at least 0")
        for name in ("momentum", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name):g}; it must be at least 0 and less than 1")
        if self.warmup_epochs and self.warmup_epochs >= self.epochs:
            raise UserError(f"warmup_epochs is {self.warmup_epochs:g} of {self.epochs} epochs; it must be fewer")
        if self.mixed_precision == "fp16" and self.device == "cpu":
            raise UserError("mixed_precision fp16 needs a GPU; on a CPU give bf16 or none")

    @property
    def peak(self) -> float:
        """The highest learning rate: `lr`, or the optimiser's default."""
        return OPTIMIZERS[self.optimizer][0] if self.lr is None else self.lr

    @property
    def decay(self) -> float:
        """The weight decay: `weight_decay`, or the optimiser's default."""
        return OPTIMIZERS[self.optimizer][1] if self.weight_decay is None else self.weight_decay

    def settings(self) -> dict[str, Any]:
        """Return all options that affect the result, with defaults filled in."""
        values = {**dataclasses.asdict(self), "lr": self.peak, "weight_decay": self.decay}
        return {name: value for name, value in values.items() if name not in CHANGEABLE_OPTIONS}


def make_options(settings: Mapping[str, Any]) -> TrainOptions:
    """Return the options by name; raise a `UserError` with the nearest spelling for an unknown name."""
    names = [f.name for f in dataclasses.fields(TrainOptions)]
    for name in settings:
        check_known("training option", name, names)
    return TrainOptions(**settings)
