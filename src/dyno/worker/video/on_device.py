"""Frames prepared by PyTorch on the engine's device, and outputs reduced there before they are copied to the host.

A GPU's host is slower at both: it would letterbox each frame, and copy scores of thousands of empty positions. The
pixels equal the host's preparation except for rounding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from dyno.worker.backend import DeviceBinding, Session
from dyno.worker.inputs import input_data
from dyno.worker.inputs.specs import fit_geometry
from dyno.worker.sessions.torch_support import host_type
from dyno.worker.spec import Dims, Preprocess, Tensor
from dyno.worker.tasks.detect import BoxReader
from dyno.worker.tasks.layouts import AnchorTable
from dyno.worker.video.media import PADDING_GREY, Picture, Preparation, Surface, compute_weights

GREY_WEIGHTS = 0.299, 0.587, 0.114  # weights of red, green and blue, as OpenCV's
DECODED_THERE = 2  # number of a picture's arrays if the device decoded it
THRESHOLD_MARGIN = 0.01  # float16 rounds thresholds; the host compares again
Change = Callable[[dict[str, Any]], dict[str, Any]]  # changes outputs by name


@dataclass(frozen=True)
class PictureKind:
    """The kind of pictures that can be prepared together; `matrix` as in `Pixels`."""

    height: int
    width: int
    aspect: Fraction
    matrix: int | None
    shapes: tuple[tuple[int, ...], ...]  # of the arrays; two if the device decoded them


@dataclass
class Entry:
    """One position of a batch.

    `host` is the host's copy of the picture's pixels, joined, or `surface` the device decoder's frame, kept until it is
    copied; `filled` is the size of the last picture there.
    """

    kind: PictureKind | None = None
    host: Any = None
    surface: Surface | None = None
    filled: tuple[int, ...] = ()


@dataclass
class Feed:
    """A batch on the device: its tensor, and the event after which it is ready."""

    tensor: Any
    canvas: Any  # float32, batch x channels x height x width: pixels, letterboxed
    name: str
    entries: list[Entry]
    ready: Any = None
    hosts: Any = None  # host copies of pictures as large as the first, a row per entry

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the batch's content, in host memory."""
        return {self.name: self.tensor.cpu().numpy()}


