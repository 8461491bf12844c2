"""Progress output without redrawing."""

import io
from typing import Any

import pytest
from rich.console import Console

from dyno.jobs.progress import Progress
from dyno.worker.record import Record
from dyno.worker.spec import Recipe


@pytest.fixture
def progress() -> Progress:
    """Progress that writes to a file, 200 characters wide."""
    return Progress(console=Console(file=io.StringIO(), width=200))


def told(progress: Progress) -> list[str]:
    return progress.console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_waiting_prints_a_line_in_a_log_file(progress: Progress, fake_trial: Any) -> None:
    progress.start(fake_trial(), 0)
    progress.tick("load", 0.1)
    progress.show_waiting("7")
    said = "net fake@latency_ms=0.1 fp32 b2 4  round 1 of 1: waiting for process 7, another dyno on this device"
    progress.relay("host2", "net fp16")
    assert told(progress) == [said, "host2 net fp16"]


def test_sharing_the_processors_is_said_once(progress: Progress) -> None:
    for owner in ("7", "8"):
        progress.report_sharing(owner)
    (line,) = told(progress)
    assert line.startswith("another dyno (process 7) measures on these processors")


@pytest.fixture
def verbose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "is_verbose", True)


@pytest.mark.parametrize("is_verbose", [False, True])
def test_a_log_file_has_failed_jobs_or_with_verbose_all_jobs(
    progress: Progress, fake_trial: Any, monkeypatch: pytest.MonkeyPatch, is_verbose: bool
) -> None:
    monkeypatch.setattr(Progress, "is_verbose", is_verbose)
    trial = fake_trial()
    with progress.show_study([trial, trial, trial]):
        progress.show_step("make net engine int8 b1 224")
        progress.start(trial, 0)
        progress.done(trial, Record("ok", seconds=2.0))
        progress.done(trial, Record("failed", reason="no file"))
        progress.done(trial, Record("oom", reason="killed"), seconds=1.0, round_index=0)
    *lines, failed, beside = told(progress)
    assert failed.startswith("2/3 failed ") and "round" not in failed and failed.endswith("no file")
    assert beside.startswith("3/3 oom ") and beside.endswith("round 1 of 1  killed"), "another began after it"
    assert [line[:5] for line in lines] == ["make ", "1/3 o"] * is_verbose
    assert not is_verbose or (lines[1].startswith("1/3 ok ") and lines[1].endswith("round 1 of 1  2.0 s"))


def test_the_estimate_starts_after_the_first_job_and_covers_the_rest(fake_trial: Any) -> None:
    trial, other = fake_trial(), fake_trial(precision="fp16")
    progress = Progress(quiet=True)
    with progress.show_study([trial, other, other]):
        progress.start(trial, 0)
        assert progress.estimate_remaining() is None
        progress.started -= 200
        progress.done(trial, Record("ok"))
        assert progress.estimate_remaining() == pytest.approx(400, rel=0.1)
        progress.start(other, 0)
        progress.started -= 1000
        assert progress.estimate_remaining() == pytest.approx(200, rel=0.1)
        progress.done(other, Record("ok"))
    with progress.show_study([trial], later=[trial, other]):
        assert progress.estimate_remaining() == pytest.approx(200 + 200 + 1000, rel=0.1), "the rounds to come count"


@pytest.mark.usefixtures("verbose")
def test_a_slow_build_reports_its_duration(progress: Progress) -> None:
    progress.show_step("make net engine int8 b1 224")
    progress.report_duration()
    progress.started -= 83
    progress.report_duration()
    assert told(progress) == ["make net engine int8 b1 224", "make net engine int8 b1 224: 1:23 minutes"]


@pytest.mark.usefixtures("verbose")
def test_build_lines_show_the_build_options(progress: Progress, fake_trial: Any) -> None:
    trial = fake_trial()
    graph = Recipe("onnx_export", "onnx", "fp32", trial.model, trial.dims, {"exporter": "torchscript"})
    engine = Recipe("tensorrt", "engine", "int8", trial.model, trial.dims, {"optimization": 3}, parent=graph)
    progress.show_making(engine)
    assert told(progress) == ["make net engine int8 b2 4 exporter=torchscript optimization=3"]


def test_interim_answers_are_a_line_in_a_file_and_a_table_on_a_terminal(progress: Progress, fake_trial: Any) -> None:
    rows = [("b fp32", "1.00 ms", "2.10x [1.90, 2.30]"), ("a fp32", "2.10 ms", "reference")]
    progress.show_answer("after round 1", ["fastest is b fp32."], rows)
    with progress.show_study([fake_trial(), fake_trial()]):
        progress.start(fake_trial(), 0)
        progress.done(fake_trial(), Record("ok"), seconds=83)
        progress.show_answer("after round 1 of 2", ["fastest is b fp32.", "most images with a."], rows)
    progress.show_answer("after round 2", ["fastest is b fp32.", "most images with a."], rows)
    assert told(progress) == [
        "after round 1: fastest is b fp32.",
        "after round 1 of 2, about 1:23 left: fastest is b fp32. most images with a.",
        "after round 2, about 1:23 left: as before",
    ]
    drawn = io.StringIO()
    progress = Progress(console=Console(file=drawn, width=80, force_terminal=True, color_system=None))
    with progress.show_study([fake_trial()]):
        progress.show_answer("after round 1", ["fastest is b fp32."], rows)
        assert progress.live is not None
        progress.live.refresh()
    shown = drawn.getvalue()
    assert "b fp32" in shown and "2.10x [1.90, 2.30]" in shown and "after round 1: fastest is b fp32." in shown


def test_forced_colour_draws_no_bars_into_a_file(fake_trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stderr", drawn := io.StringIO())
    progress = Progress()
    with progress.show_study([fake_trial()]):
        assert progress.live is None
    assert drawn.getvalue() == ""
