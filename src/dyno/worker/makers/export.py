"""From a PyTorch module, or an existing file, to an FP32 ONNX graph that was run and compared."""

from __future__ import annotations

import contextlib
import inspect
import io
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker import system
from dyno.worker.backend import Maker
from dyno.worker.facts.files import MakerFacts
from dyno.worker.inputs import input_data
from dyno.worker.inputs.specs import INPUT_ERRORS, has_batch, list_tensors, make_arguments
from dyno.worker.makers.control_flow import batch_limit, check_control_flow, follow_batch, traced_values
from dyno.worker.makers.verify import (
    Case,
    ExportSource,
    RefusedGraph,
    UndecidedGraph,
    WrongGraph,
    list_doubts,
    verify_graph,
)
from dyno.worker.nets import file_facts, libraries, models
from dyno.worker.onnx_graph.file import import_onnx, make_artifact, prepare_given, read_io, read_model
from dyno.worker.onnx_graph.fold import has_close_outputs
from dyno.worker.onnx_graph.graph_facts import graphs_in
from dyno.worker.onnx_graph.repair import MAX_INLINE_B, lower_file, read_opset
from dyno.worker.sessions.torch_support import first_line, import_torch, make_positional, memory_errors, named_outputs
from dyno.worker.spec import (
    BATCH_AXIS,
    Artifact,
    DataSpec,
    Dims,
    ModelSpec,
    Option,
    Recipe,
    Runtime,
    Tensor,
    UserError,
    check_known,
    shorten,
)

# Names in a file by PyTorch's older exporter, of a module inside Dyno's wrapper


def unwrap(path: Path) -> None:
    """Name nodes and weights as in an export of the module itself, without the wrapper's part `model`."""
    onnx = import_onnx()
    model = onnx.load(path, load_external_data=False)
    nodes = [node for graph in graphs_in(model.graph) for node in graph.node]
    paths = _drop_prefix("/model/", "/", {node.name for node in nodes})
    tensors = {name for node in nodes for name in (*node.input, *node.output)}
    weights = _drop_prefix("model.", "", tensors)
    output_names = {value.name for value in model.graph.output}
    weights = {
        name: weights[name] for t in model.graph.initializer if (name := t.name) in weights and name not in output_names
    }
    for node in nodes:
        node.name = paths.get(node.name, node.name)
        node.input[:] = [weights.get(name, name) for name in node.input]
    for tensor in model.graph.initializer:
        tensor.name = weights.get(tensor.name, tensor.name)
    onnx.save(model, path)


