"""Faults around Dyno cost one line at most: names, pipes, links, bombs, brackets, a closed reader."""

import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.formatting import csv_cell
from dyno.jobs.launcher import make_environment
from dyno.jobs.progress import Progress
from dyno.report.export import export
from dyno.results.files import read_npz
from dyno.results.notes import NOTE_TYPES
from dyno.store import Cache, Run
from dyno.study.study import Study
from dyno.table import TEXT, Column, Table
from dyno.worker import system
from dyno.worker.record import Record, parse_json, read_record, refuse_links, write_json, write_text
from dyno.worker.spec import SCHEMA, Runtime, UserError, from_json
from refusals import refuses

ROOT = Path(__file__).resolve().parents[1]
BRACKETS = "[" * 100_000
FAKE = ["run", "fake:net", "--channels", "1", "--backend", "fake@latency_ms=0.1"]
SHORT = "--rounds 2 --seconds 0.04 --block 0.01 --warmup 0.02 --threads 1".split()


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """Copy of a whole run folder."""
    return Path(shutil.copytree(ROOT / "tests/golden/run", tmp_path / "golden"))


def record_of(run: Path) -> Path:
    """Return the record of a successful round with samples."""
    return next(path for path in sorted(run.glob("trials/*/r*/record.json")) if (path.parent / "samples.npz").exists())


def test_writing_replaces_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("study.toml", "study.toml.part"):
        (tmp_path / name).symlink_to(precious)
    write_text(tmp_path / "study.toml", "new \udc80")
    assert precious.read_text() == "mine"
    assert (tmp_path / "study.toml").read_text() == "new \\udc80" and not (tmp_path / "study.toml").is_symlink()


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("before")
    monkeypatch.setattr("os.fsync", lambda _: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "a", "half")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "before"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_that_is_not_a_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/lock").symlink_to(precious) if kind == "link" else os.mkfifo(tmp_path / "run/lock")
    with pytest.raises(UserError, match="lock is not a regular file"), Run(tmp_path / "run").hold_lock():
        raise AssertionError
    assert precious.read_text() == "mine"


