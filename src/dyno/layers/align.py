"""Alignment of a model's forms: modules with nodes, and nodes with the layers of an engine."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from dyno.worker.facts.job import MODULES, NODES, Layer, LayerGraph

# Placement of unnamed layers by data flow.

Claims = dict[int, set[int]]  # index of a layer -> indices of its counterparts in another form
# evidence for a counterpart: a node's or tensor's name, data flow between named layers, computation ahead of the runs
BY_NAME, BY_FLOW, BY_CONSTANT = "named", "flow", "constant"
SHAPE_OPERATORS = {"Shape", "Size"}  # operators whose results depend on shapes alone
DEQUANTISE_OPERATOR = "DequantizeLinear"


class Flow:
    """Data flow between the layers of one form, by tensor names.

    `constant`: layers that depend on no input's values; empty unless the form lists all inputs (`complete`).
    """

    def __init__(self, layers: Sequence[Layer], *, complete: bool = True) -> None:
        writer: dict[str, int] = {}
        self.forwards, self.backwards = range(len(layers)), range(len(layers) - 1, -1, -1)
        self.before: list[list[int]] = []
        self.after: list[list[int]] = [[] for _ in layers]
        self.constant: set[int] = set()
        for index, layer in enumerate(layers):
            sources = [writer[port.name] for port in layer.inputs if port.name in writer]
            self.before.append(list(dict.fromkeys(sources)))
            for source in self.before[index]:
                self.after[source].append(index)
            inputs = [port for port in layer.inputs if port.name not in writer]
            is_constant = not inputs and self.constant.issuperset(self.before[index])
            if complete and (is_constant or layer.type in SHAPE_OPERATORS):
                self.constant.add(index)
            writer.update({port.name: index for port in layer.outputs})


def extend_claims(
    graph: Flow,
    engine: Flow,
    claims: Mapping[int, set[int]],
    helpers: Sequence[int],
    fits: Callable[[int, int], bool] = lambda node, layer: True,
) -> Claims:
    """Return the claims extended by `helpers`, the engine's layers that name no node.

    An unclaimed node between two claimed nodes belongs to the helpers between their counterparts, if the node `fits`
    them.
    """
    layer_claims = {layer: {layer} for layers in claims.values() for layer in layers}
    above, below = _find_neighbours(graph, claims)
    higher, lower = _find_neighbours(engine, layer_claims)
    neighbours: dict[tuple[int, int], set[int]] = {}
    for layer in helpers:
        for pair in product(higher[layer], lower[layer]):
            neighbours.setdefault(pair, set()).add(layer)
    extended = {node: set(layers) for node, layers in claims.items() if layers}
    for node in graph.forwards:
        if node not in extended and node not in graph.constant:
            matches = [neighbours.get(pair, set()) for pair in product(above[node], below[node])]
            if counterparts := {layer for layer in set().union(*matches) if fits(node, layer)}:
                extended[node] = counterparts
    return extended


def place_layers(
    layers: Sequence[Layer], claims: Mapping[int, set[int]], flow: Flow, ends: Collection[int] = ()
) -> tuple[Claims, dict[int, str]]:
    """Return the claims completed for unclaimed layers, and the evidence for each.

    A layer between two layers with a common counterpart shares it. An engine's fused layer begins with its product (a
    convolution before batch norm and ReLU), so a product joins the next layer with a counterpart; so does a
    dequantisation or a constant layer. Any other layer joins the last counterpart of its inputs, except inputs in
    `ends`, which are known to end their counterpart. `layers` must be in execution order.
    """
    placements = {index: set(claim) for index, claim in claims.items() if claim}
    evidence = dict.fromkeys(placements, BY_NAME)
    forwards, backwards = flow.forwards, flow.backwards

    def place_layer(index: int, counterparts: set[int]) -> None:
        if counterparts:
            placements[index], evidence[index] = counterparts, BY_CONSTANT if index in flow.constant else BY_FLOW

    def find_claims(neighbours: Sequence[int]) -> set[int]:
        return {counterpart for neighbour in neighbours for counterpart in placements.get(neighbour, ())}

    above, below = _find_neighbours(flow, placements)
    for index in forwards:
        if index not in placements and index not in flow.constant:
            place_layer(index, above[index] & below[index])
    reader_claims = dict[int, set[int]]()  # counterparts of the readers of unclaimed layers, up to the next product
    for index in backwards:
        if index not in placements:
            counterparts = find_claims(flow.after[index])
            if index in flow.constant:
                place_layer(index, counterparts)
                continue
            counterparts |= {one for reader in flow.after[index] for one in reader_claims.get(reader, ())}
            # An engine's layer may begin with a product or dequantisation, and rarely ends with it.
            if layers[index].flops or layers[index].type == DEQUANTISE_OPERATOR:
                place_layer(index, {min(counterparts)} if counterparts else set())
            else:
                reader_claims[index] = counterparts
    for index in forwards:
        open_inputs = [] if index in flow.constant else [one for one in flow.before[index] if one not in ends]
        if index not in placements and (counterparts := find_claims(open_inputs)):
            place_layer(index, {max(counterparts)})
    for index in backwards:
        if index not in placements and (counterparts := find_claims(flow.after[index])):
            place_layer(index, {min(counterparts)})
    for index in forwards:
        if index not in placements and index not in flow.constant and (counterparts := find_claims(flow.before[index])):
            place_layer(index, {max(counterparts)})
    return placements, evidence


def _find_neighbours(flow: Flow, claims: Mapping[int, set[int]]) -> tuple[list[set[int]], list[set[int]]]:
    """Return, per layer, the counterparts of the nearest claimed layers upstream and downstream."""
    return _find_nearest(flow.before, claims, flow.forwards), _find_nearest(flow.after, claims, flow.backwards)


def _find_nearest(
    edges: Sequence[Sequence[int]], claims: Mapping[int, set[int]], order: Sequence[int]
) -> list[set[int]]:
    """Return, per layer, the counterparts of the nearest claimed layers along the edges.

    `order` must visit a layer's neighbours along the edges first.
    """
    counterparts: list[set[int]] = [set() for _ in edges]
    for index in order:
        for neighbour in edges[index]:
            counterparts[index] |= claims.get(neighbour, counterparts[neighbour])
    return counterparts


# Suffixes that engines add to names of nodes and tensors.
ADDED_SUFFIXES = ("/WithoutBiases", "_nchwc", "_quant")
TOKEN_NUMBER = re.compile(r"_token_\d+$")
FUSION_SUFFIX = re.compile(r"(/\w*Fusion\w*/?)+$")
WRAPPER_PREFIX = "model."  # prefix of names in exports of modules with described inputs


@dataclass(frozen=True)
class FormSet:
    """Forms of a model, identified by index.

    They include the engines' ONNX graphs, through which layers are aligned: `graph_of` maps an engine to its graph,
    `module_of` a form to its module, if known.
    """

    forms: Sequence[LayerGraph]
    graph_of: Mapping[int, int] = field(default_factory=dict)
    module_of: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
    """Alignment of two forms: counterparts in `lower` of each layer of `upper`, with the evidence (`evidence`).

    `sure` holds the pairs found by name. `outer` holds calls of modules with submodules: their own operations lie
    between those of the submodules.
    """

    upper: int
    lower: int
    pairs: Claims
    evidence: dict[int, str] = field(default_factory=dict)
    sure: frozenset[tuple[int, int]] = frozenset()
    outer: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Region:
    """Group of corresponding layers: their indices in each form.

    `enclosing` holds the indices of enclosing modules per form; each is a member of one region only.
    """

    members: tuple[tuple[int, ...], ...]
    enclosing: tuple[tuple[int, ...], ...]

    def list_members(self, form: int) -> list[int]:
        """Return the indices of the form's members and enclosing modules, in order."""
        return sorted({*self.members[form], *self.enclosing[form]})

    def list_layers(self, forms: Sequence[LayerGraph], form: int) -> list[Layer]:
        """Return the region's layers in this form."""
        return [forms[form].layers[i] for i in self.members[form]]

    def sum_added(self, forms: Sequence[LayerGraph], form: int) -> int:
        """Return the number of parameters that the region adds to the form."""
        return sum(layer.added for layer in self.list_layers(forms, form))


