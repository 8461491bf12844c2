"""ONNX files: inputs, outputs, precision, and checks and repairs of the user's own files."""

from __future__ import annotations

import hashlib
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from dyno.worker.extras import load_library
from dyno.worker.facts.files import MakerFacts
from dyno.worker.onnx_graph import repair
from dyno.worker.onnx_graph.graph_facts import check_files_beside, list_files_beside, read_graph_facts
from dyno.worker.spec import Artifact, Option, Tensor, UserError, shorten

NAMELESS_AXES = ("", "None", "-1")  # PaddlePaddle's `?` too
VALUE_FIELDS = {
    "sequence_type": "a sequence",
    "map_type": "a map",
    "optional_type": "optional",
    "sparse_tensor_type": "a sparse tensor",
}


def read_io(path: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Read the inputs and outputs of an ONNX file; a free dimension has its name in the file, else INPUT_AXIS.

    INPUT is the input's name and AXIS a number. Missing output shapes are inferred from the inputs'. Raise a
    `UserError` for a file that is missing, empty, cut short or not ONNX.
    """
    model = read_model(path)
    if _list_open_ends(model):
        model = import_onnx().shape_inference.infer_shapes(model)
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer}
    inputs = tuple(_read_tensor(value) for value in graph.input if value.name not in constants)
    return inputs, tuple(_read_tensor(value) for value in graph.output)


def check(path: str) -> None:
    """Raise a `UserError` for an invalid graph.

    Invalid are graphs that ONNX's checker refuses, inputs or outputs other than tensors of numbers, inputs with any
    number of axes, and missing external weights. Output shapes may be missing, although the checker requires them.
    """
    onnx = import_onnx()
    model = read_model(path)
    graph = model.graph
    _only_tensors(path, {"input": graph.input, "output": graph.output})
    check_files_beside(path)
    open_ends = _list_open_ends(model)
    for value in open_ends:
        value.type.tensor_type.shape.SetInParent()
    # The checker rejects graphs that engines read, and operators that only one engine has.
    is_changed = any([repair.order(model), repair.name_domain(model), repair.hide_foreign_operators(model), open_ends])
    if is_changed and list_files_beside(Path(path)):
        return  # the checker would look for the weights in a changed file's folder
    try:
        onnx.checker.check_model(model if is_changed else path)
    except (onnx.checker.ValidationError, UnicodeDecodeError) as e:
        # The message has a node's name: not in UTF-8, it raises another error or is lost (Python 3.11.2).
        message = "" if isinstance(e, UnicodeDecodeError) else str(e)
        reason = shorten(message) or "a name in it is not UTF-8; export it again"
        raise UserError(f"{path} is not a valid ONNX graph: {reason}") from e


def _list_open_ends(model: Any) -> list[Any]:
    return [value for value in model.graph.output if not value.type.tensor_type.HasField("shape")]


def _only_tensors(path: str, boundary: dict[str, Any]) -> None:
    """Raise a `UserError` that names the first input or output that isn't a tensor of numbers."""
    import onnx

    remedy = "export the model with tensors of numbers alone"
    for role, values in boundary.items():
        for value in values:
            kind = value.type.WhichOneof("value") or "tensor_type"
            element = value.type.tensor_type.elem_type
            if element == onnx.TensorProto.STRING:
                raise UserError(f"{path}'s {role} {value.name!r} is text; {remedy}")
            if kind == "tensor_type" and element and onnx.helper.tensor_dtype_to_np_dtype(element).kind not in "biuf":
                name = onnx.TensorProto.DataType.Name(element).lower()
                raise UserError(
                    f"{path}'s {role} {value.name!r} is {name}, which can't be fed or compared; cast it to float32"
                )
            if kind in VALUE_FIELDS:
                is_zipmap = kind == "map_type" or value.type.sequence_type.elem_type.HasField("map_type")
                option = ", for scikit-learn's classifiers by skl2onnx's options={'zipmap': False}" if is_zipmap else ""
                raise UserError(f"{path}'s {role} {value.name!r} is {VALUE_FIELDS[kind]}; {remedy}{option}")
            if role == "input" and not value.type.tensor_type.HasField("shape"):
                raise UserError(f"{path}'s input {value.name!r} may have any number of axes; export it with a shape")


def prepare_given(path: str, opset: Option | None, folder: Path, described: Set[str] = frozenset()) -> Artifact:
    """Return the user's own file; a copy if it needs repair or has a later opset than `opset`.

    `described` are the inputs with given values.
    """
    onnx = import_onnx()
    model = read_model(path)
    check(path)
    made_by = MakerFacts(
        backend="given",
        opset=repair.read_opset(model),
        parameters=read_graph_facts(model).parameters,
        weights_sha256=_hash_files(path),
    )
    copy = folder / "model.onnx"
    repaired, warnings = repair.repair_graph(model)
    if warnings:
        onnx.load_external_data_for_model(repaired, str(Path(path).parent))
        repair.save(repaired, copy)
        model, path = repaired, str(copy)
    warnings += repair.warn_training(model) + repair.warn_steps(model, described)
    if isinstance(opset, int) and repair.read_opset(model) > opset and not list_files_beside(Path(path)):
        try:
            onnx.save(repair.convert_opset(model, opset), copy)
        except UserError as e:  # a newer engine may still read it; others report an error
            warnings.append(str(e))
        else:
            made_by, path = replace(made_by, opset=opset), str(copy)
    return make_artifact(path, 0.0, replace(made_by, warnings=tuple(warnings)))


def make_artifact(path: str, seconds: float, made_by: MakerFacts) -> Artifact:
    inputs, outputs = read_io(path)
    size = sum(file.stat().st_size for file in (Path(path), *list_files_beside(Path(path))))
    return Artifact("onnx", path, _hash_files(path), size, "fp32", inputs, outputs, seconds, made_by=made_by)


def read_model(path: str) -> Any:
    """Return an ONNX file without its external weights; raise a `UserError` for an incomplete file."""
    onnx = import_onnx()
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    file = Path(path)
    if not file.is_file():
        raise UserError(f"model file {path} doesn't exist")
    if file.stat().st_size == 0:
        raise UserError(f"model file {path} is empty")
    try:
        model = onnx.load(path, format="protobuf", load_external_data=False)
    except DecodeError as e:
        raise UserError(f"{path} is not a whole ONNX file (cut short, or of another kind); export it again") from e
    if not model.graph.node or not model.graph.output:
        raise UserError(f"{path} is not an ONNX file, or one without a graph; export it again")
    return model


def _read_tensor(value: Any) -> Tensor:
    """Return the input or output; a tool's generic names of free dimensions are replaced."""
    onnx = import_onnx()
    tensor_type, free_axes = value.type.tensor_type, repair.find_free_axes(value)
    names = [dim.dim_param.strip("?") for dim in tensor_type.shape.dim]
    names = [f"{value.name}_{axis}" if name in NAMELESS_AXES else name for axis, name in enumerate(names)]
    shape = tuple(names[axis] if axis in free_axes else dim.dim_value for axis, dim in enumerate(tensor_type.shape.dim))
    if tensor_type.elem_type == onnx.TensorProto.UNDEFINED:
        return Tensor(value.name, "", shape)
    if tensor_type.elem_type not in onnx.TensorProto.DataType.values():
        raise UserError(f"{value.name!r} is of a type that onnx {onnx.__version__} doesn't know; export the file again")
    return Tensor(value.name, str(onnx.helper.tensor_dtype_to_np_dtype(tensor_type.elem_type)), shape)


def _hash_files(path: str) -> str:
    digest = hashlib.sha256()
    for file in (Path(path), *list_files_beside(Path(path))):
        try:
            with open(file, "rb") as f:
                while chunk := f.read(1 << 20):
                    digest.update(chunk)
        except FileNotFoundError as e:
            raise UserError(f"{path} keeps weights in {file}, which doesn't exist; put it back beside it") from e
    return digest.hexdigest()


def import_onnx() -> Any:
    return load_library("onnx")
