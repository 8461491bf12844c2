"""`dyno data train` on the command line: any class names, a kill half-way, the weights as an engine, bad input."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from rich.console import Console

import dyno
import preloaded as forked
from dyno.runner import device_lock
from dyno.store import cache_dir, lock
from dyno.training import session
from dyno.worker.record import Record
from dyno.worker.spec import DataSpec, ModelSpec, UserError
from dyno.worker.training.options import TrainOptions

pytestmark = pytest.mark.usefixtures("preloaded")

NAMES = ("ноль", "один", "два и три")
NET = "dyno.worker.nets.digits:resnet18"
SMALL = ["--model", NET, "--channels", "1", "--size", "32", "--threads", "1"]
QUICK = [*SMALL, "--augment", "shift", "--lr", "0.005", "--batch", "16"]


def draw(folder: Path, name: str, digit: int, first: int, count: int) -> None:
    """Write `count` of scikit-learn's digits as PNG files of a class."""
    from sklearn.datasets import load_digits

    grey, labels = load_digits(return_X_y=True)
    (folder / name).mkdir(parents=True)
    for i, pixels in enumerate(grey[labels == digit][first : first + count]):
        image = Image.fromarray((pixels.reshape(8, 8) * 255 / 16).round().astype(np.uint8))
        image.resize((44, 40), Image.Resampling.BILINEAR).save(folder / name / f"{i:03}.png")


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three class folders with Cyrillic names, 40 images each."""
    folder = tmp_path_factory.mktemp("data") / "цифры"
    for digit, name in enumerate(NAMES):
        draw(folder, name, digit, 0, 40)
    return folder


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three classes in train/ and val/, with 30 and 20 images each."""
    folder = tmp_path_factory.mktemp("data") / "parted"
    for digit, name in enumerate(NAMES):
        draw(folder / "train", name, digit, 0, 30)
        draw(folder / "val", name, digit, 30, 20)
    return folder


@pytest.mark.usefixtures("unreported")
def test_cyrillic_classes_become_weights_and_an_engine(flat: Path, call: Any, tmp_path: Path) -> None:
    words = ["data", "train", flat, *QUICK, "--epochs", "6", "--out", "run", "--then", "onnxruntime"]
    _, out, said = call(*words, code=0)
    assert "on 96 images of 3 classes (два и три, ноль, один), testing on 24" in said
    epochs = re.findall(r"^epoch (\d)/6  lr \S+  loss \S+  test loss \S+  top-1 +\S+ %", said, re.M)
    assert epochs == list("123456")
    told = json.loads(Path("run/training.json").read_text(encoding="utf-8"))
    assert told["status"] == "ok" and told["data"]["classes"] == sorted(NAMES)
    assert told["settings"]["weight_decay"] == 0.01 and told["system"]["versions"]["torch"]
    assert Path("run/curves.png").read_bytes().startswith(b"\x89PNG")
    rows = session.show_history(Path("run"))
    assert max(row["top1"] for row in rows) == told["result"]["top1"] > 70  # chance is 33 %

    measured = dyno.load("run/engines").to_pandas().set_index("backend")
    assert dict(measured["status"]) == {"pytorch": "ok", "onnxruntime": "ok"}
    assert measured["top1"].tolist() == pytest.approx([told["result"]["top1"]] * 2)
    assert "onnxruntime" in out

    (following,) = re.findall(r"^next: dyno (run .*)$", said, re.M)
    code, out, said = call(*shlex.split(following), "--backend", "pytorch", "--threads", "1", "--dry-run")
    assert code == 0 and re.search(r"^1 trial of .+, 0 refused; ", out, re.M), said

    _, out, said = call(*words, "--format", "json", code=0)
    assert "trained already" in said
    found = json.loads(out)
    assert (found["top1"], found["best_epoch"]) == (told["result"]["top1"], told["result"]["best_epoch"])
    assert [row["top1"] for row in found["tables"]["epochs"]["rows"]] == [row["top1"] for row in rows]
    assert {row["backend"] for row in found["tables"]["trials"]["rows"]} == {"pytorch", "onnxruntime"}
    record = Path("run/record.json")
    whole = record.read_text()
    record.write_text(whole[:40])
    code, _, said = call(*words[:-2])
    assert code == 2 and "record.json is damaged (" in said and "or remove run to train again" in said
    record.write_text(whole)
    code, _, said = call(*words[:-2], "--lr", "0.1")
    assert (code, said.count("\n")) == (2, 1)
    assert "began with lr 0.005 (now 0.1); give another --out" in said
    (flat / NAMES[0] / "new.png").write_bytes((flat / NAMES[0] / "000.png").read_bytes())
    code, _, said = call(*words[:-2])
    (flat / NAMES[0] / "new.png").unlink()
    assert code == 2 and "another split (the images" in said


