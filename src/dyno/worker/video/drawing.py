"""Boxes, masks and keypoints on a frame, by OpenCV, one colour for each class, or for each object that is tracked."""

from __future__ import annotations

import numpy as np

from dyno.worker.video.media.ends import Frame
from dyno.worker.video.tracking import NOBODY

# Okabe and Ito's colours, which people tell apart who don't see all (2008); black is left out.
COLOURS = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
UNNAMED = (160, 160, 160)  # of what is tracked and has no identity yet
MASK_SHARE = 0.4  # of a mask's colour in the picture
TEXT_HEIGHT = 480  # of a picture in which text has OpenCV's size 0.5


def draw(frame: Frame) -> None:
    """Draw on the frame's image: masks below boxes below keypoints, the best detection on top."""
    import cv2

    image, found = frame.image, frame.detections
    assert found is not None
    colours, labels = _colours(frame), _labels(frame)
    unit = max(image.shape[0], image.shape[1] * 9 // 16) / TEXT_HEIGHT
    thickness = max(1, round(2 * unit))
    order = range(len(found.scores) - 1, -1, -1)
    if found.masks is not None:
        for k in order:
            _mask(image, found.masks[k], found.boxes[k], colours[k])
    for k in order:
        colour, text = colours[k], labels[k]
        left, top, right, bottom = (round(float(v)) for v in found.boxes[k])
        cv2.rectangle(image, (left, top), (right, bottom), colour, thickness)
        scale = 0.5 * unit
        (width, height), below = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, scale, 1)
        base = top - below if top > height + below else min(top + height + below, image.shape[0] - 1)
        cv2.rectangle(image, (left, base - height - below), (left + width, base + below), colour, -1)
        cv2.putText(image, text, (left, base), cv2.FONT_HERSHEY_SIMPLEX, scale, (0, 0, 0), 1, cv2.LINE_AA)
        if found.keypoints is not None:
            _points(image, found.keypoints[k], colour, thickness)


def _colours(frame: Frame) -> list[tuple[int, int, int]]:
    """The colour of each detection: by its object where objects are tracked, grey before it has one; else by class."""
    assert frame.detections is not None
    if frame.identities is None:
        return [COLOURS[int(kind) % len(COLOURS)] for kind in frame.detections.classes]
    return [COLOURS[int(k) % len(COLOURS)] if k != NOBODY else UNNAMED for k in frame.identities]


def _labels(frame: Frame) -> list[str]:
    """What stands at each box: the identity of its object if there is one, the class and the score."""
    found = frame.detections
    assert found is not None
    said = [f"{int(kind)} {score:.2f}" for kind, score in zip(found.classes, found.scores, strict=True)]
    if frame.identities is None:
        return said
    return [f"#{k} {text}" if k != NOBODY else text for k, text in zip(frame.identities, said, strict=True)]


def _mask(image: np.ndarray, counts: np.ndarray, box: np.ndarray, colour: tuple[int, int, int]) -> None:
    """Blend a mask, run lengths down the columns, into the image."""
    import cv2

    height, width = image.shape[:2]
    left, top, right, bottom = (max(int(v), 0) for v in (*np.floor(box[:2]), *np.ceil(box[2:])))
    inside = np.repeat(np.arange(len(counts)) % 2, counts).astype(np.uint8).reshape(width, height).T
    part = image[top:bottom, left:right]
    if not part.size:
        return
    flat = np.full_like(part, colour)
    blended = cv2.addWeighted(part, 1 - MASK_SHARE, flat, MASK_SHARE, 0)
    np.copyto(part, blended, where=inside[top:bottom, left:right, None].astype(bool))


def _points(image: np.ndarray, points: np.ndarray, colour: tuple[int, int, int], thickness: int) -> None:
    """A dot for each keypoint; those whose third value, how sure the network is, is below a half are left out."""
    import cv2

    for point in points:
        if len(point) < 3 or point[2] >= 0.5:
            cv2.circle(image, (round(float(point[0])), round(float(point[1]))), 2 * thickness, colour, -1, cv2.LINE_AA)
