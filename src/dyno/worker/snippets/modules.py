"""A script for PyTorch, eager or compiled: the network built as in the trial, with the trial's weights."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from dyno.worker.backends.pytorch import weight_type
from dyno.worker.backends.torch_ao import config_of
from dyno.worker.inputs import input_data
from dyno.worker.nets import models, saved_modules
from dyno.worker.nets.checkpoint import by_own_names, head_classes, read_checkpoint
from dyno.worker.registry import find
from dyno.worker.sessions.torch_support import import_torch
from dyno.worker.snippets import Script, ScriptPart, inputs_of
from dyno.worker.snippets.graph_files import locate_file
from dyno.worker.spec import Artifact, ModelSpec, Option, Trial, UserError

LIBRARY = '''

def build():
    """The network, before its weights are loaded."""
    {body}
'''
OWN = '''

def build():
    """The network, before its weights are loaded, from the copy of the code that was measured."""
    sys.path.append({folder!r})  # for modules beside the original file that it imports
    spec = importlib.util.spec_from_file_location("taken_model", Path(__file__).with_name({copy!r}))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.{function}({options})
'''
COMPILING = ("compile", "torchao")
STORED = ("saved", "darknet")  # sources stored as a module or program instead of weights
SAVED = '''

def build():
    """The module as it was stored, its weights included."""
    return {call}
'''
WEIGHTS = """    network.load_state_dict(torch.load(FILE, map_location="cpu", weights_only=True))
    network.eval()
"""
OWN_WEIGHTS = """    network = eager(network)
    network.load_state_dict(torch.load(FILE, map_location="cpu", weights_only=True))
    with contextlib.suppress(NotImplementedError):  # a program of torch.export is in one mode for ever
        network.eval()
"""
EAGER = '''

def eager(network):
    """The network as it was measured: what is inside torch.compile, DataParallel or a program, and so are its parts."""
    if isinstance(network, torch.export.ExportedProgram):
        return network.module()
    if isinstance(network, torch.nn.DataParallel):
        return eager(network.module)
    if hasattr(network, "_orig_mod"):
        return eager(network._orig_mod)
    if not isinstance(network, torch.jit.ScriptModule):
        for name, part in network.named_children():
            setattr(network, name, eager(part))
    return network
'''
LOAD = '''

def load():
    """The network with its weights, in the type, the layout and on the device of the measurement."""
    torch.set_num_threads(THREADS)
    torch.set_float32_matmul_precision("high" if TF32 else "highest")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = TF32
    torch.backends.cudnn.benchmark = CUDNN_BENCHMARK
    network = build()
{weights}    layout = torch.channels_last if CHANNELS_LAST else torch.contiguous_format
    network = network.to(DEVICE, memory_format=layout)
    network = {{"float16": network.half, "bfloat16": network.bfloat16}}.get(TYPE, network.float)()
{end}

def run(model, feeds):
    """The outputs by name for inputs by name."""
    layout = torch.channels_last if CHANNELS_LAST else torch.contiguous_format
    args = dict(VALUES)
    for name, (shape, kind) in INPUTS.items():
        x = torch.from_numpy(np.asarray(feeds[name], kind, order="C")).to(DEVICE)
        x = x.to(getattr(torch, TYPE)) if x.is_floating_point() else x
        args[name] = x.contiguous(memory_format=layout) if x.ndim == 4 and x.is_floating_point() else x
    with torch.inference_mode():
        results = list(tensors(model(*(args[name] for name in ORDER), **{{name: args[name] for name in KEYWORDS}})))
        results = [torch.view_as_real(r.resolve_conj()) if r.is_complex() else r for r in results]
        results = [(r.float() if r.is_floating_point() else r).cpu().numpy() for r in results]
    return {{f"output_{{k}}" if k else "output": result for k, result in enumerate(results)}}


def tensors(result):
    """The tensors in what the network returns, in order."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (dict, list, tuple)):
        for item in result.values() if isinstance(result, dict) else result:
            yield from tensors(item)
    elif dataclasses.is_dataclass(result):
        for field in dataclasses.fields(result):
            yield from tensors(getattr(result, field.name))