def _drop_prefix(prefix: str, replacement: str, names: Collection[str]) -> dict[str, str]:
    """Return the new name of each name with the prefix, except for clashes with a name that stays."""
    renamed = {name: replacement + name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    while clashes := [name for name, new_name in renamed.items() if new_name in names and new_name not in renamed]:
        for name in clashes:
            del renamed[name]
    return renamed


# Attention and GELU by PyTorch's dynamo exporter, rewritten into forms that engines fuse


def make_fusible(model: Any) -> Any:
    """Return the graph with each swap of the last two axes as one Transpose, and GELUs in the older exporter's form.

    The dynamo exporter flattens the keys to three axes, swaps two and unflattens them (Reshape, Transpose, Reshape, and
    shape computations with a free batch). TensorRT 8.6 then fuses no attention: ViT-Small in FP16 at batch 32 took 2.49
    instead of 1.66 ms on an H200. It writes a GELU as input times (0.5 times 1 + erf), which ONNX Runtime doesn't
    recognise as a GELU (equal except for rounding).
    """
    from onnxscript.rewriter import rewrite

    return rewrite(model, [_known_shape(), _computed_shape(), _make_gelu_rule()])


def _known_shape() -> Any:
    """Return the rule for Reshape to [n, a, b], swap, Reshape to [..., b, a], by constant shapes."""
    from onnxscript.rewriter import pattern

    def match_swap(op: Any, x: Any, flat_shape: Any, target: Any) -> Any:
        flat = op.Reshape(x, flat_shape, _allow_other_attributes=True)
        return op.Reshape(op.Transpose(flat, perm=[0, 2, 1]), target, _allow_other_attributes=True, _outputs=["y"])

    def is_swap(context: Any, x: Any, y: Any, **_: Any) -> bool:
        if x.shape is None or y.shape is None:
            return False
        before, after = list(x.shape), list(y.shape)
        has_same_lead = len(before) == len(after) >= 3 and before[:-2] == after[:-2]
        return has_same_lead and [before[-1], before[-2]] == after[-2:]

    return pattern.RewriteRule(match_swap, _build_transpose, is_swap)


def _computed_shape() -> Any:
    """Return the same rule for shapes that nodes compute from the keys."""
    from onnxscript.rewriter import pattern

    def match_swap(op: Any, x: Any, begin: Any, ahead: Any, before: Any, last: Any, end: Any, one: Any) -> Any:
        shape = op.Shape(x, _allow_other_attributes=True)
        width = op.Slice(shape, last, end)
        height = op.Slice(shape, before, last)
        leading = op.Slice(shape, begin, ahead)
        flat = op.Reshape(x, op.Concat(one, height, width, axis=0), _allow_other_attributes=True)
        target = op.Concat(leading, width, height, axis=0)
        return op.Reshape(op.Transpose(flat, perm=[0, 2, 1]), target, _allow_other_attributes=True, _outputs=["y"])

    def is_swap(
        context: Any, x: Any, before: Any, last: Any, ahead: Any, one: Any, begin: Any, end: Any, **_: Any
    ) -> bool:
        rank = len(x.shape) if x.shape is not None else 0
        expected = {before: -2, last: -1, ahead: -2, one: -1}
        if rank < 3 or any(_read_number(value) != constant for value, constant in expected.items()):
            return False
        start, stop = _read_number(begin), _read_number(end)
        return start is not None and stop is not None and (start == 0 or start <= -rank) and stop >= rank

    return pattern.RewriteRule(match_swap, _build_transpose, is_swap)


def _make_gelu_rule() -> Any:
    """Return the rule for GELU, x · (0.5 · (1 + erf(x / √2)))."""
    from onnxscript.rewriter import pattern

    def match_gelu(op: Any, x: Any, root: Any, one: Any, half: Any) -> Any:
        return op.Mul(x, op.Mul(half, op.Add(op.Erf(op.Div(x, root)), one)))

    def build_gelu(op: Any, x: Any, root: Any, one: Any, half: Any) -> Any:
        return op.Mul(op.Mul(x, op.Add(op.Erf(op.Div(x, root)), one)), half)

    def has_gelu_constants(context: Any, one: Any, half: Any, **_: Any) -> bool:
        return (_read_number(one), _read_number(half)) == (1, 0.5)

    return pattern.RewriteRule(match_gelu, build_gelu, has_gelu_constants)


def _build_transpose(op: Any, x: Any, **_: Any) -> Any:
    rank = len(x.shape)
    return op.Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])


def _read_number(value: Any) -> float | None:
    """Return the number in a constant scalar; None for any other value."""
    tensor = value.const_value
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None


EXPORT_OPTIONS = ("exporter", "opset")
EXPORTERS = ("auto", "dynamo", "torchscript")
DEFAULT_OPSET = 18  # newest for all engines here, oldest by dynamo
OPSET_RANGE = range(7, 27)  # from PyTorch to ONNX Runtime; TorchScript's end with 23
OPSET_ADVICE = f"from {OPSET_RANGE[0]} to {OPSET_RANGE[-1]}; the default is {DEFAULT_OPSET}"
LATER_OPSET = 20  # for operators missing in the default, such as deformable convolutions (19)
EXAMPLE_BATCH = 2  # torch.export treats a batch of 0 or 1 as a constant
OTHER_BATCHES = (1, 3)
# Batches for checking a trace that may be valid only for small batches: the first with inputs of at most LARGER_B bytes
# is used, since memory grows with the batch and a check must not end an export.
LARGER_BATCHES, LARGER_B = (17, 5), 32 << 20
REAL_IMAGES = 8
NETWORK_LIBRARIES = ("torchvision", "timm", "ultralytics", "transformers")  # possible libraries of the module