def link_layers(forms: Sequence[LayerGraph], upper: int, lower: int) -> Link:
    """Align two forms, given by index: modules with nodes, or nodes with nodes or an engine's layers."""
    if forms[upper].form == MODULES:
        return _align_modules(forms, upper, lower)
    return _align_nodes(forms, upper, lower)


def _align_nodes(forms: Sequence[LayerGraph], upper: int, lower: int) -> Link:
    """Align by node names, then by names of output tensors, then by data flow."""
    graph, engine = forms[upper].layers, forms[lower].layers
    names = {layer.name: k for k, layer in enumerate(graph)}
    tensors = {port.name: k for k, layer in enumerate(graph) for port in layer.outputs}
    conversions = [layer for layer in engine if layer.moves and layer.inputs and layer.outputs]
    output_of = {layer.inputs[0].name: layer.outputs[0].name for layer in conversions}
    claims: Claims = defaultdict(set)
    for index, layer in enumerate(engine):
        nodes = [_find_index(name, names, tensors) for name in layer.nodes or (layer.name,)]
        nodes += [_find_index(port.name, tensors, names) for port in layer.outputs] if not layer.moves else []
        if not layer.moves and nodes == [None] * len(nodes):  # a conversion behind it may have the tensor's name
            nodes = [_find_index(output_of[port.name], tensors) for port in layer.outputs if port.name in output_of]
        for node in nodes:
            if node is not None:
                claims[node].add(index)
    graph_flow, engine_flow = Flow(graph), Flow(engine)
    named_layers = set().union(*claims.values())
    helpers = [k for k, layer in enumerate(engine) if k not in named_layers and not layer.moves]
    has_types = any(
        layer.computes_in for layer in engine
    )  # an engine that reports types also reports which layers have no product

    def can_hold(node: int, layer: int) -> bool:
        return bool(engine[layer].computes_in) or not (has_types and graph[node].flops)

    all_claims = extend_claims(graph_flow, engine_flow, claims, helpers, can_hold)
    pairs, evidence = place_layers(graph, all_claims, graph_flow, _find_ends(engine, tensors))
    for node in all_claims.keys() - claims.keys():
        evidence[node] = BY_FLOW
    sure = frozenset((node, layer) for node, layers in claims.items() for layer in layers)
    return Link(upper, lower, _extend_pairs(pairs, engine_flow, helpers), evidence, sure)


