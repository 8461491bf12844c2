"""Generate the documentation's pictures: python tools/pictures.py [FOLDER]

FOLDER defaults to docs/images. Needs Chromium for the graph, and the tests' extras. Measurements for a picture are
short, and no figure in it is a result.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from PIL import Image, ImageChops

import dyno
import moving_photos
from browser import browse

ROOT = Path(__file__).resolve().parents[1]

HEIGHT, WIDTH = 384, 640
FRAMES, SHOWN = 100, 66
ALONE = """<style>
body { padding: 10px; margin: 0; max-width: none; }
body > *:not(.layer-graph) { display: none; }
</style></body>"""


def graph(out: Path, scratch: Path) -> None:
    """Draw ResNet-18 in PyTorch and in ONNX Runtime, layer beside layer."""
    page = scratch / "pair.html"
    dyno.explain("torchvision:resnet18", "pytorch", "onnxruntime", rounds=1, runs=10, threads=1, seconds=0.3,
                 sizes=("128",), save=[page])  # fmt: skip
    text = page.read_text(encoding="utf-8").replace('class="layer-graph"', 'class="layer-graph" open')
    probe = scratch / "graph.html"
    probe.write_text(text.replace("</body>", ALONE), encoding="utf-8")
    browse(probe, "--window-size=1200,960", "--timeout=6000", f"--screenshot={scratch / 'graph.png'}")
    trimmed(scratch / "graph.png", out / "layer-graph.png")


def video(out: Path, scratch: Path) -> None:
    """Draw a frame with its box, and the stages over time."""
    clip = moving_photos.write(scratch / "clip.mp4", moving_photos.pictures(FRAMES, HEIGHT, WIDTH))
    (scratch / "marker.py").write_text(moving_photos.MARKER_NET, encoding="utf-8")
    words = ["bench", "video", clip, "boxes.mp4", "--model", "marker.py:net", "--task", "detect", "--classes", "1",
             "--backend", "onnxruntime", "--size", f"{HEIGHT}x{WIDTH}", "--rounds", "1", "-o", "run"]  # fmt: skip
    for command in (words, ["report", "run"]):
        subprocess.run([sys.executable, "-m", "dyno", *map(str, command)], cwd=scratch, check=True)
    frames, _ = moving_photos.read(scratch / "boxes.mp4")
    Image.fromarray(frames[SHOWN]).save(out / "video-frame.png", optimize=True)
    shutil.copy(next((scratch / "run/charts").glob("*video-timeline*.png")), out / "video-timeline.png")


# Lines of the verdict in the README as the picture breaks them, each with its parts and their labels.
READ = (
    ("", "resnet18 at size 64: fastest within the budget top1=1 is onnxruntime int8,",
     {"resnet18 at size 64": "model, image size", "budget top1=1": "allowed loss: 1 point",
      "onnxruntime int8": "the winner"}),
    ("", "73.4 µs at batch 1: 12.12x [11.92, 12.32] as fast as pytorch fp32.",
     {"73.4 µs at batch 1": "median latency", "12.12x [11.92, 12.32]": "speed-up, 95 % interval",
      "pytorch fp32": "the reference"}),
    ("real: ", "yes, in 5 rounds, measured in turns;",
     {"yes": "proven", "5 rounds, measured in turns": "in fresh processes, side by side"}),
    ("", "ahead of the runner-up, openvino int8, by 1.05x [1.03, 1.07]",
     {"openvino int8": "the next best", "1.05x [1.03, 1.07]": "the lead: all of it above 1"}),
    ("right: ", "outputs agree with those of pytorch fp32, off by 1.6 %;",
     {"outputs agree": "within INT8's tolerance", "off by 1.6 %": "their difference"}),
    ("", "top-1 99.44 %, 0.00 points [-0.43, +0.43];",
     {"top-1 99.44 %": "accuracy", "0.00 points [-0.43, +0.43]": "its change, 95 % interval"}),
    ("", "ran in the requested type", {"the requested type": "the engine says so: INT8"}),
    ("next: ", "take it: dyno export runs/demo", {"dyno export runs/demo": "what to type now"}),
)  # fmt: skip
LETTER, LINE = 9.0, 50  # pixels of a letter, and of a line with its labels
TONES = ("#0072b2", "#b26a00", "#0b7a55")


def verdict(out: Path, scratch: Path) -> None:
    """Draw the README's verdict with a label at each part."""
    (out / "verdict.svg").write_text(draw_verdict((ROOT / "README.md").read_text(encoding="utf-8")), encoding="utf-8")


def draw_verdict(readme: str) -> str:
    """Return the picture of how to read the verdict; raise ValueError for words missing from the README."""
    printed = " ".join(readme.split())
    drawn = []
    for row, (head, text, labels) in enumerate(READ):
        if head + text not in printed:
            raise ValueError(f"the README's verdict has no {head + text!r}")
        x, y = 20 + 7 * LETTER * (row > 1), 34 + LINE * row
        if head:
            drawn.append(f'<text class="head" x="20" y="{y}">{head.strip()}</text>')
        for tone, (part, label) in zip(TONES, labels.items(), strict=False):
            at = x + LETTER * text.index(part)
            drawn.append(f'<rect x="{at:g}" y="{y + 5}" width="{LETTER * len(part):g}" height="3" fill="{tone}"/>')
            drawn.append(f'<text class="label" x="{at:g}" y="{y + 22}" fill="{tone}">{label}</text>')
        drawn.append(f'<text x="{x:g}" y="{y}" textLength="{LETTER * len(text):g}">{text}</text>')
    height = 20 + LINE * len(READ)
    return (
        f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" role="img">
<title>How to read the verdict</title>
<style>text {{ font: 15px "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre; }}
.head {{ font-weight: bold; }} .label {{ font: 13px "DejaVu Sans", Arial, sans-serif; }}</style>
<rect x="1" y="1" width="718" height="{height - 2}" rx="8" fill="#fff" stroke="#dde2e9"/>
"""
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def trimmed(picture: Path, out: Path) -> None:
    """Write the picture without its plain border."""
    with Image.open(picture) as opened:
        whole = opened.convert("RGB")
    plain = Image.new("RGB", whole.size, whole.getpixel((whole.width - 1, whole.height - 1)))
    whole.crop(ImageChops.difference(whole, plain).getbbox()).save(out, optimize=True)


def main() -> None:
    """Write all pictures."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images"
    for draw in (verdict, video, graph):
        with tempfile.TemporaryDirectory() as scratch:
            draw(out, Path(scratch))


if __name__ == "__main__":
    main()
