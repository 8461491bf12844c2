"""Packages of AOTInductor (.pt2), read without PyTorch from their metadata and C++ sources."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dyno.worker.backend import FileContents
from dyno.worker.facts.engine import PRECISION_TYPES
from dyno.worker.facts.job import LAYERS, Layer, LayerGraph, Port
from dyno.worker.facts.json_values import Misfit
from dyno.worker.nets import file_facts
from dyno.worker.spec import BATCH_AXIS, Tensor, UserError, from_json, to_json

COMPILED_MEMBER = re.compile(r"(?:^|/)data/aotinductor/([^/]+)/")
PROGRAM_MEMBER = re.compile(r"(?:^|/)(?:models/[^/]+|serialized_exported_program)\.json$")  # programs of torch.export
METADATA_KEY = "dyno"  # metadata entry with Dyno's facts on the model
RUN_BODY = re.compile(r"void AOTInductorModel::run_impl\((.*?)\} // AOTInductorModel::run_impl", re.DOTALL)
INPUT_CHECK = re.compile(r"static void check_input_(\d+)\((.*?)\n\}", re.DOTALL)
INPUT_TYPE = re.compile(r"expected_dtype = aoti_torch_dtype_(\w+)\(\)")
FIXED_SIZE_CHECK, MIN_SIZE_CHECK, MAX_SIZE_CHECK = (
    re.compile(text)
    for text in (r"\((\d+) != \w+_size\[(\d+)\]\)", r"_size\[(\d+)\] < (\d+)", r"_size\[(\d+)\] > (\d+)")
)
STRIDE_CHECK = re.compile(r"\((\d+) != \w+_stride\[(\d+)\]\)")
READ_SIZE = re.compile(r"_stride\[(\d+)\]|_size\[(\d+)\]")
CONSTANT = re.compile(
    r'constants_info_\[(\d+)\]\.name = "(\w+)";.*?\.dtype = cached_torch_dtype_(\w+);.*?\.shape = \{([^}]*)\}',
    re.DOTALL,
)
THREADS = re.compile(r"num_threads\((\d+)\)")
# Kinds of lines in the compiled function
ORIGIN = re.compile(r"// Topologically Sorted Source Nodes: \[(.*?)\], Original ATen: \[(.*?)\]")
LENGTHS = re.compile(r"int64_t (int_array_\d+)\[\] = \{([^}]*)\}")
ALLOCATED = re.compile(r"aoti_torch_empty_strided\(\d+, (\w+), \w+, cached_torch_dtype_(\w+), .*&(\w+)_handle\)")
ALIAS = re.compile(r"(?:auto|decltype\(auto\)) (\w+) = (?:std::move\(|wrap_with_raii_handle_if_needed\()(.*)")
LIBRARY_CALL = re.compile(r"aoti_torch_(?:cpu|cuda|xpu)_(\w+)\((.*)\)")
OWN_CALL = re.compile(r"^\s*(?:call_)?((?:cpp|triton)_\w+)\((.*)\);")
RESULT = re.compile(r"&(\w+)_handle")
POINTER = re.compile(r"\((?:const )?(\w+)\*\)")
KERNEL = re.compile(r"\bvoid +(cpp_\w+)\(")
TEMPLATE_PREFIX = "triton_tem_"  # prefix of Triton's matrix products
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
PRODUCT = re.compile(r"conv|linear|mm|attention|lstm|gru|rnn", re.IGNORECASE)
IN_CPP = {"float": "float32", "half": "float16", "at::Half": "float16", "double": "float64"}
TYPE_PRECISIONS = {kind: precision for precision, kind in reversed(PRECISION_TYPES.items())}


def is_package(path: Path) -> bool:
    """Return whether the file is a package of compiled code rather than a program of torch.export."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False
    return any(map(COMPILED_MEMBER.search, names)) and not any(map(PROGRAM_MEMBER.search, names))


@dataclass(frozen=True)
class PackageInput:
    """One input: its type, its shape with names of free axes, and the range of the first axis (largest 0: no limit)."""

    dtype: str
    shape: tuple[int | str, ...]
    smallest: int = 1
    largest: int = 0
    channels_last: bool = False


