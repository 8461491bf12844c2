"""Boxes, masks and keypoints on a frame, coloured by class, or by object if objects are tracked.

Drawings go to the layers of the frame's picture: red, green and blue, or a decoder's planes of brightness and colour.
Edges are aligned to the values of every layer, so that no colour bleeds out of its box.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dyno.worker.extras import load_library
from dyno.worker.video.media import Colour, Frame, PicturePlane
from dyno.worker.video.options import TRACKER_NAMES

# Identities of objects across a video's frames, by the library `trackers`

NO_OBJECT = -1  # the library's identity of a box without an object
USUAL_RATE = 30.0  # assumed frames per second if unknown
TRACKER_THRESHOLDS = ("track_activation_threshold", "high_conf_det_threshold")


class Tracker:
    """The identities of one video's boxes, from frame to frame, in order.

    A box with a score of at least `min_score` may begin an identity; a weaker one only continues it, if the method
    supports that. `rate` is the source's, per second (0: unknown). Raise `Unavailable` without the library.
    """

    def __init__(self, name: str, rate: float, min_score: float) -> None:
        tracker_class = getattr(load_library("trackers", "tracking"), TRACKER_NAMES[name])
        parameters = inspect.signature(tracker_class.__init__).parameters
        self._period, self._seconds = 1 / (rate or USUAL_RATE), -math.inf
        self._tracker = tracker_class(
            frame_rate=1 / self._period, **{key: min_score for key in TRACKER_THRESHOLDS if key in parameters}
        )
        self._boxes = load_library("supervision").Detections
        self._sees = "enable_cmc" in parameters  # it estimates the camera's motion
        self._classes: dict[int, Counter[int]] = {}

    def identify(self, frame: Frame) -> None:
        """Set the frame's `identities`: a whole number per detection, `NO_OBJECT` if it has no object."""
        detections = frame.detections
        assert detections is not None
        count = len(detections.scores)
        boxes = self._boxes(
            xyxy=np.asarray(detections.boxes, np.float32).reshape(count, 4),
            confidence=np.asarray(detections.scores, np.float32),
            class_id=np.asarray(detections.classes, int), data={"place": np.arange(count)},
        )  # fmt: skip
        tracked = self._tracker.update(
            boxes, frame=frame.picture.rgb() if self._sees else None, timestamp=self._compute_time(frame)
        )
        frame.identities = np.full(count, NO_OBJECT)
        if len(tracked):
            frame.identities[tracked.data["place"]] = tracked.tracker_id
        for identity, kind in zip(frame.identities, detections.classes, strict=True):
            if identity != NO_OBJECT:
                self._classes.setdefault(int(identity), Counter())[int(kind)] += 1

    @property
    def counts(self) -> dict[str, int]:
        """The number of objects by class; an object's class is its boxes' most common class."""
        totals = Counter(classes.most_common(1)[0][0] for classes in self._classes.values())
        return {str(kind): totals[kind] for kind in sorted(totals)}

    def _compute_time(self, frame: Frame) -> float:
        """Return the frame's time in seconds; one period after the last if the source's is missing or not later."""
        if frame.seconds is not None and frame.seconds > self._seconds:
            self._seconds = frame.seconds
        else:
            self._seconds = self._seconds + self._period if math.isfinite(self._seconds) else 0.0
        return self._seconds


# Okabe and Ito's colours, distinguishable with colour blindness (2008), without black
TRACK_COLOURS = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
)
UNIDENTIFIED_COLOUR = (160, 160, 160)  # boxes without an identity
BLACK = (0, 0, 0)
MASK_OPACITY = 0.4  # opacity of a mask
TEXT_REFERENCE_HEIGHT = 480  # picture height for OpenCV's text size 0.5
FRACTION_BITS = 4  # fractional bits of a dot's position

Region = tuple[int, int, int, int]  # left, top, right, bottom (exclusive)