def export_recipe(
    model: ModelSpec,
    dims: Dims,
    runtime: Runtime,
    options: Mapping[str, Option] | None = None,
    data: DataSpec | None = None,
) -> Recipe:
    """Return the recipe of a model's ONNX file. Pure.

    With `dims.batch` 0 the batch is free, so that one file serves every batch. Of the options, `exporter` (auto,
    dynamo, torchscript) and `opset` apply; the device doesn't: exports run on the CPU. The graph is also compared with
    the module on images of `data`.
    """
    export_options = {key: value for key, value in (options or {}).items() if key in EXPORT_OPTIONS}
    images = data if data is not None and data.folder and not model.file else None
    return Recipe(
        "onnx_export", "onnx", "fp32", model, dims, export_options, images, runtime=replace(runtime, device="cpu")
    )


class OnnxExport(Maker):
    """A maker that exports a module and compares the graph with it, or checks and describes the user's ONNX file."""

    name = "onnx_export"
    requires = ("torch", "onnx", "onnxscript", "onnxruntime", *NETWORK_LIBRARIES)

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write FOLDER/model.onnx, or check and describe the model's own file.

        The graph is run in ONNX Runtime at two batches not used for the export, and compared with the module; if it is
        wrong, the other exporter is tried. Raise a `UserError` if both are wrong, or the file is incomplete.
        """
        if recipe.model.file:
            described = {spec.name for spec in recipe.model.inputs if spec.low is not None or spec.feeds}
            return prepare_given(recipe.model.file, recipe.options.get("opset"), folder, described)
        started = time.perf_counter()
        with memory_errors():
            made_by = _export_module(recipe, folder / "model.onnx")
        made_by = replace(made_by, backend=self.name, versions=system.find_versions(self.requires))
        return make_artifact(str(folder / "model.onnx"), time.perf_counter() - started, made_by)


ONNX_EXPORT = OnnxExport()


def _export_module(recipe: Recipe, path: Path) -> MakerFacts:
    torch = import_torch()
    import_onnx()
    exporter, opset = recipe.options.get("exporter", EXPORTERS[0]), int(recipe.options.get("opset", DEFAULT_OPSET))
    check_known("exporter", str(exporter), EXPORTERS)
    exporters: tuple[str, ...] = EXPORTERS[1:] if exporter == EXPORTERS[0] else (str(exporter),)
    torch.set_num_threads(recipe.runtime.threads)
    is_detector = libraries.is_torchvision_detector(recipe.model)
    if is_detector:
        exporters = _of_detector(recipe, exporters)
    module = models.load(recipe.model, recipe.dims)
    made_by = MakerFacts(options=dict(recipe.options), **models.describe_weights(module))
    _refuse_quantised(module, recipe)
    if isinstance(module, torch.jit.ScriptModule) and "exporter" not in recipe.options:
        exporters = ("torchscript",)  # keeps both branches; dynamo can't read TorchScript
    source = make_source(torch, module, recipe, is_detector)
    has_static_flow = check_control_flow(torch, source.module, source.example)
    notes: list[str] = []
    doubt = ""
    attempts = [(exporter, opset) for exporter in exporters]
    for exporter, used_opset in attempts:
        try:
            constant = _write_graph(torch, source, exporter, used_opset, path)
            if constant and not has_static_flow and not is_detector:
                raise WrongGraph(f"turned a value of its example into a constant ({constant})")
            check = verify_graph(path, read_io(str(path))[1], source)
            if constant and source.free_batch:
                notes += _verify_larger(torch, module, recipe, source, path)
        except WrongGraph as e:
            doubt = str(e) if isinstance(e, UndecidedGraph) else doubt
            notes.append(f"the {exporter} exporter{f' in opset {used_opset}' if used_opset != opset else ''}: {e}")
            is_default = (exporter, used_opset) == ("dynamo", opset) and "opset" not in recipe.options
            if is_default and isinstance(e, RefusedGraph):
                attempts.append((exporter, LATER_OPSET))
            continue
        notes += list_doubts(check)
        file_facts.write_purpose(str(path), recipe.model, models.read_purpose(recipe.model, module).class_names)
        model = read_model(str(path))
        return replace(
            made_by,
            exporter=exporter,
            opset=read_opset(model),
            operators=dict(Counter(node.op_type for node in model.graph.node).most_common()),
            fixed_batch=not source.free_batch,
            verified=check,
            warnings=tuple(notes),
        )
    raise _explain_failure(torch, module, recipe, source, doubt, notes)


def _explain_failure(
    torch: Any, module: Any, recipe: Recipe, source: ExportSource, doubt: str, notes: Sequence[str]
) -> UserError:
    """Return the error for a module without a correct graph by any exporter."""
    if _has_changing_outputs(torch, module, recipe.model, source.expected[0]):
        return UserError(
            f"{recipe.model.name} gives other outputs at each call on one input, so no graph can be compared with it; "
            "let its forward draw no random numbers and keep no state of earlier calls, or measure it with "
            "--backend pytorch"
        )
    if doubt:
        return UserError(
            f"{recipe.model.name} amplifies rounding so much that no graph can be compared with it ({doubt}); "
            "give trained weights (--weights), or measure it with --backend pytorch"
        )
    hint = "try another --opset, measure it with --backend pytorch,compile, or give an ONNX file from another exporter"
    remedy = "export with a fixed batch (--batch 1)" if source.free_batch else hint
    return UserError(f"{recipe.model.name} can't be exported correctly, {remedy}; {'; '.join(notes)}")


def _refuse_quantised(module: Any, recipe: Recipe) -> None:
    """Raise a `UserError` for a dynamically quantised module: no exporter supports its layers."""
    if any(".quantized.dynamic" in type(layer).__module__ for layer in module.modules()):
        raise UserError(
            f"{recipe.model.name} was quantised dynamically by PyTorch, and such layers have no ONNX form; "
            "give the float module, with --precision int8"
        )


def _of_detector(recipe: Recipe, exporters: tuple[str, ...]) -> tuple[str, ...]:
    """Return the exporters for torchvision's detectors, which are written for tracing.

    A trace fixes only the number of images, which is one. Raise a `UserError` for another batch.
    """
    if recipe.dims.batch != 1:
        raise UserError(f"{libraries.TAKES_ONE_IMAGE}; export with a fixed batch (--batch 1)")
    return exporters if "exporter" in recipe.options else ("torchscript",)


def make_source(torch: Any, module: Any, recipe: Recipe, rows: bool = False) -> ExportSource:
    """Return the source of an export: example inputs of the recipe's batch (or of several), and their outputs."""
    model, dims = recipe.model, recipe.dims
    is_free = not dims.batch and (has_batch(model.inputs) or not model.inputs)
    batches = OTHER_BATCHES if is_free else (dims.batch or 1,)
    cases = []
    *noise, example = _iter_feeds(torch, recipe, (*batches, (EXAMPLE_BATCH if is_free else batches[0])), rows)
    for feeds in (*noise, *_iter_photographs(recipe, 0 if is_free else batches[0]), example):
        result, case = _run_case(torch, module, model, feeds)
        cases.append(case)
        _same_outputs(model, cases[0], case)
    tensor_feeds = {name: torch.from_numpy(array) for name, array in example.items()}
    # The module itself if it takes and returns one tensor: the graph's weights keep their names.
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    is_plain = not model.inputs and isinstance(result, torch.Tensor) and not is_scripted
    if isinstance(module, torch.fx.GraphModule):  # a wrapper hides the module names of operators
        is_plain = all(spec.dtype and not spec.keyword for spec in model.inputs)
    flat = module if is_plain else make_positional(torch, module, model.inputs, flat=True)
    if is_scripted:  # the exporter refuses TorchScript inside a Python module, but not its trace
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flat = torch.jit.trace(flat, tuple(tensor_feeds.values()), check_trace=False)
    axes = (
        {s.name: s.shape.index(BATCH_AXIS) for s in model.inputs if BATCH_AXIS in s.shape}
        if model.inputs
        else {"input": 0}
    )
    return ExportSource(flat, tuple(tensor_feeds.values()), tuple(case.outputs), tuple(cases[:-1]), is_free, axes, rows)


