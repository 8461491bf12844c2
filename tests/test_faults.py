"""What breaks around Dyno costs a line at most: names, pipes, links, bombs, brackets, a reader that goes away."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dyno.analysis.formatting import csv_cell
from dyno.analysis.presentation.export import export
from dyno.analysis.presentation.table import TEXT, Column, Table
from dyno.analysis.records.arrays import read_npz
from dyno.store import Cache, Run
from dyno.study import Study
from dyno.worker.record import Record, parse_json, read_record, refuse_links, write_json, write_text
from dyno.worker.spec import UserError, from_json

Call = Callable[..., tuple[int, str, str]]
Refused = Callable[..., str]
ROOT = Path(__file__).resolve().parents[1]
BRACKETS = "[" * 100_000
FAKE = ["run", "fake:net", "--channels", "1", "--backends", "fake@latency_ms=0.1"]
SHORT = "--rounds 2 --seconds 0.04 --block 0.01 --warmup 0.02 --threads 1".split()


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of a whole run folder."""
    return Path(shutil.copytree(ROOT / "tests/golden/run", tmp_path / "golden"))


def record_of(run: Path) -> Path:
    """The record of a round that ended well and has samples."""
    return next(path for path in sorted(run.glob("trials/*/r*/record.json")) if (path.parent / "samples.npz").exists())


def test_a_file_is_written_in_place_of_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("study.toml", "study.toml.part"):
        (tmp_path / name).symlink_to(precious)
    write_text(tmp_path / "study.toml", "new \udc80")
    assert precious.read_text() == "mine"
    assert (tmp_path / "study.toml").read_text() == "new \\udc80" and not (tmp_path / "study.toml").is_symlink()


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("before")
    monkeypatch.setattr("os.fsync", lambda _: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "a", "half")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "before"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/lock").symlink_to(precious) if kind == "link" else os.mkfifo(tmp_path / "run/lock")
    with pytest.raises(UserError, match="lock is not a regular file"), Run(tmp_path / "run").locked():
        raise AssertionError
    assert precious.read_text() == "mine"


