"""One form of a model, read for `dyno inspect`: a module's calls, a graph's nodes or an engine's layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dyno.worker import registry
from dyno.worker.facts.inside import LayerGraph
from dyno.worker.inputs import modules
from dyno.worker.inputs.shapes import static_shapes
from dyno.worker.jobs.inspect_model import inspect_model
from dyno.worker.layers import graph, module, program
from dyno.worker.nets import models
from dyno.worker.nets.file_images import DEFAULT_SIZE
from dyno.worker.onnx_graph.file import read_io
from dyno.worker.sessions.torch_support import first_line, import_torch
from dyno.worker.spec import Artifact, Dims, Trial, UserError

MODULE = "pytorch"  # the backend whose form is the module itself


def read(trial: Trial, artifact: Artifact | None, options: Mapping[str, Any]) -> LayerGraph:
    """Read the form that the trial's backend runs: "" is the ONNX graph.

    For a module that has not been inspected yet, `options` contain the user's settings (see `inspect_model`) and the
    batch. Raises `UserError` if it can't be read, `Unavailable` if it can't be read here.
    """
    if trial.backend == MODULE:
        return _inspect_module(trial, options)
    if trial.backend:
        return registry.find(trial.backend).inside(trial, artifact)
    path = artifact.path if artifact else trial.model.file
    inputs, _ = read_io(path)
    return graph.read(path, static_shapes(inputs, trial.dims))


def _inspect_module(trial: Trial, options: Mapping[str, Any]) -> LayerGraph:
    """Read the module, without weights and arithmetic if it allows that, which takes a tenth of the time."""
    torch = import_torch()
    torch.set_num_threads(trial.runtime.threads)
    model, dims = trial.model, trial.dims
    of_library = models.parse(model.source)[0] in models.LIBRARIES
    if options and not (of_library and not options["overrides"]):
        inspection = inspect_model(trial, options["sizes"], options["overrides"])
        model = replace(model, inputs=inspection.inputs)
        dims = Dims(inspection.batch or dims.batch, *(options["sizes"] or [inspection.size])[0])
    elif options:
        size = models.image_size(model) or (DEFAULT_SIZE, DEFAULT_SIZE)
        dims = Dims(dims.batch, *(options["sizes"] or [size])[0])
    if of_library and not (model.weights or model.pretrained):
        try:
            with torch.device("meta"):
                return _read_calls(torch, models.build(model, dims), model, dims)
        except Exception:  # whatever it is, the module itself says it better below
            pass
    if (found := program.parts(model, dims)) is not None:
        return _read_calls(torch, found, model, dims)
    built = models.build(model, dims)
    try:
        return _read_calls(torch, _without_values(built), model, dims)
    except Exception:  # a module that computes with values, or keeps tensors of its own, has to run
        return _run_module(torch, model, dims)


def _without_values(built: Any) -> Any:
    """Move the module with its weights to the meta device; `.to` alone would copy a shared weight several times."""
    shared: dict[int, list[tuple[Any, str]]] = {}
    for part in built.modules():
        for name, weight in part.named_parameters(recurse=False):
            shared.setdefault(id(weight), []).append((part, name))
    moved = built.to("meta")
    for (first, name), *others in shared.values():
        for part, other in others:
            setattr(part, other, getattr(first, name))
    return moved


def _run_module(torch: Any, model: Any, dims: Dims) -> LayerGraph:
    try:
        return _read_calls(torch, models.build(model, dims), model, dims)
    except (UserError, MemoryError):
        raise
    except Exception as e:  # the module is anyone's code
        raise UserError(f"{model.name} can't be run once to see its layers: {first_line(e)}") from e


def _read_calls(torch: Any, built: Any, model: Any, dims: Dims) -> LayerGraph:
    """Read the module's calls on an example of the model's inputs, on the device of its weights."""
    device = next((p.device for p in built.parameters()), torch.device("cpu"))
    if not model.inputs:
        return module.read(built, torch.zeros(dims.batch, model.channels, dims.height, dims.width, device=device))
    args, keywords = modules.example(model, model.inputs, dims)
    return module.read(built, *_move_tensors(list(args), device), **_move_tensors(keywords, device))


def _move_tensors(value: Any, device: Any) -> Any:
    """Return lists and dicts with their tensors on that device."""
    if isinstance(value, dict):
        return {key: _move_tensors(each, device) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_move_tensors(each, device) for each in value]
    return value.to(device) if hasattr(value, "detach") else value
