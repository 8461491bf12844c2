"""Networks of transformers in folders written by `save_pretrained`: small, with random weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from drawn import photographs
from dyno import Study
from dyno.data.decode import Transform
from dyno.results.trial_result import load_run
from dyno.study.model_info import inspect_model, model_spec
from dyno.study.plan import expand
from dyno.worker.nets import models
from dyno.worker.spec import Dims, ModelSpec
from refusals import refuses

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
REVISION = "0123456789abcdef0123456789abcdef01234567"
SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
PROCESSOR = {
    "do_resize": True, "size": {"shortest_edge": 40}, "do_center_crop": True, "crop_size": {"height": 32, "width": 32},
    "resample": 3, "do_normalize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4],
}  # fmt: skip
MAKERS: dict[str, Callable[[], Any]] = {
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**SMALL, image_size=32, patch_size=8, num_labels=5)
    ),
    "bert": lambda: transformers.BertModel(
        transformers.BertConfig(**SMALL, vocab_size=100, max_position_embeddings=32)
    ),
    "sound": lambda: transformers.Wav2Vec2Model(
        transformers.Wav2Vec2Config(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, conv_dim=(16,) * 7,
            num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        )
    ),
    "spectrogram": lambda: transformers.ASTModel(transformers.ASTConfig(**SMALL, max_length=64, num_mel_bins=32)),
    "video": lambda: transformers.VideoMAEForVideoClassification(
        transformers.VideoMAEConfig(**SMALL, image_size=32, patch_size=16, num_frames=4)
    ),
    "codec": lambda: transformers.EncodecModel(
        transformers.EncodecConfig(
            num_filters=4, hidden_size=16, codebook_size=16, codebook_dim=16, num_lstm_layers=1, target_bandwidths=[1.5]
        )
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folders")
    torch.manual_seed(0)
    for name, make in MAKERS.items():
        make().save_pretrained(folder / name)
    (folder / "vit/preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


@pytest.fixture
def vit(folders: Path, tmp_path: Path) -> Callable[..., None]:
    """A function that copies the image classifier with settings changed in one file; images of five classes."""

    def change(file: str, **settings: Any) -> None:
        shutil.copytree(folders / "vit", tmp_path / "vit")
        path = tmp_path / "vit" / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
        photographs(tmp_path / "pets", "a", "b", "c", "d", "e")

    return change


def inspect(model: object, **fields: Any) -> Any:
    study = Study(models=(str(model),), **fields)
    return inspect_model(model_spec(study, study.models[0]), study)


def test_an_image_classifier_runs_with_the_folders_weights(folders: Path, call: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    words = "--backend pytorch,onnxruntime --routes usual --rounds 1 --seconds 0.05 --boundaries model".split()
    code, out, _ = call("run", str(folders / "vit"), *words, "--warmup", "0.02", "--out", "run")
    assert code == 0 and "vit at size 32" in out and "agree with those of pytorch" in out
    assert {t.backend for t in load_run(tmp_path / "run") if t.good} == {"pytorch", "onnxruntime"}
    spec, inspection = inspect(folders / "vit")
    assert (inspection.size, spec.preprocess.mean, spec.preprocess.std) == ((32, 32), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    assert spec.preprocess.resize == 40 / 32 and spec.preprocess.interpolation == "bicubic"
    own = transformers.ViTForImageClassification.from_pretrained(folders / "vit").eval()
    image = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        assert torch.allclose(models.load(spec)(image)["logits"], own(image)["logits"], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("bert", {"input_ids": (32,), "attention_mask": (32,)}),
        ("sound", {"input_values": (16_000,)}),
        ("codec", {"input_values": (1, 16_000)}),
        ("spectrogram", {"input_values": (64, 32)}),
        ("video", {"pixel_values": (4, 3, 32, 32)}),
    ],
)
def test_text_audio_and_video_models_have_their_own_inputs(
    name: str, inputs: dict[str, tuple[int, ...]], folders: Path
) -> None:
    spec, inspection = inspect(folders / name)
    assert {each.name: each.shape[1:] for each in spec.inputs if each.dtype} == inputs
    assert inspection.size == (0, 0) and spec.name == name


def test_weights_come_from_the_folder_and_identify_the_model(folders: Path, tmp_path: Path) -> None:
    study = Study(models=(f"hf:{folders / 'bert'}",))
    first = model_spec(study, study.models[0])
    assert first.pretrained and first.source == f"hf:{folders / 'bert'}"
    config = tmp_path / "bert/config.json"
    config.parent.mkdir()
    config.write_bytes((folders / "bert/config.json").read_bytes())
    other = model_spec(study, f"hf:{config.parent}")
    assert not other.pretrained and other.source_sha256 != first.source_sha256
    drawn = [models.weights_sha256(models.build(other)) for _ in range(2)]
    assert drawn[0] == drawn[1] != models.weights_sha256(models.build(first))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "bert", "architectures": ["NoSuchModel"]}, "is a NoSuchModel, which transformers"),
        ({"model_type": "nothing known"}, "can't be read by transformers"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "own.Config"}}, "it needs its own code, which is not run"),
    ],
)
def test_unsupported_models_are_refused_in_one_line(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('this must not run')")
    refuses(said, inspect, tmp_path)


def test_a_name_missing_from_the_hub_is_refused_in_one_line(
    call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    def no_network(*_: Any, **__: Any) -> None:
        raise OSError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    code, _, err = call("run", "hf:nobody/nothing", "--dry-run")
    assert code == 2 and err.count("\n") == 1 and "can't be downloaded: no network; give a local folder" in err
    assert "neither a folder nor ORG/NAME" in call("run", "hf:nothing", "--dry-run", code=2)[2]
    assert "neither a folder nor ORG/NAME" in call("run", "hf:", "--dry-run", code=2)[2]
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in call("run", f"hf:{tmp_path / 'empty'}", "--dry-run", code=2)[2]


def test_the_hub_cache_is_enough_offline(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    place = tmp_path / "models--some--bert"
    shutil.copytree(folders / "bert", place / "snapshots" / REVISION)
    (place / "refs").mkdir()
    (place / "refs/main").write_text(REVISION)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    study = Study(models=("hf:some/bert",), pretrained=True)
    spec = model_spec(study, study.models[0])
    assert spec.pretrained and spec.name == "bert" and spec.source.endswith(REVISION)
    assert not model_spec(Study(models=("hf:some/bert",)), "hf:some/bert").pretrained, "random without --pretrained"
    refuses("hf:some/other is not in the hub's cache", model_spec, study, "hf:some/other")


@pytest.mark.parametrize(
    ("processor", "resize", "interpolation"),
    [
        ({"size": {"shortest_edge": 32}, "crop_pct": 0.875, "resample": None}, 1 / 0.875, "bilinear"),
        ({"size": {"shortest_edge": 384}, "crop_pct": 0.875, "resample": 3}, 0.0, "bicubic"),
        ({"size": 48, "crop_size": 32, "do_center_crop": True, "resample": 1}, 1.5, "lanczos"),
        ({"size": 32, "resample": 2}, 0.0, "bilinear"),
        ({"size": {"height": 32, "width": 48}}, 0.0, "bilinear"),
    ],
)
def test_processor_files_of_various_forms_are_read(
    processor: dict[str, Any], resize: float, interpolation: str, folders: Path, tmp_path: Path
) -> None:
    shutil.copy(folders / "vit/config.json", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    found = models.preprocess(ModelSpec("m", f"hf:{tmp_path}"))
    assert (found.resize, found.interpolation) == (pytest.approx(resize), interpolation)
    (tmp_path / "preprocessor_config.json").write_text("{")
    refuses("can't be read", models.preprocess, ModelSpec("m", f"hf:{tmp_path}"))


def test_a_processor_in_a_combined_file_takes_precedence(folders: Path, tmp_path: Path) -> None:
    """transformers 5 saves it this way for networks with a tokenizer, and the library reads that file first."""
    shutil.copy(folders / "vit/config.json", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, "image_mean": [0.9] * 3}))
    several = tmp_path / "processor_config.json"
    several.write_text(json.dumps({"image_processor": PROCESSOR, "processor_class": "CLIPProcessor"}))
    found = models.preprocess(ModelSpec("m", f"hf:{tmp_path}"))
    assert (found.mean, found.resize) == ((0.5, 0.4, 0.3), 40 / 32)
    several.write_text(json.dumps({"processor_class": "CLIPProcessor"}))
    assert models.preprocess(ModelSpec("m", f"hf:{tmp_path}")).mean == (0.9,) * 3


@pytest.mark.parametrize(
    ("processor", "pixel"),
    [
        ({"rescale_factor": 1 / 127.5}, (255 / 127.5 - 0.5) / 0.25),
        ({"do_rescale": False}, (255 - 0.5) / 0.25),
        ({"do_rescale": True}, (1 - 0.5) / 0.25),
        ({"rescale_factor": 1 / 255, "do_normalize": False}, 1.0),
        ({"rescale_factor": 1 / 127.5, "do_normalize": False}, 2.0),
    ],
)
def test_the_pixel_scale_of_the_processor_is_applied(
    processor: dict[str, Any], pixel: float, folders: Path, tmp_path: Path
) -> None:
    shutil.copy(folders / "vit/config.json", tmp_path)
    own = {"size": 32, "image_mean": [0.5] * 3, "image_std": [0.25] * 3, **processor}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    found = models.preprocess(ModelSpec("m", f"hf:{tmp_path}"))
    assert (255 / 255 - found.mean[0]) / found.std[0] == pytest.approx(pixel)


@pytest.mark.slow
def test_one_value_for_all_colours_is_that_of_grey_and_several_are_a_guess(folders: Path, tmp_path: Path) -> None:
    config = json.loads((folders / "vit/config.json").read_text()) | {"num_channels": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": 32, "do_normalize": False}))
    grey = inspect(tmp_path, channels=1)[0]
    assert (grey.preprocess.mean, grey.preprocess.std) == ((0.0,), (1.0,))
    photographs(tmp_path / "pets/all", "a")
    for channels, guessed in ((1, True), (3, False)):
        model = {"models": ("timm:mobilenetv3_small_050",), "backends": ("pytorch",), "classes": 1}
        (trial,) = expand(Study(**model, channels=channels, sizes=("32",), data=str(tmp_path / "pets/all")))
        assert trial.model_facts.preprocess_guessed == guessed


def test_processors_that_swap_colour_channels_are_refused(vit: Any, call: Any) -> None:
    vit("preprocessor_config.json", do_flip_channel_order=True)
    words = ("run", "vit", "--backend", "pytorch", "--dry-run")
    code, _, error = call(*words, "--data", "pets")
    assert code == 2 and error.startswith("dyno: vit takes images with red and blue swapped (do_flip_channel_order)")
    assert call(*words)[0] == 0, "speed needs no images"


def put_processor(folders: Path, folder: Path, kind: str, **settings: Any) -> Any:
    shutil.copytree(folders / "vit", folder, dirs_exist_ok=True)
    processor = getattr(transformers, kind)(**settings)
    processor.save_pretrained(folder)
    return processor


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("ViTImageProcessor", {"size": {"height": 32, "width": 32}}),
        ("DeiTImageProcessor", {"size": {"height": 48, "width": 48}, "crop_size": {"height": 32, "width": 32}}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}, "crop_pct": 0.875}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 32}, "crop_pct": 0.875}),
        ("CLIPImageProcessor", {"size": {"shortest_edge": 32}, "crop_size": 32}),
    ],
)
def test_pixels_match_those_of_the_processor(
    kind: str, settings: dict[str, Any], folders: Path, tmp_path: Path
) -> None:
    processor = put_processor(folders, tmp_path, kind, **settings)
    spec = ModelSpec("m", f"hf:{tmp_path}")
    source, rest = models.find_source(spec)
    assert source.check_images(spec, rest, is_letterboxed=False) == ("", "")
    preprocess, size = source.read_image_config(spec, rest)
    assert preprocess is not None and size is not None
    for shape in ((90, 131), (131, 90)):
        noise = np.random.default_rng(0).integers(0, 256, (12, 12, 3)).astype(np.uint8)
        image = Image.fromarray(noise).resize(shape, Image.Resampling.BICUBIC)
        expected = np.asarray(processor(image, return_tensors="np")["pixel_values"])[0]
        pixels = Transform(size, preprocess, 3).pixels(image) / 255
        mean, std = (np.reshape(values, (3, 1, 1)) for values in (preprocess.mean, preprocess.std))
        assert np.abs((pixels - mean) / std - expected).mean() < 0.15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LevitImageProcessor", {"size": {"shortest_edge": 224}, "crop_size": 224}),
        ("ViTImageProcessor", {"do_resize": False}),
        ("EfficientNetImageProcessor", {"size": {"height": 32, "width": 32}}),
    ],
)
def test_a_processor_with_unsupported_steps_is_refused(
    kind: str, settings: dict[str, Any], folders: Path, call: Any, tmp_path: Path
) -> None:
    put_processor(folders, tmp_path / "vit", kind, **settings)
    photographs(tmp_path / "pets", "a", "b", "c", "d", "e")
    words = ("run", "vit", "--backend", "pytorch", "--size", "32", "--dry-run")
    code, _, error = call(*words, "--data", "pets")
    assert code == 2 and "takes images prepared by steps other than resize, centre crop and normalisation" in error
    assert call(*words)[0] == 0, "speed needs no images"


@pytest.mark.slow
def test_a_timm_folder_names_its_timm_source(call: Any, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    from timm.models._hub import save_for_hf

    net = timm.create_model("test_vit", num_classes=5).eval()
    save_for_hf(net, tmp_path / "mine", safe_serialization=True)
    code, _, error = call("run", "mine", "--backend", "pytorch", "--dry-run")
    given = error.partition("give ")[2].strip()
    assert code == 2 and given == f"timm:local-dir:{tmp_path / 'mine'}"
    spec, inspection = inspect(given)
    assert spec.name == "mine" and spec.pretrained and inspection.outputs == 5
    image = torch.randn(2, 3, *inspection.size)
    assert torch.equal(models.load(spec)(image), net(image))


@pytest.mark.slow
def test_the_configuration_stored_with_timm_weights_is_used(refused: Any, call: Any, tmp_path: Path) -> None:
    """It describes the preparation of images; the library's own describes the training of its published weights."""
    timm = pytest.importorskip("timm")
    from timm.models._hub import save_for_hf

    net = timm.create_model("test_vit", num_classes=5, img_size=48, act_layer="relu").eval()
    trained = {"input_size": (3, 48, 48), "mean": (0.5, 0.4, 0.3), "std": (0.2,) * 3, "crop_pct": 0.5}
    net.pretrained_cfg |= trained
    more = {"model_args": {"img_size": 48, "act_layer": "relu"}, "label_names": [*"abced"], "pretrained_cfg": trained}
    save_for_hf(net, tmp_path / "mine", model_config=more, safe_serialization=True)
    weights = tmp_path / "mine" / "model.safetensors"
    spec, inspection = inspect("timm:test_vit", weights=str(weights))
    found = inspection.preprocess
    assert (inspection.size, found.mean, found.std, found.resize) == ((48, 48), (0.5, 0.4, 0.3), (0.2,) * 3, 2.0)
    image = torch.randn(2, 3, 48, 48)
    assert torch.equal(models.load(spec, Dims(1, 48, 48))(image), net(image))
    photographs(tmp_path / "pets", *"abcde")
    words = ("run", "timm:test_vit", "--weights", weights, "--backend", "pytorch", "--data", "pets", "--dry-run")
    assert "'d' is class 3 of pets and class 4 of test_vit" in refused(*words)


