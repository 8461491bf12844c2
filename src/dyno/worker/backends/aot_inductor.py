"""PyTorch compiled ahead of time by AOTInductor (`aoti`): packages that run without the module."""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker import system
from dyno.worker.backend import (
    Backend,
    FileContents,
    FileFormat,
    LayerTimes,
    Maker,
    Session,
    artifact_of,
    describe_given,
)
from dyno.worker.backends.aot_package import (
    CompiledPackage,
    KeptFacts,
    describe,
    is_package,
    kept_metadata,
    list_layers,
    read_package,
)
from dyno.worker.backends.pytorch import TORCH_TYPES, PyTorch, TorchSession, module_inputs
from dyno.worker.facts.engine import EngineFacts, precision_truth
from dyno.worker.facts.files import MakerFacts
from dyno.worker.facts.job import LayerGraph
from dyno.worker.inputs import input_data
from dyno.worker.inputs.specs import has_batch, static_shapes
from dyno.worker.nets import file_facts, models
from dyno.worker.option_values import Check, flag, one_of
from dyno.worker.sessions.torch_support import (
    allocator_peaks,
    cast,
    compiler_errors,
    configure,
    describe_outputs,
    describe_probe,
    device_named,
    import_torch,
    list_notes,
    make_positional,
    memory_errors,
    need_compiler,
    probe_processor,
    raise_refusals,
    refuse_script,
    silence_warnings,
)
from dyno.worker.spec import BATCH_AXIS, Artifact, DataSpec, Option, Recipe, Tensor, Trial, Unavailable, UserError

ENGINE_NAME = "AOTInductor"
INDUCTOR_MODES = {"default": {}, "max-autotune": {"max_autotune": True}}  # options of inductor
THREADS_KEY = "threads"  # recipe key: the number of threads is compiled in
EXAMPLE_BATCH, OTHER_BATCHES = 2, (1, 3)  # torch.export treats a batch of 0 or 1 as a constant
# Allowed errors at another batch, relative to the largest value; a study compares outputs more closely.
MAX_ERRORS = {"fp32": 1e-2, "tf32": 0.1, "fp16": 0.1, "bf16": 0.3}


class AotFormat(FileFormat):
    """A package of code compiled by AOTInductor for one kind of device; executable content, like an engine."""

    name = "aoti"
    suffixes = (".pt2",)
    backend = "aoti"

    def fits(self, path: Path) -> bool:
        return not path.is_file() or is_package(path)

    def recipe(self, trial: Trial) -> Recipe:
        """Return the recipe of a package for a CPU; for any batch if the trial's is 0."""
        if trial.options.get("opset") or trial.options.get("target", "onnxruntime") != "onnxruntime":
            raise UserError("--target and --opset are for ONNX files; omit them for a .pt2 package")
        trial = replace(trial, backend=AOTI.name, options={})
        if reason := AOTI.refuse(trial):
            raise UserError(reason)
        return AOTI.recipe(trial)

    def read(self, path: str, trial: Trial) -> FileContents:
        """Read the package's metadata and code, without PyTorch."""
        return describe(path, read_package(path))


AOTI_FORMAT = AotFormat()


