"""Studies become trials: every combination, each refusal with its reason, and stable ids."""

import gzip
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import onnx_text
from dyno import Study, UserError, load, store
from dyno.study.interpreters import find_missing, list_installed
from dyno.study.model_info import list_batches, model_spec
from dyno.study.plan import expand
from dyno.worker import registry
from dyno.worker.backends.fake import Fake
from dyno.worker.inspection import Inspection
from dyno.worker.spec import Dims, ModelSpec, Recipe, Runtime, Trial, digest
from refusals import refuses

GOLDEN = "6bdde0d082e2"


def trials(study: Study) -> list[Trial]:
    return [one.trial for one in expand(study)]


def test_combinations_have_a_fixed_order(fake_study: Any) -> None:
    study = fake_study(
        models=("fake:a", "fake:b"), backends=("fake", "fake@noise=0.1"), precisions=("fp32", "int8"),
        batches=(1, 8), sizes=("8", "8x16"),
    )  # fmt: skip
    found = trials(study)
    assert len(found) == len({t.id for t in found}) == 2 * 2 * 2 * 2 * 2
    assert found == trials(study)
    assert [t.label for t in found[:3]] == ["a fake fp32 b1 8", "a fake int8 b1 8", "a fake@noise=0.1 fp32 b1 8"]


def test_an_unknown_option_stops_the_study(fake_study: Any) -> None:
    with pytest.raises(UserError, match=r"unknown option 'latency' of fake; did you mean 'latency_ms'\?"):
        expand(fake_study(backends=("fake@latency=3",)))


