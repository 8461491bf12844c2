"""Videos made for tests: scikit-image's photographs in motion, with a frame marker and sound.

The marker is a bright square on a dark strip at the top; its place is the frame's number modulo PLACES. A detector of
the marker (`MARKER_NET`) shows whether boxes belong to the frame on which they are drawn.
"""

import io
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PLACES, CELL = 12, 32  # places of the marker, and cell size in pixels
RATE = 25
SOUND_RATE = 44_100

# A "detector": scores are the red channel's mean over each cell, boxes are the cells of the strip.
MARKER_NET = f"""
import torch

class Marker(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.pool = torch.nn.AvgPool2d({CELL})
    def forward(self, x):
        score = self.pool(x[:, :1])[:, 0, 0] - self.pool(x[:, 2:])[:, 0, 0]
        count = score.shape[1]
        centre = ({CELL} * (torch.arange(count, device=x.device) + 0.5)).expand(x.shape[0], count).to(x)
        side = torch.full_like(centre, {CELL})
        return torch.stack([centre, side / 2, side, side, score], 1)

def net(): return Marker()
"""


# Command-line arguments for that detector, and for a short measurement.
NET = ("--model", "marker.py:net", "--task", "detect", "--classes", 1, "--size", "288x384")
QUICK = ("--seconds", 0.05, "--warmup", 0.02)

# A detector of red squares of CELL pixels anywhere in a row, to four pixels.
ROWS_NET = f"""
import torch

class Rows(torch.nn.Module):
    def forward(self, x):
        red = torch.nn.functional.avg_pool2d(x[:, :1] - x[:, 2:], {CELL}, ({CELL}, 4))[:, 0]
        count, rows, columns = red.shape
        down, along = {CELL} * (torch.arange(rows) + 0.5), 4 * torch.arange(columns) + {CELL / 2}
        y, x = torch.meshgrid(down, along, indexing="ij")
        side = torch.full_like(x, {CELL})
        places = [each.reshape(1, -1).expand(count, -1) for each in (x, y, side, side)]
        return torch.stack([*places, red.reshape(count, -1)], 1)

def net(): return Rows()
"""


def two_squares(count: int, hidden: range) -> Iterator[np.ndarray]:
    """Yield 288 x 384 frames: two red squares pass each other; the lower one is missing in the `hidden` frames."""
    from skimage import data

    photo = np.repeat(data.camera()[:288, :384, None], 3, 2)
    for k in range(count):
        frame = photo.copy()
        for row, left, seen in ((0, 4 * k, True), (3, 352 - 4 * k, k not in hidden)):
            if seen:
                frame[row * CELL : (row + 1) * CELL, left : left + CELL] = (255, 0, 0)
        yield frame


