"""The study: options or a TOML file, which become a list of comparable trials.

One study compares runs of the same weights on the same input bytes at the same boundaries. Incomparable trials become
rows with a reason.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import signal
import sys
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dyno.study.options import (
    ClusterOptions,
    ComparisonOptions,
    DataOptions,
    MeasurementOptions,
    ModelOptions,
    RuntimeOptions,
    describe_fields,
    settings,
)
from dyno.worker import tasks
from dyno.worker.jobs.turns import MIN_BLOCKS
from dyno.worker.option_values import MAX_EXACT_INTEGER, check_positive, check_range, check_types, native, several
from dyno.worker.record import check_regular
from dyno.worker.spec import (
    ADAPTIVE_RULES,
    BOUNDARIES,
    DECIDED,
    DEFAULT_ROUNDS,
    FIXED,
    PRECISIONS,
    Option,
    Plan,
    UserError,
    check_known,
    check_utf8,
    usual_name,
)

MAX_PIXEL_VALUE = 2.0  # mean and std of an image; values for pixels of 0 to 255 are larger
MAX_ROUNDS, MAX_BATCH, MAX_SIZE = 10_000, 2**31 - 1, 1_000_000  # MAX_SIZE is pixels of a side
# Ranges of integer fields.
FIELD_RANGES = {
    "rounds": (1, MAX_ROUNDS), "builds": (1, MAX_ROUNDS), "confirm": (0, MAX_ROUNDS), "compared": (1, 10_000_000),
    "channels": (1, MAX_SIZE), "classes": (1, MAX_BATCH), "samples": (0, 100_000_000), "threads": (0, 10_000),
    "seed": (0, MAX_EXACT_INTEGER),
}  # fmt: skip
# Fields with several values, by singular name.
SINGULAR_FIELDS = {
    "model": "models",
    "backend": "backends",
    "precision": "precisions",
    "batch": "batches",
    "size": "sizes",
}
CAN_INTERLEAVE = hasattr(signal, "SIGSTOP")  # interleaving suspends processes
DEFAULT_CONFIRMATIONS = 3  # of a winner, if the study has a budget
DEFAULT_SUSTAINED_S, MAX_SUSTAINED_S = 5.0, 60.0
MIN_BUILD_S = 60.0  # least time for making a file, whatever --minutes
# fields with several values
LIST_FIELDS = "models backends precisions batches sizes shapes inputs mean std boundaries".split()
# fields that may differ between the sides of a comparison
BASELINE_FIELDS = ("models", "weights", "pretrained", "runtime")
RESERVED_OPTIONS = ("precision", "runtime", "rounds")  # options that select or place trials


@dataclass(frozen=True)
class Choice:
    """A requested backend, `NAME@option=value@…`; `precision`, `runtime` and `rounds` are Dyno's own options."""

    name: str
    options: dict[str, Option] = field(default_factory=dict)
    precisions: tuple[str, ...] = ()
    runtime: str = ""
    rounds: int = 0

    @property
    def text(self) -> str:
        """Notation of the choice, as read by `parse`."""
        options: dict[str, Option] = {**self.options}
        options |= {"precision": "+".join(self.precisions)} if self.precisions else {}
        options |= {"runtime": self.runtime} if self.runtime else {}
        options |= {"rounds": self.rounds} if self.rounds else {}
        return self.name + "".join(f"@{key}={str(value).lower() if isinstance(value, bool) else value}"
                                   for key, value in options.items())  # fmt: skip

    @classmethod
    def parse(cls, text: str) -> Choice:
        """Parse `compile@mode=max-autotune` or `onnxruntime@runtime=old`; `UserError` for a broken option."""
        name, *parts = text.split("@")
        values: dict[str, str] = {}
        for part in parts:
            key, equals, value = part.partition("=")
            if not (key and equals and value):
                raise UserError(f"backend option {part!r} in {text!r} is not NAME=VALUE")
            if key in values:
                raise UserError(f"option {key} is given twice in {text!r}; give it once")
            values[key] = value
        precisions = tuple(map(usual_name, values["precision"].split("+"))) if "precision" in values else ()
        options = {key: _parse_value(value) for key, value in values.items() if key not in RESERVED_OPTIONS}
        rounds = values.get("rounds", "")
        if rounds and not (rounds.isdecimal() and 1 <= int(rounds) <= MAX_ROUNDS):
            raise UserError(f"rounds={rounds} in {text!r} is not a whole number from 1 to {MAX_ROUNDS:,}")
        return cls(name, options, precisions, values.get("runtime", ""), int(rounds or 0))


