"""Models that don't work, and files that don't fit the requested options: one line each."""

import csv
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_text
from darknet_files import write
from trap import Trap

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")


def test_non_image_inputs_have_no_size(call: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    onnx_text.write(tmp_path / "rows.onnx", "(float[b, 16] x) => (float[b, 16] y) { y = Relu(x) }")
    words = "run", "rows.onnx", "--backend", "onnxruntime", "--rounds", "1", "--samples", "5"
    assert "size" in (listed := call(*words, "--dry-run")[1]) and " 0 " not in listed.splitlines()[1]
    code, out, err = call(*words, "--verbose")
    assert code == 0 and "check rows onnx fp32\n" in err and " b1 0" not in err
    assert out.startswith("rows, batch 1\n") and "\nrows: onnxruntime fp32 (unconfirmed) takes" in out


@pytest.mark.parametrize(
    ("words", "opset"), [([], 18), (["--target", "tensorrt"], 17), (["--opset", "15"], 15)], ids=["18", "17", "15"]
)
def test_exports_use_the_opset_of_the_target_or_the_requested_one(
    call: Any, tmp_path: Path, words: list[str], opset: int
) -> None:
    onnx = pytest.importorskip("onnx")
    (tmp_path / "net.py").write_text("import torch\ndef net(): return torch.nn.Conv2d(3, 2, 3)\n")
    call("export", "net.py:net", "--size", "8", "-o", "net.onnx", *words, code=0)
    assert onnx.load(tmp_path / "net.onnx").opset_import[0].version == opset


def test_a_program_with_a_fixed_batch_names_it(refused: Any, call: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.export.save(torch.export.export(torch.nn.Conv2d(3, 4, 3), (torch.randn(2, 3, 8, 8),)), tmp_path / "n.pt2")
    for words in (("export", "n.pt2", "-o", "n.onnx"), ("export", "n.pt2", "-o", "n.xml")):
        assert refused(*words) == "n takes only batch 2; export with a fixed batch (--batch 2)"
    assert "input float32 2x3x8x8" in call("export", "n.pt2", "-o", "n.onnx", "--batch", "2")[1]


def test_a_batch_outside_the_range_of_a_program_is_refused(refused: Any, call: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    shapes = {"input": {0: torch.export.Dim("batch", max=4)}}
    program = torch.export.export(torch.nn.Linear(8, 4), (torch.randn(3, 8),), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "n.pt2")
    words = "run", "n.pt2", "--backend", "pytorch", "--dry-run", "--batch"
    assert (
        refused(*words, "1,5") == "n: the program was exported for batches up to 4, not 5; export it with a wider range"
    )
    assert " 4 " in call(*words, "1,4", code=0)[1]


HALVES = """import torch
class Halves(torch.nn.Module):
    def forward(self, x, scale):
        half = x if x.shape[-1] * x.shape[-2] % 32 else x * 2
        return half.mean((2, 3)) * scale.mean()
def program():
    auto = torch.export.Dim.AUTO
    shapes = {"x": {0: torch.export.Dim("batch"), 2: auto, 3: auto}, "scale": None}
    return torch.export.export(Halves(), program_inputs(), dynamic_shapes=shapes)
def program_inputs():
    return torch.randn(2, 3, 8, 8), torch.ones(2)
"""


@pytest.mark.parametrize("stored", [True, False])
def test_a_size_that_takes_another_branch_of_a_program_is_refused(
    refused: Any, call: Any, tmp_path: Path, stored: bool
) -> None:
    """The program would compute the branch of its example's size."""
    torch = pytest.importorskip("torch")
    (tmp_path / "halves.py").write_text(HALVES)
    exec(HALVES, names := dict[str, Any]())
    if not hasattr((program := names["program"]()).module(), "_guards_fn"):
        pytest.skip("this PyTorch keeps no guards in a program")
    torch.export.save(program, tmp_path / "halves.pt2")
    model = "halves.pt2" if stored else "halves.py:program"
    words = "run", model, "--backend", "pytorch", "--dry-run", "--size"
    assert re.fullmatch(
        r"\w+: \w+ holds for the shapes of its example and not for x \dx3x5x8 float32, scale 2 float32 "
        r"\(.* % 32 == 0 is false\); export it again with an example of this size",
        refused(*words, "5x8"),
    )
    call(*words, "16", code=0)


ODD = """import torch
class Odd(torch.nn.Module):
    def forward(self, x):
        return (x if x.shape[0] % 4 else x * 2).mean((2, 3))
example = torch.randn(2, 3, 8, 8)
program = torch.export.export(Odd(), (example,), dynamic_shapes={"x": {0: torch.export.Dim.AUTO}})
"""


def test_batches_that_take_another_branch_of_a_program_have_no_file(refused: Any, call: Any, tmp_path: Path) -> None:
    """At batch 4 the graph would compute the module's result for batch 2."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxruntime")
    exec(ODD, names := dict[str, Any]())
    if not hasattr(names["program"].module(), "_guards_fn"):
        pytest.skip("this PyTorch keeps no guards in a program")
    torch.export.save(names["program"], tmp_path / "odd.pt2")
    words = "odd.pt2", "--out", "odd.onnx"
    reason = "odd holds for the shapes of its example and not for input 4x3x8x8 float32 (x.size()[0] % 4 != 0 is false)"
    assert refused("export", *words).endswith(f"{reason}; give the file one batch (--batch)")
    call("export", *words, "--batch", "6", code=0)
    quick = "--backend", "onnxruntime", "--precision", "fp32", *"--quick --seconds 0.05 --rounds 1".split()
    call("run", "odd.pt2", *quick, "--batch", "3,4", "--out", "run", code=3)
    rows = json.loads(call("show", "run", "--format", "json", code=0)[1])["tables"]["trials"]["rows"]
    assert [(row["batch"], row["status"]) for row in rows] == [(3, "ok"), (4, "failed")]


def test_unsupported_batches_sizes_and_channels_are_refused(refused: Any, onnx_file: Path) -> None:
    usual = ("run", onnx_file, "--backend", "onnxruntime")
    assert refused(*usual, "--channels", "4") == "m takes images of 3 channels, not 4; omit --channels"
    assert refused(*usual, "--batch", "3").startswith("m: the file's batch is fixed at 2, not 3; export it again")
    assert refused(*usual, "--size", "16").startswith(
        "m: the file's image size is fixed at 8x8; 16x16 needs another export"
    )
    assert refused("export", onnx_file, "-o", "x.xml", "--size", "16").startswith("the file's image size is fixed")
    assert refused("export", onnx_file, "-o", onnx_file).startswith(f"{onnx_file} is the model itself; give another")
    for command, name in (("export", "/proc/none/out.onnx"), ("export", "/proc/none/out.xml")):
        assert refused(command, onnx_file, "-o", name).startswith(f"{name} can't be written (")
    assert "no input 'x'; its inputs: input" in refused(*usual, "--shapes", "x:2x3x8x8")


NET = """
from torch import nn

def net(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5))
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(NET)
    return "net.py:net"


def test_a_checkpoint_with_code_is_refused_without_running_it(refused: Any, net: str, tmp_path: Path) -> None:
    import torch

    ran = tmp_path / "it_ran"
    torch.save({"0.weight": Trap(ran)}, tmp_path / "w.pt")
    line = refused("run", net, "--backend", "pytorch", "--size", "8", "--weights", "w.pt")
    assert "runs code when it is read (posix.system), which is refused" in line
    assert not ran.exists()
    torch.load(tmp_path / "w.pt", weights_only=False)
    assert ran.exists(), "the file would have run it"


def test_a_bare_pickle_is_refused_without_running_it(refused: Any, net: str, tmp_path: Path) -> None:
    ran = tmp_path / "it_ran"
    (tmp_path / "w.pt").write_bytes(pickle.dumps({"0.weight": Trap(ran)}))
    assert "w.pt" in refused("run", net, "--backend", "pytorch", "--size", "8", "--weights", "w.pt")
    assert not ran.exists()


def test_mismatched_weights_are_refused_with_their_keys(refused: Any, net: str, tmp_path: Path) -> None:
    import torch

    torch.save({"0.weight": torch.zeros(4, 3, 3, 3), "head.bias": torch.zeros(5)}, tmp_path / "w.pt")
    line = refused("run", net, "--backend", "pytorch", "--size", "8", "--weights", "w.pt")
    assert "don't fit the model: missing 0.bias, 2.weight, 2.bias; unexpected head.bias" in line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["torchvision:resnet81"], "torchvision has no model 'resnet81'; did you mean torchvision:resnet18?"),
        (["timm:resnett18"], "timm has no model 'resnett18'; did you mean timm:resnet18?"),
        (["no_such_module_here:net"], "No module named 'no_such_module_here'; install it"),
        (["net.py:nett", "--size", "8"], "net.py has no function 'nett'; did you mean net?"),
        (["net.py:net", "--size", "8", "--classes", "3"], "net has 5 classes, not 3; omit --classes, which shapes the"),
        (["net.py:net", "--size", "9"], "net: the model refuses 1x3x9x9: "),
        (["net.py:net", "--size", "2"], "net: the model refuses 1x3x2x2: "),
    ],
)
def test_invalid_models_are_refused(refused: Any, net: str, words: list[str], line: str) -> None:
    assert line in refused("run", *words, "--backend", "pytorch")


