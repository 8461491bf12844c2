"""Commands of trtexec that time or build an engine as Dyno did.

Options are from NVIDIA's documentation: "Command-Line Programs" of TensorRT 8.6 and 10, "Migrating trtexec Usage" for
options dropped in 10 and 11, and "Best Practices" of TensorRT for RTX with its tool `tensorrt_rtx`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from dyno.results.trial_result import TrialResult
from dyno.trtexec.log import has_defaults_of_11
from dyno.worker.spec import Dims, UserError

FP16, BF16, INT8, FP8 = "--fp16", "--bf16", "--int8", "--fp8"
# Flags of weakly typed builds by precision. INT8 alone would leave FP32 as its only alternative.
PRECISION_FLAGS = {"fp16": (FP16,), "bf16": (BF16,), "int8": (INT8, FP16), "fp8": (FP8, FP16)}
EXTERNAL_TACTICS = ("CUBLAS", "CUBLAS_LT", "CUDNN")  # tactic sources that TensorRT 8 may call and Dyno disables
PERCENTILE_LIST = "90,95,99"
TIMES_FILE = "times.json"


def name_tool(trial: TrialResult) -> str:
    """Return the program's name, which differs for TensorRT for RTX."""
    return "tensorrt_rtx" if is_rtx(trial) else "trtexec"


def is_rtx(trial: TrialResult) -> bool:
    """Return whether the engine is from TensorRT for RTX."""
    return "rtx" in trial.backend


def choose_graph_flag(trial: TrialResult) -> str:
    """Return the option that makes trtexec replay a CUDA graph."""
    return "--rtxCudaGraphStrategy=wholeGraph" if is_rtx(trial) else "--useCudaGraph"


def read_version(trial: TrialResult) -> str:
    """Return TensorRT's version from the job's record; "" if it isn't stored."""
    for r in trial.rounds:
        versions = r.record.system.get("versions") or {}
        if name := next((name for name in versions if name.startswith("tensorrt")), ""):
            return str(versions[name])
    return ""


def find_engine(trial: TrialResult) -> str:
    """Return the path of the engine that ran: the artifact's, else the user's file."""
    return trial.artifact.path if trial.artifact else trial.spec.model.file


def read_shapes(trial: TrialResult) -> dict[str, tuple[int, ...]]:
    """Return the input shapes by name; empty if the record has neither shapes nor a described file."""
    dims = trial.spec.dims
    shapes = {name: dims.resolve(shape) for name, shape in dims.shapes.items()}
    input_shapes = {t.name: t.shape for t in (trial.artifact.inputs if trial.artifact else ())}
    return {name: shapes.get(name) or _fill_shape(shape, dims) for name, shape in input_shapes.items()} or shapes


def _fill_shape(shape: tuple[int | str, ...], dims: Dims) -> tuple[int, ...]:
    """Fill in free dimensions as a session does: batch first, height and width of images last."""
    values = {0: dims.batch} | ({2: dims.height, 3: dims.width} if len(shape) == 4 else {})
    return tuple(int(n) if isinstance(n, int) else int(values.get(axis, 1)) for axis, n in enumerate(shape))


def is_dynamic(trial: TrialResult) -> bool:
    """Return whether the engine takes more than one shape."""
    option = trial.facts.options.get("dynamic")
    if option is not None:
        return bool(option)
    return any(isinstance(n, str) for t in (trial.artifact.inputs if trial.artifact else ()) for n in t.shape)