def _find_ends(engine: Sequence[Layer], tensors: Mapping[str, int]) -> set[int]:
    """Return the nodes that end an engine's layer: their output is an output of the layer.

    Outputs named after the layer are ignored: such an engine doesn't name its tensors.
    """
    names = (port.name for layer in engine if not layer.skipped for port in layer.outputs if port.name != layer.name)
    return {tensors[name] for name in names if name in tensors}


def _extend_pairs(pairs: Mapping[int, set[int]], engine: Flow, helpers: Sequence[int]) -> Claims:
    """Return the pairs extended by the engine's layers without a node.

    Such a layer gets the nodes of its only reader with nodes (OpenVINO's LSTM also writes states that nothing reads).
    """
    nodes_of = _invert_claims(pairs)
    for layer in reversed(helpers):
        readers = [reader for reader in engine.after[layer] if reader in nodes_of]
        if layer not in nodes_of and len(readers) == 1:
            nodes_of[layer] = set(nodes_of[readers[0]])
    return _invert_claims(nodes_of)


def _find_index(name: str, *tables: Mapping[str, int]) -> int | None:
    """Return the index of a name, with or without an engine's suffixes, in the first table that has it; else None."""
    stem = TOKEN_NUMBER.sub("", FUSION_SUFFIX.sub("", name))
    stems = [name, stem, *(stem.removesuffix(suffix) for suffix in ADDED_SUFFIXES if stem.endswith(suffix))]
    return next((table[each] for each in stems for table in tables if each in table), None)


