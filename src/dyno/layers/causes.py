"""Causes of the time difference between two forms of a model: regions split into parts with one cause each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dyno.layers import align
from dyno.layers.align import BY_NAME, Link, Region
from dyno.layers.pairs import FormPair, PairSide
from dyno.layers.tables import TYPE_BYTES, WHOLE_MODEL
from dyno.layers.times import name_modules
from dyno.worker.facts.job import MODULES, Layer


@dataclass(frozen=True)
class Cause:
    """Cause of a time difference between A and B: a key for programs, a title for people.

    `region` is true for measured layers with a name, false for remainders.
    """

    key: str
    title: str
    region: bool = True


NARROWER = Cause("narrower", "a narrower type in B")
WIDER = Cause("wider", "a wider type in B")
STAYED = Cause("stayed", "not in the narrower type requested for B")
PROVIDER = Cause("provider", "another provider")
KERNEL = Cause("kernel", "another kernel")
SAME = Cause("same", "the same kernel")
FUSED = Cause("fused", "fused or left out in B")
SPLIT = Cause("split", "a separate layer in B")
CONVERSION = Cause("conversion", "conversions of types and layouts")
CALLS = Cause("calls", "the model's own code, and calling its parts")
UNALIGNED = Cause("unaligned", "counterpart unknown", region=False)
INTERRUPTED = Cause("interrupted", "interruptions, which hit a layer in few runs", region=False)
WAITING = Cause("waiting", "launch gaps: the GPU waits for the host")
COPYING = Cause("copying", "copies of inputs and outputs, outside the model", region=False)
BETWEEN = Cause("between", "outside the layers", region=False)
WHOLE = Cause("whole", "all of it", region=False)
CAUSES = (NARROWER, WIDER, STAYED, PROVIDER, KERNEL, SAME, FUSED, SPLIT, CONVERSION, CALLS, UNALIGNED)

CONVERTERS = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "FakeQuantize")
PROVIDER_ENGINE = "ONNX Runtime"  # engine with execution providers as tactics
FULL_PRECISIONS = ("", "fp32", "tf32")  # precisions without types narrower than float32


@dataclass(frozen=True)
class CausePart:
    """Layers of A and B, by index, with one cause for their difference in time; each layer is in one part only.

    `names` are their modules or nodes. `types` are the compute types of A and B ("": unknown). `before` is the reader
    of a conversion.
    """

    cause: Cause
    a: tuple[int, ...] = ()
    b: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    types: tuple[str, str] = ("", "")
    before: str = ""


def split_regions(pair: FormPair) -> list[CausePart]:
    """Split the pair's layers into parts, region by region in the model's order."""
    return _RegionSplitter(pair).list_all_parts()


def link_forms(pair: FormPair) -> list[Link]:
    """Align the forms through their graphs; without a graph, align modules by their calls and other forms directly."""
    links = align.find_pivots(pair.form_set)
    linked_forms = {link.upper for link in links} | {link.lower for link in links}
    if {pair.a.form, pair.b.form} <= linked_forms:
        return links
    a, b = pair.a.form, pair.b.form
    if pair.forms[a].form == pair.forms[b].form == MODULES:
        return [*links, _link_calls(pair)]
    upper, lower = (a, b) if pair.forms[b].form != MODULES else (b, a)
    return [*links, align.link_layers(pair.forms, upper, lower)]


def _link_calls(pair: FormPair) -> Link:
    """Align two modules by the names and numbers of their calls."""
    indices = [{call: k for k, call in enumerate(pair.forms[side.form].count_calls())} for side in pair.sides]
    pairs = {k: {indices[1][call]} for call, k in indices[0].items() if call in indices[1]}
    sure = frozenset((k, counterpart) for k, counterparts in pairs.items() for counterpart in counterparts)
    return Link(pair.a.form, pair.b.form, pairs, dict.fromkeys(pairs, BY_NAME), sure)


def merge_own_code(regions: Sequence[Region], form: int) -> list[Region]:
    """Merge each module's regions of own code, between calls of its submodules, into one.

    The module's own time is a single figure, which the merged region gets.
    """
    outer = {k for region in regions for k in region.enclosing[form]}
    groups: dict[int, list[Region]] = {}
    for region in regions:
        if region.enclosing[form] and outer.issuperset(region.members[form]):
            groups.setdefault(min(region.enclosing[form]), []).append(region)  # the innermost: its call ends first
    grouped_ids, merged = {id(r) for group in groups.values() for r in group}, []
    for region in regions:
        plain_members = [k for k in region.members[form] if k not in groups]
        modules = [k for k, group in groups.items() if group[0] is region]
        if id(region) not in grouped_ids:
            merged.append(_replace_members(region, form, plain_members))
        for k in modules:
            members = [sorted({i for r in groups[k] for i in r.members[f]}) for f in range(len(region.members))]
            rest = {i for i in members[form] if i not in groups}
            merged.append(
                _replace_members(Region(tuple(map(tuple, members)), region.enclosing), form, sorted({k, *rest}))
            )
    return merged


def _replace_members(region: Region, form: int, members: Sequence[int]) -> Region:
    all_members = [tuple(members) if f == form else form_members for f, form_members in enumerate(region.members)]
    return Region(tuple(all_members), region.enclosing)


@dataclass
class _TimedForm:
    """One side of the pair: its layers with their names, median times in seconds, and whether each one ran."""

    side: PairSide
    layers: Sequence[Layer]
    names: list[list[str]]
    seconds: np.ndarray
    has_run: list[bool] = field(init=False)
    modules: bool = False

    def __post_init__(self) -> None:
        self.has_run = [bool(s > 0) or not layer.skipped for s, layer in zip(self.seconds, self.layers, strict=True)]

    def is_conversion(self, k: int) -> bool:
        """Return whether the layer only changes a type or a layout."""
        return self.layers[k].moves or self.layers[k].type.rpartition(".")[2] in CONVERTERS

    def find_reader(self, k: int) -> int | None:
        """Return the index of layer `k`'s first reader beyond conversions; None if only outputs follow."""
        for reader in range(k + 1, len(self.layers)):
            outputs = {port.name for port in self.layers[k].outputs}
            if outputs & {port.name for port in self.layers[reader].inputs}:
                if not self.is_conversion(reader):
                    return reader
                k = reader
        return None

    def weigh(self, k: int) -> tuple[int, float]:
        """Return the sort key for the main layer of a region: operations, then time."""
        return (self.layers[k].flops or int(bool(self.layers[k].computes_in)), float(self.seconds[k]))

    def list_names(self, indices: Sequence[int]) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(name for k in indices for name in self.names[k] or [self.layers[k].name or WHOLE_MODEL])
        )

    def type_of(self, indices: Sequence[int]) -> str:
        """Return the compute type of the layers `indices`; "" if unknown.

        The slowest multiplying layer decides, or the slowest layer if no layer multiplies.
        """
        products = [k for k in indices if self.layers[k].computes_in]
        typed_layers = [k for k in products or indices if computed_in(self.layers[k])]
        return computed_in(self.layers[max(typed_layers, key=lambda k: self.seconds[k])]) if typed_layers else ""


