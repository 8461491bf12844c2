"""Runs in experiment trackers, read back by their own libraries; expected numbers come from the stored CSV."""

import csv
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dyno import load
from dyno.report import tracking
from dyno.report.tables.trial_table import TRIALS
from dyno.study import defaults

GOLDEN = Path(__file__).parents[1] / "golden"
STORED = {row["trial"]: row for row in csv.DictReader((GOLDEN / "results.csv").open(newline=""))}
WINNER = "613ade0a2722"
NUMBERS = ("latency_model_ms_median", "latency_model_ms_p99", "throughput_ips", "speedup_high", "top1_low", "load_s")
WORDS = ("model", "backend", "precision", "batch", "device")


@pytest.fixture
def gold(tmp_path: Path) -> Path:
    """Stored run with a report."""
    folder = tmp_path / "gold"
    shutil.copytree(GOLDEN / "run", folder)
    (folder / "report.html").write_text("<p>the report</p>")
    return folder


def check_numbers(logged: dict[str, Any], stored: dict[str, str]) -> None:
    """Assert that measured numbers are logged unchanged and others not at all."""
    for name in NUMBERS:
        if stored[name]:
            assert logged[name] == pytest.approx(float(stored[name]), rel=1e-6), name
        else:
            assert logged.get(name) is None, name


def test_mlflow_has_a_run_for_each_trial(gold: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="no MLflow (pip install 'inference-dyno[mlflow]')")
    uri = (gold.parent / "gold-mlflow").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny only has the file store
    import mlflow

    mlflow.set_tracking_uri(uri)
    for _ in range(2):  # the second time adds nothing
        _, _, err = call("show", gold, "--log", "mlflow", code=0)
    assert "MLflow's experiment gold" in err
    client = mlflow.MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("gold").experiment_id])
    study, trials = [], {}
    for run in runs:
        if id := run.data.tags["dyno.trial"]:
            trials[id] = run
        else:
            study.append(run)
    assert len(runs) == len(STORED) + 1 and trials.keys() == STORED.keys()
    for id, run in trials.items():
        assert {name: run.data.params[name] for name in WORDS} == {name: STORED[id][name] for name in WORDS}
        check_numbers(run.data.metrics, STORED[id])
        assert run.data.tags.get("verdict", "") == STORED[id]["verdict"]
        assert run.data.tags["winner"] == ("yes" if id == WINNER else "no")
        assert run.info.status == ("FAILED" if STORED[id]["status"] == "crashed" else "FINISHED")
        assert run.data.tags["mlflow.parentRunId"] == study[0].info.run_id
    assert trials["f6507b6f85bf"].data.params["versions"] == "numpy 2.4.6, onnxruntime 1.30.0"
    assert [file.path for file in client.list_artifacts(study[0].info.run_id)] == ["report.html"]
    assert "fastest within the budget top1=5 is pytorch fp32" in study[0].data.tags["mlflow.note.content"]


def test_wandb_has_a_table_and_the_winner(gold: Path, dyno: Any) -> None:
    pytest.importorskip("wandb", reason="no Weights & Biases (pip install 'inference-dyno[wandb]')")
    out = gold.parent / "gold-wandb"
    out.mkdir()
    dyno("show", gold, "--log", "wandb", env={"WANDB_MODE": "offline", "WANDB_DIR": str(out)}, cwd=out, code=0)
    (table,) = out.rglob("*.table.json")
    read = json.loads(table.read_text())
    rows = {row["trial"]: row for row in (dict(zip(read["columns"], line, strict=True)) for line in read["data"])}
    assert rows.keys() == STORED.keys()
    for id, row in rows.items():
        assert {name: row[name] for name in WORDS} == {name: STORED[id][name] for name in WORDS}
        check_numbers(row, STORED[id])
    summary: dict[str, Any] = {}
    (file,) = out.rglob("*.wandb")
    records = [*read_wandb(file)]
    for record in records:
        for item in record.summary.update:
            summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    assert summary["backend"] == "pytorch" and summary["winner"].startswith("resnet18 pytorch fp32")
    check_numbers(summary, STORED[WINNER])
    assert [record.run.display_name for record in records if record.run.display_name] == ["gold"]
    reports = [record.artifact.manifest for record in records if record.artifact.type == "report"]
    assert [[entry.path for entry in manifest.contents] for manifest in reports] == [["report.html"]]


