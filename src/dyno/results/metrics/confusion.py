"""Confusions of a classifier: the matrix, the accuracy of each class, and the largest confusions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dyno.formatting import csv_cell
from dyno.results.stats import wilson
from dyno.results.trial_result import Results, TrialResult
from dyno.worker.record import write_text

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Confusion:
    """`counts[i, j]`: images of class `classes[i]` that were taken for `classes[j]`; classes that occur as neither are
    left out. `names` are those of `classes`."""

    counts: np.ndarray
    classes: np.ndarray
    names: list[str]

    def to_pandas(self) -> pd.DataFrame:
        """Return the matrix with names on both sides: rows are the labels, columns the answers."""
        import pandas as pd

        return pd.DataFrame(self.counts, index=pd.Index(self.names, name="label"), columns=self.names)

    def per_class(self) -> pd.DataFrame:
        """Return a row for each class that has images, the worst first.

        Columns are `class`, `images`, `correct`, `top1`, `top1_low`, `top1_high` (percent, Wilson), and the class that
        it is mistaken for most often, with the count.
        """
        import pandas as pd

        rows = pd.DataFrame.from_records(
            [self._make_class_row(i) for i in np.flatnonzero(self.counts.sum(axis=1)).tolist()]
        )
        return rows.sort_values(["top1", "images"], ascending=[True, False], kind="stable", ignore_index=True)

    def _make_class_row(self, i: int) -> dict[str, Any]:
        images, correct = int(self.counts[i].sum()), int(self.counts[i, i])
        share = wilson(correct, images)
        wrong = self.counts[i].copy()
        wrong[i] = 0
        most = int(wrong.argmax())
        return {
            "class": self.names[i], "images": images, "correct": correct, "top1": 100 * share.value,
            "top1_low": 100 * share.low, "top1_high": 100 * share.high,
            "taken_for": self.names[most] if wrong[most] else "", "times": int(wrong[most]),
        }  # fmt: skip

    def largest(self, most: int = 5) -> list[tuple[str, str, int, int]]:
        """Return label, answer, count, and number of images with that label; the most frequent first."""
        wrong = self.counts.copy()
        np.fill_diagonal(wrong, 0)
        order = np.argsort(-wrong, axis=None, kind="stable")[:most]
        places = [divmod(int(k), wrong.shape[1]) for k in order]
        return [(self.names[i], self.names[j], int(wrong[i, j]), int(self.counts[i].sum())) for i, j in places
                if wrong[i, j]]  # fmt: skip


def read_confusion(trial: TrialResult) -> Confusion | None:
    """Return the trial's confusion matrix over its first answers; None unless it is a classifier on labelled images."""
    answers = trial.answers
    index, label = answers.get("topk_index"), answers.get("label")
    if index is None or label is None or not len(label) or len(index) != len(label) or (label < 0).any():
        return None
    first = index[:, 0].astype(np.int64)
    classes, places = np.unique(np.concatenate([label, first]), return_inverse=True)
    counts = np.zeros((len(classes), len(classes)), np.int64)
    np.add.at(counts, (places[: len(label)], places[len(label) :]), 1)
    class_names = [str(name) for name in answers.get("classes", ())]
    names = [class_names[c] if 0 <= c < len(class_names) else f"class {c}" for c in classes.tolist()]
    return Confusion(counts, classes, _number_duplicates(names, classes))


def _number_duplicates(names: list[str], classes: np.ndarray) -> list[str]:
    """Add the class number to a name that two classes share."""
    return [f"{n} ({c})" if names.count(n) > 1 else n for n, c in zip(names, classes.tolist(), strict=True)]


def choose_trials(results: Results) -> list[TrialResult]:
    """Return one trial of each configuration and size: the batch changes no answer."""
    first: dict[tuple[str, str, str], TrialResult] = {}
    for t in results:
        if t.good and "label" in t.answers:
            first.setdefault((t.model, t.size, t.configuration), t)
    return list(first.values())


def write_confusion(results: Results, folder: Path) -> list[Path]:
    """Write FOLDER/confusion-ID.csv and FOLDER/classes-ID.csv of the chosen trials."""
    files = []
    for t in choose_trials(results):
        if matrix := read_confusion(t):
            files += [folder / f"confusion-{t.id}.csv", folder / f"classes-{t.id}.csv"]
            counts = matrix.to_pandas().rename(index=csv_cell, columns=csv_cell)
            write_text(files[-2], counts.to_csv())
            write_text(files[-1], matrix.per_class().map(csv_cell).to_csv(index=False))
    return files
