"""A run folder over time: it grows, its files change and return, and contradictory settings are refused by name."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_text
from dyno import Study, load
from dyno.results.notes import ModelFacts
from dyno.results.trial_result import Form, find_forms
from dyno.runner import run_folder
from dyno.runner.run_folder import choose_folder
from dyno.worker import system
from dyno.worker.spec import ModelSpec

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")

ENDLESS = '''
import time
from pathlib import Path
import torch

class Net(torch.nn.Module):
    """Is never exported while there is a file `endless` beside this one."""
    def forward(self, x):
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            while Path(__file__).with_name("endless").exists():
                time.sleep(0.1)
        return x.flatten(1).relu()
'''
SHORT = "--rounds 1 --seconds 0.04 --block 0.01 --warmup 0.02 --threads 1".split()
FAKE = ["--backend", "fake@latency_ms=0.1", *SHORT]


def net(path: Path, factor: float = 2.0, name: str = "input", width: int = 8, graph: str = "g") -> Path:
    """Write y = factor * x on images of 1 x 1 x 8 x width with a free batch."""
    pytest.importorskip("onnx")
    text = f"(float[n, 1, 8, {width}] {name}) => (float[n, 1, 8, {width}] y) {{ y = Mul({name}, factor) }}"
    model = onnx_text.model(text, ir=9, factor=np.float32(factor))
    model.graph.name = graph
    path.write_bytes(model.SerializeToString())
    return path


def rows(folder: str | Path, *columns: str) -> list[tuple[Any, ...]]:
    return sorted(load(folder).to_pandas()[list(columns)].itertuples(index=False, name=None))


def ids(folder: Path) -> set[str]:
    return {path.name for path in (folder / "trials").iterdir()}


def test_a_run_folder_grows_and_keeps_rows_of_earlier_commands(call: Any, tmp_path: Path) -> None:
    words = ["run", "fake:net", "--channels", 1, *SHORT, "--out", "r"]
    assert call(*words, "--backend", "fake@latency_ms=0.1")[0] == 0
    first = {p: p.stat().st_mtime_ns for p in Path("r").glob("trials/*/*/record.json")}
    _, out, _ = call(*words, "--backend", "fake@latency_ms=0.1,fake@latency_ms=0.2", "--batch", "1,2", code=0)
    assert out.count("latency_ms=0.2") and "batch 2" in out
    assert {p: p.stat().st_mtime_ns for p in first} == first, "what was there is measured again"
    assert call(*words, "--backend", "fake@latency_ms=0.1", "--precision", "int8,fp8")[0] == 0
    assert call("run", "fake:net", "fake:other", "--channels", 1, *FAKE, "--out", "r")[0] == 0
    whole = ids(tmp_path / "r")
    assert call(*words, "--backend", "fake@latency_ms=0.1")[0] == 0
    assert ids(tmp_path / "r") == whole and len(whole) == 4 + 2 + 1
    study = Study.from_toml(Path("r/study.toml"))
    assert study.models == ("fake:net", "fake:other") and study.batches == (1, 2)
    assert study.backends == ("fake@latency_ms=0.1", "fake@latency_ms=0.2")
    assert study.precisions == ("fp32", "int8", "fp8")
    assert "24 trials, 8 refused" in call("run", "r/study.toml", "--dry-run")[1], "and all of it goes on"


def test_another_route_is_another_row(call: Any, tmp_path: Path) -> None:
    words = ["run", net(tmp_path / "m.onnx"), "--backend", "onnxruntime", *SHORT, "--out", "r"]
    assert call(*words)[0] == 0 and call(*words, "--routes", "fold")[0] == 0
    assert rows("r", "options", "status") == [("", "ok"), ("fold=True", "ok")]
    assert load("r").to_pandas().set_index("options").loc["fold=True", "route"] == "folded"


def test_conflicting_settings_are_named(call: Any, refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["run", "fake:net", "--channels", 1, *FAKE, "--out", "r"]
    assert call(*words)[0] == 0
    assert refused(*words, "--seconds", 1) == (
        "r was measured with seconds=0.04, this command says seconds=1; "
        "give another --out, or remove it with `dyno runs rm r` first"
    )
    line = refused(*words, "--seed", 3, "--data", "digits")
    assert "measured with seed=0, no data, this command says seed=3, data=digits;" in line
    assert call(*words, "--timeout", 77, "--rounds", 2)[0] == 0
    monkeypatch.setattr("dyno.runner.execute.refuse_other", lambda *_: None)
    assert "seconds=0.04, this command" in refused(*words, "--seconds", 1), "another dyno wrote it since the first look"
    assert rows("r", "status") == [("ok",)]


def test_a_folder_measured_on_other_processors_is_refused(
    call: Any, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other processors may come from `taskset` or another machine."""
    words = ["run", "fake:net", "--channels", 1, *FAKE[:-2], "--out", "r"]
    monkeypatch.setattr(system, "physical_cores", lambda: 1)
    assert call(*words)[0] == 0
    monkeypatch.setattr(system, "physical_cores", lambda: 2)
    line = refused(*words, "--rounds", 2)
    assert line.startswith("r was measured with 1 thread, but the processors allowed now give 2; ")
    monkeypatch.setattr(system, "physical_cores", lambda: 1)
    assert call(*words, "--rounds", 2)[0] == 0 and rows("r", "status", "rounds") == [("ok", 2)]


