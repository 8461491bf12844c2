"""A program of torch.export as the modules that it was exported from, so that its parts can be watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dyno.worker.inputs import modules
from dyno.worker.layers.graph import WRAPPED
from dyno.worker.nets import flops, models, saved_modules
from dyno.worker.sessions.torch_support import import_torch, tensors
from dyno.worker.spec import Dims, InputSpec, ModelSpec


def parts(model: ModelSpec, dims: Dims) -> Any:
    """Return the stored program's modules under their own names; None for another model, or if PyTorch can't.

    Return None as well if the modules' outputs differ from the program's: both run once, on the CPU in float32.
    """
    kind, path = models.parse(model.source) if model.source else ("", "")
    if kind != "saved" or not path.endswith(saved_modules.PROGRAM):
        return None
    specs = model.inputs or (InputSpec("input", "float32", ("batch", model.channels, "height", "width")),)
    try:
        found = _name_classes(saved_modules.unflattened(path))
        _check_same(models.build(model, dims), found, lambda: modules.example(model, specs, dims))
    except MemoryError:
        raise
    except Exception:  # unflatten has limits of its own; then nothing is known of the parts
        return None
    return found


def _name_classes(module: Any) -> Any:
    """Name the classes like those of the original; torch's own would all be called InterpreterModule."""
    wrapped = module.type_name().startswith(WRAPPED)
    kinds = {part: part.type_name() for part in module.modules() if hasattr(part, "type_name")}
    for part, kind in kinds.items():
        inside = {"named_modules": _inner_modules} if wrapped and part is module else {}
        name = kinds[part.model] if inside else kind
        if name:
            part.__class__ = type(name.rpartition(".")[2], (type(part),), inside)
        part._run_with_interpreter = False  # as fast as the program; an interpreter goes from node to node
        constants = {key: value for key, value in vars(part).items() if hasattr(value, "detach")}
        for key, value in constants.items():  # which would stay behind when the module goes to a GPU
            delattr(part, key)
            part.register_buffer(key, value, persistent=False)
        if hasattr(part, "finalize"):
            _replace_views(part.graph)
            part.finalize()  # its code was older than its graph where a part of it is called twice
    module.check_input_constraints = False  # at every call, which costs time
    return module


def _replace_views(graph: Any) -> None:
    """Make views accept the results of attention's unfused form, in which its operations are counted."""
    aten = import_torch().ops.aten
    for node in graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default


def _inner_modules(self: Any, *args: Any, **keywords: Any) -> Any:
    """Return the `named_modules` inside Dyno's wrapper, which runs nothing itself."""
    return self.model.named_modules(*args, **keywords)


def _check_same(program: Any, found: Any, example: Callable[[], tuple[Any, Any]]) -> None:
    """Raise an `AssertionError` if the outputs differ; each run gets a fresh example, because it may write into it."""
    torch = import_torch()
    results = []
    with torch.no_grad():
        for each in (program, found):
            torch.manual_seed(0)  # a program may draw numbers
            args, keywords = example()
            results.append(list(tensors(each(*args, **keywords))))
    torch.testing.assert_close(*results, equal_nan=True)
    args, keywords = example()
    with flops.counting():  # which has operators run in other forms
        found(*args, **keywords)
