"""Modules saved by PyTorch: programs of torch.export (.pt2) and TorchScript, with a description of their inputs."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.inputs.input_data import relative_change
from dyno.worker.inputs.modules import ModuleInputs, call, list_inputs
from dyno.worker.inputs.specs import list_tensors, make_arguments
from dyno.worker.inspection import Purpose
from dyno.worker.nets import file_facts
from dyno.worker.nets.model_source import ImageConfig, ModelSource, check_unchanged
from dyno.worker.sessions.torch_support import as_fetched, named_outputs
from dyno.worker.spec import BATCH_AXIS, Dims, InputSpec, ModelSpec, Unavailable, UserError, from_json

PROGRAM_SUFFIX = ".pt2"  # of torch.export; other files are TorchScript
MAX_OUTPUT_ERROR = 1e-3  # relative difference; equal operators differ less
SHA256_LENGTH = 64  # hexadecimal digits
MANY_BATCHES = 64  # largest tried batch; wider ranges count as free
GUARDS_KEY = "dyno_guards"  # key in the `meta` of a program's shape check
INPUTS_MEMBER = "dyno_inputs.json"  # member of both formats with the inputs as JSON, in Dyno's files
NODE_TARGET = re.compile(rb'"torch\.ops\.(\w+)\.(\w+)')  # target of a node


def load(path: str) -> Any:
    """Load the module; raise a `UserError` for a file that is missing or unreadable by this PyTorch."""
    return make_runnable(_load_program(path)) if path.endswith(PROGRAM_SUFFIX) else _load_script(path)


class Saved(ModelSource):
    """`saved:PATH`, a program of torch.export or TorchScript."""

    name = "saved"
    form = "saved:PATH"
    stores_preprocess = True

    def build(self, model: ModelSpec, rest: str, dims: Dims | None, state: Mapping[str, Any] | None) -> Any:
        if len(model.source_sha256) == SHA256_LENGTH:  # else a folder name in the cache
            check_unchanged(rest, model.source_sha256, "saved module")
        return load(rest)

    def has_weights(self, rest: str) -> bool:
        return True

    def read_image_config(self, model: ModelSpec, rest: str) -> ImageConfig:
        return None, file_facts.find_size(file_facts.read_attached(rest))

    def make_examples(self, model: ModelSpec, rest: str) -> Any:
        return read_examples(rest)

    def read_purpose(self, model: ModelSpec, rest: str, module: Any) -> Purpose:
        attached = file_facts.read_attached(rest)
        return file_facts.read_purpose(attached) if attached else super().read_purpose(model, rest, module)


SAVED = Saved()


def make_runnable(value: Any) -> Any:
    """Return the module that runs a program of torch.export; anything else unchanged.

    The export's assumptions on input shapes aren't checked at each call: `check_guards` does that.
    """
    from torch.export import ExportedProgram

    if not isinstance(value, ExportedProgram):
        return value
    module = _tie_weights(value.module(**guard_options()))
    if guards := getattr(value.module(), "_guards_fn", None):
        module.meta[GUARDS_KEY] = guards.forward
    return module


def check_guards(module: Any, model: ModelSpec, inputs: Sequence[InputSpec], dims: Dims) -> None:
    """Raise a `UserError` if a program is valid only for other shapes, such as the other side of a branch.

    `inputs` are () for one image. A free batch (0) stands for several batches.
    """
    import torch

    if (run_guards := getattr(module, "meta", {}).get(GUARDS_KEY)) is None:
        return
    specs = inputs or (InputSpec("input", "float32", (BATCH_AXIS, model.channels, "height", "width")),)
    names = inspect.signature(module.forward).parameters
    max_batch = min(find_most_batch(module, specs) or MANY_BATCHES, MANY_BATCHES)
    for batch in (dims.batch,) if dims.batch else range(1, max_batch + 1):
        batch_dims = replace(dims, batch=batch)
        tensors = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in list_tensors(specs, batch_dims)}
        args, keywords = make_arguments(specs, tensors)
        try:
            run_guards(*args, *(keywords[name] for name in names if name in keywords))
        except AssertionError as e:
            raise UserError(
                f"{model.name} holds for the shapes of its example and not for {list_inputs(specs, batch_dims)} "
                f"({str(e).removeprefix('Guard failed: ')} is false); "
                + (
                    "export it again with an example of this size"
                    if dims.batch
                    else "give the file one batch (--batch)"
                )
            ) from e


def _tie_weights(module: Any) -> Any:
    """Make parameters that share memory one parameter again, as before the export: each counts once."""
    originals: dict[Any, Any] = {}
    for part in module.modules():
        for name, each in part._parameters.items():
            if each is not None and each.numel():
                part._parameters[name] = originals.setdefault((each.data_ptr(), each.shape, each.stride()), each)
    return module


def compare_answers(
    module: Any, path: str, model: ModelSpec, inputs: tuple[Sequence[InputSpec], Sequence[InputSpec]], sizes: list[Dims]
) -> None:
    """Raise a ValueError if a stored module's outputs differ from the module's at any dims that the latter takes.

    Both may change from call to call. `inputs` are the module's and the stored module's. torch.export stores one
    batch's path through a module, and the value of non-tensors, such as a count of calls.
    """
    stored = load(path)
    for dims in sizes:
        run_original, run_stored = (
            partial(_run_module, each, model, specs, dims) for each, specs in zip((module, stored), inputs, strict=True)
        )
        try:
            expected = run_original()
        except Exception:  # foreign code may refuse a size or one row with any error
            continue
        if _are_close(expected, actual := run_stored()):
            continue
        if _are_close(expected, run_original()):
            raise ValueError(f"its outputs at {list_inputs(inputs[0], dims)} are not the module's")
        if _are_close(actual, run_stored()):
            raise ValueError("its outputs are the same at each call, and the module's change")


def _run_module(module: Any, model: ModelSpec, specs: Sequence[InputSpec], dims: Dims) -> list[np.ndarray]:
    result = call(module, model, tuple(specs), dims)
    return [as_fetched(tensor).numpy().copy() for tensor in named_outputs(result).values()]


def _are_close(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    pairs = [*zip(first, second, strict=False)]
    is_same_form = len(first) == len(second) and all(a.shape == b.shape for a, b in pairs)
    return is_same_form and all(relative_change(a, b) <= MAX_OUTPUT_ERROR for a, b in pairs)


def load_unflattened(path: str) -> Any:
    """Return a stored program as modules with their names from before the export."""
    from torch.export import unflatten

    program = _load_program(path)
    module = unflatten(program)
    if not hasattr(module, "type_name"):  # PyTorch before 2.8: only parts have it
        stacks = (node.meta.get("nn_module_stack", {}) for node in program.graph.nodes)
        kind = next((kind for stack in stacks for name, kind in stack.values() if not name), None)
        module.type_name = lambda: kind
    return module


def guard_options() -> dict[str, Any]:
    """Return options of a program's `module`: newer versions check inputs at every call, which costs time."""
    from torch.export import ExportedProgram

    return {"check_guards": False} if "check_guards" in inspect.signature(ExportedProgram.module).parameters else {}


