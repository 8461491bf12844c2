"""ExecuTorch on the CPU (`executorch`): .pte programs lowered to XNNPACK, or the user's own."""

from __future__ import annotations

import importlib
import json
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker import system
from dyno.worker.backend import Arrays, Backend, FileContents, FileFormat, Maker, Session, artifact_of, describe_given
from dyno.worker.backends.aot_package import numbered_names
from dyno.worker.backends.pytorch import module_inputs
from dyno.worker.backends.torch_ao import import_torchao, quantise_program
from dyno.worker.facts.engine import PRECISION_TYPES, EngineFacts, Probe, precision_truth
from dyno.worker.facts.files import MakerFacts
from dyno.worker.inputs import calibration
from dyno.worker.inputs.specs import fit_feed, static_shapes
from dyno.worker.nets import file_facts, models
from dyno.worker.option_values import Check, whole
from dyno.worker.sessions import torch_support
from dyno.worker.spec import Artifact, Recipe, Tensor, Trial, Unavailable, UserError, add_noun

ENGINE_NAME, DELEGATE_NAME = "ExecuTorch", "XNNPACK"
BACKEND_ID = "XnnpackBackend"
INSTALL_ADVICE = "pass a separate Python: --python executorch=PATH (there: pip install executorch torchvision)"
SCALAR_TYPES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32", 7: "float64", 11: "bool",
    15: "bfloat16",
}  # fmt: skip
XNN_TYPES = {"fp32": "float32", "pfp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # the others are integers
PRODUCT = re.compile(r"Conv(?!ert)|FullyConnected|MatrixMultiply|::(?:conv|linear|addmm|mm|bmm|matmul)", re.ASCII)
VIEW_OPERATORS = {
    "aten.transpose.int", "aten.permute.default", "aten.reshape.default", "aten.view.default", "aten.unflatten.int",
    "aten.flatten.using_ints", "aten.slice.Tensor",
}  # fmt: skip
NOT_IN_NAMES = re.compile(r"[^\w.]", re.ASCII)
NONFINITE_VALUE = re.compile(r":\s*[-+]?(?:inf|nan)\b")  # written by flatc, but invalid in JSON


class PteFormat(FileFormat):
    """An ExecuTorch program, for one shape of each input."""

    name = "pte"
    suffixes = (".pte",)
    backend = "executorch"
    builders = ("executorch",)
    on_device = True

    def read(self, path: str, trial: Trial) -> FileContents:
        """Read the program; its precision is the type of most of its operators that multiply."""
        meta, (_, _, types) = open_program(path)[1].method_meta(), list_operators(path)
        try:
            inputs = _read_tensors("input", meta.num_inputs(), meta.input_tensor_meta)
            outputs = _read_tensors("output", meta.num_outputs(), meta.output_tensor_meta)
        except RuntimeError as e:
            reason = torch_support.first_line(e)
            raise UserError(f"{path} has inputs or outputs that aren't tensors ({reason})") from e
        main_type = max(types, key=lambda kind: types[kind]) if types else "float32"
        precision = next((p for p, kind in PRECISION_TYPES.items() if kind == main_type), "fp32")
        metadata = file_facts.read_attached(path)
        purpose, images = file_facts.read_purpose(metadata), file_facts.read_image_facts(metadata)
        return FileContents(inputs, outputs, precision, task=purpose, image=images)


PTE = PteFormat()


def _read_tensors(prefix: str, count: int, describe: Callable[[int], Any]) -> tuple[Tensor, ...]:
    pairs = zip(numbered_names(prefix, count), map(describe, range(count)), strict=True)
    return tuple(Tensor(name, SCALAR_TYPES.get(t.dtype(), "unknown"), tuple(map(int, t.sizes()))) for name, t in pairs)


class ExecuTorch(Backend):
    """torch.export and ExecuTorch's XNNPACK delegate; operators left by the delegate run on portable kernels.

    Option: `samples` of the calibration for int8.
    """

    name = "executorch"
    requires = ("executorch", "torch")
    install_hint = INSTALL_ADVICE
    precisions = ("fp32", "int8")
    options = ("samples",)
    values: Mapping[str, Check] = {"samples": whole(1)}
    files = PteFormat.suffixes

    def refuse(self, trial: Trial) -> str:
        """See `Backend.refuse`; a program has one precision, and int8 needs calibration data."""
        if reason := super().refuse(trial):
            return reason
        if trial.model.file and trial.precision != trial.model.precision:
            return f"the program was lowered in {trial.model.precision}; {trial.precision} needs the model"
        if trial.options and (trial.model.file or trial.precision != "int8"):
            return "samples is for a model that Dyno quantises to int8; omit it"
        return calibration.missing_data(trial)

    def recipe(self, trial: Trial) -> Recipe:
        """Return the recipe of the program at the trial's batch; a given program is used unchanged."""
        data = calibration.calibration_data(trial) if trial.precision == "int8" != trial.model.precision else None
        runtime = replace(trial.runtime, device="cpu", threads=1)
        return Recipe(
            self.name, PTE.name, trial.precision, trial.model, trial.dims, dict(trial.options), data, runtime=runtime
        )  # fmt: skip

    def probe(self) -> Probe:
        """Lower one layer and run it."""
        _import_library()  # notice a missing library before the slow import of PyTorch
        torch = torch_support.import_torch()
        with tempfile.TemporaryDirectory() as scratch, torch.no_grad(), torch_support.silence_warnings():
            path, x = Path(scratch) / "relu.pte", torch.tensor([-1.0, 2.0])
            path.write_bytes(_lower_program(torch.export.export(torch.nn.ReLU(), (x,))))
            _, method = open_program(str(path))
            _run_method(method, [x])
            is_correct = method.get_outputs()[0].tolist() == [0.0, 2.0]
        detail = f"with torch {torch.__version__}"
        return Probe(version=_read_version(), devices=("cpu",) if is_correct else (), detail=detail)

    def prepare(self, trial: Trial) -> None:
        """Import PyTorch and ExecuTorch's runtime."""
        torch_support.import_torch()
        _import_library()

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        """Load the program with the trial's threads; XNNPACK packs its weights here."""
        if artifact is None:
            raise UserError(f"{self.name} runs a .pte program that was made before")
        with torch_support.memory_errors():
            return ExecuTorchSession(trial, artifact)


EXECUTORCH = ExecuTorch()


def _read_version() -> str:
    return system.find_versions(("executorch",)).get("executorch", "")


def _import_library(module: str = "extension.pybindings.portable_lib") -> Any:
    """Import a module of ExecuTorch; set its own compiler of schemas, needed to make and read programs."""
    try:
        with torch_support.silence_warnings():
            import executorch

            flatc = Path(next(iter(executorch.__path__)), "data", "bin", "flatc")
            if flatc.is_file():
                os.environ.setdefault("FLATC_EXECUTABLE", str(flatc))
            return importlib.import_module(f"executorch.{module}")
    except (ImportError, OSError, AttributeError, RuntimeError) as e:  # the last three: built for another PyTorch
        raise Unavailable(f"executorch can't be imported ({torch_support.first_line(e)}); {INSTALL_ADVICE}") from e


def open_program(path: str) -> tuple[Any, Any]:
    """Return the program and its method `forward`; raise a `UserError` for a missing or damaged file."""
    runtime = _import_library("runtime").Runtime.get()
    try:
        program = runtime.load_program(Path(path))
        return program, program.load_method("forward")._method
    except (RuntimeError, ValueError, OSError) as e:
        if "error: 0x:14" in str(e) and (operators := _list_missing_operators(path)):
            raise UserError(
                f"{ENGINE_NAME} {_read_version()} has no kernel for {', '.join(operators)}, which is in {path}"
            ) from e
        raise UserError(
            f"{path} can't be read by {ENGINE_NAME} {_read_version()}: {torch_support.first_line(e)}"
        ) from e


def _list_missing_operators(path: str) -> list[str]:
    """Return the operators of the program without a kernel in this library."""
    kernels = {*_import_library()._get_operator_names()}
    names = (f"{operator.name}.{operator.overload}".rstrip(".") for operator in _read_plan(path)[1].operators)
    return [name for name in names if name not in kernels]


def _run_method(method: Any, tensors: Sequence[Any]) -> None:
    """Run the method to its end; raise `Unavailable` for a library that was built for another PyTorch."""
    try:
        method.set_inputs(tensors)
        method.execute()
    except RuntimeError as e:
        if "does not have a device" not in str(e):
            raise
        torch = torch_support.import_torch().__version__
        raise Unavailable(
            f"executorch {_read_version()} was built for another PyTorch than {torch}; {INSTALL_ADVICE}"
        ) from e


def _read_plan(path: str) -> tuple[Any, Any]:
    """Return the program and the plan of its method `forward`."""
    file = _import_library("exir._serialize._program").deserialize_pte_binary(Path(path).read_bytes())
    program = getattr(file, "program", file)
    return program, next(plan for plan in program.execution_plan if plan.name == "forward")


def list_operators(path: str) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Count the operators in XNNPACK's graphs, those on portable kernels, and the types of the products."""
    program, plan = _read_plan(path)
    delegated, portable, types = Counter[str](), Counter[str](), Counter[str]()
    for call in (instruction.instr_args for chain in plan.chains for instruction in chain.instructions):
        if hasattr(call, "op_index"):
            name = plan.operators[call.op_index].name
            portable[name] += 1
            if PRODUCT.search(name):
                types[SCALAR_TYPES.get(int(plan.values[call.args[0]].val.scalar_type), "unknown")] += 1
    for delegate in plan.delegates:
        blob = bytes(program.backend_delegate_data[delegate.processed.index].data)
        for kind, type_ in _read_graph(blob) if delegate.id == BACKEND_ID else [(delegate.id, "")]:
            delegated[kind] += 1
            types.update([type_] if PRODUCT.search(kind) else [])
    return delegated, portable, types


def _read_graph(blob: bytes) -> list[tuple[str, str]]:
    """Return each node of XNNPACK's graph with the type of its first input, from the runtime's bytes.

    They are: four bytes, `XH00`, the header's length (2 bytes), and the graph's offset and length (4 bytes each).
    """
    start, length = (int.from_bytes(blob[k : k + 4], "little") for k in (10, 14))
    serialization = _import_library("exir._serialize._flatbuffer")
    schema = Path(next(iter(_import_library("backends.xnnpack").__path__)), "serialization", "schema.fbs")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "graph.bin"
        path.write_bytes(blob[start : start + length])
        serialization._flatc_decompile(scratch, str(schema), str(path), ["--raw-binary"])
        graph = json.loads(NONFINITE_VALUE.sub(": null", path.with_suffix(".json").read_text()))
    values = [each["xvalue_union"] for each in graph["xvalues"]]
    tensors = [each.get("tensor_value", each) for each in values]
    kinds = {each["id_out"]: each["datatype"].removeprefix("xnn_datatype_") for each in tensors}
    nodes = [(each["xnode_union_type"].removeprefix("XNN"), each["xnode_union"]) for each in graph["xnodes"]]
    first = [kinds.get(node.get("input1_id", node.get("input_id")), "") for _, node in nodes]
    return [(kind, XNN_TYPES.get(type_, "int8")) for (kind, _), type_ in zip(nodes, first, strict=True)]


class ExecuTorchMaker(Maker):
    """A maker that exports and lowers a module, quantised for int8, or describes a given program."""

    name = "executorch"
    requires = ("executorch", "torch", "torchao", "torchvision", "timm", "ultralytics")

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write FOLDER/model.pte; raise `Unavailable` without ExecuTorch, a `UserError` if the export fails."""
        began = time.perf_counter()
        facts = self.describe(recipe)
        if path := recipe.model.file:
            artifact = describe_given(PTE, recipe, facts)
            return replace(artifact, made_by=_add_operators(artifact.made_by, path))
        torch = torch_support.import_torch()
        with torch_support.memory_errors(), torch.no_grad(), torch_support.silence_warnings():
            module = torch_support.refuse_script(torch, models.load(recipe.model, recipe.dims))
            facts = replace(facts, **models.describe_weights(module))
            inputs = module_inputs(recipe.model, recipe.dims)
            example = tuple(torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in inputs)
            flat_module = torch_support.make_positional(torch, module, recipe.model.inputs, flat=True)
            with torch_support.raise_refusals(f"{ENGINE_NAME} can't lower {recipe.model.name}"):
                program = _export_module(torch, flat_module, example)
                if recipe.precision == "int8":
                    flat_module, facts = _quantise_program(program, inputs, recipe, facts)
                    program = torch.export.export(flat_module, example, strict=False)
                content = _lower_program(program)
            outputs = torch_support.describe_outputs(flat_module(*example))
        (folder / "model.pte").write_bytes(content)
        facts = _add_operators(facts, str(folder / "model.pte"))
        return artifact_of(folder / "model.pte", PTE.name, recipe.precision, (inputs, outputs), facts, began)


EXECUTORCH_MAKER = ExecuTorchMaker()


def _add_operators(facts: MakerFacts, path: str) -> MakerFacts:
    delegated, portable, types = list_operators(path)
    operators = dict((delegated + portable).most_common())
    sentence = (
        f"{portable.total()} of {add_noun(sum(operators.values()), 'operator')} run on {ENGINE_NAME}'s portable kernels"
    )
    names = ", ".join(f"{count} {name}" for name, count in portable.most_common())
    warnings = (f"{sentence}, not on {DELEGATE_NAME}: {names}",) if portable else ()
    return replace(
        facts, layers=sum(operators.values()), operators=operators, layers_by_type=dict(types),
        warnings=(*facts.warnings, *warnings),
    )  # fmt: skip


def _export_module(torch: Any, module: Any, example: Any) -> Any:
    """Return the exported program with constants in place of computations on weights alone, as XNNPACK requires."""
    program = torch.export.export(module, example, strict=False)
    folding = _import_library("exir.passes.constant_prop_pass")
    constants = folding.get_propagated_const_tensor_dict(program, _list_kept_operators(torch, program)).keys()
    outputs = program.graph.output_node().args[0]
    if all(node.op == "placeholder" for node in constants) or not constants.isdisjoint(outputs):
        return program
    program = program.run_decompositions({})  # removes operators that write into a constant
    program = folding.constant_prop_pass(program, _list_kept_operators(torch, program))
    program.constants.update({name: value.clone() for name, value in program.constants.items()})  # some are views
    return program


def _list_kept_operators(torch: Any, program: Any) -> set[Any]:
    """Return the operators that aren't folded: they write, draw numbers, or have no tensor as input."""
    operators = set[Any]()
    for node in program.graph.nodes:
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        is_mutable = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        if node.op == "call_function" and (is_random or is_mutable or not node.all_input_nodes):
            operators.add(node.target)
    return operators


def _lower_program(program: Any) -> bytes:
    """Return the bytes of the program, with everything that XNNPACK accepts delegated to it."""
    program = _decompose_pools(program)
    _clean_names(program)
    exir = _import_library("exir")
    partitioner = _import_library("backends.xnnpack.partition.xnnpack_partitioner").XnnpackPartitioner()
    edge_program = exir.to_edge_transform_and_lower(program, partitioner=[partitioner])
    rest = edge_program.exported_program()
    calls = {node.target for node in rest.graph.nodes if node.op == "call_function"}
    weights = {target for target in calls if "dequantize_per_channel" in str(target)}
    if weights:  # of layers outside XNNPACK: only XNNPACK reads 8-bit weights
        _import_library("exir.passes.constant_prop_pass").constant_prop_pass(rest, calls - weights)
    return bytes(edge_program.to_executorch().buffer)


def _decompose_pools(program: Any) -> Any:
    """Return the program without adaptive pools, which ExecuTorch lacks, and with pools that suit XNNPACK.

    XNNPACK accepts averages without counted padding and windows of more than one value; without padding, the result is
    the same.
    """
    torch = torch_support.import_torch()
    aten, defaults = torch.ops.aten, torch.export.default_decompositions()
    pools = (aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default)
    if any(node.target in pools for node in program.graph.nodes):
        inner = torch._decomp.get_decompositions([aten._adaptive_avg_pool2d])
        program = program.run_decompositions({**{pool: defaults[pool] for pool in pools}, **inner})
    for node in program.graph.find_nodes(op="call_function", target=aten.avg_pool2d.default):
        x, size, stride = (*node.args[:3], [])[:3]
        if len(node.args) <= 3 and not node.kwargs and max(size) > 1 and x.meta["val"].dim() == 4:
            node.args = (x, size, stride or size, [0, 0], False, False)
    return program


def _clean_names(program: Any) -> None:
    """Rename tensors whose names aren't identifiers (`block1-0.weight`): ExecuTorch doesn't find them in its graph."""
    weights = program.state_dict
    for spec in program.graph_signature.input_specs:
        name = NOT_IN_NAMES.sub("_", spec.target or "")
        if spec.target in weights and name != spec.target:
            while name in weights:
                name += "_"
            weights[name] = weights.pop(spec.target)
            spec.target = name


def _quantise_program(
    program: Any, inputs: Sequence[Tensor], recipe: Recipe, facts: MakerFacts
) -> tuple[Any, MakerFacts]:
    """Return the program's module in int8 by XNNPACK's quantiser, and the facts with its calibration."""
    xnnpack = _import_library("backends.xnnpack.quantizer.xnnpack_quantizer")

    class Quantiser(xnnpack.XNNPACKQuantizer):  # type: ignore[name-defined,misc]
        def annotate(self, graph: Any) -> Any:
            return _share_ranges(_leave_computed_weights(super().annotate(graph)))

    data = calibration.calibration_of(recipe, Artifact(PTE.name, "", "", 0, "fp32", tuple(inputs), (), 0.0))
    quantiser = Quantiser().set_global(xnnpack.get_symmetric_quantization_config(is_per_channel=True))
    module = quantise_program(program, quantiser, inputs, data)
    calibration_facts = replace(data.facts, method="histogram")
    return module, replace(facts, calibration=calibration_facts, warnings=tuple(data.warnings))


def _leave_computed_weights(graph: Any) -> Any:
    """Leave layers with weights computed from the inputs unquantised: no kernel quantises them per channel."""
    key = import_torchao(".pt2e.quantizer.quantizer").Q_ANNOTATION_KEY
    computed = set[Any]()
    for node in graph.graph.nodes:
        if node.op == "placeholder" or not computed.isdisjoint(node.all_input_nodes):
            computed.add(node)
        specs = node.meta[key].input_qspec_map if key in node.meta else {}
        if any(getattr(spec, "ch_axis", None) is not None and source in computed for source, spec in specs.items()):
            del node.meta[key]
    return graph


def _share_ranges(graph: Any) -> Any:
    """Give each view of a quantised tensor the tensor's range: XNNPACK refuses two ranges.

    ExecuTorch's `propagate_annotation` does so for fewer operators, without `transpose` and `reshape`.
    """
    pt2e = import_torchao(".pt2e.quantizer.quantizer")
    for node in graph.graph.nodes:
        if str(node.target) not in VIEW_OPERATORS:
            continue
        source = node.args[0].meta.get(pt2e.Q_ANNOTATION_KEY)
        annotation = node.meta.get(pt2e.Q_ANNOTATION_KEY)
        if source and source.output_qspec and not (annotation and annotation._annotated):
            spec = pt2e.SharedQuantizationSpec(node.args[0])
            node.meta[pt2e.Q_ANNOTATION_KEY] = pt2e.QuantizationAnnotation(
                input_qspec_map={node.args[0]: spec}, output_qspec=spec, _annotated=True
            )
    return graph


class ExecuTorchSession(Session):
    """A loaded program; inputs are copied for each run, since other tensors may reuse their memory."""

    def __init__(self, trial: Trial, artifact: Artifact) -> None:
        self._torch, self._trial, self._maker_facts = torch_support.import_torch(), trial, artifact.made_by
        self._library = _import_library()
        torch_support.configure(self._torch, trial, benchmark=False)
        with torch_support.silence_warnings():
            self._library._unsafe_reset_threadpool(trial.runtime.threads)
        self._shapes = static_shapes(artifact.inputs, trial.dims)
        self.inputs, self.outputs = artifact.inputs, artifact.outputs
        self._names = [t.name for t in artifact.outputs]
        self._program, self._method = open_program(artifact.path)
        self._bound = [self._torch.zeros(t.shape, dtype=getattr(self._torch, t.dtype)) for t in self.inputs]

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        """Copy the feeds, converted to the program's types."""
        arrays = [fit_feed(feeds, t, self._shapes[t.name]) for t in self.inputs]
        for tensor, values in zip(self._bound, arrays, strict=True):
            np.copyto(tensor.numpy(), values)  # PyTorch's threads would spin in parallel to ExecuTorch's: 7, not 2.5 ms

    def run(self, slot: int = 0) -> None:
        """Set the program's inputs, and run it to its end."""
        _run_method(self._method, self._bound)

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        """Return copies of the outputs by name, floats as float32."""
        outputs = self._method.get_outputs(clone_outputs=True)
        return {name: torch_support.as_fetched(v).numpy() for name, v in zip(self._names, outputs, strict=True)}

    def facts(self) -> EngineFacts:
        """Return the program's operators and ExecuTorch's threads."""
        types = dict(self._maker_facts.layers_by_type)
        return EngineFacts(
            layers=self._maker_facts.layers, layers_by_type=types, operators=dict(self._maker_facts.operators),
            precision_truth=precision_truth(self._trial.precision, types, f"{ENGINE_NAME} by the program's types"),
            threads=self._library._threadpool_get_thread_count(),
        )  # fmt: skip