def draw_detections(frame: Frame) -> None:
    """Draw on the frame's picture: masks below boxes below keypoints, the best detection on top."""
    detections = frame.detections
    assert detections is not None
    if not len(detections.scores):
        return
    layers, colours, labels = frame.picture.layers(), _choose_colours(frame), _format_labels(frame)
    unit = max(frame.size[0], frame.size[1] * 9 // 16) / TEXT_REFERENCE_HEIGHT
    thickness = max(1, round(2 * unit))
    order = range(len(detections.scores) - 1, -1, -1)
    if detections.masks is not None:
        for k in order:
            _blend_mask(layers, frame.size, detections.masks[k], detections.boxes[k], colours[k])
    for k in order:
        left, top, right, bottom = (round(float(v)) for v in detections.boxes[k])
        _draw_outline(layers, (left, top, right, bottom), thickness, colours[k])
        _draw_label(layers, labels[k], 0.5 * unit, left, top, frame.size[0], colours[k])
        if detections.keypoints is not None:
            _draw_points(layers, detections.keypoints[k], colours[k], thickness)


def _choose_colours(frame: Frame) -> list[Colour]:
    """Return each detection's colour: by class, or by object if tracked (grey without an object yet)."""
    assert frame.detections is not None
    if frame.identities is None:
        return [TRACK_COLOURS[int(kind) % len(TRACK_COLOURS)] for kind in frame.detections.classes]
    return [
        TRACK_COLOURS[int(k) % len(TRACK_COLOURS)] if k != NO_OBJECT else UNIDENTIFIED_COLOUR for k in frame.identities
    ]


def _format_labels(frame: Frame) -> list[str]:
    """Return the label of each box: its object's identity if any, the class and the score."""
    detections = frame.detections
    assert detections is not None
    labels = [f"{int(kind)} {score:.2f}" for kind, score in zip(detections.classes, detections.scores, strict=True)]
    if frame.identities is None:
        return labels
    return [f"#{k} {text}" if k != NO_OBJECT else text for k, text in zip(frame.identities, labels, strict=True)]


def _draw_outline(layers: Sequence[PicturePlane], box: Region, thickness: int, colour: Colour) -> None:
    import cv2

    step = max(layer.step for layer in layers)
    width = -(-thickness // step) * step
    left, top, right, bottom = ((edge - thickness // 2) // step * step for edge in box)
    for layer in layers:
        value, last = layer.value(colour), width // layer.step - 1
        x, y, x1, y1 = left // layer.step, top // layer.step, right // layer.step + last, bottom // layer.step + last
        for k in range(last + 1):
            cv2.rectangle(layer.array, (x + k, y + k), (x1 - k, y1 - k), value)


def _draw_label(
    layers: Sequence[PicturePlane], text: str, scale: float, left: int, top: int, height: int, colour: Colour
) -> None:
    """Draw a text in black on the colour, above that place, or below it if space is short."""
    step = max(layer.step for layer in layers)
    high = len(_render_ink(text, scale, 1))
    row, column = (v // step * step for v in (top - high if top > high else max(0, min(top, height - high)), left))
    for layer in layers:
        patch = _render_patch(text, scale, layer.step, layer.value(colour), layer.value(BLACK))
        x, y = column // layer.step, row // layer.step
        if x < 0 or y < 0:
            patch, x, y = patch[max(-y, 0) :, max(-x, 0) :], max(x, 0), max(y, 0)
        region = layer.array[y : y + patch.shape[0], x : x + patch.shape[1]]
        region[:] = patch if region.shape == patch.shape else patch[: region.shape[0], : region.shape[1]]


@lru_cache(maxsize=2048)
def _render_patch(text: str, scale: float, step: int, paper: tuple[int, ...], ink: tuple[int, ...]) -> np.ndarray:
    """Return a text at a layer's step, in the values of paper and ink."""
    share = np.arange(256)[:, None] / 255
    shades = np.round((1 - share) * paper + share * ink).astype(np.uint8)
    return np.asarray((shades if len(paper) > 1 else shades[:, 0])[_render_ink(text, scale, step)])


@lru_cache(maxsize=2048)
def _render_ink(text: str, scale: float, step: int) -> np.ndarray:
    """Return the ink of a text at each position, with a margin, 0 to 255; sides are even at a step of 1."""
    import cv2

    if step > 1:
        full_ink = _render_ink(text, scale, 1)
        size = (full_ink.shape[1] // step, full_ink.shape[0] // step)
        return np.asarray(cv2.resize(full_ink, size, interpolation=cv2.INTER_AREA))
    (width, height), baseline = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, scale, 1)
    ink = np.zeros((height + 2 * baseline + height % 2, width + width % 2), np.uint8)
    cv2.putText(ink, text, (0, height + baseline), cv2.FONT_HERSHEY_SIMPLEX, scale, 255, 1, cv2.LINE_AA)
    return ink


def _blend_mask(
    layers: Sequence[PicturePlane], size: tuple[int, int], counts: np.ndarray, box: np.ndarray, colour: Colour
) -> None:
    """Blend a mask (run lengths down the columns) into the picture of that height and width."""
    import cv2

    height, width = size
    step = max(layer.step for layer in layers)
    left, top = (max(int(v), 0) // step * step for v in np.floor(box[:2]))
    right, bottom = (max(int(v), 0) for v in np.ceil(box[2:]))
    mask = np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(width, height).T[top:bottom, left:right]
    if not mask.size:
        return
    for layer in layers:
        layer_mask = mask[:: layer.step, :: layer.step]
        region = layer.array[top // layer.step :, left // layer.step :][: layer_mask.shape[0], : layer_mask.shape[1]]
        fill = np.full_like(region, layer.value(colour) if region.ndim > 2 else layer.value(colour)[0])
        blended = cv2.addWeighted(region, 1 - MASK_OPACITY, fill, MASK_OPACITY, 0)
        np.copyto(region, blended, where=layer_mask[..., None] if region.ndim > 2 else layer_mask)


def _draw_points(layers: Sequence[PicturePlane], points: np.ndarray, colour: Colour, thickness: int) -> None:
    """Draw a dot for each keypoint, except at a confidence (third value) below a half."""
    import cv2

    for point in points:
        if len(point) >= 3 and point[2] < 0.5:
            continue
        for layer in layers:
            # A value's centre lies between its pixels.
            centre = [round(((float(v) + 0.5) / layer.step - 0.5) * (1 << FRACTION_BITS)) for v in point[:2]]
            radius = round(2 * thickness / layer.step * (1 << FRACTION_BITS))
            cv2.circle(layer.array, centre, radius, layer.value(colour), -1, cv2.LINE_AA, FRACTION_BITS)
