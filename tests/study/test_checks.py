"""Impossible studies are refused in one line before anything is trained, measured or written."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

import dyno
import onnx_text
from dyno.cli import app, commands, demo
from dyno.jobs import launcher
from dyno.layers import forms
from dyno.study import defaults
from dyno.study.defaults import default_runner, each_with, new_folder, reference_of, study_of
from dyno.study.study import Study
from dyno.worker.spec import UserError
from refusals import refuses

MANY = len(os.sched_getaffinity(0)) + 1


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid starting processes and training networks."""

    def start(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr(launcher.subprocess, "Popen", start)
    monkeypatch.setattr(demo, "train_once", start)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "gpu_identity", lambda device: "")
    monkeypatch.setattr(defaults, "_driver_count", lambda: 0)


@pytest.mark.usefixtures("nothing_runs", "no_gpu")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run", "fake:n", "--backend", "onnxruntime@optimization=fast"], "optimization=fast: onnxruntime's"),
        (["run", "fake:n", "--backend", "openvino@streams=0"], "streams=0: openvino's streams must be a whole"),
        (["run", "fake:n", "--backend", "compile@mode=fast"], "mode=fast: compile's mode must be one of default"),
        (["run", "fake:n", "--backend", "fake", "--device", "cuda:0"], "there is no cuda:0 here: neither NVML nor"),
        (["run", "fake:n", "--backend", "fake", "--device", "cuda:x"], "device 'cuda:x' has no number"),
        (["run", "fake:n", "--backend", "fake", "--threads", MANY], f"threads is {MANY}, but there are {MANY - 1} "),
        (
            ["data", "train", "digits", "--model", "torchvision:resnet18", "--threads", MANY],
            f"threads is {MANY}, but there ",
        ),
        (
            ["data", "train", "digits", "--model", "torchvision:resnet18", "--device", "cuda:0"],
            "there is no cuda:0 here",
        ),
        (["demo", "--rounds", "0"], "rounds is 0; it must be at least 1"),
        (["demo", "--minutes", "0"], "minutes is 0.0; it must be more than 0"),
        (
            ["export", "m.onnx", "-o", "m.xml", "--batch", "0"],
            "batch '0' must be 'dynamic' or a whole number of at least 1",
        ),
        (["export", "m.onnx", "-o", "m.xml", "--repeat", "0"], "--repeat is 0; it must be at least 1"),
        (["export", "m.onnx", "-o", "m.xml", "--option", "streams=x"], "streams=x: openvino's streams must be"),
        (["export", "m.onnx", "-o", "m.xml", "--batch", "8"], "openvino's files take any batch; omit --batch"),
        (["inspect", "m.onnx", "openvino", "--pretrained"], "m.onnx contains its weights, which pretrained can't"),
        (["export", "best.pt2", "-o", "m.onnx", "--pretrained"], "best.pt2 contains its weights, which pretrained"),
        (["diff", "m.onnx"], "there is only one configuration to compare; give another model or file, or --back"),
        (["diff", "m.onnx", "--backend", "onnxruntime"], "there is only one configuration to compare"),
        (["export", "fake:n", "-o", "m.onnx", "--opset", "3"], "--opset 3 can't be written; an export's opset"),
        (["export", "fake:n", "-o", "m.onnx", "--opset", "99"], "--opset 99 can't be written; an export's opset"),
        (["time", "m.onnx", "--format", "xml"], "unknown format 'xml'; known: text, markdown, csv, json"),
        (["eval", "m.onnx", "--data", "d", "--format", "xml"], "unknown format 'xml'"),
        (["diff", "m.onnx", "n.onnx", "--format", "xml"], "unknown format 'xml'"),
        (["resnet18"], "there is no command 'resnet18'; dyno --help lists them, and dyno run MODEL measures a model"),
        (["torchvision:resnet18"], "there is no command 'torchvision:resnet18'; to measure it: dyno run torchvision:"),
        (["m.onnx", "--batch", "1"], "there is no command 'm.onnx'; to measure it: dyno run m.onnx"),
        (["show"], "there is no run below runs/; give a run folder, or measure one: dyno run MODEL"),
        (["report"], "there is no run below runs/"),
        (["export", "fake:n"], "give the file to write fake:n to: -o FILE, which ends in .onnx, "),
        (["export", "nowhere"], "nowhere does not exist"),
        (["run", "fake:n", "--on", "ray"], "--on is now --cluster; see dyno run --help-all"),
        (
            ["run", "fake:n", "--presicion", "int8"],
            "no such option: --presicion; did you mean --precision? See dyno run --help",
        ),
        (["run", "fake:n", "--engines", "fake"], "no such option: --engines; see dyno run --help"),
        (["run", "fake:n", "--rounds", "many"], "invalid value for '--rounds': 'many' is not a"),
        (["run", "fake:n", "--rounds"], "option '--rounds' requires an argument; see dyno run --help"),
        (["doctor", "here"], "got unexpected extra argument"),
        (["--nonsense"], "no such option: --nonsense"),
        (["data", "imagenet"], "there is no command 'imagenet'; did you mean dyno data imagenet-val?"),
        (["raport", "x"], "there is no command 'raport'; did you mean dyno report?"),
        (["run", "none.toml"], "there is no study file none.toml"),
        (["run", "fake:n", "--backend", "onnxruntim"], "unknown backend 'onnxruntim'; did you mean 'onnxruntime'?"),
        (["run", "fake:n", "--batch", "1,x"], "--batch 'x' is not a whole number; write e.g. --batch 1,8,32"),
        (["bench", "serve", "fake:n", "--rate", "1,x"], "--rate 'x' is not a number; write e.g. --rate 20,40,80"),
        (["run", "fake:n", "--limit", "p99"], "limit 'p99' is not NAME=MOST, e.g. p99=5ms or size=20MB"),
        (["run", "fake:n", "--limit", "p98=1ms"], "unknown limit 'p98'; did you mean 'p99'?"),
        (["run", "fake:n", "--limit", "size=5ms"], "limit size=5ms is not a number with a unit (B, kB, KB, MB, GB, "),
        (["run", "fake:n", "--limit", "p99=5"], "limit p99=5 is not a number with a unit (s, ms, us, ns); write e.g."),
        (["run", "fake:n", "--limit", "p99=0ms"], "limit p99=0ms must be more than 0, e.g. p99=5ms"),
        (["run", "fake:n", "--limit", "p99=1ms,p99=2ms"], "the limit p99 is given twice, as 1ms and 2ms; give it once"),
        (["run", "fake:n", "--limit", "energy=1J"], "the limit energy=1J needs the energy measured; add --energy"),
        (["run", "fake:n", "--limit", "p50=1s", "--boundaries", "all"], "the limit p50=1s is on latency/model; add"),
        (
            ["run", "fake:n", "--channels", "1", "--backend", "fake", "--budget", "mAP=1", "--data", "digits"],
            "n is for classify, which has no mAP",
        ),
        (["run", "fake:n", "--backend", "fake", "--reference", "openvino"], "no trial fits the reference"),
        (["run", "--model", "fake:n"], "no such option: --model; give the model alone: dyno run torchvision:resnet18"),
        (["help"], "there is no command 'help'; write dyno --help"),
        (["run", "fake:n", "--backend", "fake", "--data", "nowhere"], "no data folder "),
        (["run", "fake:n", "--python", "fake"], "--python 'fake' is not BACKEND=PATH"),
        (["run", "fake:n", "--python", "fake=/no/python"], "no Python interpreter at /no/python; correct the path"),
        (["run", "a.toml", "b.toml"], "give either one study file or models, not a.toml and 1 more"),
        (["run", "fake:n", "--weights", ""], "--weights is empty, perhaps for a variable that is not set"),
        (["run", "fake:n", "--data="], "--data is empty, "),
        (["run", "fake:n", "--backend", "fake", "--limit", ","], "--limit is empty, "),
        (["run", "fake:n", "--backend", "fake", "--budget= , "], "--budget is empty, "),
        (["show", ""], "an argument is empty, "),
        (["show", "nowhere"], ""),
        (["report", "nowhere"], ""),
        (["report", "nowhere", "-o", "page.html"], "--out page.html is the folder for the page, its charts and tables"),
        (["export", "fake:n", "-o", "m.onnx", "--max", "8"], "--max is not for .onnx files; omit it"),
        (["export", "fake:n", "-o", "m.xml", "--opset", "18"], "--opset is not for .xml files; omit it"),
        (["export", "fake:n", "-o", "m.engine", "--batch", "dynamic"], "a dynamic engine needs --max, its largest"),
        (["export", "fake:n", "-o", "m.onnx", "--shape", "1,3,224"], "shape '1,3,224' is not four numbers N,C,H,W"),
        (["export", "fake:n", "-o", "m.onnx", "--target", "openvno"], "unknown target 'openvno'"),
        (["export", "none.onnx", "-o", "m.xml"], "there is no model file none.onnx"),
        (["export", "none.onnx", "-o", "m.exe"], "export writes .onnx, "),
        (["export", "none.onnx", "-o", "m.engine", "--backend", "openvino"], "openvino doesn't build .engine files"),
        (["export", "none.onnx", "-o", "m.xml", "--min", "1"], "a dynamic engine needs --max"),
        (["export", "none.onnx", "-o", "m.engine", "--opt", "4", "--max", "2"], "--min, --opt and --max are 1, 4"),
        (["export", "none.onnx", "-o", "m.xml", "--precision", "fp16"], "openvino chooses fp16 when it runs a file"),
        (
            ["export", "fake:n", "-o", "m.onnx", "--size", "8", "--shape", "1,3,8,8"],
            "--shapes N,C,H,W and --size both set",
        ),
        (["export", "fake:n", "-o", "m.onnx", "--size", "8,16"], "a file is for one image size, not for 8, 16"),
        (["export", "none.onnx", "-o", "m.xml", "--max", "4", "--shapes", "x:1x3"], "--shapes and --min, --opt, --max"),
        (["export", "none.onnx", "-o", "m.xml", "--option", "sreams=1"], "unknown option 'sreams' of openvino"),
        (["export", "none.onnx", "-o", "m.xml", "--repeat", "2"], "openvino makes the same file every time"),
        (["time", "fake:net", "--trtexec", "nope.log"], "nope.log can't be read"),
        (["time", "none.onnx"], "there is no model file none.onnx"),
        (["diff", "none.onnx", "none.xml"], "there is no model file none.onnx"),
        (["eval", "none.onnx", "--data", "d"], "there is no model file none.onnx"),
        (["doctor", "--format", "yaml"], "unknown format 'yaml'; known: text, markdown, csv, json, html"),
        (["doctor", "--python", "x"], "--python 'x' is not BACKEND=PATH"),
    ],
)
def test_invalid_commands_are_refused_at_once(refused: Any, tmp_path: Path, words: list[object], line: str) -> None:
    assert refused(*words).startswith(line)
    assert list(tmp_path.iterdir()) == []