def _run_case(torch: Any, module: Any, model: ModelSpec, feeds: dict[str, np.ndarray]) -> tuple[Any, Case]:
    """Run the module on the inputs; return its result, and the same as a case.

    Raise a `UserError` if it refuses them or returns bfloat16.
    """
    copies = {name: torch.from_numpy(array.copy()) for name, array in feeds.items()}  # a module may overwrite inputs
    args, keywords = make_arguments(model.inputs, copies)
    try:
        with torch.no_grad():
            result = module(*args, **keywords)
    except INPUT_ERRORS as e:
        shapes = ", ".join("x".join(map(str, array.shape)) or name for name, array in feeds.items())
        raise UserError(f"{model.name} refuses {shapes}: {first_line(e)}") from e
    tensors = named_outputs(result)
    if torch.bfloat16 in {tensor.dtype for tensor in tensors.values()}:
        raise UserError(
            f"{model.name} returns bfloat16, which arrays of NumPy don't have, so no graph can be compared with it; "
            "let its forward return .float()"
        )
    outputs = {name: tensor.numpy() for name, tensor in tensors.items()}
    axes = {spec.name: spec.shape.index(BATCH_AXIS) for spec in model.inputs if BATCH_AXIS in spec.shape}
    batches = [a.shape[axes.get(name, 0)] for name, a in feeds.items() if a.ndim and (name in axes or not axes)]
    return result, Case(next(iter(batches), 1), feeds, outputs)


