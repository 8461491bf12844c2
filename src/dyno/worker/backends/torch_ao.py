"""PyTorch quantised by torchao and compiled by inductor (`torchao`): INT8, and on NVIDIA GPUs FP8 and INT4."""

from __future__ import annotations

import inspect
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dyno.worker import system
from dyno.worker.backend import Maker, Session, artifact_of
from dyno.worker.backends.pytorch import PyTorch, module_inputs, weight_type
from dyno.worker.backends.torch_compile import COMPILE_MODES, CompiledSession
from dyno.worker.extras import install, load_library
from dyno.worker.facts.engine import UNKNOWN_TYPE, EngineFacts, Probe, precision_truth
from dyno.worker.inputs.calibration import calibration_data, calibration_of, missing_data
from dyno.worker.nets import models, saved_modules
from dyno.worker.option_values import Check, flag, one_of, whole
from dyno.worker.sessions.torch_support import (
    describe_outputs,
    import_torch,
    make_positional,
    memory_errors,
    need_compiler,
    raise_refusals,
    refuse_script,
    settings_kept,
    silence_warnings,
)
from dyno.worker.spec import Artifact, Recipe, Runtime, Tensor, Trial, UserError

# Without these flags a processor adds 8-bit products in 16 bits, which overflow: inductor's fused layers were off by
# half of their largest output. Then calibration leaves activations seven bits, as torchao advises, and other schemes
# run unfused.
WIDE_SUM_FLAGS = {"avx512_vnni", "avx_vnni", "amx_int8"}
STATIC_SCHEME, DYNAMIC_SCHEME, WEIGHTS_SCHEME = "static", "dynamic", "weights"
NARROW_SUM_WARNING = (
    "without VNNI INT8 sums overflow, so activations were calibrated to seven bits",
    "without VNNI INT8 sums overflow, so inductor's fused INT8 layers are not used",
)
CONFIG_CLASSES = {
    ("int8", DYNAMIC_SCHEME): "Int8DynamicActivationInt8WeightConfig",
    ("int8", WEIGHTS_SCHEME): "Int8WeightOnlyConfig",
    ("fp8", DYNAMIC_SCHEME): "Float8DynamicActivationFloat8WeightConfig",
    ("int4", WEIGHTS_SCHEME): "Int4WeightOnlyConfig",
}
DEFAULT_SCHEMES = {"int8": DYNAMIC_SCHEME, "fp8": DYNAMIC_SCHEME, "int4": WEIGHTS_SCHEME}  # without calibration
DEFAULT_GROUP = 128
GROUP_SIZES = (32, 64, 128, 256)  # int4 weights per scale
MIN_GPU_ROWS = 17  # fewest rows of PyTorch's INT8 product on a GPU
TILED_PACKING = "tile_packed_to_4d"  # layout of PyTorch's own int4 kernels; the default layout needs another library
PROGRAM_FORMAT = "torch_export"  # format of the quantised program
QUANTISED_OPERATORS = {
    "int8": re.compile(r"::(?:qconv|qlinear|_int_mm|int8_|_scaled_int8)|^triton_tem.*_int_mm"),
    "float8": re.compile(r"::_scaled_mm|^triton_tem.*_scaled_mm"),
    "int4": re.compile(r"::_weight_int4pack_mm"),
}
TEMPLATE_PREFIX = "triton_tem"  # prefix of inductor's matrix kernels
PRODUCT_OPERATOR = re.compile(r"conv|linear|mm\b|mm_|_mm|addmm|attention|lstm|gru|einsum")
MOVE_OPERATOR = re.compile(r"prepack|reorder|pack_weight|::t$|convert")