@pytest.mark.slow
@pytest.mark.parametrize("trained", [{"crop_mode": "border"}, {"crop_pct": 1.15}])
def test_images_that_timm_puts_a_border_around_are_refused(trained: Any, call: Any, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    from timm.models._hub import save_for_hf

    net = timm.create_model("test_vit", num_classes=5)
    net.pretrained_cfg |= trained
    save_for_hf(net, tmp_path / "mine", model_config={"pretrained_cfg": trained}, safe_serialization=True)
    photographs(tmp_path / "pets", *"abcde")
    words = ("run", f"timm:local-dir:{tmp_path / 'mine'}", "--backend", "pytorch", "--dry-run")
    code, _, error = call(*words, "--data", "pets")
    assert code == 2 and "mine takes images with a border around them" in error
    assert call(*words)[0] == 0, "speed needs no images"


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["hf-hub", "hf_hub"])
def test_timm_folders_are_read_from_the_hub_cache(
    prefix: str, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timm = pytest.importorskip("timm")
    from huggingface_hub import constants
    from timm.models._hub import save_for_hf

    trained = {"input_size": (3, 48, 48), "mean": (0.5, 0.4, 0.3), "std": (0.2,) * 3, "crop_pct": 0.5}
    more = {"model_args": {"img_size": 48, "act_layer": "relu"}, "label_names": [*"abcde"], "pretrained_cfg": trained}
    net = timm.create_model("test_vit", num_classes=5, img_size=48, act_layer="relu").eval()
    net.pretrained_cfg |= trained
    place = tmp_path / "cache" / "models--some--vit"
    save_for_hf(net, place / "snapshots" / REVISION, model_config=more, safe_serialization=True)
    (place / "refs").mkdir()
    (place / "refs/main").write_text(REVISION)
    for name, value in (("HF_HUB_CACHE", str(tmp_path / "cache")), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(constants, name, value)
    spec, inspection = inspect(f"timm:{prefix}:some/vit", pretrained=True)
    found = inspection.preprocess
    assert (spec.name, inspection.outputs, inspection.class_names) == ("vit", 5, tuple("abcde"))
    assert (inspection.size, found.mean, found.std, found.resize) == ((48, 48), (0.5, 0.4, 0.3), (0.2,) * 3, 2.0)
    image = torch.randn(2, 3, 48, 48)
    assert torch.equal(models.load(spec, Dims(1, 48, 48))(image), net(image))
    random, inspection = inspect(f"timm:{prefix}:some/vit")
    assert not random.pretrained and inspection.outputs == 5 and inspection.size == (48, 48)
    refuses(
        "timm:hf-hub:some/other is not in the hub's cache", model_spec, Study(models=("m",)), "timm:hf-hub:some/other"
    )
    refuses("there is no folder some/vit", model_spec, Study(models=("m",)), "timm:local-dir:some/vit")
    words = ("--batch", "1", "--backend", "pytorch", "--rounds", "1", "--seconds", "0.02", "--warmup", "0.01")
    folder = place / "snapshots" / REVISION
    assert call("run", f"timm:local-dir:{folder}", *words, "--out", tmp_path / "run")[0] == 0
    assert call("export", tmp_path / "run", "-o", tmp_path / "best")[0] == 0
    assert "timm.create_model('test_vit'," in (tmp_path / "best.py").read_text()
    done = subprocess.run([sys.executable, "best.py"], capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0 and "output float32 1x5" in done.stdout, done.stderr


def test_a_folder_without_a_processor_gets_guessed_preprocessing(folders: Path, call: Any, tmp_path: Path) -> None:
    MAKERS["vit"]().save_pretrained(tmp_path / "bare")
    photographs(tmp_path / "pets", "a", "b", "c", "d", "e")
    words = ("--data", "pets", "--backend", "pytorch", "--rounds", "1", "--seconds", "0.02", "--warmup", "0.01")
    assert "images were normalised by mean 0.485" in call("run", "bare", *words, "--out", "run", code=0)[1]


def test_a_processor_that_cannot_run_is_reported(vit: Any, call: Any) -> None:
    own = {"image_processor_type": "Own", "auto_map": {"AutoImageProcessor": "own.Own"}}
    vit("preprocessor_config.json", **own)
    words = ("--data", "pets", "--backend", "pytorch", "--rounds", "1", "--seconds", "0.02", "--warmup", "0.01")
    out = call("run", "vit", *words, "--out", "run", code=0)[1]
    (told,) = [line for line in out.splitlines() if line.startswith("vit: images")]
    assert "the model's own processor couldn't be run to check that (it needs its own code, which is not run)" in told


def test_a_detector_processor_defines_the_normalisation(tmp_path: Path) -> None:
    config = transformers.YolosConfig(**SMALL, image_size=[32, 32], patch_size=8, num_detection_tokens=5, num_labels=2)
    transformers.YolosForObjectDetection(config).save_pretrained(tmp_path / "yolos")
    assert inspect(tmp_path / "yolos", task="detect")[1].preprocess_guessed
    own = {"size": {"height": 32, "width": 32}, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
    (tmp_path / "yolos/preprocessor_config.json").write_text(json.dumps(own))
    spec, inspection = inspect(tmp_path / "yolos", task="detect")
    assert (spec.preprocess.mean, spec.preprocess.std) == ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    assert spec.preprocess.letterbox and not inspection.preprocess_guessed


def test_an_encoder_decoder_model_asks_for_decoder_tokens(call: Any, tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=90, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    words = ("run", "t5", "--backend", "pytorch", "--dry-run")
    code, _, error = call(*words)
    given = error.partition("; add ")[2].partition(",")[0].split()
    assert code == 2 and given == ["--shapes", "decoder_input_ids:batchx1:int64"], error
    call(*words, *given, code=0)
    assert "decoder's" not in call(*words, "--shapes", "decoder_input_ids:batchx1x1:int64", code=2)[2]


def test_a_detector_processor_that_stretches_images_is_reported(call: Any, tmp_path: Path) -> None:
    config = transformers.YolosConfig(**SMALL, image_size=[32, 32], patch_size=8, num_detection_tokens=5, num_labels=2)
    transformers.YolosForObjectDetection(config).save_pretrained(tmp_path / "yolos")
    own = {"image_processor_type": "RTDetrImageProcessor", "size": {"height": 32, "width": 32}, "do_normalize": False}
    (tmp_path / "yolos/preprocessor_config.json").write_text(json.dumps(own))
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (40, 30)).save(tmp_path / "photos/photo.png")
    words = ("--data", "photos", "--task", "detect", "--backend", "pytorch", "--rounds", "1", "--seconds", "0.02")
    out = call("run", "yolos", *words, "--warmup", "0.01", "--out", "run", code=0)[1]
    assert "images were letterboxed, but the model's own processor stretches them to the size" in out


def test_text_and_image_models_get_tokens_and_pixels(tmp_path: Path) -> None:
    sides = {"text_config": {**SMALL, "vocab_size": 90}, "vision_config": {**SMALL, "image_size": 32, "patch_size": 8}}
    transformers.CLIPModel(transformers.CLIPConfig(**sides)).save_pretrained(tmp_path / "clip")
    spec, inspection = inspect(tmp_path / "clip")
    shapes = {each.name: each.shape for each in spec.inputs if each.dtype}
    assert shapes["input_ids"] == ("batch", 77) and shapes["pixel_values"] == ("batch", 3, "height", "width")
    assert inspection.size == (32, 32)


def test_missing_weights_are_not_filled_with_random_values(folders: Path, call: Any, tmp_path: Path) -> None:
    shutil.copytree(folders / "bert", tmp_path / "bert")
    config = json.loads((tmp_path / "bert/config.json").read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    (tmp_path / "bert/config.json").write_text(json.dumps(config))
    code, _, error = call("run", "bert", "--backend", "pytorch", "--dry-run")
    assert code == 2 and "no weights for 2 tensors of its BertForSequenceClassification, e.g. classifier.bias" in error


def test_weights_of_other_shapes_are_named(vit: Any, refused: Any) -> None:
    vit("config.json", id2label={str(k): str(k) for k in range(9)}, label2id={str(k): k for k in range(9)})
    said = "has weights of other shapes than its ViTForImageClassification for 2 tensors, e.g. classifier.bias, 5 inst"
    assert said in refused("run", "vit", "--backend", "pytorch", "--dry-run")


@pytest.mark.parametrize("whole", [True, False])
def test_an_unapplied_adapter_is_refused(folders: Path, refused: Any, tmp_path: Path, whole: bool) -> None:
    """Beside a network's own weights, or alone, as peft saves it."""
    (tmp_path / "lora").mkdir()
    for file in (folders / "vit").iterdir() if whole else ():
        shutil.copy(file, tmp_path / "lora")
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    said = "lora has an adapter of peft, which is not applied; save the network that merge_and_unload() returns"
    assert said in refused("run", "hf:lora", "--backend", "pytorch", "--dry-run")


def test_a_folder_without_weights_causes_a_warning(folders: Path, call: Any, tmp_path: Path) -> None:
    """Nothing in it shows that weights are missing, and TensorFlow's file isn't read."""
    (tmp_path / "vit").mkdir()
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(folders / "vit" / name, tmp_path / "vit" / name)
    (tmp_path / "vit/tf_model.h5").write_bytes(b"no weights")
    command = ("run", "vit", "--backend", "pytorch", "--rounds", "1", "--seconds", "0.1", "--out", "found")
    _, out, _ = call(*command, code=0)
    assert "vit: the weights are random: " in (words := " ".join(out.split()))
    assert "has no *.safetensors or *.bin; save the model there, or fetch the hub's with --pretrained" in words


def test_class_names_of_the_network_are_checked(vit: Any, call: Any, refused: Any) -> None:
    vit("config.json", id2label=dict(enumerate("abced")))
    call("export", "vit", "-o", "vit.onnx", code=0)  # the file keeps the class names
    for model, backend in (("vit", "pytorch"), ("vit.onnx", "onnxruntime")):
        said = refused("run", model, "--backend", backend, "--data", "pets", "--dry-run")
        assert "'d' is class 3 of pets and class 4 of vit" in said
