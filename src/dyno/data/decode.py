"""Decoding of image files to pixels, in parallel, as torchvision's Resize and CenterCrop do it on PIL images."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from dyno.data.rows import DecodedRow, Row, seal_row
from dyno.worker.extras import install
from dyno.worker.inputs.specs import fit_geometry, size_before_crop
from dyno.worker.spec import Preprocess, Unavailable, UserError, check_known, to_json

# Decoding by several processes, in order, through shared memory.

PROCESS_MODULE = "dyno.data.decoding_process"
INDEX_BYTES = 8
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
END_S = 10.0
MAX_SLOTS = 4096  # all indices must fit into a pipe


class DecoderDied(Exception):
    """Error: the processes ended before all images were decoded."""


def decode_rows(
    paths: Sequence[Path], transform: list[Any], shape: tuple[int, ...], start: int, processes: int, slots: int
) -> Iterator[DecodedRow]:
    """Yield each file's pixels, or the reason if unreadable, in order from `start` on, with its seconds and seal.

    `transform` holds the arguments of a `Transform`; `slots` is the number of images in transit in shared memory.
    Raises `DecoderDied`, and OSError if shared memory or processes are unavailable.
    """
    slots = min(slots, MAX_SLOTS)
    size = int(np.prod(shape))
    memory = os.memfd_create("dyno-images")
    os.ftruncate(memory, slots * size)
    pixels = np.frombuffer(mmap.mmap(memory, 0), np.uint8).reshape(slots, *shape)
    (tasks, task_writer), (results, result_writer) = os.pipe(), os.pipe()
    order = {
        "processes": processes, "transform": transform, "paths": [*map(str, paths)],
        "memory": memory, "slots": slots, "tasks": tasks, "results": result_writer,
    }  # fmt: skip
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROCESS_MODULE], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, pass_fds=(memory, tasks, result_writer), start_new_session=True,
            env={**os.environ, **ONE_THREAD},
        )  # fmt: skip
    except OSError:
        os.close(task_writer)
        os.close(results)
        raise
    finally:
        for descriptor in (memory, tasks, result_writer):
            os.close(descriptor)
    try:
        with open(results, "rb") as lines:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin:  # the process has ended; there will be no line
                process.stdin.write(json.dumps(order).encode())
            yield from _in_order(pixels, task_writer, lines, range(start, len(paths)))
    finally:
        os.close(task_writer)  # closing the pipe ends the processes
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


def _in_order(pixels: np.ndarray, task_writer: int, lines: Any, indices: range) -> Iterator[DecodedRow]:
    """Yield the rows in order, with one image in flight per slot; a slot is reused once its row is yielded."""
    pending, ready = iter(indices), dict[int, DecodedRow]()

    def ask_for_next() -> None:
        if (index := next(pending, None)) is not None:
            with suppress(BrokenPipeError):  # the processes died, so the lines end
                os.write(task_writer, index.to_bytes(INDEX_BYTES, "little"))

    for _ in range(len(pixels)):
        ask_for_next()
    for index in indices:
        while index not in ready:
            line = lines.readline()
            if not line.endswith(b"\n"):
                raise DecoderDied
            done_index, seconds, seal, reason = json.loads(line)
            ready[done_index] = DecodedRow(reason or pixels[done_index % len(pixels)], seconds, seal)
        decoded = ready.pop(index)
        if not isinstance(decoded.row, str):  # copied, as the receiver may keep it
            decoded = decoded._replace(row=decoded.row.copy())
        ask_for_next()
        yield decoded


Progress = Callable[[int, int], None]

# Formats that Pillow may open, by content: others run foreign programs (EPS) or hold no photographs.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
IN_FLIGHT_BYTES = 64 << 20
EXIF_ORIENTATION = 0x0112
PHOTOMETRIC, EXTRA_SAMPLES, SAMPLE_FORMAT = 262, 338, 339  # tags of a TIFF
WHITE_IS_ZERO = 0
ROTATED_ORIENTATIONS = (5, 6, 7, 8)  # EXIF orientations that swap width and height
MAX_REASON_LENGTH = 300  # JSON of a reason must fit into a pipe
MAX_THREADS = 8  # sixteen were slower than eight, as threads wait for the interpreter's lock
EXAMINED_IMAGES = 20  # images checked for their bit depth
THREADS_SUFFICE_CORES = 4  # up to this number of cores, threads are as fast as processes
MIN_PROCESS_GAIN_S = 1.5  # decoding time in threads that justifies starting processes
PADDING_GREY = 114  # padding of a letterboxed image


class Transform:
    """Conversion of images to uint8 of `shape` (channels, height, width); `identity` has all that shapes pixels.

    With `upright` images are first rotated by their EXIF orientation.
    """

    def __init__(self, size: tuple[int, int], preprocess: Preprocess, channels: int, upright: bool = False) -> None:
        check_known("interpolation", preprocess.interpolation, INTERPOLATIONS)
        if preprocess.resize != 0 and preprocess.resize < 1:
            raise UserError(f"resize {preprocess.resize} would leave less than the crop; give 0, or 1 and more")
        if min(size) < 1 or channels not in (1, 3):
            raise UserError(f"images can't become {size[0]} x {size[1]} pixels of {channels} channels (1 or 3)")
        self.shape = (channels, *size)
        self.identity: dict[str, Any] = {
            "size": list(size),
            "channels": channels,
            "preprocess": {"resize": preprocess.resize, "interpolation": preprocess.interpolation},
        }
        self.made_of = [list(size), to_json(preprocess), channels, upright]
        self._preprocess = preprocess
        if preprocess.squash:
            self.identity["preprocess"]["squash"] = True
        if preprocess.letterbox:
            self.identity["preprocess"] = {"letterbox": True}
        self._upright = upright
        if upright:
            self.identity["upright"] = True

    def pixels(self, image: Any) -> np.ndarray:
        """Convert the PIL image to uint8 pixels, channels x height x width."""
        from PIL import Image

        channels, height, width = self.shape
        image = _convert_mode(image, channels)
        if self._preprocess.letterbox:
            return self._letterbox_image(image)
        size = size_before_crop(image.size, (width, height), self._preprocess)
        image = image.resize(size, Image.Resampling[self._preprocess.interpolation.upper()])
        left, top = round((image.width - width) / 2), round((image.height - height) / 2)
        pixels = np.asarray(image.crop((left, top, left + width, top + height)))
        return np.ascontiguousarray(pixels.reshape(height, width, channels).transpose(2, 0, 1))

    def _letterbox_image(self, image: Any) -> np.ndarray:
        """Letterbox the image: fit it into the size without distortion, with grey evenly on both sides.

        Pixels are interpolated between four neighbours as in OpenCV's INTER_LINEAR, which detectors are trained on.
        Pillow's own resize averages over more pixels when shrinking, which changes them by tens of grey levels.
        """
        from PIL import Image

        channels, to_height, to_width = self.shape
        _, height, width, top, left = fit_geometry(image.height, image.width, to_height, to_width)
        steps = (image.width / width, 0, 0, 0, image.height / height, 0)
        image = image.transform((width, height), Image.Transform.AFFINE, steps, Image.Resampling.BILINEAR)
        canvas = np.full(self.shape, PADDING_GREY, np.uint8)
        pixels = np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)
        canvas[:, top : top + height, left : left + width] = pixels
        return canvas

    def read(self, path: Path) -> Row:
        """Read the file's pixels; return the reason if it can't be read."""
        from PIL import Image, ImageOps, UnidentifiedImageError

        try:
            if not path.is_file():
                return "not a file"
            with Image.open(path, formats=FORMATS) as image:
                _check_samples(image)
                return self.pixels(ImageOps.exif_transpose(image) if self._upright else image)
        except UnidentifiedImageError:
            return "not an image of a known format and type of pixels"
        except Exception as e:  # decoders raise nearly everything (OSError, SyntaxError, struct.error…) on bad data
            return (str(e).replace(str(path), path.name) or type(e).__name__)[:MAX_REASON_LENGTH]

    def read_size(self, path: Path) -> tuple[int, int] | None:
        """Read the original image's height and width from the file's header; None if it can't be read."""
        from PIL import Image

        try:
            with Image.open(path, formats=FORMATS) as image:
                is_rotated = self._upright and image.getexif().get(EXIF_ORIENTATION, 1) in ROTATED_ORIENTATIONS
                return (image.width, image.height) if is_rotated else (image.height, image.width)
        except Exception:  # `read` reports the reason
            return None


def _check_samples(image: Any) -> None:
    """Raise ValueError for a TIFF that Pillow would decode to wrong values."""
    tags = getattr(image, "tag_v2", {})
    if 2 in np.atleast_1d(tags.get(SAMPLE_FORMAT, 1)) and image.mode == "L":
        raise ValueError("pixels are signed numbers, which have no known range")
    if image.mode.startswith("I;16") and tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:
        raise ValueError("16-bit pixels are inverted (WhiteIsZero); save it with BlackIsZero")


def _convert_mode(image: Any, channels: int) -> Any:
    if image.mode.startswith("I;16"):  # Pillow's own conversion would clip at 255 and leave a white image
        from PIL import Image

        values = np.asarray(image)
        if 0 < values.max() < 256:
            raise ValueError("16-bit pixels are all below 256, and would be black; save it in 8 bits")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)  # converting to the same mode copies


def decode_images(
    paths: list[Path], transform: Transform, progress: Progress | None = None, start: int = 0
) -> Iterator[DecodedRow]:
    """Yield each file's pixels, or the reason if unreadable, in order from `start` on, with one thread's seconds.

    Threads and processes decode the same pixels. Threads begin, as Pillow decodes and resizes outside the interpreter's
    lock; processes take over if there are many cores and much is left to do.
    """
    report = progress or (lambda count, total: None)
    cores = len(os.sched_getaffinity(0))
    for count, row in enumerate(_iter_rows(paths, transform, start, cores), start + 1):
        yield row
        report(count, len(paths))


