"""Frames of a video file or stream, by PyAV, in order, with the sound that lies between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.spec import UserError
from dyno.worker.video.media import surfaces
from dyno.worker.video.media.ends import Frame, Source, codec_threads, now
from dyno.worker.video.media.pictures import Converter, Picture, Planes, Rgb, fits, usual

TURNS = {90: "ROTATE_90_COUNTERCLOCKWISE", 180: "ROTATE_180", 270: "ROTATE_90_CLOCKWISE"}
PATIENCE_S = 10.0  # without a byte from a stream, after which it is gone


class VideoSource(Source):
    """A video file, or a stream by its URL.

    The `device` (`cuda:0`) decodes it where its decoder knows such pictures, else FFmpeg's own does.
    """

    def __init__(self, place: str, live: bool, device: str = "") -> None:
        super().__init__(place if "://" in place else Path(place).name)
        self.place, self.live, self.once, self._device = place, live, "://" in place, ""
        with opened(place) as container:
            stream = container.streams.video[0]
            self.count, self.rate = int(stream.frames or 0), float(stream.average_rate or 0)
            self._device = device if device and surfaces.suits(stream.codec_context) else ""

    def template(self) -> Any:
        return opened(self.place)

    def read(self, sound: bool = False) -> Iterator[Frame]:
        self.damaged = 0
        with opened(self.place, self._device) as container:
            video = container.streams.video[0]
            video.thread_type, video.codec_context.thread_count = "AUTO", codec_threads()
            heard = container.streams.audio[:1] if sound else []
            picture_of, index, packets, began = _Pictures(), 0, [], now()
            for packet in self._packets(container, [video, *heard]):
                if packet.stream.type == "audio":
                    if packet.dts is not None:  # the last one is empty
                        packets.append(packet)
                    continue
                if self.live:
                    began = now()  # waiting for the camera isn't work
                for decoded in self._decoded(packet):
                    seconds = None if decoded.pts is None else float(decoded.pts * decoded.time_base)
                    yield Frame(index, picture_of(decoded), began, decoded.pts, seconds, packets=packets)
                    index, packets, began = index + 1, [], now()
            if not index:
                raise UserError(f"{self.place} has no frame that can be decoded; it is empty or damaged")
            self.left = packets

    def _packets(self, container: Any, streams: list[Any]) -> Iterator[Any]:
        """The packets until the file ends, be it in the middle of one, or a stream goes away."""
        import av

        packets = container.demux(streams)
        while True:
            try:
                packet = next(packets, None)
            except av.error.FFmpegError:
                self.damaged += 1
                return
            if packet is None:
                return
            yield packet

    def _decoded(self, packet: Any) -> list[Any]:
        import av

        try:
            return list(packet.decode())
        except av.error.FFmpegError:
            self.damaged += 1
            return []


def opened(place: str, device: str = "") -> Any:
    """The container of a video, to be decoded by that GPU or by FFmpeg; a `UserError` for a file that is none, has no
    pictures or an unknown codec."""
    import av

    options = {"hwaccel": surfaces.accelerator(device)} if device else {}
    try:
        container = av.open(place, timeout=PATIENCE_S if "://" in place else None, **options)
    except (OSError, ValueError, av.error.FFmpegError) as e:
        if device:
            opened(place).close()  # which says what is wrong with the file, if anything is
            raise UserError(
                f"the decoder of {device} can't be used ({getattr(e, 'strerror', e)}); omit --decode"
            ) from e
        raise _unreadable(place, e) from e
    problem = ""
    if not container.streams:
        problem = (
            f"{place} has neither pictures nor sound: it is cut short, or was never finished; copy or record it again"
        )
    elif not container.streams.video:
        problem = f"{place} has no pictures, only {', '.join(sorted({s.type for s in container.streams}))}"
    elif container.streams.video[0].codec_context is None:
        problem = f"this FFmpeg has no decoder for the pictures of {place}; convert it, e.g. to H.264"
    if problem:
        container.close()
        raise UserError(problem)
    return container


def _unreadable(place: str, e: Exception) -> Exception:
    """What is wrong with the file, for whoever gave it."""
    if isinstance(e, OSError):
        return UserError(f"{place} can't be read: {e.strerror}")
    if not isinstance(e, ValueError):
        return e
    path = Path(place)
    empty = path.is_file() and not path.stat().st_size
    what = "is empty" if empty else "is not a video that FFmpeg can read, or its end is missing"
    return UserError(f"{place} {what}; give a video, an image or a folder of images")


class _Pictures:
    """Decoded frames as pictures, upright."""

    def __init__(self) -> None:
        self._convert = Converter()

    def __call__(self, decoded: Any) -> Picture:
        turn = None
        with suppress(AttributeError):
            turn = TURNS.get(int(decoded.rotation) % 360)
        if decoded.format.name == surfaces.FORMAT:
            surface = surfaces.Surface(decoded, self._convert)
            if turn is None and usual(decoded):
                return surface
            decoded = surface.planes().video()
        if turn is not None:
            import cv2

            return Rgb(np.asarray(cv2.rotate(self._convert(decoded), getattr(cv2, turn))))
        return Planes(decoded, self._convert) if fits(decoded) else Rgb(self._convert(decoded))
