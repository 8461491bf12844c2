"""Scripts for files: ONNX, IR, AOTInductor's packages, .tflite and engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dyno.worker.backends import aot_package, ncnn
from dyno.worker.backends import lite_rt as litert
from dyno.worker.backends import onnx_runtime as ort
from dyno.worker.backends import open_vino as vino
from dyno.worker.inputs.specs import static_shapes
from dyno.worker.sessions import onnx_runtime_session as cuda
from dyno.worker.snippets import Script, ScriptPart
from dyno.worker.spec import BATCH_AXIS, Artifact, Trial, UserError

ONNX_RUNTIME = '''

def load():
    """The session, with the threads and options of the measurement."""
{preload}    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, OPTIMIZATION)
    options.add_session_config_entry("session.intra_op.allow_spinning", SPINNING)
    for name, size in FREE_DIMENSIONS.items():
        options.add_free_dimension_override_by_name(name, size)
    return onnxruntime.InferenceSession(FILE, options, providers=PROVIDERS, disabled_optimizers=DISABLED)


def run(model, feeds):
    """The outputs by name for inputs by name."""
    typed = {{name: np.asarray(feeds[name], kind, order="C") for name, (_, kind) in INPUTS.items()}}
    names = [output.name for output in model.get_outputs()]
    return dict(zip(names, model.run(names, typed)))
'''
PRELOAD = '    if hasattr(onnxruntime, "preload_dlls"):  # the CUDA libraries that NVIDIA\'s wheels bring\n' \
    "        onnxruntime.preload_dlls()\n"  # fmt: skip
OPEN_VINO = '''

def load():
    """The model compiled for the shapes, threads and precision of the measurement."""
    core = openvino.Core()
    model = core.read_model(FILE)
    model.reshape({name: list(shape) for name, (shape, _) in INPUTS.items()})
    return core.compile_model(model, "CPU", SETTINGS)


def run(model, feeds):
    """The outputs by name for inputs by name."""
    typed = {name: np.asarray(feeds[name], kind, order="C") for name, (_, kind) in INPUTS.items()}
    results = model(typed)
    return {name: np.array(results[k]) for k, name in enumerate(OUTPUTS)}
'''
AOT_INDUCTOR = '''

def load():
    """The compiled package, on the device and with the threads of the measurement."""
    torch.set_num_threads(THREADS)
    return load_package(str(FILE), MODEL, device_index=GPU)


def run(model, feeds):
    """The outputs by name for inputs by name."""
    tensors = []
    for name, (_, kind) in INPUTS.items():
        x = torch.from_numpy(np.asarray(feeds[name], kind, order="C"))
        tensors.append(x.to(DEVICE, getattr(torch, TYPES[name])))
    with torch.inference_mode():
        results = [(r.float() if r.is_floating_point() else r).cpu().numpy() for r in model.loader.run(tensors)]
    return {f"output_{k}" if k else "output": result for k, result in enumerate(results)}
'''
LITERT = '''

def load():
    """The interpreter, with the threads, kernels and shapes of the measurement."""
    model = Interpreter(str(FILE), num_threads=THREADS, experimental_op_resolver_type=OpResolverType[KERNELS])
    for name, (shape, _) in INPUTS.items():
        model.resize_tensor_input(PORTS[name][0], shape)
    model.allocate_tensors()
    return model


def run(model, feeds):
    """The outputs by name for inputs by name; quantised ones are scale * (stored - zero_point)."""
    for name, (_, kind) in INPUTS.items():
        (index, stored, scale, zero_point), values = PORTS[name], np.asarray(feeds[name], kind)
        if scale:
            values = np.clip(np.rint(values / scale) + zero_point, np.iinfo(stored).min, np.iinfo(stored).max)
        model.set_tensor(index, values.astype(stored))
    model.invoke()
    results = {name: model.get_tensor(PORTS[name][0]) for name in OUTPUTS}
    for name, (_, _, scale, zero_point) in PORTS.items():
        if name in results and scale:
            results[name] = (results[name].astype(np.float32) - zero_point) * np.float32(scale)
    return results
'''
NCNN = '''

def load():
    """The network, with the threads and the types of the measurement."""
    net = ncnn.Net()
    for name, value in OPTIONS.items():
        setattr(net.opt, name, value)
    if net.load_param(str(FILE)) or net.load_model(str(FILE.with_suffix(".bin"))):
        raise SystemExit(f"{FILE} can't be loaded")
    return net


def run(net, feeds):
    """The outputs by name for inputs by name; ncnn reads whole numbers as int32."""
    extractor, results = net.create_extractor(), {}
    for name, (_, kind) in INPUTS.items():
        values = np.asarray(feeds[name], "float32" if kind.startswith("float") else "int32", order="C")
        extractor.input(BLOBS[name], (ncnn.Mat(values, batch_index=0) if BATCHES else ncnn.Mat(values[0])).clone())
    for blob, (name, kind, shape) in OUTPUTS.items():
        code, value = extractor.extract(blob)
        if code:
            raise SystemExit(f"ncnn stopped before {blob}")
        array = np.array(value.numpy(batch_index=0) if BATCHES else value.numpy()[None]).astype(kind)
        results[name] = array.reshape(shape) if array.size == np.prod(shape) else array
    return results
'''


def locate_file(facts: dict[str, Any]) -> str:
    """Return the expression for the file in the script's folder."""
    return f"Path(__file__).with_name({facts['file']!r})"