class DevicePreparation(Preparation):
    """A preparation that copies pictures as decoded, and letterboxes and normalises whole batches on the device.

    Several threads may write; one thread completes a batch.
    """

    def __init__(self, preprocess: Preprocess, inputs: Sequence[Tensor], dims: Dims, binding: DeviceBinding) -> None:
        super().__init__(preprocess, inputs, dims)
        torch, channels = binding.torch, self._table.shape[-1]
        self._ends, self._torch, self._dtype = binding, torch, getattr(torch, inputs[0].dtype)
        mean_and_std = input_data.read_normalisation(preprocess, channels)
        self._mean, self._std = (torch.from_numpy(array).to(binding.device) for array in mean_and_std)
        self._stream, self._channels = binding.stream(), channels
        self._growing = threading.Lock()

    def new_feed(self) -> Feed:
        """Return a new feed on the device."""
        make_tensor, device = self._torch.full, self._ends.device
        with self._ends.working(self._stream):
            canvas = make_tensor((self.batch, self._channels, *self.size), float(PADDING_GREY), device=device)
            tensor = make_tensor(self.shape, 0, dtype=self._dtype, device=device)
        return Feed(tensor, canvas, self.name, [Entry() for _ in range(self.batch)], self._mark_queue())

    def write(self, picture: Picture, feed: Feed, index: int) -> None:
        """Copy the picture's unconverted pixels to memory that the device reads, unless they are on the device."""
        entry = feed.entries[index]
        if isinstance(picture, Surface):
            colour_shape = picture.height // 2, picture.width // 2, 2
            shape = picture.height, picture.width
            entry.kind = PictureKind(*shape, picture.aspect, picture.matrix, (shape, colour_shape))
            entry.surface = picture
            return
        pixels = picture.pixels()
        count = sum(array.size for array in pixels.arrays)
        if entry.host is None or len(entry.host) < count:
            entry.host = self._reserve_memory(feed, index, count)
        buffer, start = entry.host.numpy(), 0
        for array in pixels.arrays:
            np.copyto(buffer[start : start + array.size].reshape(array.shape), array)
            start += array.size
        shapes = tuple(array.shape for array in pixels.arrays)
        entry.kind = PictureKind(picture.height, picture.width, picture.aspect, pixels.matrix, shapes)

    def _reserve_memory(self, feed: Feed, state: int, count: int) -> Any:
        """Return `count` bytes for a picture at that position: if possible, adjacent to the others', for one copy."""
        with self._growing:  # page-locking is slow
            if feed.hosts is None:
                feed.hosts = self._ends.host((self.batch, count), self._torch.uint8)
            is_adjacent = feed.hosts.shape[1] == count
            return feed.hosts[state] if is_adjacent else self._ends.host((count,), self._torch.uint8)

    def complete(self, feed: Feed, count: int) -> None:
        """Queue the work that makes the batch from its pictures."""
        groups: dict[PictureKind, list[int]] = {}
        for index, entry in enumerate(feed.entries[:count]):
            assert entry.kind is not None
            groups.setdefault(entry.kind, []).append(index)
        with self._ends.working(self._stream):
            for kind, indices in groups.items():
                image = self._convert_colours(self._send_pictures(feed, kind, indices), kind)
                self._place_pictures(image, feed, kind, indices)
            values = feed.canvas if self._raw else (feed.canvas / 255 - self._mean) / self._std
            feed.tensor.copy_((values.permute(0, 2, 3, 1) if self._last else values).reshape(self.shape))
            feed.ready = self._mark_queue()

    def _mark_queue(self) -> Any:
        """Return an event that marks the end of the work queued so far."""
        return self._stream.record_event() if self._stream is not None else None

    def settle(self, feed: Feed) -> None:
        if feed.ready is not None:
            feed.ready.synchronize()

    def _send_pictures(self, feed: Feed, kind: PictureKind, indices: list[int]) -> list[Any]:
        """Return the arrays of those pictures on the device, each of pictures x its own shape."""
        if len(kind.shapes) == DECODED_THERE:
            light, colours = self._gather_frames(feed, kind, indices)
            return [light, colours[..., 0], colours[..., 1]]
        sizes = [int(np.prod(shape)) for shape in kind.shapes]
        hosts, count = [feed.entries[index].host for index in indices], sum(sizes)
        tensor = self._torch.empty((len(indices), count), dtype=self._torch.uint8, device=self._ends.device)
        rows = feed.hosts[indices[0] : indices[0] + len(indices)]
        is_adjacent = [host.data_ptr() for host in hosts] == [row.data_ptr() for row in rows]
        if is_adjacent and rows.shape == tensor.shape:
            tensor.copy_(rows, non_blocking=True)
        else:
            for row, host in zip(tensor, hosts, strict=True):
                row.copy_(host[:count], non_blocking=True)
        parts = tensor.split(sizes, dim=1)
        return [part.reshape(-1, *shape) for part, shape in zip(parts, kind.shapes, strict=True)]

    def _gather_frames(self, feed: Feed, kind: PictureKind, indices: list[int]) -> list[Any]:
        """Return the same arrays, from frames left by the device's decoder."""
        if self._stream is not None:  # FFmpeg's work is queued on it
            self._stream.wait_stream(self._torch.cuda.default_stream(self._ends.device))
        make_tensor, device = self._torch.empty, self._ends.device
        arrays = [make_tensor((len(indices), *shape), dtype=self._torch.uint8, device=device) for shape in kind.shapes]
        for row, index in enumerate(indices):
            surface = feed.entries[index].surface
            assert surface is not None
            for target, tensor in zip(arrays, surface.tensors(), strict=True):
                target[row].copy_(tensor)
        return arrays

    def _convert_colours(self, arrays: list[Any], kind: PictureKind) -> Any:
        """Return red, green and blue, whole numbers in float32: pictures x 3 x height x width."""
        if kind.matrix is None:
            return arrays[0].permute(0, 3, 1, 2).float()
        offsets, weights = self._compute_shares(kind.matrix)
        light, blue, red = ((array[:, None].float() - offset) * weight
                            for array, offset, weight in zip(arrays, offsets, weights, strict=True))  # fmt: skip
        tint = self._torch.nn.functional.interpolate(blue + red, scale_factor=2, mode="nearest")
        image = tint[..., : kind.height, : kind.width] + light[..., : kind.height, : kind.width]
        return image.round_().clamp_(0, 255)

    @cache  # noqa: B019 - there are a few of these objects in a process
    def _compute_shares(self, matrix: int) -> tuple[list[float], list[Any]]:
        """Return the offsets of brightness and both colours, and their weights in red, green and blue."""
        rows = np.asarray(compute_weights(matrix))
        columns = np.linalg.inv(rows[:, :3]).T.astype(np.float32)
        tensors = (self._torch.from_numpy(column.copy()).to(self._ends.device) for column in columns)
        return rows[:, 3].tolist(), [tensor[None, :, None, None] for tensor in tensors]

    def _place_pictures(self, image: Any, feed: Feed, kind: PictureKind, indices: list[int]) -> None:
        if self._channels == 1:
            pairs = zip(GREY_WEIGHTS, image.split(1, dim=1), strict=True)
            image = sum(weight * channel for weight, channel in pairs).round_()
        _, height, width, top, left = fit_geometry(kind.height, kind.width * float(kind.aspect), *self.size)
        if (height, width) != (kind.height, kind.width):
            resize = self._torch.nn.functional.interpolate
            image = resize(image, (height, width), mode="bilinear", align_corners=False).round_()
        if any(feed.entries[index].filled not in ((), (height, width)) for index in indices):
            feed.canvas[indices] = float(PADDING_GREY)
        target = feed.canvas if len(indices) == len(feed.canvas) else feed.canvas[indices]
        target[..., top : top + height, left : left + width] = image
        if target is not feed.canvas:
            feed.canvas[indices] = target
        for index in indices:
            feed.entries[index].filled = height, width