READING = """
import json
import torch
{first}

def net():
    made = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 5))
    torch.nn.init.constant_(made[2].weight, {value})
    return made
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "value"),
    [
        ("", "float(torch.load('held.pt')['v'])"),
        ("import safetensors.torch", "float(safetensors.torch.load_file('held.safetensors')['v'])"),
        ("HELD = json.load(open('held.json'))", "HELD['v']"),
    ],
    ids=["torch", "safetensors", "json"],
)
def test_files_read_by_model_code_are_part_of_the_model(call: Any, tmp_path: Path, first: str, value: str) -> None:
    """Files made from earlier weights are not reused."""
    torch, runtime = pytest.importorskip("torch"), pytest.importorskip("onnxruntime")
    from safetensors.torch import save_file

    (tmp_path / "net.py").write_text(READING.format(first=first, value=value))
    sums = []
    for held in (1.0, 2.0, 1.0):
        torch.save({"v": torch.tensor(held)}, tmp_path / "held.pt")
        save_file({"v": torch.tensor(held)}, tmp_path / "held.safetensors")
        (tmp_path / "held.json").write_text(json.dumps({"v": held}))
        out = call("export", "net.py:net", "--size", "8", "-o", "net.onnx", code=0)[1]
        assert ("cached" in out) == (len(sums) == 2), "the first one's file is still there"
        feed = {"input": np.ones((1, 3, 8, 8), np.float32)}
        session = runtime.InferenceSession(tmp_path / "net.onnx")
        sums.append(session.run(None, feed)[0] - session.run(None, {"input": 0 * feed["input"]})[0])
    np.testing.assert_allclose([each.mean() for each in sums], [3, 6, 3], rtol=1e-5)


@pytest.mark.slow
def test_changed_package_code_is_read_again(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package's files are known only after a job has imported it."""
    runtime = pytest.importorskip("onnxruntime")
    (tmp_path / "held").mkdir()
    (tmp_path / "held/__init__.py").touch()
    (tmp_path / "held/nets.py").write_text(
        "import torch\nfrom held.values import VALUE\n"
        "class Net(torch.nn.Module):\n    def forward(self, x): return VALUE * x.mean((2, 3))\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    for value in (2.0, 3.25):  # lengths differ, as byte-code is cached by its source's second and size
        (tmp_path / "held/values.py").write_text(f"VALUE = {value}\n")
        call("export", "held.nets:Net", "--size", "8", "-o", "net.onnx", code=0)
        [out] = runtime.InferenceSession(tmp_path / "net.onnx").run(None, {"input": np.ones((1, 3, 8, 8), np.float32)})
        assert out.tolist() == [[value] * 3]


def test_a_stored_module_is_compared_with_its_own_weights(call: Any, net: str, tmp_path: Path) -> None:
    import torch

    other = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 5))
    torch.jit.trace(other.eval(), torch.zeros(1, 3, 8, 8)).save(tmp_path / "old.torchscript")
    torch.save({name: 2 * values for name, values in other.state_dict().items()}, tmp_path / "new.pt")
    words = ("--weights", "new.pt", "--size", "8")
    call("diff", net, "old.torchscript", *words, "--least", "0.9", code=1)  # 0 as the old file holds the new weights
    _, out, err = call("compare", net, "old.torchscript", *words, "--rounds", "1", "--seconds", "0.1")
    assert "A is net.py:net with new.pt, B is old.torchscript." in out, err
    assert "layers 3 to unknown" in out and "ran as" not in out, "products are counted in both"


