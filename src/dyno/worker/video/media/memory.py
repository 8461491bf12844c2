"""Frames that were decoded before, for the rate of everything behind the decoder."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from dyno.worker.spec import UserError
from dyno.worker.video.media.ends import Frame, Source, now


class MemorySource(Source):
    """The first frames of another source, at most `most`, again and again until there were `count` (0: once each).

    Their times are those of its average rate; there is no sound.
    """

    def __init__(self, source: Source, most: int, count: int) -> None:
        super().__init__(source.name)
        self.images, self.rate = source.images, source.rate
        self._held = [(frame.picture, frame.name) for frame in itertools.islice(source.read(), most)]
        self.notes = source.notes
        if not self._held:
            raise UserError(f"{source.name} has no frames")
        self.count = count or len(self._held)

    def read(self, sound: bool = False) -> Iterator[Frame]:
        for index, (picture, name) in enumerate(itertools.islice(itertools.cycle(self._held), self.count)):
            began, seconds = now(), index / self.rate if self.rate else None
            yield Frame(index, picture.again(), began, None, seconds, name)
