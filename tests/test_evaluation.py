"""`dyno eval` on real images in class folders, through the command line and from Python."""

import csv
import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import drawn
import dyno
import onnx_text
import preloaded as forked
from dyno import evaluation
from dyno.api import Result
from dyno.regression import compare_table
from dyno.report.export import export
from dyno.report.verdict import verdict
from dyno.runner import execute
from dyno.store import Run
from dyno.study.plan import PlannedTrial
from dyno.worker.spec import DataSpec, Dims, ModelSpec, Preprocess, Trial, UserError, to_json

pytestmark = pytest.mark.usefixtures("preloaded")

SHORT = "--seconds 0.05 --threads 1 --size 16 --channels 1".split()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of scikit-learn's digits as PNG files, ten test and two training images per class."""
    from PIL import Image
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    folder = tmp_path_factory.mktemp("digits")
    for digit, name in enumerate(("нуль", "one", "two")):
        for i, pixels in enumerate(images[labels == digit][:12]):
            place = folder / ("train" if i < 2 else "val") / name
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels.reshape(8, 8) * 15).astype(np.uint8)).resize((20, 20)).save(place / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, preloaded: str, photos: Path) -> Callable[..., str]:
    place = tmp_path_factory.mktemp("cli")

    def run(*words: object) -> str:
        asked = ["eval", "fake:net", "--data", photos, "--backend", "fake@latency_ms=0.1", *SHORT, *words]
        done = forked.command(preloaded, [*map(str, asked)], place, os.environ, 1200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_text_output_has_all_figures(command: Any, tmp_path: Path) -> None:
    out = command("--out", tmp_path / "run")
    for words in ("top-1 ", " on 30 images", "top-5 ", "pipeline, from decoded images, ",
                  "(30 images, after 8 of warm-up)",
                  "preprocess ",                  "inference ", "postprocess ", "worst classes: ",
                  "most common confusions: ", "latency, model, ms",
                  "latency, all, ms", "p99"):  # fmt: skip
        assert words in out, (words, out)
    (trial,) = Result(tmp_path / "run").records
    assert trial.facts.evaluation.images == 30
    assert (tmp_path / "run" / f"confusion-{trial.id}.csv").is_file()
    again = command("--out", tmp_path / "run", "--per-class", "--format", "markdown")
    rows = [" ".join(line.split()) for line in again.splitlines()]
    assert any(row.startswith("| нуль | 10 |") for row in rows) and any(row.startswith("| one | 10 |") for row in rows)


COLOUR_NETS = """
import torch

class Colours(torch.nn.Module):
    def forward(self, x): return x.mean((2, 3))

class Cells(torch.nn.Module):
    def forward(self, x):
        p = torch.nn.functional.avg_pool2d(x, 16)
        red, blue = (p[:, 0] - p[:, 2]).clamp(0, 1), (p[:, 2] - p[:, 0]).clamp(0, 1)
        n, rows, columns = red.shape
        y, x = torch.meshgrid(16 * (torch.arange(rows) + 0.5), 16 * (torch.arange(columns) + 0.5), indexing="ij")
        places = [v.reshape(1, -1).expand(n, -1) for v in (x, y, torch.full_like(x, 16), torch.full_like(x, 16))]
        return torch.stack([*places, red.reshape(n, -1), blue.reshape(n, -1)], 1)

def colours(): return Colours()
def cells(): return Cells()
"""


@pytest.fixture
def evaluated(preloaded: str, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run `dyno eval` of a colour classifier; returns exit code and output."""
    (tmp_path / "nets.py").write_text(COLOUR_NETS)

    def run(out: str, *words: object) -> tuple[int, str]:
        asked = ["eval", *words, "--seconds", 0.05, "--warmup", 0.02, "--threads", 1, "--out", out]
        done = forked.command(preloaded, [*map(str, asked)], tmp_path, os.environ, 1200)
        return done.returncode, done.stdout + done.stderr

    return run


def test_labels_from_a_table_and_images_without_labels_are_evaluated(evaluated: Any, tmp_path: Path) -> None:
    """Three of eight labels are wrong, so five answers are right; without labels.csv no accuracy is measured."""
    from PIL import Image

    (tmp_path / "photos").mkdir()
    for k in range(8):
        colour = tuple(200 + k if k % 3 == channel else 0 for channel in range(3))
        Image.new("RGB", (32, 32), colour).save(tmp_path / f"photos/{k}.png")
    labels = [k % 3 if k < 5 else (k + 1) % 3 for k in range(8)]
    words = ("nets.py:colours", "--size", 32, "--data", "photos")
    code, out = evaluated("alone", *words)
    assert code == 0 and "no accuracy was measured: the images of photos have no labels" in out
    (tmp_path / "photos/labels.csv").write_text("".join(f"{k}.png,{label}\n" for k, label in enumerate(labels)))
    code, out = evaluated("labelled", *words)
    assert code == 0 and "top-1 62.50 %" in out and "no accuracy was measured" not in out, out
    (tmp_path / "photos/labels.csv").rename(tmp_path / "photos/labels.txt")
    code, out = evaluated("unread", *words)
    assert code == 2 and "photos holds labels that can't be read there: labels.txt" in out


def test_coco_data_from_roboflow_is_evaluated(evaluated: Any, tmp_path: Path) -> None:
    """Every square is found, so mAP is 100 %: the first category is a supercategory, not the first class."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, count in (("train", 3), ("valid", 6)):
        images, annotations = [], []
        (tmp_path / "set" / split).mkdir(parents=True)
        for k in range(count):
            (row, column), kind = rng.integers(0, 4, 2).tolist(), k % 2
            image = np.full((64, 64, 3), 60 + len(split), np.uint8)
            image[16 * row : 16 * row + 16, 16 * column : 16 * column + 16] = (0, 0, 255) if kind else (255, 0, 0)
            Image.fromarray(image).save(tmp_path / "set" / split / f"{k}.png")
            images.append({"id": k, "file_name": f"{k}.png", "height": 64, "width": 64})
            box = {"bbox": [16 * column, 16 * row, 16, 16], "area": 256, "segmentation": [], "iscrowd": 0}
            annotations.append({"id": k, "image_id": k, "category_id": 1 + kind, **box})
        groups = zip(("things", "red", "blue"), ("none", "things", "things"), strict=True)
        categories = [{"id": k, "name": name, "supercategory": group} for k, (name, group) in enumerate(groups)]
        tables = {"images": images, "annotations": annotations, "categories": categories}
        (tmp_path / "set" / split / "_annotations.coco.json").write_text(json.dumps(tables))
    words = ("nets.py:cells", "--task", "detect", "--size", 64)
    for out, given in (("whole", "set"), ("split", "set/valid")):
        code, out = evaluated(out, *words, "--data", given)
        assert code == 0 and "mAP50-95 of boxes 100.00 %" in out and "on 6 images" in out, out
        assert "'things' of _annotations.coco.json is left out" in out


def test_csv_and_json_hold_every_column(command: Any, tmp_path: Path) -> None:
    command("--out", tmp_path / "run")
    (row,) = csv.DictReader(io.StringIO(command("--out", tmp_path / "run", "--format", "csv")))
    (same,) = json.loads(command("--out", tmp_path / "run", "--format", "json"))["tables"]["trials"]["rows"]
    for name in ("top1", "latency_all_ms_p99", "latency_model_ms_max", "pipeline_ips", "preprocess_ms", "inference_ms"):
        assert float(row[name]) == pytest.approx(same[name])
    assert float(row["pipeline_ips"]) > 0 and row["map50"] == "" and same["throughput_ips"] is None


def test_from_python(photos: Path, tmp_path: Path) -> None:
    result = dyno.evaluate(
        "fake:net", str(photos), tmp_path / "run", backends=("fake",), channels=1, seconds=0.05, sizes=("16",),
        warmup=0.02, threads=1,
    )  # fmt: skip
    frame = result.to_pandas()
    assert frame["images"].tolist() == [30] and frame["batch"].tolist() == [8]
    classes, matrix = result.per_class(), result.confusion()
    assert sorted(classes["class"]) == ["one", "two", "нуль"] and classes["images"].tolist() == [10, 10, 10]
    assert matrix.loc["one"].sum() == 10
    assert matrix.to_numpy().trace() == pytest.approx(frame["top1"].iloc[0] / 100 * 30)
    assert (result.report().parent / "charts" / "confusion.png").is_file()


def test_all_images_are_tested_unless_int8_needs_calibration(photos: Path, tmp_path: Path, fake_study: Any) -> None:
    same = {"data": str(photos / "val"), "sizes": ("16",), "rounds": 2}
    every = fake_study(**same).run(tmp_path / "every", quiet=True)
    fewer = fake_study(**same, precisions=("fp32", "int8")).run(tmp_path / "fewer", quiet=True)
    other = fake_study(**same, precisions=("fp32", "int8"), calibration=str(photos / "train"))
    assert every.to_pandas()["images"].tolist() == [30]
    assert other.run(tmp_path / "other", quiet=True).to_pandas()["images"].tolist() == [30, 30]
    frame = fewer.to_pandas()
    assert (frame["images"].tolist(), frame["set_aside"].tolist()) == ([24, 24], [6, 6]), "both on the same images"
    said = "24 of 30 images: 6 were set aside for calibration"
    for format in ("text", "markdown"):
        assert f"accuracy is on {said}" in export([fewer.table()], format)
        assert "set aside" not in export([every.table()], format)
    assert f"on {said}" in evaluation.describe_evaluation(fewer.records.trials[0])
    warned = "Accuracy is not on all images: 6 were set aside for calibration"
    assert any(warned in sentence for sentence in verdict.list_sentences(fewer.data))
    page = fewer.report().read_text(encoding="utf-8")
    assert said in page and warned in page and "set aside" not in every.report().read_text(encoding="utf-8")
    with pytest.raises(
        UserError, match="different test images, 6 set aside for calibration in one run and 0 in the other"
    ):
        compare_table.compare_runs(every.records, fewer.records)


def test_random_inputs_have_no_class_results(tmp_path: Path) -> None:
    result = dyno.Study(models=("fake:net",), backends=("fake",), seconds=0.02, warmup=0.01, rounds=1).run(
        tmp_path / "run", quiet=True
    )
    with pytest.raises(UserError, match="has no classifier's answers to labelled images"):
        result.per_class()


def test_ground_truth_is_stored_with_the_run(tmp_path: Path) -> None:
    data = tmp_path / "decoded"
    data.mkdir()
    (data / "truth.json").write_text('{"images": []}')
    model = ModelSpec("net", "fake:net", task="detect")
    trial = Trial(model, "fake", "fp32", Dims(1, 8, 8), data=DataSpec("shapes", str(data), "f" * 64))
    for _ in range(2):
        execute._copy_truth(Run(tmp_path / "run"), [PlannedTrial(trial)])
        kept = tmp_path / "run" / "truth" / "ffffffffffff.json"
        assert kept.read_text() == '{"images": []}' and len(list(kept.parent.iterdir())) == 1
        (data / "truth.json").write_text("changed later")
    other = replace(trial, data=DataSpec("others", str(data), "e" * 64))
    execute._copy_truth(Run(tmp_path / "run"), [PlannedTrial(other)])
    assert kept.with_name("eeeeeeeeeeee.json").read_text() == "changed later"


def test_files_without_normalisation_metadata_have_a_warning(preloaded: str, photos: Path, tmp_path: Path) -> None:
    def warned(kind: str, *words: str, **metadata: str) -> bool:
        text = f"""({kind}[N, 1, 16, 16] image) => (float[N, 3] scores) {{
            numbers = Cast<to = 1>(image) flat = Flatten(numbers) scores = MatMul(flat, weights)
        }}"""
        model = onnx_text.model(text, weights=np.eye(256, 3, dtype=np.float32))
        onnx.helper.set_model_props(model, metadata)
        onnx.save(model, tmp_path / "net.onnx")
        out = f"run{len([*tmp_path.iterdir()])}"
        short = ["--seconds", "0.05", "--warmup", "0.02", "--threads", "1"]
        asked = ["eval", "net.onnx", "--data", str(photos), "--out", out, *short, *words]
        done = forked.command(preloaded, asked, tmp_path, os.environ, 1200)
        assert done.returncode == 0, done.stderr
        said = (
            "warning: images were normalised by mean 0.5 and std 0.5, as the file doesn't specify them" in done.stdout
        )
        assert said == ("They were cropped at the centre of 1.14 times the size." in done.stdout)
        return said

    assert warned("float")
    assert not warned("float", "--mean", "0", "--std", "1"), "the file has one channel"
    with pytest.raises(AssertionError, match="mean and std are 3 numbers each, but the image has 1 channel"):
        warned("float", "--mean", "0,0,0", "--std", "1,1,1")
    assert not warned("uint8"), "bytes are fed as they are"
    own = json.dumps(to_json(Preprocess(mean=(0.0,), std=(1.0,))))
    assert not warned("float", task="classify", preprocess=own), "as Dyno exports it"
    assert warned("float", "--task", "classify", names="{0: 'a', 1: 'b', 2: 'c'}")


@pytest.mark.parametrize("file", ["net.onnx", "net.xml"])
@pytest.mark.parametrize(
    ("nodes", "largest"),
    [
        ("number = Div(image, c255) shifted = Sub(number, mean) z = Div(shifted, std)", 255),
        ("shifted = Sub(image, mean255) z = Mul(shifted, scale255)", 255),
        ("number = Mul(scale255, image) z = Sub(number, ratio)", 255),
        ("shifted = Sub(image, mean) z = Div(shifted, std)", 1),
        ("number = Div(image, std) z = Sub(number, ratio)", 1),
        ("z = Identity(image)", None),  # normalised outside, by ImageNet's: a guess
        ("z = Sub(mean, image)", None),
        ("number = Mul(image, std) z = Add(number, image)", None),
    ],
)
def test_a_file_that_normalises_images_itself_gets_pixels_in_its_range(
    call: Any, tmp_path: Path, nodes: str, largest: int | None, file: str
) -> None:
    """The network tells dark from light images, by a threshold between them in normalised numbers."""
    from PIL import Image

    for name, grey in (("dark", 60), ("light", 120)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (16, 16), (grey + number,) * 3).save(tmp_path / "photos" / name / f"{number}.png")
    mean, std = (np.array(values, np.float32).reshape(1, 3, 1, 1) for values in (Preprocess().mean, Preprocess().std))
    limit = np.float32(((90 / 255 - mean) / std).mean())
    text = f"""(float[N, 3, 16, 16] image) => (float[N, 2] scores) {{
        {nodes} averages = GlobalAveragePool(z) flat = Flatten(averages) average = ReduceMean<axes = [1]>(flat)
        light = Sub(average, limit) dark = Neg(light) scores = Concat<axis = 1>(dark, light)
    }}"""
    weights = {"mean": mean, "std": std, "c255": np.float32(255), "mean255": 255 * mean, "scale255": 1 / (255 * std),
               "ratio": mean / std, "limit": limit}  # fmt: skip
    onnx_text.write(tmp_path / "net.onnx", text, **weights)
    if file == "net.xml":
        ov = pytest.importorskip("openvino")
        ov.save_model(ov.convert_model(tmp_path / "net.onnx"), tmp_path / file)
    words = ("--data", "photos", "--seconds", "0.02", "--warmup", "0.02", "--threads", "1")
    out = call("eval", file, *words, code=0)[1]
    assert ("as the file doesn't specify them" in out) == (largest is None)
    if largest:
        assert "top-1 100.00 %" in out


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "scored"), [([0, 3, 1, 1], True), ([0, 1, 3], False)], ids=["NxCx1x1", "Nx1xC"])
def test_missing_class_scores_are_reported(
    preloaded: str, photos: Path, tmp_path: Path, shape: list[int], scored: bool
) -> None:
    text = f"""(float[N, 1, 16, 16] x) => (float[N, {", ".join(map(str, shape[1:]))}] y) {{
        flat = Flatten(x) scores = MatMul(flat, weights) y = Reshape(scores, form)
    }}"""
    weights = np.eye(256, 3, dtype=np.float32)
    onnx_text.write(tmp_path / "net.onnx", text, weights=weights, form=np.array(shape, np.int64))
    asked = ["run", "net.onnx", "--backend", "onnxruntime", "--data", str(photos), "--budget", "top1=1",
             "--rounds", "1", "--confirm", "0", "--seconds", "0.05", "--warmup", "0.02", "--threads", "1"]  # fmt: skip
    done = forked.command(preloaded, asked, tmp_path, os.environ, 1200)
    assert done.returncode == (0 if scored else 3), done.stderr
    assert ("top-1 %" in done.stdout) == scored
    missing = "net: no accuracy was measured: no output has a row of class scores for each image (N x C)"
    assert (f"{missing}; the budget was not checked." in " ".join(done.stdout.split())) != scored