def test_linked_folders_in_a_run_are_refused(golden: Path, tmp_path: Path, refused: Any) -> None:
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(golden / "charts", ignore_errors=True)
    (golden / "charts").symlink_to(tmp_path / "elsewhere")
    assert "charts is a symbolic link" in refused("report", golden)
    (next((golden / "trials").iterdir()) / "r9").symlink_to(tmp_path / "elsewhere")
    refuses("r9 is a symbolic link", refuse_links, golden, ("trials",))
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (BRACKETS, "nested too deeply"), ('{"a":' * 100_000, "nested too deeply"), ("[]", "not a JSON object"),
        ("3", "not a JSON object"), ("nothing", "Expecting value"), ("\udc80", "invalid start byte"),
    ],
)  # fmt: skip
def test_invalid_json_objects_are_reported(content: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_json(content.encode("utf-8", "surrogateescape"))


@pytest.mark.parametrize(
    "changed", [{"measurements": 3}, {"facts": []}, {"round": "one"}, {"warnings": {}}, {"measurements": [1]}]
)
def test_records_with_wrong_types_are_reported(changed: dict[str, Any]) -> None:
    refuses("Record", from_json, Record, {"status": "ok", **changed})


@pytest.mark.parametrize("file", ["record.json", "job.json", "environment.json", "models.json", "study.toml"])
@pytest.mark.parametrize("content", [BRACKETS, '{"trial": 1, "measurements": 5, "status": "ok", "models": 3}'])
def test_deep_json_and_wrong_types_in_a_run_cause_no_traceback(
    golden: Path, call: Any, file: str, content: str
) -> None:
    place = record_of(golden).parent if file in ("record.json", "job.json") else golden
    (place / file).write_text(content)
    code, out, err = call("show", golden)
    assert code == 0 and out.startswith("resnet18, size 64, batch 1\n"), err


@pytest.mark.parametrize("file", [*NOTE_TYPES, "models.json", "self-test.json"])
def test_damaged_json_files_of_a_run_are_reported(golden: Path, call: Any, file: str) -> None:
    wrong = json.dumps({"schema": SCHEMA, **dict.fromkeys(("trials", "devices", "attempts", "models"), 3)})
    for content, told in (("{", f"{file} can't be read ("), (wrong, f"{file} is damaged (")):
        (golden / file).write_text(content)
        code, out, err = call("show", golden)
        assert code == 0 and told in err and err.count("\n") == 1, err
        assert told in " ".join(out.split()), "the verdict, too"


def test_a_deeply_nested_study_is_refused_in_one_line(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(f"models = {BRACKETS}")
    assert "nested too deeply" in refused("run", "deep.toml")


def test_pipes_do_not_block(refused: Any, tmp_path: Path) -> None:
    for name in ("study.toml", "m.onnx", "w.pth", "f.npz", "net.py"):
        os.mkfifo(tmp_path / name)
    said = [
        refused("run", "study.toml"), refused("run", "m.onnx"), refused("run", "net.py:net"),
        refused(*FAKE, "--weights", "w.pth"), refused("time", "m.onnx", "--trtexec", "f.npz"),
    ]  # fmt: skip
    assert all("is not a regular file" in line for line in said), said
    with pytest.raises(ValueError, match="is not a regular file"):
        read_npz(tmp_path / "f.npz")


def test_zip_bombs_are_refused_before_reading(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "samples.npz", "w", zipfile.ZIP_DEFLATED) as made, made.open("x.npy", "w") as f:
        for _ in range(64):
            f.write(bytes(1 << 20))
    with pytest.raises(ValueError, match="unpack to more"):
        read_npz(tmp_path / "samples.npz")


def test_damaged_samples_are_the_reason_of_the_row(golden: Path, call: Any) -> None:
    samples = record_of(golden).with_name("samples.npz")
    samples.write_bytes(samples.read_bytes()[:-30])
    assert "samples.npz is damaged; the same `dyno run`" in " ".join(call("show", golden)[1].split())


def test_csv_cells_are_not_formulas() -> None:
    columns = Column("model", kind=TEXT), Column("value")
    rows = [{"model": text, "value": -1.5} for text in ('=HYPERLINK("x")', "+1+1", "-a", "@a", "\x1b[31ma\nb", "-3.5")]
    written = export([Table("t", "T", "d", columns, rows)], "csv")
    assert written.splitlines()[1:] == [
        '"\'=HYPERLINK(""x"")",-1.5', "'+1+1,-1.5", "'-a,-1.5", "'@a,-1.5", "[31ma b,-1.5", "-3.5,-1.5",
    ]  # fmt: skip
    assert csv_cell(-2) == -2


def test_hostile_names_are_escaped_in_every_format(golden: Path, call: Any) -> None:
    for path in golden.glob("trials/*/r*/job.json"):
        job = json.loads(path.read_text())
        job["trial"]["model"]["name"] = "=a|`b`<b>\x1b[31m\n\udc80"
        path.write_text(json.dumps(job))
    for format in ("text", "markdown", "csv", "html"):
        code, out, _ = call("show", golden, "--format", format)
        assert code == 0 and "\x1b" not in out
        assert format != "csv" or "\n'=a|" in out
        assert format not in ("markdown", "html") or "<b>" not in out
        assert format != "markdown" or "a|" not in out


@pytest.mark.parametrize("words", [["run", "caf\udce9.onnx"], ["show", "caf\udce9"], [*FAKE, "--out", "caf\udce9"]])
def test_undecodable_names_are_refused_in_one_line(refused: Any, words: list[str]) -> None:
    assert "caf\\udce9" in refused(*words)


def test_studies_in_python_refuse_undecodable_names() -> None:
    refuses("is not UTF-8", Study, models=("caf\udce9.onnx",))


def test_scratch_folders_of_killed_builds_are_removed(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    with cache.making("aaaa") as at_work:
        (cache.folder / ".bbbb.killed" / "bbbb").mkdir(parents=True)
        with cache.making("cccc"):
            assert not (cache.folder / ".bbbb.killed").exists() and at_work.exists()
    assert not list(cache.folder.glob(".*.*"))


def test_a_pipe_as_a_record_is_damaged(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "record.json")
    refuses("is damaged", read_record, tmp_path)


@pytest.fixture
def shell(golden: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Run a bash line with `dyno` as a function."""

    def run(line: str) -> subprocess.CompletedProcess[str]:
        begin = f'set -o pipefail; dyno() {{ "{sys.executable}" -m dyno "$@"; }}; '
        return subprocess.run(["bash", "-c", begin + line], cwd=golden.parent, capture_output=True, text=True)

    return run


def test_a_closed_output_pipe_is_no_error(shell: Callable[[str], Any], golden: Path) -> None:
    first = shell("dyno show golden")
    assert first.returncode == 0 and first.stdout
    for line in ("dyno show golden | head -0", "dyno show golden >&-", "dyno show golden 2>&1 | true"):
        done = shell(line)
        assert (done.returncode, done.stderr) == (0, ""), line
    done = shell("dyno report golden >&- 2>&-")
    assert done.returncode == 0 and (golden / "report.html").stat().st_size
    done = shell("dyno show golden > /dev/full")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "disk is full" in done.stderr


def test_the_report_is_written_before_printing(shell: Callable[[str], Any], golden: Path) -> None:
    run = golden.parent / "closed"
    done = shell(f"dyno {' '.join([*FAKE, *SHORT])} --out {run} >&-")
    assert done.returncode == 0 and (run / "report.html").exists() and (run / "results.csv").exists()


@pytest.mark.usefixtures("preloaded", "unreported")
def test_damaged_rounds_are_measured_again(call: Any, tmp_path: Path) -> None:
    words = [*FAKE, *SHORT, "--out", tmp_path / "run"]
    assert call(*words)[0] == 0
    first, second = sorted((tmp_path / "run").glob("trials/*/r*/record.json"))
    kept, samples = first.read_bytes(), second.with_name("samples.npz")
    samples.write_bytes(samples.read_bytes()[:-30])
    assert "r1/samples.npz is damaged, so that round is measured again" in call(*words, code=0)[2]
    assert first.read_bytes() == kept and np.all(read_npz(samples)["latency_model"] > 0)


@pytest.mark.usefixtures("preloaded", "unreported")
def test_every_command_treats_a_damaged_record_alike(call: Any, tmp_path: Path) -> None:
    words = [*FAKE, *SHORT, "--out", tmp_path / "run"]
    assert call(*words)[0] == 0
    first, second = sorted((tmp_path / "run").glob("trials/*/r*/record.json"))
    kept, whole = first.read_bytes(), second.read_text()
    stored = json.loads(whole)
    for number, text in enumerate((
        whole[: len(whole) // 2], "[1]", json.dumps({k: v for k, v in stored.items() if k != "status"}),
        json.dumps(stored | {"measurements": "none"}),
    ), start=1):  # fmt: skip
        second.write_text(text)
        code, out, err = call("show", tmp_path / "run")
        assert code == 0 and FAKE[1].partition(":")[2] in out, "the other round has its row"
        assert f"{second} is damaged (" in err and "the same `dyno run` measures this round again" in err
        code, _, err = call(*words)
        assert code == 0 and "r1/record.json is damaged, so that round is measured again" in " ".join(err.split())
        assert first.read_bytes() == kept and json.loads(second.read_text())["status"] == "ok"
        archived = [path.read_text() for path in (tmp_path / "run").glob("archive/damaged/*/*/record.json")]
        assert len(archived) == number and text in archived


def test_a_short_fault_campaign_finds_no_failure(
    preloaded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("onnx", "torch", "openvino", "safetensors", "av"):
        pytest.importorskip(library)
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import faults
    from benchmarks.fault_campaign import campaign as under_test
    from benchmarks.fault_campaign import mutations, world

    campaign = under_test.Campaign(tmp_path, server=preloaded)  # killed jobs are started, not forked
    (tmp_path / "study.toml").write_text(under_test.STUDY)
    said = [
        world.kills(campaign, 1), world.full_disk(campaign, [10]),
        mutations.mutate(campaign, faults.subjects(campaign, "study TOML,data.yaml"), 8),
    ]  # fmt: skip
    assert campaign.wrong == [], said
    assert said[1].startswith("full disk: 1 limits") and said[2].startswith("mutations: "), said


def test_written_json_is_read_back(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": "\udc80"})
    assert parse_json((tmp_path / "a.json").read_bytes()) == {"a": "\udc80"}


OWN_FILES = {"results.csv": "my,results\n", "lock": "my lock", "notes/a.txt": "mine"}


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Folder of a user's files; some are named like Dyno's."""
    folder = tmp_path / "theirs"
    for name, text in OWN_FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("command", [
    FAKE, ["time", *FAKE[1:]], ["eval", *FAKE[1:], "--data", "digits"],
    ["diff", *FAKE[1:], "--backend", "fake,fake@noise=1"],
    ["bench", "stress", *FAKE[1:]], ["compare", "fake:net", "fake:other", *FAKE[2:]],
    ["bench", "video", "clip.png", "--model", *FAKE[1:]],
    ["bench", "serve", *FAKE[1:], "--rate", "5"],
    ["data", "train", "digits", "--model", "torchvision:resnet18"], ["demo"],
    ["report", "golden"],
], ids=lambda words: " ".join(words[:2]))  # fmt: skip
@pytest.mark.usefixtures("golden")
def test_folders_with_user_files_are_refused(refused: Any, theirs: Path, tmp_path: Path, command: list[str]) -> None:
    """`dyno run` once overwrote a user's results.csv and lock."""
    (tmp_path / "clip.png").touch()
    assert "theirs holds files that Dyno did not write (lock, notes, results.csv)" in refused(
        *command, "--out", "theirs"
    )
    assert content(theirs) == OWN_FILES


def test_reports_are_rewritten_but_never_over_user_files(call: Any, refused: Any, golden: Path) -> None:
    page = golden.parent / "page"
    for _ in range(2):
        assert call("report", golden, "--out", page)[0] == 0
    (page / "report.html").write_text("<title>mine</title>")
    assert "page holds files that Dyno did not write" in refused("report", golden, "--out", page)


@pytest.mark.usefixtures("preloaded", "unreported")
@pytest.mark.parametrize("process", ["12345", ""])
def test_a_run_killed_at_its_start_resumes_unless_user_files_are_present(
    call: Any, tmp_path: Path, process: str
) -> None:
    """A command killed right after making its lock leaves an empty lock."""
    (tmp_path / "run/trials").mkdir(parents=True)
    (tmp_path / "run/lock").write_text(process)
    (tmp_path / "run/mine.txt").touch()
    assert call(*FAKE, *SHORT, "--out", "run")[0] == 2
    (tmp_path / "run/mine.txt").unlink()
    assert call(*FAKE, *SHORT, "--out", "run")[0] == 0


@pytest.mark.usefixtures("preloaded", "unreported")
def test_a_study_file_among_user_files_runs_in_another_folder(call: Any, theirs: Path, tmp_path: Path) -> None:
    (theirs / "study.toml").write_text('models = ["fake:net"]\nchannels = 1\nbackends = ["fake@latency_ms=0.1"]\n')
    before = content(theirs)
    assert call("run", theirs / "study.toml", *SHORT)[0] == 0
    assert content(theirs) == before and (tmp_path / "runs/study/trials").is_dir()


def test_a_lock_that_is_a_hard_link_is_refused(refused: Any, golden: Path, tmp_path: Path) -> None:
    """The process id was once written into the linked file."""
    (tmp_path / "precious").write_text("2026")
    (tmp_path / "begun").mkdir()
    for folder in (golden, tmp_path / "begun"):
        (folder / "lock").unlink(missing_ok=True)
        (folder / "lock").hardlink_to(tmp_path / "precious")
    for words in (["runs", "rm", "golden"], [*FAKE, "--out", "begun"]):
        assert "lock is a hard link to another file" in refused(*words)
    assert (tmp_path / "precious").read_text() == "2026"


def test_explanations_are_not_stored_through_a_link(refused: Any, golden: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (golden / "explained").symlink_to(tmp_path / "elsewhere")
    names = [path.name for path in sorted((golden / "trials").iterdir())][:2]
    assert "explained is a symbolic link" in refused("explain", golden, *names)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_all_that_dyno_wrote_into_a_run_is_removed(call: Any, golden: Path) -> None:
    for name in ("explained", "stress"):
        (golden / name).mkdir()
        (golden / name / "a--b.json").write_text("{}")
    code, out, _ = call("runs", "rm", golden)
    assert code == 0 and not golden.exists(), out


HUGE = 10**30


@pytest.mark.parametrize(
    "option", "--batch --size --rounds --samples --channels --seed --confirm --builds --classes".split()
)
def test_numbers_have_an_upper_limit(refused: Any, option: str) -> None:
    """A batch of 10**30 was once measured; afterwards no table could be made."""
    assert "must be at most" in refused(*FAKE, option, str(HUGE), "--dry-run")


def test_a_number_too_large_for_tables_hides_no_other_row(call: Any, golden: Path) -> None:
    shutil.copytree(golden, golden.with_name("whole"))
    rows = call("show", "golden", "--format", "csv")[1].count("\n")
    trial = record_of(golden).parents[1]
    for path in trial.glob("*/job.json"):
        job = json.loads(path.read_text())
        job["trial"]["dims"]["batch"] = HUGE
        path.write_text(json.dumps(job))
    code, out, err = call("show", "golden", "--format", "csv")
    assert code == 0 and out.count("\n") == rows - 1
    assert "Job.trial.dims.batch" in err and "is left out" in err
    code, out, _ = call("runs", "list", ".")
    assert code == 0 and "golden" in out and "whole" in out


def test_an_unreadable_run_does_not_hide_others(call: Any, golden: Path) -> None:
    shutil.copytree(golden, golden.with_name("broken"))
    for path in golden.with_name("broken").glob("trials/*/*/job.json"):
        path.write_text("{")
    code, out, err = call("report", "broken", "golden", "--out", "page")
    assert code == 3 and out == "page/report.html\n" and "left out: nothing in broken can be read" in err
    assert "golden" in (golden.parent / "page/report.html").read_text()


LONG = "a" * 300


@pytest.mark.parametrize("words", [
    [*FAKE, "--out", LONG], ["run", f"{LONG}.onnx"], ["run", f"{LONG}.py:net"], ["run", f"{LONG}.toml"], ["time", LONG],
    [*FAKE, "--data", LONG], [*FAKE, "--weights", LONG], [*FAKE, "--calibration", LONG], ["show", LONG],
    ["runs", "list", LONG], ["runs", "rm", LONG], ["report", LONG], ["report", "golden", "--out", LONG],
    ["inspect", f"{LONG}.onnx"],
    ["export", "golden", "--out", LONG], ["show", "golden", "--over-time", f"{LONG}.svg"], ["compare", LONG, "golden"],
    ["profile", "fake:net", "--save", f"{LONG}.trace.json"], ["explain", LONG, "a", "b"],
    ["bench", "video", LONG, "--model", "fake:net"],
    ["data", "train", LONG, "--model", "torchvision:resnet18"],
    ["export", "torchvision:resnet18", "--out", f"{LONG}.onnx"],
    ["data", "imagenet-val", LONG, "--out", "x"],
    [*FAKE, "--python", f"fake={LONG}"],
    ["selftest", LONG], ["eval", "fake:net", "--data", LONG], ["bench", "stress", "fake:net", "--out", LONG],
])  # fmt: skip
@pytest.mark.usefixtures("golden")
def test_names_that_are_too_long_are_refused_in_one_line(refused: Any, words: list[str]) -> None:
    """Long names once ended in a traceback with the exit code of a regression."""
    assert "too long" in refused(*words)


HOMELESS = "setpriv --reuid 12345 --regid 12345 --clear-groups --inh-caps=+dac_override --ambient-caps=+dac_override"


@pytest.fixture
def of_no_home(golden: Path) -> list[str]:
    """Command prefix that runs as a numeric user without name and home."""
    words = ["env", *(f"-u{name}" for name in ("HOME", "USER", "LOGNAME", "DYNO_CACHE")), *HOMELESS.split()]
    if os.geteuid() or subprocess.run([*words, "true"], check=False).returncode:
        pytest.skip("this needs root and setpriv")
    golden.parent.chmod(0o777)
    return [*words, "env", f"TMPDIR={golden.parent}"]


def test_users_without_home_or_name_can_measure(of_no_home: list[str], golden: Path) -> None:
    """In a container started with --user 12345, everything but --version once ended in a traceback."""
    words = [*of_no_home, sys.executable, "-m", "dyno", *FAKE, *SHORT]
    done = subprocess.run([*words, "--out", "run"], cwd=golden.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (golden.parent / "dyno-12345").is_dir() and (golden.parent / "run/report.html").exists()


def test_jobs_get_a_home_and_user_where_the_system_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile once failed with `KeyError: getpwuid(): uid not found: 12345`."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    env = make_environment(Runtime(), {"HOME": "/nowhere"})
    assert Path(env["HOME"]).parent == tmp_path and Path(env["HOME"]).is_dir() and env["USER"]
    env = make_environment(Runtime(), {"HOME": str(tmp_path), "LOGNAME": "me"})
    assert env["HOME"] == str(tmp_path) and "USER" not in env


def test_a_temporary_home_of_another_owner_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / f"dyno-{os.getuid()}").symlink_to(tmp_path / "mine")
    with pytest.raises(PermissionError):
        system.temporary_home()


@pytest.mark.parametrize(("line", "said"), [
    ("dyno show golden 1</dev/null", "standard output: it is not open for writing"),
    ("ulimit -v 300000; dyno show golden", "memory is limited to 292 MiB"),
    (f"ulimit -n 8; dyno {' '.join(FAKE)}", "dyno: too many files are open; allow more (ulimit -n) and run again"),
    ("ulimit -f 0; dyno doctor", "temporary files can't be written; free space, or give their folder in"),
])  # fmt: skip
def test_missing_system_resources_are_reported_in_one_line(shell: Callable[[str], Any], line: str, said: str) -> None:
    done = shell(line)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_unexpanded_tildes_are_expanded(shell: Callable[[str], Any], golden: Path) -> None:
    done = shell("HOME=$PWD/home; export HOME; mkdir home; dyno show golden --format csv --out=~/t.csv")
    assert done.returncode == 0 and (golden.parent / "home" / "t.csv").exists() and not Path("~").exists(), done.stderr


def test_an_interrupt_during_imports_causes_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-m", "dyno", "show"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_an_invalid_mplbackend_does_not_matter(shell: Callable[[str], Any], golden: Path) -> None:
    """An MPLBACKEND of a missing screen or library once ended `dyno run` after its last round."""
    done = shell("MPLBACKEND=nonsense dyno report golden 2</dev/null")
    assert done.returncode == 0 and (golden / "report.html").exists()


def test_an_unwritable_home_causes_no_warning(shell: Callable[[str], Any], golden: Path) -> None:
    done = shell("HOME=/dev/null dyno report golden")
    assert (done.returncode, done.stderr) == (0, ""), "Matplotlib's two lines about its configuration"


def test_a_process_limit_is_reported_in_one_line(of_no_home: list[str], golden: Path) -> None:
    words = [*of_no_home, "prlimit", "--nproc=1", sys.executable, "-m", "dyno", *FAKE, "--out", "run"]
    done = subprocess.run(words, cwd=golden.parent, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "the limit on processes and threads is reached" in done.stderr.splitlines()[-1]


def _obey_permissions() -> None:
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: root's bypass of file permissions
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def test_trials_without_read_permission_are_not_called_missing(golden: Path) -> None:
    """The error was once "has no trials yet"."""
    command = [sys.executable, "-m", "dyno", "show", str(golden)]
    (golden / "trials").chmod(0)
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=_obey_permissions)
    assert done.returncode == 2 and "trials: permission denied; allow this user to read" in done.stderr, done.stderr
    (golden / "trials").chmod(0o755)
    trial = record_of(golden).parents[1]
    trial.chmod(0)
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=_obey_permissions)
    trial.chmod(0o755)
    assert done.returncode == 0 and f"{trial} can't be read (permission denied); it is left out" in done.stderr


@pytest.mark.usefixtures("preloaded", "unreported")
@pytest.mark.parametrize("turns", ["--turns", "--no-turns"])
def test_removing_a_run_during_measurement_is_reported(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: str
) -> None:
    def remove(progress: Progress, trial: Any, record: Any, **_: Any) -> None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)

    monkeypatch.setattr(Progress, "done", remove)
    code, out, err = call(*FAKE, *SHORT, turns, "--out", "run")
    assert (code, out) == (3, "") and "run was removed or replaced while it was measured" in err, err
    assert not (tmp_path / "run").exists()


def test_internal_errors_are_one_line_with_a_details_file(
    call: Any, monkeypatch: pytest.MonkeyPatch, golden: Path
) -> None:
    """The exit code was once 1, which CI reads as a regression."""

    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("first line\nsecond line")

    monkeypatch.setattr("dyno.cli.commands._show_run", fail)
    code, out, err = call("show", golden, allowed=True)
    assert (code, out) == (2, "") and err.count("\n") == 1 and "internal error, TypeError: first line; please" in err
    details = Path(err.strip().rpartition(" ")[2]).read_text()
    assert "Traceback" in details and "second line" in details
    monkeypatch.setenv("DYNO_TRACEBACK", "1")
    assert "second line" in call("show", golden, allowed=True)[2]


@pytest.mark.usefixtures("preloaded", "unreported")
def test_the_same_command_remeasures_a_killed_job(call: Any, importable: Any, tmp_path: Path) -> None:
    """Both rounds of the trial were once lost, and rerunning the command did not repeat them."""
    marker = tmp_path / "killed"
    importable(
        "backend",
        "import os, signal\nfrom pathlib import Path\nfrom dyno.worker.backends.fake import Fake\n\n"
        "class Victim(Fake):\n    name = 'victim'\n\n    def load(self, trial, artifact):\n"
        f"        if not os.path.exists({str(marker)!r}):\n            Path({str(marker)!r}).touch()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n        return super().load(trial, artifact)\n",
    )
    words = ["run", "fake:net", "--channels", "1", "--backend", "backend:Victim@latency_ms=0.1", *SHORT, "--no-turns"]
    code, out, _ = call(*words, "--out", "run")
    said = " ".join(out.split())
    assert code == 3 and "the same `dyno run` measures that round again" in said and "--retry-failed" in said
    records = sorted(tmp_path.glob("run/trials/*/r*/record.json"))
    statuses = [json.loads(path.read_text())["status"] for path in records]
    assert statuses == ["crashed", "ok"], "the other round is measured all the same"
    assert "1 failed job tried again: killed by SIGKILL" in call(*words, "--out", "run", code=0)[2]


def test_a_full_disk_is_recognised_from_messages_and_causes(tmp_path: Path) -> None:
    system.raise_if_disk_full(other := RuntimeError("iostream error"), tmp_path, 1 << 20)
    with pytest.raises(OSError, match="No space left"):
        system.raise_if_disk_full(RuntimeError("PytorchStreamWriter failed: No space left on device"), tmp_path)
    other.__cause__ = OSError(errno.EDQUOT, "quota")
    for file, named in ((None, tmp_path), ("/full/x.onnx", "/full/x.onnx")):
        other.__cause__.filename = file
        with pytest.raises(OSError, match="quota") as said:
            system.raise_if_disk_full(other, tmp_path)
        assert said.value.filename == str(named)


def test_circular_error_causes_do_not_hang_a_job(call: Any, tmp_path: Path) -> None:
    """PyTorch's compiler raises errors with circular causes; the search for a full disk among them once never ended."""
    (tmp_path / "net.py").write_text(
        "def net():\n    a, b = ValueError('a'), KeyError('b')\n    a.__cause__, b.__cause__ = b, a\n    raise a\n"
    )
    _, _, err = call("run", "net.py:net", "--backend", "pytorch", "--timeout", "60", "--out", "run", code=2)
    assert "ValueError: a" in err and "killed" not in err


def test_a_removed_current_folder_is_reported_in_one_line(tmp_path: Path) -> None:
    line = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -m dyno {' '.join(FAKE)}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=make_environment(Runtime()), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "dyno: the current folder no longer exists; change to another one (cd)"
