"""What a user's type checker says of programs that use Dyno: the pages', and one that writes a study in every way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    print(str(error), dyno.run(study).to_pandas(), result.take().file)
"""


@pytest.mark.slow
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
