"""A briefly trained YOLO keeps its mean average precision on every route through ONNX."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import yolo_small
from dyno.jobs.launcher import launch
from dyno.report.charts import charts
from dyno.report.tables import accuracy_tables, trial_table
from dyno.results.trial_result import load_run
from dyno.worker import tasks
from dyno.worker.inputs.input_data import Images
from dyno.worker.makers.export import OnnxExport, export_recipe
from dyno.worker.makers.precision import OnnxPrecision, convert_recipe
from dyno.worker.nets import models
from dyno.worker.spec import Artifact, DataSpec, Dims, Job, ModelSpec, Plan, Runtime, Trial
from dyno.worker.tasks.detect import BoxReader
from dyno.worker.tasks.postprocess import Detections
from dyno.worker.tasks.segment import SEGMENT
from yolo_small import SIZE, TrainedModel

pytestmark = [pytest.mark.rare, pytest.mark.usefixtures("preloaded")]
MODELOPT = os.environ.get("DYNO_TEST_MODELOPT", "")
TASK = "segment"  # covers boxes, scores, coefficients and prototypes


@dataclass(frozen=True)
class Network:
    """Trained network, its data, its ONNX file, and PyTorch's outputs for the images."""

    trained: TrainedModel
    model: ModelSpec
    data: DataSpec
    images: np.ndarray
    reference: list[np.ndarray]
    artifact: Artifact

    def found(self, outputs: list[np.ndarray]) -> list[Detections]:
        """Read detections in the original images' pixels."""
        sizes = np.load(Path(self.data.folder) / "sizes.npy")[: len(self.images)]
        named = {f"output{number}": array for number, array in enumerate(outputs)}
        return BoxReader(SEGMENT, classes=3).read_detections(named, sizes, (SIZE, SIZE))

    def scores(self, outputs: list[np.ndarray], kind: str = "bbox") -> tuple[float, float]:
        """Return mAP50 and mAP50-95."""
        return yolo_small.coco_map(self.data, self.found(outputs), kind)


