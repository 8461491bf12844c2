"""The bundled studies can be read, and run small on a CPU."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dyno import Study
from dyno.study.study import Choice
from dyno.worker import registry

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")

STUDIES = sorted((Path(__file__).resolve().parents[1] / "studies").glob("*.toml"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: p.stem)
def test_every_study_file_is_readable_with_known_options(path: Path) -> None:
    for choice in map(Choice.parse, Study.from_toml(path).backends):
        assert set(choice.options) <= set(registry.find(choice.name).options)


def test_the_references_have_their_networks_batches_and_sizes() -> None:
    named = {path.stem: Study.from_toml(path) for path in STUDIES}
    imagenet, own = named["imagenet-tensorrt"], named["own-classes"]
    assert imagenet.batches == (1, 32, 64, 128, 256)
    assert len(imagenet.models) == 11
    assert (own.sizes, own.batches) == (("224", "256", "384", "512"), (1, 8, 16))
    assert imagenet.peak and own.peak


def test_a_dry_run_on_a_cpu_lists_trials_with_refusals(root: Path, dyno: Any, tmp_path: Path) -> None:
    done = dyno("run", root / "studies" / "own-classes.toml", "--dry-run", "--size", "64", cwd=tmp_path, code=0)
    refused = sum(line.rstrip().endswith(" refused") for line in done.stdout.splitlines())
    assert re.search(rf"^15 trials of .+, {refused} refused; ", done.stdout, re.M)
    assert bool(refused) == (" is not installed in this Python; " in done.stdout)


def test_study_files_run_on_a_cpu_at_small_scale(root: Path, dyno: Any, tmp_path: Path) -> None:
    small = ("--device", "cpu", "--backend", "pytorch", "--batch", 1, "--size", 32, "--rounds", 1)
    quick = ("--samples", 5, "--warmup", 0.05, "--threads", 1, "--out", tmp_path / "run")
    dyno("run", root / "studies" / "own-classes.toml", *small, *quick, timeout=1200, code=0)
    peak = json.loads((tmp_path / "run" / "peak" / "record.json").read_text())
    assert peak["facts"]["peak"]["fp32"]["flops_per_s"] > 0
    with open(tmp_path / "run" / "tables" / "flops.csv") as f:
        rows = list(csv.DictReader(f))
    (row,) = rows
    assert float(row["share"]) > 0 and float(row["gflop"]) > 0.01
    assert dyno("show", tmp_path / "run", "--table", "sizes").stdout.startswith("Sizes and batches\n")
