"""Pictures of frames: red, green and blue, or a decoder's planes; and the layers for drawings.

A video's decoder gives brightness, and colour at half the height and width (4:2:0), and its encoder takes the same.
Such a frame is converted to RGB only for the network: drawings go to its planes, and without drawings these are encoded
unchanged.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from dyno.worker.inputs import input_data
from dyno.worker.inputs.specs import channels_first, channels_last, fit_geometry, static_shapes
from dyno.worker.spec import Dims, Preprocess, Tensor
from dyno.worker.tasks.postprocess import Detections

Colour = tuple[int, int, int]  # red, green, blue
# Per channel of a layer: its weights of red, green and blue, and its offset
Weights = tuple[tuple[float, float, float, float], ...]

SQUARE_PIXELS = Fraction(1)
PIXEL_FORMAT = "yuv420p"
FULL_RANGE = 2  # FFmpeg's number of the full range: black is 0, not 16
UNSPECIFIED_MATRIX = 2  # FFmpeg's number of an unspecified matrix
# Weights of red and blue in brightness, by FFmpeg's matrix number; green has the rest (ITU-T H.273, table 4)
MATRIX_COEFFICIENTS = {
    1: (0.2126, 0.0722),
    5: (0.299, 0.114),
    6: (0.299, 0.114),
    7: (0.212, 0.087),
    9: (0.2627, 0.0593),
}
ITU_709, ITU_601 = 1, 5
MAX_601_SIZE = 1024, 576  # players assume ITU_601 up to this width and height


@dataclass(frozen=True)
class PicturePlane:
    """A part of a picture for drawing: uint8, rows x columns (x channels); a value covers `step` x `step` pixels."""

    array: np.ndarray
    step: int
    weights: Weights

    def value(self, colour: Colour) -> tuple[int, ...]:
        """Return the colour in this layer's channels."""
        return _convert_colour(self.weights, colour)


@lru_cache(maxsize=256)
def _convert_colour(weights: Weights, colour: Colour) -> tuple[int, ...]:
    return tuple(round(sum(weight * value for weight, value in zip(row, (*colour, 1), strict=True))) for row in weights)


@dataclass(frozen=True)
class Pixels:
    """The read-only arrays of a picture, and the number of their matrix (None: RGB).

    They are uint8: one of height x width x RGB, or brightness and two colours at half the height and width.
    """

    arrays: tuple[np.ndarray, ...]
    matrix: int | None = None


class Picture(ABC):
    """A frame's own pixels, `height` x `width`; `aspect` is a pixel's width over its height."""

    height: int
    width: int
    aspect: Fraction = SQUARE_PIXELS

    @abstractmethod
    def rgb(self) -> np.ndarray:
        """Return the picture as uint8, height x width x RGB, with its drawings; read-only."""

    @abstractmethod
    def pixels(self) -> Pixels:
        """Return the picture in its stored form, without conversion, with its drawings."""

    def planes(self) -> Planes | None:
        """Return the picture as a decoder gave it to the host; None for another kind of picture."""
        return None

    @abstractmethod
    def layers(self) -> tuple[PicturePlane, ...]:
        """Return the picture's layers for drawing."""

    @abstractmethod
    def copy(self) -> Picture:
        """Return a copy of the picture, with its drawings."""

    def reopen(self) -> Picture:
        """Return a picture of the same pixels; valid until this one is drawn on."""
        return self.copy()


class Rgb(Picture):
    """A picture of red, green and blue: uint8, height x width x RGB."""

    def __init__(self, image: np.ndarray, aspect: Fraction = SQUARE_PIXELS) -> None:
        self._image, self.aspect = image, aspect
        self.height, self.width = image.shape[:2]

    def rgb(self) -> np.ndarray:
        return self._image

    def pixels(self) -> Pixels:
        return Pixels((self._image,))

    def layers(self) -> tuple[PicturePlane, ...]:
        return (PicturePlane(self._image, 1, ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0))),)

    def copy(self) -> Rgb:
        return Rgb(self._image.copy(), self.aspect)


