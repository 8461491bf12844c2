"""Every command of the README, the tutorials and the how-to pages, typed in order in an empty folder.

Measuring times, training times and image sizes are reduced, and networks are smaller ones of the same kind. A block
below `<!-- needs: … -->` is skipped, with a message, where its requirement is missing.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

import preloaded as forked
from decoder_file import write_decoder

ROOT = Path(__file__).resolve().parents[1]
HOW_TO = (
    "quickstart", "tutorial", "inputs", "data", "training", "ci", "trtexec", "many-devices", "video", "serving",
    "cold-start", "profile", "explain", "inspect", "diff-layers", "layer-files", "packs",
)  # fmt: skip
PAGES = ("README.md", "AGENTS.md", *(f"docs/{name}.md" for name in HOW_TO))
FENCE = re.compile(
    r"^(?:<!-- needs: (?P<needs>[^\n]*) -->\n)?```(?P<kind>bash|toml|python)\n(?P<text>.*?)^```", re.M | re.S
)
HERE = {"ultralytics": find_spec("ultralytics") is not None}  # optional requirements of blocks
# Flag: its value, and the commands that get it if a page doesn't set it.
SHORT = {
    "--rounds": ("1", ("run", "bench serve", "bench app", "explain")),
    "--seconds": ("0.05", ("run", "bench serve", "bench app", "time", "eval", "profile", "explain")),
    "--warmup": ("0.02", ("run", "bench serve", "bench app", "time", "profile", "explain")),
    "--epochs": ("1", ("data train",)),
    "--confirm": ("0", ("run",)),
    "--routes": ("usual", ("run",)),
    "--compared": ("4", ("run", "diff")),
    "--iterations": ("5", ("bench stress",)),
    "--duration": ("1s", ("bench serve",)),
    "--rate": ("10", ("bench serve",)),  # tests/serving/test_session.py searches the highest rate
    "--threads": (
        "1",
        ("run", "bench serve", "bench app", "time", "bench stress", "eval", "diff", "data train", "profile", "explain"),
    ),  # parallel threads wait for each other on a busy machine
}
SMALL = {
    "--size": {"224": "32", "320": "64", "96": "32", "64": "32", "64,96": "32"},
    "--precision": {"fp32,bf16": "fp32"},
    "--seconds": {"0.5": "0.05"},
    "--minutes": {"2": "0.1"},
    "--batch": {"1,8": "1"},  # "1,4" stays, as the best of one batch is no table
}
# Replacements of network names by smaller networks of the same kind, and of their run folders.
NETWORKS = {
    "torchvision:resnet18": "timm:test_resnet",
    "torchvision:resnet34": "timm:test_efficientnet",
    "runs/resnet18": "runs/test_resnet",
    "torchvision:mobilenet_v3_small": "timm:test_resnet",
    "timm:vit_tiny_patch16_224": "timm:test_vit",
}
# Commands of make targets, without installation.
MADE = {"make demo": "dyno demo --quick"}
# Prefixes of slow commands covered by other tests.
ELSEWHERE = {
    "dyno doctor": "tests/test_offline.py runs it; half a minute of torch.compile",
    "dyno demo": "the README's make demo runs it",
    "dyno export ultralytics:": "tests/test_yolo.py exports one; half a minute",
}
PHOTOGRAPHS = "examples/photographs.py"
KEPT = {"train": 8, "test": 4}  # photographs per class
# Exit code 1: a slow machine's second run may be slower, and weights of one epoch miss any budget.
# Exit code 3: one round decides no gate.
FINE = {"compare": (0, 1, 3), "run": (0, 1), "eval": (0, 1), "reproduce": (0, 1, 3)}
# Few digits, as 900 take PyTorch long; the counts distinguish them from the full set in the cache.
FEW_DIGITS = """
import sklearn.datasets
from dyno import data as datasets
from dyno.cli import app
pixels, labels = sklearn.datasets.load_digits(return_X_y=True)
sklearn.datasets.load_digits = lambda **_: (pixels[:300], labels[:300])
datasets.DIGITS_TEST, datasets.DIGITS_CALIBRATION = 100, 40
"""
DYNO = FEW_DIGITS + "app.main()"
# The demo has no flags for durations, image size and backends.
DEMO = f"""{FEW_DIGITS}
from dyno.cli import demo
from dyno.study.study import Study
demo.IMAGE_SIZE = 32
demo.TRAINING_SETTINGS |= {{"epochs": 1, "threads": 1}}
demo.BACKENDS = ("onnxruntime@precision=fp32+int8",)
demo.Study = lambda **asked: Study(**asked | {{"seconds": 0.05, "block": 0.01, "warmup": 0.02, "threads": 1}})
app.main()
"""


@dataclass(frozen=True)
class Block:
    """Fenced block of a page: language, text, and requirement (or "")."""

    kind: str
    text: str
    needs: str

    @property
    def lacks(self) -> str:
        return "" if HERE.get(self.needs.partition(" ")[0], not self.needs) else self.needs

    def commands(self) -> list[list[str]]:
        split = (shlex.split(line, comments=True) for line in self.text.replace("\\\n", " ").splitlines())
        return [words for words in split if words]

    @property
    def runs(self) -> bool:
        return self.kind == "bash" and not self.lacks and not all(map(left_out, self.commands()))


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [Block(m["kind"], m["text"], m["needs"] or "") for m in FENCE.finditer(text)]


def shortened(words: list[str]) -> list[str]:
    """Return the command with short measurements and trainings on small images."""
    kept, name = [smaller(word) for word in words], name_of(words)
    for flag, (value, commands) in SHORT.items():
        if flag in kept:
            kept[kept.index(flag) + 1] = "2" if flag == "--rounds" and "--until" in kept else value
        elif name in commands:
            kept += [flag, value]
    for flag, values in SMALL.items():
        if flag in kept:
            value = kept[kept.index(flag) + 1]
            kept[kept.index(flag) + 1] = values.get(value, value)
    if name == "run" and ":" in words[2] and "--backend" not in kept:  # torch.compile takes half a minute
        kept += ["--backend", "pytorch,onnxruntime"]
    if name == "compare" and ".onnx" in words[2]:  # stored runs aren't measured
        kept += shlex.split("--rounds 2 --seconds 0.05 --warmup 0.02 --threads 1")
    if name == "bench serve" and "--backend" in kept:  # one backend stands for all
        kept[kept.index("--backend") + 1] = "onnxruntime"
    if (
        "--size" not in kept
        and name in ("run", "bench serve", "export", "diff", "time", "inspect", "profile", "explain")
        and any(w.startswith("timm:") for w in kept)
    ):
        kept += ["--size", "32"]
    return [*kept, "--no-search"] if "--budget" in kept and name == "run" else kept


def name_of(words: list[str]) -> str:
    """Return the command's name, with its group."""
    return " ".join(words[1:3] if words[1] in ("bench", "data", "runs") else words[1:2])