def require_file(artifact: Artifact | None, trial: Trial) -> Artifact:
    """Return the trial's file; raise a `UserError` without one."""
    if artifact is None:
        raise UserError(f"{trial.label} has no file")
    return artifact


def onnx_runtime(trial: Trial, artifact: Artifact | None, facts: dict[str, Any], folder: Path) -> ScriptPart:
    """Return the code with session options and providers as in `OnnxFile.open`."""
    inputs = require_file(artifact, trial).inputs
    settings = ort.make_settings(trial)
    is_gpu = trial.runtime.device != "cpu"
    provider = None if is_gpu else ort.find_provider(ort.import_library(), trial)
    if provider and provider.devices:
        raise UserError(f"there is no script for {provider.name}, which is from a plug-in library")
    providers = [provider.name, *ort.DEFAULT_PROVIDERS] if provider else [*ort.DEFAULT_PROVIDERS]
    constants = {
        "FILE": locate_file(facts),
        "THREADS": settings["intra_op_threads"],
        "OPTIMIZATION": ort.OPTIMIZATION_LEVELS[settings["optimization"]],
        "DISABLED": settings["disabled_optimizers"],
        "SPINNING": str(int(settings["spinning"])),
        "FREE_DIMENSIONS": ort.find_overrides(inputs, static_shapes(inputs, trial.dims)),
        "PROVIDERS": cuda.list_providers(trial, _parse_device_index(trial)) if is_gpu else providers,
    }
    needs = ("numpy", "onnxruntime-gpu" if is_gpu else "onnxruntime")
    code = ONNX_RUNTIME.format(preload=PRELOAD if is_gpu else "")
    imports = (
        'import os\n\nos.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before the import\nimport onnxruntime\n'
    )
    return ScriptPart(needs, imports, constants, code)


def _parse_device_index(trial: Trial) -> int:
    return int(trial.runtime.device.partition(":")[2] or 0)


def open_vino(trial: Trial, artifact: Artifact | None, facts: dict[str, Any], folder: Path) -> ScriptPart:
    """Return the code with the settings of `OpenVinoSession`; outputs by position, as an IR gives one several names."""
    require_file(artifact, trial)
    constants = {"FILE": locate_file(facts), "OUTPUTS": list(facts["outputs"]), "SETTINGS": vino.make_settings(trial)}
    return ScriptPart(("numpy", "openvino"), "import openvino\n", constants, OPEN_VINO)


