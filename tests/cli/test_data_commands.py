"""`dyno data` at the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")


def test_imagenet_val(tmp_path: Path, dyno) -> None:
    (tmp_path / "flat").mkdir()
    for name in ("ILSVRC2012_val_00000001_n01751748.JPEG", "ILSVRC2012_val_00000002_n01440764.JPEG"):
        (tmp_path / "flat" / name).write_bytes(b"an image")
    done = dyno("data", "imagenet-val", "flat", "-o", "out", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "2 images of 2 classes are in out/val\n"
    assert (tmp_path / "out/val/n01440764/ILSVRC2012_val_00000002_n01440764.JPEG").read_bytes() == b"an image"
    (tmp_path / "flat/ILSVRC2012_val_00000003.JPEG").write_bytes(b"another")
    done = dyno("data", "imagenet-val", "flat", "-o", "out", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "2 images of 2 classes are in out/val, 2 of them before\n")
    assert done.stderr == "dyno: left 1 image without a label in flat: ILSVRC2012_val_00000003.JPEG\n"
    done = dyno("data", "imagenet-val", "flat", "-o", "out", "--copy", "--move", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "dyno: --copy and --move can't be used together\n")