COMMANDS: dict[str, tuple[object, ...]] = {
    "run": ("fake:n", "--backend", "fake"), "time": ("fake:n",), "eval": ("fake:n", "--data", "d"),
    "diff": ("fake:n", "m.onnx"), "inspect": ("fake:n",), "profile": ("fake:n",), "explain": ("fake:n", "a", "b"),
    "bench cold-start": ("fake:n", "openvino"), "bench stress": ("m.onnx",), "bench app": ("net.py:application",),
    "bench video": ("in.mp4", "out.mp4", "--model", "fake:n"), "bench serve": ("fake:n", "--p99", "1s"),
    "export": ("m.onnx", "-o", "m.xml"), "data train": ("d", "--model", "fake:n"),
    "selftest": (), "compare": ("m.onnx", "n.onnx"),
}  # fmt: skip
DEVICES = {
    "cpu:0": "cpu:0 alone is not a device: write cpu, or for `dyno run` cpu:0,cpu:1", "gpu": "unknown device 'gpu'",
    "cuda:9": "there is no cuda:9 here", "cuda:x": "device 'cuda:x' has no number",
}  # fmt: skip


def test_all_commands_with_a_device_are_listed() -> None:
    top = typer.main.get_command(app.make_app()).commands
    below = {f"{group} {name}": each for group in top for name, each in getattr(top[group], "commands", {}).items()}
    having = {name for name, each in (top | below).items() if any("--device" in one.opts for one in each.params)}
    assert having == COMMANDS.keys()