def smaller(text: str) -> str:
    """Return the text with smaller networks."""
    for name, other in NETWORKS.items():
        text = text.replace(name, other)
    return text


def left_out(words: list[str]) -> str:
    return next((why for start, why in ELSEWHERE.items() if shlex.join(words).startswith(start)), "")


def typed(words: list[str], folder: Path, server: str, brief: bool) -> subprocess.CompletedProcess[str]:
    """Run one command line; `dyno` and `python` use this interpreter. `brief` studies have short blocks, with little
    recorded over time, and no report."""
    program, *rest = shortened(words) if words[0] == "dyno" else words
    if rest[:2] == ["runs", "rm"] and len(rest) > 3:  # trial ids depend on machine and version
        rest[3] = next((folder / rest[2] / "trials").iterdir()).name
    environment = {**os.environ, "BROWSER": "true"}
    if program == "dyno":
        if brief and rest[0] == "run":
            rest += ["--block", "0.01"]
            environment[forked.UNREPORTED] = "1"
        start = DEMO if rest[0] == "demo" else DYNO
        return forked.command(server, rest, folder, environment, 1200, ("-c", start))
    command = [sys.executable if program == "python" else program, *rest]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=1200)
    if rest[0] == PHOTOGRAPHS:
        thin(folder / rest[1])
    return done