def test_folders_of_a_run_that_are_links_are_refused(golden: Path, tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(golden / "charts", ignore_errors=True)
    (golden / "charts").symlink_to(tmp_path / "elsewhere")
    assert "charts is a symbolic link" in refused("report", golden)
    trial = next((golden / "trials").iterdir())
    (trial / "r9").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="r9 is a symbolic link"):
        refuse_links(golden, ("trials",))
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("content", [BRACKETS, '{"a":' * 100_000, "[]", "3", "nothing", "\udc80"])
def test_json_that_is_no_object_is_told(content: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_json(content.encode("utf-8", "surrogateescape"))


@pytest.mark.parametrize(
    "changed", [{"measurements": 3}, {"facts": []}, {"round": "one"}, {"warnings": {}}, {"measurements": [1]}]
)
def test_a_record_of_other_types_is_told(changed: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="Record"):
        from_json(Record, {"status": "ok", **changed})


@pytest.mark.parametrize("file", ["record.json", "job.json", "environment.json", "models.json", "study.toml"])
@pytest.mark.parametrize("content", [BRACKETS, '{"trial": 1, "measurements": 5, "status": "ok", "models": 3}'])
def test_brackets_and_wrong_types_in_a_run_are_no_traceback(golden: Path, call: Call, file: str, content: str) -> None:
    place = record_of(golden).parent if file in ("record.json", "job.json") else golden
    (place / file).write_text(content)
    code, out, err = call("show", golden)
    assert code in (0, 2) and (out or err.startswith("dyno: "))


def test_a_study_of_brackets_is_one_line(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(f"models = {BRACKETS}")
    assert "nested too deeply" in refused("run", "deep.toml")


def test_pipes_are_not_waited_for(refused: Refused, tmp_path: Path) -> None:
    for name in ("study.toml", "m.onnx", "w.pth", "f.npz", "net.py"):
        os.mkfifo(tmp_path / name)
    said = [
        refused("run", "study.toml"), refused("run", "m.onnx"), refused("run", "net.py:net"),
        refused(*FAKE, "--weights", "w.pth"), refused("time", "m.onnx", "--trtexec", "f.npz"),
    ]  # fmt: skip
    assert all("is not a regular file" in line for line in said), said
    with pytest.raises(ValueError, match="is not a regular file"):
        read_npz(tmp_path / "f.npz")


def test_a_bomb_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "samples.npz", "w", zipfile.ZIP_DEFLATED) as made, made.open("x.npy", "w") as f:
        for _ in range(64):
            f.write(bytes(1 << 20))
    with pytest.raises(ValueError, match="unpack to more"):
        read_npz(tmp_path / "samples.npz")


def test_damaged_samples_are_the_rows_reason(golden: Path, call: Call) -> None:
    samples = record_of(golden).with_name("samples.npz")
    samples.write_bytes(samples.read_bytes()[:-30])
    assert "samples.npz is damaged; the same `dyno run`" in " ".join(call("show", golden)[1].split())


def test_cells_of_csv_are_no_formulas() -> None:
    columns = Column("model", kind=TEXT), Column("value")
    rows = [{"model": text, "value": -1.5} for text in ('=HYPERLINK("x")', "+1+1", "-a", "@a", "\x1b[31ma\nb", "-3.5")]
    written = export([Table("t", "T", "d", columns, rows)], "csv")
    assert written.splitlines()[1:] == [
        '"\'=HYPERLINK(""x"")",-1.5', "'+1+1,-1.5", "'-a,-1.5", "'@a,-1.5", "[31ma b,-1.5", "-3.5,-1.5",
    ]  # fmt: skip
    assert csv_cell(-2) == -2


def test_names_are_harmless_wherever_they_are_printed(golden: Path, call: Call) -> None:
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
def test_names_of_no_encoding_are_one_line(refused: Refused, words: list[str]) -> None:
    assert "caf\\udce9" in refused(*words)


def test_a_study_in_python_takes_no_names_of_no_encoding() -> None:
    with pytest.raises(UserError, match="is not UTF-8"):
        Study(models=("caf\udce9.onnx",))


def test_scratch_folders_of_killed_makers_are_swept(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    with cache.making("aaaa") as at_work:
        (cache.folder / ".bbbb.killed" / "bbbb").mkdir(parents=True)
        with cache.making("cccc"):
            assert not (cache.folder / ".bbbb.killed").exists() and at_work.exists()
    assert not list(cache.folder.glob(".*.*"))


def test_a_pipe_as_a_record_is_damaged(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "record.json")
    with pytest.raises(UserError, match="is damaged"):
        read_record(tmp_path)


@pytest.fixture
def shell(golden: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """A line for bash, in which `dyno` is the command line."""

    def run(line: str) -> subprocess.CompletedProcess[str]:
        begin = f'set -o pipefail; dyno() {{ "{sys.executable}" -m dyno "$@"; }}; '
        return subprocess.run(["bash", "-c", begin + line], cwd=golden.parent, capture_output=True, text=True)

    return run


@pytest.mark.slow
def test_a_reader_that_goes_away_costs_nothing(shell: Callable[[str], Any], golden: Path) -> None:
    first = shell("dyno show golden")
    assert first.returncode == 0 and first.stdout
    for line in ("dyno show golden | head -0", "dyno show golden >&-", "dyno show golden 2>&1 | true"):
        done = shell(line)
        assert (done.returncode, done.stderr) == (0, ""), line
    done = shell("dyno report golden >&- 2>&-")
    assert done.returncode == 0 and (golden / "report.html").stat().st_size
    done = shell("dyno show golden > /dev/full")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "disk is full" in done.stderr


@pytest.mark.slow
def test_the_report_is_written_before_anything_is_printed(shell: Callable[[str], Any], golden: Path) -> None:
    run = golden.parent / "closed"
    done = shell(f"dyno {' '.join([*FAKE, *SHORT])} --out {run} >&-")
    assert done.returncode == 0 and (run / "report.html").exists() and (run / "results.csv").exists()


@pytest.mark.usefixtures("preloaded", "unreported")
def test_damaged_rounds_are_measured_again(call: Call, tmp_path: Path) -> None:
    words = [*FAKE, *SHORT, "--out", tmp_path / "run"]
    assert call(*words)[0] == 0
    first, second = sorted((tmp_path / "run").glob("trials/*/r*/record.json"))
    kept, samples = first.read_bytes(), second.with_name("samples.npz")
    samples.write_bytes(samples.read_bytes()[:-30])
    code, _, err = call(*words)
    assert code == 0 and "r1/samples.npz is damaged, so that round is measured again" in err
    assert first.read_bytes() == kept and np.all(read_npz(samples)["latency_model"] > 0)


@pytest.mark.usefixtures("preloaded", "unreported")
def test_a_damaged_record_is_the_same_to_every_command(call: Call, tmp_path: Path) -> None:
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


def test_a_short_fault_campaign_finds_nothing(preloaded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("onnx", "torch", "openvino", "safetensors", "av"):
        pytest.importorskip(library)
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import faults
    from benchmarks.fault_campaign import campaign as under_test
    from benchmarks.fault_campaign import mutations, world

    campaign = under_test.Campaign(tmp_path, server=preloaded)  # what is killed or has no room is started all the same
    (tmp_path / "study.toml").write_text(under_test.STUDY)
    said = [
        world.kills(campaign, 1), world.full_disk(campaign, [10]),
        mutations.mutate(campaign, faults.subjects(campaign, "study TOML,data.yaml"), 8),
    ]  # fmt: skip
    assert campaign.wrong == [], said
    assert said[1].startswith("full disk: 1 limits") and said[2].startswith("mutations: "), said


def test_what_write_json_writes_is_read_back(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": "\udc80"})
    assert parse_json((tmp_path / "a.json").read_bytes()) == {"a": "\udc80"}
