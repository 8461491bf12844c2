"""How a run was measured and its verdicts decided, in the report's own words."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import synthetic
from dyno.report import sections
from dyno.report.tables import trial_table
from dyno.worker.record import read_json, write_json
from synthetic import Way


def described(folder: Path, study: str = "") -> dict[str, str]:
    (folder / "study.toml").write_text(f'models = ["digits"]\n{study}', encoding="utf-8")
    return dict(sections.list_terms(trial_table.read_trials(folder)))


def taking_turns(folder: Path, *backends: str) -> Path:
    """A run whose trials of these backends took turns, in four blocks of 0.1 s."""
    synthetic.write_run(folder, [Way("pytorch"), Way("a", seconds=0.005), Way("b", seconds=0.006)], samples=20)
    for path in folder.glob("trials/*/r*/record.json"):
        job = read_json(path.parent / "job.json")
        if job["trial"]["backend"] not in backends:
            continue
        job["trial"]["plan"] |= {"blocks": 4, "block_s": 0.1}
        write_json(path.parent / "job.json", job)
        arrays = dict(np.load(path.parent / "samples.npz"))
        np.savez(path.parent / "samples.npz", **arrays, latency_model_block=np.repeat(np.arange(4, dtype=np.int32), 5))
        record = read_json(path)
        write_json(path, {**record, "facts": {**record["facts"], "turns": {"set": path.parent.name}}})
    return folder


def test_one_after_the_other(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", [Way("pytorch"), Way("a"), Way("b")], samples=20)
    terms = described(folder, "equivalent = 3.0\n")
    assert terms["rounds"].startswith("3, each in a fresh process")
    assert terms["reference"] == "pytorch fp32" and terms["compared"].startswith("one after the other")
    assert terms["interval"].startswith("Welch's t interval")
    assert terms["equivalent"] == "the whole interval is within ±3 %"
    assert terms["family"].startswith("up to 2 rows against one reference are judged together (Holm)")
    assert terms["looks"].startswith("one, after the last round")
    assert (
        "2 threads" in terms["level: a latency is of"] and "alone from start to end" in terms["level: a latency is of"]
    )


def test_in_turns(tmp_path: Path) -> None:
    terms = described(taking_turns(tmp_path / "run", "pytorch", "a", "b"))
    assert terms["compared"].startswith("in turns:") and "a block of 0.1 s" in terms["compared"]
    assert "one after the other" not in terms["compared"] and terms["interval"].startswith("Student's t interval")
    assert terms["sampling ends"].startswith("after 4 blocks per boundary")
    assert "a loop alone may be faster" in terms["level: a latency is of"]


def test_some_in_turns(tmp_path: Path) -> None:
    terms = described(taking_turns(tmp_path / "run", "pytorch", "a"))
    assert terms["compared"].startswith("in turns:") and terms["compared"].endswith("; 1 pair one after the other")
    assert terms["interval"].startswith("of pairs ") and "Student" in terms["interval"] and "Welch" in terms["interval"]


def test_until_decided_counts_its_looks(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", [Way("pytorch"), Way("a")], samples=20)
    terms = described(folder, 'until = "decided"\nrounds = 2\n')
    assert terms["looks"].startswith("until decided: 2, after round 2 and each further one")
    assert terms["family"].startswith("one row at most is judged")


def test_nothing_to_compare(tmp_path: Path) -> None:
    terms = described(synthetic.write_run(tmp_path / "run", [Way("a")], samples=20))
    assert terms["compared"].startswith("nothing:") and "interval" not in terms
