"""Which tensor of a graph each call of a module's part became."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from dyno.analysis.inside import align
from dyno.analysis.inside.align import Region
from dyno.analysis.inside.tables import QUANTISES
from dyno.worker.facts.job import Layer, LayerGraph, Port

ModuleCall = tuple[str, int, str]  # a part's name, which of its calls, and the tensor's name in the graph


def tensors_of(module: LayerGraph, graph: LayerGraph) -> list[ModuleCall]:
    """Return the calls whose result is one tensor of the graph: the last call and tensor of a region, if of one shape.

    A module around others counts where it computes its result itself, such as a sum: then none of its parts reads it.
    """
    forms = (module, graph)
    link = align.link(forms, 0, 1)
    numbers, readers = _number_calls(module.layers), _find_readers(graph.layers)
    found: dict[str, ModuleCall] = {}
    for region in align.regions(forms, [link]):
        last = _find_last_tensor(forms, region)
        call = _find_result_call(module, link, region, last, readers) if last is not None else None
        if call is not None and last is not None:
            found.setdefault(last.name, (module.layers[call].name, numbers[call], last.name))
    return [*found.values()]


def _find_readers(layers: Sequence[Layer]) -> dict[str, set[str]]:
    """Return the modules of the nodes that read each tensor, behind its quantisation where it is quantised."""
    readers: dict[str, set[str]] = defaultdict(set)
    for layer in reversed(layers):
        behind = [name for port in layer.outputs for name in readers[port.name]] if layer.type in QUANTISES else ()
        for port in layer.inputs:
            readers[port.name].update(layer.modules, behind)
    return readers


def _number_calls(layers: Sequence[Layer]) -> list[int]:
    """Return each call's index among the calls of its part."""
    seen: Counter[str] = Counter()
    numbers = []
    for layer in layers:
        numbers.append(seen[layer.name])
        seen[layer.name] += 1
    return numbers


def _find_last_tensor(forms: Sequence[LayerGraph], region: Region) -> Port | None:
    """Return the only tensor that the nodes write and none reads, quantisation apart; None unless there is just one."""
    nodes = [forms[1].layers[k] for k in region.members[1]]
    nodes = [node for node in nodes if node.type not in QUANTISES]
    read = {port.name for node in nodes for port in node.inputs}
    written = [port for node in nodes for port in node.outputs[:1] if port.name not in read]
    return written[0] if len(written) == 1 else None


def _find_result_call(
    module: LayerGraph, link: align.Link, region: Region, last: Port, readers: Mapping[str, set[str]]
) -> int | None:
    """Return the call whose result the tensor is: the last part's, else that of a module which computes it itself."""
    ran = [k for k in region.shown(0) if not module.layers[k].skipped and module.layers[k].outputs]
    if not ran or module.layers[ran[-1]].outputs[0].shape != last.shape:
        return None
    call, name = ran[-1], module.layers[ran[-1]].name
    around = call in link.outer  # its own operators may not be its last ones
    inside = any(reader == name or reader.startswith(f"{name}." if name else "") for reader in readers[last.name])
    return None if around and inside else call


def nodes_of(graph: LayerGraph) -> Iterator[tuple[str, Layer]]:
    """Return each tensor of the graph with the node that writes it."""
    return ((port.name, layer) for layer in graph.layers for port in layer.outputs)
