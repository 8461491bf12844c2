"""One model by itself: what it is timed on when nobody says, and what a command's defaults yield to."""

from __future__ import annotations

from pathlib import Path

import pytest

from dyno.layers import forms
from dyno.study.defaults import default_runner, each_with, new_folder, reference_of, study_of
from dyno.study.study import Study
from dyno.worker.spec import UserError


def test_engines_are_known_by_their_first_bytes(tmp_path: Path) -> None:
    for name, content, whose in (("a.engine", b"ftrt...", "tensorrt"), ("b.plan", b"vtrt...", "tensorrt_rtx")):
        (tmp_path / name).write_bytes(content)
        assert default_runner(str(tmp_path / name)) == (whose, "cuda:0")
    assert default_runner("m.onnx") == ("onnxruntime", "cpu") and default_runner("torchvision:resnet18") == (
        "pytorch",
        "cpu",
    )


def test_a_file_knows_its_batch_and_what_is_asked_goes_before_defaults() -> None:
    assert study_of("torchvision:resnet18", {"batches": (8,)}, {}).batches == (8,)
    assert study_of("m.onnx", {"batches": (8,)}, {}).batches == ()
    assert study_of("m.onnx", {"batches": (8,)}, {"batches": (2,)}).batches == (2,)
    asked = study_of("m.onnx", {"rounds": 2}, {"backends": ("openvino",), "seed": 3})
    assert (asked.backends, asked.seed, asked.rounds) == (("openvino",), 3, 2)


def test_the_reference_is_added_where_it_is_not_among_the_trials() -> None:
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


def test_a_form_is_told_from_a_model_alike_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("openvino").mkdir()  # a folder is not a model
    for text, settings in (
        ("openvino", {"backends": ("openvino",)}),
        ("openvino/bf16", {"backends": ("openvino",), "precisions": ("bf16",)}),
        ("tensorrt@profile=1:8:16/fp16", {"backends": ("tensorrt@profile=1:8:16",), "precisions": ("fp16",)}),
    ):
        assert each_with(["a.onnx", text], {})[1] == ("a.onnx", settings) and forms.is_form(text)
        (side,) = forms.sides(Study(models="a.onnx"), [text])[1:]
        assert side.named and (side.choice.text, side.precision) == (
            settings["backends"][0], settings.get("precisions", ("",))[0]
        )  # fmt: skip
    Path("onnxruntime").write_text("a model's file that is called like a backend")
    assert each_with(["a.onnx", "onnxruntime"], {})[1] == ("onnxruntime", {}) and not forms.is_form("onnxruntime")
    with pytest.raises(UserError, match="unknown form 'openvin'; did you mean 'openvino'"):
        forms.sides(Study(models="a.onnx"), ["openvin/bf16"])


def test_a_new_folder_is_named_after_command_and_models() -> None:
    folder = new_folder("time", ["torchvision:resnet18", "a/b.onnx"])
    assert folder.parent == Path("runs/time") and folder.name.startswith("resnet18-b-20")


def test_commands_of_one_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(30):
        new_folder("eval", ["net.onnx"]).mkdir(parents=True)
    assert len([*Path("runs/eval").iterdir()]) == 30
