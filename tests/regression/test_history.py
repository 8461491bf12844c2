"""Stored runs as one history: copies of a run with different dates, versions, latencies and commits."""

import csv
import io
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import dyno

GOLDEN = Path(__file__).parents[1] / "golden" / "run"
SLOWED = "f6507b6f85bf"  # onnxruntime fp32


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.fixture
def copied(tmp_path: Path) -> Callable[..., Path]:
    """Copy the run, with onnxruntime fp32 slowed, in another version or failed, and its models at a commit."""

    def copy(
        name: str, day: int, times: float = 1, version: str = "1.30.0", commit: str = "", failed: bool = False
    ) -> Path:
        folder = tmp_path / name
        shutil.copytree(GOLDEN, folder)
        for path in folder.glob("trials/*/*/record.json"):

            def change(record: dict[str, Any], slowed: bool = SLOWED in str(path)) -> None:
                record["started"] = record["started"].replace("-23T", f"-{day}T")
                if slowed:
                    record["system"]["versions"]["onnxruntime"] = version
                    record |= {"status": "failed", "reason": "no such operator"} if failed else {}

            edit(path, change)
            if commit:
                edit(path.with_name("job.json"), lambda job: job["trial"]["model"].update(name=f"resnet18@{commit}"))
        for path in folder.glob(f"trials/{SLOWED}/*/samples.npz"):
            with np.load(path) as stored:
                np.savez(path, **{key: array * (times if "latency" in key else 1) for key, array in stored.items()})
        return folder

    return copy


def read_rows(text: str) -> list[dict[str, str]]:
    return [row for row in csv.DictReader(io.StringIO(text)) if row["trial"] == SLOWED]


def test_steps_mark_where_the_latency_rose(copied: Callable[..., Path], call: Any) -> None:
    runs = copied("c", 27, 20, "1.31.0"), copied("a", 24), copied("b", 25, failed=True)
    _, out, _ = call("show", *runs, "--format", "csv", code=0)
    first, failed, last = read_rows(out)
    assert [row["run"] for row in (first, failed, last)] == ["a", "b", "c"]  # ordered by date
    assert (first["step"], failed["step"], failed["reason"]) == ("", "", "done: no such operator")
    assert float(last["step"]) == pytest.approx(20) and last["changed"] == "onnxruntime 1.30.0 to 1.31.0"
    others = [row for row in csv.DictReader(io.StringIO(out)) if row["trial"] != SLOWED and row["step"]]
    assert others and all(float(row["step"]) == 1 for row in others)
    _, out, _ = call("show", *runs, code=0)
    words = " ".join(out.rpartition("─\n")[2].split())
    assert words.startswith("resnet18 onnxruntime fp32 at batch 1 took 20.00x as long from c (2026-11-27")
    assert "0.193 to 3.87 ms; with it changed onnxruntime 1.30.0 to 1.31.0." in words
    assert words.endswith("--remeasure") and f"compare {runs[1]} {runs[0]}" in words
    table = dyno.read_history(*runs)
    assert "; ".join(table.notes) in words.replace(". Runs", ".; Runs")
    assert [row for row in table.to_pandas()["step"] if row == pytest.approx(20)] == [pytest.approx(20)]


@pytest.mark.usefixtures("unreported")
def test_runs_store_the_commit_of_the_current_folder(call: Any, tmp_path: Path) -> None:
    def git(*words: str) -> str:
        named = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", *named, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    git("init", "-q")
    commits = []
    for number in (1, 2):
        (tmp_path / "weights.txt").write_text(str(number))
        git("add", "weights.txt")
        git("commit", "-q", "-m", str(number))
        commits.append(git("rev-parse", "HEAD")[:12])
        if number == 2:
            (tmp_path / "weights.txt").write_text("changed")
        call("run", "fake:net", "--channels", 1, "--backend", "fake", "--quick", "--out", f"r{number}", code=0)
    _, out, _ = call("show", "r1", "r2", "--format", "csv", code=0)
    assert [row["commit"] for row in csv.DictReader(io.StringIO(out))] == [commits[0], f"{commits[1]}+"]
    assert f"commit {commits[0]} to {commits[1]}+" in out