def _align_modules(forms: Sequence[LayerGraph], upper: int, lower: int) -> Link:
    """Align by the module names of nodes; the nodes of a module with several calls are divided in order."""
    calls, graph = forms[upper].layers, forms[lower].layers
    by_name: dict[str, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        by_name[call.name].append(index)
    name_of = {name: call.name for call in calls for name in (*call.modules, call.name)}
    nodes: dict[str, dict[int | None, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, node in enumerate(graph):
        for text in node.modules:
            name, repeat = _parse_call(text, name_of)
            nodes[name][repeat].append(index)
    claims: Claims = defaultdict(set)
    for name, by_call in nodes.items():
        module_calls = by_name.get(name, [])
        first = 0 if len(by_call) > 1 else None  # the first call is unnumbered if later calls are numbered
        for repeat, indices in by_call.items():
            position = first if repeat is None else repeat
            call_indices = module_calls if position is None else module_calls[position : position + 1]
            for call_index, counterpart in _pair_calls(call_indices, indices):
                claims[counterpart].add(call_index)
    sure = frozenset((call, node) for node, group in claims.items() for call in group)
    claims, evidence = place_layers(graph, claims, Flow(graph))
    if "" not in by_name:  # the model's own code, outside its submodules
        own_nodes = {k for k, node in enumerate(graph) if node.modules == ("",)}
        claims = {k: group for k, group in claims.items() if k not in own_nodes}
    pairs = _invert_claims(claims)
    names = {name for name in by_name if name}
    inner = {name[: m.start()] for name in names for m in re.finditer(r"\.", name)}
    outer = frozenset(k for k, call in enumerate(calls) if call.name in inner or not call.name)
    order = [k for k, call in enumerate(calls) if k not in outer and not call.skipped]
    leaves = {leaf: pairs[k] for leaf, k in enumerate(order) if k in pairs}
    leaf_pairs, _ = place_layers([calls[k] for k in order], leaves, Flow([calls[k] for k in order], complete=False))
    union = {k: group for k, group in pairs.items() if k in outer} | {
        order[leaf]: group for leaf, group in leaf_pairs.items()
    }
    # A call counts as found by name if any of its nodes was, else by data flow.
    named_calls = {call for node, group in claims.items() if evidence.get(node) == BY_NAME for call in group}
    return Link(upper, lower, union, {call: BY_NAME if call in named_calls else BY_FLOW for call in union}, sure, outer)


def _parse_call(name: str, name_of: Mapping[str, str]) -> tuple[str, int | None]:
    """Return the module's name in its calls, and the call's index if the name has one: `relu_1` is the second.

    `name_of` maps every name of a module to its name in calls; a shared module has several names.
    """
    for text in (name, name.removeprefix(WRAPPER_PREFIX)):
        if text in name_of:
            return name_of[text], None
        match = re.fullmatch(r"(.*)_(\d+)", text)
        if match and match[1] in name_of:
            return name_of[match[1]], int(match[2])
    return name, None


def _pair_calls(calls: Sequence[int], nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Pair calls with nodes: equally many nodes per call, in order, or all with all if they don't divide evenly."""
    if calls and len(nodes) % len(calls) == 0:
        per_call = len(nodes) // len(calls)
        return [(call, node) for k, call in enumerate(calls) for node in nodes[k * per_call : (k + 1) * per_call]]
    return [(call, node) for call in calls for node in nodes]


def _invert_claims(claims: Mapping[int, set[int]]) -> Claims:
    inverse: Claims = defaultdict(set)
    for index, counterparts in claims.items():
        for counterpart in counterparts:
            inverse[counterpart].add(index)
    return dict(inverse)


def find_regions(forms: Sequence[LayerGraph], links: Sequence[Link]) -> list[Region]:
    """Return the regions in the order of the first form.

    A layer without counterparts is a separate region, behind its predecessor in its form.
    """
    groups = _Groups(forms)
    pairs = [
        ((link.upper, upper), (link.lower, lower), (upper, lower) in link.sure)
        for link in links
        for upper, counterparts in link.pairs.items()
        for lower in sorted(counterparts)
        if upper not in link.outer
    ]

    def rank_doubt(pair: tuple[tuple[int, int], tuple[int, int], bool]) -> tuple[bool, bool]:
        (upper, node), (lower, layer), sure = pair
        # Sure pairs come first, then guesses that pair a product with a multiplying layer.
        return not sure, not (forms[upper].layers[node].flops and forms[lower].layers[layer].computes_in)

    for layer, other, sure in sorted(pairs, key=rank_doubt):
        groups.join(layer, other, sure)
    find_root, parent = groups.find_root, groups.parent
    enclosing = _find_own_regions(links, find_root)
    for layer, roots in enclosing.items():  # its parameters and operations count once
        parent[layer] = roots[0]
    members: dict[tuple[int, int], list[list[int]]] = {}
    for form, k in sorted(parent):
        members.setdefault(find_root((form, k)), [[] for _ in forms])[form].append(k)
    outer: dict[tuple[int, int], list[list[int]]] = {layer: [[] for _ in forms] for layer in members}
    for (form, k), roots in enclosing.items():
        for root in roots:
            outer[root][form].append(k)
    regions = {layer: Region(tuple(map(tuple, m)), tuple(map(tuple, outer[layer]))) for layer, m in members.items()}
    return [regions[layer] for layer in _sort_regions(forms, find_root, enclosing.keys())]


class _Groups:
    """Disjoint sets of the layers of all forms; a layer is (form, index)."""

    def __init__(self, forms: Sequence[LayerGraph]) -> None:
        layers = [(form, k) for form, graph in enumerate(forms) for k in range(len(graph.layers))]
        self.parent = {layer: layer for layer in layers}
        self._forms = {layer: {layer[0]} for layer in layers}

    def find_root(self, layer: tuple[int, int]) -> tuple[int, int]:
        """Return the layer that represents the group."""
        while self.parent[layer] != layer:
            self.parent[layer] = self.parent[self.parent[layer]]
            layer = self.parent[layer]
        return layer

    def join(self, layer: tuple[int, int], other: tuple[int, int], sure: bool) -> None:
        """Merge the groups of both layers.

        A guess (not `sure`) is dropped if each group already has a layer of the other one's form: it may contradict
        what is known from another engine.
        """
        a, b = self.find_root(layer), self.find_root(other)
        if a == b or (not sure and other[0] in self._forms[a] and layer[0] in self._forms[b]):
            return
        self.parent[b] = a
        self._forms[a] |= self._forms[b]


def _find_own_regions(
    links: Sequence[Link], find_root: Callable[[tuple[int, int]], tuple[int, int]]
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Map each module with submodules to the regions of its direct code, in node order."""
    regions_of: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for link in links:
        for upper in sorted(link.outer):
            nodes = [lower for lower in sorted(link.pairs.get(upper, ())) if (upper, lower) in link.sure]
            roots = dict.fromkeys(find_root((link.lower, lower)) for lower in nodes)
            if roots:
                regions_of.setdefault((link.upper, upper), [*roots])
    return regions_of


def _sort_regions(
    forms: Sequence[LayerGraph],
    find_root: Callable[[tuple[int, int]], tuple[int, int]],
    enclosing: Collection[tuple[int, int]],
) -> list[tuple[int, int]]:
    """Return the regions in the order of the first form; regions that it lacks follow their neighbour in a later form.

    Modules in `enclosing` end after their submodules, so another form places the regions of their own operations.
    """
    start: tuple[int, int] = (-1, -1)  # start of the order
    followers: dict[tuple[int, int], list[tuple[int, int]]] = {start: []}
    for form, graph in enumerate(forms):
        previous, offsets = start, Counter[tuple[int, int]]()  # regions inserted from this form, by neighbour
        last = {find_root((form, k)): k for k in range(len(graph.layers)) if (form, k) not in enclosing}
        constant = Flow(graph.layers).constant if form else set()  # shape computations run before all others
        for k in range(len(graph.layers)):
            region = find_root((form, k))
            if (form, k) in enclosing or (form and k != last[region] and (region not in followers or k in constant)):
                continue
            if region not in followers:
                neighbour = previous if form else start
                followers[region] = []
                followers[neighbour].insert(offsets[neighbour], region)
                offsets[neighbour] += 1
            previous = region
    order, stack = [], [start]
    while stack:
        region = stack.pop()
        order.append(region)
        stack += reversed(followers[region])
    return order[1:]


def find_pivots(form_set: FormSet) -> list[Link]:
    """Return the links of all forms: graphs and modules with the first graph, engines with their own (or the first)."""
    forms, graph_of = form_set.forms, form_set.graph_of
    graphs = [k for k, form in enumerate(forms) if form.form == NODES]
    links = [link_layers(forms, graphs[0], k) for k in graphs[1:]] if graphs else []
    for k, form in enumerate(forms):
        if form.form == MODULES:
            links += [link_layers(forms, k, graph) for graph in graphs[:1]]
        elif form.form != NODES and (graphs or k in graph_of):
            links.append(link_layers(forms, graph_of.get(k, graphs[0]), k))
    return links