def _has_changing_outputs(torch: Any, module: Any, model: ModelSpec, case: Case) -> bool:
    """Return whether another call on the same inputs gives other outputs."""
    new_outputs = _run_case(torch, module, model, case.feeds)[1].outputs
    return not has_close_outputs([*case.outputs.values()], [*new_outputs.values()])


def _verify_larger(torch: Any, module: Any, recipe: Recipe, source: ExportSource, path: Path) -> list[str]:
    """Raise `WrongGraph` if a graph traced with warnings differs from the module at a larger batch.

    A batch that the module refuses proves nothing; a batch that may take too much memory gives a warning.
    """
    first = source.expected[0]
    image_bytes = sum(array.nbytes for array in first.feeds.values()) / first.batch
    batch = next((batch for batch in LARGER_BATCHES if batch * image_bytes <= LARGER_B), None)
    if batch is None:
        return [f"the graph was traced, with warnings, and compared at batches up to {source.expected[1].batch} only"]
    (feeds,) = _iter_feeds(torch, recipe, (batch,), source.rows)
    try:
        _, case = _run_case(torch, module, recipe.model, feeds)
    except UserError:
        return []
    try:
        verify_graph(path, read_io(str(path))[1], replace(source, expected=(case,)))
    except WrongGraph as e:
        raise WrongGraph(f"is right with few images and not with {case.batch}: {e}") from e
    return []


def _same_outputs(model: ModelSpec, first: Case, other: Case) -> None:
    """Raise a `UserError` if the number of outputs depends on the input: a graph's number of outputs is fixed."""
    counts = len(first.outputs), len(other.outputs)
    if counts[0] == counts[1]:
        return
    if first.batch == other.batch:
        raise UserError(
            f"{model.name} returns {counts[0]} tensors for one input and {counts[1]} for another, and a graph has a "
            "fixed number of outputs; return tensors of a fixed number, or measure it with --backend pytorch,compile"
        )
    raise UserError(
        f"{model.name} returns {counts[0]} tensors at batch {first.batch} and {counts[1]} at {other.batch}, and a "
        "graph has a fixed number of outputs; return one tensor for all images, or export with --batch 1"
    )


