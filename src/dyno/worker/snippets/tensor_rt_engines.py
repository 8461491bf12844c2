"""A script for an engine of TensorRT or TensorRT-RTX, with memory by CUDA's runtime API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dyno.worker.snippets.graph_files import place, require_file
from dyno.worker.snippets.parts import Script, ScriptPart
from dyno.worker.spec import Artifact, Trial

ENGINE = '''

def checked(result):
    """The values that a call of CUDA returned; an exception where it failed."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA: {error}")
    return values[0] if len(values) == 1 else values


def load():
    """The engine's execution context, set to the profile and the shapes of the measurement."""
    checked(cudart.cudaSetDevice(GPU))
    runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.WARNING))
    if hasattr(runtime, "engine_host_code_allowed"):
        runtime.engine_host_code_allowed = True  # engines that other versions take bring code of their own
    engine = runtime.deserialize_cuda_engine(FILE.read_bytes())
    if engine is None:
        raise RuntimeError(f"{FILE} is not for this GPU and TensorRT {tensorrt.__version__}")
    context = engine.create_execution_context()
    if PROFILE:
        context.set_optimization_profile_async(PROFILE, 0)
    for name, (shape, _) in INPUTS.items():
        context.set_input_shape(name, shape)
    return runtime, engine, context


def run(model, feeds):
    """The outputs by name for inputs by name; a program that runs often keeps stream and memory."""
    _, engine, context = model
    to_device, to_host = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice, cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
    arrays, places = {}, {}
    stream = checked(cudart.cudaStreamCreate())
    for name in (engine.get_tensor_name(k) for k in range(engine.num_io_tensors)):
        kind = np.dtype(tensorrt.nptype(engine.get_tensor_dtype(name)))
        if name in INPUTS:
            arrays[name] = np.asarray(feeds[name], kind, order="C")
        else:
            arrays[name] = np.empty(tuple(context.get_tensor_shape(name)), kind)
        places[name] = checked(cudart.cudaMalloc(max(arrays[name].nbytes, 1)))
        context.set_tensor_address(name, places[name])
        if name in INPUTS:
            checked(cudart.cudaMemcpy(places[name], arrays[name].ctypes.data, arrays[name].nbytes, to_device))
    if not context.execute_async_v3(stream):
        raise RuntimeError("the engine can't be run")
    checked(cudart.cudaStreamSynchronize(stream))
    outputs = {name: array for name, array in arrays.items() if name not in INPUTS}
    for name, array in outputs.items():
        checked(cudart.cudaMemcpy(array.ctypes.data, places[name], array.nbytes, to_host))
    for place in places.values():
        checked(cudart.cudaFree(place))
    checked(cudart.cudaStreamDestroy(stream))
    return outputs
'''


def engine(trial: Trial, artifact: Artifact | None, about: dict[str, Any], folder: Path) -> ScriptPart:
    """Return the code for the profile that the measurement chose, on the same GPU."""
    require_file(artifact, trial)
    constants = {
        "FILE": place(about),
        "GPU": int(trial.runtime.device.partition(":")[2] or 0),
        "PROFILE": int(about["options"].get("profile") or 0),
    }
    library = "tensorrt" if trial.backend == "tensorrt" else "tensorrt_rtx as tensorrt"
    imports = f"import {library}\nfrom cuda.bindings import runtime as cudart\n"
    return ScriptPart(("numpy", "cuda-bindings", trial.backend.replace("_", "-")), imports, constants, ENGINE)


TENSORRT_SCRIPT = Script("tensorrt", engine)
RTX_SCRIPT = Script("tensorrt_rtx", engine)
