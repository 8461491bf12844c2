"""Frames of a video file or stream, by PyAV, in order, with the sound that lies between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.spec import UserError
from dyno.worker.video.media.ends import Frame, Source, codec_threads, now
from dyno.worker.video.media.pictures import Converter, Picture, Planes, Rgb, fits

TURNS = {90: "ROTATE_90_COUNTERCLOCKWISE", 180: "ROTATE_180", 270: "ROTATE_90_CLOCKWISE"}
PATIENCE_S = 10.0  # without a byte from a stream, after which it is gone


class VideoSource(Source):
    """A video file, or a stream by its URL."""

    def __init__(self, place: str, live: bool) -> None:
        super().__init__(place if "://" in place else Path(place).name)
        self.place, self.live, self.once = place, live, "://" in place
        with opened(place) as container:
            stream = container.streams.video[0]
            self.count, self.rate = int(stream.frames or 0), float(stream.average_rate or 0)

    def template(self) -> Any:
        return opened(self.place)

    def read(self, sound: bool = False) -> Iterator[Frame]:
        self.damaged = 0
        with opened(self.place) as container:
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
                    began = now()  # waiting for the camera is no work
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


def opened(place: str) -> Any:
    """The container of a video; a `UserError` for a file that is none, has no pictures or an unknown codec."""
    import av

    try:
        container = av.open(place, timeout=PATIENCE_S if "://" in place else None)
    except OSError as e:
        raise UserError(f"{place} can't be read: {e.strerror}") from e
    except ValueError as e:
        path = Path(place)
        empty = path.is_file() and not path.stat().st_size
        what = "is empty" if empty else "is no video that FFmpeg knows, or its end is missing"
        raise UserError(f"{place} {what}; give a video, an image or a folder of images") from e
    problem = ""
    if not container.streams.video:
        problem = f"{place} has no pictures, only {', '.join(sorted({s.type for s in container.streams})) or 'nothing'}"
    elif container.streams.video[0].codec_context is None:
        problem = f"this FFmpeg has no decoder for the pictures of {place}; convert it, e.g. to H.264"
    if problem:
        container.close()
        raise UserError(problem)
    return container


class _Pictures:
    """Decoded frames as pictures, upright."""

    def __init__(self) -> None:
        self._convert = Converter()

    def __call__(self, decoded: Any) -> Picture:
        import cv2

        turn = None
        with suppress(AttributeError):
            turn = TURNS.get(int(decoded.rotation) % 360)
        if turn is not None:
            return Rgb(np.asarray(cv2.rotate(self._convert(decoded), getattr(cv2, turn))))
        return Planes(decoded, self._convert) if fits(decoded) else Rgb(self._convert(decoded))
