"""Run folders as found on disk: whole, damaged, unfinished, newer, or missing; and devices slowed by each other."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dyno
import synthetic
from dyno.devices.one_host import summarise_rounds
from dyno.report.verdict.findings import list_device_findings
from dyno.results import remarks
from dyno.results.correctness import find_mismatch, find_references
from dyno.results.files import read_npz, read_numbers
from dyno.results.notes import AnchorDevice, AnchorDevices, read_devices
from dyno.results.trial_result import Results, load_run
from dyno.worker.spec import UserError
from refusals import refuses
from synthetic import Way


@pytest.fixture
def run(tmp_path: Path) -> Path:
    ways = [Way("pytorch"), Way("openvino", "int8", 0.001, batch=8), Way("openvino", "int8", 0.001)]
    return synthetic.write_run(tmp_path / "run", ways, samples=20, count=30)


def first_record(run: Path) -> Path:
    return next(p for p in sorted(run.glob("trials/*/r0/record.json")))


def test_trials_are_ordered_and_have_rounds_and_arrays(run: Path) -> None:
    results = load_run(run)
    assert [t.label for t in results] == [
        "digits pytorch fp32 b1 64", "digits openvino int8 b1 64", "digits openvino int8 b8 64"]  # fmt: skip
    trial = results[0]
    assert len(results) == 3 and results[-1] is [*results][2] and results[1:] == results.trials[1:]
    assert repr(trial) == f"TrialResult({trial.id!r}, 'digits pytorch fp32 b1 64', 'ok')"
    assert repr(results) == f"Results({str(run)!r}, 3 trials)"
    assert (trial.spec.id, trial.spec.label) == (trial.id, trial.label)
    assert [r.round_index for r in trial.rounds] == [0, 1, 2]
    assert trial.samples("latency", "model").shape == (60,)
    assert len(trial.medians("all")) == 3
    assert trial.outputs()["output"].shape == (30, 10)
    assert trial.answers["topk_index"].shape == (30, 10)
    assert trial.value("parameters") == 701_466
    assert trial.value("nothing") is None
    assert results.environment["cores"] == 2


@pytest.mark.parametrize("name", ["run", "blocks/run"])
def test_log_paths_are_relative_to_the_run_folder(tmp_path: Path, name: str) -> None:
    ways = [Way("pytorch", statuses=("failed",)), Way("openvino", statuses=("failed",))]
    run = synthetic.write_run(tmp_path / name, ways)
    first, second = sorted(run.glob("trials/*"))
    (run / "blocks/b0/trials").mkdir(parents=True)
    second = second.rename(run / "blocks/b0/trials" / second.name)  # a block that has not ended
    for trial in (first, second):
        (trial / "r0/stderr.log").write_text("what the engine said")
    logs = {t.id: t.log for t in load_run(run)}
    assert logs == {t.name: (t / "r0/stderr.log").relative_to(run).as_posix() for t in (first, second)}


def test_samples_are_read_once_with_their_record(run: Path) -> None:
    results = load_run(run)
    for file in run.glob("trials/*/*/samples.npz"):
        file.unlink()
    assert all(t.samples("latency", "model").shape == (60,) for t in results)
    assert not any(t.samples("latency", "model").size for t in load_run(run))


@pytest.mark.parametrize("make", [lambda p: None, Path.mkdir, lambda p: (p / "trials").mkdir(parents=True)])
def test_invalid_run_folders_are_refused_in_one_line(tmp_path: Path, make) -> None:
    make(tmp_path / "x")
    with pytest.raises(UserError) as e:
        load_run(tmp_path / "x")
    assert "\n" not in str(e.value)
    assert str(tmp_path / "x") in str(e.value)


def test_a_broken_record_is_named_and_the_rest_is_shown(run: Path) -> None:
    broken = first_record(run)
    broken.write_text('{"status": "ok", ')
    results = load_run(run)
    assert len(results.trials) == 3
    assert len(results.problems) == 1
    assert str(broken) in results.problems[0]
    assert sorted(len(t.rounds) for t in results) == [2, 3, 3]


def test_an_unreadable_run_is_an_error_with_its_reason(run: Path) -> None:
    for path in run.glob("trials/*/r*/job.json"):
        path.write_text("nonsense")
    refuses(r"nothing in .* can be read: .*job\.json", load_run, run)


def test_a_run_of_only_older_rounds_is_an_error(run: Path) -> None:
    for path in run.glob("trials/*/r*/record.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 1}))
    refuses(r"nothing in .* can be read: .*older Dyno .* measure into a new folder", load_run, run)


def test_missing_samples_are_reported(run: Path, call: Any) -> None:
    """Without samples, a copied run "had no latency measured"."""
    missing = sorted(run.glob("trials/*/r*/samples.npz"))
    for path in missing:
        path.unlink()
    assert load_run(run).problems == [f"{path} is missing, and the latencies of that round with it" for path in missing]
    lines = call("show", run)[2].splitlines()
    assert len(missing) > 5 and len(lines) == 6 and lines[5].endswith("more lines like these are in the report")


@pytest.mark.parametrize("text", ["[]", '{"schema": "x"}', '{"trial": 3, "schema": 1}'])
def test_jobs_without_a_trial_are_skipped_and_named(run: Path, text: str) -> None:
    folder = first_record(run).parents[1]
    for path in folder.glob("r*/job.json"):
        path.write_text(text)
    results = load_run(run)
    assert len(results.trials) == 2
    assert "job.json" in results.problems[0]


@pytest.mark.parametrize("key", ["runtime", "options", "plan", "data", "dims", "model", "backend"])
def test_null_in_a_job_is_treated_as_a_missing_key(run: Path, key: str) -> None:
    folder = first_record(run).parents[1]
    for path in folder.glob("r*/job.json"):
        job = json.loads(path.read_text())
        path.write_text(json.dumps({**job, "trial": {**job["trial"], key: None}}))
    results = load_run(run)
    assert len(results.trials) == (2 if key in ("dims", "model", "backend") else 3)
    assert bool(results.problems) == (len(results.trials) == 2)
    assert [t.size for t in results] and [t.device for t in results]


@pytest.mark.parametrize("key", ["batch", "height"])
def test_a_boolean_size_is_not_a_number(run: Path, key: str) -> None:
    path = first_record(run).parent / "job.json"
    job = json.loads(path.read_text())
    job["trial"]["dims"][key] = True
    path.write_text(json.dumps(job))
    results = load_run(run)
    assert any(f"{path} is damaged (Job.trial.dims.{key} is " in problem for problem in results.problems)
    assert all(isinstance(t.batch, int) and t.size != "True" for t in results)


def test_unknown_settings_are_skipped_and_named(run: Path) -> None:
    (run / "study.toml").write_text('budget = "../../etc"\nrounds = 2\n')
    results = load_run(run)
    assert results.settings == {}
    assert any("study.toml is damaged" in problem for problem in results.problems)


def test_trials_without_records_are_unfinished(run: Path) -> None:
    folder = first_record(run).parents[1]
    for path in folder.glob("r*/record.json"):
        path.unlink()
    trial = load_run(run).trial(folder.name)
    assert trial.status == "unfinished"
    assert trial.reason == "not measured so far"


def test_damaged_arrays_are_missing_arrays(run: Path) -> None:
    folder = first_record(run).parent
    whole = (folder / "samples.npz").read_bytes()
    (folder / "samples.npz").write_bytes(whole[: len(whole) // 2])
    (folder / "outputs.npz").unlink()
    trial = load_run(run).trial(folder.parent.name)
    assert len(trial.medians("model")) == 2
    assert trial.answers  # taken from another round


@pytest.mark.parametrize(
    "samples", [np.array(1.0), np.ones((2, 3)), np.array(["a"]), np.array(["2026-01-01"], "M8[s]")]
)
def test_non_numeric_samples_are_damaged(run: Path, samples: np.ndarray) -> None:
    folder = first_record(run).parent
    np.savez(folder / "samples.npz", latency_model=samples)
    trial = load_run(run).trial(folder.parent.name)
    assert trial.status == "failed" and "samples.npz is damaged" in trial.reason


def test_inconsistent_answers_are_dropped(run: Path) -> None:
    folder = first_record(run).parent
    whole = dict(np.load(folder / "outputs.npz"))
    for name, other in (("topk_index", np.ones(3)), ("label", np.array(1)), ("sample", np.array(["2026"], "M8[Y]"))):
        np.savez(folder / "outputs.npz", **{**whole, name: other})
        assert not load_run(run).trial(folder.parent.name).rounds[0].answers


def test_malformed_telemetry_is_damaged(run: Path) -> None:
    path = first_record(run).parent / "telemetry.npz"
    for arrays in ({"at": np.ones(3), "cpu": np.ones(2), "epoch": 0.0}, {"at": np.ones(3), "epoch": np.array("a")},
                   {"at": np.array(1.0), "epoch": 0.0}, {"at": np.ones(2), "epoch": np.ones(2)}):  # fmt: skip
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match="is damaged"):
            read_numbers(path)


def test_non_finite_values_become_none(run: Path) -> None:
    path = first_record(run)
    record = json.loads(path.read_text())
    record["measurements"] = [{"tag": "parameters", "unit": "1", "hint": "count", "value": float("inf")}]
    path.write_text(json.dumps(record))
    assert load_run(run).trial(path.parents[1].name).rounds[0].value("parameters") is None


def test_jobs_with_an_unknown_precision_are_skipped_and_named(run: Path) -> None:
    folder = first_record(run).parents[1]
    for path in folder.glob("*/job.json"):
        job = json.loads(path.read_text())
        job["trial"]["precision"] = "../passwd"
        path.write_text(json.dumps(job))
    results = load_run(run)
    assert folder.name not in {t.id for t in results} and "unknown precision" in results.problems[0]


def test_a_trial_has_the_status_of_its_worst_round(demo: Results) -> None:
    by = {t.configuration: t for t in demo if t.batch == 1}
    assert by["fake fp32"].status == "crashed"
    assert by["fake fp32"].reason == "run: killed by SIGSEGV (2 of 3 rounds good)"
    assert len(by["fake fp32"].medians("model")) == 2
    assert by["tensorrt fp16"].reason == "tensorrt isn't installed; pip install tensorrt"
    (warning,) = remarks.list_warnings(by["openvino int8"])
    assert warning == "another process used 40 % of a core"
    result = dyno.load(demo.folder)
    assert result.warnings(by["openvino int8"].id) == [warning] and warning in result.warnings()


def test_trials_are_found_by_id_prefix(demo: Results) -> None:
    assert demo.trial(demo.trials[3].id[:6]) is demo.trials[3]
    refuses("no trials", demo.trial, "zzz")


def test_the_reference_is_pytorch_fp32_of_the_same_group(demo: Results) -> None:
    chosen = find_references(demo)
    assert {chosen[t.id].configuration for t in demo} == {"pytorch fp32"}
    assert all(chosen[t.id].batch == t.batch for t in demo)


@pytest.mark.parametrize("wanted", ["onnxruntime", "onnxruntime/fp32", "onnxruntime:fp32", "id"])
def test_a_named_reference_applies_to_every_group(demo: Results, wanted: str) -> None:
    if wanted == "id":
        wanted = next(t.id for t in demo if t.configuration == "onnxruntime fp32")[:8]
    assert {find_references(demo, wanted)[t.id].label for t in demo} == {
        f"digits onnxruntime fp32 b{b} 64" for b in (1, 8)
    }


@pytest.mark.parametrize(("last", "reference"), [(Way("c"), "c fp32"), (Way("c", "fp16"), "b int8")])
def test_without_pytorch_the_first_successful_fp32_is_the_reference(tmp_path: Path, last: Way, reference: str) -> None:
    ways = [Way("pytorch", statuses=("failed",)), Way("b", "int8"), last]
    results = load_run(synthetic.write_run(tmp_path / "r", ways, samples=5, count=5))
    assert {r.configuration for r in find_references(results).values()} == {reference}


def test_an_unknown_reference_lists_the_available_ones(demo: Results) -> None:
    refuses("'tensorflow'; available: compile/fp32", find_references, demo, "tensorflow")


def test_other_weights_or_inputs_are_incomparable(tmp_path: Path) -> None:
    ways = [Way("pytorch"), Way("a", facts={"weights_sha256": "e" * 64}), Way("b", facts={"inputs_sha256": "e" * 64})]
    trials = load_run(synthetic.write_run(tmp_path / "r", ways, samples=5, count=5)).trials
    assert [find_mismatch(t, trials[0]) for t in trials] == ["", "different weights", "different inputs"]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_files_are_read_like_numpy(tmp_path: Path, save) -> None:
    arrays = {"a": np.arange(6.0).reshape(2, 3), "f": np.asfortranarray(np.ones((3, 2), np.float32)),
              "empty": np.empty((0, 4), np.int32), "scalar": np.array(3), "text": np.array(["x", "ю"])}  # fmt: skip
    save(tmp_path / "x.npz", **arrays)
    found = read_npz(tmp_path / "x.npz")
    assert set(found) == set(arrays)
    for name, array in np.load(tmp_path / "x.npz").items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    assert set(read_npz(tmp_path / "x.npz", ["a", "none"])) == {"a"}


def test_an_npz_that_unpacks_to_more_than_its_size_is_refused(tmp_path: Path) -> None:
    path, zeros = tmp_path / "x.npz", np.zeros(1000, np.uint8)
    for missing in (0, 1):
        np.savez_compressed(path, a=zeros)
        with zipfile.ZipFile(path, "a") as archive:  # the comment fills up the file
            size = sum(info.file_size for info in archive.infolist())
            archive.comment = b" " * (size - path.stat().st_size - missing)
        assert path.stat().st_size == size - missing
        if not missing:
            assert read_npz(path)["a"].tolist() == zeros.tolist()
    with pytest.raises(ValueError, match=r"x\.npz would unpack to more than its size"):
        read_npz(path)


def test_an_npz_with_python_objects_is_never_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.array([{"x": 1}], dtype=object))
    with pytest.raises(ValueError, match="Python objects"):
        read_npz(tmp_path / "x.npz")


ROUNDS = 3


def found(rng: np.random.Generator, effects: tuple[float, ...], noise: float = 0.003) -> AnchorDevices:
    """Build devices slowed down beside others by these logs; processes differ by 2 %, their ratios by noise."""
    rows = []
    for k, effect in enumerate(effects):
        alone = 0.005 * np.exp(0.02 * rng.standard_normal(ROUNDS))
        ratios = np.exp(effect + noise * rng.standard_normal(ROUNDS))
        rows.append(AnchorDevice(f"cuda:{k}", "card", tuple(alone), tuple(alone * ratios), tuple(ratios)))
    return AnchorDevices("net b1", tuple(rows))


def said(run: Path, what: AnchorDevices) -> str:
    rows = [vars(device) for device in what.devices]
    stored = {"schema": 2, "anchor": what.anchor, "side_by_side": not what.disturbed, "equivalent": 2, "devices": rows}
    (run / "devices.json").write_text(json.dumps(stored))
    return " ".join(finding.text for finding in list_device_findings(Results(run, [])))


def test_blocks_of_both_kinds_are_paired_by_position() -> None:
    """Drift from block to block enters neither ratio, and a throttled block has no partner."""
    seconds = {0: 1.0, 1: 1.1, 2: 2.2, 3: 2.0, 4: 4.0, 5: 4.4, 6: 9.0}
    one = summarise_rounds("cpu:0", "card", [(seconds, [1, 2, 2, 1, 1, 2, 1, 2]), ({0: 1.0}, [1, 2])])
    assert one.ratios == pytest.approx([1.1]) and len(one.alone) == len(one.beside) == 1


def test_large_disturbances_are_detected_and_small_ones_count_as_equal(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    slow = found(rng, (0.0, 0.08))
    assert [*slow.disturbed] == ["cuda:1"]
    assert "one at a time" in said(tmp_path, slow) and "cuda:1 by 8" in said(tmp_path, slow)
    small = found(rng, (0.01, 0.01), noise=0.0005)
    assert not small.disturbed and "hardly slower than alone" in said(tmp_path, small)
    seconds = (0.006, 0.005, 0.0055)
    three = (AnchorDevice(f"cuda:{k}", "card", (s, 1.001 * s, 0.999 * s)) for k, s in enumerate(seconds))
    text = "Cards differ by 20 % (net b1, repeated on each: cuda:0 is the slowest, cuda:1 the fastest)."
    assert text in said(tmp_path, AnchorDevices("net b1", tuple(three)))
    none = found(rng, (0.0, 0.0))
    assert "none was measurably slower" in said(tmp_path, none) and "with 95 % confidence" in said(tmp_path, none)


@pytest.mark.parametrize("count", [2, 8])
def test_noise_is_rarely_taken_for_a_difference(count: int) -> None:
    """At most 5 % of studies of equal devices find a slower device, for any number of devices and large noise."""
    rng = np.random.default_rng(count)
    drawn = [found(rng, (0.0,) * count, noise=0.05) for _ in range(400)]
    assert sum(bool(one.disturbed) for one in drawn) <= 0.05 * 400
    assert sum(one.extremes is not None and one.extremes[2] for one in drawn) <= 0.07 * 400


def test_invalid_devices_files_are_tolerated(tmp_path: Path) -> None:
    row = {"place": None, "card": None, "alone": [0, -1.0, 1e999], "beside": None, "ratios": [0.0]}
    for rows in (None, [row, row], [{"place": "a", "alone": [1.0]}, {"place": "b", "alone": [2.0], "ratios": [1.0]}]):
        (tmp_path / "devices.json").write_text(json.dumps({"schema": 2, "devices": rows, "equivalent": -3}))
        assert read_devices(tmp_path) is not None
        assert list(list_device_findings(Results(tmp_path, [])))