CORNER = """
import torch

class Corner(torch.nn.Module):
    def forward(self, x):
        return x[:, ::2, 0, 0]
"""


@pytest.mark.parametrize("source", ["net.onnx", "net.py:Corner"])
def test_images_of_the_network_size_are_not_cropped(call: Any, tmp_path: Path, source: str) -> None:
    """The corner pixel decides; resizing and cropping would mix it with its neighbours.

    Neither a file nor a function says how images were normalised.
    """
    from PIL import Image

    for name, corner, rest in (("a", "red", "blue"), ("b", "blue", "red")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            image = Image.new("RGB", (16, 16), rest)
            image.putpixel((0, 0), {"red": (255 - number, 0, 0), "blue": (0, 0, 255 - number)}[corner])
            image.save(tmp_path / "photos" / name / f"{number}.png")
    text = """(float[N, 3, 16, 16] x) => (float[N, 2] y) {
        row = Gather<axis = 2>(x, first) corner = Gather<axis = 2>(row, first) y = Gather<axis = 1>(corner, ends)
    }"""
    onnx_text.write(tmp_path / "net.onnx", text, first=np.int64(0), ends=np.array([0, 2]))
    (tmp_path / "net.py").write_text(CORNER)
    words = ("--data", "photos", "--size", "16", "--backend", "onnxruntime" if source == "net.onnx" else "pytorch")
    words += ("--seconds", "0.02", "--threads", "1")
    warned = "images were normalised by mean 0.485,0.456,0.406"
    for given in ((), ("--mean", "0,0,0", "--std", "1,1,1")):
        out = call("eval", source, *words, *given, "--out", f"eval{len(given)}", code=0)[1]
        assert "top-1 100.00 %" in out and (warned in out) == (not given)


@pytest.mark.parametrize(
    ("outputs", "nodes", "reason"),
    [
        ("int64[N] y", "y = ArgMax<axis = 1, keepdims = 0>(mean)", "no output has a row of class scores"),
        ("float[N, 3] y, int64[N, 3] k", "y, k = TopK(mean, count)", "the scores are sorted inside the network"),
    ],
    ids=["classes", "sorted"],
)
def test_an_evaluation_without_accuracy_fails(call: Any, tmp_path: Path, outputs: str, nodes: str, reason: str) -> None:
    drawn.photographs(tmp_path / "photos", "a", "b", "c")
    text = f"(float[N, 3, 16, 16] x) => ({outputs}) {{ mean = ReduceMean<axes = [2, 3], keepdims = 0>(x) {nodes} }}"
    onnx_text.write(tmp_path / "net.onnx", text, count=np.array([3], np.int64))
    words = ("net.onnx", "--data", "photos", "--seconds", "0.02", "--threads", "1")
    code, out, error = call("eval", *words, "--out", "eval")
    assert code == 2 and f"dyno: no accuracy was measured: {reason}" in error and "have no labels" not in out, out
    _, out, _ = call("run", *words, "--backend", "onnxruntime", "--rounds", "1", "--out", "run", code=0)
    assert f"net: no accuracy was measured: {reason}" in " ".join(out.split()), out


def test_a_network_with_renumbered_classes_is_reported(call: Any, tmp_path: Path) -> None:
    from PIL import Image

    for colour in ("red", "green", "blue"):
        (tmp_path / "photos" / colour).mkdir(parents=True)
        for k in range(6):
            shade = Image.new("RGB", (20, 20), colour).point(lambda value, k=k: max(value - 5 * k, 0))
            shade.save(tmp_path / "photos" / colour / f"{k}.png")
    nodes = "mean = ReduceMean<axes = [2, 3], keepdims = 0>(image) scores = MatMul(mean, w)"
    graph = "g (float[N, 3, 16, 16] image) => (float[N, 3] scores) <float[3, 3] w = {4, 0, 0, 0, 4, 0, 0, 0, 4}>"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {graph} {{ {nodes} }}')
    onnx.save(model, tmp_path / "net.onnx")
    words = ("net.onnx", "--data", "photos", "--backend", "onnxruntime", "--seconds", "0.02")
    words += ("--mean", "0,0,0", "--std", "1,1,1")
    _, out, _ = call("eval", *words, "--out", "unnamed", code=0)
    assert "warning: the network seems to number its classes differently from the data" in " ".join(out.split())
    _, out, _ = call("run", *words, "--rounds", "1", "--out", "run", code=0)
    assert "net: the network seems to number its classes differently from the data" in " ".join(out.split())
    for text in ("red, green, blue", "['red', 'green', 'blue']", '{"0": "red", "1": "green", "2": "blue"}'):
        onnx.helper.set_model_props(model, {"labels": text})
        onnx.save(model, tmp_path / "net.onnx")
        code, _, error = call("eval", *words, "--out", "named")
        assert code == 2 and "'blue' is class 0 of photos and class 2 of net" in error
