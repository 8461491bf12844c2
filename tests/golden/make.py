"""Rebuild the golden run folder, or only its expected output.

    python tests/golden/make.py              measures (about a minute) and replaces run/ and the expected files
    python tests/golden/make.py --expected   keeps run/ and writes today's output for it

The second is for a deliberate change of statistics or tables: review the difference before committing it. The first is
needed only when the stored format changes; then the old folder must stay readable or the schema number must rise.

The folder is what `dyno run` wrote, without traces of the machine: absolute paths are cut to their last part (no id
depends on a path), and logs (a crash prints its stack's paths) and the operating system's build are left out. Samples
are cut to the first MAX_SAMPLES of each kind.
"""

import json
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).resolve().parent
RUN = GOLDEN / "run"
IMAGES = 60
KEPT = ("job.json", "record.json", "stage", "samples.npz", "outputs.npz", "telemetry.npz")
LIMIT = 240_000  # bytes of the run folder; 300,000 with the expected files
MAX_SAMPLES = 500  # samples of one kind; an evaluation's stages have thousands


def measure(scratch: Path) -> Path:
    """Run a small study with every kind of row: real engines, INT8, a scripted engine, a crash and a refusal."""
    from dyno.api import Study
    from dyno.cli.demo import DEMO_MODEL, train_once

    study = Study(
        models=(DEMO_MODEL,),
        backends=("pytorch", "onnxruntime", "fake@latency_ms=0.5@precision=fp32", "fake@fail=segfault@precision=fp32"),
        precisions=("fp32", "int8"),
        sizes=("64",),
        channels=1,
        weights=str(train_once().weights),
        data=str(images(scratch / "digits")),
        budget={"top1": 5.0},
        threads=1,
        rounds=2,
        samples=20,
        warmup=0.2,
    )
    return study.run(scratch / "run", quiet=True).folder


def images(folder: Path) -> Path:
    """Write scikit-learn's digits as PNG files into class folders, equally many per class."""
    from PIL import Image
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    for digit in range(10):
        (folder / str(digit)).mkdir(parents=True)
        for n, image in enumerate(pixels[labels == digit][-IMAGES // 10 :]):
            small = Image.fromarray((image.reshape(8, 8) * 255 / 16).astype(np.uint8))
            small.resize((64, 64), Image.Resampling.BILINEAR).save(folder / str(digit) / f"{n}.png")
    return folder


def scrubbed(value: Any) -> Any:
    """Return the value with absolute paths cut to their last part and without `os`, recursively."""
    if isinstance(value, dict):
        return {key: scrubbed(inner) for key, inner in value.items() if key != "os"}
    if isinstance(value, list):
        return [scrubbed(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def keep(run: Path) -> None:
    """Copy the files of the format into RUN, scrubbed."""
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir()
    from dyno import Study

    table = tomllib.loads((run / "study.toml").read_text(encoding="utf-8"))
    (RUN / "study.toml").write_text(Study(**scrubbed(table)).to_toml(), encoding="utf-8")
    stored = [path for name in KEPT for path in run.glob(f"trials/*/*/{name}")]
    for path in [run / "environment.json", *stored]:
        place = RUN / path.relative_to(run)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            place.write_text(json.dumps(scrubbed(json.loads(path.read_bytes())), indent=1) + "\n", encoding="utf-8")
        elif path.name == "samples.npz":
            cut(path, place)
        else:
            shutil.copy(path, place)


def cut(path: Path, place: Path) -> None:
    """Copy samples, at most MAX_SAMPLES of each kind."""
    with np.load(path) as stored:
        np.savez(place, **{name: stored[name][:MAX_SAMPLES] for name in stored.files})


def printed() -> dict[str, str]:
    """Return today's output for the stored folder, by file name."""
    from dyno.report.export import export
    from dyno.report.tables import trial_table
    from dyno.report.verdict.verdict import describe_run

    run = trial_table.read_trials(RUN)
    table = trial_table.TRIALS.table(run)
    formats = {"results.csv": "csv", "results.md": "markdown", "results.json": "json"}
    return {name: export([table], format, head=describe_run(run)) for name, format in formats.items()}


def check(scratch: Path) -> None:
    """Exit if a path of this machine remains, or if the folder exceeds LIMIT."""
    files = [path for path in RUN.rglob("*") if path.is_file()]
    places = [str(place).encode() for place in (scratch, Path.home(), Path(sys.prefix), GOLDEN.parents[1])]
    found = [path for path in files if any(place in path.read_bytes() for place in places)]
    size = sum(path.stat().st_size for path in files)
    if found or size > LIMIT:
        sys.exit(f"{size} bytes; files that name a place on this machine: {found or 'none'}")
    print(f"{len(files)} files, {size} bytes")


def main() -> None:
    if "--expected" not in sys.argv:
        with tempfile.TemporaryDirectory() as scratch:
            keep(measure(Path(scratch)))
            check(Path(scratch))
    for name, text in printed().items():
        (GOLDEN / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
