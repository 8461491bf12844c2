"""Version differences: the real module of TensorRT-RTX, and a stand-in with TensorRT 8.6's features and gaps."""

import dataclasses
import enum
import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dyno.worker.backends.tensor_rt import library
from dyno.worker.backends.tensor_rt.settings import RUNNER_OPTIONS, Settings
from dyno.worker.spec import Unavailable, UserError

Network = enum.IntEnum("Network", {"EXPLICIT_BATCH": 0})
Flag = enum.IntEnum("Flag", "FP16 INT8 FP8 TF32 REFIT VERSION_COMPATIBLE PREFER_PRECISION_CONSTRAINTS", start=0)
Tactic = enum.IntEnum("Tactic", "CUBLAS CUBLAS_LT CUDNN EDGE_MASK_CONVOLUTIONS JIT_CONVOLUTIONS", start=0)
Preview = enum.IntEnum("Preview", "FASTER_DYNAMIC_SHAPES_0805 PROFILE_SHARING_0806", start=0)
Verbosity = enum.IntEnum("Verbosity", "LAYER_NAMES_ONLY DETAILED", start=0)


class Config:
    """A builder's config that records its settings."""

    def __init__(self) -> None:
        self.flags: set[Any] = {Flag.TF32}
        self.previews: set[Any] = set()
        self.tactics = sum(1 << tactic for tactic in Tactic)

    def set_flag(self, flag: Any) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: Any) -> None:
        self.flags.discard(flag)

    def get_tactic_sources(self) -> int:
        return self.tactics

    def set_tactic_sources(self, sources: int) -> None:
        self.tactics = sources

    def set_preview_feature(self, feature: Any, on: bool) -> None:
        self.previews |= {feature} if on else set()


@pytest.fixture
def old() -> Any:
    """A stand-in for TensorRT 8.6, limited to the differences."""
    return SimpleNamespace(
        __name__="tensorrt", __version__="8.6.0", NetworkDefinitionCreationFlag=Network, BuilderFlag=Flag,
        TacticSource=Tactic, PreviewFeature=Preview, ProfilingVerbosity=Verbosity,
    )  # fmt: skip


@pytest.fixture(scope="module")
def rtx() -> Any:
    if not importlib.util.find_spec("tensorrt_rtx"):
        pytest.skip("tensorrt-rtx is not installed")
    return library.load("tensorrt_rtx")


@pytest.fixture
def config(rtx: Any) -> Any:
    return rtx.Builder(library.Log(rtx)).create_builder_config()


def test_a_missing_library_names_the_package_to_install() -> None:
    if importlib.util.find_spec("tensorrt"):
        pytest.skip("tensorrt is installed")
    with pytest.raises(Unavailable, match="tensorrt is not installed in this Python; pip install tensorrt"):
        library.load("tensorrt")