def test_a_killed_training_resumes_to_the_same_result(parted: Path, preloaded: str, tmp_path: Path) -> None:
    words = ["data", "train", str(parted), *QUICK, "--epochs", "12"]

    def run(out: str, *more: str) -> subprocess.CompletedProcess[str]:
        return forked.command(preloaded, [*words, "--out", out, *more], tmp_path, os.environ, 1200)

    command = [sys.executable, *forked.PROGRAM, *words, "--out", "killed"]
    killed = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    folder = tmp_path / "killed"
    while len(session.show_history(folder)) < 3 and killed.poll() is None:
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert 3 <= len(session.show_history(folder)) < 12
    on = run("killed", "--resume")
    assert on.returncode == 0, on.stderr
    assert re.search(r"resuming after epoch \d+ of 12", on.stderr)
    assert run("whole").returncode == 0
    assert (folder / "best.safetensors").read_bytes() == (tmp_path / "whole/best.safetensors").read_bytes()
    assert (folder / "last.safetensors").read_bytes() == (tmp_path / "whole/last.safetensors").read_bytes()
    same = ["epoch", "lr", "train_loss", "test_loss", "top1"]
    tables = [pd.read_csv(tmp_path / name / "history.csv")[same] for name in ("killed", "whole")]
    assert tables[0].equals(tables[1])


def test_the_digits_reach_98_percent(tmp_path: Path) -> None:
    result = dyno.train(
        "digits", model=NET, channels=1, size=32, epochs=10, lr=0.005, augment="shift", threads=1, out=tmp_path,
        quiet=True,
    )  # fmt: skip
    assert result.top1 >= 98
    assert result.weights == tmp_path / "best.safetensors"
    assert len(result.history) == 10 == len(result.to_pandas())
    assert result.history[result.best_epoch - 1]["top1"] == pytest.approx(result.top1)


def test_a_colour_network_needs_a_larger_cache(flat: Path, tmp_path: Path) -> None:
    """A torchvision network at its own size takes crops of larger cached images."""
    result = dyno.train(
        flat, model="torchvision:mobilenet_v3_small", size="32x40", epochs=1, augment="standard", threads=1,
        out=tmp_path, holdout=0.5, workers=1, quiet=True,
    )  # fmt: skip
    job = json.loads((tmp_path / "job.json").read_text(encoding="utf-8"))
    pixels = np.load(Path(job["options"]["training"]["folder"]) / "images.npy", mmap_mode="r")
    assert pixels.shape[1:] == (3, 37, 46) and result.history[0]["epoch"] == 1
    data = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))["data"]
    assert (data["training"]["images"], data["test"]["images"]) == (60, 60)


def test_splits_are_reproducible_and_complete(flat: Path, tmp_path: Path) -> None:
    one, other = (Path(session.find_source(str(flat), 0.25, tmp_path / name, 0)) for name in "ab")
    assert one.name == flat.name
    places = [sorted(p.relative_to(root).as_posix() for p in root.rglob("*.png")) for root in (one, other)]
    assert places[0] == places[1] and len(places[0]) == 120
    for name in NAMES:
        train, test = ({p.name for p in (one / part / name).iterdir()} for part in ("train", "test"))
        assert (len(train), len(test)) == (30, 10) and not train & test
    third = Path(session.find_source(str(flat), 0.25, tmp_path / "c", 1))
    assert sorted(p.relative_to(third).as_posix() for p in third.rglob("*.png")) != places[0]
    assert session.find_source(str(flat), 0.25, tmp_path / "a", 0) == str(one)
    moved = Path(session.find_source(str(flat), 0.5, tmp_path / "a", 0))  # without an earlier training there
    assert len(list((moved / "test" / NAMES[0]).iterdir())) == 20