class AotInductor(PyTorch):
    """torch.export and AOTInductor: compiled into a package for one device; `load` only opens it.

    Options: `static` (default on: compiled for the trial's batch; off: for any batch, impossible for some networks),
    `mode` (default, max-autotune) and `freeze` (default on for a CPU, as in `compile`).
    """

    name = "aoti"
    precisions = ("fp32", "tf32", "fp16", "bf16")
    profiled = ()
    builds_slowly = True
    options = ("static", "mode", "freeze")
    values: Mapping[str, Check] = {"static": flag, "mode": one_of(*INDUCTOR_MODES), "freeze": flag}
    files = AotFormat.suffixes

    def refuse(self, trial: Trial) -> str:
        """See `Backend.refuse`; a package has one precision and takes no options."""
        if reason := Backend.refuse(self, trial):
            return reason
        if not trial.model.file:
            return ""
        if trial.precision != trial.model.precision:
            return f"the package was compiled in {trial.model.precision}; {trial.precision} needs the model"
        return f"{next(iter(trial.options))} is fixed in a compiled package; omit it" if trial.options else ""

    def recipe(self, trial: Trial) -> Recipe:
        """Return the recipe of a package by `torch.export` from the module; a given package is used unchanged."""
        options: dict[str, Option] = {} if trial.model.file else self._choose_options(trial)
        is_static = options.pop("static", True)
        dims = trial.dims if is_static and not trial.model.file else replace(trial.dims, batch=0)
        return Recipe(
            self.name, AotFormat.name, trial.precision, trial.model, dims, options, runtime=trial.runtime
        )  # fmt: skip

    def _choose_options(self, trial: Trial) -> dict[str, Option]:
        self.check_options(trial.options)
        is_on_cpu = trial.runtime.device == "cpu"
        threads: dict[str, Option] = {THREADS_KEY: trial.runtime.threads} if is_on_cpu else {}
        return {"static": bool(trial.dims.batch), "mode": "default", "freeze": is_on_cpu, **trial.options, **threads}

    def _run_convolution(self, torch: Any, device: str) -> None:
        """Compile, open and run a package of one convolution."""
        need_compiler(ENGINE_NAME)
        inductor = _import_inductor()
        probe_processor()
        module, x = torch.nn.Conv2d(3, 4, 3).eval().to(device), torch.randn(1, 3, 8, 8, device=device)
        with tempfile.TemporaryDirectory() as scratch, torch.no_grad(), silence_warnings(), compiler_errors():
            program, path = torch.export.export(module, (x,), strict=False), Path(scratch) / "probe.pt2"
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
            _open_package(inductor, read_package(str(path)), path, torch.device(device)).run([x])[0].cpu()

    def prepare(self, trial: Trial) -> None:
        """Import PyTorch and the loader of packages."""
        import_torch()
        _import_inductor()

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        """Open the package on the trial's device."""
        if artifact is None:
            raise UserError(f"{self.name} runs a package that was compiled before")
        with memory_errors():
            return AotSession(trial, artifact)

    def layer_graph(self, trial: Trial, artifact: Artifact | None) -> LayerGraph:
        """Return the kernels that a given package calls, from its C++; they don't name a model's modules."""
        if not trial.model.file:
            raise Unavailable(
                f"{ENGINE_NAME}'s kernels don't name their modules; `dyno inspect PACKAGE.pt2` lists them alone"
            )
        return list_layers(artifact.path if artifact else trial.model.file)


AOTI = AotInductor()


class AotMaker(Maker):
    """A maker that exports and compiles a module, or describes a given package."""

    name = "aoti"
    requires = ("torch", "torchvision", "timm", "ultralytics")

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write FOLDER/model.pt2; raise `Unavailable` without a compiler, a `UserError` if the export fails.

        A package for any batch is compared with the module at two batches not used for the export.
        """
        if recipe.model.file:
            return _describe_given(recipe)
        need_compiler(ENGINE_NAME)
        torch, inductor = import_torch(), _import_inductor()
        probe_processor()
        began = time.perf_counter()
        threads = int(recipe.options.get(THREADS_KEY, recipe.runtime.threads))  # the compiler itself may use more
        runtime = replace(recipe.runtime, threads=threads)
        settings = Trial(recipe.model, self.name, recipe.precision, recipe.dims, runtime=runtime)
        device = device_named(torch, recipe.runtime.device)
        configure(torch, settings, benchmark=False)
        with memory_errors(), compiler_errors(), torch.no_grad(), silence_warnings():
            module = refuse_script(torch, models.load(recipe.model, recipe.dims))
            made_by = replace(self.describe(recipe), **models.describe_weights(module))
            class_names = models.read_purpose(recipe.model, module).class_names
            module = cast(module.to(device), TORCH_TYPES[recipe.precision])
            flat_module = make_positional(torch, module, recipe.model.inputs, flat=True)
            examples = [*_make_examples(torch, recipe, device)]
            expected = [_call(flat_module, feeds, recipe) for feeds in examples]
            program = _export(torch, flat_module, examples[0], recipe)
            facts = KeptFacts(
                _describe_inputs(recipe), _describe_outputs(expected), recipe.precision, made_by.weights_sha256,
                made_by.parameters or 0, file_facts.make_metadata(recipe.model, class_names),
            )  # fmt: skip
            path = _compile(program, facts, recipe, folder / "model.pt2")
            if _is_free(recipe):
                loader = _open_package(inductor, read_package(str(path)), path, device)
                for feeds, reference in zip(examples, expected, strict=True):
                    _check_outputs(loader.run([*feeds]), reference, recipe)
        return artifact_of(path, AotFormat.name, recipe.precision, (facts.inputs, facts.outputs), made_by, began)


AOTI_MAKER = AotMaker()


def _import_inductor() -> Any:
    """Import inductor with its packages; raise `Unavailable` if this PyTorch has none."""
    torch = import_torch()
    try:
        import torch._inductor.package as package
    except ImportError as e:
        raise Unavailable(f"PyTorch {torch.__version__} has no AOTInductor packages; install torch 2.7 or newer") from e
    return package


def _is_free(recipe: Recipe) -> bool:
    return not recipe.dims.batch and (has_batch(recipe.model.inputs) or not recipe.model.inputs)


def _list_tensors(recipe: Recipe, batch: int) -> tuple[Tensor, ...]:
    return module_inputs(recipe.model, replace(recipe.dims, batch=batch))


def _make_examples(torch: Any, recipe: Recipe, device: Any) -> Iterator[list[Any]]:
    """Yield random inputs in the package's type, beginning with those for the export."""
    is_free, model = _is_free(recipe), recipe.model
    batches = (EXAMPLE_BATCH, *OTHER_BATCHES) if is_free else (recipe.dims.batch or 1,)
    for seed, batch in enumerate(batches):
        dims, inputs = replace(recipe.dims, batch=batch), _list_tensors(recipe, batch)
        feeds = next(input_data.read_batches(DataSpec(seed=seed), model.preprocess, inputs, dims, 1, model.inputs))
        values = [torch.from_numpy(np.array(feeds[t.name])).to(device) for t in inputs]
        kind = getattr(torch, TORCH_TYPES[recipe.precision])
        yield [value.to(kind) if value.is_floating_point() else value for value in values]


