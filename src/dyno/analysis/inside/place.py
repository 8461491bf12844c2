"""Where a layer belongs that nothing names: by what flows into it and out of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product

from dyno.worker.facts.job import Layer

Claims = dict[int, set[int]]  # index of a layer -> indices of its counterparts in another form
# What a node's name, a tensor's name, or the flow between named ones says; and what is computed before the first run.
NAMED, FLOW, CONSTANT = "named", "flow", "constant"
SHAPES = {"Shape", "Size"}  # operators whose results the shapes decide
DEQUANTISES = "DequantizeLinear"


class Flow:
    """Who reads whom among the layers of one form, by the names of tensors.

    `constant` are those that read nothing that changes, of a form that names all that its layers read.
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
            fed = [port for port in layer.inputs if port.name not in writer]
            still = not fed and self.constant.issuperset(self.before[index])
            if complete and (still or layer.type in SHAPES):
                self.constant.add(index)
            writer.update({port.name: index for port in layer.outputs})


def between(
    graph: Flow,
    engine: Flow,
    claims: Mapping[int, set[int]],
    helpers: Sequence[int],
    fits: Callable[[int, int], bool] = lambda node, layer: True,
) -> Claims:
    """Return the claims with those added of the engine's layers `helpers`, which name no node.

    An unclaimed node between two claimed ones belongs to the unnamed layers between their counterparts, where the node
    `fits` that layer.
    """
    named = {layer: {layer} for own in claims.values() for layer in own}
    above, below = (
        _find_nearest(graph.before, claims, graph.forwards),
        _find_nearest(graph.after, claims, graph.backwards),
    )
    higher, lower = (
        _find_nearest(engine.before, named, engine.forwards),
        _find_nearest(engine.after, named, engine.backwards),
    )
    neighbours: dict[tuple[int, int], set[int]] = {}
    for layer in helpers:
        for pair in product(higher[layer], lower[layer]):
            neighbours.setdefault(pair, set()).add(layer)
    extended = {node: set(own) for node, own in claims.items() if own}
    for node in graph.forwards:
        if node not in extended and node not in graph.constant:
            matches = [neighbours.get(pair, set()) for pair in product(above[node], below[node])]
            if reached := {layer for layer in set().union(*matches) if fits(node, layer)}:
                extended[node] = reached
    return extended


def placed(
    layers: Sequence[Layer], claims: Mapping[int, set[int]], flow: Flow, ends: Collection[int] = ()
) -> tuple[Claims, dict[int, str]]:
    """Return the claims with those of unclaimed layers added, and how each was found.

    A layer between two with a common counterpart has it too. In an engine's fused layers, a product comes first, so it
    belongs to the next layer that has a counterpart (a convolution to the ReLU behind its batch norm); so does a
    dequantisation, and a layer that only constants decide. Any other layer comes last, and belongs to the last of the
    counterparts of its inputs, except of inputs in `ends`, which are known to end their counterpart. The layers are in
    an order in which they can run.
    """
    placements = {index: set(own) for index, own in claims.items() if own}
    how = dict.fromkeys(placements, NAMED)
    forwards, backwards = flow.forwards, flow.backwards

    def place_layer(index: int, counterparts: set[int]) -> None:
        if counterparts:
            placements[index], how[index] = counterparts, CONSTANT if index in flow.constant else FLOW

    def find_claims(neighbours: Sequence[int]) -> set[int]:
        return {one for neighbour in neighbours for one in placements.get(neighbour, ())}

    above, below = _find_nearest(flow.before, placements, forwards), _find_nearest(flow.after, placements, backwards)
    for index in forwards:
        if index not in placements and index not in flow.constant:
            place_layer(index, above[index] & below[index])
    behind = dict[int, set[int]]()  # of an unclaimed layer that ends one: what reads it, before another product does
    for index in backwards:
        if index not in placements:
            reached = find_claims(flow.after[index])
            if index in flow.constant:
                place_layer(index, reached)
                continue
            reached |= {one for reader in flow.after[index] for one in behind.get(reader, ())}
            if _can_begin(layers[index]):
                place_layer(index, {min(reached)} if reached else set())
            else:
                behind[index] = reached
    for index in forwards:
        open_ones = [] if index in flow.constant else [one for one in flow.before[index] if one not in ends]
        if index not in placements and (reached := find_claims(open_ones)):
            place_layer(index, {max(reached)})
    for index in backwards:
        if index not in placements and (reached := find_claims(flow.after[index])):
            place_layer(index, {min(reached)})
    for index in forwards:
        if index not in placements and index not in flow.constant and (reached := find_claims(flow.before[index])):
            place_layer(index, {max(reached)})
    return placements, how


def _can_begin(layer: Layer) -> bool:
    """Return whether an engine's layer may begin with this layer, and rarely ends with it."""
    return bool(layer.flops) or layer.type == DEQUANTISES


def _find_nearest(
    edges: Sequence[Sequence[int]], claims: Mapping[int, set[int]], order: Sequence[int]
) -> list[set[int]]:
    """Return each layer's counterparts, those of the nearest claimed layers along the edges.

    `order` visits the neighbours along the edges first.
    """
    reached: list[set[int]] = [set() for _ in edges]
    for index in order:
        for neighbour in edges[index]:
            reached[index] |= claims.get(neighbour, reached[neighbour])
    return reached