def test_training_waits_for_a_gpu_held_by_another_dyno(
    flat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = types.SimpleNamespace(uuid="GPU-of-a-test", close=lambda: None)
    monkeypatch.setattr(device_lock, "find_gpu", lambda device, environment: card)
    words = {"model": NET, "channels": 1, "size": 32, "threads": 1, "epochs": 1, "batch": 16}
    thread = threading.Thread(target=dyno.train, args=(flat,), kwargs={**words, "out": tmp_path / "run"})
    said = ""
    with lock(cache_dir() / "gpus" / "GPU-of-a-test.lock", pytest.fail):
        thread.start()
        deadline = time.monotonic() + 600
        while "another dyno on this GPU" not in said and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
        assert "waiting for process" in said and not (tmp_path / "run" / "job.json").exists()
    thread.join()
    assert json.loads((tmp_path / "run" / "training.json").read_text(encoding="utf-8"))["status"] == "ok"


def test_unsuitable_data_is_refused_in_one_line(flat: Path, parted: Path, call: Any, tmp_path: Path) -> None:
    def said(data: object, *words: str) -> str:
        _, _, text = call("data", "train", data, "--model", NET, "--out", tmp_path / "run", *words, code=2)
        assert text.startswith("dyno: ") and text.count("\n") == 1, text
        assert not (tmp_path / "run").exists()
        return text

    (tmp_path / "only/test").mkdir(parents=True)
    draw(tmp_path / "only/test", "a", 0, 0, 2)
    draw(tmp_path / "lone", "a", 0, 0, 5)
    draw(tmp_path / "lone", "b", 1, 0, 1)
    draw(tmp_path / "empty", "a", 0, 0, 5)
    (tmp_path / "empty/b").mkdir()
    draws = ["--size", "32", "--channels", "1"]
    assert "no data folder" in said(tmp_path / "nowhere")
    assert "has no train/" in said(tmp_path / "only", *draws)
    assert "class 'b' has one image; it needs two" in said(tmp_path / "lone", *draws)
    assert "class 'b' has no images" in said(tmp_path / "empty", *draws)
    assert "holds images without class folders" in said(tmp_path / "lone/a", *draws)
    assert "already has test images; omit --holdout" in said(parted, "--holdout", "0.2", *draws)
    assert "--holdout is 1.5" in said(flat, "--holdout", "1.5", *draws)
    assert "there is no training to resume" in said(flat, "--resume")
    assert "unknown optimizer 'lion'" in said(flat, "--optimizer", "lion")
    assert "unknown backend 'onnxruntim'; did you mean" in said(flat, "--then", "onnxruntim")
    (tmp_path / "yolo/labels/val").mkdir(parents=True)
    (tmp_path / "yolo/images").mkdir()
    (tmp_path / "yolo/labels/val/0.txt").write_text("0 0.5 0.5 0.1 0.1")
    assert "is in YOLO's format; only classifiers are trained here" in said(tmp_path / "yolo", *draws)
    assert "is not a number" in said(flat, "--mean", "grey", "--std", "1")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": "32", "epochs": "2"}, "epochs is '2'; it must be a whole number"),
        ({"batch": 2.5}, "batch is 2.5; it must be a whole number"),
        ({"lr": "0.1"}, "lr is '0.1'; it must be a number"),
        ({"workers": None}, "workers is None; it must be a whole number"),
        ({"freeze": "no"}, "freeze is 'no'; it must be true or false"),
        ({"holdout": "0.2"}, "holdout is '0.2'; it must be a number"),
        ({"threads": "2"}, "threads is '2'; it must be a whole number"),
        ({"mean": 0.5}, "mean and std go together"),
        ({"model": 5}, "models is 5; it must be text, or a list of such"),
        ({"weights": None}, "weights is None; it must be text"),
        ({"out": 5}, "out is 5; it must be text"),
        ({"then": "openvin"}, "unknown backend 'openvin'; did you mean 'openvino'?"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused_in_one_line(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^" + re.escape(said)):
        dyno.train("digits", **{"model": NET, "out": tmp_path, "quiet": True, **given})
    assert not list(tmp_path.iterdir())


def test_out_of_memory_errors_name_the_batch() -> None:
    options = TrainOptions(batch=512)
    plan = session.TrainingPlan(None, None, (224, 320), DataSpec(), DataSpec(), options, [])  # type: ignore[arg-type]
    said = session._explain_end(Record("oom", reason="CUDA out of memory"), plan, 0)
    assert said == "memory ran out at batch 512 and 224x320 pixels (CUDA out of memory); give a smaller --batch"


def test_a_terminal_shows_a_bar_and_each_epoch_once(tmp_path: Path) -> None:
    screen = io.StringIO()
    view = session.TrainingView(tmp_path, 2, console=Console(file=screen, force_terminal=True, width=120))
    table = "epoch,lr,train_loss,test_loss,top1,seconds,images_per_s\n"
    with view.running():
        view.tick("build the model", 0.1)
        (tmp_path / "history.csv").write_text(table + "1,0.1,2.0,1.5,50.0,1.0,10\n")
        view.tick("epoch 2/2, batch 1/9", 0.2)
        (tmp_path / "history.csv").write_text(table + "1,0.1,2.0,1.5,50.0,1.0,10\n2,0.1,1.0,1.25,75.0,1.0,10\n")
    shown = screen.getvalue()
    assert shown.count("top-1  50.00 %") == 1 == shown.count("top-1  75.00 %")
    assert "epoch 2/2, batch 1/9" in shown


def test_the_network_is_announced_once_training_is_certain_to_start(tmp_path: Path) -> None:
    row = "{},0.1,2.0,1.5,50.0,1.0,10\n".format
    (tmp_path / "history.csv").write_text("epoch,lr,train_loss,test_loss,top1,seconds,images_per_s\n" + row(1) + row(2))
    opening = "training net\nresuming after epoch 2 of 4\n"

    def said(stage: str, rows: str = "") -> str:
        screen = io.StringIO()
        view = session.TrainingView(tmp_path, 4, console=Console(file=screen))
        with view.running("training net"):
            view.tick(stage, 0.1)
            view.tick(stage, 0.2)
            with open(tmp_path / "history.csv", "a") as f:
                f.write(rows)
        return screen.getvalue()

    assert said("build the model") == ""
    assert said("epoch 3/4") == said("evaluate the best weights") == opening
    assert said("build the model", row(3)).startswith(opening + "epoch 3/4")


def test_all_unreadable_images_are_reported_together(tmp_path: Path) -> None:
    """More training images than the calibration set, which every command reads."""
    grey = Image.new("L", (4, 4))
    for part, count in (("train", 80), ("val", 2)):
        for name in "ab":
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                grey.putpixel((i % 4, i // 4 % 4), 3 * i + (name == "b") + 7 * (part == "val"))
                grey.save(tmp_path / part / name / f"{i:02}.png")
    broken = [*(tmp_path / "train/a").glob("*[02468].png"), tmp_path / "val/b/00.png"]
    for i, path in enumerate(broken):
        path.write_text(f"no image {i}")
    study, model = dyno.Study(models=(NET,), data=str(tmp_path), channels=1), ModelSpec("net", NET, channels=1)
    with pytest.raises(UserError, match=r"^41 of 164 images can't be read: val/b/00.png .*, train/a/00.png .*"):
        session.decode_split(study, model, (8, 8), TrainOptions())


def test_unsuitable_models_are_refused_in_one_line(flat: Path, tmp_path: Path) -> None:
    def said(data: Any, model: str, **settings: Any) -> str:
        with pytest.raises(UserError) as caught:
            dyno.train(data, model=model, out=tmp_path / "run", quiet=True, threads=1, **settings)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    (tmp_path / "net.onnx").write_bytes(b"x")
    draw(tmp_path / "single", "а", 0, 0, 5)
    assert "can't be trained; give the PyTorch model" in said(flat, str(tmp_path / "net.onnx"))
    assert "did you mean" in said(flat, "torchvision:resnet81")
    assert "refuses 1x3x8x8" in said(flat, "torchvision:alexnet", size=8)
    assert "there is a single class, 'а'" in said(tmp_path / "single", NET, size=32, channels=1)
    assert "--weights and --pretrained can't be used together" in said(flat, NET, weights=__file__, pretrained=True)
    assert "did you mean 'epochs'" in said(flat, NET, epoch=3)


def test_training_succeeds_without_the_chart_library(
    flat: Path, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ["matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))]:
        monkeypatch.setitem(sys.modules, name, None)
    words = ("--size", "32", "--channels", "1", "--epochs", "1", "--out", "run")
    _, out, errors = call("data", "train", flat, "--model", NET, *words, code=0)
    assert "no curves.png: this needs matplotlib" in out + errors and "next: dyno run" in out + errors
    assert json.loads((tmp_path / "run/training.json").read_text())["status"] == "ok"