class TorchAO(PyTorch):
    """torchao's quantised module behind torch.compile; only torchao quantises weights and activations.

    Options: `scheme` (static: calibrated, by the X86InductorQuantizer; dynamic: linear layers, activations quantised at
    run time; weights: linear layers, only weights), `samples` of the calibration, `group` (int4 weights per scale),
    `search` (bool: the search for fast kernels recommended by torchao), `mode` as in `compile`.
    """

    name = "torchao"
    compiles = True
    requires = ("torch", "torchao")
    precisions = ("int8", "fp8", "int4")
    profiled = ()
    options = ("scheme", "samples", "group", "search", "mode")
    values: Mapping[str, Check] = {
        "scheme": one_of(STATIC_SCHEME, DYNAMIC_SCHEME, WEIGHTS_SCHEME), "samples": whole(1),
        "group": one_of(*GROUP_SIZES), "search": flag, "mode": one_of(*COMPILE_MODES),
    }  # fmt: skip

    def refuse(self, trial: Trial) -> str:
        """See `Backend.refuse`; a static scheme is for CPUs and needs calibration data."""
        if reason := super().refuse(trial):
            return reason
        scheme, options, is_on_cpu = scheme_of(trial), trial.options, trial.runtime.device == "cpu"
        if trial.precision != "int8" and is_on_cpu:
            return f"torchao's {trial.precision} is for NVIDIA GPUs; on a CPU give int8"
        if scheme == STATIC_SCHEME and not is_on_cpu:
            return "scheme=static is for CPUs (X86InductorQuantizer); give scheme=dynamic or scheme=weights"
        if scheme != STATIC_SCHEME and (trial.precision, scheme) not in CONFIG_CLASSES:
            return f"torchao's {trial.precision} has scheme={DEFAULT_SCHEMES[trial.precision]} alone; omit scheme"
        if "samples" in options and scheme != STATIC_SCHEME:
            return "samples is for scheme=static, which is calibrated"
        if "group" in options and trial.precision != "int4":
            return "group is for int4, whose weights share scales in groups"
        if "search" in options and scheme == STATIC_SCHEME:
            return "search is for scheme=dynamic and scheme=weights"
        return missing_data(trial) if scheme == STATIC_SCHEME else ""

    def recipe(self, trial: Trial) -> Recipe | None:
        """Return the recipe of the calibrated program at the trial's batch; other schemes need no file."""
        if scheme_of(trial) != STATIC_SCHEME:
            return None
        options = {name: trial.options[name] for name in ("samples",) if name in trial.options}
        runtime = Runtime(name=trial.runtime.name, python=trial.runtime.python, env=trial.runtime.env)
        data = calibration_data(trial)
        return Recipe(self.name, PROGRAM_FORMAT, "int8", trial.model, trial.dims, options, data, runtime=runtime)

    def probe(self) -> Probe:
        """Quantise one linear layer and run it."""
        need_compiler()
        torch, quantization = import_torch(), import_torchao()
        layer = torch.nn.Sequential(torch.nn.Linear(32, 32)).eval()
        with torch.no_grad(), silence_warnings():
            quantization.quantize_(layer, getattr(quantization, CONFIG_CLASSES["int8", DYNAMIC_SCHEME])())
            layer(torch.randn(2, 32))
        devices = ("cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count())))
        version = system.find_versions(("torchao",)).get("torchao", "")
        return Probe(version=version, devices=devices, detail=f"with torch {torch.__version__}")

    def prepare(self, trial: Trial) -> None:
        """Import both libraries and the model's."""
        super().prepare(trial)
        import_torchao()

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        """Compile the quantised module; its seconds are `build_s` in the session's facts."""
        need_compiler()
        with memory_errors():
            return TorchAOSession(trial, self.checked(trial), artifact)

    def checked(self, trial: Trial) -> dict[str, Any]:
        """See `PyTorch.checked`."""
        is_on_cpu, scheme = trial.runtime.device == "cpu", scheme_of(trial)
        is_fused = is_on_cpu and (scheme == STATIC_SCHEME or _has_wide_sums())
        defaults = {"mode": "default", "freeze": is_fused, "scheme": scheme}
        defaults |= {"search": True} if scheme != STATIC_SCHEME else {}
        defaults |= {"group": DEFAULT_GROUP} if trial.precision == "int4" else {}
        return {**defaults, **super().checked(trial), "channels_last": not is_on_cpu}


TORCHAO = TorchAO()


def _has_wide_sums() -> bool:
    """Return whether the processor adds 8-bit products in 32 bits; True if its features aren't listed."""
    flags = system.cpu_flags()
    return not flags or bool(flags & WIDE_SUM_FLAGS)


def scheme_of(trial: Trial) -> str:
    """Return the trial's scheme; the default is static on a CPU, and the precision's on a GPU."""
    return str(
        trial.options.get(
            "scheme", STATIC_SCHEME if trial.runtime.device == "cpu" else DEFAULT_SCHEMES[trial.precision]
        )
    )


def config_of(trial: Trial, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and arguments of torchao's configuration for a non-static scheme."""
    name = CONFIG_CLASSES[trial.precision, scheme_of(trial)]
    parameters = inspect.signature(getattr(import_torchao(), name)).parameters
    arguments = {"set_inductor_config": options["search"]}
    if trial.precision == "int4":
        arguments |= {"group_size": options["group"], "int4_packing_format": TILED_PACKING}
    return name, {key: value for key, value in arguments.items() if key in parameters}


def import_torchao(module: str = "") -> Any:
    """Import `torchao.quantization` or a submodule; raise `Unavailable` with the version that fits this PyTorch."""
    cure = f"for torch {import_torch().__version__}: {install('torchao')}"
    with silence_warnings():
        return load_library(f"torchao.quantization{module}", cure=cure)


class TorchAOMaker(Maker):
    """A maker that calibrates a module with torchao's PT2E flow and stores the quantised program."""

    name = "torchao"
    compiles = True
    requires = ("torch", "torchao", "torchvision", "timm", "ultralytics")

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write FOLDER/model.pt2; raise a `UserError` if torch.export or the quantiser refuses the module."""
        began, torch = time.perf_counter(), import_torch()
        x86 = import_torchao(".pt2e.quantizer.x86_inductor_quantizer")
        torch.set_num_threads(recipe.runtime.threads)
        with memory_errors(), torch.no_grad(), silence_warnings():
            module = refuse_script(torch, models.load(recipe.model, recipe.dims))
            weights = models.describe_weights(module)
            flat_module = make_positional(torch, module, recipe.model.inputs, flat=True)
            inputs = module_inputs(recipe.model, recipe.dims)
            data = calibration_of(recipe, Artifact(PROGRAM_FORMAT, "", "", 0, "fp32", inputs, (), 0.0))
            example = _as_tensors(torch, inputs, next(data.feeds(0, 1)))
            config = x86.get_default_x86_inductor_quantization_config(reduce_range=not _has_wide_sums())
            quantiser = _make_quantiser(x86.X86InductorQuantizer).set_global(config)
            # The quantiser finds layers only by the sources kept in a strict export.
            program = _export(torch, flat_module, example, recipe, strict=True)
            with raise_refusals(f"torchao can't quantise {recipe.model.name}", "; give scheme=dynamic"):
                quantised_module = quantise_program(program, quantiser, inputs, data)
            program = _export(torch, quantised_module, example, recipe)
            outputs = describe_outputs(quantised_module(*example))
            path = folder / "model.pt2"
            torch.export.save(program, path)
        calibration = replace(data.facts, method="histogram")
        made_by = replace(self.describe(recipe), calibration=calibration, warnings=tuple(data.warnings), **weights)
        return artifact_of(path, PROGRAM_FORMAT, "int8", (inputs, outputs), made_by, began)


TORCHAO_MAKER = TorchAOMaker()


def _make_quantiser(base: Any) -> Any:
    """Return an X86InductorQuantizer that skips sums with a number (`conv(x) + 3`), on which the original fails."""

    class X86Quantiser(base):  # type: ignore[misc]
        def _get_input_idx_for_binary_node(self, product: Any, binary: Any) -> tuple[int | None, int | None]:
            has_tensors = all(hasattr(value, "op") for value in binary.args[:2])
            return super()._get_input_idx_for_binary_node(product, binary) if has_tensors else (None, None)

    return X86Quantiser()


def quantise_program(program: Any, quantiser: Any, inputs: Sequence[Tensor], data: Any) -> Any:
    """Return the exported module with a PT2E quantiser's Q/DQ pairs, calibrated on all of the data."""
    torch, pt2e = import_torch(), import_torchao(".pt2e.quantize_pt2e")
    graph = pt2e.prepare_pt2e(program.module(), quantiser)
    for feeds in data.feeds(0, len(data)):
        graph(*_as_tensors(torch, inputs, feeds))
    return pt2e.convert_pt2e(graph)


def _as_tensors(torch: Any, inputs: Sequence[Tensor], feeds: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(torch.from_numpy(feeds[t.name].astype(t.dtype, copy=True)) for t in inputs)


def _export(torch: Any, module: Any, example: tuple[Any, ...], recipe: Recipe, strict: bool = False) -> Any:
    with raise_refusals(f"torch.export can't export {recipe.model.name}", "; give scheme=dynamic"):
        return torch.export.export(module, example, strict=strict)


class TorchAOSession(CompiledSession):
    """A quantised module behind torch.compile; one watched run shows the types of its products."""

    def __init__(self, trial: Trial, options: dict[str, Any], artifact: Artifact | None) -> None:
        self._artifact = artifact
        self._notes: tuple[str, ...] = ()
        self._rows: dict[Any, int] = {}  # smallest number of input rows by linear layer
        super().__init__(trial, options)

    def _load_module(self) -> tuple[Any, dict[str, Any]]:
        if self._artifact is None:
            return super()._load_module()
        import_torchao(".pt2e.quantize_pt2e")  # registers the operators of quantised programs
        return saved_modules.load(self._artifact.path), self._artifact.made_by.set_fields(models.WEIGHT_FACTS)

    def _make_callable(self, dtype: Any) -> Callable[..., Any]:
        """Return the module as a function of the slot's tensors; inductor fuses a program's Q/DQ pairs."""
        function: Callable[..., Any] = self._module if self._artifact is not None else super()._make_callable(dtype)
        return function

    def try_eager(self) -> None:
        """Run the module before quantisation, counting the rows of each linear layer's input."""

        def count_rows(layer: Any, inputs: tuple[Any, ...]) -> None:
            for tensor in inputs:  # empty if passed by keyword
                rows = tensor.numel() // max(tensor.shape[-1], 1)
                self._rows[layer] = min(rows, self._rows.get(layer, rows))

        hooks = [layer.register_forward_pre_hook(count_rows) for layer in self._list_linear_layers()]
        super().try_eager()
        for hook in hooks:
            hook.remove()

    def _list_linear_layers(self) -> list[Any]:
        if self._artifact is not None:
            return []
        return [layer for layer in self._module.modules() if isinstance(layer, self._torch.nn.Linear)]

    def _takes_kernel(self, layer: Any, name: str = "") -> bool:
        """Return whether a layer is to be quantised: not inside PyTorch's own attention, and not with few rows."""
        linear = self._torch.nn.modules.linear
        is_own = isinstance(layer, linear.Linear) and not isinstance(layer, linear.NonDynamicallyQuantizableLinear)
        return is_own and not self._has_few_rows(layer)

    def _has_few_rows(self, layer: Any) -> bool:
        is_dynamic_int8 = self._on_gpu and self._trial.precision == "int8" and self._options["scheme"] == DYNAMIC_SCHEME
        return is_dynamic_int8 and self._rows.get(layer, MIN_GPU_ROWS) < MIN_GPU_ROWS

    def _quantise_module(self) -> None:
        quantization, trial, layers = import_torchao(), self._trial, self._list_linear_layers()
        if not layers:
            raise UserError(f"{trial.model.name} has no linear layer, which scheme={scheme_of(trial)} quantises")
        name, arguments = config_of(trial, self._options)
        config = getattr(quantization, name)(**arguments)
        refusals = raise_refusals(f"torchao can't quantise {trial.model.name} to {trial.precision}")
        with (
            refusals,
            settings_kept(self._torch),
            self._torch.no_grad(),
            silence_warnings(),
        ):  # older versions turn TF32 on
            quantization.quantize_(self._module, config, self._takes_kernel)
        plain_layers = [layer for layer in layers if not hasattr(layer.weight, "__tensor_flatten__")]
        shapes = Counter(" x ".join(map(str, layer.weight.shape)) for layer in plain_layers)
        summary = ", ".join(f"{count} of {shape}" for shape, count in shapes.items())
        if any(map(self._has_few_rows, plain_layers)):
            summary += f" (PyTorch's INT8 product takes {MIN_GPU_ROWS} rows or more: give a larger batch)"
        if len(plain_layers) == len(layers):
            raise UserError(f"torchao quantises no linear layer of {trial.model.name} to {trial.precision}: {summary}")
        if plain_layers:
            names = {layer: name for name, layer in self._module.named_modules()}
            self._options["unquantised"] = [names[layer] for layer in plain_layers]
            self._notes = (f"torchao left {len(plain_layers)} of {len(layers)} linear layers unquantised: {summary}",)

    def _compile_module(self, calls: int) -> None:
        if self._artifact is None:
            self._quantise_module()
        # Some of torchao's tensors have operators that dynamo can't trace.
        scheme = self._options["scheme"]
        with raise_refusals(f"{self._trial.model.name} can't be compiled as torchao's scheme={scheme} makes it"):
            super()._compile_module(calls)

    def facts(self) -> EngineFacts:
        """Return the compilation's facts, and the types of one run's products."""
        types = self._watch_types()
        warnings = () if _has_wide_sums() or self._on_gpu else (NARROW_SUM_WARNING[self._artifact is None],)
        made_by = self._artifact.made_by if self._artifact else None
        return replace(
            super().facts(),
            layers_by_type=types,
            precision_truth=precision_truth(self._trial.precision, types or {UNKNOWN_TYPE: 1}, "torchao"),
            calibration=made_by.calibration if made_by else None,
            notes=(*self._notes, *warnings),
        )

    def _watch_types(self) -> dict[str, int]:
        """Return the number of a run's convolutions and matrix products by type; only outermost calls count."""
        profiler = self._torch.profiler
        with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as recording:
            self._run_once()
        return count_types(recording.events(), weight_type(self._trial))


def count_types(events: Sequence[Any], default_type: str = "float32") -> dict[str, int]:
    """Return the number of products among the profiler's events by type; of nested ones the outermost counts.

    4-bit weights count as int4, though their kernel multiplies in bfloat16.
    """
    products = [event for event in events if _is_product(event.name)]
    outer = [event for event in products if not _is_inside(event, products)]
    return dict(Counter(_find_type(event.name) or default_type for event in outer))


def _find_type(name: str) -> str:
    return next((kind for kind, names in QUANTISED_OPERATORS.items() if names.search(name)), "")


def _is_product(name: str) -> bool:
    if name.startswith(TEMPLATE_PREFIX):
        return True
    return "::" in name and bool(_find_type(name) or PRODUCT_OPERATOR.search(name)) and not MOVE_OPERATOR.search(name)


def _is_inside(event: Any, events: list[Any]) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if any(parent is other for other in events):
            return True
        parent = parent.cpu_parent
    return False