@dataclass(frozen=True)
class KeptFacts:
    """Dyno's own entry in packages that it makes."""

    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    precision: str = "fp32"
    weights_sha256: str = ""
    parameters: int = 0
    purpose: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CompiledPackage:
    """A package's parts: the name of its model, the metadata, and its C++ sources."""

    name: str
    metadata: Mapping[str, str]
    source: str
    kernels: str

    @property
    def device(self) -> str:
        """The kind of device of the code: cpu or cuda."""
        return self.metadata.get("AOTI_DEVICE_KEY", "cpu")

    @cached_property
    def kept_facts(self) -> KeptFacts | None:
        """Dyno's entry in the package; None for another program's package."""
        try:
            return from_json(KeptFacts, json.loads(self.metadata[METADATA_KEY]))
        except (KeyError, ValueError, Misfit, UserError):
            return None

    @cached_property
    def inputs(self) -> tuple[PackageInput, ...]:
        """The inputs in order, according to the package's own checks."""
        checks = sorted((int(number), text) for number, text in INPUT_CHECK.findall(self.source))
        return tuple(_read_input(text) for _, text in checks)

    def describe_inputs(self, tensors: Sequence[Tensor]) -> dict[str, PackageInput]:
        """Return each input of the code by name; a package made by Dyno has one type for all floats."""
        if self.kept_facts is None:
            return {t.name: each for t, each in zip(tensors, self.inputs, strict=True)}
        kind = PRECISION_TYPES[self.kept_facts.precision]
        return {t.name: PackageInput(kind if t.dtype.startswith("float") else t.dtype, t.shape) for t in tensors}

    @property
    def threads(self) -> int | None:
        """The threads that the kernels were compiled for; None if they use all available ones."""
        counts = [int(n) for n in THREADS.findall(self.kernels + self.source)]
        return max(counts, default=None)

    @cached_property
    def constants(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of each weight by its name in the code."""
        matches = CONSTANT.findall(self.source)
        return {name: (kind, tuple(map(int, filter(str.strip, shape.split(","))))) for _, name, kind, shape in matches}

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Calls in the compiled function, to generated kernels and PyTorch's operators."""
        body = RUN_BODY.search(self.source)
        return tuple(_iter_calls(body[1], self)) if body else ()

    @cached_property
    def products(self) -> set[str]:
        """The package's own kernels that multiply matrices; other kernels may only arrange a library's inputs."""
        parts = self.kernels.split('extern "C"')
        return {name for part in parts if "gemm" in part.lower() for name in KERNEL.findall(part)}

    def count_types(self) -> dict[str, int]:
        """Return the number of layers by the type of their products."""
        return dict(Counter(layer.computes_in for layer in self.layers if layer.computes_in))

    def read_batches(self) -> tuple[int, int, int] | None:
        """Return the smallest, best and largest batch of the compiled code; None without a limit.

        The compiler may silently narrow a free batch: ShuffleNet's to 15. Dyno's own packages were run at batch 1.
        """
        inputs = [package_input for package_input in self.inputs if BATCH_AXIS in package_input.shape]
        largest = min((package_input.largest for package_input in inputs if package_input.largest), default=0)
        smallest = 1 if self.kept_facts else max((package_input.smallest for package_input in inputs), default=1)
        return (smallest, smallest, largest) if largest else None


def _read_input(text: str) -> PackageInput:
    """Read the compiler's check of one input."""
    kind = INPUT_TYPE.search(text)
    sizes: dict[int, int] = {int(axis): int(length) for length, axis in FIXED_SIZE_CHECK.findall(text)}
    smallest = {int(axis): int(n) for axis, n in MIN_SIZE_CHECK.findall(text)}
    largest = {int(axis): int(n) for axis, n in MAX_SIZE_CHECK.findall(text)}
    strides = {int(axis): int(n) for n, axis in STRIDE_CHECK.findall(text)}
    axes = [int(first or second) for first, second in READ_SIZE.findall(text)]
    names = [BATCH_AXIS, *(f"axis_{axis}" for axis in range(1, 1 + max(axes, default=0)))]
    shape = tuple(sizes.get(axis, names[axis]) for axis in range(1 + max(axes, default=-1)))
    is_channels_last = len(shape) == 4 and strides.get(1) == 1 != shape[1]
    return PackageInput(kind[1] if kind else "float32", shape, smallest.get(0, 1), largest.get(0, 0), is_channels_last)


def _iter_calls(body: str, package: CompiledPackage) -> Iterator[Layer]:
    """Yield the function's calls, each with its operators, its results and the type of its products, if any."""
    types = {name: kind for name, (kind, _) in package.constants.items()}
    lengths: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    nodes, operators = "", ""
    for line in body.splitlines():
        if match := ORIGIN.search(line):
            nodes, operators = match[1], match[2]
        elif match := LENGTHS.search(line):
            lengths[match[1]] = match[2]
        elif match := ALLOCATED.search(line):
            types[match[3]] = match[2]
            shapes[match[3]] = tuple(_read_length(n) for n in lengths.get(match[1], "").split(",") if n.strip())
        elif match := ALIAS.search(line):
            source = next((name for name in IDENTIFIER.findall(match[2]) if name in types), "")
            types |= {match[1]: types[source]} if source else {}
            shapes |= {match[1]: shapes[source]} if source in shapes and "reinterpret" not in line else {}
        elif match := LIBRARY_CALL.search(line):
            kind, dtype = match[1], _first_type(match[2], types)
            results = RESULT.findall(match[2])
            types |= dict.fromkeys(results, dtype)
            yield _make_layer(kind, "", nodes, dtype if PRODUCT.search(kind) else "", match[2], results, types, shapes)
            nodes = operators = ""
        elif match := OWN_CALL.search(line):
            pointers = [IN_CPP.get(kind, kind) for kind in POINTER.findall(match[2])]
            kind = next((kind for kind in pointers if kind in TYPE_PRECISIONS), "") or _first_type(match[2], types)
            dtype = kind if match[1] in package.products or match[1].startswith(TEMPLATE_PREFIX) else ""
            yield _make_layer(operators or match[1], match[1], nodes, dtype, match[2], [], types, shapes)
            nodes = operators = ""


def _make_layer(
    kind: str,
    kernel: str,
    nodes: str,
    computes_in: str,
    arguments: str,
    results: list[str],
    types: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> Layer:
    names = [name for name in dict.fromkeys(IDENTIFIER.findall(arguments)) if name.startswith(("buf", "arg"))]
    ports = [Port(name, shapes.get(name, ()), types.get(name, "")) for name in names]
    outputs = [Port(name, (), types.get(name, "")) for name in results] or ports[-1:]
    inputs = ports[: len(ports) - (not results)]
    return Layer(
        name=nodes or kernel or kind, type=kind, inputs=tuple(p for p in inputs if p.name not in results),
        outputs=tuple(outputs), computes_in=computes_in, tactic=kernel,
        nodes=tuple(filter(None, nodes.split(", "))),
    )  # fmt: skip


def _read_length(text: str) -> int:
    number = text.strip().rstrip("L")
    return int(number) if number.isdecimal() else -1


def _first_type(arguments: str, types: Mapping[str, str]) -> str:
    return next((types[name] for name in IDENTIFIER.findall(arguments) if name in types), "")


def read_package(path: str) -> CompiledPackage:
    """Return the package's parts; raise a `UserError` for a missing or damaged file."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            models = [match[1] for name in names if (match := COMPILED_MEMBER.search(name))]
            if not models:
                raise UserError(f"{path} has no compiled code of AOTInductor")
            members = [name for name in names if f"data/aotinductor/{models[0]}/" in name]
            texts = {n: archive.read(n).decode() for n in members if n.endswith((".cpp", "_metadata.json"))}
        metadata: dict[str, Any] = {}
        for name, text in texts.items():
            metadata |= json.loads(text) if name.endswith("_metadata.json") else {}
    except (OSError, zipfile.BadZipFile, ValueError, TypeError) as e:  # invalid text or JSON is a ValueError
        raise UserError(f"{path} is not a package that can be read: {e}") from e
    code = [text for name, text in sorted(texts.items()) if name.endswith(".cpp")]
    source = next((text for text in code if "AOTInductorModel::run_impl" in text), "")
    return CompiledPackage(models[0], metadata, source, "\n".join(text for text in code if text is not source))


def describe(path: str, package: CompiledPackage) -> FileContents:
    """Return the package's inputs, outputs and precision; for another program's package, inputs by its code."""
    if facts := package.kept_facts:
        purpose = file_facts.read_purpose(facts.purpose)
        return FileContents(
            facts.inputs,
            facts.outputs,
            facts.precision,
            package.read_batches(),
            purpose,
            parameters=facts.parameters or None,
        )
    if not package.inputs:
        raise UserError(f"{path} doesn't say which inputs it takes; make it again with `dyno export MODEL -o NAME.pt2`")
    inputs = tuple(
        Tensor(
            name, "float32" if TYPE_PRECISIONS.get(each.dtype) or each.dtype == "float64" else each.dtype, each.shape
        )
        for name, each in zip(numbered_names("input", len(package.inputs)), package.inputs, strict=True)
    )
    types = package.count_types()
    main_type = max(types, key=lambda kind: types[kind]) if types else package.inputs[0].dtype
    return FileContents(inputs, (), TYPE_PRECISIONS.get(main_type, "fp32"), package.read_batches())


def numbered_names(name: str, count: int) -> list[str]:
    """Return `input`, `input_1`, `input_2`…: names for nameless tensors."""
    return [f"{name}_{k}" if k else name for k in range(count)]


def list_layers(path: str) -> LayerGraph:
    """Return the package's calls as layers; raise a `UserError` for a package without its code."""
    package = read_package(path)
    if not package.layers:
        raise UserError(f"{path} was stored without its C++ code, so its layers can't be listed")
    shapes = {name: shape for name, (_, shape) in package.constants.items()}
    parameters = sum(map(math.prod, shapes.values()))
    note = "the type of the package's own kernels is the operators that they fuse"
    return LayerGraph(form=LAYERS, library="AOTInductor", parameters=parameters, layers=package.layers, notes=(note,))


def kept_metadata(facts: KeptFacts) -> dict[str, str]:
    """Return Dyno's entry for a package's metadata."""
    return {METADATA_KEY: json.dumps(to_json(facts))}