def _call(module: Any, feeds: list[Any], recipe: Recipe) -> list[Any]:
    """Return the module's outputs; raise a `UserError` with the module's message if it refuses the inputs."""
    shapes = ", ".join("x".join(map(str, value.shape)) for value in feeds)
    with raise_refusals(f"{recipe.model.name} refuses {shapes} in {recipe.precision}"):
        return [output.clone() for output in module(*(value.clone() for value in feeds))]


def _export(torch: Any, module: Any, feeds: list[Any], recipe: Recipe) -> Any:
    """Return the program of torch.export, with a free batch if the recipe has one."""
    options: dict[str, Any] = {}
    if _is_free(recipe):
        batch = torch.export.Dim(BATCH_AXIS)
        specs = [spec for spec in recipe.model.inputs if spec.dtype]
        axes = [spec.shape.index(BATCH_AXIS) if BATCH_AXIS in spec.shape else None for spec in specs] if specs else [0]
        options["dynamic_shapes"] = (tuple({} if axis is None else {axis: batch} for axis in axes),)
    advice = "give static=true" if options else "measure it with --backend pytorch,compile"
    with raise_refusals(f"torch.export can't export {recipe.model.name}", f"; {advice}"):
        return torch.export.export(module, tuple(feeds), strict=False, **options)


def _compile(program: Any, facts: KeptFacts, recipe: Recipe, path: Path) -> Path:
    from torch._inductor import aoti_compile_and_package

    mode = INDUCTOR_MODES[str(recipe.options.get("mode", "default"))]
    settings = {**mode, "freezing": bool(recipe.options.get("freeze")), "aot_inductor.metadata": kept_metadata(facts)}
    return Path(aoti_compile_and_package(program, package_path=str(path), inductor_configs=settings))


def _describe_inputs(recipe: Recipe) -> tuple[Tensor, ...]:
    """Return the inputs, with the batch's name at free axes."""
    if not _is_free(recipe):
        return _list_tensors(recipe, recipe.dims.batch or 1)
    pairs = zip(_list_tensors(recipe, EXAMPLE_BATCH), _list_tensors(recipe, OTHER_BATCHES[-1]), strict=True)
    return tuple(replace(a, shape=_free_axes(a.shape, b.shape)) for a, b in pairs)


def _describe_outputs(expected: list[list[Any]]) -> tuple[Tensor, ...]:
    first, last = expected[0], expected[-1]
    shapes = [_free_axes(tuple(a.shape), tuple(b.shape)) for a, b in zip(first, last, strict=True)]
    tensors = describe_outputs(first)
    return tuple(replace(t, shape=shape) for t, shape in zip(tensors, shapes, strict=True))