@pytest.mark.usefixtures("nothing_runs", "no_gpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("command", COMMANDS)
def test_unavailable_devices_are_refused_at_once(refused: Any, tmp_path: Path, command: str, device: str) -> None:
    assert refused(*command.split(), *COMMANDS[command], "--device", device).startswith(DEVICES[device])
    assert list(tmp_path.iterdir()) == []


def test_only_run_can_use_a_cluster(refused: Any) -> None:
    for command, words in COMMANDS.items():
        if command != "run":
            assert refused(*command.split(), *words, "--cluster", "ray").startswith("no such option: --cluster")
    calls: list[Callable[[], object]] = [
        lambda: dyno.bench_cold_start("fake:n", "fake", on="ray"),
        lambda: dyno.inspect("fake:n", on="ray"),
        lambda: dyno.evaluate("fake:n", "digits", on="ray"),
    ]
    for call in calls:
        refuses(r"a cluster .* is for `dyno run` alone", call)


@pytest.mark.parametrize("command", sorted(typer.main.get_command(app.make_app()).commands))
def test_every_command_refuses_an_unknown_option_in_one_line(refused: Any, command: str) -> None:
    assert refused(command, "--nonsense").startswith("no such option: --nonsense")


def test_a_run_folder_as_a_command_suggests_show(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "r" / "trials").mkdir(parents=True)
    assert refused("r").endswith("to see that run: dyno show r")


def test_a_misspelt_key_is_reported_before_missing_ones(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text("modelz = ['fake:n']")
    assert refused("run", "s.toml") == "unknown key 'modelz' in s.toml; did you mean 'models'?"


def test_one_processor_is_singular(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults.os, "sched_getaffinity", lambda process: {0})
    words = refused("run", "fake:n", "--backend", "fake", "--threads", "2")
    assert words == "threads is 2, but there is 1 processor here; give at most 1"


@pytest.mark.usefixtures("no_gpu")
def test_a_dry_run_for_a_missing_gpu_is_allowed(call: Any) -> None:
    code, out, _ = call("run", "fake:n", "--backend", "fake", "--device", "cuda:0", "--dry-run")
    assert code == 0 and "There is no cuda:0 here, so a run would be refused." in out


def test_a_single_cpu_share_is_refused_even_in_a_dry_run(refused: Any) -> None:
    assert DEVICES["cpu:0"] in refused("run", "fake:n", "--backend", "fake", "--device", "cpu:0", "--dry-run")


def test_a_gpu_seen_only_by_the_driver_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "gpu_identity", lambda device: "")
    monkeypatch.setattr(defaults, "_driver_count", lambda: 1)
    assert not defaults.missing_gpu("cuda:0") and defaults.missing_gpu("cuda:1") and not defaults.missing_gpu("cpu")


def test_two_backends_of_one_file_suffice_for_agreement() -> None:
    from dyno import Study

    defaults.check_several([Study(models=("m.onnx",), backends=("onnxruntime", "openvino"))])
    defaults.check_several([Study(models=("m.onnx",), backends=("onnxruntime@precision=fp32+int8",))])
    refuses("only one configuration", defaults.check_several, [Study(models=("m.onnx",), backends=("onnxruntime",))])
    assert commands.check_several is defaults.check_several


@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("timm:nonexist", "timm has no model 'nonexist'; list them with: python -c \"import timm as m;"),
        ("torchvision:resnet81", "torchvision has no model 'resnet81'; did you mean torchvision:resnet18?"),
        ("torchvision:", "torchvision: model 'torchvision:' has nothing after the colon"),
    ],
)
def test_only_similar_names_are_suggested(refused: Any, model: str, line: str) -> None:
    pytest.importorskip(model.partition(":")[0])
    assert line in refused("run", model, "--backend", "pytorch", "--out", "r")