def pictures(count: int, height: int = 288, width: int = 384, first: int = 0) -> Iterator[np.ndarray]:
    """Yield frames, uint8 height x width x 3: a window that moves over a photograph, with the marker."""
    from skimage import data

    photo = np.tile(data.astronaut(), (1 + height // 512, 2 + width // 512, 1))
    for k in range(first, first + count):
        left = 3 * k % 512
        frame = photo[:height, left : left + width].copy()
        frame[:CELL] = 0
        place = k % PLACES * CELL
        frame[: CELL - 1, place + 1 : place + CELL - 1] = (255, 0, 0)
        yield frame


def write(
    path: Path,
    frames: Sequence[np.ndarray] | Iterator[np.ndarray],
    *,
    codec: str = "libx264",
    times: Sequence[int] | None = None,
    sound: bool = False,
    options: dict[str, str] | None = None,
    pixels: str = "yuv420p",
    set_up: Callable[[Any], None] = lambda stream: None,
    still: bool = False,
) -> Path:
    """Write a video. `times`: the frames' times in ms (default: RATE a second); `pixels`: FFmpeg's pixel format.

    `set_up` gets the stream before the first frame. `still` adds a stream of one blue 200 x 200 picture first.
    """
    import av

    with av.open(str(path), "w") as container:
        cover = container.add_stream("mjpeg", rate=1) if still else None
        stream, voice = None, container.add_stream("aac", rate=SOUND_RATE) if sound else None
        for k, frame in enumerate(frames):
            if stream is None:
                stream = container.add_stream(codec, rate=RATE, options=options or {})
                stream.height, stream.width = frame.shape[:2]
                stream.pix_fmt = pixels
                if times is not None:
                    stream.codec_context.time_base = Fraction(1, 1000)
                set_up(stream)
                if cover is not None:
                    container.mux(_still(cover))
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            if times is not None:
                picture.pts, picture.time_base = times[k], Fraction(1, 1000)
            container.mux(stream.encode(picture))
            if voice is not None:
                container.mux(voice.encode(_tone(k)))
        for each in filter(None, (stream, voice)):
            container.mux(each.encode())
    return path


def _still(stream: Any) -> list[Any]:
    """Encode one blue picture; return the stream's packets."""
    import av

    stream.height, stream.width, stream.pix_fmt = 200, 200, "yuvj420p"
    picture = av.VideoFrame.from_ndarray(np.full((200, 200, 3), (0, 0, 255), np.uint8), format="rgb24")
    return [*stream.encode(picture), *stream.encode()]


def with_cover(clip: Path, path: Path) -> Path:
    """Copy the MP4 file with a blue cover (`covr`) in front of its streams, as tagging programs write it."""

    def box(kind: bytes, *parts: bytes) -> bytes:
        return struct.pack(">I4s", 8 + sum(map(len, parts)), kind) + b"".join(parts)

    still = io.BytesIO()
    Image.new("RGB", (200, 200), (0, 0, 255)).save(still, "JPEG")
    cover = box(b"covr", box(b"data", struct.pack(">II", 13, 0), still.getvalue()))
    kind = box(b"hdlr", bytes(8), b"mdirappl", bytes(9))
    tags = box(b"udta", box(b"meta", bytes(4), kind, box(b"ilst", cover)))
    data = clip.read_bytes()
    start = data.index(b"moov") - 4
    assert start > data.index(b"mdat"), "places of frames don't move where the index comes last"
    size, first = struct.unpack_from(">I", data, start)[0], struct.unpack_from(">I", data, start + 8)[0]
    head, tail = data[start + 8 : start + 8 + first], data[start + 8 + first : start + size]
    path.write_bytes(data[:start] + box(b"moov", head, tags, tail) + data[start + size :])
    return path


def _tone(k: int) -> Any:
    """Return one frame's length of sound."""
    import av

    count = SOUND_RATE // RATE
    phase = np.arange(k * count, (k + 1) * count) * 2 * np.pi * 440 / SOUND_RATE
    tone = av.AudioFrame.from_ndarray(np.sin(phase, dtype=np.float32)[None] * 0.1, format="fltp", layout="mono")
    tone.sample_rate, tone.pts, tone.time_base = SOUND_RATE, k * count, Fraction(1, SOUND_RATE)
    return tone


def read(path: Path) -> tuple[list[np.ndarray], list[float]]:
    """Return the frames of a video as RGB, and their times in seconds."""
    import av

    with av.open(str(path)) as container:
        decoded = list(container.decode(video=0))
    return [frame.to_ndarray(format="rgb24") for frame in decoded], [float(frame.time) for frame in decoded]


def place_of(frame: np.ndarray) -> int:
    """Return the marker's place in a frame: the frame's number modulo PLACES."""
    strip = frame[: CELL - 8, :].astype(int)
    red = (strip[..., 0] - strip[..., 2]).mean(0)[: PLACES * CELL].reshape(PLACES, CELL).mean(1)
    return int(red.argmax())


def places(path: Path) -> list[int]:
    """Return the marker's place in each frame of a video."""
    return [place_of(frame) for frame in read(path)[0]]


def boxes(path: Path) -> list[dict[str, Any]]:
    """Read a detections file: one record per frame, with boxes, size and time."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def expected(count: int, first: int = 0) -> list[int]:
    """Return the marker's place in the first `count` frames of `pictures`."""
    return [k % PLACES for k in range(first, first + count)]
