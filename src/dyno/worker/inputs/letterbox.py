"""Geometry of a letterbox: the image's longer side fits the size, grey fills the rest evenly on both sides."""

from __future__ import annotations


def geometry(height: float, width: float, to_height: int, to_width: int) -> tuple[float, int, int, int, int]:
    """Return scale, new height and width, top and left margin of an image (square pixels) inside its letterbox.

    The same numbers serve both directions: into the network, and from its boxes back to the image.
    """
    scale = min(to_height / height, to_width / width)
    new_height, new_width = max(round(height * scale), 1), max(round(width * scale), 1)
    top, left = round((to_height - new_height) / 2 - 0.1), round((to_width - new_width) / 2 - 0.1)
    return scale, new_height, new_width, top, left
