"""Both backends without their libraries: refusals, and the trials that share an engine."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyno.worker.backends.tensor_rt.build import TimingCache
from dyno.worker.backends.tensor_rt.settings import (
    batch_range,
    explain_outside,
    find_fixed_size,
    format_profiles,
    is_static,
    parse_profiles,
)
from dyno.worker.registry import find
from dyno.worker.spec import DataSpec, Dims, ModelSpec, Recipe, Runtime, Tensor, Trial, UserError, digest
from refusals import refuses

MODEL = ModelSpec("net", "torchvision:resnet18")
FILE = ModelSpec("net", "file:/somewhere/net.onnx", "abc")
DATA = DataSpec("photos", "/somewhere/photos", "d161")
GPU = Runtime(device="cuda:0", threads=2)
PYTHON = Runtime("old", "/somewhere/python3.10", device="cuda:0", threads=2)


def trial(precision: str = "fp32", batch: int = 8, *, model: ModelSpec = MODEL, **options: Any) -> Trial:
    return Trial(model, "tensorrt", precision, Dims(batch, 224, 224), options, data=DATA, runtime=GPU)


def recipe(precision: str = "fp32", batch: int = 8, *, model: ModelSpec = MODEL, **options: Any) -> Recipe:
    made = find("tensorrt").recipe(trial(precision, batch, model=model, **options))
    assert made is not None
    return made


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt_rtx"])
def test_tensorrt_and_tensorrt_rtx_are_registered(name: str) -> None:
    engine = find(name)
    assert engine.name == name and engine.devices == ("cuda",)
    assert engine.refuse(replace(trial(), backend=name)) == ""


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (replace(trial(), runtime=Runtime()), "tensorrt can't run on cpu (it runs on cuda)"),
        (trial("fp6"), "tensorrt has no fp6 here"),
        (trial("int4"), "int4 is only for files with such weights; Dyno doesn't quantise to it"),
        (trial(model=ModelSpec("ir", "file:net.xml")), "reads .onnx, .engine, .plan and .trt files, not net.xml"),
        (trial("tf32", model=replace(FILE, precision="int8")), "the file's weights are int8 already; run it as int8"),
        (replace(trial("int8"), data=DataSpec()), "int8 needs real calibration images: give --data"),
        (trial(batch=32, profile="1:8:16"), "batch 32 is outside the engine's profile (batches 1 to 16)"),
        (trial(profile="16:8:1"), "is out of order"),
        (trial(optimization=9), "optimization must be a level from 0 to 5, not 9"),
        (trial("fp16", route="calibrator"), "route=calibrator is for int8, not fp16"),
        (trial("fp16", joints=True), "joints is for int8 graphs that Dyno quantises; omit it here"),
        (trial("int8", joints=True, route="calibrator"), "joints is for int8 graphs that Dyno quantises; omit it here"),
        (trial("int8", route="flags"), "route=flags has no ranges for int8"),
    ],
)
def test_refusals_are_one_line(asked: Trial, said: str) -> None:
    reason = find("tensorrt").refuse(asked)
    assert said in reason and "\n" not in reason


@pytest.mark.parametrize("name", ["net.engine", "net.plan", "net.trt"])
def test_a_given_engine_is_used_unchanged(name: str) -> None:
    given = ModelSpec("net", f"file:/somewhere/{name}", "abc")
    assert find("tensorrt").refuse(trial("fp16", model=given)) == ""
    made = recipe("fp16", model=given)
    assert (made.maker, made.parent, made.runtime) == ("tensorrt", None, GPU)


def test_an_engine_is_built_in_its_runtime_from_a_locally_made_file() -> None:
    made = find("tensorrt").recipe(replace(trial("fp16"), runtime=PYTHON))
    assert made and made.runtime == PYTHON and made.format == "engine"
    assert made.parent and made.parent.maker == "onnx_precision" and made.parent.precision == "fp16"
    assert made.parent.runtime.python == ""


def test_int8_is_calibrated_for_tensorrt() -> None:
    made = recipe("int8", samples=16)
    assert made.parent and made.parent.options["target"] == "tensorrt" and made.parent.options["samples"] == 16
    assert made.data is None and "samples" not in made.options


def test_flags_and_calibrator_start_from_fp32() -> None:
    flags, calibrator = recipe("fp16", route="flags"), recipe("int8", route="calibrator", samples=16)
    assert flags.parent == calibrator.parent == recipe().parent
    assert (flags.precision, flags.options) == ("fp16", {"route": "flags"})
    assert calibrator.options == {"route": "calibrator", "samples": 16}
    assert calibrator.data and (calibrator.data.split, calibrator.data.sha256) == ("calibration", "d161")


def test_an_impossible_route_is_a_user_error() -> None:
    refuses("route=calibrator is for int8", recipe, "fp16", route="calibrator")


def test_batches_within_one_profile_share_an_engine() -> None:
    assert digest(recipe(batch=1, profile="1:8:16")) == digest(recipe(batch=16, profile="1:8:16"))
    assert digest(recipe(batch=1)) != digest(recipe(batch=16))
    assert recipe(batch=1, profile="1:8:16").parent == recipe(batch=16, profile="1:8:16").parent
    folded = [recipe(batch=batch).parent for batch in (1, 16)]
    assert all(folded) and folded[0].parent == folded[1].parent, "one export serves every batch"


def test_only_options_that_change_the_engine_change_its_digest() -> None:
    for options in ({"graph": False}, {"slots": 1}, {"route": "auto"}, {"route": "graph"}, {"build": 0}):
        assert digest(recipe("fp16", **options)) == digest(recipe("fp16")), options
    for options in ({"build": 1}, {"optimization": 5}, {"profile": "1:8:16"}, {"refit": True}, {"tactics": "none"}):
        assert digest(recipe("fp16", **options)) != digest(recipe("fp16")), options


IMAGE = Tensor("x", "float32", ("batch", 3, "height", "width"))
FIXED = Tensor("x", "float32", (1, 3, 224, 224))
MASK = Tensor("input:mask", "int64", ("batch", "length"))
DIMS = Dims(4, 224, 256)


def test_a_static_profile_uses_the_shape_of_the_trial() -> None:
    found = parse_profiles("static", [IMAGE], DIMS)
    assert found == [{"x": ((4, 3, 224, 256),) * 3}]
    assert is_static(found) and find_fixed_size(found, "x") == (4, 3, 224, 256)


def test_a_trial_with_a_free_batch_uses_the_batch_of_the_file() -> None:
    assert parse_profiles("static", [FIXED], Dims(0, 224, 224)) == [{"x": ((1, 3, 224, 224),) * 3}]


def test_batch_ranges_become_profiles() -> None:
    found = parse_profiles("1:8:16", [IMAGE], DIMS)
    assert found == [{"x": ((1, 3, 224, 256), (8, 3, 224, 256), (16, 3, 224, 256))}]
    assert find_fixed_size(found, "x") == (-1, 3, 224, 256), "only what varies stays free"
    assert not is_static(found)


def test_a_single_batch_gives_a_static_profile() -> None:
    assert is_static(parse_profiles("8", [IMAGE], DIMS))
    assert parse_profiles("8", [IMAGE], DIMS) == parse_profiles("8:8:8", [IMAGE], DIMS)


def test_profiles_of_several_inputs_are_parsed() -> None:
    text = "x:1x3x32x32,2x3x32x32,4x3x64x32;input:mask:1x7|x:8x3x32x32;input:mask:8x7"
    found = parse_profiles(text, [IMAGE, MASK], DIMS)
    assert [sorted(profile) for profile in found] == [["input:mask", "x"]] * 2
    assert found[0]["x"] == ((1, 3, 32, 32), (2, 3, 32, 32), (4, 3, 64, 32))
    assert found[1]["input:mask"] == ((8, 7),) * 3
    assert find_fixed_size(found, "x") == (-1, 3, -1, 32) and find_fixed_size(found, "input:mask") == (-1, 7)
    assert format_profiles(found)[1] == {"x": [[8, 3, 32, 32]] * 3, "input:mask": [[8, 7]] * 3}


def test_fixed_shape_inputs_may_be_omitted_from_a_profile() -> None:
    assert parse_profiles("x:1x3x8x8", [IMAGE, Tensor("w", "float32", (3,))], DIMS)[0]["w"] == ((3,),) * 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1:8", "profile '1:8' is not MIN:OPT:MAX, three batches such as 1:8:16"),
        ("8:1:16", "profile '8:1:16' is out of order: it must be 1 <= min <= opt <= max"),
        ("0:1:2", "profile '0:1:2' is out of order: it must be 1 <= min <= opt <= max"),
        ("x:1x3x8x8,2x3x8x8", "is neither MIN:OPT:MAX batches nor NAME:MIN,OPT,MAX shapes"),
        ("1x3x8x8", "is neither MIN:OPT:MAX batches nor"),
        ("x:1x3xax8", "is neither MIN:OPT:MAX batches nor"),
        ("y:1x3x8x8", "the model has no input 'y'; its inputs: x"),
        ("x:1x3x8", "input 'x' has 4 dimensions, 1x3x8 has 3"),
        ("x:1x4x8x8", "the file has input 'x' fixed at batchx3xheightxwidth, not 1x4x8x8"),
        ("x:2x3x8x8,1x3x8x8,4x3x8x8", "is out of order: it must be 1 <= min <= opt <= max everywhere"),
        ("", "is neither MIN:OPT:MAX batches nor"),
    ],
)
def test_invalid_profiles_are_refused(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_profiles(text, [IMAGE], DIMS)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["static", "1:4:8", "4", "x:4x3x224x224", "x:1x3x224x224,4x3x224x224,8x3x224x224"])
def test_a_static_file_accepts_only_its_own_shape(text: str) -> None:
    refuses(r"fixed.*export it", parse_profiles, text, [FIXED], Dims(4, 224, 224))


def test_a_missing_batch_is_refused() -> None:
    with pytest.raises(UserError, match=r"the batch of 'x' is free; give a batch, or a range MIN:OPT:MAX"):
        parse_profiles("static", [IMAGE], Dims(0, 224, 224))


def test_an_input_without_a_shape_is_refused() -> None:
    with pytest.raises(UserError, match="no shape is given for input 'input:mask', which is batchxlength"):
        parse_profiles("x:1x3x8x8", [IMAGE, MASK], DIMS)


@given(st.lists(st.integers(1, 64), min_size=3, max_size=3), st.integers(1, 64))
def test_a_batch_is_refused_exactly_when_outside_the_profile(sizes: list[int], batch: int) -> None:
    low, opt, high = sorted(sizes)
    text = f"{low}:{opt}:{high}"
    assert batch_range(text) == (low, opt, high)
    why = explain_outside(text, batch)
    assert bool(why) == (not low <= batch <= high)
    assert "\n" not in why


def test_a_batch_outside_the_profile_names_the_allowed_batches() -> None:
    assert explain_outside("1:4:8|32", 16) == "batch 16 is outside the engine's profile (batches 1 to 8 or 32)"
    assert explain_outside("static", 16) == explain_outside("1:4:8|16:32:64", 16) == explain_outside("x:1x3", 16) == ""


H200 = "NVIDIA H200"


class Timings:
    """A timing cache that contains a set of words."""

    def __init__(self, content: bytes) -> None:
        self.words = set(content.decode().split())

    def combine(self, other: Any, ignore_mismatch: bool) -> bool:
        self.words |= other.words
        return not ignore_mismatch

    def serialize(self) -> bytes:
        return " ".join(sorted(self.words)).encode()


class Config:
    """A builder's config that accepts only its own version's caches."""

    cache: Timings | None = None

    def create_timing_cache(self, content: bytes) -> Timings | None:
        return None if b"damaged" in content else Timings(content)

    def set_timing_cache(self, cache: Timings, ignore_mismatch: bool) -> bool:
        if "foreign" in cache.words:
            return ignore_mismatch
        self.cache = cache
        return True

    def get_timing_cache(self) -> Timings | None:
        return self.cache


def library(name: str = "tensorrt", version: str = "8.6.0") -> Any:
    return SimpleNamespace(__name__=name, __version__=version)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DYNO_TIMING", str(tmp_path / "timing"))
    return tmp_path / "timing"


def timed(config: Config, *tactics: str) -> Config:
    """Add a build's tactics to its cache."""
    assert config.cache is not None
    config.cache.words |= set(tactics)
    return config


