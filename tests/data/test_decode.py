"""Decoded pixels equal other libraries', and a damaged cache is rebuilt."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tifffile
from PIL import Image

from dyno import data
from dyno.data import cache, decode
from dyno.data.decode import Transform
from dyno.data.rows import DecodedRow
from dyno.worker.inputs.specs import fit_geometry
from dyno.worker.spec import Preprocess, UserError

BOX = Preprocess(letterbox=True)


@pytest.mark.parametrize("size", [(320, 320), (256, 384), (640, 640), (33, 47)])
@pytest.mark.parametrize("shape", [(300, 500), (512, 200), (120, 90), (77, 33), (640, 640)])
def test_pixels_match_ultralytics_within_a_grey_level(
    tmp_path: Path, shape: tuple[int, int], size: tuple[int, int]
) -> None:
    from skimage import data
    from ultralytics.data.augment import LetterBox
    from ultralytics.utils.patches import imread

    path = tmp_path / "photo.jpg"
    Image.fromarray(data.astronaut()).resize(shape[::-1]).save(path, quality=95)
    theirs = LetterBox(size, auto=False, scaleup=True, center=True)(image=imread(str(path)))[..., ::-1].transpose(
        2, 0, 1
    )
    mine = Transform(size, BOX, 3, upright=True).read(path)
    assert isinstance(mine, np.ndarray)
    assert mine.shape == theirs.shape
    assert np.abs(mine.astype(int) - theirs).max() <= 1


def test_eight_bit_values_in_sixteen_bit_images_are_refused(tmp_path: Path) -> None:
    for largest, reason in ((255, "16-bit pixels are all below 256, and would be black"), (256, ""), (0, "")):
        Image.fromarray(np.linspace(0, largest, 64).astype(np.uint16).reshape(8, 8)).save(tmp_path / "deep.png")
        read = Transform((8, 8), Preprocess(resize=0), 3).read(tmp_path / "deep.png")
        assert read.startswith(reason) if reason else isinstance(read, np.ndarray)


def test_sixteen_bit_images_of_fewer_bits_have_a_warning(tmp_path: Path) -> None:
    def warnings(name: str, largest: int) -> list[str]:
        for k in range(3):
            (tmp_path / name / str(k)).mkdir(parents=True)
            values = np.linspace(k, largest, 64).astype(np.uint16).reshape(8, 8)
            Image.fromarray(values).save(tmp_path / name / str(k) / "a.png")
        return data.read_meta(data.load(tmp_path / name, tmp_path / "cache", (8, 8), Preprocess())).get("warnings", [])

    (line,) = warnings("twelve", 4095)
    assert line.startswith("16-bit images have values up to 4,095, and only the upper 8 bits")
    assert warnings("sixteen", 60_000) == []


def test_partly_read_images_warn_and_misread_ones_are_refused(tmp_path: Path) -> None:
    """TIFF 6.0 tags: 262 photometric, 338 extra samples, 339 sample format (2: signed)."""

    def load(name: str, values: np.ndarray, **tags: Any) -> list[str]:
        (tmp_path / name).mkdir()
        tifffile.imwrite(tmp_path / name / "a.tif", values, **tags)
        return data.read_meta(data.load(tmp_path / name, tmp_path / "cache", (8, 8), Preprocess())).get("warnings", [])

    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    assert load("bands", np.dstack([grey] * 5), photometric="rgb") == [
        "images such as a.tif are read in part: the first three bands alone"
    ]
    assert load("pages", np.stack([grey] * 3), photometric="minisblack") == [
        "images such as a.tif are read in part: the first page alone"
    ]
    assert load("alpha", np.dstack([grey] * 4), photometric="rgb", extrasamples=["unassalpha"]) == []
    (dark,) = load("colour", np.dstack([grey.astype(np.uint16) * 65] * 3), photometric="rgb")
    assert dark.startswith("16-bit images have values up to 4,095, and only the upper 8 bits")
    for name, values, tags, reason in (
        ("signed", grey.astype(np.int8) - 32, {}, "signed numbers"),
        ("inverted", grey.astype(np.uint16) * 1000, {"photometric": "miniswhite"}, "WhiteIsZero"),
    ):
        with pytest.raises(UserError, match=reason):
            load(name, values, **tags)


def test_images_are_decoded_again_when_the_decoder_code_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "photos" / "a.png")

    def folder() -> str:
        return data.load(tmp_path / "photos", tmp_path / "cache", (8, 8), Preprocess()).folder

    before = folder()
    assert folder() == before
    monkeypatch.setattr(cache, "hash_code", lambda: "of another version")
    assert folder() != before


def test_letterbox_padding_is_centred_grey() -> None:
    pixels = Transform((20, 30), BOX, 1).pixels(Image.new("L", (10, 10), 255))
    assert pixels.shape == (1, 20, 30)
    assert pixels[0, 0].tolist() == [114] * 5 + [255] * 20 + [114] * 5
    assert fit_geometry(10, 10, 20, 30) == (2.0, 20, 20, 0, 5)
    assert fit_geometry(1, 500, 64, 64)[1:3] == (1, 64), "no side is shrunk to nothing"


def test_exif_rotation_is_applied_only_on_request(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "a.jpg", exif=exif)
    for upright, size in ((True, (40, 20)), (False, (20, 40))):
        assert Transform((8, 8), BOX, 3, upright=upright).read_size(tmp_path / "a.jpg") == size
    (tmp_path / "b.jpg").write_text("no image")
    assert Transform((8, 8), BOX, 3).read_size(tmp_path / "b.jpg") is None


@pytest.mark.parametrize("changed", [{"files": 3}, {"classes": None}, {"bytes": "many"}, {"splits": []}])
def test_an_invalid_description_is_rewritten(yolo: Any, make: Any, changed: dict[str, Any]) -> None:
    folder = yolo()
    data = make(folder)
    about = Path(data.folder, "meta.json")
    whole = json.loads(about.read_text())
    about.write_text(json.dumps({**whole, **changed}))
    assert make(folder) == data
    assert {**json.loads(about.read_text()), "decode_s": 0} == {**whole, "decode_s": 0}


@pytest.mark.parametrize(
    "other", [np.array([99, 0]), np.array(["a"]), np.array(1), np.zeros(6, np.float32), b"no array"]
)
@pytest.mark.parametrize("name", ["labels.npy", "test.npy"])
def test_invalid_labels_and_indices_are_rewritten(yolo: Any, make: Any, name: str, other: Any) -> None:
    folder = yolo()
    data = make(folder)
    path = Path(data.folder, name)
    whole = path.read_bytes()
    path.write_bytes(other) if isinstance(other, bytes) else np.save(path, other)
    assert make(folder) == data and path.read_bytes() == whole


@pytest.mark.parametrize("damaged", [{"a.jpg": [1, 2, 3, 4, "5", 6]}, {"a.jpg": 5}, {"a.jpg": None}, ["a.jpg"], 5])
def test_an_invalid_hash_index_is_rebuilt(tmp_path: Path, damaged: Any) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"content")
    first = cache.hash_contents([path], tmp_path, tmp_path)
    (index,) = (tmp_path / "hashes").glob("*.json")
    index.write_text(json.dumps(damaged).replace("a.jpg", str(path)))
    assert cache.hash_contents([path], tmp_path, tmp_path) == first
    assert list(json.loads(index.read_text())) == [str(path)]


COUNT = 100
SLOW = f"""
import os, sys, time; from pathlib import Path
from dyno import data as datasets; from dyno.data import decode; from dyno.worker.spec import Preprocess
decode.THREADS_SUFFICE_CORES, decode.MIN_PROCESS_GAIN_S = 0, 0.0
os.sched_getaffinity = lambda _: {{0, 1}}
cache = Path(sys.argv[2])
options = {{"on_unreadable": "skip", "progress": lambda done, _: time.sleep(3600 * (done > {COUNT // 2}))}}
datasets.load(Path(sys.argv[1]), cache, (48, 48), Preprocess(), **options)
"""


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    """Images of many kinds, and broken files, in two class folders."""
    rng, folder = np.random.default_rng(0), tmp_path / "photos"
    paths = []
    for i in range(COUNT):
        colours = Image.fromarray(rng.integers(0, 256, (60 + i % 7, 80, 3), np.uint8))
        path = folder / "ab"[i % 2] / f"{i:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = i % 10
        if kind == 1:
            colours.convert("L").save(path)
        elif kind == 2:
            colours.convert("CMYK").save(path)
        elif kind == 3:
            path = path.with_suffix(".png")
            Image.fromarray(rng.integers(0, 65536, (60, 80), np.uint16)).save(path)
        elif kind == 4:
            path = path.with_suffix(".png")
            colours.quantize(9).save(path, transparency=0)
        elif kind == 5:
            path = path.parent / os.fsdecode(b"\xff line\nbreak %03d.jpg" % i)
            colours.save(path)
        else:
            colours.save(path)
        paths.append(path)
    paths[0].write_bytes(b"no image")
    paths[20].write_bytes(paths[26].read_bytes()[:900])
    paths[30].unlink()
    return paths


def plain(rows: Iterable[DecodedRow]) -> list[tuple[bytes | str, str]]:
    """Return each row's seal and a copy of its pixels ("none" if unreadable), as the row buffer is reused.

    Reasons are dropped: importing ultralytics in another test changes their text.
    """
    return [("none" if isinstance(row.row, str) else row.row.tobytes(), row.seal) for row in rows]


def test_threads_and_processes_decode_the_same_rows(photos: list[Path]) -> None:
    for transform in (
        Transform((48, 40), Preprocess(), 3),
        Transform((33, 48), Preprocess(letterbox=True), 1, upright=True),
    ):
        expected = plain(decode._decode_in_threads(photos, transform, 5))
        assert len(expected) == COUNT - 5 and sum(isinstance(row, str) for row, _ in expected) == 2
        for count, slots in ((1, 2), (3, 7)):
            found = plain(decode.decode_rows(photos, transform.made_of, transform.shape, 5, count, slots))
            assert found == expected


def test_threads_decode_what_failed_processes_leave(photos: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    transform = Transform((48, 40), Preprocess(), 3)
    expected = plain(decode._decode_in_threads(photos, transform, 0))
    monkeypatch.setattr(decode, "THREADS_SUFFICE_CORES", 0)
    monkeypatch.setattr(decode, "MIN_PROCESS_GAIN_S", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    killed, found = [], list[tuple[bytes | str, str]]()
    for row in decode.decode_images(photos, transform):
        found += plain([row])
        if len(found) == 30:
            (server,) = [p for p in psutil.Process().children() if decode.PROCESS_MODULE in p.cmdline()]
            killed = server.children()
            killed[0].kill()
    assert killed and found == expected
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert plain(decode.decode_images(photos, transform)) == expected, "nor do they ever start"


def test_a_killed_run_ends_its_decoding_processes(photos: list[Path], tmp_path: Path) -> None:
    folder, cache = photos[0].parents[1], tmp_path / "cache"
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(folder), str(cache)])
    lines = 0
    while lines < COUNT // 2 and process.poll() is None:
        time.sleep(0.01)
        lines = sum(path.read_bytes().count(b"\n") for path in cache.glob(".part-*/journal"))
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 3, "one that forks, and one for each processor"
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not psutil.wait_procs(children, timeout=120)[1]


@pytest.mark.parametrize(("cores", "worth_s"), [(4, 0.0), (8, 1.5)])
def test_only_threads_decode_small_or_few_core_workloads(
    photos: list[Path], monkeypatch: pytest.MonkeyPatch, cores: int, worth_s: float
) -> None:
    monkeypatch.setattr(decode, "MIN_PROCESS_GAIN_S", worth_s)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(decode, "decode_rows", lambda *_: pytest.fail("processes were started"))
    assert len(plain(decode.decode_images(photos, Transform((48, 40), Preprocess(), 3)))) == COUNT