def read_wandb(file: Path) -> Iterator[Any]:
    """Yield the records of a transaction log in LevelDB's format: blocks of 32 KiB after a 7-byte header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, record, block = file.read_bytes(), 7, b"", 1 << 15
    while place + 7 <= len(data):
        if block - place % block < 7:  # no room for a header: padding
            place += block - place % block
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield Record.FromString(record)
            record = b""


def test_tensorboard_has_hyperparameters_and_scalars(gold: Path, call: Any) -> None:
    pytest.importorskip("tensorboard", reason="no TensorBoard (pip install 'inference-dyno[tensorboard]')")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    for _ in range(2):  # the second log replaces the first
        _, _, err = call("show", gold, "--log", "tensorboard", code=0)
    assert err.endswith(f"tensorboard --logdir {gold / 'tensorboard'}\n")
    found = set()
    for folder in (gold / "tensorboard").iterdir():
        events = EventAccumulator(str(folder)).Reload()
        content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        start = HParamsPluginData.FromString(content).session_start_info
        row = STORED[start.group_name]
        found.add(start.group_name)
        assert {name: start.hparams[name].string_value for name in WORDS} == {name: row[name] for name in WORDS}
        assert start.hparams["winner"].string_value == ("yes" if row["trial"] == WINNER else "no")
        logged = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        assert all(len(values) == 1 for values in logged.values())
        check_numbers({tag: value for tag, (value,) in logged.items()}, row)
    assert found == STORED.keys()
    shutil.rmtree(gold / "tensorboard")
    (sentence,) = load(gold).log_to("tensorboard")
    assert sentence.startswith("logged 6 trials to TensorBoard") and (gold / "tensorboard").is_dir()


def test_studies_are_logged_when_they_end(call: Any, tmp_path: Path, unreported: None) -> None:
    pytest.importorskip("tensorboard", reason="no TensorBoard (pip install 'inference-dyno[tensorboard]')")
    words = "--backend fake@latency_ms=0.1 --rounds 1 --seconds 0.04 --warmup 0.02 --channels 1".split()
    _, out, err = call("run", "fake:net", *words, "-o", "runs/net", "--log", "tensorboard", code=0)
    assert "fake" in out and "logged 1 trial to TensorBoard" in err
    assert len([*(tmp_path / "runs/net/tensorboard").rglob("events.out.tfevents.*")]) == 1
    call("runs", "rm", "runs/net", "--yes", code=0)
    assert not (tmp_path / "runs/net").exists()


@pytest.mark.parametrize("command", [("show", "gold"), ("run", "fake:net", "-o", "runs/net")])
def test_missing_tracker_libraries_are_reported_before_measuring(
    command: tuple[str, ...], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(defaults, "find_spec", lambda name: None)
    assert refused(*command, "--log", "mlflow") == (
        "--log mlflow: this needs mlflow, not installed here; pip install 'inference-dyno[mlflow]'"
    )
    # A leftover tracker folder is no package, although Python finds it as a namespace package.
    monkeypatch.setattr(defaults, "find_spec", lambda name: SimpleNamespace(origin=None))
    assert refused(*command, "--log", "wandb").endswith("pip install 'inference-dyno[wandb]'")
    assert refused(*command, "--log", "tensorbord").startswith("unknown tracker 'tensorbord'; did you mean 'tensor")
    assert not (tmp_path / "runs").exists()


def test_tracker_errors_are_one_line(gold: Path, dyno: Any) -> None:
    pytest.importorskip("wandb", reason="no Weights & Biases (pip install 'inference-dyno[wandb]')")
    out = str(gold.parent)
    anonymous = {"WANDB_API_KEY": "", "WANDB_MODE": "online", "NETRC": f"{out}/no", "WANDB_DIR": out, "HOME": out}
    err = dyno("show", gold, "--log", "wandb", env=anonymous, cwd=out, code=2).stderr
    assert err.splitlines()[-1].startswith("dyno: wandb could not log") and "Traceback" not in err
    assert err.endswith("WANDB_MODE=offline needs no account\n")


def test_runs_without_trials_are_refused(gold: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="no TensorBoard (pip install 'inference-dyno[tensorboard]')")
    monkeypatch.setattr(tracking.tables, "list_leading", lambda run: ([TRIALS.build((), ())], ["of a video"]))
    _, _, err = call("show", gold, "--log", "tensorboard", code=2)
    assert err == f"dyno: {gold} has no trials of a study to log; omit --log\n"
    assert not (gold / "tensorboard").exists()