def _parse_value(text: str) -> Option:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@settings
class Study(RuntimeOptions, ClusterOptions, MeasurementOptions, DataOptions, ModelOptions, ComparisonOptions):
    """Models x backends x precisions x batches x sizes, and how to measure them.

    In Python a model may also be a path, a module, or a pair of a module and its example inputs; the last two are
    stored in the cache.

    {fields}
    """

    def __post_init__(self) -> None:
        for name in LIST_FIELDS:
            object.__setattr__(self, name, _make_tuple(getattr(self, name)))
        for name, value in list(vars(self).items()):
            if name not in ("models", "baseline"):  # may hold modules and tensors
                object.__setattr__(self, name, native(value))
        object.__setattr__(self, "sizes", tuple(str(size) for size in self.sizes))
        object.__setattr__(self, "precisions", tuple(map(usual_name, self.precisions)))
        object.__setattr__(self, "backends", tuple(map(_name_backend, self.backends)))
        object.__setattr__(self, "models", tuple(_name_source(model, self) for model in self.models))
        check_types({"baseline": self.baseline}, {"baseline": dict[str, Any]})
        object.__setattr__(
            self, "baseline", {name: self._convert_baseline(name, self.baseline[name]) for name in self.baseline}
        )
        object.__setattr__(self, "routes", _make_tuple(self.routes))
        self._settle_options()
        check_types(vars(self), typing.get_type_hints(type(self)))
        object.__setattr__(self, "boundaries", tuple(dict.fromkeys(self.boundaries)))
        self._check_options()

    def _settle_options(self) -> None:
        """Fill in open settings: a requested number of rounds is fixed, else rounds continue until decided."""
        has_rounds = self.rounds is not None
        default_rounds = max(DEFAULT_ROUNDS, self.builds) if isinstance(self.builds, int) else DEFAULT_ROUNDS
        object.__setattr__(self, "rounds", self.rounds if has_rounds else default_rounds)
        object.__setattr__(self, "until", self.until or (FIXED if has_rounds else DECIDED))
        if self.turns is None:  # for processes that measure alone
            is_alone = self.samples or self.interval != Plan.interval
            object.__setattr__(self, "turns", CAN_INTERLEAVE and not is_alone)

    def _convert_baseline(self, name: str, value: Any) -> Any:
        """Return a value of the baseline as in a study file."""
        check_known("baseline", name, BASELINE_FIELDS)
        return [_name_source(model, self) for model in _make_tuple(value)] if name == "models" else native(value)

    def _check_options(self) -> None:
        if self.baseline:
            _ = self.sides
        self._check_names()
        self._check_numbers()
        self._check_together()

    def _check_names(self) -> None:
        """Raise `UserError` for an unusable word, path or table."""
        if not self.models:
            raise UserError("no model given; name one, e.g. torchvision:resnet18 or model.onnx")
        for text in (*self.models, *self.inputs, self.data, self.weights, self.calibration):
            check_utf8(text)
        for name in (*self.precisions, *(p for b in self.backends for p in Choice.parse(b).precisions)):
            check_known("precision", name, PRECISIONS)
        for name in self.boundaries:
            check_known("boundary", name, BOUNDARIES)
        for name, points in self.budget.items():
            check_known("budget", name, tasks.list_metrics())
            if not 0 <= points <= 100:
                raise UserError(f"budget {name}={points:g} must be between 0 and 100 points, e.g. {name}=0.5")
        if self.task:
            tasks.find_task(self.task)
        check_known("unreadable", self.unreadable, ("refuse", "skip"))
        for size in self.sizes:
            parse_size(size)
        _check_runtimes(self.runtime)
        if self.shapes:
            from dyno.study import input_options

            input_options.parse_shapes(self.shapes)

    def _check_numbers(self) -> None:
        """Raise `UserError` for a number out of its range."""
        for name, (low, high) in FIELD_RANGES.items():
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), low, high)
        if self.builds > self.rounds:
            raise UserError(
                f"builds is {self.builds}, but a round runs one build, and rounds is {self.rounds}; "
                f"give --rounds {self.builds} or more"
            )
        for name in ("seconds", "warmup", "interval", "timeout", "build_timeout", "block", "equivalent", "minutes"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if any(batch < 1 for batch in self.batches):
            raise UserError(f"batch sizes must be whole numbers of at least 1, not {', '.join(map(str, self.batches))}")
        for batch in self.batches:
            check_range("batch", batch, 1, MAX_BATCH)
        if len(self.mean) != len(self.std):  # the number of channels is known after an inspection
            raise UserError("mean and std go together, one number for each channel")
        if self.std and not min(self.std) > 0:
            raise UserError(
                f"std is {', '.join(map(str, self.std))}; pixels are divided by it, so it must be more than 0"
            )
        for name in ("mean", "std"):
            if not all(abs(number) <= MAX_PIXEL_VALUE for number in getattr(self, name)):
                text = ", ".join(map(str, getattr(self, name)))
                raise UserError(f"{name} is {text}; pixels are 0 to 1, so divide mean and std by 255")

    def _check_together(self) -> None:
        """Raise `UserError` for options that contradict each other."""
        check_known("until", self.until, (*ADAPTIVE_RULES, FIXED))
        if self.until in ADAPTIVE_RULES and self.rounds < 2:
            raise UserError(f"until={self.until} goes by the spread between rounds; give --rounds 2 or more")
        if self.turns and not CAN_INTERLEAVE:
            raise UserError("interleaved jobs must be paused between turns, which this system can't do; omit --turns")
        if self.turns and self.samples:
            raise UserError("in turns blocks are counted, not samples; omit --samples or --turns")
        if self.sustained is not None and not 0 <= self.sustained <= MAX_SUSTAINED_S:
            raise UserError(f"sustained is {self.sustained:g}; it must be 0 to {MAX_SUSTAINED_S:g} seconds")
        if self.sustained and (not self.turns or self.rounds < 2):
            raise UserError(
                "sustained load is compared with rounds in turns; give --rounds 2 or more, and no --no-turns"
            )
        if self.search and not self.budget:
            raise UserError("a search for mixed precisions needs a budget to hold; give --budget, e.g. top1=0.5")
        if self.budget and not self.data:
            raise UserError("an accuracy budget needs labelled images; give --data")
        if self.limit:
            from dyno.results import limits

            limits.check_settings(self.limit, self.boundaries, self.energy)

    @classmethod
    def from_toml(cls, path: str | Path, defaults: Mapping[str, Any] | None = None, **changes: Any) -> Self:
        """Read a study file; `changes` (given options) override the file, which overrides the `defaults` values.

        Raises `UserError` for unknown keys.
        """
        check_types({"path": path}, {"path": str | Path})
        path = Path(path)
        try:
            table = tomllib.loads(check_regular(path, "study file").read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            raise UserError(f"there is no study file {path}") from None
        except UnicodeDecodeError as e:  # such as UTF-16, which PowerShell writes
            raise UserError(f"{path} is not a text in UTF-8; save it in that encoding") from e
        except tomllib.TOMLDecodeError as e:
            raise UserError(f"{path} is not valid TOML: {e}") from e
        except RecursionError:
            raise UserError(f"{path} is not valid TOML: its brackets are nested too deeply") from None
        except IsADirectoryError:
            raise UserError(f"{path} is a folder, not a study file") from None
        for key in table:
            check_known("key", key, tuple(f.name for f in dataclasses.fields(cls)), f" in {path.name}")
        if not (table.keys() | changes.keys()) >= {"models"}:
            raise UserError(f'{path} names no models; write models = ["torchvision:resnet18"], or the like')
        fields = {**(defaults or {}), **table}
        try:
            return cls(**{**fields, **changes})
        except TypeError as e:
            raise UserError(f"{path}: {e}") from e
        except UserError as e:
            raise UserError(f"{path}: {e}" if not changes or _refuses(cls, fields, str(e)) else str(e)) from e

    def to_table(self) -> dict[str, Any]:
        """Return the study as a TOML table, without values at their defaults."""
        items = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        return {name: list(value) if isinstance(value, tuple) else value for name, value, default in items
                if value not in ({}, None) and value != default}  # fmt: skip

    def to_toml(self) -> str:
        """Return the study as a TOML document that `from_toml` reads back."""
        return "".join(f"{key} = {_format_toml(value)}\n" for key, value in self.to_table().items())

    @property
    def sides(self) -> dict[str, Study]:
        """Studies of both sides of a comparison (`a`: the baseline); without one, this study under the name ""."""
        if not self.baseline:
            return {"": self}
        base = dataclasses.replace(self, baseline={})
        return {"a": dataclasses.replace(base, **self.baseline), "b": base}

    @property
    def adds_precisions(self) -> bool:
        """Whether this machine's lower precisions are added: only if no precision, backend or baseline is named."""
        return not (self.precisions or self.backends or self.baseline)

    @property
    def confirmations(self) -> int:
        """Number of confirmation rounds of winners."""
        return self.confirm if self.confirm is not None else DEFAULT_CONFIRMATIONS if self.budget else 0

    @property
    def build_timeout_s(self) -> float:
        """Time limit in seconds for making a file; see `build_timeout`."""
        if self.build_timeout is not None:
            return self.build_timeout
        return max(MIN_BUILD_S, 60 * self.minutes) if self.until in ADAPTIVE_RULES else Plan.build_timeout_s

    @property
    def sustained_s(self) -> float:
        """Seconds of a turn under sustained load, 0 for none; see `sustained`."""
        if self.sustained is not None:
            return self.sustained
        return DEFAULT_SUSTAINED_S if self.device != "cpu" and self.until in ADAPTIVE_RULES and self.turns else 0.0

    @property
    def searches(self) -> bool:
        """Whether to search for mixed precisions if a lowered precision fails the budget."""
        return bool(self.budget) if self.search is None else self.search

    @property
    def plan(self) -> Plan:
        """Measurement plan of each trial; a fixed number of samples disables the other stopping rules."""
        is_fixed = self.samples > 0
        return Plan(
            boundaries=self.boundaries,
            warmup_s=self.warmup,
            seconds=1e6 if is_fixed else self.seconds,
            min_samples=self.samples if is_fixed else 30,
            max_samples=self.samples if is_fixed else 100_000,
            interval=self.interval,
            rounds=self.rounds,
            blocks=max(MIN_BLOCKS, round(self.seconds / self.block)) if self.turns else 0,
            block_s=self.block if self.turns else Plan.block_s,
            timeout_s=self.timeout, build_timeout_s=self.build_timeout_s,
        )  # fmt: skip


def name_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by field name: `batch` becomes `batches`, and so on.

    Raises `UserError` if both are given, and for a `size` of two numbers, which elsewhere are height and width.
    """
    if alias := next((name for name in SINGULAR_FIELDS if name in settings and SINGULAR_FIELDS[name] in settings), ""):
        raise UserError(f"{alias} and {SINGULAR_FIELDS[alias]} are one setting; give one of them")
    size = settings.get("size")
    if isinstance(size, Sized) and not isinstance(size, str) and len(size) > 1:
        pair = "x".join(map(str, several(size)[:2]))
        raise UserError(f"size is one size: give '{pair}' for height and width, or sizes for several")
    return {SINGULAR_FIELDS.get(name, name): value for name, value in settings.items()}


def _take_either_name(initialise: Any) -> Any:
    @functools.wraps(initialise)
    def initialise_study(self: Study, *arguments: Any, **settings: Any) -> None:
        initialise(self, *arguments, **name_fields(settings))

    return initialise_study


Study.__init__ = _take_either_name(Study.__init__)  # type: ignore[method-assign]
Study.__doc__ = (Study.__doc__ or "").format(fields=describe_fields(Study))


def _name_source(model: Any, study: Study) -> Any:
    """Return a model as text: its path, or the file that stores a module in memory."""
    if isinstance(model, str) and model.isidentifier() and not Path(model).exists():
        from dyno.study.model_names import find_libraries

        libraries = find_libraries(model)
        return f"{libraries[0]}:{model}" if len(libraries) == 1 else model
    if isinstance(model, getattr(sys.modules.get("torch"), "Tensor", ())):
        raise UserError("a tensor is not a model; give a module's example inputs as one: models=(net, (x, y))")
    if not _in_memory(model) and not callable(model):
        return native(model)
    from dyno.study import in_memory, input_options

    if not all(isinstance(each, str) for each in study.inputs):
        raise UserError("inputs are NAME=LOW..HIGH or FILE.npz; give example inputs beside their module: (net, x)")
    check_types({"shapes": study.shapes, "channels": study.channels}, typing.get_type_hints(type(study)))
    sizes = [parse_size(each) for each in study.sizes or ()]
    return in_memory.save_module(
        model, input_options.parse_overrides(study.inputs, study.shapes), study.channels, sizes
    )


def _name_backend(text: Any) -> Any:
    """Return a backend with its options, under Dyno's names."""
    if not isinstance(text, str):  # refused later
        return text
    name, separator, options = text.partition("@")
    notation = Choice.parse(text).text if "precision=" in options else text
    return notation if usual_name(name) == name else f"{usual_name(name)}{separator}{notation.partition('@')[2]}"


def _in_memory(value: Any) -> bool:
    """Return whether the value is an `nn.Module` or a torch.export program, alone or with its example inputs.

    PyTorch is not imported for this.
    """
    torch = sys.modules.get("torch")
    module = value[0] if isinstance(value, tuple) and len(value) == 2 else value
    is_pair = module is not value
    program_type = getattr(sys.modules.get("torch.export"), "ExportedProgram", ())
    if torch is None or not isinstance(module, (torch.nn.Module, program_type)):
        return False
    return not (is_pair and isinstance(value[1], (str, Path, torch.nn.Module)))


def _make_tuple(value: Any) -> tuple[Any, ...]:
    if _in_memory(value):  # some modules can be iterated over
        return (value,)
    return several(value)


def _refuses(study: type[Study], settings: Mapping[str, Any], message: str) -> bool:
    """Return whether these settings alone cause that error message."""
    try:
        study(**settings)
    except (TypeError, UserError) as e:
        return str(e) == message
    return False


def _format_toml(value: Any) -> str:
    """Format a value as TOML; text as JSON, which is valid TOML except for one control character."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_format_toml(str(key))} = {_format_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_format_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def parse_size(text: str) -> tuple[int, int]:
    """Parse height and width from `224` or `480x640`."""
    height, _, width = text.lower().partition("x")
    try:
        size = int(height), int(width if "x" in text.lower() else height)
    except ValueError:
        size = (0, 0)
    if min(size) < 1:
        raise UserError(f"image size {text!r} is not a number of pixels like 224, or HEIGHTxWIDTH like 480x640")
    check_range("image size", max(size), 1, MAX_SIZE)
    return size


def parse_budget(texts: Iterable[str]) -> dict[str, float]:
    """Parse permitted losses in points from `top1=0.5`, separated by commas."""
    losses = {}
    for name, points in _parse_pairs("budget", texts, "NAME=POINTS, e.g. top1=0.5").items():
        try:
            losses[name] = float(points)
        except ValueError:
            raise UserError(f"budget '{name}={points}' is not NAME=POINTS, e.g. top1=0.5") from None
    return losses


def parse_limits(texts: Iterable[str]) -> dict[str, str]:
    """Parse limits from the command line: `p99=5ms`, separated by commas."""
    return _parse_pairs("limit", texts, "NAME=MOST, e.g. p99=5ms or size=20MB")


def _parse_pairs(noun: str, texts: Iterable[str], form: str) -> dict[str, str]:
    """Parse `NAME=VALUE`, separated by commas; `UserError` for a repeated name."""
    pairs: dict[str, str] = {}
    for text in (part.strip() for each in texts for part in each.split(",") if part.strip()):
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise UserError(f"{noun} {text!r} is not {form}")
        if name in pairs:
            raise UserError(f"the {noun} {name} is given twice, as {pairs[name]} and {value}; give it once")
        pairs[name] = value
    return pairs


def _check_runtimes(tables: Mapping[str, Mapping[str, Any]]) -> None:
    for name, table in tables.items():
        for key in table:
            check_known(f"key of runtime {name!r}", key, ("python", "env"))
        if not isinstance(table.get("env", {}), dict) or not isinstance(table.get("python", ""), str):
            raise UserError(f'runtime {name!r} needs a path as python and a table as env, such as {{A = "1"}}')


def find_runtime(study: Study, choice: Choice) -> Mapping[str, Any]:
    """Return the `[runtime.…]` table of a backend: the one it names, else the one with its name, else an empty one."""
    if choice.runtime and choice.runtime not in study.runtime:
        raise UserError(f"backend {choice.name!r} asks for runtime {choice.runtime!r}, which the study does not define")
    return study.runtime.get(choice.runtime or choice.name, {})
