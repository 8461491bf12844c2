"""The timing cache: how long each tactic took in earlier builds with this version on this GPU."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyno.worker.backends.tensor_rt import library
from dyno.worker.facts.files import TimingUse
from dyno.worker.record import TIMING, lock, replacing


def _size(config: Any, content: bytes) -> int:
    cache = config.create_timing_cache(content)
    return 0 if cache is None else len(bytes(cache.serialize()))


def _set(trt: Any, config: Any, content: bytes) -> bool:
    return library.timing_cache(trt, config, content) is not None


@dataclass
class TimingCache:
    """The file for a version and GPU, and what it held when this build began.

    `used` says whether the builder took it: one that is damaged or of another build of the library is left unused, and
    written anew. `complaint` is what the library said of it.
    """

    path: Path | None
    before: bytes = b""
    used: bool = False
    complaint: str = ""

    @classmethod
    def open(cls, trt: Any, config: Any, gpu: str, wanted: bool) -> TimingCache:
        """Give the builder what earlier builds found; without a folder, or where the library keeps none, nothing."""
        folder = os.environ.get(TIMING, "")
        if not (folder and wanted and gpu) or library.is_rtx(trt):
            return cls(None)
        name = re.sub(r"[^\w.-]+", "-", f"{trt.__name__}-{trt.__version__}-{gpu}")
        made = cls(Path(folder) / f"{name}.timing")
        made.before = made._read()
        # 8.6 takes content that it can't read for an empty cache, without a word.
        made.used = _size(config, made.before) > _size(config, b"") and _set(trt, config, made.before)
        if not made.used:
            _set(trt, config, b"")
        return made

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes() if self.path else b""
        except FileNotFoundError:
            return b""

    def save(self, config: Any) -> None:
        """Add what this build found to the file, which another build may have written meanwhile."""
        cache = config.get_timing_cache() if self.path else None
        if self.path is None or cache is None:
            return
        with lock(self.path.with_suffix(".lock")):
            now = self._read()
            if now and now != self.before:
                other = config.create_timing_cache(now)
                if other is not None:
                    cache.combine(other, False)
            with replacing(self.path) as f:
                f.write(bytes(cache.serialize()))

    def told(self, log: Any) -> TimingUse:
        """For the record: whether earlier timings were used, what was wrong with them, and the tactics timed anew."""
        file = self.path.name if self.path else ""
        return TimingUse(self.used, file, log.timed, self.complaint)
