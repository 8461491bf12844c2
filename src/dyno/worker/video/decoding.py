"""Frames of a video file or stream, by PyAV, in order, with the sound between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.spec import UserError
from dyno.worker.video import media
from dyno.worker.video.media import SQUARE_PIXELS, Converter, Frame, Picture, Planes, Rgb, Source, now

Turn = tuple[bool, bool, bool]  # whether rows become columns; then whether it is mirrored across and down
NO_TURN: Turn = (False, False, False)
MIN_MISSING_S = 1.0  # a video that ends this much before its stated end is cut short
MAX_RATE_DIFFERENCE = 0.01  # relative difference between stated and actual frame rate, from which the latter is used
ROUNDING_SHARE = 0.01  # share of a display matrix's largest value; smaller ones are rounding
SILENCE_TIMEOUT_S = 10.0  # a stream silent for longer is lost


class VideoSource(Source):
    """A video file, or a stream by its URL.

    The `device` (`cuda:0`) decodes it if its decoder supports the format; else FFmpeg's own decoder does.
    """

    def __init__(self, location: str, live: bool, device: str = "") -> None:
        super().__init__(location if "://" in location else Path(location).name)
        self.location, self.live, self.is_single_pass, self._device = location, live, "://" in location, ""
        with open_container(location) as container:
            stream = find_video_stream(container)
            self._aspect = stream.sample_aspect_ratio or SQUARE_PIXELS
            self.count, self.rate = int(stream.frames or 0), float(stream.average_rate or 0)
            self._note_streams(container, stream)
            self._device = device if device and media.suits_accelerator(stream.codec_context) else ""

    def _note_streams(self, container: Any, stream: Any) -> None:
        """Note the choice among several videos, and non-square pixels."""
        context = stream.codec_context
        if other_count := len(_list_videos(container)) - 1:
            others_text = "the other is" if other_count == 1 else f"{other_count} others are"
            stream_text = f"stream {stream.index} ({context.name}, {context.width} x {context.height})"
            self.note(f"{self.name} has {other_count + 1} videos: {stream_text} is used, {others_text} left out")
        if self._aspect != SQUARE_PIXELS:
            square_size = f"{round(context.width * self._aspect)} x {context.height}"
            ratio, stored_size = "{}:{}".format(*self._aspect.as_integer_ratio()), f"{context.width} x {context.height}"
            advice = f"the network sees its {stored_size} as {square_size}; boxes are in stored pixels"
            self.note(f"the pixels of {self.name} are not square ({ratio}): {advice}")

    def template(self) -> Any:
        return open_container(self.location)

    def _correct_rate(self, times: list[float]) -> None:
        """Take the rate from the frames' times if the file states another, as in Matroska files of variable rate."""
        if self.damaged or len(times) < 2 or times[0] == times[-1] or times != sorted(times):
            return  # times restart in concatenated files
        rate = (len(times) - 1) / (times[-1] - times[0])
        if abs(rate - self.rate) > MAX_RATE_DIFFERENCE * self.rate:
            self.rate = rate

    def read(self, sound: bool = False) -> Iterator[Frame]:
        self.damaged = 0
        with open_container(self.location, self._device) as container:
            video = find_video_stream(container)
            video.thread_type, video.codec_context.thread_count = "AUTO", media.codec_threads()
            sound_streams = container.streams.audio[:1] if sound else []
            make_picture, index, packets, began = _Pictures(self._aspect, self.note), 0, [], now()
            end, times = 0.0, list[float]()
            for packet in self._iter_packets(container, [video, *sound_streams]):
                if packet.stream.type == "audio":
                    if packet.dts is not None:  # the last packet is empty
                        packets.append(packet)
                    continue
                if self.live:
                    began = now()  # waiting for the camera isn't work
                for av_frame in self._decode_packet(packet):
                    seconds = None if av_frame.pts is None else float(av_frame.pts * av_frame.time_base)
                    end = max(end, (seconds or 0.0) + float((av_frame.duration or 0) * (av_frame.time_base or 0)))
                    if seconds is not None and not self.live:
                        times.append(seconds)
                    yield Frame(index, make_picture(av_frame), began, av_frame.pts, seconds, packets=packets)
                    index, packets, began = index + 1, [], now()
            if not index:
                raise UserError(f"{self.location} has no frame that can be decoded; it is empty or damaged")
            self.left = packets
            self._correct_rate(times)
            if not self.is_single_pass and end and (stated_end := _read_end(video)) > end + MIN_MISSING_S:
                self.note(f"{self.name} ends after {end:.1f} of {stated_end:.1f} s: it seems to be cut short")

    def _iter_packets(self, container: Any, streams: list[Any]) -> Iterator[Any]:
        """Yield the packets until the file ends, even in the middle of a packet, or a stream disappears."""
        import av

        try:
            yield from container.demux(streams)
        except av.error.FFmpegError:
            self.damaged += 1

    def _decode_packet(self, packet: Any) -> list[Any]:
        import av

        try:
            return list(packet.decode())
        except av.error.FFmpegError:
            self.damaged += 1
            return []


