"""One batch of ONNX Runtime's on the CPU: what it reads and where it writes, in host memory without a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dyno.worker.inputs.shapes import Shape, fitted
from dyno.worker.spec import Tensor, UserError


class Request:
    """Inputs and outputs of one batch in flight; several of one session may run at the same time."""

    def __init__(self, session: Any, outputs: Sequence[Tensor]) -> None:
        self._session, self._tensors = session, outputs
        self.feeds: dict[str, np.ndarray] = {}
        self._binding = session.io_binding()
        self._outputs: dict[str, np.ndarray] = {}
        # One whose shape depends on the run is left to the library, and so is one without dimensions: a scalar, or of
        # any number of them, and an input that is an output too, which stays where it is. All are bound in the graph's
        # order, which `get_outputs` keeps when one is bound again.
        fed = {each.name for each in session.get_inputs()}
        for tensor in outputs:
            sizes = [size for size in tensor.shape if isinstance(size, int)]
            if sizes and len(sizes) == len(tensor.shape) and tensor.name not in fed:
                array = self._outputs[tensor.name] = np.empty(sizes, tensor.dtype)
                self._binding.bind_output(tensor.name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
            else:
                self._binding.bind_output(tensor.name, "cpu")
        self._unplaced = [tensor.name for tensor in outputs if tensor.name not in self._outputs]

    def bind(self, feeds: Mapping[str, np.ndarray], inputs: Sequence[Tensor], shapes: Mapping[str, Shape]) -> None:
        """Point it at the feeds, which are held until the next `bind`; copied only to change their type."""
        for tensor in inputs:
            if tensor.name not in feeds:
                raise UserError(f"input {tensor.name!r} was not fed, only {', '.join(feeds) or 'nothing'}")
            feed = fitted(feeds[tensor.name], tensor, shapes[tensor.name])
            self._binding.bind_input(tensor.name, "cpu", 0, feed.dtype.type, feed.shape, feed.ctypes.data)
            self.feeds[tensor.name] = feed
        for name in self._unplaced:  # its shape may change with the input
            self._binding.bind_output(name, "cpu")

    def run(self) -> None:
        """Run to the end; the library releases Python's lock meanwhile."""
        self._session.run_with_iobinding(self._binding)

    def fetch(self) -> dict[str, np.ndarray]:
        """Return the bound output arrays themselves: valid until the next run."""
        if not self._unplaced:
            return dict(self._outputs)
        values = self._binding.get_outputs()
        return {t.name: self._outputs.get(t.name, values[k].numpy()) for k, t in enumerate(self._tensors)}
