"""The Python interface: wrong arguments give one-line errors, and its types pass a type checker."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dyno
from dyno.store import Cache, worker_code_sha256
from dyno.worker import registry
from dyno.worker.spec import Dims, ModelSpec, Recipe

DYNO: Any = dyno  # wrong arguments on purpose
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "load": (lambda: DYNO.load(None), "folder is None; it must be text or a path"),
    "not a run": (lambda: DYNO.load("run"), "run is not a folder; give the folder that `dyno run` wrote"),
    "run": (lambda: DYNO.run("study.toml"), "study is 'study.toml'; it must be of type Study"),
    "out": (lambda: DYNO.Study(models="no.onnx").run(5), "out is 5; it must be text or a path"),
    "out file": (lambda: DYNO.Study("fake:net", backends="fake").run("file"), "file is a file, or a link"),
    "below a file": (lambda: DYNO.Study("fake:net", backends="fake").run("file/x"), "file/x is a file, or a link"),
    "retry": (lambda: DYNO.run(DYNO.Study("no.onnx"), retry_failed="no"), "retry_failed is 'no'; it must be true or"),
    "toml": (lambda: DYNO.Study.from_toml(None), "path is None; it must be text or a path"),
    "log": (lambda: DYNO.Result("run").log_to(None), "trackers is None; it must be text"),
    "remeasure": (lambda: DYNO.compare("a.onnx", "b.onnx", remeasure="no"), "remeasure is 'no'; it must be true or"),
    "pack": (lambda: DYNO.pack(None), "run is None; it must be text or a path"),
    "packed": (lambda: DYNO.pack("run", 5), "out is 5; it must be text or a path"),
    "verify": (lambda: DYNO.verify(b"net.zip"), "file is b'net.zip'; it must be text or a path"),
    "reproduce": (lambda: DYNO.reproduce(5), "file is 5; it must be text or a path"),
    "own model": (lambda: DYNO.reproduce("net.zip", model=None), "model is None; it must be text, or a list of such"),
    "reproduced": (lambda: DYNO.reproduce("net.zip", out=5), "out is 5; it must be text or a path"),
    "site": (lambda: DYNO.write_site("packs", None), "out is None; it must be text or a path"),
    "report": (lambda: DYNO.Result("run").report(5), "out is 5; it must be text or a path"),
    "take": (lambda: DYNO.Result("run").export(5), "trial is 5; it must be text"),
    "confusion": (lambda: DYNO.Result("run").confusion(5), "trial is 5; it must be text"),
    "compare": (lambda: DYNO.compare(None), "there is nothing to compare; give two run folders or models"),
    "compared": (lambda: DYNO.compare("a.onnx", "b.onnx", out=5), "out is 5; it must be text or a path"),
    "evaluate": (lambda: DYNO.evaluate("no.onnx", "digits", out=5), "out is 5; it must be text or a path"),
    "video": (lambda: DYNO.bench_video("v.mp4", model="m", options=5), "options is 5; it must be of type VideoOptions"),
    "served": (lambda: DYNO.bench_serve("m", options={}), "options is {}; it must be of type ServeOptions"),
    "cold": (lambda: DYNO.bench_cold_start("no.onnx", batch="8"), "batch is '8'; it must be a whole number"),
    "inspect": (lambda: DYNO.inspect("no.onnx", batch=None), "batch is None; it must be a whole number"),
    "profile": (lambda: DYNO.profile("no.onnx", runs=5.5), "runs is 5.5; it must be a whole number"),
    "explain": (lambda: DYNO.explain("no.onnx", top="1"), "top is '1'; it must be a whole number"),
    "agree": (lambda: DYNO.diff_layers("no.onnx", rtol=None), "rtol is None; it must be a number"),
    "least": (lambda: DYNO.diff_layers("no.onnx", batch=np.int64(0)), "batch is 0; it must be at least 1"),
    "calibrate": (lambda: DYNO.selftest(minutes=None), "minutes is None; it must be a number"),
    "train": (lambda: DYNO.train("digits", model=Path("no.py")), "there is no Python file no.py"),
}


@pytest.mark.parametrize("name", CASES)
def test_arguments_of_the_wrong_type_are_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    call, said = CASES[name]
    with pytest.raises(dyno.UserError) as caught:
        call()
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


PROGRAM = """
from pathlib import Path

import dyno

kept: tuple[int, ...] = dyno.Study("torchvision:resnet18", backends="pytorch", batches=8, sizes=64).batches
study = dyno.Study(
    models=["a.onnx", Path("b.onnx")], backends=["onnxruntime"], batches=[1, 8], sizes=[64, "64x96"],
    precisions=["fp32"], mean=[0.5], std=[0.5], data=Path("p"), weights=Path("w.safetensors"), budget={"top1": 0.5},
)
result: dyno.Result = dyno.Study.from_toml("study.toml", batches=[1]).run(Path("runs/mine"))
try:
    dyno.Study("a.onnx", batches="8")  # wrong: the one error
except dyno.UserError as error:
    print(str(error), dyno.run(study).to_pandas(), result.export().file)
"""


def test_programs_pass_a_strict_type_checker(root: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for page in ("README.md", "docs/python.md"):
        blocks = re.findall(r"^```python\n(.*?)^```", (root / page).read_text(), re.M | re.S)
        (tmp_path / f"{Path(page).stem.lower()}.py").write_text("\n".join(blocks))
    done = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", root / ".mypy_cache/user",
            "--follow-imports=silent", "--ignore-missing-imports", "--allow-redefinition", *tmp_path.glob("*.py"),
        ],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": str(root / "src")}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 1 and 'Argument "batches"' in errors[0], done.stdout + done.stderr


OUTSIDE = """
from dyno.worker.backend import Maker

class Mine(Maker):
    def make(self, recipe, parent, folder):
        pass
"""


def test_cache_keys_cover_everything_that_shapes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(
        "onnx_export", "onnx", "fp32", ModelSpec("a", "x:y", weights="/w", weights_sha256="1"), Dims(1, 8, 8)
    )
    cache = Cache(tmp_path)

    def key(**changes: Any) -> str:
        return cache.make_key(replace(recipe, **changes))

    same = ModelSpec("b", "x:y", weights="/elsewhere", weights_sha256="1")
    assert key() == key(model=same)
    assert key() == key(runtime=replace(recipe.runtime, threads=7)), "a file is made with all cores anyway"
    other = [key(), key(precision="fp16"), key(options={"a": 1}), key(dims=Dims(2, 8, 8)), key(parent=recipe)]
    other.append(key(model=ModelSpec("a", "x:y", weights_sha256="2")))
    monkeypatch.syspath_prepend(tmp_path)
    for change in ("# first", "# second"):  # a maker from outside, before and after a change
        (tmp_path / "outside_maker.py").write_text(f"{OUTSIDE}{change}")
        worker_code_sha256.cache_clear()
        other += [key(maker="outside_maker:Mine"), key(parent=replace(recipe, maker="outside_maker:Mine"))]
    monkeypatch.setattr(registry.get_maker("onnx_export"), "requires", ("numpy",))
    other.append(key())
    monkeypatch.setattr("dyno.store.worker_code_sha256", lambda *outside: "code of another Dyno")
    other.append(key())
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")  # changes PyTorch's random weights
    other.append(key())
    assert len(set(other)) == len(other)


def test_changed_worker_code_changes_the_cache_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dyno.store.system.__file__", str(tmp_path / "system.py"))
    seen = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("backends/b.py", "1"), ("note.txt", "no code")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        seen.add(worker_code_sha256.__wrapped__())
    assert len(seen) == 3