def told(cache: TimingCache) -> bool:
    used = cache.to_record(SimpleNamespace(timed=7))
    assert used.timed == 7
    return used.used


def test_timing_results_are_reused_by_the_next_build(folder: Path) -> None:
    config = Config()
    first = TimingCache.open(library(), config, H200, True)
    assert not told(first)
    first.save(timed(config, "conv"))
    again = Config()
    second = TimingCache.open(library(), again, H200, True)
    assert told(second) and again.cache and again.cache.words == {"conv"}
    assert [path.name for path in folder.glob("*.timing")] == ["tensorrt-8.6.0-NVIDIA-H200.timing"]


@pytest.mark.parametrize(("version", "gpu"), [("10.0.1", H200), ("8.6.0", "NVIDIA L4")])
def test_each_version_and_gpu_has_its_own_timing_cache(folder: Path, version: str, gpu: str) -> None:
    config = Config()
    TimingCache.open(library(), config, H200, True).save(timed(config, "conv"))
    assert not told(TimingCache.open(library(version=version), Config(), gpu, True))


def test_timing_results_of_concurrent_builds_are_merged(folder: Path) -> None:
    one, two = Config(), Config()
    first, second = (TimingCache.open(library(), config, H200, True) for config in (one, two))
    first.save(timed(one, "conv"))
    second.save(timed(two, "gemm"))
    assert first.path and first.path.read_bytes() == b"conv gemm"


@pytest.mark.parametrize("content", [b"damaged", b"foreign"])
def test_an_incompatible_timing_cache_is_overwritten(folder: Path, content: bytes) -> None:
    folder.mkdir()
    path = folder / "tensorrt-8.6.0-NVIDIA-H200.timing"
    path.write_bytes(content)
    config = Config()
    cache = TimingCache.open(library(), config, H200, True)
    assert not told(cache)
    cache.save(timed(config, "conv"))
    assert path.read_bytes() == b"conv"


def test_no_timing_cache_is_written_where_disabled_or_unsupported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = TimingCache.open(library(), Config(), H200, False)
    rtx = TimingCache.open(library("tensorrt_rtx", "1.7.1"), Config(), H200, True)
    monkeypatch.delenv("DYNO_TIMING")
    unset = TimingCache.open(library(), Config(), H200, True)
    for cache in (off, rtx, unset):
        cache.save(Config())
        assert cache.path is None and not told(cache)
    assert not folder.exists()