def test_only_old_versions_build_weakly_typed_networks(old: Any, rtx: Any) -> None:
    assert not library.is_typed(old, "graph")
    assert library.is_typed(rtx, "graph") and not library.is_typed(rtx, "flags")
    builder = SimpleNamespace(create_network=lambda flags: flags)
    assert library.new_network(old, builder, False) == 1 << Network.EXPLICIT_BATCH
    real = library.new_network(rtx, rtx.Builder(library.Log(rtx)), True)
    assert real.get_flag(rtx.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


@pytest.mark.parametrize(
    ("precision", "flags"), [("fp32", []), ("tf32", ["TF32"]), ("fp16", ["FP16"]), ("int8", ["INT8", "FP16"])]
)
def test_precisions_become_flags_of_an_old_builder(old: Any, precision: str, flags: list[str]) -> None:
    config = Config()
    assert library.allow_types(old, config, precision, typed=False) == flags
    assert config.flags == {Flag[name] for name in flags}, "TF32 is off unless it was asked for"


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_an_old_builder_lacks_newer_types(old: Any, precision: str) -> None:
    with pytest.raises(Unavailable, match=rf"TensorRT 8\.6\.0 has no .*{precision}"):
        library.allow_types(old, Config(), precision, typed=False)


def test_a_typed_network_needs_no_flags(rtx: Any, config: Any) -> None:
    assert library.allow_types(rtx, config, "int8", typed=True) == []
    assert not config.get_flag(rtx.BuilderFlag.TF32)
    assert library.allow_types(rtx, config, "tf32", typed=True) == ["TF32"]
    assert config.get_flag(rtx.BuilderFlag.TF32)


def test_convolutions_with_fp16_weights_are_constrained_to_fp16(old: Any) -> None:
    class Layer:
        def __init__(self, kind: str, kernel: Any = None) -> None:
            self.type, self._kernel, self.precision = kind, kernel, None

    class Convolution(Layer):
        @property
        def kernel(self) -> Any:
            return self._kernel

    half, single = np.ones(2, np.float16), np.ones(2, np.float32)
    layers = [Layer("conv", half), Layer("conv", single), Layer("matmul"), Layer("deconv", half)]
    old.LayerType = SimpleNamespace(CONVOLUTION="conv", DECONVOLUTION="deconv")
    old.IConvolutionLayer = old.IDeconvolutionLayer = Convolution
    old.float16 = "half"
    network = SimpleNamespace(num_layers=len(layers), get_layer=layers.__getitem__)
    config = Config()
    assert library.keep_types(old, config, network) == 2
    assert [layer.precision for layer in layers] == ["half", None, None, "half"]
    assert Flag.PREFER_PRECISION_CONSTRAINTS in config.flags
    assert library.keep_types(old, Config(), SimpleNamespace(num_layers=0)) == 0


def test_settings_reach_the_builder(rtx: Any, config: Any) -> None:
    wanted = Settings(optimization=1, workspace_mb=64, refit=True, weight_streaming=True, tactics="jit_convolutions")
    library.configure(rtx, config, wanted)
    assert config.builder_optimization_level == 1
    assert config.get_memory_pool_limit(rtx.MemoryPoolType.WORKSPACE) == 64 << 20
    assert config.get_tactic_sources() == 1 << int(rtx.TacticSource.JIT_CONVOLUTIONS)
    assert config.profiling_verbosity == rtx.ProfilingVerbosity.DETAILED
    assert config.get_flag(rtx.BuilderFlag.REFIT) and config.get_flag(rtx.BuilderFlag.WEIGHT_STREAMING)
    assert not config.get_flag(rtx.BuilderFlag.VERSION_COMPATIBLE)


def test_an_old_builder_avoids_external_tactics_and_shares_profiles(old: Any) -> None:
    config = Config()
    library.configure(old, config, Settings())
    assert config.tactics == 1 << Tactic.EDGE_MASK_CONVOLUTIONS | 1 << Tactic.JIT_CONVOLUTIONS
    assert config.previews == {Preview.PROFILE_SHARING_0806}
    library.configure(old, config, Settings(tactics="cublas+cudnn"))
    assert config.tactics == 1 << Tactic.CUBLAS | 1 << Tactic.CUDNN
    library.configure(old, config, Settings(tactics="none"))
    assert config.tactics == 0


def test_features_missing_from_an_old_builder_are_named(old: Any) -> None:
    with pytest.raises(Unavailable, match=r"TensorRT 8\.6\.0 has no weight_streaming"):
        library.configure(old, Config(), Settings(weight_streaming=True))
    with pytest.raises(UserError, match="has no tactic source WINOGRAD; it has CUBLAS, CUBLAS_LT, CUDNN,"):
        library.configure(old, Config(), Settings(tactics="cublas+winograd"))


def test_progress_is_reported_where_supported(old: Any, rtx: Any, config: Any) -> None:
    assert not library.watch(old, Config(), print, bool)
    assert library.watch(rtx, config, print, bool) and config.progress_monitor is not None


def test_a_missing_calibrator_is_reported(rtx: Any) -> None:
    with pytest.raises(Unavailable, match="has no calibrator; give route=graph"):
        library.calibrator_class(rtx, "entropy")


def test_the_logger_is_shared_and_cleared(rtx: Any) -> None:
    first = library.Log(rtx)
    first.log(rtx.ILogger.Severity.ERROR, "something broke")
    first.log(rtx.ILogger.Severity.WARNING, "something is odd")
    first.log(rtx.ILogger.Severity.VERBOSE, "Tactic: 0x1 Time: 0.01")
    assert (first.reason(), first.warnings, first.timed) == ("something broke", ["something is odd"], 1)
    again = library.Log(rtx)
    assert again is first and not (again.errors or again.warnings or again.timed)


OLD = "1: [stdArchiveReader.cpp::StdArchiveReader::32] Error Code 1: Serialization (Version tag does not match)"
MEMORY = "[defaultAllocator.cpp::allocate::21] Error Code 1: Cuda Runtime (out of memory)"
NO_GPU = "Error Code 1: Cuda Runtime (cudaError 35: no driver)"
USAGE = "IBuilder::build: Error Code 4: API Usage Error (no profile. In validate at /_src/a.cpp:4)"


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ([], "the library gave no reason"),
        ([OLD, "4: [runtime.cpp::deserialize::66] it failed"], "Serialization (Version tag does not match)"),
        (["no tactic", MEMORY, "so it failed"], "Cuda Runtime (out of memory)"),
        ([NO_GPU, "the real one"], "the real one"),
        ([USAGE], "API Usage Error (no profile)"),
        (["two\n  lines"], "two lines"),
    ],
)
def test_the_failure_reason_is_one_line(errors: list[str], said: str) -> None:
    assert library.find_reason(errors) == said