class Planes(Picture):
    """A PyAV frame in `PIXEL_FORMAT`, with read-only memory, as the decoder may refer to it.

    `tags` are FFmpeg's numbers of its matrix, primaries and transfer characteristics.
    """

    def __init__(self, av_frame: Any, convert: Callable[[Any], np.ndarray], aspect: Fraction = SQUARE_PIXELS) -> None:
        self.height, self.width, self.aspect = av_frame.height, av_frame.width, aspect
        self.tags = read_tags(av_frame)
        self._decoded, self._convert = av_frame, convert
        self._copied: Any = None  # copy of the decoded frame

    @property
    def matrix(self) -> int:
        """FFmpeg's number of the matrix, its default for untagged video; players may choose another."""
        return ITU_601 if self.tags[0] == UNSPECIFIED_MATRIX else self.tags[0]

    def rgb(self) -> np.ndarray:
        image = self._convert(self._find_frame())
        return image[: self.height, : self.width]

    def planes(self) -> Planes:
        return self

    def pixels(self) -> Pixels:
        return Pixels(tuple(read_planes(self._find_frame())), self.matrix)

    def layers(self) -> tuple[PicturePlane, ...]:
        if self._copied is None:
            self._copied = self._copy_planes()
        weights = compute_weights(find_matrix(self.tags[0], self.height, self.width))
        parts = zip(read_planes(self._copied), (1, 2, 2), weights, strict=True)
        return tuple(PicturePlane(plane, step, (row,)) for plane, step, row in parts)

    def copy(self) -> Planes:
        planes = Planes(self._copy_planes(), self._convert, self.aspect)
        planes.height, planes.width = self.height, self.width
        return planes

    def reopen(self) -> Planes:
        return type(self)(self._decoded, self._convert, self.aspect)

    def video(self) -> Any:
        """Return a frame for an encoder, of even height and width: an odd last row or column is repeated."""
        if self._copied is None and (self.height % 2 or self.width % 2):
            self._copied = self._copy_planes()
        return self._find_frame()

    def _find_frame(self) -> Any:
        """Return the frame in host memory: the copy with drawings, else the decoder's own."""
        return self._copied or self._decoded

    def _copy_planes(self) -> Any:
        frame = make_blank(self.height, self.width)
        for target, plane in zip(read_planes(frame), read_planes(self._find_frame()), strict=True):
            height, width = plane.shape
            target[:height, :width] = plane
            target[height:] = target[height - 1]
            target[:, width:] = target[:, width - 1 : width]
        frame.colorspace, frame.color_range = self._decoded.colorspace, self._decoded.color_range
        return frame


def make_blank(height: int, width: int) -> Any:
    """Return an empty PyAV frame in `PIXEL_FORMAT`; odd heights and widths are increased by one.

    `VideoFrame.from_numpy_buffer` would save a copy, but rounds heights to a multiple of four (PyAV 18.1).
    """
    import av

    return av.VideoFrame(width + width % 2, height + height % 2, PIXEL_FORMAT)


def convert_image(image: np.ndarray) -> Any:
    """Return a PyAV frame in `PIXEL_FORMAT` and `ITU_601`, from RGB of even height and width."""
    import cv2

    (height, width), frame = image.shape[:2], make_blank(*image.shape[:2])
    values = cv2.cvtColor(image, cv2.COLOR_RGB2YUV_I420)
    blue, red = values[height:].reshape(2, height // 2, width // 2)
    for target, plane in zip(read_planes(frame), (values[:height], blue, red), strict=True):
        target[:] = plane
    return frame


def read_tags(av_frame: Any) -> tuple[int, int, int]:
    """Return FFmpeg's numbers of a frame's matrix, primaries and transfer characteristics."""
    names = ("colorspace", "color_primaries", "color_trc")
    return tuple(int(getattr(av_frame, name, UNSPECIFIED_MATRIX)) for name in names)  # type: ignore[return-value]


def has_plane_format(av_frame: Any) -> bool:
    """Return whether `Planes` support the frame: usual pixel format, range and matrix."""
    is_supported = has_known_colours(av_frame) and av_frame.format.name == PIXEL_FORMAT
    return is_supported and all(plane.line_size > 0 for plane in av_frame.planes)


def has_known_colours(av_frame: Any) -> bool:
    """Return whether `compute_weights` supports the frame's range and matrix."""
    return (
        int(av_frame.colorspace) in (*MATRIX_COEFFICIENTS, UNSPECIFIED_MATRIX)
        and int(av_frame.color_range) != FULL_RANGE
    )


def read_planes(frame: Any) -> list[np.ndarray]:
    """Return the planes of a PyAV frame, uint8, in its own memory."""
    arrays = [np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size) for plane in frame.planes]
    return [array[:, : plane.width] for array, plane in zip(arrays, frame.planes, strict=True)]


def find_matrix(matrix: int, height: int, width: int) -> int:
    """Return the matrix of that number; if unspecified, the players' default for that picture size."""
    if matrix != UNSPECIFIED_MATRIX:
        return matrix
    return ITU_601 if width <= MAX_601_SIZE[0] and height <= MAX_601_SIZE[1] else ITU_709


