"""The command line: bad input gives one line and exit code 2, and each command documents its arguments."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from drawn import photographs
from dyno import Study, __version__
from dyno.cli import app, exits
from dyno.devices import places, spread

SHORT = "--rounds 1 --seconds 0.04 --block 0.01 --warmup 0.02 --threads 1".split()
FAKE = ["run", "fake:net", "--channels", "1", "--backend", "fake@latency_ms=0.1", *SHORT]
COMMANDS = (
    "run time eval compare demo bench show report runs export pack verify reproduce site data profile explain inspect "
    "diff doctor selftest"
).split()
BELOW = ("bench video", "bench serve", "bench cold-start", "bench stress", "runs list", "runs rm", "data train")

CROWDED = "No winner is named"  # verdict of a run that other programs disturbed


@pytest.mark.parametrize("harm", ["empty", "truncated", "text", "folder"])
def test_a_broken_onnx_file_is_named(refused: Any, onnx_file: Path, harm: str) -> None:
    content = onnx_file.read_bytes()
    onnx_file.unlink()
    if harm == "folder":
        onnx_file.mkdir()
    else:
        onnx_file.write_bytes({"empty": b"", "truncated": content[:-9], "text": b"not a model\n" * 50}[harm])
    line = refused("run", "m.onnx", "--backend", "onnxruntime")
    assert "m.onnx" in line
    assert line.startswith("m.onnx is a folder, not a model file" if harm == "folder" else "m: ")


def test_an_encoding_without_the_signs_of_tables_gets_plain_ones(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    command = [sys.executable, "-m", "dyno", *FAKE, "--out", "rün"]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    rules = [line for line in process.stdout.splitlines() if line and not line.strip("-")]
    assert len(rules) == 3 and len({*map(len, rules)}) == 1
    assert "report: r\\xfcn/report.html" in process.stdout and "\\u2" not in process.stdout


def test_a_file_without_inputs_is_refused_in_one_line(refused: Any, onnx_file: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.load(onnx_file)
    value = onnx.helper.make_tensor("value", onnx.TensorProto.FLOAT, [1], [1.0])
    model.graph.node[0].CopyFrom(onnx.helper.make_node("ConstantOfShape", ["shape"], ["output"], value=value))
    model.graph.initializer.append(onnx.helper.make_tensor("shape", onnx.TensorProto.INT64, [4], [2, 3, 8, 8]))
    del model.graph.input[:]
    onnx.save(model, onnx_file)
    assert "m.onnx has no inputs, so there is nothing to run it on; export" in refused("run", "m.onnx")


def test_a_broken_ir_is_named(refused: Any, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    (tmp_path / "m.xml").write_text("<net name='x'>")
    assert "m.xml" in refused("run", "m.xml", "--backend", "openvino")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Eight images of two classes with non-ASCII names."""
    return photographs(tmp_path / "photos", "猫", "Ωμέγα [/x]", count=4)


