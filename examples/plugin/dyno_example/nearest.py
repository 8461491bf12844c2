"""A metric of one's own: the share of images whose grade is nearest to their class's place."""

from __future__ import annotations

import numpy as np

from dyno.results.metrics.accuracy import HitShare
from dyno.results.trial_result import TrialResult


class Nearest(HitShare):
    """Of the task grade; its interval, the change and the budget's decision are those of every share of images."""

    name = column = "nearest"
    label = "nearest grade"
    meaning = "share of images whose grade rounds to their class's place"

    def hits(self, trial: TrialResult) -> np.ndarray | None:
        """By the array that the task's collector kept; None without labels."""
        stored = trial.stored("grade", "label")
        if not {"grade", "label"} <= stored.keys() or stored["label"].max() < 0:
            return None
        return np.asarray(np.rint(stored["grade"]) == stored["label"])


NEAREST = Nearest()