@pytest.fixture(scope="module")
def network(yolo: Callable[[str], TrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Network:
    torch = pytest.importorskip("torch")
    for library in ("onnxruntime", "pycocotools"):
        pytest.importorskip(library)
    trained = yolo(TASK)
    data = yolo_small.decoded(trained.data.parent, TASK)
    preprocess = tasks.find_task(TASK).preprocess(3)
    model = ModelSpec("y", trained.source, weights=str(trained.weights), task=TASK, classes=3, preprocess=preprocess)
    images = Images(data, preprocess)
    x = images.read_batch(0, len(images), "float32")
    with torch.inference_mode():
        reference = [t.numpy() for t in models.load(model)(torch.from_numpy(x))]
    recipe = export_recipe(model, Dims(0, SIZE, SIZE), Runtime())
    artifact = OnnxExport().make(recipe, None, tmp_path_factory.mktemp("export"))
    return Network(trained, model, data, x, reference, artifact)


def run(path: str, images: np.ndarray, batch: int = 16, optimised: bool = True) -> list[np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    parts = [session.run(None, {"input": images[i : i + batch]}) for i in range(0, len(images), batch)]
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def test_detections_match_ultralytics_metrics(network: Network) -> None:
    """The metrics interpolate precision differently; the library's coarse masks score lower at strict thresholds."""
    said = network.trained.metrics
    for kind, suffix in (("bbox", "B"), ("segm", "M")):
        map50, map50_95 = network.scores(network.reference, kind)
        assert map50 > 0.2
        assert map50 == pytest.approx(said[f"metrics/mAP50({suffix})"], abs=0.05)
        strict = said[f"metrics/mAP50-95({suffix})"]
        assert map50_95 == pytest.approx(strict, abs=0.08) if kind == "bbox" else map50_95 > strict - 0.08


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_the_exported_graph_is_right_at_every_batch(network: Network, batch: int) -> None:
    assert network.artifact.made_by.exporter == "dynamo"
    for got, want in zip(run(network.artifact.path, network.images[:6], batch), network.reference, strict=True):
        np.testing.assert_allclose(got, want[:6], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("precision", "target", "pixels", "score"),
    [
        ("fp16", "onnxruntime", 1.0, 0.01),
        ("int8", "onnxruntime", None, 0.15),
        ("int8", "openvino", None, 0.15),
        ("int8", "tensorrt", None, 0.15),
    ],
)
def test_lower_precisions_still_find_the_shapes(
    network: Network, tmp_path: Path, precision: str, target: str, pixels: float | None, score: float
) -> None:
    trial = Trial(network.model, "onnxruntime", precision, Dims(0, SIZE, SIZE), data=network.data)
    made = OnnxPrecision().make(convert_recipe(trial, target), network.artifact, tmp_path)
    got = run(made.path, network.images)
    assert np.abs(got[0][:, 4:7] - network.reference[0][:, 4:7]).max() < score
    if pixels:
        assert np.abs(got[0][:, :4] - network.reference[0][:, :4]).max() < pixels
    for kind in ("bbox", "segm"):
        assert network.scores(got, kind)[1] > network.scores(network.reference, kind)[1] - 0.05


@pytest.mark.skipif(not MODELOPT, reason="DYNO_TEST_MODELOPT names no Python with nvidia-modelopt")
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_nvidia_modelopt_keeps_the_decoding_unquantised(network: Network, tmp_path: Path, precision: str) -> None:
    trial = Trial(
        network.model, "tensorrt", precision, Dims(0, SIZE, SIZE), {"quantizer": "modelopt"}, data=network.data
    )
    step = convert_recipe(trial, "tensorrt")
    job = Job("make", Runtime("modelopt", MODELOPT, threads=2), recipe=step, artifact=network.artifact)
    record = launch(job, tmp_path / "job", 1200)
    assert record.status == "ok" and record.artifact is not None, record.reason
    assert "nodes that decode boxes among it" in record.artifact.made_by.scheme
    got = run(record.artifact.path, network.images, optimised=False)
    for kind in ("bbox", "segm"):
        assert network.scores(got, kind)[1] > network.scores(network.reference, kind)[1] - 0.05


def test_one_scale_for_the_whole_output_loses_most_detections(network: Network, tmp_path: Path) -> None:
    """Without a task the network is quantised to its end; keeping the decoding in FP32 avoids that."""
    model = replace(network.model, task="classify")
    trial = Trial(model, "onnxruntime", "int8", Dims(0, SIZE, SIZE), data=network.data)
    made = OnnxPrecision().make(convert_recipe(trial, "onnxruntime"), network.artifact, tmp_path)
    got = run(made.path, network.images)
    # A range that fits pixels has steps so wide that every probability becomes 0 or 1.
    assert np.unique(got[0][:, 4:7]).size <= 2
    found, there = (sum(len(one.scores) for one in network.found(outputs)) for outputs in (got, network.reference))
    assert found < 0.1 * there


def test_every_backend_agrees_and_the_file_stores_its_task(network: Network, dyno: Any, tmp_path: Path) -> None:
    words = (network.trained.source, "--weights", network.trained.weights, "--size", SIZE)
    short = ("--threads", 1, "--compared", 4, "--rtol", 1e-2, "--atol", 1e-2, "--least", 0.999)
    backends = "pytorch,onnxruntime@exporter=dynamo,openvino@exporter=dynamo"  # tests/runner has other routes
    done = dyno(
        "diff", *words, "--backend", backends, "--batch", 2, *short, "--out", tmp_path / "a", timeout=1200, code=0
    )
    done = dyno("time", network.artifact.path, "--task", "pose", "--seconds", 0.1, code=2)
    assert "is a network for segment, not pose" in done.stderr


def test_a_run_has_masks_and_boxes(network: Network, tmp_path: Path) -> None:
    """ultralytics interpolates precision differently, and its coarse masks score lower at strict thresholds."""
    model, data, plan = network.model, network.data, Plan(boundaries=(), rounds=1)
    trial = Trial(model, "pytorch", "fp32", Dims(5, SIZE, SIZE), data=data, runtime=Runtime(threads=1), plan=plan)
    for each in (trial, replace(trial, dims=replace(trial.dims, batch=8))):
        record = launch(Job("run", each.runtime, each), tmp_path / "trials" / each.id / "r0", 1200)
        assert record.status == "ok", record.reason
        assert {"preprocess", "inference", "postprocess", "pipeline"} <= {m.tag for m in record.measurements}
    (tmp_path / "truth").mkdir()
    shutil.copy(Path(data.folder) / "truth.json", tmp_path / "truth" / f"{data.sha256[:12]}.json")
    frame = trial_table.read_trials(load_run(tmp_path)).frame
    said = network.trained.metrics
    for _, row in frame.iterrows():
        assert row["images"] == yolo_small.COUNTS["val"] and row["map50"] > 20
        pairs = (("map50", "mAP50(M)", 5), ("box_map50", "mAP50(B)", 5), ("box_map50_95", "mAP50-95(B)", 8))
        for name, key, nearly in pairs:
            assert row[name] == pytest.approx(100 * said[f"metrics/{key}"], abs=nearly)
        assert row["map50_95"] > 100 * said["metrics/mAP50-95(M)"] - 8
    assert frame["map50_95"].iloc[0] == pytest.approx(frame["map50_95"].iloc[1], abs=0.5), "whatever the batch"


def test_images_with_differing_detections_match_another_computation(
    network: Network, dyno: Any, tmp_path: Path
) -> None:
    """INT8 calibrated on pale images clips bright shapes: boxes are lost, added, or change class."""
    from PIL import Image

    (tmp_path / "pale").mkdir()
    images = network.trained.data.parent / "images"
    for file in sorted((images / "train").glob("*.png"))[:8]:
        Image.open(file).point(lambda value: 0.4 * value + 50).save(tmp_path / "pale" / file.name)
    source, weights = network.trained.source, network.trained.weights
    words = ("run", source, "--weights", weights, "--data", network.trained.data, "--calibration", tmp_path / "pale")
    short = ("--size", SIZE, "--batch", 8, "--samples", 5, "--rounds", 1, "--boundaries", "model", "--threads", 1)
    backends = "pytorch@precision=fp32,onnxruntime@precision=int8"
    dyno(*words, "--backend", backends, *short, "--out", tmp_path / "run")
    run = trial_table.read_trials(tmp_path / "run")
    named = ("image", "box", "score", "class")
    fp32, int8 = (
        {name: trial.good[0].read_arrays("outputs.npz", (f"detection_{name}",))[f"detection_{name}"] for name in named}
        for trial in sorted(run.records, key=lambda t: t.precision != "fp32")
    )
    expected = {}
    for image in range(yolo_small.COUNTS["val"]):
        lost, gained = unmatched(fp32, int8, image), unmatched(int8, fp32, image)
        close = box_ious(fp32, lost, int8, gained) >= 0.5
        both = min(close.any(0).sum(), close.any(1).sum())  # of these few, each pair belongs to one object
        if lost or gained:
            expected[image] = (len(lost) - both, len(gained) - both, both)
    rows = accuracy_tables.BOX_FLIPS.table(run).rows
    assert {row["image"]: (row["lost"], row["gained"], row["renamed"]) for row in rows} == expected
    lost, gained, renamed = np.sum([*expected.values()], axis=0)
    assert lost > 5 and gained + renamed, "else nothing was shown"
    (strip,) = charts.draw_flips(run).subfigs
    assert strip.get_suptitle().endswith(f": {lost} lost, {gained} gained, {renamed} of another class")


def unmatched(a: dict[str, np.ndarray], b: dict[str, np.ndarray], image: int) -> list[int]:
    """Return detections of `a` (score >= 0.25, best first) without overlapping match in `b` (same class, >= 0.125)."""
    alone, free = [], [k for k in np.flatnonzero(b["image"] == image) if b["score"][k] >= 0.125]
    sure = [k for k in np.flatnonzero(a["image"] == image) if a["score"][k] >= 0.25]
    for k in sorted(sure, key=lambda k: -a["score"][k]):
        same = [j for j in free if b["class"][j] == a["class"][k]]
        ious = box_ious(a, [k], b, same)[0]
        if len(same) and ious.max() >= 0.5:
            free.remove(same[int(ious.argmax())])
        else:
            alone.append(k)
    return alone


def box_ious(a: dict[str, np.ndarray], rows: list[int], b: dict[str, np.ndarray], others: list[int]) -> np.ndarray:
    import torch
    from torchvision.ops import box_iou

    one, other = (torch.from_numpy(x["box"][k].astype(np.float64)) for x, k in ((a, rows), (b, others)))
    return box_iou(one.reshape(-1, 4), other.reshape(-1, 4)).numpy()