def open_container(location: str, device: str = "") -> Any:
    """Open the container of a video, for decoding by that GPU or by FFmpeg.

    Raise a `UserError` for a file that isn't a video, has no pictures or an unknown codec.
    """
    import av

    options = {"hwaccel": media.find_accelerator(device)} if device else {}
    try:
        container = av.open(location, timeout=SILENCE_TIMEOUT_S if "://" in location else None, **options)
    except (OSError, ValueError, av.error.FFmpegError) as e:
        if device:
            open_container(location).close()  # reports the file's own fault
            reason = getattr(e, "strerror", e)
            raise UserError(f"the decoder of {device} can't be used ({reason}); omit --decode") from e
        raise _explain_error(location, e) from e
    problem = ""
    if {stream.type for stream in container.streams} <= {"data"}:  # truncated headers leave only data
        problem = f"{location} has neither pictures nor sound: it is cut short, or was never finished; "
        problem += "copy or record it again"
    elif not container.streams.video:
        problem = f"{location} has no pictures, only {', '.join(sorted({s.type for s in container.streams}))}"
    elif (stream := find_video_stream(container)) is None:
        types = ", ".join(sorted({s.type for s in container.streams} - {"video"}))
        problem = f"{location} has no video: its only picture is cover art{f' beside {types}' if types else ''}"
    elif stream.codec_context is None:
        problem = f"this FFmpeg has no decoder for the pictures of {location}; convert it, e.g. to H.264"
    if problem:
        container.close()
        raise UserError(problem)
    return container


def find_video_stream(container: Any) -> Any:
    """Return the video stream, by FFmpeg's preference of several; None without one."""
    videos, best = _list_videos(container), container.streams.best("video")
    return next((s for s in videos if s.index == best.index), videos[0] if videos else None)


def _list_videos(container: Any) -> list[Any]:
    """Return the picture streams except cover art and thumbnails, decodable ones first."""
    from av.stream import Disposition

    videos = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    return sorted(videos, key=lambda stream: stream.codec_context is None)


def _read_end(stream: Any) -> float:
    """Return the end of a stream in seconds, according to its file; 0 if missing."""
    if stream.duration is not None:
        return float(((stream.start_time or 0) + stream.duration) * stream.time_base)
    parts = stream.metadata.get("DURATION", "").split(":")  # Matroska: 00:00:02.400000000
    try:
        return sum(float(part) * 60.0**power for power, part in enumerate(reversed(parts)))
    except ValueError:
        return 0.0


def _explain_error(location: str, e: Exception) -> Exception:
    """Return the error about an unreadable file, in the user's terms."""
    if isinstance(e, OSError):
        return UserError(f"{location} can't be read: {e.strerror}")
    path = Path(location)
    is_empty = path.is_file() and not path.stat().st_size
    problem = "is empty" if is_empty else "is not a video that FFmpeg can read, or its end is missing"
    return UserError(f"{location} {problem}; give a video, an image or a folder of images")


class _Pictures:
    """Converter of decoded frames to pictures, rotated and mirrored as in a player."""

    def __init__(self, aspect: Fraction, note: Callable[[str], None]) -> None:
        self._convert, self._aspect, self._note = Converter(), aspect, note

    def __call__(self, av_frame: Any) -> Picture:
        turn = self._read_turn(av_frame)
        if av_frame.interlaced_frame:
            self._note("the video is interlaced: each frame shows two moments at once and is used as it is")
        if av_frame.format.name == media.CUDA_FORMAT:
            surface = media.Surface(av_frame, self._convert, self._aspect)
            if turn == NO_TURN and media.has_known_colours(av_frame):
                return surface
            av_frame = surface.video()
        if turn != NO_TURN:
            return self._turn_picture(av_frame, turn)
        if media.has_plane_format(av_frame):
            return Planes(av_frame, self._convert, self._aspect)
        return Rgb(self._convert(av_frame), self._aspect)

    def _read_turn(self, av_frame: Any) -> Turn:
        """Return the rotation and mirroring by the display matrix: x' = ax + cy, y' = bx + dy (FFmpeg's display.h)."""
        matrix = av_frame.side_data.get("DISPLAYMATRIX")
        if matrix is None:
            return NO_TURN
        values = np.frombuffer(matrix, np.int32)[[0, 1, 3, 4]].astype(float)
        a, b, c, d = np.where(abs(values) < ROUNDING_SHARE * abs(values).max(), 0, values).tolist()
        if (a or d) and (b or c):
            angle = -round(math.degrees(math.atan2(b, a)))
            self._note(f"the file turns its frames by {angle} degrees, not a right angle: not turned")
            return NO_TURN
        return (True, c < 0, b < 0) if b or c else (False, a < 0, d < 0)

    def _turn_picture(self, av_frame: Any, turn: Turn) -> Rgb:
        import cv2

        (is_transposed, flip_x, flip_y), image = turn, self._convert(av_frame)
        if is_transposed:
            image = cv2.transpose(image)
        if flip_x or flip_y:
            image = cv2.flip(image, -1 if flip_x and flip_y else int(flip_x))
        return Rgb(np.ascontiguousarray(image), 1 / self._aspect if is_transposed else self._aspect)
