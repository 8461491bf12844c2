"""Experiment trackers: a run's trials in MLflow, Weights & Biases or TensorBoard, each through its own library."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from dyno.formatting import clean_text, format_count
from dyno.report import tables
from dyno.report.report import file_name
from dyno.report.tables.trial_table import TRIALS
from dyno.report.verdict.verdict import read_start, read_verdict
from dyno.results import metrics
from dyno.results.run_data import RunData
from dyno.results.trial_result import TrialResult
from dyno.table import Row, is_missing
from dyno.worker.record import refuse_links
from dyno.worker.spec import UserError, shorten

# Columns of the trials' table by their role in a tracker; the artifact results.csv has the rest.
PARAMETER_COLUMNS = ("model", "backend", "precision", "batch", "size", "device", "runtime", "options")
TAG_COLUMNS = ("verdict", "status", "reason", "outputs", "budget", "limit", "ran_as", "trial")
METRIC_COLUMNS = (
    "latency_ms", "latency_ms_low", "latency_ms_high", "latency_model_ms_median", "latency_model_ms_p90",
    "latency_model_ms_p95", "latency_model_ms_p99", "latency_all_ms_median", "latency_all_ms_p99", "throughput_ips",
    "speedup", "speedup_low", "speedup_high", "pipeline_ips", "size_mb", "memory_mb", "gpu_memory_mb", "load_s",
    "build_s", "first_call_ms", "energy_j",
)  # fmt: skip
ARTIFACT_FILES = ("report.html", "results.csv")  # uploaded files of a run folder
TENSORBOARD_DIR = "tensorboard"  # subfolder of a run
# characters of a parameter (MLflow's limit), and of an id in folder names
MAX_PARAMETER_LENGTH, SHORT_ID_LENGTH = 500, 6
# No library may send usage data or crash reports on Dyno's behalf; the user's settings take precedence.
QUIET_VARIABLES = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}
DEFAULT_DATE = "1970-01-01T00:00:00+00:00"  # date if the first job has none


@dataclass(frozen=True)
class TrackedTrial:
    """A trial in a tracker's terms: identifying `parameters`, text `tags` on its result, and numeric `metrics`."""

    id: str
    name: str
    parameters: dict[str, str]
    tags: dict[str, str]
    metrics: dict[str, float]
    is_winner: bool = False


@dataclass(frozen=True)
class TrackedRun:
    """A run in a tracker's terms: name, start of its first job, sentences of its verdict, and trials."""

    folder: Path
    name: str
    began: datetime
    sentences: list[str]
    trials: list[TrackedTrial]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The run's id, the same each time it is logged."""
        return hashlib.sha256(f"{self.name} {self.began.isoformat()}".encode()).hexdigest()[:16]

    @property
    def files(self) -> Iterator[Path]:
        """The report and the table of results, if they exist in the folder."""
        return (path for name in ARTIFACT_FILES if (path := self.folder / name).is_file())

    @property
    def winners(self) -> list[TrackedTrial]:
        return [trial for trial in self.trials if trial.is_winner]


def log_run(run: RunData, names: Sequence[str]) -> Iterator[str]:
    """Log a run's trials to each tracker in `names` (of `study.defaults.TRACKERS`); yield where they are stored.

    Earlier logs of the same run are replaced. UserError for a run that isn't a study, and if a tracker refuses.
    """
    if tables.list_leading(run)[0]:
        raise UserError(f"{run.records.folder} has no trials of a study to log; omit --log")
    os.environ |= {name: value for name, value in QUIET_VARIABLES.items() if name not in os.environ}
    tracked_run = describe_run(run)
    for name in names:
        try:
            yield WRITERS[name](tracked_run)
        except UserError:
            raise
        except Exception as e:  # server down, unknown project, missing key
            hint = "; WANDB_MODE=offline needs no account" if name == "wandb" else ""
            raise UserError(f"{name} could not log {run.records.folder}: {shorten(clean_text(str(e)))}{hint}") from e


def describe_run(run: RunData) -> TrackedRun:
    """Return a run in a tracker's terms."""
    verdict = read_verdict(run)
    winners = {decision.candidates[0] for decision in verdict.decisions if len(decision.candidates) == 1}
    start = read_start(run.records) or DEFAULT_DATE
    rows = TRIALS.table(run).rows
    trials = [_describe_trial(row, run.trials[row["trial"]], run, row["trial"] in winners) for row in rows]
    return TrackedRun(
        run.records.folder, run.records.name, datetime.fromisoformat(start), verdict.sentences, trials,
        run.records.settings,
    )  # fmt: skip


def _describe_trial(row: Row, trial: TrialResult, run: RunData, is_winner: bool) -> TrackedTrial:
    dyno_version = (run.records.environment.get("versions") or {}).get("inference-dyno", "")
    versions = {"dyno": dyno_version, "versions": trial.described_versions}
    parameters = {name: str(row[name]) for name in PARAMETER_COLUMNS} | versions
    tags = {name: str(row.get(name) or "") for name in TAG_COLUMNS} | {"winner": "yes" if is_winner else "no"}
    accuracies = [column.name for metric in metrics.list_metrics().values() for column in metric.columns]
    values = {name: float(row[name]) for name in (*METRIC_COLUMNS, *accuracies) if not is_missing(row.get(name))}
    return TrackedTrial(
        trial.id, clean_text(trial.label), {k: v[:MAX_PARAMETER_LENGTH] for k, v in parameters.items() if v},
        {k: v for k, v in tags.items() if v}, values, is_winner,
    )  # fmt: skip