def _iter_photographs(recipe: Recipe, batch: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of the study's own images: they may take another path through the module than noise."""
    if recipe.data is not None and recipe.data.folder and not recipe.model.inputs:
        images = input_data.Images(recipe.data, recipe.model.preprocess)
        size = batch or min(len(images), REAL_IMAGES)
        for first in range(0, max(1, min(len(images), REAL_IMAGES) // size) * size, size):
            yield {"input": images.read_batch(first, size)}


def _iter_feeds(torch: Any, recipe: Recipe, batches: Sequence[int], pixels: bool) -> Iterator[dict[str, np.ndarray]]:
    """Yield different random inputs for each of the batches.

    With `pixels` they are pixels, else an image of unbounded values, which may saturate detectors' scores.
    """
    dims, model = recipe.dims, recipe.model
    generator = torch.Generator().manual_seed(0)
    for seed, batch in enumerate(batches):
        batch_dims, data = replace(dims, batch=batch), DataSpec(seed=seed)
        shape = batch_dims.resolve(dims.shapes.get("input", (BATCH_AXIS, model.channels, "height", "width")))
        if model.inputs or pixels:
            inputs = list_tensors(model.inputs, batch_dims) if model.inputs else (Tensor("input", "float32", shape),)
            yield next(input_data.read_batches(data, model.preprocess, inputs, batch_dims, 1, model.inputs))
        else:
            yield {"input": torch.randn(*shape, generator=generator).numpy()}


def _write_graph(torch: Any, source: ExportSource, exporter: str, opset: int, path: Path) -> str:
    """Export the module; return the value that tracing made a constant, "" if none."""
    supported = inspect.signature(torch.onnx.export).parameters
    dynamo, names = exporter == "dynamo", [*source.expected[0].feeds]
    if dynamo and "dynamo" not in supported:
        raise WrongGraph(f"PyTorch {torch.__version__} doesn't have it")
    options: dict[str, Any] = {"dynamo": dynamo, "verbose": False, "external_data": dynamo and _is_huge(source.module)}
    if source.free_batch and dynamo:
        batch = torch.export.Dim("batch")
        axes = tuple({source.batched[name]: batch} if name in source.batched else None for name in names)
        options["dynamic_shapes"] = (axes,) if type(source.module).__name__ == "Positional" else axes
    elif source.free_batch:
        options["dynamic_axes"] = {
            name: {axis: "batch"} for name, axis in {**source.batched, **source.following}.items()
        }
    if not dynamo:  # already in eval mode; a program of torch.export refuses the switch
        options["training"] = torch.onnx.TrainingMode.PRESERVE
        if getattr(source.module, "training", False):
            source.module.training = False
    options = {key: value for key, value in options.items() if key in supported}
    options |= {"input_names": names, "output_names": list(source.outputs), "opset_version": opset}
    try:
        with silence_exporters() as caught_warnings, torch.no_grad():
            program = torch.onnx.export(source.module, source.example, str(path), **options)
    except MemoryError:
        raise
    except Exception as e:  # whatever the error, the next exporter is tried
        system.raise_if_disk_full(e, path.parent)
        raise WrongGraph(f"failed, {_last_line(e)}") from e
    constant = traced_values(torch, caught_warnings)
    if source.free_batch:
        _refuse_batch_limit(torch, source, getattr(program, "exported_program", None), bool(constant))
    if not dynamo and type(source.module).__name__ == "Positional":
        unwrap(path)
    if dynamo and not options["external_data"]:
        onnx = import_onnx()
        onnx.save(make_fusible(onnx.load(path)), path)
    try:
        lower_file(path, opset)  # dynamo writes opset 18 or higher
    except UserError as e:
        raise WrongGraph(str(e)) from e
    return constant


def _refuse_batch_limit(torch: Any, source: ExportSource, exported_program: Any, has_warnings: bool) -> None:
    """Raise `WrongGraph` if the module takes a path for larger batches that the graph lacks.

    A trace gives only warnings, including harmless ones: then `torch.export` is asked.
    """
    if exported_program is None and has_warnings:
        batch_axes = [source.batched.get(name) for name in source.expected[0].feeds]
        exported_program = follow_batch(torch, source.module, source.example, batch_axes)
    limit = batch_limit(exported_program)
    if limit is not None:
        raise WrongGraph(f"wrote the module's path up to batch {limit}, but it takes another one for larger batches")


def _is_huge(module: Any) -> bool:
    state = module.state_dict().values()  # quantised modules also store non-tensors
    size: int = sum(t.numel() * t.element_size() for t in state if hasattr(t, "element_size"))
    return size > MAX_INLINE_B


def _last_line(e: BaseException) -> str:
    """Return the root cause in one line: exporters wrap it in pages of advice."""
    cause = system.list_causes(e)[-1]
    return shorten(f"{type(cause).__name__}: {first_line(cause)}", 200)


@contextlib.contextmanager
def silence_exporters() -> Iterator[list[warnings.WarningMessage]]:
    """Run the block without exporters' output, and yield their warnings."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        yield caught_warnings
