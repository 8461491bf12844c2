"""How much of the difference between two forms of a network `dyno explain` attributes to named layers.

    python benchmarks/attribution.py STORE [--networks A,B] [--pairs pytorch:onnxruntime,…] [--minutes 25]
        [--rounds 3] [--try] [--csv FILE --run NAME] [--read]

Ten networks with random weights, on one thread of this machine, which should have nothing else to do: interruptions by
other programs are in no layer, and have a separate column. Each pair is kept in STORE as it is measured, and is not
measured again. With --try the prescriptions for the second form are tried too; the number that helped is printed;
their runs are in STORE/runs. --read prints the table of a STORE and measures nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import dyno
from dyno.formatting import markdown_table

ROOT = Path(__file__).resolve().parents[1]

NETWORKS = (
    "torchvision:resnet18", "torchvision:mobilenet_v2", "timm:vit_tiny_patch16_224", "ultralytics:yolov8n.yaml",
    "torchvision:mobilenet_v3_small", "torchvision:efficientnet_b0", "ultralytics:yolo11n.yaml", "torchvision:resnet50",
    "timm:convnext_tiny", "timm:swin_tiny_patch4_window7_224",
)  # fmt: skip
PAIRS = ("pytorch:onnxruntime", "onnxruntime:onnxruntime/int8")
LIMIT_S = 900.0  # limit for one pair
MIN_LEFT_S = 60.0  # no pair starts with less time left
WANTED = 0.95  # share of the difference


@dataclass(frozen=True)
class Asked:
    """One pair of forms of a network, and its result file."""

    network: str
    a: str
    b: str
    store: Path

    @property
    def file(self) -> Path:
        """The path of the stored pair."""
        name = self.network.partition(":")[2].removesuffix(".yaml")
        return self.store / f"{name}--{self.a}--{self.b}.json".replace("/", "-")


def measure(asked: Asked, photos: Path, options: argparse.Namespace) -> str:
    """Explain the pair in a separate process; return "", or the last line printed if it failed."""
    words = ["explain", asked.network, asked.a, asked.b, "--threads", "1", "--rounds", str(options.rounds),
             "--calibration", str(photos), "--save", str(asked.file), "--format", "json"]  # fmt: skip
    words += ["--try"] * options.attempt
    try:
        done = subprocess.run([sys.executable, "-m", "dyno", *words], cwd=asked.store, capture_output=True, text=True,
                              timeout=LIMIT_S, env=None)  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not done after {LIMIT_S:g} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no output"])[-1]
    if options.attempt:
        asked.file.with_suffix(".tried.json").write_text(done.stdout, encoding="utf-8")
    return ""


def row(asked: Asked) -> dict[str, str]:
    """Return the row of a stored pair."""
    found = dyno.explain(asked.file).waterfall
    outside = {step.cause.key: found.share(step.difference.value) for step in found.causes if not step.cause.region}
    shown = found.gap.proven
    values = {
        "network": asked.file.name.partition("--")[0],
        "from": asked.a, "to": asked.b,
        "A, ms": f"{1e3 * found.gap.a:.2f}", "B, ms": f"{1e3 * found.gap.b:.2f}",
        "attributed": percent(found.attributed) if shown else "no difference shown",
        "interruptions": percent(outside.get("interrupted", 0.0)) if shown else "",
        "outside the layers": percent(outside.get("between", 0.0)) if shown else "",
        "watching slowed A and B by": ", ".join(percent(e.excess / e.latency[0]) for e in (found.a, found.b)),
    }  # fmt: skip
    return values | _tried(asked.file.with_suffix(".tried.json"))


def percent(share: float) -> str:
    """Format a share as a percentage with its sign, without negative zero."""
    return f"{100 * share + 0.0:.1f} %".replace("-0.0 ", "0.0 ")


def _tried(file: Path) -> dict[str, str]:
    """Return the number of prescriptions measured and kept, and the fastest kept one."""
    if not file.is_file():
        return {}
    rows = json.loads(file.read_text(encoding="utf-8"))["tables"].get("prescriptions", {}).get("rows", [])
    kept = [each for each in rows if each["kept"] == "yes"]
    best = max(kept, key=lambda each: each["speedup"], default=None)
    told = f"{best['prescription']}: {best['speedup']:.2f}x" if best else ""
    return {"tried": str(len(rows)), "kept": str(len(kept)), "best": told}


def pairs(options: argparse.Namespace) -> Iterator[Asked]:
    """Yield every requested pair, network by network."""
    for network in options.networks.split(","):
        for pair in options.pairs.split(","):
            a, _, b = pair.partition(":")
            yield Asked(network, a, b, options.store.absolute())


def main() -> None:
    """Measure the pairs that aren't stored until the time is up, then print the table."""
    options = _arguments()
    photos, end = options.store.absolute() / "photos", time.monotonic() + 60 * options.minutes
    photos.mkdir(parents=True, exist_ok=True)
    if not any(photos.iterdir()):
        subprocess.run([sys.executable, ROOT / "studies" / "photos.py", photos], check=True, stdout=subprocess.DEVNULL)
    for asked in pairs(options):
        if options.read or asked.file.is_file() or time.monotonic() > end - MIN_LEFT_S:
            continue
        began = time.monotonic()
        failed = measure(asked, photos, options)
        print(f"{asked.file.stem}: {failed or 'done'} ({time.monotonic() - began:.0f} s)", flush=True)
    rows = [row(asked) for asked in pairs(options) if asked.file.is_file()]
    if not rows:
        sys.exit("no pair is stored")
    heads = list(dict.fromkeys(name for each in rows for name in each))
    print(markdown_table(heads, [[each.get(name, "") for name in heads] for each in rows], [False] * len(heads)))
    shares = [float(each["attributed"].removesuffix(" %")) / 100 for each in rows if each["attributed"].endswith("%")]
    held = sum(share >= WANTED for share in shares)
    print(f"{held} of {len(shares)} differences have {WANTED:.0%} or more in named layers")
    if options.csv:
        _write(options.csv, heads, rows, options.run)


def _write(file: Path, heads: list[str], rows: list[dict[str, str]], run: str) -> None:
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, [*heads, "run"], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(each | {"run": run} for each in rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="folder that keeps the pairs")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--pairs", default=",".join(PAIRS), help="forms as `dyno explain` takes them, A:B")
    parser.add_argument("--minutes", type=float, default=25.0, help="no pair is begun after this")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side")
    parser.add_argument("--try", dest="attempt", action="store_true", help="try prescriptions, too")
    parser.add_argument("--read", action="store_true", help="measure nothing")
    parser.add_argument("--csv", type=Path, help="file for benchmarks/results/data")
    parser.add_argument("--run", default="", help="the run's name there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