def test_a_folder_without_measurements_accepts_other_settings(call: Any) -> None:
    words = ["run", "fake:net", "--channels", 1, *SHORT, "--out", "r"]
    assert call(*words, "--backend", "fake@fail=exception")[0] == 3
    assert call(*words, "--backend", "fake@latency_ms=0.1", "--seed", 5)[0] == 0
    assert rows("r", "status") == [("ok",)]
    assert Study.from_toml(Path("r/study.toml")).seed == 5


def test_an_overwritten_file_is_another_model_and_can_be_restored(call: Any, tmp_path: Path) -> None:
    net(tmp_path / "m.onnx")
    words = ["run", "m.onnx", "--channels", 1, *FAKE, "--batch", "1,2", "--out", "r"]
    assert call(*words)[0] == 0
    old = ids(tmp_path / "r")
    shape = [[["n", 1, 8, 8]]] * 2
    assert json.loads(Path("r/models.json").read_text())["models"] == [
        {"model": "m", "size": "8", "file": "m.onnx", "signature": shape}
    ]
    net(tmp_path / "m.onnx", 3.0)
    code, out, err = call(*words)
    assert code == 0 and "not comparable" not in out
    (line,) = (line for line in err.splitlines() if "archive" in line)
    assert line.startswith("2 trials of an earlier m.onnx: moved to r/archive/")
    new = ids(tmp_path / "r")
    assert len(new) == 2 and not old & new
    assert {path.name for path in (tmp_path / "r/archive").glob("*/*")} == old
    net(tmp_path / "m.onnx")
    code, out, err = call(*words)
    assert code == 0 and "2 trials of the current files: restored from r/archive" in err
    assert ids(tmp_path / "r") == old and "ok  " not in err, "nothing is measured again"
    assert {path.name for path in (tmp_path / "r/archive").glob("*/*")} == new


def test_an_overwritten_file_is_noticed_in_a_run_of_another_model(call: Any, tmp_path: Path) -> None:
    words = ["--channels", 1, *FAKE, "--out", "r"]
    net(tmp_path / "m.onnx")
    assert call("run", "m.onnx", "fake:net", *words)[0] == 0
    net(tmp_path / "m.onnx", 3.0)
    assert "1 trial of an earlier m.onnx: moved to r/archive/" in call("run", "fake:net", *words, code=0)[2]
    assert rows("r", "model", "status") == [("net", "ok")]


def test_two_files_with_one_name_are_separate_models(call: Any, tmp_path: Path) -> None:
    for folder, factor in (("a", 2.0), ("b", 3.0)):
        (tmp_path / folder).mkdir()
        net(tmp_path / folder / "m.onnx", factor)
        assert "archive" not in call("run", f"{folder}/m.onnx", "--channels", 1, *FAKE, "--out", "r", code=0)[2]
    assert [model["name"] for model in models("r")] == ["b/m.onnx", "m"]
    (tmp_path / "a").rename(tmp_path / "c")
    assert "ok  " not in call("run", "c/m.onnx", "--channels", 1, *FAKE, "--out", "r")[2], "it is known by its content"