def test_backends_may_have_their_own_precisions(fake_study: Any) -> None:
    found = trials(fake_study(backends=("fake@precision=fp16", "fake@noise=1"), precisions=("fp32", "int8")))
    assert [(t.variant, t.precision) for t in found] == [
        ("fake", "fp16"), ("fake@noise=1", "fp32"), ("fake@noise=1", "int8"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "flags", "expected"),
    [
        ({}, set(), {("pytorch", "fp32"), ("openvino", "fp32")}),
        ({}, {"amx_bf16"}, {(name, p) for name in ("pytorch", "openvino") for p in ("fp32", "bf16")}),
        ({"data": True}, set(), {("pytorch", "fp32"), ("openvino", "fp32"), ("openvino", "int8")}),
        ({"data": True, "backends": ("openvino",)}, {"amx_bf16"}, {("openvino", "fp32")}),
        ({"data": True, "precisions": ("bf16",)}, {"amx_bf16"}, {("pytorch", "bf16"), ("openvino", "bf16")}),
        ({"data": True, "models": ("torchvision:alexnet", "torchvision:resnet18")}, set(), None),
    ],
)
def test_lower_precisions_are_added_by_default(
    settings: dict[str, Any],
    flags: set[str],
    expected: set[tuple[str, str]] | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    images = pytest.importorskip("PIL.Image")
    pytest.importorskip("torchvision"), pytest.importorskip("openvino")
    monkeypatch.setattr("dyno.study.plan.list_installed", lambda *_: ("pytorch", "openvino"))
    monkeypatch.setattr("dyno.worker.system.cpu_flags", lambda: {"avx2", *flags})
    for number in range(10):
        images.new("RGB", (64, 64), (number, 0, 0)).save(tmp_path / f"{number}.png")
    fields = {"models": ("torchvision:resnet18",), "sizes": ("64",), **settings}
    planned = expand(Study(**{**fields, "data": str(tmp_path) if settings.get("data") else ""}))
    assert not any(one.refusal for one in planned)
    found = {(one.trial.backend, one.trial.precision) for one in planned}
    assert found == (expected or {("pytorch", "fp32"), ("openvino", "fp32"), ("openvino", "int8")})


def test_duplicate_requests_run_once(fake_study: Any) -> None:
    assert len(trials(fake_study(backends=("fake", "fake"), batches=(1, 1), sizes=("8", "8x8")))) == 1


def test_an_unsupported_precision_is_a_refusal(fake_study: Any) -> None:
    refused = [one for one in expand(fake_study(precisions=("fp32", "fp8", "bf16"))) if one.refusal]
    assert [one.refusal for one in refused] == [
        f"fake has no {p} here (it has fp32, fp16, int8)" for p in ("fp8", "bf16")
    ]


def test_an_unsupported_device_is_a_refusal(fake_study: Any) -> None:
    (one,) = expand(fake_study(device="cuda:0"))
    assert one.refusal == "fake can't run on cuda:0 (it runs on cpu)"


def test_a_device_without_any_backend_is_refused_in_one_line(fake_study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dyno.study.plan.list_installed", lambda *_: [])
    refuses("no backend that is installed here runs on cuda:0", expand, fake_study(backends=(), device="cuda:0"))


class Lacking(Fake):
    name, requires, precisions = "lacking", ("no-such-distribution", "numpy"), ("fp32",)


def test_a_missing_library_is_a_refusal(fake_study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {**registry._load_backends(), "lacking": Lacking()}
    monkeypatch.setattr(registry, "_load_backends", lambda: known)
    (here,) = expand(fake_study(backends=("lacking",)))
    assert here.refusal == (
        "no-such-distribution is not installed in this Python; pip install no-such-distribution, "
        "or pass a Python that has it: --python lacking=PATH"
    )
    monkeypatch.setattr(Lacking, "install_hint", "take another Python")
    (elsewhere,) = expand(fake_study(backends=("lacking",)))
    assert elsewhere.refusal == "no-such-distribution is not installed in this Python; take another Python"
    tables = {"lacking": {"python": sys.executable}}
    (there,) = expand(fake_study(backends=("lacking",), runtime=tables))
    assert f"is not installed in {sys.executable}; pip install" in there.refusal
    assert "lacking" in registry.list_backends() and "lacking" not in list_installed("cpu")
    assert any(entry.trial.backend == "lacking" for entry in expand(fake_study(backends=(), runtime=tables)))
    assert all(entry.trial.backend != "lacking" for entry in expand(fake_study(backends=())))
    assert find_missing("fake") == ""


def test_runtimes_reach_the_trial(fake_study: Any) -> None:
    tables = {"old": {"python": sys.executable, "env": {"N": 1}}}
    main, other = trials(fake_study(backends=("fake", "fake@runtime=old"), runtime=tables, threads=1))
    assert main.runtime == Runtime(threads=1)
    assert other.runtime == Runtime("old", sys.executable, {"N": "1"}, threads=1)
    assert other.variant == "fake@runtime=old"
    assert main.id != other.id


def test_a_build_step_runs_in_its_own_interpreter(fake_study: Any) -> None:
    tables = {"modelopt": {"python": sys.executable, "env": {"N": 1}}}
    asked = {"backends": ("tensorrt_rtx@precision=fp8@input=uint8",), "data": "digits", "device": "cuda:0"}
    if find_missing("tensorrt_rtx"):
        pytest.skip("tensorrt-rtx is not installed")
    (one,) = expand(fake_study(**asked, runtime=tables))
    step, makers = one.trial.recipe, {}
    while step:
        makers[step.maker] = (step.runtime.name, step.runtime.python, step.runtime.device)
        step = step.parent
    assert makers == {
        "tensorrt_rtx": ("main", "", "cuda:0"),
        "onnx_input": ("main", "", "cpu"),
        "onnx_modelopt": ("modelopt", sys.executable, "cpu"),
        "onnx_static": ("main", "", "cpu"),
        "onnx_export": ("main", "", "cpu"),
    }


@pytest.mark.parametrize("python", ["/bin/true", "/bin/false", "/no/such/python3"])
def test_an_invalid_interpreter_stops_the_study(fake_study: Any, python: str) -> None:
    with pytest.raises(UserError, match=rf"^the interpreter {python} can't be used: ") as caught:
        expand(fake_study(runtime={"fake": {"python": python}}, backends=("fake", "onnxruntime")))
    assert "\n" not in str(caught.value)


def test_another_interpreter_does_not_see_our_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "borrowed-1.0.dist-info").mkdir()
    (tmp_path / "borrowed-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: borrowed\nVersion: 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(Lacking, "requires", ("borrowed",))
    known = {**registry._load_backends(), "lacking": Lacking()}
    monkeypatch.setattr(registry, "_load_backends", lambda: known)
    assert find_missing("lacking", Runtime(python=sys.executable)) == "borrowed"


def test_trial_ids_are_stable(fake_study: Any) -> None:
    """Earlier runs are found by this id; a change must be announced in the changelog."""
    (one,) = trials(fake_study(backends=("fake@latency_ms=2",), batches=(4,), seconds=0.5, warmup=0.25))
    assert one.id == GOLDEN


@pytest.mark.parametrize("fields", [{"rounds": 7}, {"timeout": 1.0}, {"budget": {}}, {"reference": "fake"}])
def test_repetition_does_not_change_ids(fake_study: Any, fields: dict) -> None:
    assert [t.id for t in trials(fake_study(**fields))] == [t.id for t in trials(fake_study())]


@pytest.mark.parametrize("fields", [{"seconds": 0.5}, {"seed": 1}, {"threads": 2}, {"compared": 5}, {"channels": 3}])
def test_settings_that_affect_results_change_ids(fake_study: Any, fields: dict) -> None:
    assert not {t.id for t in trials(fake_study(**fields))} & {t.id for t in trials(fake_study())}


def test_files_are_identified_by_content(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "net.py").write_text("def net(): ...\n")
        (tmp_path / folder / "w.pt").write_bytes(b"same")
    one, two = (
        model_spec(Study(models=("x:y",), weights=str(tmp_path / f / "w.pt")), f"{tmp_path / f / 'net.py'}:net")
        for f in ("a", "b")
    )
    assert one != two and digest(one) == digest(two)
    (tmp_path / "b/net.py").write_text("def net(): return 1\n")
    changed = model_spec(Study(models=("x:y",), weights=two.weights), f"{tmp_path / 'b/net.py'}:net")
    assert digest(changed) != digest(two)
    (tmp_path / "a/w.pt").write_bytes(b"other")
    assert digest(model_spec(Study(models=("x:y",), weights=one.weights), one.source)) != digest(one)


def test_a_file_is_for_every_backend_that_reads_it(tmp_path: Path, preloaded: str) -> None:
    graph = onnx_text.model("(float[n, 3] x) => (float[n, 3] y) { y = Relu(x) }")
    (tmp_path / "net.onnx").write_bytes(graph.SerializeToString())
    found = {t.backend for t in trials(Study(models=str(tmp_path / "net.onnx")))}
    assert {"onnxruntime", "openvino"} <= found and "pytorch" not in found


def test_weights_for_a_network_do_not_replace_those_of_files(tmp_path: Path) -> None:
    for name in ("w.pt", "net.onnx", "net.torchscript"):
        (tmp_path / name).write_bytes(b"some")
    files = (str(tmp_path / "net.onnx"), str(tmp_path / "net.torchscript"))
    for fields in ({"weights": str(tmp_path / "w.pt")}, {"pretrained": True}):
        both = Study(models=("torchvision:resnet18", *files), **fields)
        for file in files:
            spec = model_spec(both, file)
            assert not (spec.weights or spec.weights_sha256 or spec.pretrained), "its own would be replaced"
        spec = model_spec(both, "torchvision:resnet18")
        assert spec.weights or spec.pretrained
        refuses(r"net.onnx contains its weights, which \w+ can't replace", expand, Study(models=files, **fields))


@pytest.mark.parametrize(
    ("source", "fields", "message"),
    [
        ("best.pt", {}, "there is no such file: best.pt"),
        ("nets/resnet18", {}, "there is no file or folder nets/resnet18; give a model such as torchvision:resnet18, a"),
        ("yolov8n.yaml", {}, "model 'yolov8n.yaml' has no source prefix; did you mean ultralytics:"),
        ("a,b", {}, "models are given one by one, without commas: a b"),
        ("timm:a,timm:b", {}, "models are given one by one, without commas: timm:a timm:b"),
        ("a.onnx,b.onnx", {}, "models are given one by one, without commas: a.onnx b.onnx"),
        ("none,2/net.onnx", {}, "there is no model file none,2/net.onnx"),
        ("openvino/int8", {}, "openvino/int8 is a backend, not a model; give it with --backend openvino"),
        ("none.onnx", {}, "there is no model file none.onnx"),
        ("none.xml", {}, "there is no model file none.xml"),
        ("", {}, "a model has an empty name; give a model's file, or one like torchvision:resnet18"),
        ("torchvision:resnet18", {"weights": "none.pt"}, "there is no weights file none.pt"),
        ("torchvision:resnet18", {"weights": __file__, "pretrained": True}, "--weights and --pretrained can't be"),
    ],
)
def test_missing_models_are_refused(source: str, fields: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        model_spec(Study(models=(source,), **fields), source)
    assert str(caught.value).startswith(message)


def named(path: Path) -> ModelSpec:
    return model_spec(Study(models=(str(path),)), str(path))


def test_git_lfs_pointers_and_web_pages_are_named(tmp_path: Path) -> None:
    """Clones without Git LFS leave pointers, and downloads behind a login leave pages."""
    pointer, page = tmp_path / "net.onnx", tmp_path / "net.safetensors"
    pointer.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 97\n")
    page.write_text("\n<!DOCTYPE html><html></html>")
    with pytest.raises(UserError, match=r"net\.onnx is a Git LFS pointer, not the model file itself; fetch it"):
        model_spec(Study(models=(str(pointer),)), str(pointer))
    study = Study(models=("torchvision:resnet18",), weights=str(page))
    refuses(r"net\.safetensors is a web page and not a weights file; download", model_spec, study, study.models[0])
    for name in ("net.pt", "net.cfg", "weights.safetensors"):
        shutil.copy(pointer, tmp_path / name)
        refuses(rf"{name} is a Git LFS pointer, not the", named, tmp_path / name)


def test_compressed_files_and_uppercase_endings_get_advice(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(gzip.compress(b"graph"))
    with zipfile.ZipFile(tmp_path / "net.zip", "w") as file:
        file.writestr("net", "graph")
    shutil.copy(tmp_path / "net.onnx", tmp_path / "net.onnx.gz")
    (tmp_path / "NET.ONNX").write_bytes(b"graph")
    for name, kind in (("net.onnx", "gzip"), ("net.zip", "zip"), ("net.onnx.gz", "gzip")):
        refuses(rf"{name} is compressed \({kind}\).*; unpack it", named, tmp_path / name)
    refuses(r"NET\.ONNX ends in capitals; rename it to NET\.onnx", named, tmp_path / "NET.ONNX")


def test_weights_alone_are_not_a_model(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    path.touch()
    with pytest.raises(UserError, match=r"is not a model file .*; weights need their network .*--weights"):
        model_spec(Study(models=(str(path),)), str(path))


def test_models_of_other_frameworks_get_onnx_advice(tmp_path: Path) -> None:
    (tmp_path / "tf").mkdir()
    (tmp_path / "tf" / "saved_model.pb").touch()
    for name, said in (
        ("net.keras", r"Keras.*'net\.onnx', format='onnx'"),
        ("net.h5", r"Keras.*'net\.onnx', format='onnx'"),
        ("net.pb", r"TensorFlow.*; write an ONNX file: python -m tf2onnx\.convert .* --output net\.onnx"),
        (f"{tmp_path}/tf", r"TensorFlow.* --output tf\.onnx"),
        ("net.pdmodel", "PaddlePaddle.*; write an ONNX file: paddle2onnx"),
        ("net.gguf", r"llama\.cpp, which Dyno doesn't read; give the model as an ONNX file"),
    ):
        refuses(rf"{name} is a model of {said}", model_spec, Study(models=(name,)), name)


def test_a_folder_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a folder; give a model.s file, or FILE\.py:FUNCTION"):
        model_spec(Study(models=(str(tmp_path),)), str(tmp_path))
    (tmp_path / "study.toml").touch()
    with pytest.raises(UserError, match=r"is a run folder; to resume it: dyno run .*study\.toml"):
        model_spec(Study(models=(str(tmp_path),)), str(tmp_path))


def test_engine_batches_are_known_before_measuring(fake_study: Any) -> None:
    found = Inspection(batches=(1, 4, 8))
    assert list_batches(fake_study(), found) == (4,), "what it was tuned for"
    assert list_batches(fake_study(batches=(1, 8)), found) == (1, 8)
    refuses("batch 16 is outside the engine's profile, 1 to 8", list_batches, fake_study(batches=(2, 16)), found)


def test_cache_keys_depend_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(card: str, device: str) -> str:
        monkeypatch.setattr(store, "gpu_identity", lambda device: card)
        recipe = Recipe(
            "tensorrt", "engine", "fp16", ModelSpec("net", "fake:net"), Dims(1, 4, 4), runtime=Runtime(device=device)
        )
        return store.Cache().make_key(recipe)

    assert key("H200 580", "cuda:0") != key("L4 580", "cuda:0")
    assert key("H200 580", "cuda:0") == key("H200 580", "cuda:0")
    assert key("H200 580", "cpu") == key("L4 580", "cpu")


@pytest.mark.usefixtures("unreported")
def test_a_model_that_crashes_on_inspection_gets_rows_and_others_run(call: Any, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import os\ndef dies(): os.kill(os.getpid(), 11)\n")
    words = "run", "net.py:dies", "--backend", "fake", "--batch", "1,2", "--out", "run"
    code, out, err = call(*words)
    assert (code, err) == (2, "dyno: dies: model inspection: killed by SIGSEGV\n")
    _, out, _ = call(*words, "fake:[/x]", "--rounds", "1", "--samples", "5", "--warmup", "0.02", code=3)
    frame = load("run").to_pandas().sort_values(["model", "batch"])
    assert [*zip(frame["model"], frame["batch"], frame["status"], strict=True)] == [
        ("[/x]", 1, "ok"), ("[/x]", 2, "ok"), ("dies", 1, "crashed"), ("dies", 2, "crashed")]  # fmt: skip
    assert set(frame["reason"]) == {"", "model inspection: killed by SIGSEGV"}
    assert "fake fp32 crashed: model inspection: killed by SIGSEGV" in out