class OnDeviceSession(Session):
    """A session fed by `DevicePreparation`; its outputs are reduced on the device before they are copied."""

    def __init__(self, host: Session, binding: DeviceBinding, reduce_outputs: Change) -> None:
        self.host, self._ends, self._change = host, binding, reduce_outputs
        self.inputs, self.outputs, self.slots, self.stream = host.inputs, host.outputs, host.slots, host.stream
        self._out = binding.stream()

    def stage(self, feeds: Any) -> Any:
        return feeds

    def bind(self, feeds: Any, slot: int = 0) -> None:
        self._ends.bind({feeds.name: feeds.tensor}, feeds.ready, slot)

    def run(self, slot: int = 0) -> None:
        self.host.run(slot)

    def wait(self, slot: int = 0) -> None:
        self.host.wait(slot)

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        """Return the outputs in newly allocated memory, floats as float32."""
        with self._ends.working(self._out):
            outputs = self._change(self._ends.outputs(slot))
            host_tensors = {name: self._ends.host(tuple(t.shape), host_type(t)) for name, t in outputs.items()}
            for name, tensor in outputs.items():
                host_tensors[name].copy_(tensor.to(host_tensors[name].dtype).contiguous(), non_blocking=True)
            if self._out is not None:
                self._out.synchronize()
        return {name: tensor.numpy() for name, tensor in host_tensors.items()}

    def facts(self) -> Any:
        return self.host.facts()

    def close(self) -> None:
        self.host.close()


def drop_low_scores(torch: Any, reader: BoxReader) -> Change:
    """Return a function that keeps only anchors with a class score of about the reader's `confidence` or more.

    It changes predictions of batch x values x anchors. Each image's anchors keep their order; images with fewer anchors
    are padded with zeros. Other outputs are unchanged, as are predictions in another layout, or before one was chosen.
    """
    min_score = (1 - THRESHOLD_MARGIN) * reader.confidence

    def drop_boxes(outputs: dict[str, Any]) -> dict[str, Any]:
        fit = reader.fit
        if fit is None or fit.layout != AnchorTable(axis=1):
            return outputs
        name, classes = fit.names[0], fit.classes or 0
        predictions = outputs[name]
        value_count = predictions.shape[1]
        mask = (predictions[:, 4 : 4 + classes] > min_score).any(1)
        counts = mask.sum(1)
        max_count = int(counts.max())
        order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :max_count]
        anchors = predictions.gather(2, order[:, None].expand(-1, value_count, -1))
        valid_mask = torch.arange(max_count, device=anchors.device) < counts[:, None]
        return {**outputs, name: anchors.masked_fill(~valid_mask[:, None], 0)}

    return drop_boxes