def test_ultralytics_torchscript_declares_its_size_and_normalisation(call: Any, tmp_path: Path) -> None:
    import torch
    from PIL import Image

    class Bright(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean = x.mean((1, 2, 3))
            return torch.stack([0.36 - mean, mean - 0.36], 1)

    about = {"task": "classify", "imgsz": [16, 8], "names": {"0": "dark", "1": "light"}, "dynamic": False}
    traced = torch.jit.trace(Bright(), torch.zeros(1, 3, 16, 8))
    torch.jit.save(traced, tmp_path / "best.torchscript", _extra_files={"config.txt": json.dumps(about)})
    for name, grey in (("dark", 77), ("light", 107)):  # both dark after subtracting ImageNet's mean
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (20, 20), (grey,) * 3).save(tmp_path / "photos" / name / f"{number}.png")
    _, out, _ = call("eval", "best.torchscript", "--data", "photos", "--seconds", "0.02", "--out", "run", code=0)
    assert "best, size 16x8," in out and "top-1 100.00 %" in out and "normalised by" not in out, out
    call("export", "best.torchscript", "-o", "best.onnx", code=0)
    (tmp_path / "photos" / "dark").rename(tmp_path / "photos" / "zebra")  # light becomes the first class
    for file in ("best.torchscript", "best.onnx"):
        code, _, err = call("eval", file, "--data", "photos", "--seconds", "0.02", "--out", "other")
        assert code == 2 and "'light' is class 0 of photos and class 1 of best" in err