def _log_to_mlflow(run: TrackedRun) -> str:
    """Log to an experiment named after the run folder: a run for the study with the report, and one per trial.

    A trial logged before keeps its run and gets the new numbers.
    """
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name(run.name)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(run.name)
    client.set_experiment_tag(experiment_id, "mlflow.note.content", "\n\n".join(run.sentences))
    study = _find_mlflow_run(client, experiment_id, {"dyno.run": run.id, "dyno.trial": ""}, run.name)
    client.set_tag(study, "mlflow.note.content", "\n\n".join(run.sentences))
    for path in run.files:
        client.log_artifact(study, str(path))
    for trial in run.trials:
        ids = {"dyno.run": run.id, "dyno.trial": trial.id, "mlflow.parentRunId": study}
        _fill_mlflow_run(client, _find_mlflow_run(client, experiment_id, ids, trial.name), trial)
    client.set_terminated(study)
    return f"logged {format_count(len(run.trials), 'trial')} to MLflow's experiment {run.name} at {client.tracking_uri}"


def _find_mlflow_run(client: Any, experiment: str, ids: Mapping[str, str], name: str) -> str:
    """Return the id of the run with these tags; create it if needed."""
    query = " and ".join(f"tags.`{key}` = '{ids[key]}'" for key in ("dyno.run", "dyno.trial"))
    matches = client.search_runs([experiment], query, max_results=1)
    run = matches[0] if matches else client.create_run(experiment, run_name=name, tags=dict(ids))
    return str(run.info.run_id)


def _fill_mlflow_run(client: Any, id: str, trial: TrackedTrial) -> None:
    from mlflow.entities import Metric, Param, RunTag

    timestamp = int(datetime.now().timestamp() * 1000)
    parameters = client.get_run(id).data.params  # parameters can't be changed
    client.log_batch(
        id,
        metrics=[Metric(name, value, timestamp, 0) for name, value in trial.metrics.items()],
        params=[Param(name, value) for name, value in trial.parameters.items() if name not in parameters],
        tags=[RunTag(name, value) for name, value in trial.tags.items()],
    )
    client.set_terminated(id, "FINISHED" if trial.tags.get("status") in ("ok", "skipped") else "FAILED")


def _log_to_wandb(run: TrackedRun) -> str:
    """Log one run with a table of the trials, the winner as its summary, and the report as an artifact."""
    import wandb

    fields = [*dict.fromkeys(name for t in run.trials for group in (t.parameters, t.metrics, t.tags) for name in group)]
    rows = [{**t.parameters, **t.metrics, **t.tags} for t in run.trials]
    settings = json.loads(json.dumps(run.settings, default=str))
    project, notes = os.environ.get("WANDB_PROJECT", "dyno"), "\n".join(run.sentences)
    with wandb.init(
        project=project, name=run.name, id=run.id, resume="allow", config=settings, notes=notes,
        settings=wandb.Settings(console="off"),
    ) as wandb_run:  # fmt: skip
        wandb_run.log({"trials": wandb.Table(fields, [[row.get(name) for name in fields] for row in rows])})
        for winner in run.winners[:1]:
            wandb_run.summary.update({"winner": winner.name, **winner.parameters, **winner.metrics})
        wandb_run.summary["verdict"] = " ".join(run.sentences)
        artifact = wandb.Artifact(f"dyno-{run.id}", type="report")
        for path in run.files:
            artifact.add_file(str(path))
        wandb_run.log_artifact(artifact)
        location = wandb_run.dir.removesuffix("/files") if wandb_run.offline else wandb_run.url
    return f"logged {format_count(len(run.trials), 'trial')} to Weights & Biases: {location}"


def _log_to_tensorboard(run: TrackedRun) -> str:
    """Write RUN/tensorboard: hyperparameters and scalars of each trial, in a folder named after it."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    out, timestamp = run.folder / TENSORBOARD_DIR, run.began.timestamp()
    refuse_links(run.folder, (TENSORBOARD_DIR,))
    shutil.rmtree(out, ignore_errors=True)
    for trial in run.trials:
        tags = {name: trial.tags[name] for name in ("verdict", "status", "winner") if name in trial.tags}
        writer = EventFileWriter(str(out / file_name(f"{trial.name}-{trial.id[:SHORT_ID_LENGTH]}")))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in trial.metrics.items()]
        for summary in (hparams_pb(trial.parameters | tags, trial.id, timestamp), Summary(value=values)):
            writer.add_event(Event(wall_time=timestamp, step=0, summary=summary))
        writer.close()
    return (
        f"logged {format_count(len(run.trials), 'trial')} to TensorBoard: tensorboard --logdir {shlex.quote(str(out))}"
    )


WRITERS: dict[str, Callable[[TrackedRun], str]] = {
    "mlflow": _log_to_mlflow, "wandb": _log_to_wandb, "tensorboard": _log_to_tensorboard,
}  # fmt: skip