@lru_cache(maxsize=8)
def compute_weights(matrix: int) -> Weights:
    """Return the weights of red, green and blue in brightness and both colours (ITU-T H.273, 8.3).

    Brightness is from 16 to 235, colours from 16 to 240.
    """
    red, blue = MATRIX_COEFFICIENTS[matrix]
    brightness = np.array([red, 1 - red - blue, blue])
    bluish = (np.array([0, 0, 1]) - brightness) / (2 * (1 - blue))
    reddish = (np.array([1, 0, 0]) - brightness) / (2 * (1 - red))
    rows = ((brightness * 219 / 255, 16), (bluish * 224 / 255, 128), (reddish * 224 / 255, 128))
    return tuple((*map(float, row), float(offset)) for row, offset in rows)  # type: ignore[misc]


class Converter:
    """Converter of decoded frames to RGB arrays; each thread has one object, set up once."""

    def __init__(self) -> None:
        self._thread_local = threading.local()

    def __call__(self, av_frame: Any) -> np.ndarray:
        import av

        if not hasattr(self._thread_local, "reformat"):
            self._thread_local.reformat = av.video.reformatter.VideoReformatter().reformat
        rgb_frame = self._thread_local.reformat(av_frame, format="rgb24", threads=1)
        plane = rgb_frame.planes[0]
        rows = np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)[:, : 3 * rgb_frame.width]
        return np.lib.stride_tricks.as_strided(rows, (rgb_frame.height, rgb_frame.width, 3), (plane.line_size, 3, 1))


# Frames left in GPU memory by the GPU's decoder

CUDA_FORMAT = "cuda"  # FFmpeg's name of the decoder and of its pixel format


def find_accelerator(device: str) -> Any:
    """Return that GPU's decoder (`cuda:0`) for `av.open` in this thread; frames stay in PyTorch's context.

    FFmpeg's own decoder takes over if the GPU can't decode a stream, and frames are then in host memory.
    """
    import torch
    from av.codec.hwaccel import HWAccel

    if torch.cuda.is_available():
        torch.empty(1, device=device)  # makes its context current in this thread
    # With primary_ctx, FFmpeg would require flags that PyTorch doesn't set.
    context: dict[str, object] = {"primary_ctx": "0", "current_ctx": "1"}
    index = device.partition(":")[2] or "0"
    return HWAccel(CUDA_FORMAT, device=index, allow_software_fallback=True, options=context, is_hw_owned=True)


def suits_accelerator(context: Any) -> bool:
    """Return whether a codec's frames can be `Surface`s: eight bits, 4:2:0, of even height and width."""
    has_format = context.format is not None and context.format.name == PIXEL_FORMAT
    return has_format and not (context.width % 2 or context.height % 2)


class Surface(Planes):
    """A frame in a GPU's memory: brightness, and both colours interleaved at half the height and width (NV12).

    It is copied to the host when it is first read there or drawn on.
    """

    def tensors(self) -> list[Any]:
        """Return height x width, and half of that x two, uint8, on the GPU.

        They are valid after the work queued on PyTorch's default stream.
        """
        from torch.utils.dlpack import from_dlpack

        # The capsule directly: PyAV refuses the stream argument that PyTorch would pass.
        return [from_dlpack(plane.__dlpack__()) for plane in self._decoded.planes]

    def layers(self) -> tuple[PicturePlane, ...]:
        self._find_frame()  # drawings go to the host's copy
        return super().layers()

    def _find_frame(self) -> Any:
        if self._copied is None:
            light, colours = (tensor.cpu().numpy() for tensor in self.tensors())
            frame = make_blank(self.height, self.width)
            for target, values in zip(read_planes(frame), (light, colours[..., 0], colours[..., 1]), strict=True):
                np.copyto(target, values)
            frame.colorspace, frame.color_range = self._decoded.colorspace, self._decoded.color_range
            self._copied = frame
        return self._copied


# The ends of the pipeline: frames, their source and their sink

now = time.perf_counter_ns
CODEC_THREAD_DIVISOR, MAX_CODEC_THREADS = 4, 8  # processors per codec thread, and the limit of threads
LANE_DIVISORS = 4, 8  # processors per lane of preprocessing and post-processing, for an engine on a GPU and a CPU