def read_timing(trial: TrialResult, boundary: str = "model", times: str = TIMES_FILE) -> list[str]:
    """Return the arguments of the command that times the engine as Dyno did; `boundary` is `model` or `all`.

    Raises `UserError` if the record names no engine file.
    """
    path = find_engine(trial)
    if not path:
        raise UserError(f"{trial.label}: the record names no engine file for trtexec to load; time an .engine file")
    plan, options = trial.spec.plan, trial.facts.options
    arguments = [name_tool(trial), f"--loadEngine={path}"]
    if is_dynamic(trial):
        arguments.append(f"--shapes={make_spec(read_shapes(trial)) or 'INPUT:NxCxHxW'}")
    arguments.append(f"--device={trial.device.partition(':')[2] or 0}")
    has_graph, copies = options.get("graph", True), boundary != "model"
    if has_defaults_of_11(read_version(trial)):
        arguments += ["--noCudaGraph"] * (not has_graph) + ["--includeDataTransfers"] * copies
    else:
        arguments += [choose_graph_flag(trial)] * has_graph + ["--noDataTransfers"] * (not copies) + ["--useSpinWait"]
    return [
        *arguments, f"--warmUp={1e3 * plan.warmup_s:.0f}", f"--duration={plan.seconds:g}",
        f"--iterations={plan.min_samples}", f"--percentile={PERCENTILE_LIST}", f"--exportTimes={times}",
    ]  # fmt: skip


def make_spec(shapes_by_input: Mapping[str, Sequence[int]]) -> str:
    """Format shapes in trtexec's form: `x:8x3x224x224,y:8x2`."""
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes_by_input.items())


def read_build(trial: TrialResult) -> list[str]:
    """Return the arguments of the command that builds the engine; [] if Dyno didn't build it.

    If the types are in the graph, the ONNX file is the converted one from Dyno's cache; it is named as by `dyno export
    --precision PRECISION --target tensorrt`.
    """
    made_by, model = trial.made_by, trial.spec.model
    if not made_by.typed:
        return []
    version = read_version(trial) or next(iter(made_by.versions.values()), "")
    rtx, major = is_rtx(trial), int(version.partition(".")[0] or 10)
    is_original = made_by.route != "graph" or trial.precision in ("fp32", "tf32", model.precision)
    source, converted_name = model.source, f"{trial.model}.{'fp32' if is_original else trial.precision}.onnx"
    onnx = source.removeprefix("file:") if is_original and source.endswith(".onnx") else converted_name
    profile = _choose_profile(trial, made_by.profiles)
    engine = PurePath(find_engine(trial) or "model.engine").name
    arguments = [name_tool(trial), f"--onnx={onnx}", f"--saveEngine={engine}"]
    arguments += _list_precision_flags(trial, 11 if rtx else major)
    for index, name in enumerate(("min", "opt", "max") if profile else ()):
        arguments.append(f"--{name}Shapes={make_spec({key: ranges[index] for key, ranges in profile.items()})}")
    if made_by.options.get("optimization") is not None and not rtx:
        arguments.append(f"--builderOptimizationLevel={made_by.options['optimization']}")
    if workspace := made_by.options.get("workspace_mb"):
        arguments.append(f"--memPoolSize=workspace:{int(workspace)}")  # MiB unless a unit is given
    if major < 10 and not rtx:
        tactics = str(made_by.options.get("tactics", "")).upper().split("+")
        arguments.append("--tacticSources=" + ",".join(("+" if n in tactics else "-") + n for n in EXTERNAL_TACTICS))
    return [*arguments, "--skipInference"]


def _list_precision_flags(trial: TrialResult, major: int) -> list[str]:
    """Return the flags for the engine's types: builder flags, unless the types are in the graph.

    RTX and TensorRT 11 and later always have them in the graph.
    """
    tf32_flags = ["--noTF32"] if trial.precision != "tf32" else []  # Dyno allows it only on request
    if major >= 11:
        return tf32_flags
    if trial.made_by.typed == "strongly" and major == 10:
        return [*tf32_flags, "--stronglyTyped"]
    calib_flags = ["--calib=calibration.cache"] if trial.made_by.route == "calibrator" else []
    return [*tf32_flags, *PRECISION_FLAGS.get(trial.precision, ()), *calib_flags]


def _choose_profile(trial: TrialResult, profiles: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the engine's first profile; {} for a static ONNX file, as trtexec then takes no shapes."""
    if not profiles:
        return {}
    recipe = trial.spec.recipe
    has_free_batch = recipe is not None and recipe.parent is not None and not recipe.parent.dims.batch
    return profiles[0] if has_free_batch or any(low != high for low, _, high in profiles[0].values()) else {}
