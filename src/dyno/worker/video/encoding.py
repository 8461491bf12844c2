"""Annotated frames written to a video file, by PyAV, with the source's times and sound."""

from __future__ import annotations

import difflib
import os
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.spec import UserError
from dyno.worker.video import media
from dyno.worker.video.decoding import find_video_stream
from dyno.worker.video.media import (
    ITU_601,
    PIXEL_FORMAT,
    SQUARE_PIXELS,
    UNSPECIFIED_MATRIX,
    Frame,
    Picture,
    Sink,
    Source,
)

# Fast presets: the output is for viewing, and the encoder shares the processors with the network
FASTEST_SETTINGS = {
    "libx264": {"preset": "veryfast", "crf": "23"},
    "libx265": {"preset": "ultrafast", "crf": "28", "x265-params": "log-level=none"},
    "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8", "row-mt": "1"},
    "libvpx": {"deadline": "realtime", "cpu-used": "8"},
    "libsvtav1": {"preset": "12"},
}
DEFAULT_ENCODERS = {"h264": "libx264", "hevc": "libx265", "vp9": "libvpx-vp9", "vp8": "libvpx", "av1": "libsvtav1"}
# A fragmented MP4 stays playable wherever it ends, and becomes a usual file on closing. Sound begins before the
# pictures, and would shift them if the index didn't wait for both.
IN_PIECES = {"movflags": "+hybrid_fragmented+delay_moov", "flush_packets": "1"}
MATROSKA_OPTIONS = {"flush_packets": "1", "cluster_time_limit": "1000"}
CONTAINER_OPTIONS = {
    ".mp4": IN_PIECES,
    ".mov": IN_PIECES,
    ".m4v": IN_PIECES,
    ".mkv": MATROSKA_OPTIONS,
    ".webm": MATROSKA_OPTIONS,
}
# pixel formats of codecs without PIXEL_FORMAT, the format that every player reads
CODEC_PIXELS = {"mjpeg": ("yuvj420p",)}
# Codecs and containers that store the aspect of non-square pixels
ASPECT_CODECS, ASPECT_CONTAINERS = ("h264", "hevc", "mpeg4", "mjpeg"), (".mp4", ".mov", ".m4v")
# Containers whose frames have no times, only a rate, and codecs that need one; ticks per second of coarse clocks
CONSTANT_CONTAINERS = (".avi", ".y4m", ".mjpeg", ".ogv", ".h264", ".264", ".h265", ".265", ".hevc")
CONSTANT_CODECS = ("mpeg1video", "mpeg2video", "h263")
CLOCK_LIMITS = {"mpeg4": 65_535, "gif": 100}
MIN_SHIFT_S = 0.1  # shift of a frame from which it is mentioned
CODECS_CHOICE = 0  # FFmpeg's AV_PICTURE_TYPE_NONE: the codec, not the source, chooses a frame's kind
DEFAULT_RATE = 30  # for a source without a rate
PIECE_S = 1  # seconds between key frames, which also end a fragment of an MP4


class VideoSink(Sink):
    """A video in the container named by the file's suffix."""

    def __init__(self, path: Path, source: Source, codec: str = "") -> None:
        import av

        self._path, self._source = path, source
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._container = av.open(str(path), "w", options=CONTAINER_OPTIONS.get(path.suffix.lower(), {}))
        except OSError as e:
            raise UserError(f"{path} can't be written: {e.strerror}") from e
        except ValueError as e:
            suffix = repr(path.suffix)
            raise UserError(f"no container is known by the suffix {suffix}; give .mp4, .mkv, .webm or .avi") from e
        self._codec = _choose_encoder(av, self._container, path, codec)
        self._stream: Any = None
        self._sound: Any = None
        self._template: Any = None
        self._last, self._resized, self._shift_s, self._notes = -1, 0, 0.0, list[str]()
        self._reformat = av.video.reformatter.VideoReformatter()
        self._tags = ITU_601, UNSPECIFIED_MATRIX, UNSPECIFIED_MATRIX

    def write(self, frame: Frame) -> None:
        if self._stream is None:
            self._create_streams(frame.picture)
        self._resized += frame.size != self._first_size
        picture, stream = self._convert_picture(frame.picture), self._stream
        picture.time_base, picture.pts = stream.codec_context.time_base, self._compute_time(frame)
        self._mux_sound(frame.packets, self._container)
        try:
            packets = stream.encode(picture)
        except ValueError as e:
            kind = f"{stream.width} x {stream.height} at {float(stream.codec_context.framerate):.3g} frames/s"
            raise UserError(f"{self._codec} can't encode {kind}; give .mp4, or --codec h264") from e
        self._container.mux(packets)
        self.written += 1

    def _convert_picture(self, picture: Picture) -> Any:
        planes = picture.planes()
        if planes is None or self._stream.pix_fmt != PIXEL_FORMAT or planes.tags != self._tags:
            return self._convert_rgb(picture.rgb())
        video, size = planes.video(), (self._stream.width, self._stream.height)
        if (video.width, video.height) != size:
            return self._reformat.reformat(video, *size, interpolation="AREA", threads=1)
        video.pict_type = CODECS_CHOICE
        with suppress(AttributeError):
            video.duration = 0  # in the source's time base
        return video

    def _convert_rgb(self, image: np.ndarray) -> Any:
        """Return the image in the codec's pixel format; for the usual one, OpenCV takes a quarter of FFmpeg's time."""
        import av
        import cv2

        if image.shape[:2] != self._size:
            image = cv2.resize(image, self._size[::-1], interpolation=cv2.INTER_AREA)
        pad_bottom, pad_right = self._stream.height - image.shape[0], self._stream.width - image.shape[1]
        if pad_bottom or pad_right:
            image = cv2.copyMakeBorder(image, 0, pad_bottom, 0, pad_right, cv2.BORDER_REPLICATE)
        image, matrix = np.ascontiguousarray(image), self._tags[0]
        if self._stream.pix_fmt == PIXEL_FORMAT and matrix == ITU_601:
            return media.convert_image(image)
        rgb_frame = av.VideoFrame.from_ndarray(image, format="rgb24")
        colours = {} if matrix == UNSPECIFIED_MATRIX else {"dst_colorspace": matrix}
        return self._reformat.reformat(rgb_frame, format=self._stream.pix_fmt, threads=1, **colours)

    def close(self, last_packets: list[Any] | None = None) -> list[str]:
        if self._container is None:
            return []
        container, self._container = self._container, None
        try:
            if self._stream is not None:
                self._mux_sound(last_packets or [], container)
                container.mux(self._stream.encode())
        finally:
            container.close()
            if self._template is not None:
                self._template.close()
        if self._resized:
            self._notes.append(f"{self._resized} frames had another size than the first and were resized to it")
        if self._shift_s > MIN_SHIFT_S:
            kind = self._codec if self._codec in CONSTANT_CODECS else self._path.suffix
            reason = f"{kind} has a constant rate: frames were moved by up to {self._shift_s:.2f} s"
            self._notes.append(f"{reason}; .mkv and .mp4 keep the times of the source")
        return self._notes

    def _create_streams(self, picture: Picture) -> None:
        """Create the streams, with the size and colours of the first picture."""
        self._first_size = picture.height, picture.width
        height, width = self._size = self._choose_written_size(picture)
        rate = Fraction(self._source.rate or DEFAULT_RATE).limit_denominator(1001)
        options = {"g": str(max(1, round(PIECE_S * rate))), **FASTEST_SETTINGS.get(self._codec, {})}
        self._stream = self._container.add_stream(self._codec, rate=rate, options=options)
        stream = self._stream
        stream.pix_fmt = self._choose_pixel_format()
        stream.codec_context.thread_count = media.codec_threads()
        planes = picture.planes()
        if planes is not None and stream.pix_fmt == PIXEL_FORMAT:
            # If the container doesn't store the matrix, a player's guess must be right.
            is_guessed = planes.tags[0] in (UNSPECIFIED_MATRIX, media.find_matrix(UNSPECIFIED_MATRIX, height, width))
            self._tags = planes.tags if is_guessed or self._path.suffix.lower() in CONTAINER_OPTIONS else self._tags
        context = stream.codec_context  # for large frames, players would guess another matrix
        context.colorspace, context.color_primaries, context.color_trc = self._tags
        # B-frames wait for later frames, and would delay the beginning of a fragmented MP4.
        stream.codec_context.max_b_frames = 0
        stream.width, stream.height = width + width % 2, height + height % 2
        if self._size == self._first_size and picture.aspect != SQUARE_PIXELS:
            context.sample_aspect_ratio = picture.aspect
        if (stream.width, stream.height) != (width, height):
            coded_size = f"{stream.width} x {stream.height}"
            self._notes.append(f"{width} x {height} became {coded_size}: the codec needs even sides")
        time_base = 1 / rate
        self._template = self._source.template()
        if self._template is not None:
            time_base = find_video_stream(self._template).time_base or time_base
            self._add_sound()
        is_constant = self._path.suffix.lower() in CONSTANT_CONTAINERS or self._codec in CONSTANT_CODECS
        is_constant = is_constant or self._template is None
        limit = CLOCK_LIMITS.get(self._codec, time_base.denominator)
        self._has_source_clock = not is_constant and time_base.denominator <= limit
        own_clock = 1 / rate if is_constant else Fraction(1, limit)
        stream.codec_context.time_base = time_base if self._has_source_clock else own_clock

    def _choose_written_size(self, picture: Picture) -> tuple[int, int]:
        """Return the picture's height and width, in square pixels if the file can't store the pixels' aspect."""
        import av

        codec = av.codec.Codec(self._codec, "w").canonical_name
        if picture.aspect == SQUARE_PIXELS or codec in ASPECT_CODECS or self._path.suffix.lower() in ASPECT_CONTAINERS:
            return picture.height, picture.width
        width = max(1, round(picture.width * picture.aspect))
        size = f"{width} x {picture.height}"
        self._notes.append(f"{codec} in {self._path.suffix} has square pixels: frames were written as {size}")
        return picture.height, width

    def _choose_pixel_format(self) -> str:
        """Return the pixel format that every player supports, else the codec's own."""
        import av

        formats = [f.name for f in av.codec.Codec(self._codec, "w").video_formats or ()] or [PIXEL_FORMAT]
        candidates = CODEC_PIXELS.get(self._codec, (PIXEL_FORMAT, "yuvj420p"))
        return next((name for name in candidates if name in formats), formats[0])

    def _add_sound(self) -> None:
        tracks = self._template.streams.audio
        if not tracks:
            return
        name = tracks[0].codec_context.name if tracks[0].codec_context else "unknown"
        try:
            self._sound = self._container.add_stream_from_template(tracks[0])
        except (ValueError, OSError):
            self._notes.append(f"the sound ({name}) was left out: {self._path.suffix} can't hold it")

    def _compute_time(self, frame: Frame) -> int:
        """Return the frame's time, later than the previous frame's, as containers require."""
        if frame.pts is not None and self._has_source_clock:
            pts = frame.pts
        elif frame.seconds is not None:
            pts = round(frame.seconds / float(self._stream.codec_context.time_base))
        else:
            pts = frame.index
        self._last = max(pts, self._last + 1)
        if frame.seconds is not None:
            self._shift_s = max(self._shift_s, abs(self._last * self._stream.codec_context.time_base - frame.seconds))
        return self._last

    def _mux_sound(self, packets: list[Any], container: Any) -> None:
        for packet in packets if self._sound is not None else ():
            packet.stream = self._sound
            container.mux([packet])


def _choose_encoder(av: Any, container: Any, path: Path, codec: str) -> str:
    """Return the encoder by the user's name, else the container's default in its usual implementation.

    Raise a `UserError` if it can't be used.
    """
    name = codec or container.default_video_codec
    name = DEFAULT_ENCODERS.get(name, name)
    try:
        av.codec.Codec(name, "w")
        with av.open(os.devnull, "w", format=container.format.name) as probe:
            probe.add_stream(name)
    except ValueError:
        container.close()
        path.unlink(missing_ok=True)
        raise UserError(_explain_refusal(av, name, path.suffix)) from None
    return str(name)


def _explain_refusal(av: Any, name: str, suffix: str) -> str:
    codecs = sorted(av.codec.codecs_available)
    if name in codecs:
        with suppress(ValueError):
            av.codec.Codec(name, "w")
            return f"{suffix} can't hold {name}; give another --codec or container, such as .mkv, which holds most"
        return f"this FFmpeg can't encode {name}; give another --codec, such as h264 or mpeg4"
    similar = difflib.get_close_matches(name, codecs, 1)
    advice = f"did you mean {similar[0]!r}?" if similar else "give h264, hevc, vp9 or mpeg4"
    return f"unknown codec {name!r}; {advice}"