def test_a_module_replaces_one_of_its_name_only_if_that_is_gone(tmp_path: Path) -> None:
    old = ModelSpec("net", f"{tmp_path}/gone/net.py:build", source_sha256="a")
    new = ModelSpec("net", "net.py:build", source_sha256="b")
    assert run_folder._has_moved(old, new) and not run_folder._has_moved(old, replace(new, name="other"))
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone/net.py").touch()
    assert not run_folder._has_moved(old, new)
    library = ModelSpec("net", "torchvision:net", source_sha256="a")
    assert not run_folder._has_moved(library, new), "a library's network is no file that could be gone"


def models(folder: str) -> list[dict[str, Any]]:
    jobs = Path(folder).glob("trials/*/r0/job.json")
    return sorted((json.loads(job.read_text())["trial"]["model"] for job in jobs), key=lambda model: str(model["name"]))


CODE = """
from torch import nn
from parts import body
def build(): return nn.Sequential(body(), nn.Flatten())
"""


def test_a_changed_imported_module_makes_another_model(call: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(CODE)
    (tmp_path / "parts.py").write_text("from torch import nn\ndef body(): return nn.ReLU()\n")
    words = ["run", "net.py:build", "--channels", 1, "--size", 8, *FAKE, "--out", "r"]
    assert call(*words)[0] == 0
    (tmp_path / "parts.py").write_text("from torch import nn\ndef body(): return nn.Sigmoid()\n")
    assert "1 trial of an earlier net.py: moved to r/archive/" in call(*words, code=0)[2]
    (tmp_path / "unrelated.py").write_text("x = 1\n")
    assert "archive" not in call(*words)[2]


def test_a_broken_model_does_not_hide_the_others(
    call: Any, refused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    words = ["run", "fake:good", "bad.onnx", "none.onnx", "--channels", 1, *FAKE, "--out", "r"]
    _, out, _ = call(*words, code=3)
    assert rows("r", "model", "status") == [("bad", "failed"), ("good", "ok"), ("none", "failed")]
    assert "good, size 8, batch 1\n" in out and "there is no model file none.onnx" in out
    assert "bad.onnx" in refused("run", "bad.onnx", "none.onnx", *FAKE, "--out", "x")
    assert not Path("x").exists()
    net(tmp_path / "bad.onnx")
    assert call(*words)[0] == 3
    assert rows("r", "model", "status") == [("bad", "ok"), ("good", "ok"), ("none", "failed")]
    (tmp_path / "late.py").write_text(
        "import os, torch\ndef late():\n    os.environ['THERE']\n    return torch.nn.Flatten()"
    )
    words = ["run", "fake:good", "late.py:late", "--channels", 1, *FAKE, "--out", "l"]
    call(*words, code=3)
    assert rows("l", "model", "status") == [("good", "ok"), ("late", "failed")]
    monkeypatch.setenv("THERE", "")
    call(*words, code=0)
    assert rows("l", "model", "status") == [("good", "ok"), ("late", "ok")], "its row had no size"


def test_time_prints_the_models_that_ran(call: Any, refused: Any) -> None:
    words = ["time", "fake:good", "none.onnx", "--channels", 1, "--backend", "fake@latency_ms=0.1"]
    code, out, err = call(*words, "--seconds", 0.04, "--warmup", 0.02)
    assert code == 3 and out.startswith("good, ") and "dyno: there is no model file none.onnx\n" in err
    assert refused("time", "no.onnx", "none.onnx") == "there is no model file no.onnx"
    assert "there is no model file none.onnx" in refused("diff", "none.onnx", "fake:good", "--backend", "fake")


def test_default_folders_do_not_collide(call: Any, tmp_path: Path) -> None:
    def folder(*words: object) -> tuple[str, str]:
        _, out, err = call("run", *words, "--channels", 1, *FAKE, code=0)
        return out.rstrip().rpartition("report: ")[2], "".join(s for s in err.splitlines() if s.startswith("dyno:"))

    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        net(tmp_path / place / "m.onnx", 2.0 if place == "a" else 3.0)
    assert folder("a/m.onnx") == ("runs/m/report.html", "")
    other = "dyno: runs/m holds a/m.onnx: "
    assert folder("b/m.onnx") == ("runs/b-m/report.html", f"{other}writing to runs/b-m")
    assert folder("b/m.onnx", "--batch", 2) == ("runs/b-m/report.html", f"{other}continuing in runs/b-m")
    was = "dyno: runs/m was measured with seed=0, this command says seed=1: "
    assert folder("a/m.onnx", "--seed", 1) == ("runs/m-2/report.html", f"{was}writing to runs/m-2")
    assert folder("a/m.onnx", "--batch", 4) == ("runs/m/report.html", "")


def test_default_folder_names_show_the_differing_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = tmp_path / "runs" / "alexnet"
    (round_ := first / "trials" / "of" / "r0").mkdir(parents=True)
    (round_ / "record.json").write_text('{"status": "ok"}')
    for name, content in (("mine", "a"), ("copy", "a"), ("other", "b")):
        (tmp_path / f"{name}.pt").write_text(content)
    study = Study(models="torchvision:alexnet")
    own = replace(study, weights="mine.pt")

    def chosen(before: Study, now: Study) -> str:
        (first / "study.toml").write_text(before.to_toml())
        return choose_folder(now)[0].name

    assert chosen(study, own) == "alexnet-mine"
    assert chosen(study, replace(study, pretrained=True)) == "alexnet-pretrained"
    assert chosen(own, replace(study, weights="copy.pt")) == "alexnet", "they are the same weights"
    assert chosen(own, replace(study, weights="other.pt")) == "alexnet-other"
    assert chosen(own, study) == "alexnet-random"
    clusters = [replace(study, on=on) for on in ("ray=a:1", "ray=b:2", "slurm=a:1", "ray")]
    found = [chosen(clusters[0], now) for now in (*clusters, study)]
    assert found == ["alexnet", "alexnet", "alexnet-2", "alexnet", "alexnet-2"], "a cluster may move to another address"
    (first / "study.toml").write_text("damaged")
    assert choose_folder(study)[0].name == "alexnet-2"
    (first / "study.toml").unlink()
    said = "runs/alexnet is not a run folder: writing to runs/alexnet-2"
    assert choose_folder(study) == (Path("runs/alexnet-2"), said)
    (tmp_path / "runs" / "vgg11").mkdir()
    assert choose_folder(Study(models="torchvision:vgg11")) == (Path("runs/vgg11"), "")


def test_a_build_timeout_is_a_row_and_retried_with_a_longer_limit(call: Any, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(ENDLESS)
    (tmp_path / "endless").touch()
    words = ["run", "net.py:Net", "--size", 8, "--backend", "onnxruntime", *SHORT, "--out", "r"]
    assert call(*words, "--build-timeout", 1)[0] == 3
    ((status, reason),) = rows("r", "status", "reason")
    assert status == "timeout" and reason.endswith(
        "not finished after 1 s; killed; --build-timeout SECONDS allows more"
    )
    assert "tried again" not in call(*words, "--build-timeout", 1)[2]
    (tmp_path / "endless").unlink()
    assert "1 failed job tried again: 3600 s instead of 1 s" in call(*words, code=0)[2]
    assert rows("r", "status") == [("ok",)]


def test_failures_are_retried_when_their_cause_may_be_gone(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(fail: str, *more: object) -> list[str]:
        words = ["run", "fake:net", "--channels", 1, *SHORT, "--backend", f"fake@fail={fail}", "--out", fail]
        lines = call(*words, *more)[2].splitlines()
        return [line for line in lines if re.match(r"1/1 (failed|timeout)", line) or "tried again" in line]

    assert len(tried("hang", "--timeout", 1)) == 1
    assert tried("hang", "--timeout", 0.5) == tried("hang", "--timeout", 1) == []
    (said, again) = tried("hang", "--timeout", 1.5)
    assert said == "1 failed job tried again: 1.5 s instead of 1 s" and again.startswith("1/1 timeout")
    assert len(tried("exception")) == 1 and tried("exception") == []
    assert tried("exception", "--retry-failed")[0] == "1 failed job tried again: as requested"
    monkeypatch.setattr("dyno.runner.ensemble.find_versions", lambda *_: {"numpy": "99"})
    assert tried("exception")[0] == "1 failed job tried again: numpy is 99 now"


def test_two_files_of_one_network_are_one_table(call: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("dyno.worker.system.has_arithmetic", lambda _: False)  # else bf16 would have rows, too
    pytest.importorskip("onnxruntime")
    pytest.importorskip("openvino")
    pytest.importorskip("ncnn")
    net(tmp_path / "b.onnx")
    net(tmp_path / "a.onnx", graph="the same in other bytes")
    net(tmp_path / "other.onnx", name="pixels")
    net(tmp_path / "wide.onnx", width=16)
    assert call("export", "b.onnx", "-o", "b.xml")[0] == 0
    _, out, _ = call("run", "b.onnx", "b.xml", "a.onnx", "wide.onnx", "--channels", 1, *SHORT, "--out", "r", code=0)
    assert "skipped" not in out
    frame = load("r").to_pandas()
    found = frame[["model", "backend", "options", "status"]].itertuples(index=False, name=None)
    network = "b.onnx and b.xml and a.onnx"
    assert [*found] == [
        (network, "ncnn", "file=b.onnx", "ok"), (network, "onnxruntime", "file=b.onnx", "ok"),
        (network, "openvino", "file=b.onnx", "ok"), (network, "openvino", "file=b.xml", "ok"),
        (network, "ncnn", "file=a.onnx", "ok"), (network, "onnxruntime", "file=a.onnx", "ok"),
        (network, "openvino", "file=a.onnx", "ok"),
        ("wide", "ncnn", "", "ok"), ("wide", "onnxruntime", "", "ok"), ("wide", "openvino", "", "ok"),
    ]  # fmt: skip
    assert [verdict == "reference" for verdict in frame["verdict"]] == [each in (1, 8) for each in range(10)]
    assert [how for how in frame["measured"] if how] == ["in turns"] * 8, "the files of a network beside each other"
    assert frame["speedup"].notna().all() and f"{network}, size 8, batch 1\n" in out
    words = "--channels", 1, "--backend", "onnxruntime", *SHORT
    out = call("run", "a.onnx", "other.onnx", *words, "--out", "t")[1]
    assert "not comparable" not in out, "what a file calls its only input says nothing about what it is fed"
    net(tmp_path / "three.onnx", 3.0)
    code, out, _ = call("run", "a.onnx", "three.onnx", *words, "--out", "u")
    assert code == 3 and "if they are different networks, run one command for each" in " ".join(out.split())
    code, out, _ = call("run", "b.xml", "--channels", 1, "--backend", "onnxruntime,openvino", *SHORT, "--out", "s")
    assert code == 0 and "onnxruntime reads .onnx files, not b.xml" in out, "a backend that is asked for has its row"


def test_files_with_other_flops_or_shapes_are_other_networks() -> None:
    def row(flops: int = 0, inputs: Any = (("n", 3, 8, 8),), file: str = "") -> ModelFacts:
        return ModelFacts(flops=flops, signature=(inputs, (("n", 5),)), file=file)

    one, fixed = row(1000), row(1005, ((4, 3, 8, 8),))
    assert [*find_forms({("a", "8"): one, ("b", "8"): fixed})] == ["a", "b"]
    for other in (row(1200), row(1000, ((1, 3, 8, 16),)), row(1000, ((1, 3, 8, 8),) * 2), ModelFacts(flops=1000)):
        assert find_forms({("a", "8"): one, ("b", "8"): other}) == {}
    same = find_forms({("x/m.onnx", "8"): row(file="m.onnx"), ("y/m.onnx", "8"): row(file="m.onnx")})
    assert [*same.values()] == [Form("m", "x/m.onnx", 0), Form("m", "y/m.onnx", 1)]
    for count, network in ((3, "0.onnx and 1.onnx and 2.onnx"), (4, "0.onnx and 3 more")):
        found = find_forms({(f"x/{i}", "8"): row(file=f"{i}.onnx") for i in range(count)})
        assert [*found.items()] == [(f"x/{i}", Form(network, f"{i}.onnx", i)) for i in range(count)]
    assert find_forms({("a", "8"): row(), ("b", "8"): row()}) == {
        "a": Form("a and b", "a", 0),
        "b": Form("a and b", "b", 1),
    }