@pytest.mark.slow
def test_a_fixed_batch_file_refuses_other_stress_batches(refused: Any, call: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    onnx_text.write(tmp_path / "rows.onnx", "(float[2, 16] x) => (float[2, 16] y) { y = Relu(x) }")
    code, _, err = call("bench", "stress", "rows.onnx", "--phases", "min,max", "--out", "r")
    assert code == 2 and "rows takes only batch 2, and a stress test changes it; export or build it with a " in err
    assert not (tmp_path / "r").exists()
    assert "openvino takes only one, ONNX Runtime and TensorRT take several" in refused(
        "bench", "stress", "rows.onnx", "--backend", "openvino", "--phases", "min", "--out", "r"
    )


def test_engines_are_recognised_by_their_first_bytes(tmp_path: Path) -> None:
    for name, content, whose in (("a.engine", b"ftrt...", "tensorrt"), ("b.plan", b"vtrt...", "tensorrt_rtx")):
        (tmp_path / name).write_bytes(content)
        assert default_runner(str(tmp_path / name)) == (whose, "cuda:0")
    assert default_runner("m.onnx") == ("onnxruntime", "cpu") and default_runner("torchvision:resnet18") == (
        "pytorch",
        "cpu",
    )


def test_files_set_their_batch_and_requests_override_defaults() -> None:
    assert study_of("torchvision:resnet18", {"batches": (8,)}, {}).batches == (8,)
    assert study_of("m.onnx", {"batches": (8,)}, {}).batches == ()
    assert study_of("m.onnx", {"batches": (8,)}, {"batches": (2,)}).batches == (2,)
    asked = study_of("m.onnx", {"rounds": 2}, {"backends": ("openvino",), "seed": 3})
    assert (asked.backends, asked.seed, asked.rounds) == (("openvino",), 3, 2)


def test_a_reference_not_among_the_trials_is_added() -> None:
    def reference(model: str, *backends: str, precisions: tuple[str, ...] = ()) -> tuple[str, ...]:
        asked = study_of(model, {"batches": (4,)}, {"backends": backends, "precisions": precisions})
        found = reference_of(asked)
        assert found is None or (found.precisions, found.boundaries, found.rounds) == ((), (), 1)
        return found.backends if found else ()

    assert reference("torchvision:resnet18", "onnxruntime", "openvino") == ("pytorch",)
    assert reference("torchvision:resnet18", "pytorch", precisions=("bf16",)) == ("pytorch",)
    assert reference("torchvision:resnet18", "onnxruntime", "pytorch@channels_last=true") == ()
    assert reference("torchvision:resnet18", "pytorch@precision=bf16+fp32") == ()
    assert reference("m.onnx", "openvino") == ("onnxruntime",) and reference("m.onnx", "onnxruntime") == ()
    assert reference("m.engine", "tensorrt") == () and reference("endpoint:net", "endpoint") == ()


def test_forms_and_models_are_distinguished_consistently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("openvino").mkdir()  # a folder is not a model
    for text, settings in (
        ("openvino", {"backends": ("openvino",)}),
        ("openvino/bf16", {"backends": ("openvino",), "precisions": ("bf16",)}),
        ("tensorrt@profile=1:8:16/fp16", {"backends": ("tensorrt@profile=1:8:16",), "precisions": ("fp16",)}),
    ):
        assert each_with(["a.onnx", text], {})[1] == ("a.onnx", settings) and forms.is_form(text)
        (side,) = forms.list_forms(Study(models="a.onnx"), [text])[1:]
        assert side.is_named and (side.choice.text, side.precision) == (
            settings["backends"][0], settings.get("precisions", ("",))[0]
        )  # fmt: skip
    Path("onnxruntime").write_text("a model's file that is called like a backend")
    assert each_with(["a.onnx", "onnxruntime"], {})[1] == ("onnxruntime", {}) and not forms.is_form("onnxruntime")
    with pytest.raises(UserError, match="unknown form 'openvin'; did you mean 'openvino'"):
        forms.list_forms(Study(models="a.onnx"), ["openvin/bf16"])


def test_a_new_folder_is_named_after_command_and_models() -> None:
    folder = new_folder("time", ["torchvision:resnet18", "a/b.onnx"])
    assert folder.parent == Path("runs/time") and folder.name.startswith("resnet18-b-20")


def test_commands_started_in_one_second_have_separate_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(30):
        new_folder("eval", ["net.onnx"]).mkdir(parents=True)
    assert len([*Path("runs/eval").iterdir()]) == 30