'''
PIXELS = """
    scale, offset = (torch.tensor(numbers, device=DEVICE).reshape(1, -1, 1, 1) for numbers in (SCALE, OFFSET))

    def values(x):
        return (x * scale + offset).to(getattr(torch, TYPE)) if isinstance(x, torch.Tensor) else x

    def normalised(*inputs, **named):
        return network(*map(values, inputs), **{name: values(x) for name, x in named.items()})

    called = normalised
"""
COMPILED = """    torch._inductor.config.freezing = FREEZE
    return torch.compile(called, backend="inductor", dynamic=False, mode=MODE)
"""
QUANTISED = """    config = torchao.quantization.{config}({arguments})
    torchao.quantization.quantize_(
        network, config, lambda layer, name: isinstance(layer, torch.nn.Linear) and name not in UNQUANTISED
    )
"""
PROGRAM = '''

def load():
    """The quantised program, compiled with the threads of the measurement."""
    torch.set_num_threads(THREADS)
    torch._inductor.config.freezing = FREEZE
    return torch.compile(torch.export.load(FILE).module(), backend="inductor", dynamic=False, mode=MODE)


def run(model, feeds):
    """The outputs by name for inputs by name."""
    tensors = [torch.from_numpy(np.asarray(feeds[name], kind, order="C")) for name, (_, kind) in INPUTS.items()]
    with torch.inference_mode():
        results = [(r.float() if r.is_floating_point() else r).numpy() for r in model(*tensors)]
    return {f"output_{k}" if k else "output": result for k, result in enumerate(results)}