def read_examples(path: str) -> Any:
    """Return the inputs described when the module was saved, else a program's own examples, else None."""
    extra = {INPUTS_MEMBER: ""}
    program = _load_program(path, extra) if path.endswith(PROGRAM_SUFFIX) else _load_script(path, extra)
    if text := extra[INPUTS_MEMBER]:
        description = json.loads(text)
        specs = tuple(from_json(InputSpec, spec) for spec in description["inputs"])
        return ModuleInputs(specs, description["batch"], tuple(description["size"]))
    if not path.endswith(PROGRAM_SUFFIX) or program.example_inputs is None:
        return None
    return program_examples(program)


def program_examples(program: Any) -> Any:
    """Return a program's export inputs in the form of `read_examples`."""
    args, keywords = program.example_inputs
    if not keywords:
        return tuple(args)  # a program refuses positional inputs by name
    names = [*inspect.signature(program.module().forward).parameters]
    return (*args, *(keywords[name] for name in names[len(args) :]))


def find_most_batch(module: Any, inputs: Sequence[InputSpec]) -> int:
    """Return the largest batch that a program was exported for, by its inputs' ranges; 0 without a limit.

    Without `inputs` it takes one image.
    """
    ranges = getattr(module, "range_constraints", None) or {}
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"] if ranges else []
    has_batch = [spec.shape[:1] == (BATCH_AXIS,) for spec in inputs] or [True]
    sizes = (node.meta["val"].shape[0] for node, is_batched in zip(nodes, has_batch, strict=False) if is_batched)
    limits = (ranges.get(size.node.expr) for size in sizes if hasattr(size, "node"))
    return min((int(limit.upper) for limit in limits if limit and limit.upper.is_Integer), default=0)


def _load_program(path: str, extra: dict[str, str] | None = None) -> Any:
    import torch

    def load_file() -> Any:
        try:
            return torch.export.load(path, extra_files=extra)
        except Exception:
            if not _has_registered_operators(torch, path):
                raise
            return torch.export.load(path, extra_files=extra)

    return _read_file(path, load_file)


def _has_registered_operators(torch: Any, path: str) -> bool:
    """Return whether torchvision was imported for the program's operators.

    Raise a `UserError` that names an operator missing in all libraries.
    """
    with zipfile.ZipFile(path) as archive:
        texts = [archive.read(name) for name in archive.namelist() if name.endswith(".json")]
    operators = [tuple(map(bytes.decode, match)) for text in texts for match in NODE_TARGET.findall(text)]
    missing_ops = [(library, name) for library, name in operators if not hasattr(getattr(torch.ops, library), name)]
    if any(library == "torchvision" for library, _ in missing_ops):
        importlib.import_module("torchvision")
        return True
    if missing_ops:
        raise UserError(
            f"{path} needs the operator {'::'.join(missing_ops[0])}, which another library registers; "
            "name the model as FILE.py:FUNCTION, in a file that imports it"
        )
    return False


def _load_script(path: str, extra: dict[str, str] | None = None) -> Any:
    import torch

    module = _read_file(path, lambda: torch.jit.load(path, map_location="cpu", _extra_files=extra))
    if hasattr(module, "training"):
        module.eval()
    else:  # frozen in one mode; exporters and torch.compile need the attribute
        module.training = False
    return module


def _read_file(path: str, action: Any) -> Any:
    if not Path(path).is_file():
        raise UserError(f"there is no saved module {path}; run the program that saved it again")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return action()
    except UserError:
        raise
    except ImportError as e:
        raise Unavailable(f"{path} can't be read: {e}") from e
    except Exception as e:  # each format has its own errors for invalid files
        reason = (str(e).strip() or type(e).__name__).splitlines()[0].partition(". ")[0]  # without PyTorch's guesses
        import torch

        step = "; if another version saved it, save it again with this one" if zipfile.is_zipfile(path) else ""
        raise UserError(
            f"{path} is not a module that this PyTorch ({torch.__version__}) can read: {reason}{step}"
        ) from e
