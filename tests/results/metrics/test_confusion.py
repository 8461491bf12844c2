"""Which classes are taken for which, by hand-made answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dyno import evaluation
from dyno.report.charts import round_charts
from dyno.report.tables import trial_table
from dyno.results import stats
from dyno.results.metrics import confusion
from dyno.results.trial_result import Results, TrialResult, load_run
from dyno.worker.record import Record, write_json, write_record
from dyno.worker.spec import DataSpec, Dims, Job, ModelSpec, Trial, to_json

LABELS = [0, 0, 0, 1, 1, 2]
ANSWERS = [0, 1, 1, 1, 7, 2]


def run(folder: Path, labels: list[int], answers: list[int], names: list[str] | None = None) -> Results:
    trial = Trial(ModelSpec("net", "fake:net"), "fake", "fp32", Dims(1, 8, 8), data=DataSpec("photos", sha256="d" * 64))
    path = folder / "run" / "trials" / trial.id / "r0"
    path.mkdir(parents=True)
    write_json(path / "job.json", to_json(Job("run", trial.runtime, trial)))
    write_record(path, Record("ok", "done", trial=trial.id))
    index = np.array(answers, np.int32).reshape(-1, 1)
    arrays = {
        "topk_index": index,
        "topk_score": index * 0.1,
        "label": np.array(labels),
        "sample": np.arange(len(labels)),
    }
    np.savez(path / "outputs.npz", **arrays, **({"classes": np.array(names)} if names else {}))  # type: ignore[arg-type]
    return load_run(folder / "run")


@pytest.fixture
def trial(tmp_path: Path) -> TrialResult:
    return run(tmp_path, LABELS, ANSWERS, ["cat", "dog", "лиса", "unseen"]).trials[0]


def test_the_matrix(trial: TrialResult) -> None:
    found = confusion.read_confusion(trial)
    assert found is not None and found.names == ["cat", "dog", "лиса", "class 7"]
    assert found.counts.tolist() == [[1, 2, 0, 0], [0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert found.to_pandas().loc["cat", "dog"] == 2
    assert found.largest() == [("cat", "dog", 2, 3), ("dog", "class 7", 1, 2)]


def test_each_class_with_its_interval_the_worst_first(trial: TrialResult) -> None:
    found = confusion.read_confusion(trial)
    assert found is not None
    classes = found.per_class()
    assert classes["class"].tolist() == ["cat", "dog", "лиса"] and classes["images"].tolist() == [3, 2, 1]
    cat, share = classes.iloc[0], stats.wilson(1, 3)
    assert (cat["top1"], cat["top1_low"], cat["top1_high"]) == tuple(
        100 * v for v in (share.value, share.low, share.high)
    )
    assert (cat["taken_for"], cat["times"]) == ("dog", 2) and classes.iloc[2]["taken_for"] == ""


def test_classes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    found = confusion.read_confusion(run(tmp_path, [0, 1], [0, 1], ["crane", "crane"]).trials[0])
    assert found is not None and found.names == ["crane (0)", "crane (1)"]


def test_images_without_labels_have_no_matrix(tmp_path: Path) -> None:
    assert confusion.read_confusion(run(tmp_path, [-1, -1], [0, 1]).trials[0]) is None


def test_files_and_figures(tmp_path: Path) -> None:
    results = run(tmp_path, LABELS, ANSWERS)
    matrix, classes = confusion.write_confusion(results, tmp_path)
    assert matrix.read_text().splitlines()[0] == "label,class 0,class 1,class 2,class 7"
    assert len(classes.read_text().splitlines()) == 4
    (axes,) = round_charts.draw_matrices(trial_table.read_trials(results)).axes
    assert axes.get_title("left").startswith("net fake fp32")


def test_the_words(trial: TrialResult) -> None:
    text = evaluation.describe_evaluation(trial)
    assert "worst classes: cat (33.3 % of 3); dog (50.0 % of 2)" in text
    assert "most common confusions: cat for dog (2 of 3)" in text
    assert "лиса" in evaluation.describe_evaluation(trial, per_class=True)
    assert "| cat | 3 | 33.33 |" in " ".join(evaluation.describe_evaluation(trial, "markdown", per_class=True).split())