def computed_in(layer: Layer) -> str:
    """Return a layer's compute type, else its output type; "" for indices and unknown types."""
    dtype = layer.computes_in or (layer.outputs[0].dtype if layer.outputs else "")
    return dtype if dtype.startswith(("float", "bfloat", "int8", "uint8")) else ""


class _RegionSplitter:
    """Splitter of regions into parts with one cause each."""

    def __init__(self, pair: FormPair) -> None:
        self._pair = pair
        self.a, self.b = (_make_form(pair, side) for side in pair.sides)
        regions = align.find_regions(pair.forms, link_forms(pair))
        for form in (self.a, self.b):
            regions = merge_own_code(regions, form.side.form) if form.modules else regions
        self._regions = regions

    def list_all_parts(self) -> list[CausePart]:
        parts = [part for region in self._regions for part in self._list_parts(region) if part.a or part.b]
        return self._merge_conversions(parts)

    def _merge_conversions(self, parts: Sequence[CausePart]) -> list[CausePart]:
        """Merge two conversions, one of A and one of B, with equal type, shape and reader into one part."""
        queues: dict[tuple[object, ...], list[int]] = {}
        merged: list[CausePart] = []
        for part in parts:
            if part.cause == CONVERSION:
                form, (k,) = (self.a, part.a) if part.a else (self.b, part.b)
                layer = form.layers[k]
                queue = queues.setdefault((layer.type, layer.outputs[:1] and layer.outputs[0].shape, part.before), [])
                index = next((n for n in queue if bool(merged[n].a) != bool(part.a)), None)
                if index is not None:
                    queue.remove(index)
                    merged[index] = replace(merged[index], a=merged[index].a or part.a, b=merged[index].b or part.b)
                    continue
                queue.append(len(merged))
            merged.append(part)
        return merged

    def _list_parts(self, region: Region) -> list[CausePart]:
        a, b, conversions = list[int](), list[int](), list[CausePart]()
        for form, indices in ((self.a, a), (self.b, b)):
            for k in (k for k in region.members[form.side.form] if form.has_run[k]):
                if form.is_conversion(k):
                    conversions.append(self._make_conversion(form, k))
                else:
                    indices.append(k)
        if call_part := self._find_call_part(a, b):
            conversions.append(call_part)
            a, b = [k for k in a if k not in call_part.a], [k for k in b if k not in call_part.b]
        return [*conversions, *self._compare_layers(a, b, region)]

    def _find_call_part(self, a: Sequence[int], b: Sequence[int]) -> CausePart | None:
        """Return the part of the model's own code, mostly the overhead of calls to submodules; None without own code.

        If the region holds nothing else, the other form's layers are its counterparts.
        """
        roots = [
            [k for k in indices if form.modules and not form.layers[k].name]
            for form, indices in ((self.a, a), (self.b, b))
        ]
        if not any(roots):
            return None
        is_root_only = all(root in ([], [*indices]) for root, indices in zip(roots, (a, b), strict=True))
        first, second = (a, b) if is_root_only else roots
        return CausePart(CALLS, tuple(first), tuple(second), (WHOLE_MODEL,))

    def _make_conversion(self, form: _TimedForm, k: int) -> CausePart:
        reader = form.find_reader(k)
        before = form.list_names([reader])[0] if reader is not None else ""
        a, b = ((k,), ()) if form is self.a else ((), (k,))
        return CausePart(CONVERSION, a, b, (form.layers[k].name,), before=before)

    def _compare_layers(self, a: Sequence[int], b: Sequence[int], region: Region) -> list[CausePart]:
        """Return a part for the main layers of both sides, and parts for the layers that only one side has."""
        if not a or not b:
            return [self._make_lone_part(a, b, region)] if a or b else []
        main_a, main_b = self._choose_main(self.a, a, self.b, len(b)), self._choose_main(self.b, b, self.a, len(a))
        extra_a, extra_b = (tuple(k for k in indices if k not in main) for indices, main in ((a, main_a), (b, main_b)))
        types = self.a.type_of(main_a), self.b.type_of(main_b)
        cause = self._find_cause(main_a, main_b, types)
        parts = [CausePart(cause, tuple(main_a), tuple(main_b), self.a.list_names(main_a), types)]
        if extra_a:
            parts.append(CausePart(FUSED, a=extra_a, names=self.a.list_names(extra_a)))
        if extra_b:
            parts.append(CausePart(SPLIT, b=extra_b, names=self.b.list_names(extra_b)))
        return parts

    def _choose_main(self, form: _TimedForm, indices: Sequence[int], other: _TimedForm, count: int) -> list[int]:
        """Return the `count` main layers, one for each layer of the other form.

        If only the other form is a module, all layers are main: a module may be code of any length.
        """
        if other.modules and not form.modules:
            return sorted(indices)
        return sorted(sorted(indices, key=form.weigh, reverse=True)[:count])

    def _make_lone_part(self, a: Sequence[int], b: Sequence[int], region: Region) -> CausePart:
        """Return the part of a region that one side lacks: fused or split if the region is identified, else
        unaligned."""
        form, ids = (self.a, a) if a else (self.b, b)
        other_forms = [k for k in range(len(region.members)) if k != form.side.form and region.members[k]]
        other = self.b if a else self.a
        products = form.modules and any(form.layers[k].flops for k in ids)  # every engine has products, under some name
        is_identified = bool(other_forms) or (not products and (form.modules or other.modules))
        cause = (FUSED if a else SPLIT) if is_identified else UNALIGNED
        return CausePart(cause, tuple(a), tuple(b), form.list_names(ids))

    def _find_cause(self, a: Sequence[int], b: Sequence[int], types: tuple[str, str]) -> Cause:
        if all(types):
            before, after = (TYPE_BYTES.get(dtype, 1) for dtype in types)
            if after < before:
                return NARROWER
            if after > before:
                return WIDER
            has_products = any(self.b.layers[k].computes_in for k in b)
            if after >= TYPE_BYTES["float32"] and has_products and self._pair.b.precision not in FULL_PRECISIONS:
                return STAYED
        if types[0] != types[1] or self._libraries[0] != self._libraries[1]:
            return KERNEL
        layers = [[form.layers[k] for k in indices] for form, indices in ((self.a, a), (self.b, b))]
        kernels = [sorted((layer.type, layer.tactic) for layer in each) for each in layers]
        if self._libraries[0] == PROVIDER_ENGINE and [t for _, t in kernels[0]] != [t for _, t in kernels[1]]:
            return PROVIDER
        return SAME if kernels[0] == kernels[1] else KERNEL

    @property
    def _libraries(self) -> list[str]:
        """Library of each side, without its version."""
        return [PROVIDER_ENGINE if t.startswith(PROVIDER_ENGINE) else t.partition(" ")[0] for t in self._pair.titles]


def _make_form(pair: FormPair, side: PairSide) -> _TimedForm:
    form = pair.forms[side.form]
    names = name_modules(pair.form_set, side.form)
    # Time per layer: median over processes of the median over repeats.
    seconds = np.array(np.median([np.median(times.layers, axis=0) for times in side.processes], axis=0))
    return _TimedForm(side, form.layers, names, seconds, modules=form.form == MODULES)


def by_cause(parts: Sequence[CausePart]) -> Mapping[Cause, list[int]]:
    """Group the indices of the parts by cause, in the order of CAUSES."""
    return {cause: group for cause in CAUSES if (group := [k for k, part in enumerate(parts) if part.cause == cause])}