def parser(desc: str, code: str = "ErrorCode.UNSUPPORTED_NODE") -> Any:
    error = SimpleNamespace(desc=lambda: desc, code=lambda: code)
    return SimpleNamespace(num_errors=1, get_error=lambda index: error)


@pytest.mark.parametrize("node", ["Node name: det_1", 'input: "x" output: "y" name: "det_1" op_type: "Det"'])
def test_parser_errors_name_the_node_in_every_version(node: str) -> None:
    said = [
        'ModelImporter.cpp:140: While parsing node number 3 [Det -> "y"]:',
        f"--- Begin node ---\n{node}\n--- End node ---",
    ]
    log = SimpleNamespace(errors=said)
    assert library.parse_error(parser("false"), log) == "it doesn't support the operator Det of node 'det_1'"
    other = library.parse_error(parser("axes must be\nconstant", "ErrorCode.INVALID_NODE"), log)
    assert other == "node 'det_1' (Det): axes must be constant"


def test_a_nameless_node_is_identified_by_number() -> None:
    log = SimpleNamespace(errors=["While parsing node number 3 [Det]:"])
    assert library.parse_error(parser("false"), log) == "it doesn't support the operator Det of node 'number 3'"


def test_data_types_have_names(rtx: Any) -> None:
    names = {library.dtype_name(kind) for kind in rtx.DataType.__members__.values()}
    assert {"float32", "float16", "bfloat16", "float8", "int8", "int32", "int64", "uint8", "bool"} <= names


def test_harmless_build_messages_are_not_warnings() -> None:
    said = (
        "onnx2trt_utils.cpp:374: Your ONNX model has been generated with INT64 weights, while TensorRT does not "
        "natively support INT64. Attempting to cast down to INT32."
    )
    assert library.HARMLESS_WARNING.search(said)
    assert not library.HARMLESS_WARNING.search("One or more weights outside the range of INT32 was clamped")
    assert not library.HARMLESS_WARNING.search(
        "- 53 weights are affected by this issue: Detected subnormal FP16 values."
    )


def test_empty_options_give_the_default_settings() -> None:
    assert Settings.from_options({}) == Settings()
    assert Settings().options() == {}


def test_only_non_default_options_are_kept() -> None:
    options: dict[str, Any] = {"optimization": 5, "refit": False, "profile": "static", "samples": 8, "graph": False}
    assert Settings.from_options(options).options() == {"optimization": 5}


def test_settings_survive_conversion_to_options_and_back() -> None:
    made = Settings.from_options({"profile": 8, "hardware_compatible": True, "build": 2, "timing_cache": False})
    assert (made.profile, made.hardware_compatible) == ("8", "ampere_plus")
    assert Settings.from_options(made.options()) == made


def test_runner_and_builder_options_do_not_overlap() -> None:
    assert not {field.name for field in dataclasses.fields(Settings)} & set(RUNNER_OPTIONS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimization": 6}, "optimization must be a level from 0 to 5, not 6"),
        ({"optimization": "high"}, "optimization must be a whole number, not 'high'"),
        ({"optimization": True}, "optimization must be a whole number, not True"),
        ({"refit": 1}, "refit must be true or false, not 1"),
        ({"workspace_mb": -1}, "workspace_mb must be a size in MiB, not -1"),
        ({"route": "magic"}, "unknown route 'magic'; known: auto, graph, flags, calibrator"),
        ({"calibrator": "mse"}, "unknown calibrator 'mse'; known: entropy, minmax"),
    ],
)
def test_invalid_option_values_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        Settings.from_options(options)
    assert str(caught.value) == said
