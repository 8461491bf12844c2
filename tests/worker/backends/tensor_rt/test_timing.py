"""The timing cache's file: found by version and GPU, never lost to another build, never in the way of one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dyno.worker.backends.tensor_rt.build import TimingCache

GPU = "NVIDIA H200"


class Timings:
    """A cache whose content is a set of words."""

    def __init__(self, content: bytes) -> None:
        self.words = set(content.decode().split())

    def combine(self, other: Timings, ignore_mismatch: bool) -> bool:
        self.words |= other.words
        return not ignore_mismatch

    def serialize(self) -> bytes:
        return " ".join(sorted(self.words)).encode()


class Config:
    """A builder's config that knows its own version's caches."""

    cache: Timings | None = None

    def create_timing_cache(self, content: bytes) -> Timings | None:
        return None if b"damaged" in content else Timings(content)

    def set_timing_cache(self, cache: Timings, ignore_mismatch: bool) -> bool:
        if "foreign" in cache.words:
            return ignore_mismatch
        self.cache = cache
        return True

    def get_timing_cache(self) -> Timings | None:
        return self.cache


def library(name: str = "tensorrt", version: str = "8.6.0") -> Any:
    return SimpleNamespace(__name__=name, __version__=version)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DYNO_TIMING", str(tmp_path / "timing"))
    return tmp_path / "timing"


def timed(config: Config, *tactics: str) -> Config:
    """What a build leaves in its cache."""
    assert config.cache is not None
    config.cache.words |= set(tactics)
    return config


def told(cache: TimingCache) -> bool:
    used = cache.to_record(SimpleNamespace(timed=7))
    assert used.timed == 7
    return used.used


def test_the_next_build_has_what_this_one_found(folder: Path) -> None:
    config = Config()
    first = TimingCache.open(library(), config, GPU, True)
    assert not told(first)
    first.save(timed(config, "conv"))
    again = Config()
    second = TimingCache.open(library(), again, GPU, True)
    assert told(second) and again.cache and again.cache.words == {"conv"}
    assert [path.name for path in folder.glob("*.timing")] == ["tensorrt-8.6.0-NVIDIA-H200.timing"]


@pytest.mark.parametrize(("version", "gpu"), [("10.0.1", GPU), ("8.6.0", "NVIDIA L4")])
def test_another_version_or_gpu_has_its_own(folder: Path, version: str, gpu: str) -> None:
    config = Config()
    TimingCache.open(library(), config, GPU, True).save(timed(config, "conv"))
    assert not told(TimingCache.open(library(version=version), Config(), gpu, True))


def test_two_builds_at_once_both_count(folder: Path) -> None:
    one, two = Config(), Config()
    first, second = (TimingCache.open(library(), config, GPU, True) for config in (one, two))
    first.save(timed(one, "conv"))
    second.save(timed(two, "gemm"))
    assert first.path and first.path.read_bytes() == b"conv gemm"


@pytest.mark.parametrize("content", [b"damaged", b"foreign"])
def test_a_file_that_does_not_fit_is_written_anew(folder: Path, content: bytes) -> None:
    folder.mkdir()
    path = folder / "tensorrt-8.6.0-NVIDIA-H200.timing"
    path.write_bytes(content)
    config = Config()
    cache = TimingCache.open(library(), config, GPU, True)
    assert not told(cache)
    cache.save(timed(config, "conv"))
    assert path.read_bytes() == b"conv"


def test_nothing_is_kept_where_nothing_is_wanted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off = TimingCache.open(library(), Config(), GPU, False)
    rtx = TimingCache.open(library("tensorrt_rtx", "1.7.1"), Config(), GPU, True)
    monkeypatch.delenv("DYNO_TIMING")
    unset = TimingCache.open(library(), Config(), GPU, True)
    for cache in (off, rtx, unset):
        cache.save(Config())
        assert cache.path is None and not told(cache)
    assert not folder.exists()
