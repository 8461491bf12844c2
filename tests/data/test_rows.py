"""Killed decoding resumes with whole rows only, and two processes don't decode the same data twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from drawn import photographs
from dyno import data
from dyno.data import rows
from dyno.data.decode import Transform
from dyno.worker.spec import DataSpec, Preprocess

COUNT = 120
SLOW = (
    "import sys, time; from pathlib import Path; from dyno import data as datasets\n"
    "from dyno.data.decode import Transform\n"
    "from dyno.worker.spec import Preprocess\n"
    "import itertools; read, reads = Transform.read, itertools.count()\n"
    f"def stuck(self, path):\n    next(reads) < {COUNT // 2} or time.sleep(3600)\n    return read(self, path)\n"
    "Transform.read = stuck\n"
    "datasets.load(Path(sys.argv[1]), Path(sys.argv[2]), (48, 48), Preprocess())"
)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = photographs(tmp_path / "photos", "a", "b", count=COUNT // 2, height=60, width=80, suffix=".jpg")
    (folder / "a/4.jpg").write_bytes(b"no image")
    return folder


def prepared(folder: Path, cache: Path) -> DataSpec:
    return data.load(folder, cache, (48, 48), Preprocess(), on_unreadable="skip")


def start_and_kill(photos: Path, cache: Path) -> int:
    """Kill a decoding process; return the number of rows that it had written."""
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(photos), str(cache)])
    deadline = time.monotonic() + 600
    lines = 0
    while lines < COUNT // 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
        lines = sum(path.read_bytes().count(b"\n") for path in cache.glob(".part-*/journal"))
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was done before it could be killed"
    return next(cache.glob(".part-*/journal")).read_bytes().count(b"\n")


def test_decoding_resumes_after_a_kill(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepared(photos, tmp_path / "other")
    done = start_and_kill(photos, tmp_path / "cache")
    assert COUNT // 3 <= done < COUNT
    read, read_again = Transform.read, []

    def counting(self: Transform, path: Path) -> rows.Row:
        read_again.append(path)
        return read(self, path)

    monkeypatch.setattr(Transform, "read", counting)
    seen: list[tuple[int, int]] = []
    found = data.load(
        photos, tmp_path / "cache", (48, 48), Preprocess(), on_unreadable="skip", progress=lambda *at: seen.append(at)
    )
    assert len(read_again) == COUNT - done
    assert seen[0] == (done + 1, COUNT)
    assert found.sha256 == whole.sha256
    for name in ("images", "labels", "test"):
        assert np.array_equal(np.load(f"{found.folder}/{name}.npy"), np.load(f"{whole.folder}/{name}.npy"))
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == sorted([Path(found.folder).name, "hashes"])


def test_decoded_rows_are_kept_when_unreadable_images_are_refused(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(data.UserError, match=r"1 of 120 images can't be read: a/4.jpg"):
        data.load(photos, tmp_path, (48, 48), Preprocess())
    monkeypatch.setattr(Transform, "read", lambda *_: pytest.fail("decoded again"))
    assert prepared(photos, tmp_path).count == COUNT - 1


def some(count: int, start: int = 0) -> list[rows.DecodedRow]:
    """Return decoded rows; the third is unreadable."""
    return [rows.seal_row("torn" if i == 2 else np.full((1, 2, 3), i, np.uint8), 0.5) for i in range(start, count)]


@pytest.mark.parametrize("harm", ["a torn line", "a line too many", "a torn row", "another pixel", "no images", "none"])
def test_only_complete_rows_are_resumed(tmp_path: Path, harm: str) -> None:
    images, journal = tmp_path / "images.npy", tmp_path / "journal"
    rows.write_rows(images, journal, (1, 2, 3), 5, lambda start: some(5, start))
    pixels, lines = images.read_bytes(), journal.read_bytes()
    kept = {"a torn line": 4, "a line too many": 5, "a torn row": 4, "another pixel": 3, "no images": 0, "none": 5}
    if harm == "a torn line":
        journal.write_bytes(lines[:-2])
    elif harm == "a line too many":
        journal.write_bytes(lines + lines[-10:])
    elif harm == "a torn row":
        images.write_bytes(pixels[:-1])
    elif harm == "another pixel":
        images.write_bytes(pixels[:-8] + b"\xff" + pixels[-7:])
    elif harm == "no images":
        images.unlink()
    asked: list[int] = []

    def source(start: int) -> list[rows.DecodedRow]:
        asked.append(start)
        return some(8, start)

    written = rows.write_rows(images, journal, (1, 2, 3), 8, source)
    assert asked == [kept[harm]]
    assert (written.done, written.kept, written.unreadable, written.seconds) == (8, 7, {2: "torn"}, 3.5)
    assert np.load(images)[:, 0, 0, 0].tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert len(journal.read_text().splitlines()) == 8
    fresh = rows.write_rows(tmp_path / "fresh.npy", tmp_path / "fresh", (1, 2, 3), 8, lambda start: some(8, start))
    assert fresh.sha.hexdigest() == written.sha.hexdigest()


def test_seconds_per_image_are_kept(photos: Path, tmp_path: Path) -> None:
    began = time.perf_counter()
    about = json.loads(Path(prepared(photos, tmp_path).folder, "meta.json").read_text())
    assert 1e-5 < about["decode_s"] < time.perf_counter() - began, "of one image, not of all"
