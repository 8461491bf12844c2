"""A session's inputs and outputs as tensors of PyTorch where the engine computes, for code that makes and reads them
there: frames of a video needn't become arrays of a host that is slower than the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DeviceBinding:
    """Tensors in and out, in place of `Session.bind` and `Session.fetch`.

    `torch` is the library, `device` where its tensors have to be: a GPU, or a CPU, whose work is done when a call
    returns and which has neither streams nor events (None). `bind(tensors, ready, slot)` queues copies of the inputs
    into the slot, after the event `ready`; `outputs(slot)` are those of the slot's run, which is done, until it runs
    again.
    """

    torch: Any
    device: Any
    bind: Callable[[Mapping[str, Any], Any, int], None]
    outputs: Callable[[int], dict[str, Any]]

    @property
    def on_gpu(self) -> bool:
        """Whether work is queued."""
        return bool(self.device.type == "cuda")

    def stream(self) -> Any:
        """Return another stream of the device."""
        return self.torch.cuda.Stream(self.device) if self.on_gpu else None

    @contextmanager
    def working(self, stream: Any) -> Iterator[None]:
        """Run the block without gradients, on that stream."""
        with self.torch.inference_mode(), self.torch.cuda.stream(stream):
            yield

    def host(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a tensor in host memory, with which a GPU copies in parallel with other work."""
        return self.torch.empty(shape, dtype=dtype, pin_memory=self.on_gpu)