def test_data_folders_without_images_are_refused(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert refused(*FAKE, "--data", "empty").startswith("no class folders in ")
    (tmp_path / "empty/cat").mkdir()
    assert refused(*FAKE, "--data", "empty").startswith("no images in ")
    (tmp_path / "file").write_text("")
    assert refused(*FAKE, "--data", "file").startswith("file is not a folder")


def test_unwritable_outputs_are_refused(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refused(*FAKE, "--out", "file").endswith(
        "file is a file, or a link to nothing, where a folder is needed; give another path"
    )
    Path("link").symlink_to("nowhere")
    assert "link is a file, or a link to nothing, where a folder is needed" in refused(*FAKE, "--out", "link")
    assert "below is a file, or a link to nothing, where a folder is needed" in refused(*FAKE, "--out", "file/below")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Folder on a file system of 40 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    tried = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", folder], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no small file system can be mounted here: {tried.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_read_only_file_system_is_reported(refused: Any, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert "the file system is read-only; give another path (--out; DYNO_CACHE for the cache, TMPDIR" in refused(
        *FAKE, "--out", small_disk / "r"
    )


def test_a_lost_device_is_not_a_user_error(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "execute", lambda *_, **__: places.list_left([]))
    code, _, err = call(*FAKE, "--out", "lost")
    assert (code, err.splitlines()[-1]) == (
        3, "dyno: every device of the study was lost; the same command measures what is missing"
    )  # fmt: skip


def test_list_options_take_commas_or_repetition(call: Any) -> None:
    once = "--backend fake@latency_ms=1,fake@latency_ms=2 --batch 1,2 --size 8,16"
    twice = "--backend fake@latency_ms=1 --batch 1 --backend fake@latency_ms=2 --batch 2 --size 8 --size 16"
    first, second = (call("run", "fake:[]", *words.split(), "--dry-run") for words in (once, twice))
    assert first == second and first[0] == 0 and "8 trials of [], 0 refused" in first[1]


def test_a_dry_run_lists_trials_and_runs_nothing(call: Any) -> None:
    code, out, err = call("run", "fake:[/x]", "--backend", "fake", "--precision", "fp32,fp8", "--dry-run")
    assert (code, err) == (0, "")
    assert "[/x]" in out and "2 trials of [/x], 1 refused; 5 rounds in turns each. Nothing was run." in out
    assert "sampling take 45.0 s at most" in out and "further rounds, until 10 minutes were measured in all." in out
    assert "fake has no fp8" in " ".join(out.split())
    assert not Path("runs").exists()
    _, out, _ = call("run", "fake:[/x]", "--backend", "fake", "--minutes", "0.5", "--dry-run")
    assert "at most" in out and "--minutes 0.5 ends it sooner" in out and "Undecided comparisons get" not in out
    _, out, _ = call("run", "fake:[/x]", "--backend", "pytorch", "--device", "cuda:99", "--dry-run")
    assert "There is no cuda:99 here" in out and "refused" in out


def test_show_lists_its_tables(call: Any) -> None:
    code, out, _ = call("show", "--list")
    assert code == 0 and all(name in out for name in ("trials", "frontier", "break-even", "latency-model", "stress"))


@pytest.mark.parametrize("command", [*COMMANDS, *BELOW])
def test_every_command_has_help(call: Any, command: str) -> None:
    code, out, err = call(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert f"dyno {command}" in out and "<" not in out and max(map(len, out.splitlines())) <= 80
    assert call(*command.split(), "--help-all")[0] == 0


def test_the_overview_shows_first_sentences_and_imports_no_library() -> None:
    code = "import sys; sys.argv = ['dyno', '--help']; from dyno.cli.app import main; main(); "
    code += "print(sorted({'typer', 'rich', 'numpy', 'dyno.study', 'dyno.worker'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    *lines, loaded = done.stdout.splitlines()
    assert loaded == "[]" and len(lines) <= 40 and max(map(len, lines)) <= 80
    made: Any = typer.main.get_command(app.make_app())
    shown = dict(re.findall(r"^  ([\w-]+) +(\S.*(?:\n {4,}.*)*)$", done.stdout[done.stdout.index("Measure:") :], re.M))
    sentences = {name: each.help.partition(". ")[0].removesuffix(".") for name, each in made.commands.items()}
    assert {name: " ".join(text.split()) for name, text in shown.items()} == sentences


def test_every_field_of_a_study_is_an_option_with_its_help() -> None:
    made: Any = typer.main.get_command(app.make_app())
    options = {p.name: p.help for p in made.commands["run"].params}
    fields = [f for f in dataclasses.fields(Study) if f.metadata["flags"] is not None]
    assert len(fields) > 30
    assert [f.name for f in fields if not options[f.name].startswith(f.metadata["help"])] == []


def test_short_help_groups_common_options_and_long_help_has_all(call: Any) -> None:
    short, long = (call("run", flag)[1] for flag in ("--help", "--help-all"))
    options = re.findall(r"^  (?:-\w, )?(--[\w-]+)", short, re.M)
    assert len(options) <= 16 and {"--backend", "--rounds", "--quick"} <= set(options)
    assert "--confirm" not in short and "--help-all shows" in short
    assert re.findall(r"^(\w+), e\.g\. --", short, re.M) == ["What", "Accuracy", "Effort", "Where"]
    assert "--confirm N " in long and "3 with a budget, else 0" in " ".join(long.split()) and "-v, --verbose" in long
    assert not re.search(r"<\w+>|--backends|--imgsz", long), "flags have no type, and aliases aren't shown"
    assert call("run", "--help-all", "fake:net")[0] == 0, "nothing is run"
    assert max(map(len, long.splitlines())) <= 80


def test_common_option_aliases_are_accepted(call: Any) -> None:
    words = "run fake:net --backends fake --precisions fp32,fp8 --batch-size 1,2 --imgsz 8 --dry-run".split()
    assert "4 trials of net, 2 refused" in call(*words, code=0)[1]
    assert "4 trials" in call(*words, "--quick", code=0)[1] and "1 round in turns" in call(*words, "--quick")[1]


def test_help_lists_all_commands(call: Any) -> None:
    _, out, _ = call("--help", code=0)
    assert len(out.splitlines()) <= 40 and out.count("\n  dyno ") == 4
    assert re.findall(r"^  ([\w-]+)  ", out.partition("\nMeasure:")[2], re.M) == COMMANDS, "a line for each"
    assert "--version" in call("--help-all")[1]


@pytest.mark.parametrize(("old", "new"), exits.RENAMED.items())
def test_a_renamed_command_runs_by_its_old_name(call: Any, old: str, new: str) -> None:
    assert call(old, "--help-all") == (
        0,
        call(*new.split(), "--help-all")[1],
        f"dyno: `dyno {old}` is now `dyno {new}`\n",
    )


@pytest.mark.parametrize("command", ["show", "doctor", "run", "compare"])
def test_an_interrupt_tells_how_to_continue(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`show` and `doctor` measure nothing, so nothing is left."""
    monkeypatch.setattr(sys, "argv", ["dyno", command])
    for name in ("_outlive_readers", "signal.signal"):  # they would change this process
        monkeypatch.setattr(f"dyno.cli.exits.{name}", lambda *_: None)
    for name in ("OPENBLAS_NUM_THREADS", "MPLBACKEND"):
        monkeypatch.setenv(name, "1" if name.startswith("OPEN") else "agg")
    with pytest.raises(SystemExit) as e:
        exits.end(lambda **_: exits.INTERRUPTED)  # type: ignore[arg-type]
    err = capsys.readouterr().err
    assert e.value.code == 130 and err.startswith("dyno: stopped")
    assert (err == "dyno: stopped\n") == (command in ("show", "doctor"))


def test_an_unknown_command_exits_with_2(call: Any) -> None:
    assert call("rum")[0] == 2
    assert call("run")[0] == 2


def test_the_package_runs_as_a_module_and_prints_its_version(call: Any) -> None:
    done = subprocess.run([sys.executable, "-m", "dyno", "--version"], capture_output=True, text=True, timeout=1200)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"dyno {__version__}\n", "")
    assert call("--version")[:2] == (0, done.stdout)


def test_the_dyno_command_is_installed(dyno: Any, tmp_path: Path) -> None:
    done = dyno(*FAKE, "--out", tmp_path / "r", code=0)
    assert "fake@latency_ms=0.1 fp32 takes" in done.stdout or CROWDED in done.stdout
    assert dyno("show", tmp_path / "none").returncode == 2


# Last: commands below are forked.


@pytest.mark.usefixtures("preloaded", "unreported")
def test_unreadable_images_are_named_or_skipped(refused: Any, call: Any, photos: Path) -> None:
    (photos / "猫/1.png").write_bytes(b"no image")
    (photos / "猫/2.png").write_bytes((photos / "猫/2.png").read_bytes()[:60])
    line = refused(*FAKE, "--data", photos, "--out", "r")
    assert line.startswith("2 of 8 images can't be read: ") and "猫/1.png" in line and "猫/2.png" in line
    call(*FAKE, "--data", photos, "--unreadable", "skip", "--out", "r", code=0)
    with np.load(next(Path("r").glob("trials/*/r0/outputs.npz"))) as outputs:
        assert set(outputs["label"]) <= {0, 1} and len(outputs["label"]) == len(outputs["sample"]) > 0
    assert call("show", "r")[0] == 0


@pytest.mark.usefixtures("preloaded", "unreported")
def test_a_full_disk_keeps_earlier_measurements(call: Any, small_disk: Path) -> None:
    words = [*FAKE, "--batch", "1,2,3,4", "--out", small_disk]
    _, _, err = call(*words, code=2)
    last = err.splitlines()[-1]
    assert last.startswith("dyno: ") and "the disk is full; free some space" in last
    assert "Traceback" not in err
    done = {f: f.stat().st_mtime_ns for f in small_disk.glob("trials/*/r0/record.json")}
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    call(*words, code=0)
    assert {f: f.stat().st_mtime_ns for f in done} == done
    assert len(list(small_disk.glob("trials/*/r0/record.json"))) == 4


def test_a_full_temporary_folder_is_reported(dyno: Any, small_disk: Path) -> None:
    """An export stores no measurements, so the message mentions none."""
    (small_disk / "other").write_bytes(bytes(36 << 10))
    done = dyno("export", "torchvision:resnet18", "-o", small_disk.parent / "m.onnx",
                env={"TMPDIR": str(small_disk)}, code=2)  # fmt: skip
    (last,) = (line for line in done.stderr.splitlines() if line.startswith("dyno: "))  # PyTorch 2.7 adds a line
    assert last.startswith(f"dyno: {small_disk}/") and last.endswith(
        ": the disk is full; free some space and run again, or give another path (--out; DYNO_CACHE for the cache, "
        "TMPDIR for temporary files)"
    )


def test_a_full_cache_is_reported(dyno: Any, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=8k", small_disk], check=True)
    words = ("export", "torchvision:squeezenet1_1", "-o", small_disk.parent / "m.onnx")
    last = dyno(*words, env={"DYNO_CACHE": str(small_disk)}, code=2).stderr.splitlines()[-1]
    assert last.startswith(f"dyno: {small_disk}/") and ": the disk is full; free some space and run again" in last


def test_no_partial_file_is_left_on_a_full_disk(dyno: Any, small_disk: Path) -> None:
    (small_disk / "m.onnx").write_text("earlier")
    done = dyno("export", "torchvision:squeezenet1_1", "-o", small_disk / "m.onnx", code=2)
    assert done.stderr.splitlines()[-1].startswith(f"dyno: {small_disk}/m.onnx: the disk is full; free some space")
    assert [*small_disk.iterdir()] == [small_disk / "m.onnx"] and (small_disk / "m.onnx").read_text() == "earlier"


def test_a_report_error_does_not_hide_the_answer(call: Any, tmp_path: Path) -> None:
    call(*FAKE, "--out", "run", code=0)
    shutil.rmtree(tmp_path / "run/charts")
    (tmp_path / "run/charts").write_text("in place of a folder, as a full disk allows no further file")
    code, out, err = call(*FAKE, "--out", "run")
    assert code == 2 and "the report can't be written to run: File exists" in err
    assert "fake@latency_ms=0.1 fp32 takes" in out or CROWDED in out


@pytest.mark.usefixtures("preloaded", "unreported")
def test_exit_codes_of_a_run(call: Any) -> None:
    assert call(*FAKE, "--out", "good")[0] == 0
    assert call(*FAKE, "--backend", "fake@latency_ms=0.1,fake@fail=exception", "--out", "part")[0] == 3
    assert call(*FAKE, "--precision", "fp32,fp8", "--out", "refused")[0] == 0
    assert Path("good/results.csv").read_text().count("\n") == 2


@pytest.mark.usefixtures("preloaded", "unreported")
def test_a_budget_is_judged_against_the_reference(call: Any, photos: Path) -> None:
    call(*FAKE, "--data", photos, "--out", "r", "--budget", "top1=0.5", code=0)
    assert "within" in Path("r/results.csv").read_text()


@pytest.mark.usefixtures("preloaded", "unreported")
def test_a_missed_limit_exits_with_1_and_a_new_limit_measures_nothing(call: Any) -> None:
    words = ["run", "fake:net", "--channels", "1", "--backend", "fake@latency_ms=2,fake@latency_ms=20", *SHORT]
    words += ["--out", "r"]
    _, out, _ = call(*words, "--limit", "p50=1ms", "--limit", "load=1000s", code=1)
    none = "no trial is within the limits p50=1ms, load=1000s; the closest is fake@latency_ms=2 fp32 at batch 1: p50 "
    assert none in out or CROWDED in out
    records = {file: file.stat().st_mtime_ns for file in Path("r").glob("trials/*/*/record.json")}
    assert len(records) == 2
    _, out, _ = call(*words, "--limit", "p50=1s", code=0)
    assert "within the limit p50=1s after one round is fake@latency_ms=2 fp32, " in out or CROWDED in out
    assert 'limit = {"p50" = "1s"}' in Path("r/study.toml").read_text()
    assert {file: file.stat().st_mtime_ns for file in records} == records
    rows = json.loads(call("show", "r", "--format", "json", code=0)[1])["tables"]["trials"]["rows"]
    most = sum(row["latency_ms"] for row in rows) / 2
    rows = json.loads(call("show", "r", "--limit", f"p50={most}ms", "--format", "json", code=0)[1])["tables"]["trials"][
        "rows"
    ]
    assert {row["options"]: row["limit"] for row in rows} == {"latency_ms=2": "within", "latency_ms=20": "over p50"}
    _, _, err = call("show", "r", "--limit", "energy=1J", code=2)
    assert err.startswith("dyno: no trial can be judged by the limit energy=1J: energy was not measured (--energy ")


@pytest.mark.parametrize("margin", ["0", "-100", "nan", "inf"])
def test_a_margin_without_meaning_is_refused_for_a_stored_run(refused: Any, root: Path, margin: str) -> None:
    said = refused("show", root / "tests/golden/run", "--equivalent", margin)
    assert said == f"equivalent is {float(margin)}; it must be more than 0 and at most 1,000,000,000"


@pytest.mark.usefixtures("preloaded", "unreported")
def test_too_little_agreement_exits_with_1(call: Any) -> None:
    words = ["diff", "fake:net", "--channels", 1, "--backend", "fake", "--precision", "fp32,int8"]
    assert call(*words, "--out", "a")[0] == 0
    assert call(*words, "--least", "0.9", "--out", "b")[0] == 1
    for name, value in (("--least", "90"), ("--least", "nan"), ("--rtol", "-1"), ("--atol", "inf")):
        _, out, err = call(*words, name, value, code=2)
        assert not out and err.startswith(f"dyno: {name[2:]} is ") and "it must be at " in err


@pytest.mark.usefixtures("preloaded", "unreported")
def test_a_study_file_names_its_folder(call: Any, tmp_path: Path) -> None:
    text = "models = ['fake:n']\nbackends = ['fake']\nrounds = 1\nseconds = 0.04\nblock = 0.01\nwarmup = 0.02\n"
    (tmp_path / "mine.toml").write_text(f"{text}channels = 1\n")
    assert call("run", "mine.toml", "--threads", "1")[0] == 0
    assert (tmp_path / "runs/mine/study.toml").is_file()
    code, _, err = call("run", "runs/mine/study.toml")
    assert (code, err) == (0, ""), "its own study.toml resumes in place, and nothing is left to do"


@pytest.mark.usefixtures("preloaded", "unreported")
def test_show_prints_every_format(call: Any) -> None:
    call(*FAKE, "--out", "r")
    for format in ("text", "markdown", "csv", "json", "html"):
        code, out, err = call("show", "r", "--format", format)
        assert code == 0 and "fake" in out, err
        code, out, err = call("show", "r", "--table", "all", "--format", format)
        assert code == 0 and "fake" in out, err
    code, out, _ = call("show", "r", "--table", "sizes", "--by", "batch")
    assert code == 0 and "batch 1" in out and "|" not in out, "text is no Markdown"
    code, out, _ = call("show", "r", "--table", "frontier")
    assert code == 0 and out.startswith("no frontier") and "--data" in out
    assert "unknown table 'size'; did you mean 'sizes'?" in call("show", "r", "--table", "size", code=2)[2]
    code, out, _ = call("show", "r", "--format", "json")
    found = json.loads(out)
    assert {"schema", "date", "machine", "study", "verdict", "tables"} <= found.keys() and [*found["tables"]] == [
        "trials"
    ]
    assert found["machine"]["cores"] and found["study"]["models"] and found["date"] and found["verdict"]
