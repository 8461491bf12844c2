"""The timing cache: the seconds of each tactic in earlier builds with this version on this GPU."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyno.worker.backends.tensor_rt import library
from dyno.worker.facts.files import TimingUse
from dyno.worker.record import TIMING, lock, replacing


def _measure_size(config: Any, content: bytes) -> int:
    cache = config.create_timing_cache(content)
    return 0 if cache is None else len(bytes(cache.serialize()))


def _set_cache(trt: Any, config: Any, content: bytes) -> bool:
    return library.timing_cache(trt, config, content) is not None


@dataclass
class TimingCache:
    """The file for a version and GPU, and its content when this build began.

    `used` says whether the builder accepted it: one that is damaged or of another build of the library is replaced.
    `complaint` is the library's error on it.
    """

    path: Path | None
    before: bytes = b""
    used: bool = False
    complaint: str = ""

    @classmethod
    def open(cls, trt: Any, config: Any, gpu: str, wanted: bool) -> TimingCache:
        """Load earlier builds' timings into the builder; none without a folder, or where the library has no cache."""
        folder = os.environ.get(TIMING, "")
        if not (folder and wanted and gpu) or library.is_rtx(trt):
            return cls(None)
        name = re.sub(r"[^\w.-]+", "-", f"{trt.__name__}-{trt.__version__}-{gpu}")
        cache = cls(Path(folder) / f"{name}.timing")
        cache.before = cache._read_file()
        # 8.6 silently treats content that it can't read as an empty cache.
        cache.used = _measure_size(config, cache.before) > _measure_size(config, b"") and _set_cache(
            trt, config, cache.before
        )
        if not cache.used:
            _set_cache(trt, config, b"")
        return cache

    def _read_file(self) -> bytes:
        try:
            return self.path.read_bytes() if self.path else b""
        except FileNotFoundError:
            return b""

    def save(self, config: Any) -> None:
        """Merge this build's timings into the file, which another build may have written meanwhile."""
        cache = config.get_timing_cache() if self.path else None
        if self.path is None or cache is None:
            return
        with lock(self.path.with_suffix(".lock")):
            current = self._read_file()
            if current and current != self.before:
                other = config.create_timing_cache(current)
                if other is not None:
                    cache.combine(other, False)
            with replacing(self.path) as f:
                f.write(bytes(cache.serialize()))

    def to_record(self, log: Any) -> TimingUse:
        """Return whether earlier timings were used, the reason if not, and the number of tactics timed here."""
        file = self.path.name if self.path else ""
        return TimingUse(self.used, file, log.timed, self.complaint)