def _free_axes(shape: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[int | str, ...]:
    """Return the shape with the batch's name at axes that depend on it."""
    return tuple(a if a == b else BATCH_AXIS for a, b in zip(shape, other, strict=True))


def _check_outputs(actual: list[Any], expected: list[Any], recipe: Recipe) -> None:
    """Raise a `UserError` if the outputs of a package with a free batch differ from the module's."""
    for output, reference in zip(actual, expected, strict=True):
        if output.shape == reference.shape:
            scale = float(reference.float().abs().max()) if reference.numel() else 0.0
            error = float((output.float() - reference.float()).abs().max()) if reference.numel() else 0.0
            if not error > MAX_ERRORS[recipe.precision] * scale:  # NaN is the module's, and reported elsewhere
                continue
        shape = "x".join(map(str, reference.shape))
        reason = f"the package for any batch gives other outputs than {recipe.model.name} for {shape}"
        raise UserError(f"{reason}; give static=true")


def _describe_given(recipe: Recipe) -> Artifact:
    artifact = describe_given(AOTI_FORMAT, recipe, MakerFacts(backend=AotMaker.name))
    if facts := read_package(recipe.model.file).kept_facts:
        return replace(artifact, made_by=replace(artifact.made_by, weights_sha256=facts.weights_sha256))
    return artifact


def _open_package(inductor: Any, package: CompiledPackage, path: Path, device: Any, runners: int = 1) -> Any:
    """Return the package's loader on that device; raise an error if its code can't run there."""
    if package.device != device.type:
        raise UserError(f"the package was compiled for {package.device}, not {device.type}; choose another --device")
    isa = package.metadata.get("AOTI_CPU_ISA", "")
    if device.type == "cpu" and isa.lower().startswith(("avx512", "amx")) and not _has_isa(isa):
        raise Unavailable(f"the package was compiled for processors with {isa}, which this one lacks")
    index = -1 if device.type == "cpu" else device.index or 0
    # Some compilers link libstdc++ into each package. The shared one must take its place: two in one process crash, in
    # std::regex while the package opens.
    with suppress(OSError):  # no library of this name
        ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)
    version, advice = import_torch().__version__, "; if another version compiled it, compile it again with this one"
    with raise_refusals(f"{path.name} can't be loaded by this PyTorch ({version})", advice):
        return inductor.load_package(str(path), package.name, num_runners=runners, device_index=index).loader


def _has_isa(name: str) -> bool:
    flags = system.describe()["cpu_flags"]
    return any(flag in flags for flag in (("amx_tile", "amx") if "amx" in name.lower() else ("avx512f", "avx512")))


class AotSession(TorchSession):
    """An opened package: inputs are bound as a module's, and calls go to the compiled code."""

    def __init__(self, trial: Trial, artifact: Artifact) -> None:
        self._artifact = artifact
        self._package = read_package(artifact.path)
        self._described = self._package.describe_inputs(artifact.inputs)
        limits = self._package.read_batches()
        if limits and not limits[0] <= trial.dims.batch <= limits[-1]:
            reason = f"compiled for batches {limits[0]} to {limits[-1]}, not {trial.dims.batch}"
            raise UserError(f"the package is {reason}; give static=true")
        super().__init__(trial, {"channels_last": False, "cudnn_benchmark": False, **trial.options})

    def _load_module(self) -> tuple[Any, dict[str, Any]]:
        return None, self._artifact.made_by.set_fields(models.WEIGHT_FACTS)

    def _list_inputs(self) -> tuple[Tensor, ...]:
        shapes = static_shapes(self._artifact.inputs, self._trial.dims)
        return tuple(replace(t, shape=shapes[t.name]) for t in self._artifact.inputs)

    def _allocate_tensor(self, tensor: Tensor, dtype: Any) -> Any:
        package_input = self._described[tensor.name]
        values = super()._allocate_tensor(tensor, getattr(self._torch, package_input.dtype))
        return values.to(memory_format=self._torch.channels_last) if package_input.channels_last else values

    def _make_callable(self, dtype: Any) -> Callable[..., Any]:
        """Return the package's code as a function of the slot's tensors, with a runner per slot."""
        path = Path(self._artifact.path)
        self._probe_s = probe_processor()  # even for a GPU: opening compares the processors
        loader = _open_package(_import_inductor(), self._package, path, self._device, self.slots)
        return lambda *values: loader.run([*values])

    def facts(self) -> EngineFacts:
        """Return the package's calls, the types of their products, and the threads that it was compiled for."""
        types, calls = self._package.count_types(), self._package.layers
        own_threads = self._package.threads if not self._on_gpu else None
        threads = self._trial.runtime.threads
        notes = [f"the package was compiled for {own_threads} threads; its own kernels keep to that, not to {threads}"]
        return EngineFacts(
            **self._weights,
            options={**self._trial.options, "device": self._package.device},
            threads=own_threads or self._torch.get_num_threads(),
            layers=len(calls) or None,
            layers_by_type=types,
            precision_truth=precision_truth(self._trial.precision, types, ENGINE_NAME),
            notes=(
                *list_notes(self._trial),
                *(notes if own_threads not in (None, threads) else ()),
                *describe_probe(self._probe_s),
            ),
            **allocator_peaks(self._torch, self._device),
        )

    def profile(self, runs: int) -> LayerTimes:
        raise Unavailable(f"{ENGINE_NAME}'s packages report no kernel times")

    def run_for_counters(self) -> None:
        raise Unavailable(f"{ENGINE_NAME}'s kernels can't be told apart for hardware counters")