def codec_threads(divisor: int = CODEC_THREAD_DIVISOR) -> int:
    """Return a codec's number of threads: stages are threads already, and codec threads cost processor time."""
    return min(MAX_CODEC_THREADS, max(1, len(os.sched_getaffinity(0)) // divisor))


def lanes_beside(on_cpu: bool) -> int:
    """Return the numbers of threads for preparing frames and for post-processing.

    On a CPU the engine needs the processors.
    """
    return codec_threads(LANE_DIVISORS[on_cpu])


@dataclass
class Frame:
    """One frame with its own `picture`, which may be drawn on.

    `pts` counts in the source's time base (None: missing), `seconds` is the same time; `name` is an image file's.
    `packets` of sound precede it in the source. `began` is the start of its reading, or a live frame's arrival, in ns
    of `perf_counter_ns`. `identities` are the tracked objects of its detections (-1: none yet).
    """

    index: int
    picture: Picture
    began: int
    pts: int | None = None
    seconds: float | None = None
    name: str = ""
    packets: list[Any] = field(default_factory=list)
    detections: Detections | None = None
    identities: np.ndarray | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, in pixels."""
        return self.picture.height, self.picture.width


@dataclass
class Batch:
    """Frames that go through the network together: input arrays, and later copies of its outputs, with names."""

    frames: list[Frame]
    feed: Any
    outputs: list[np.ndarray] = field(default_factory=list)
    names: tuple[str, ...] = ()


class Source(ABC):
    """A source of frames. `name` is for messages.

    `count` is the number of frames (0: unknown), `rate` their average per second (0: none). `live` frames arrive in
    real time; with `images` each is a separate image file. A source with `is_single_pass` can't be read twice, or not
    twice at the same time. After reading, `damaged` counts undecodable pieces, `left` are the packets of sound after
    the last frame, and `notes` are sentences on the reading.
    """

    count = 0
    rate = 0.0
    live = False
    images = False
    is_single_pass = False
    damaged = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.left: list[Any] = []
        self.notes: list[str] = []

    def note(self, sentence: str) -> None:
        """Add a sentence to the notes, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    @abstractmethod
    def read(self, sound: bool = False) -> Iterator[Frame]:
        """Yield the frames in order, from the beginning at every call.

        With `sound`, frames come with the packets of sound before them.
        """

    def template(self) -> Any:
        """Return a container of the same streams as a template for writing; None without a container."""
        return None


class Sink:
    """A destination of frames; the base class drops them."""

    written = 0

    def write(self, frame: Frame) -> None:
        """Write the next frame."""
        self.written += 1

    def close(self, last_packets: list[Any] | None = None) -> list[str]:
        """Complete the written file, also after an error; `last_packets` are packets of sound after the last frame.

        Return sentences on differences from the source.
        """
        return []


def disk_full(e: BaseException) -> bool:
    """Return whether a full disk is the cause; FFmpeg's errors have the same numbers."""
    return getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


# From a frame to the network's input: letterboxed and normalised by OpenCV, as elsewhere in Dyno

PADDING_GREY = 114  # padding around the picture


class Preparation:
    """Writer of frames into a network's input; not thread-safe."""

    def __init__(self, preprocess: Preprocess, inputs: Sequence[Tensor], dims: Dims) -> None:
        image, self.shape = input_data.image_input(inputs, static_shapes(inputs, dims))
        self.name, self._last, self._raw = image.name, channels_last(self.shape), image.dtype == "uint8"
        self.batch, channels, height, width = channels_first(self.shape)
        self.size = height, width
        self._canvas = np.full((height, width, channels) if channels > 1 else (height, width), PADDING_GREY, np.uint8)
        mean, std = input_data.read_normalisation(preprocess, channels)
        # Look-up table of all 256 pixel values, computed as in the evaluation, bit for bit.
        values = np.arange(256, dtype=np.float32).reshape(1, 1, 1, 256) / 255
        self._table = np.ascontiguousarray(((values - mean) / std).reshape(channels, 256).T)[None]
        self._filled: tuple[int, int, int, int] | None = None

    def new_feed(self) -> Any:
        """Return memory for one batch, for a session to stage and bind."""
        return {self.name: np.zeros(self.shape, np.uint8 if self._raw else np.float32)}

    def write(self, picture: Picture, feed: Any, index: int) -> None:
        """Write one picture to position `index` of the batch."""
        import cv2

        image, canvas, target = picture.rgb(), self._canvas, feed[self.name][index]
        if canvas.ndim == 2:
            image = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
        rows, columns = image.shape[:2]
        _, height, width, top, left = fit_geometry(rows, columns * float(picture.aspect), *self.size)
        if self._filled != (height, width, top, left):
            canvas[:] = PADDING_GREY
            self._filled = (height, width, top, left)
        cv2.resize(image, (width, height), canvas[top : top + height, left : left + width],
                   interpolation=cv2.INTER_LINEAR)  # fmt: skip
        if self._last:
            values = canvas if self._raw else np.asarray(cv2.LUT(canvas, self._table))
            np.copyto(target, values.reshape(target.shape))
            return
        for channel, plane in enumerate(cv2.split(canvas)):
            if not self._raw and target.dtype == np.float32:
                cv2.LUT(plane, self._table[..., channel], target[channel])
            else:  # the engine's input type
                np.copyto(target[channel], plane if self._raw else cv2.LUT(plane, self._table[..., channel]))

    def complete(self, feed: Any, count: int) -> None:
        """Finish the feed after its first `count` positions were written, perhaps by another thread."""

    def settle(self, feed: Any) -> None:
        """Wait until the batch is ready; on a device, its work is only queued."""
