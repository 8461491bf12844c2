"""ImageNet's flat validation folder becomes class folders, by name or by table; resumable, without guessing."""

from pathlib import Path

import pytest

from dyno.data import flat, photos
from dyno.worker.spec import UserError
from refusals import refuses

CLASSES = ("n01751748", "n01440764", "n15075141", "n01440764")  # of images 1 to 4


def download(folder: Path, named: bool = False) -> Path:
    folder.mkdir(parents=True)
    for i, synset in enumerate(CLASSES, 1):
        label = f"_{synset}" if named else ""
        (folder / f"ILSVRC2012_val_{i:08}{label}.JPEG").write_bytes(b"image" * i)
    (folder / "readme.txt").write_text("no image")
    return folder


def placed(out: Path) -> dict[str, list[str]]:
    found = {path.name: sorted(file.name for file in path.iterdir()) for path in (out / "val").iterdir()}
    return {name: [file.split("_")[2].split(".")[0][-1] for file in files] for name, files in found.items()}


WANTED = {"n01440764": ["2", "4"], "n01751748": ["1"], "n15075141": ["3"]}


@pytest.mark.parametrize("transfer", ["link", "copy", "move"])
def test_images_are_sorted_by_the_synset_in_their_name(tmp_path: Path, transfer: flat.Transfer) -> None:
    folder, out = download(tmp_path / "flat", named=True), tmp_path / "out"
    inode = next(folder.glob("*1_*.JPEG")).stat().st_ino
    done = flat.sort_images(folder, out, transfer=transfer)
    assert (done.placed, done.present, done.classes, done.unlabelled) == (4, 0, 3, [])
    assert placed(out) == WANTED
    assert (next((out / "val/n01751748").iterdir()).stat().st_ino == inode) == (transfer != "copy")
    assert len(list(folder.glob("*.JPEG"))) == (0 if transfer == "move" else 4)
    again = flat.sort_images(folder, out, transfer=transfer)
    assert (again.placed, again.present, again.images) == (0, 4, 4)


def index(synset: str) -> int:
    return list(photos.list_synsets()).index(synset)


TABLES = {
    "kaggle": "ImageId,PredictionString\n"
    + "".join(f"ILSVRC2012_val_{i:08},{s} 85 1 499 272 \n" for i, s in reversed([*enumerate(CLASSES, 1)])),
    "names": "".join(f"ILSVRC2012_val_{i:08}.JPEG {s}\n" for i, s in enumerate(CLASSES, 1)),
    "names and numbers": "".join(f"ILSVRC2012_val_{i:08}.JPEG {index(s)}\n" for i, s in enumerate(CLASSES, 1)),
    "synsets by place": "\n".join(CLASSES) + "\n",
    "numbers by place": "\n".join(str(index(s)) for s in CLASSES),
}


@pytest.mark.parametrize("table", TABLES)
def test_by_a_table(tmp_path: Path, table: str) -> None:
    (tmp_path / "labels").write_text(TABLES[table])
    flat.sort_images(download(tmp_path / "flat"), tmp_path / "out", tmp_path / "labels")
    assert placed(tmp_path / "out") == WANTED


def test_numeric_labels_in_unknown_order_are_refused(tmp_path: Path) -> None:
    folder, out, table = download(tmp_path / "flat"), tmp_path / "out", tmp_path / "labels"
    table.write_text("\n".join(str(index(synset) + 1) for synset in CLASSES))
    with pytest.raises(UserError, match=r"own ids 1 to 1000, which are in another order \(meta.mat\).*--order synset"):
        flat.sort_images(folder, out, table)
    assert not out.exists()
    flat.sort_images(folder, out, table, order="synset")
    assert placed(out) == WANTED
    flat.sort_images(folder, tmp_path / "one", table, order="synset-1")
    assert placed(tmp_path / "one") == WANTED
    for text, order, line in (
        ("5\n6\n7\n8", "synset", "neither class 0 nor class 1000; give --order synset-0 or synset-1"),
        ("0\n6\n7\n1000", "", "there is no class 1000; the numbers are 0 to 999"),
        ("0\n6\n7\n9", "synset-1", "there is no class 0; the numbers are 1 to 1000"),
        ("0\n6\n7\n9", "meta", "unknown order 'meta'; known: synset, synset-0, synset-1"),
    ):
        table.write_text(text)
        refuses(line, flat.sort_images, folder, out, table, order=order)


def test_a_stopped_move_resumes(tmp_path: Path) -> None:
    folder, out, table = download(tmp_path / "flat"), tmp_path / "out", tmp_path / "labels"
    table.write_text(TABLES["synsets by place"])

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise Stop

    with pytest.raises(Stop):
        flat.sort_images(folder, out, table, transfer="move", progress=stop)
    assert len(list(folder.glob("*.JPEG"))) == 2
    done = flat.sort_images(folder, out, table, transfer="move")
    assert (done.placed, done.present) == (2, 2), "by place, though two are no longer there"
    assert placed(out) == WANTED


def test_unlabelled_images_are_named(tmp_path: Path) -> None:
    (tmp_path / "labels").write_text("".join(TABLES["names"].splitlines(keepends=True)[:3]))
    folder = download(tmp_path / "flat")
    done = flat.sort_images(folder, tmp_path / "out", tmp_path / "labels")
    assert (done.placed, done.unlabelled) == (3, ["ILSVRC2012_val_00000004.JPEG"])
    with pytest.raises(UserError, match=r"no image in .* has a synset in its name, e.g. ILSVRC2012_val_00000001.JPEG"):
        flat.sort_images(folder, tmp_path / "other")


def test_invalid_labels_are_refused_in_one_line(tmp_path: Path) -> None:
    folder, out, table = download(tmp_path / "flat"), tmp_path / "out", tmp_path / "labels"
    for text, line in {
        "": "is empty",
        "n01440764\nn01440764": "has 2 labels for 4 images",
        "n01440764\ncat\n": "line 2: 'cat' is neither a synset nor a number",
        "n01440764\n3\n": "mixes synsets and numbers",
        "n01440764\na b\n": "line 2 is neither a name and a label nor a label alone",
        "a n01440764\na n01440764": "has a twice",
        "n01440764\n" * 3
        + "n99999999": r"ILSVRC2012_val_00000004.JPEG: n99999999 is not one of ImageNet's 1,000 classes",
    }.items():
        table.write_text(text)
        refuses(line, flat.sort_images, folder, out, table)
    refuses("can't be read: No such file", flat.sort_images, folder, out, tmp_path / "none")
    refuses("there is no folder", flat.sort_images, tmp_path / "none", out)
    (tmp_path / "empty").mkdir()
    refuses(r"no images in .*empty", flat.sort_images, tmp_path / "empty", out)
    table.write_text(TABLES["names"])
    flat.sort_images(folder, out, table, transfer="copy")
    table.write_text(TABLES["names"].replace("n01751748", "n01440764"))
    with pytest.raises(UserError, match=r"lies in .*n01751748 but its label is n01440764; correct one of them"):
        flat.sort_images(folder, out, table)
    table.write_text(TABLES["names"])
    next((out / "val/n01751748").iterdir()).write_bytes(b"another")
    refuses(r"n01751748.* is another file than ", flat.sort_images, folder, out, table)