def _iter_rows(paths: list[Path], transform: Transform, start: int, cores: int) -> Iterator[DecodedRow]:
    count, seconds = start, 0.0
    for row in _decode_in_threads(
        paths[: start + 8 * cores] if cores > THREADS_SUFFICE_CORES else paths, transform, start
    ):
        count, seconds = count + 1, seconds + row.seconds
        yield row
    remaining = len(paths) - count
    if remaining and remaining * seconds / (count - start) > MIN_PROCESS_GAIN_S * MAX_THREADS:
        slots = _count_in_flight(cores, transform)
        with suppress(DecoderDied, OSError):  # threads continue if a decoder was killed or memory is short
            for row in decode_rows(paths, transform.made_of, transform.shape, count, cores, slots):
                count += 1
                yield row
    yield from _decode_in_threads(paths, transform, count)


def _count_in_flight(workers: int, transform: Transform) -> int:
    """Return the number of images decoded ahead of the requested one."""
    count = max(2 * workers, IN_FLIGHT_BYTES // int(np.prod(transform.shape)))
    return min(count, 64 * workers)


def _decode_in_threads(paths: list[Path], transform: Transform, start: int) -> Iterator[DecodedRow]:
    register_formats()
    workers = count_threads()
    chunk = _count_in_flight(workers, transform)

    def read_row(path: Path) -> DecodedRow:
        start_time = time.perf_counter()
        row = transform.read(path)
        return seal_row(row, time.perf_counter() - start_time)

    with ThreadPoolExecutor(workers) as pool:
        for first in range(start, len(paths), chunk):
            yield from pool.map(read_row, paths[first : first + chunk])


def count_threads() -> int:
    """Return the number of threads for work on images."""
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


def read_sizes(paths: list[Path], transform: Transform) -> list[tuple[int, int] | None]:
    """Return each file's height and width; None for an unreadable file."""
    register_formats()
    with ThreadPoolExecutor(count_threads()) as pool:
        return list(pool.map(transform.read_size, paths))


def warn_left_out(paths: list[Path]) -> list[str]:
    """Return warnings on images read in part: the upper 8 of 16 bits, the first page, the first bands.

    A few images of each suffix are checked. 16-bit images with 10 to 14 bits in use, as from scanners and cameras, are
    dark; a single bright pixel doesn't change that.
    """
    from PIL import Image

    by_suffix: dict[str, list[Path]] = {}
    for path in paths:
        by_suffix.setdefault(path.suffix.lower(), []).append(path)
    highest, notes = 0, dict[str, str]()
    for path in [path for group in by_suffix.values() for path in group[:: max(1, len(group) // EXAMINED_IMAGES)]]:
        with suppress(Exception), Image.open(path, formats=FORMATS) as image:  # `read` gives the reason
            is_deep = ";16" in f"{image.mode} {image.tile}"
            for part in _find_unread(image):
                notes.setdefault(part, f"images such as {path.name} are read in part: {part} alone")
            if is_deep:
                is_whole = image.mode.startswith("I;16")
                values = np.asarray(image) if is_whole else np.asarray(image.convert("RGB")).astype(int) * 256 + 255
                highest = max(highest, int(np.percentile(values, 99.9, method="higher")))
    if 0 < highest < 1 << 14:
        text = f"16-bit images have values up to {highest:,}, and only the upper 8 bits are read, so they are dark: "
        notes["dark"] = f"{text}scale them to 65,535, or as the network was trained"
    return list(notes.values())


def _find_unread(image: Any) -> list[str]:
    """Name the only part read of an image with more bands, or more pages of its size (others are previews)."""
    extra, size = np.atleast_1d(getattr(image, "tag_v2", {}).get(EXTRA_SAMPLES, ())), image.size
    bands = "first band" if image.getbands()[0] == "L" else "first three bands"
    parts = [f"the {bands}"] if len(extra) > 1 or 0 in extra else []
    if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
        image.seek(1)
        parts += ["the first page"] * (image.size == size)
        image.seek(0)
    return parts


def register_formats() -> None:
    """Register Pillow's decoders now: else the first of several threads to open an image would do it for all."""
    from PIL import Image

    Image.init()


def find_library_version(distribution: str) -> str:
    """Return the version of a library that shapes the pixels; raise `Unavailable` with an install command."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError as e:
        raise Unavailable(f"reading images needs {distribution}; {install(distribution)}") from e
