"""The pictures of the documentation, made anew: python tools/pictures.py [FOLDER]

FOLDER is docs/images if it is left out. Needs Chromium for the graph, and the extras that the tests need. What is
measured for a picture is short, and no figure in it is a result.
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
    """ResNet-18 in PyTorch and in ONNX Runtime, layer beside layer."""
    page = scratch / "pair.html"
    dyno.explain("torchvision:resnet18", "pytorch", "onnxruntime", rounds=1, runs=10, threads=1, seconds=0.3,
                 sizes=("128",), save=[page])  # fmt: skip
    text = page.read_text(encoding="utf-8").replace('class="layer-graph"', 'class="layer-graph" open')
    probe = scratch / "graph.html"
    probe.write_text(text.replace("</body>", ALONE), encoding="utf-8")
    browse(probe, "--window-size=1200,960", "--timeout=6000", f"--screenshot={scratch / 'graph.png'}")
    trimmed(scratch / "graph.png", out / "layer-graph.png")


def video(out: Path, scratch: Path) -> None:
    """A frame with its box, and the stages over time."""
    clip = moving_photos.write(scratch / "clip.mp4", moving_photos.pictures(FRAMES, HEIGHT, WIDTH))
    (scratch / "marker.py").write_text(moving_photos.MARKER_NET, encoding="utf-8")
    words = ["bench", "video", clip, "boxes.mp4", "--model", "marker.py:net", "--task", "detect", "--classes", "1",
             "--backend", "onnxruntime", "--size", f"{HEIGHT}x{WIDTH}", "--rounds", "1", "-o", "run"]  # fmt: skip
    for command in (words, ["report", "run"]):
        subprocess.run([sys.executable, "-m", "dyno", *map(str, command)], cwd=scratch, check=True)
    frames, _ = moving_photos.read(scratch / "boxes.mp4")
    Image.fromarray(frames[SHOWN]).save(out / "video-frame.png", optimize=True)
    shutil.copy(next((scratch / "run/charts").glob("*video-timeline*.png")), out / "video-timeline.png")


def trimmed(picture: Path, out: Path) -> None:
    """Without the plain border."""
    with Image.open(picture) as opened:
        whole = opened.convert("RGB")
    plain = Image.new("RGB", whole.size, whole.getpixel((whole.width - 1, whole.height - 1)))
    whole.crop(ImageChops.difference(whole, plain).getbbox()).save(out, optimize=True)


def main() -> None:
    """Write all pictures."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images"
    for draw in (video, graph):
        with tempfile.TemporaryDirectory() as scratch:
            draw(out, Path(scratch))


if __name__ == "__main__":
    main()