def aot_inductor(trial: Trial, artifact: Artifact | None, facts: dict[str, Any], folder: Path) -> ScriptPart:
    """Return the code that opens the package as `AotSession` does."""
    file = require_file(artifact, trial)
    package = aot_package.read_package(file.path)
    is_gpu = trial.runtime.device != "cpu"
    constants = {
        "FILE": locate_file(facts),
        "MODEL": package.name,
        "THREADS": trial.runtime.threads,
        "DEVICE": trial.runtime.device,
        "GPU": _parse_device_index(trial) if is_gpu else -1,
        "TYPES": {name: tensor.dtype for name, tensor in package.describe_inputs(file.inputs).items()},
    }
    imports = "import torch\nfrom torch._inductor.package import load_package\n"
    return ScriptPart(("numpy", "torch"), imports, constants, AOT_INDUCTOR)


def lite_rt(trial: Trial, artifact: Artifact | None, facts: dict[str, Any], folder: Path) -> ScriptPart:
    """Return the code that opens the file as `LiteRTSession` does."""
    inputs, outputs = litert.list_ports(litert.open_file(require_file(artifact, trial).path))
    constants = {
        "FILE": locate_file(facts),
        "THREADS": trial.runtime.threads,
        "KERNELS": "AUTO" if trial.options.get("xnnpack", True) else "BUILTIN_WITHOUT_DEFAULT_DELEGATES",
        "PORTS": {p.tensor.name: (p.index, p.storage_type, p.scale, p.zero_point) for p in (*inputs, *outputs)},
        "OUTPUTS": [port.tensor.name for port in outputs],
    }
    imports = "from ai_edge_litert.interpreter import Interpreter, OpResolverType\n"
    return ScriptPart(("numpy", "ai-edge-litert"), imports, constants, LITERT)


def n_cnn(trial: Trial, artifact: Artifact | None, facts: dict[str, Any], folder: Path) -> ScriptPart:
    """Return the code that opens the graph as `OpenGraph` does."""
    file = require_file(artifact, trial)
    graph = ncnn.OpenGraph(file.path, trial.precision, trial.runtime.threads)
    shapes = {t.name: [trial.dims.batch if axis == BATCH_AXIS else axis for axis in t.shape] for t in file.outputs}
    outputs = zip(graph.outputs, file.outputs, strict=True)
    constants = {
        "FILE": locate_file(facts),
        "OPTIONS": graph.set_options,
        "BATCHES": graph.has_batches,
        "BLOBS": {t.name: graph.name_input(t.name, index) for index, t in enumerate(file.inputs)},
        "OUTPUTS": {blob: (t.name, t.dtype, shapes[t.name]) for blob, t in outputs},
    }
    return ScriptPart(("numpy", "ncnn"), "import ncnn\n", constants, NCNN)


ONNX_RUNTIME_SCRIPT = Script("onnxruntime", onnx_runtime)
OPENVINO_SCRIPT = Script("openvino", open_vino)
AOTI_SCRIPT = Script("aoti", aot_inductor)
LITERT_SCRIPT = Script("litert", lite_rt)
NCNN_SCRIPT = Script("ncnn", n_cnn)


# A script for an engine of TensorRT or TensorRT-RTX, with memory by CUDA's runtime API.

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
        runtime.engine_host_code_allowed = True  # engines that other versions take bring their own code
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


def tensor_rt(trial: Trial, artifact: Artifact | None, facts: dict[str, Any], folder: Path) -> ScriptPart:
    """Return the code for the measurement's profile, on the same GPU."""
    require_file(artifact, trial)
    constants = {
        "FILE": locate_file(facts),
        "GPU": _parse_device_index(trial),
        "PROFILE": int(facts["options"].get("profile") or 0),
    }
    library = "tensorrt" if trial.backend == "tensorrt" else "tensorrt_rtx as tensorrt"
    imports = f"import {library}\nfrom cuda.bindings import runtime as cudart\n"
    return ScriptPart(("numpy", "cuda-bindings", trial.backend.replace("_", "-")), imports, constants, ENGINE)


TENSORRT_SCRIPT = Script("tensorrt", tensor_rt)
RTX_SCRIPT = Script("tensorrt_rtx", tensor_rt)
