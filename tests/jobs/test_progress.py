"""What a study says where nothing is drawn anew."""

import io
from typing import Any

import pytest
from rich.console import Console

from dyno.jobs.progress import Progress
from dyno.worker.record import Record
from dyno.worker.spec import Recipe


def test_a_wait_gets_a_line_where_nothing_is_drawn_anew(fake_trial: Any) -> None:
    told = io.StringIO()
    progress = Progress(console=Console(file=told, width=200))
    progress.start(fake_trial(), 0)
    progress.tick("load", 0.1)
    progress.waiting("7")
    said = "net fake@latency_ms=0.1 fp32 b2 4  round 1 of 1: waiting for process 7, another dyno on this device\n"
    assert told.getvalue() == said


@pytest.fixture
def verbose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "is_verbose", True)


def test_in_a_file_a_job_has_a_line_only_where_it_failed(fake_trial: Any) -> None:
    told, trial = io.StringIO(), fake_trial()
    progress = Progress(console=Console(file=told, width=200))
    with progress.running([trial, trial]):
        progress.other("make net engine int8 b1 224")
        progress.start(trial, 0)
        progress.done(trial, Record("ok", seconds=2.0))
        progress.done(trial, Record("failed", reason="no file"))
    (line,) = told.getvalue().splitlines()
    assert line.startswith("2/2 failed ") and line.endswith("no file")


@pytest.mark.usefixtures("verbose")
def test_a_line_says_which_job_of_how_many_and_which_round(fake_trial: Any) -> None:
    told, trial = io.StringIO(), fake_trial()
    progress = Progress(console=Console(file=told, width=200))
    with progress.running([trial, trial]):
        progress.start(trial, 0)
        progress.done(trial, Record("ok", seconds=2.0))
        progress.done(trial, Record("failed", reason="no file"))
    first, second = told.getvalue().splitlines()
    assert first.startswith("1/2 ok ") and first.endswith("round 1 of 1  2.0 s")
    assert second.startswith("2/2 failed ") and "round" not in second and second.endswith("no file")


def test_there_is_no_estimate_before_a_job_has_ended_and_it_never_falls_below_what_follows(fake_trial: Any) -> None:
    trial, other = fake_trial(), fake_trial(precision="fp16")
    progress = Progress(quiet=True)
    with progress.running([trial, other, other]):
        progress.start(trial, 0)
        assert progress.remaining() is None
        progress.since -= 200
        progress.done(trial, Record("ok"))
        assert progress.remaining() == pytest.approx(400, rel=0.1)
        progress.start(other, 0)
        progress.since -= 1000
        assert progress.remaining() == pytest.approx(200, rel=0.1)
        progress.done(other, Record("ok"))
    with progress.running([trial], later=[trial, other]):
        assert progress.remaining() == pytest.approx(200 + 200 + 1000, rel=0.1), "the rounds to come count"


@pytest.mark.usefixtures("verbose")
def test_a_file_that_takes_long_says_how_long() -> None:
    told = io.StringIO()
    progress = Progress(console=Console(file=told, width=200))
    progress.other("make net engine int8 b1 224")
    progress.took()
    progress.since -= 83
    progress.took()
    assert told.getvalue().splitlines() == ["make net engine int8 b1 224", "make net engine int8 b1 224: 1:23 minutes"]


@pytest.mark.usefixtures("verbose")
def test_files_made_with_other_options_have_other_lines(fake_trial: Any) -> None:
    told, trial = io.StringIO(), fake_trial()
    progress = Progress(console=Console(file=told, width=200))
    graph = Recipe("onnx_export", "onnx", "fp32", trial.model, trial.dims, {"exporter": "torchscript"})
    engine = Recipe("tensorrt", "engine", "int8", trial.model, trial.dims, {"optimization": 3}, parent=graph)
    progress.making(engine)
    assert told.getvalue() == "make net engine int8 b2 4 exporter=torchscript optimization=3\n"


def test_an_answer_so_far_is_a_line_in_a_file_and_a_table_on_a_terminal(fake_trial: Any) -> None:
    rows = [("b fp32", "1.00 ms", "2.10x [1.90, 2.30]"), ("a fp32", "2.10 ms", "reference")]
    told = io.StringIO()
    Progress(console=Console(file=told, width=200)).show_answer("after round 1", ["fastest is b fp32."], rows)
    assert told.getvalue() == "after round 1: fastest is b fp32.\n"
    timed = Progress(console=Console(file=(told := io.StringIO()), width=200))
    with timed.running([fake_trial(), fake_trial()]):
        timed.start(fake_trial(), 0)
        timed.done(fake_trial(), Record("ok"), seconds=83)
        timed.show_answer("after round 1 of 2", ["fastest is b fp32.", "most images with a."], rows)
    assert told.getvalue() == "after round 1 of 2, about 1:23 left: fastest is b fp32. most images with a.\n"
    drawn = io.StringIO()
    progress = Progress(console=Console(file=drawn, width=80, force_terminal=True, color_system=None))
    with progress.running([fake_trial()]):
        progress.show_answer("after round 1", ["fastest is b fp32."], rows)
        assert progress.live is not None
        progress.live.refresh()
    shown = drawn.getvalue()
    assert "b fp32" in shown and "2.10x [1.90, 2.30]" in shown and "after round 1: fastest is b fp32." in shown


def test_forced_colour_draws_no_bars_into_a_file(fake_trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stderr", drawn := io.StringIO())
    progress = Progress()
    with progress.running([fake_trial()]):
        assert progress.live is None
    assert drawn.getvalue() == ""