def test_inputs_are_fed_by_name_in_any_order(call: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    for name, order in (("ab", "float[N, 4] a, float[N, 4] b"), ("ba", "float[N, 4] b, float[N, 4] a")):
        onnx_text.write(tmp_path / f"{name}.onnx", f"({order}) => (float[N, 4] y) {{ y = Sub(a, b) }}")
    _, out, _ = call("diff", "ab.onnx", "ba.onnx", code=0)
    assert "100.00" in out, out


def test_outputs_are_compared_by_name_in_any_order(call: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    text = "(float[n, 4] x) => ({}) {{ a = MatMul(x, v) b = MatMul(x, w) }}"
    weights = {"v": np.eye(4, 3, dtype=np.float32), "w": -np.eye(4, 3, k=1, dtype=np.float32)}
    a, b = "float[n, 3] a", "float[n, 3] b"
    for name, outputs, ir in (("one", f"{a}, {b}", 8), ("two", f"{b}, {a}", 8), ("three", f"{a}, {b}", 9)):
        onnx_text.write(tmp_path / f"{name}.onnx", text.format(outputs), ir=ir, **weights)
    for other, ranked in (("two", False), ("three", True)):
        _, out, _ = call("diff", "one.onnx", f"{other}.onnx", "--compared", "4", "--format", "json", code=0)
        tables = json.loads(out)["tables"]  # by name, even for a single table
        assert [row["close"] for row in tables["agreement"]["rows"]] == [1]
        assert ("ranks" in tables) == ranked


def test_a_form_after_a_model_is_the_model_in_a_backend(call: Any, refused: Any, net: str, tmp_path: Path) -> None:
    forms = ("onnxruntime", "openvino/fp32", "openvino@exporter=torchscript")
    _, out, err = call("diff", net, *forms, "--size", "8", "--compared", "2", "--format", "json", code=0)
    rows = json.loads(out)["tables"]["agreement"]["rows"]
    assert [row["trial"] for row in rows] == [
        "net onnxruntime fp32", "net openvino fp32", "net openvino@exporter=torchscript fp32"
    ]  # fmt: skip
    assert {row["reference"] for row in rows} == {"net pytorch fp32"}
    assert "other routes" not in err, "nothing is timed, so no route is the faster one"

    known = [*tmp_path.glob("runs/*")]
    assert refused("diff", net, "none.onnx", "--size", "8") == "there is no model file none.onnx"
    assert "unknown precision 'int9'" in refused("diff", net, "openvino/int9", "--size", "8")
    assert "onnxruntime is a backend, not a model" in refused("diff", "onnxruntime", net)
    assert [*tmp_path.glob("runs/*")] == known, "nothing is measured first"


QUICK = "--rounds 1 --seconds 0.05 --block 0.01 --warmup 0.02 --routes usual".split()


def test_a_darknet_detector_agrees_on_every_engine_and_is_exported(dyno: Any, tmp_path: Path) -> None:
    cfg, weights = write(tmp_path, "yolov4-tiny")
    backends = "pytorch,onnxruntime,openvino"
    dyno("run", cfg.name, "--weights", weights, "--backend", backends, *QUICK, cwd=tmp_path, code=0)
    with (tmp_path / "runs/yolov4-tiny/results.csv").open(newline="") as file:
        rows = {row["backend"]: row for row in csv.DictReader(file)}
    assert [row["status"] for row in rows.values()] == ["ok"] * 3 and {row["size"] for row in rows.values()} == {
        "64x96"
    }
    assert all(row["outputs"] == "agree" for name, row in rows.items() if name != "pytorch")
    dyno("export", "runs/yolov4-tiny", "pytorch/fp32", "-o", "best", cwd=tmp_path, code=0)
    script = subprocess.run([sys.executable, "best.py"], capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert "output float32 1x6x" in script.stdout, script.stderr


def test_darknet_files_that_cannot_run_are_refused_in_one_line(dyno: Any, tmp_path: Path) -> None:
    cfg, weights = write(tmp_path, "yolov3-tiny")
    weights.write_bytes(weights.read_bytes()[:-400])
    for words, message in (
        ((cfg.name, "--weights", weights.name), "where 572 are left"),
        ((cfg.name, "--size", "100"), "multiples of 16, not 100x100; try --size 96"),
        (("absent.cfg",), "absent.cfg can't be read"),
        (("torchvision:resnet18", "--weights", weights.name), "need the .cfg"),
    ):
        done = dyno("run", *words, *QUICK, cwd=tmp_path)
        assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr
