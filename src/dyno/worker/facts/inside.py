"""What a model is made of, in any of its forms: the layers, what flows between them, and where each came from."""

from __future__ import annotations

from dataclasses import dataclass

from dyno.worker.facts.sparse import Sparse

MODULES, NODES, LAYERS = "modules", "nodes", "layers"
UNWATCHED = "whose modules can't be watched"  # what an error says of TorchScript and of programs of torch.export


@dataclass(frozen=True)
class Port:
    """One tensor that a layer reads or writes; -1 is a dimension that the run decides, `format` its memory layout."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    format: str = ""


@dataclass(frozen=True, kw_only=True)
class Layer(Sparse):
    """One call of a module, one node of a graph, or one layer of an engine.

    `inputs` are those that are computed, not weights. `parameters` counts the layer's own weights, of which an
    earlier layer has `shared` too, `flops` its operations with a multiply-add as two (None: unknown). `computes_in`
    is the type that an engine multiplies in, `tactic` its kernel, and `moves` says that it only changes types or
    layouts. `modules` and `nodes` are the PyTorch modules and the ONNX nodes that it came from, as far as its own
    form says; `skipped` is one that an engine keeps in its list and doesn't run.
    """

    name: str = ""
    type: str = ""
    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
    parameters: int = 0
    shared: int = 0
    flops: int | None = None
    computes_in: str = ""
    tactic: str = ""
    moves: bool = False
    skipped: bool = False
    modules: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()

    @property
    def added(self) -> int:
        """The weights that no earlier layer has: over all layers they add up to those of the form."""
        return self.parameters - self.shared


@dataclass(frozen=True, kw_only=True)
class LayerGraph(Sparse):
    """One form of a model: the calls of its `modules`, the `nodes` of its graph, or an engine's `layers`.

    `library` is whose form it is, with its version. `parameters` counts each weight once, however many layers use it;
    `notes` are sentences on what can't be seen.
    """

    form: str = ""
    library: str = ""
    parameters: int = 0
    layers: tuple[Layer, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Function(Sparse):
    """What a function of the host or the GPU did in one watched run, on average, in seconds.

    `where` is the host, a call of CUDA or the GPU. `path` is what it contributes to the critical path. `waiting` is, of
    a call, how long it waited for the GPU, and of a kernel how long it waited after its launch.
    """

    name: str = ""
    where: str = ""
    calls: float = 0.0
    time: float = 0.0
    path: float = 0.0
    waiting: float = 0.0