'''


def write_module(trial: Trial, artifact: Artifact | None, facts: dict[str, Any], folder: Path) -> ScriptPart:
    """Return the code that builds the network, and store the network's state in the folder.

    Raise a `UserError` for weights changed since the measurement, and for a network that can't be stored as weights.
    """
    torch = import_torch()
    network = models.load(trial.model, trial.dims)
    if (measured_hash := facts.get("weights_sha256")) and models.weights_sha256(network) != measured_hash:
        raise UserError(f"{trial.model.name} now has other weights than when it was measured; run the study again")
    if any(".quantized.dynamic" in type(layer).__module__ for layer in network.modules()):
        raise UserError(
            f"{trial.model.name} was quantised dynamically by PyTorch, which can't be stored as weights alone"
        )
    build = _write_build_code(trial, network, facts, folder)
    kind = models.parse(trial.model.source)[0]
    is_saved, is_function = kind in STORED, kind in models.FUNCTION_SOURCES
    if not is_saved:
        torch.save(network.state_dict(), folder / "state.pt")
    options = find(trial.backend).checked(trial)  # type: ignore[attr-defined]
    has_pixels = input_data.wants_pixels(options)
    constants = {
        "FILE": locate_file(facts),
        **build.constants,
        **_list_arguments(trial),
        **_collect_settings(trial, options),
    }
    if has_pixels:
        scale, offset = input_data.pixel_scale(trial.model.preprocess, int(inputs_of(trial, None)[0].shape[1]))
        constants |= {"SCALE": scale.ravel().tolist(), "OFFSET": offset.ravel().tolist()}
    end = PIXELS if has_pixels else "    called = network\n"
    if trial.backend == "torchao":
        config, arguments = config_of(trial, options)
        text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        constants["UNQUANTISED"] = facts.get("options", {}).get("unquantised", [])
        end = QUANTISED.format(config=config, arguments=text) + end
    end += COMPILED if trial.backend in COMPILING else "    return called\n"
    weights = "" if is_saved else OWN_WEIGHTS if is_function else WEIGHTS
    code = build.code + (EAGER if is_function else "") + LOAD.format(weights=weights, end=end)
    imports = f"import contextlib\nimport dataclasses\nimport torch\n{build.imports}"
    return ScriptPart(("numpy", "torch", *build.needs), imports, constants, code)


def _list_arguments(trial: Trial) -> dict[str, Any]:
    """Return forward's arguments: names of the positional ones in order, names of the others, and non-tensor values."""
    specs = trial.model.inputs
    return {
        "ORDER": [spec.name for spec in specs if not spec.keyword] if specs else ["input"],
        "KEYWORDS": [spec.name for spec in specs if spec.keyword],
        "VALUES": {spec.name: spec.value for spec in specs if not spec.dtype},
    }


def _collect_settings(trial: Trial, options: dict[str, Option]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "DEVICE": trial.runtime.device,
        "TYPE": weight_type(trial),
        "THREADS": trial.runtime.threads,
        "TF32": trial.precision == "tf32",
        "CHANNELS_LAST": bool(options["channels_last"]),
        "CUDNN_BENCHMARK": bool(options["cudnn_benchmark"]),
    }
    if trial.backend in COMPILING:
        mode = str(options["mode"])
        settings |= {"MODE": None if mode == "default" else mode, "FREEZE": bool(options["freeze"])}
    return settings


def _write_build_code(trial: Trial, network: Any, facts: dict[str, Any], folder: Path) -> ScriptPart:
    model, (source, rest) = trial.model, models.find_source(trial.model)
    if part := source.write_code(model, rest, network, trial.dims, _count_classes(model, network)):
        return ScriptPart(part.needs, part.imports, dict(part.constants), LIBRARY.format(body=part.body))
    if source.name == "darknet":
        return _export_network(network, trial, folder)
    return _store_saved_module(rest, folder) if source.name == "saved" else _user_function(model, facts, folder)


def _store_saved_module(path: str, folder: Path) -> ScriptPart:
    """Store a module's own file instead of weights, and return the code that loads it."""
    shutil.copyfile(path, folder / "state.pt")
    if path.endswith(".pt2"):
        return _write_program_code()
    return ScriptPart((), "", {}, SAVED.format(call='torch.jit.load(FILE, map_location="cpu")'))


def _export_network(network: Any, trial: Trial, folder: Path) -> ScriptPart:
    """Store a network that only Dyno can build, as a program of torch.export for the trial's shape; return its code."""
    import torch

    dims = trial.dims
    example = torch.zeros(dims.batch, trial.model.channels, dims.height, dims.width)
    torch.export.save(torch.export.export(network, (example,)), folder / "state.pt")
    return _write_program_code()


def _write_program_code() -> ScriptPart:
    options = ", ".join(f"{key}={value}" for key, value in saved_modules.guard_options().items())
    call = f'torch.export.load(FILE.open("rb")).module({options})'
    return ScriptPart((), "", {}, SAVED.format(call=call))


def _user_function(model: ModelSpec, facts: dict[str, Any], folder: Path) -> ScriptPart:
    """Return the code for the user's function: a copy of its file in the script's folder, or a module's import."""
    location, _, function = model.source.partition("(")[0].rpartition(":")
    if models.is_application(model):
        raise UserError(
            f"{function} is an application, and a script builds a network; measure a function that returns it"
        )
    arguments = models.call_options(model)
    options = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    path = _source_file(location)
    if path is None:
        imports = f"from {location} import {function.split('.')[0]}\n"
        return ScriptPart((location.split(".")[0],), imports, {}, LIBRARY.format(body=f"return {function}({options})"))
    shutil.copyfile(path, folder / "model.py")
    copy = f"{Path(facts['script']).stem}_model.py"
    code = OWN.format(folder=str(path.parent), copy=copy, function=function, options=options)
    return ScriptPart((), "import importlib.util\n", {}, code)


def _source_file(location: str) -> Path | None:
    """Return the file to copy: a FILE.py, or a module of Dyno, since the script must run without Dyno; else None."""
    if location.endswith(".py"):
        return Path(location)
    spec = importlib.util.find_spec(location) if location.startswith("dyno.") else None
    return Path(spec.origin) if spec and spec.origin else None


def _count_classes(model: ModelSpec, network: Any) -> int | None:
    """Return the network's number of classes, None for its library's own."""
    if model.classes is not None or not model.weights:
        return model.classes
    template = models.build(replace(model, weights="", weights_sha256="", pretrained=False))
    return head_classes(template, by_own_names(template, read_checkpoint(model.weights), model.weights))


PYTORCH_SCRIPT = Script("pytorch", write_module)
COMPILE_SCRIPT = Script("compile", write_module)


def write_torchao(trial: Trial, artifact: Artifact | None, facts: dict[str, Any], folder: Path) -> ScriptPart:
    """Return the code that compiles the calibrated program, or quantises the network's linear layers."""
    if artifact is None:
        part = write_module(trial, artifact, facts, folder)
        return replace(part, needs=(*part.needs, "torchao"), imports=f"{part.imports}import torchao.quantization\n")
    settings = _collect_settings(trial, find(trial.backend).checked(trial))  # type: ignore[attr-defined]
    constants = {"FILE": locate_file(facts), **{name: settings[name] for name in ("THREADS", "FREEZE", "MODE")}}
    imports = "import torch\nimport torchao.quantization.pt2e.quantize_pt2e  # its operators\n"
    return ScriptPart(("numpy", "torch", "torchao"), imports, constants, PROGRAM)


TORCHAO_SCRIPT = Script("torchao", write_torchao)