def test_a_chart_marks_the_commit_that_made_it_slow(copied: Callable[..., Path], call: Any, refused: Any) -> None:
    runs = copied("a", 24, commit="0a1b2c3"), copied("b", 25, 20, commit="4d5e6f7"), copied("c", 26, 20, commit="<b>&7")
    for file in ("h.svg", "h.png", "h.html"):
        assert call("show", *runs, "-o", file, code=0)[1:] == ("", f"dyno: wrote {file}\n")
    drawing, page = Path("h.svg").read_text(), Path("h.html").read_text()
    root = ElementTree.fromstring(drawing)
    texts = ["".join(each.itertext()).strip() for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"0a1b2c3", "4d5e6f7", "<b>&7"} <= set(texts)
    assert [text for text in texts if text.endswith("x")] == ["20.00x"]  # the others changed undetectably
    assert (
        page.count("<svg") == 1 and "<td" in page and "<b>" not in page and "onnxruntime fp32: 20.00x; commit" in page
    )
    assert Path("h.png").read_bytes()[:4] == b"\x89PNG"
    assert "takes no --by and no --columns" in refused("show", *runs, "-o", "h.svg", "--by", "backend")
    assert "unknown ending '.svg'" in refused("show", runs[0], "-o", "one.svg")


def test_commits_of_one_model_are_one_history(copied: Callable[..., Path], call: Any) -> None:
    runs = copied("a", 24, commit="0a1b2c3"), copied("b", 25, 20, commit="4d5e6f7")
    _, out, _ = call("show", *runs, "--format", "csv", code=0)
    first, last = read_rows(out)
    assert (first["model"], first["commit"], last["commit"]) == ("resnet18", "0a1b2c3", "4d5e6f7")
    assert last["changed"] == "commit 0a1b2c3 to 4d5e6f7" and float(last["step"]) == pytest.approx(20)


def test_moved_processors_are_reported_as_the_change(copied: Callable[..., Path], call: Any) -> None:
    """A signal between processors takes 170 ns in the first run and 580 ns in the second."""
    runs = copied("a", 24), copied("b", 25, 1.8)
    for run, latency in zip(runs, (170, 580), strict=True):
        for path in run.glob("trials/*/*/record.json"):
            edit(path, lambda record, n=latency: record["facts"].update(core_latencies={"model": [n] * 4}))
    _, out, _ = call("show", *runs, "--format", "csv", code=0)
    first, last = read_rows(out)
    assert (first["changed"], last["changed"]) == ("", "processors near each other to far apart")
    _, _, err = call("compare", *runs)
    assert "the processors were further apart during 8 of 16 jobs" in err and "may explain the whole difference" in err
    assert "took 580 ns instead of 170" in err


def test_no_step_is_reported_within_the_intervals(copied: Callable[..., Path], call: Any) -> None:
    _, out, _ = call("show", copied("a", 24), copied("b", 25, 1.001), code=0)
    assert "No latency rose beyond the intervals of two runs." in out and "compare" not in out


def test_invalid_histories_are_refused(copied: Callable[..., Path], refused: Any, tmp_path: Path) -> None:
    runs = copied("a", 24), copied("b", 25)
    assert refused("show", runs[0], runs[0]) == "a run is named twice; name each once"
    with pytest.raises(dyno.UserError, match="two runs or more"):
        dyno.read_history(runs[0])
    for words in (("--table", "sizes"), ("--over-time", tmp_path / "t.svg"), ("--limit", "p99=5ms")):
        assert refused("show", *runs, *words).startswith(f"{words[0]} is for one run, not for 2")
    for path in runs[1].glob("trials/*/*/job.json"):
        edit(path, lambda job: job["trial"]["model"].update(name="another"))
    assert refused("show", *runs).startswith("the 2 runs have no trial in common")