def thin(folder: Path) -> None:
    """Keep a few photographs of each class."""
    for split, count in KEPT.items():
        for own in (folder / split).iterdir():
            for photograph in sorted(own.iterdir())[count:]:
                photograph.unlink()


def lay_out(folder: Path) -> None:
    """Set up the files that pages expect from a checkout, and a decoder's file that one page names."""
    write_decoder(folder / "decoder.onnx")
    (folder / "examples").symlink_to(ROOT / "examples")
    shutil.copytree(ROOT / "studies", folder / "studies")
    for study in (folder / "studies").glob("*.toml"):
        text = study.read_text(encoding="utf-8").replace("peak = true", "peak = false").replace("samples = 100", "")
        study.write_text(smaller(text), encoding="utf-8")


def write_file(block: Block, folder: Path) -> None:
    """Write a block that starts with `# NAME` to that file."""
    if name := re.match(r"# (\S+\.\w+)\n", block.text):
        text = re.sub(r"^(rounds|seconds) = .*", lambda m: f"{m[1]} = {SHORT[f'--{m[1]}'][0]}", block.text, flags=re.M)
        text = re.sub(r'^sizes = \["(\d+)"\]', lambda m: f'sizes = ["{SMALL["--size"][m[1]]}"]', text, flags=re.M)
        text = text.replace("batches = [1, 8]", "batches = [1]")
        (folder / name[1]).write_text(smaller(text), encoding="utf-8")


@pytest.mark.parametrize(
    "page",
    [
        page if page == "README.md" else pytest.param(page, marks=pytest.mark.rare)
        for page in PAGES
        if any(block.runs for block in blocks(page))
    ],
)
def test_every_command_of_a_page_runs(page: str, preloaded: str, tmp_path: Path) -> None:
    for name in ("torch", "onnx", "onnxruntime", "openvino", "skimage", "sklearn", "matplotlib"):
        pytest.importorskip(name)
    lay_out(tmp_path)
    ran = 0
    for block in blocks(page):
        if block.lacks:
            continue
        if block.kind != "bash":
            write_file(block, tmp_path)
            continue
        for line in block.commands():
            if why := left_out(line):
                print(f"left out: {shlex.join(line)}: {why}")
                continue
            words = shlex.split(MADE.get(shlex.join(line), shlex.join(line)))
            started = time.monotonic()
            done = typed(words, tmp_path, preloaded, brief=page != "docs/quickstart.md")
            print(f"{time.monotonic() - started:5.1f} s  {shlex.join(shortened(words))}", flush=True)
            fine = FINE.get(words[1], (0,)) if words[0] == "dyno" else (0,)
            # Jobs of 0.05 s may end before their telemetry has two samples.
            is_short = "--over-time" in words and "no two trials with a recording over time" in done.stderr
            assert is_short or done.returncode in fine, (
                f"{shlex.join(words)}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
            )
            assert "Traceback" not in done.stderr, f"{shlex.join(words)}\n{done.stderr[-3000:]}"
            ran += 1
    assert ran


@pytest.mark.parametrize("block", [pytest.param(b, id=f"{p}: {b.needs}") for p in PAGES for b in blocks(p) if b.needs])
def test_skipped_commands_state_their_requirements(block: Block) -> None:
    assert block.kind == "bash" and block.commands()
    if block.lacks:
        pytest.skip(f"needs {block.lacks}")


def test_commands_are_shortened_but_otherwise_unchanged() -> None:
    words = shlex.split("dyno run m.onnx --rounds 5 --batch 1,16")
    assert shortened(words) == shlex.split(
        "dyno run m.onnx --rounds 1 --batch 1,16 --seconds 0.05 --warmup 0.02 --confirm 0 --routes usual --compared 4 "
        "--threads 1"
    )
    assert shlex.join(shortened(shlex.split("dyno export torchvision:resnet18 -o m.onnx"))) == (
        "dyno export timm:test_resnet -o m.onnx --size 32"
    )
    assert shortened(["dyno", "show", "runs/x"]) == ["dyno", "show", "runs/x"]
