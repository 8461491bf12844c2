"""Lower precisions as files: accurate, in the target's scheme, and traceable to their origin."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

import onnx_text
from dyno.worker.facts.engine import Calibration
from dyno.worker.facts.files import MakerFacts
from dyno.worker.inputs import calibration
from dyno.worker.makers import precision as onnx_precision
from dyno.worker.makers.precision import OnnxPrecision, convert_recipe
from dyno.worker.onnx_graph import check as onnx_check
from dyno.worker.onnx_graph import half_precision
from dyno.worker.onnx_graph import int8 as onnx_int8
from dyno.worker.spec import Artifact, DataSpec, Dims, Preprocess, Recipe, Trial
from refusals import refuses

ENDS = "(float[batch, 1, 8, 8] input) => (float[batch, 1, 8, 8] output) "


def recipe(digits: Any, precision: str = "int8", target: str = "onnxruntime", **options: Any) -> Recipe:
    data = replace(digits.data, split="calibration") if precision == "int8" else None
    options = {"target": target, **options} if precision == "int8" else options
    return Recipe("onnx_precision", "onnx", precision, digits.model, Dims(0, 8, 8), options, data)


def make(digits: Any, folder: Path, *args: Any, **options: Any) -> tuple[Artifact, Counter[int], Any]:
    """Make the file; return it with its number of tensors by zero-point type, and its graph."""
    made = OnnxPrecision().make(recipe(digits, *args, **options), digits.artifact, folder)
    model = onnx.load(made.path)
    points = Counter(t.data_type for t in model.graph.initializer if t.name.endswith("zero_point"))
    return made, points, model.graph


def of_file(path: Path, asked: Recipe, digits: Any, folder: Path) -> Artifact:
    """Make the recipe's file from an ONNX file."""
    (folder / "made").mkdir()
    return OnnxPrecision().make(asked, replace(digits.artifact, path=str(path)), folder / "made")


def test_onnx_runtime_gets_unsigned_activations_and_signed_weights_per_channel(digits: Any, tmp_path: Path) -> None:
    made, points, graph = make(digits, tmp_path)
    kinds = onnx.TensorProto
    assert points[kinds.UINT8] >= 4
    weights = [t for t in graph.initializer if t.data_type == kinds.INT8 and len(t.dims) == 4]
    scales = {t.name: list(t.dims) for t in graph.initializer if t.name.endswith("weight_scale")}
    assert len(weights) == 3
    assert sorted(map(tuple, scales.values()))[-1] == (32,)
    assert points[kinds.INT32] or any(t.data_type == kinds.INT32 for t in graph.initializer)
    assert made.made_by.scheme.startswith("U8S8")


def test_tensorrt_gets_signed_symmetric_and_no_quantised_bias(digits: Any, tmp_path: Path) -> None:
    made, points, graph = make(digits, tmp_path, target="tensorrt")
    assert set(points) == {onnx.TensorProto.INT8}
    assert not any(t.data_type == onnx.TensorProto.INT32 for t in graph.initializer)
    zero = [onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name.endswith("zero_point")]
    assert all((points == 0).all() for points in zero)
    assert made.made_by.scheme.startswith("S8S8")


def test_openvino_gets_zero_point_0_and_unsigned_non_negative_activations(digits: Any, tmp_path: Path) -> None:
    made, points, graph = make(digits, tmp_path, target="openvino")
    assert points[onnx.TensorProto.UINT8] >= 2
    zero = [onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name.endswith("zero_point")]
    assert all((points == 0).all() for points in zero)
    (seen,) = (t for t in graph.initializer if t.name == "input_zero_point")
    assert seen.data_type == onnx.TensorProto.INT8
    assert not any(t.data_type == onnx.TensorProto.INT32 for t in graph.initializer)
    assert made.made_by.scheme.startswith("U8S8 or S8S8, zero-point 0")


def test_attention_and_residual_sums_of_a_transformer_stay_in_float(
    digits: Any, onnx_file: Any, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    path = onnx_file(ENDS + """{
        [query] q = MatMul(input, wq)
        [key] k = MatMul(input, wk)
        [product] scores = MatMul(q, k)
        [softmax] attention = Softmax(scores)
        [residual] output = Add(input, attention)
    }""", **{name: rng.standard_normal((8, 8)).astype(np.float32) for name in ("wq", "wk")})  # fmt: skip
    made = of_file(path, recipe(digits), digits, tmp_path)
    graph = onnx.load(made.path).graph
    producers = {name: node.op_type for node in graph.node for name in node.output}
    fed_by = {node.name: {producers.get(name) for name in node.input} for node in graph.node}
    assert fed_by["query"] == fed_by["key"] == {"DequantizeLinear"}
    assert fed_by["softmax"] == {"MatMul"}
    assert producers["output"] == "Add"
    assert made.made_by.kept_float == 1


def test_the_record_describes_calibration_and_target(digits: Any, tmp_path: Path) -> None:
    made, *_ = make(digits, tmp_path, samples=40)
    assert made.made_by.calibration == Calibration(40, "minmax", "d161")
    assert made.made_by.target == "onnxruntime"
    assert made.made_by.parameters == 1234
    assert 0 < made.made_by.check.max_difference < 0.1 * made.made_by.check.max_output
    assert made.parent_sha256 == digits.artifact.sha256
    assert made.bytes < 0.5 * digits.artifact.bytes
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_fewer_calibration_images_than_asked_for_is_a_warning(digits: Any, tmp_path: Path) -> None:
    made, *_ = make(digits, tmp_path, samples=5000)
    assert made.made_by.calibration.samples == 200
    assert made.made_by.warnings == ("calibrated on 200 images, all that digits has for it",)


def test_percentile_calibration_narrows_the_ranges(digits: Any, tmp_path: Path) -> None:
    def scales(*, method: str) -> np.ndarray:
        folder = tmp_path / method
        folder.mkdir()
        *_, graph = make(digits, folder, samples=24, method=method)
        found = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name.endswith("output_0_scale")}
        return np.asarray([found[name] for name in sorted(found)])

    usual, other = scales(method="minmax"), scales(method="percentile")
    assert (other <= usual * 1.01).all()
    assert (other < usual * 0.999).any()


def test_a_file_with_a_fixed_batch_is_calibrated_at_that_batch(digits: Any, static_file: Path, tmp_path: Path) -> None:
    parent = digits.described(static_file, batch=1)
    made = OnnxPrecision().make(recipe(digits, samples=10), parent, tmp_path)
    assert made.inputs[0].shape == (1, 1, 8, 8)


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_weights_have_seven_bits_where_the_cpu_would_overflow(
    digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    for narrow, most in ((True, 64), (False, 127)):
        monkeypatch.setattr(onnx_int8, "_can_saturate", lambda narrow=narrow: narrow)
        made, _, graph = make(digits, tmp_path, target=target)
        weights = [onnx.numpy_helper.to_array(t) for t in graph.initializer if t.data_type == onnx.TensorProto.INT8]
        assert max(int(np.abs(w).max()) for w in weights) == most
        assert ("7 bits" in made.made_by.scheme) is narrow


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor is all there is")
def test_calibration_respects_cpu_affinity(digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's default is a thread on every core of the machine, regardless of the affinity."""

    def threads() -> dict[int, set[int]]:
        return {int(t.name): os.sched_getaffinity(int(t.name)) for t in Path("/proc/self/task").iterdir()}

    def reader(feeds: Any) -> Any:
        seen.append({tid: cpus for tid, cpus in threads().items() if tid not in before})
        return calibration.make_reader(feeds)

    seen: list[dict[int, set[int]]] = []
    monkeypatch.setattr(onnx_int8, "make_reader", reader)
    mine, before = os.sched_getaffinity(0), threads()
    try:
        os.sched_setaffinity(0, {min(mine)})
        make(digits, tmp_path)
    finally:
        os.sched_setaffinity(0, mine)
    assert seen and all(cpus == {min(mine)} for new in seen for cpus in new.values())


def test_fp16_halves_the_file_and_keeps_float32_feeds(digits: Any, tmp_path: Path) -> None:
    made, _, graph = make(digits, tmp_path, "fp16")
    assert made.bytes < 0.6 * digits.artifact.bytes
    assert graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert {t.data_type for t in graph.initializer if len(t.dims) == 4} == {onnx.TensorProto.FLOAT16}
    assert made.made_by.check.max_difference < 0.02 * made.made_by.check.max_output


def test_fp16_keeps_softmax_in_fp32_and_large_weights_in_fp16(digits: Any, onnx_file: Any, tmp_path: Path) -> None:
    path = onnx_file(f"{ENDS} {{ scaled = Mul(input, big) output = Softmax(scaled) }}", big=np.float32([30000.0]))
    graph = onnx.load(of_file(path, recipe(digits, "fp16"), digits, tmp_path).path).graph
    assert graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT, (
        "what was asked to stay FP32 is FP32 to the end"
    )
    (weight,) = (onnx.numpy_helper.to_array(t) for t in graph.initializer)
    assert weight.dtype == np.float16
    assert weight == 30000
    producers = {name: node.op_type for node in graph.node for name in node.output}
    assert producers[next(node for node in graph.node if node.op_type == "Softmax").input[0]] == "Cast"


@pytest.mark.parametrize(
    ("value", "said"), [(1e-9, []), (70000.0, ["weights up to 7e+04 exceed FP16's range and were cut to 65504"])]
)
def test_only_weights_too_large_for_fp16_are_reported(
    digits: Any, onnx_file: Any, tmp_path: Path, value: float, said: list[str]
) -> None:
    path = onnx_file(f"{ENDS} {{ output = Mul(input, weight) }}", weight=np.float32([value]))
    _, warnings = half_precision.convert_mixed(onnx.load(path), set(), [])
    assert warnings == said


def test_nodes_whose_values_fp16_cannot_hold_stay_in_fp32(digits: Any, onnx_file: Any, tmp_path: Path) -> None:
    path = onnx_file(ENDS + """{
        [up] large = Mul(input, big)
        [down] one = Mul(large, small)
        [down_too] two = Mul(large, small)
        [sum] three = Add(one, two)
        [last] output = Mul(three, small)
    }""", big=np.float32([60000.0]), small=np.float32([1e-4]))  # fmt: skip
    asked = recipe(digits, "fp16")
    bright = replace(asked.model, preprocess=Preprocess((0.5,), (0.1,)))  # pixel values from -5 to 5
    made = of_file(path, replace(asked, model=bright), digits, tmp_path)
    assert made.made_by.warnings[0].endswith("exceed FP16's range: up, down, down_too")
    graph = onnx.shape_inference.infer_shapes(onnx.load(made.path)).graph
    large = next(node for node in graph.node if node.name == "up").output[0]
    assert [node.op_type for node in graph.node if large in node.input] == ["Mul", "Mul"]
    kinds = {v.name: v.type.tensor_type.elem_type for v in graph.value_info}
    assert kinds[large] == onnx.TensorProto.FLOAT
    assert kinds[next(node for node in graph.node if node.name == "sum").output[0]] == onnx.TensorProto.FLOAT16


def test_weights_that_fp16_cannot_hold_stay_in_fp32(digits: Any, onnx_file: Any, tmp_path: Path) -> None:
    """A batch norm of PP-OCRv4 has weights beyond FP16's range, followed by values within it."""
    path = onnx_file(ENDS + """{
        [tiny] small = Mul(input, little)
        [scale] one = Mul(small, big)
        [last] output = Mul(one, half)
    }""", little=np.float32([1e-5]), big=np.float32([1e5]), half=np.float32([0.5]))  # fmt: skip
    made = of_file(path, recipe(digits, "fp16"), digits, tmp_path)
    assert made.made_by.warnings == ("kept in FP32, as their values exceed FP16's range: scale",)
    assert made.made_by.check.max_difference < 0.02 * made.made_by.check.max_output


def test_fp16_subgraphs_read_values_computed_before_them(onnx_file: Any) -> None:
    """Casts are added behind the softmax, and the converter's order of nodes misses its reader."""
    path = onnx_file(f"""{ENDS} {{
        share = Softmax(input)
        output = If(flag) <then_branch = yes () => (float[batch, 1, 8, 8] a) {{ a = Abs(share) }},
                           else_branch = no () => (float[batch, 1, 8, 8] b) {{ b = Neg(share) }}>
    }}""", flag=np.bool_(True))  # fmt: skip
    converted, _ = half_precision.convert_mixed(onnx.load(path), set(), [])
    onnx.checker.check_model(converted, full_check=True)


def test_an_output_declared_twice_is_converted(onnx_file: Any) -> None:
    """A detector from a package lists its output among the inner values, too."""
    model = onnx.load(onnx_file(f"{ENDS} {{ output = Softmax(input) }}"))
    model.graph.value_info.extend([*model.graph.input, *model.graph.output])
    converted, _ = half_precision.convert_mixed(model, set(), [])
    onnx.checker.check_model(converted, full_check=True)
    assert converted.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


def test_declared_weights_of_fp32_nodes_are_not_rounded(onnx_file: Any) -> None:
    """PyTorch's dynamo exporter lists the weights among the inner values."""
    path = onnx_file(f"{ENDS} {{ [mask] output = Where(flag, input, least) }}",
                     flag=np.bool_(False), least=np.float32([-3e38]))  # fmt: skip
    model = onnx.load(path)
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("least", onnx.TensorProto.FLOAT, [1]))
    converted, warnings = half_precision.convert_mixed(model, set(), ["mask"])
    (least,) = (onnx.numpy_helper.to_array(t) for t in converted.graph.initializer if t.name == "least")
    assert (least.dtype, least.tolist(), warnings) == (np.float32, np.float32([-3e38]).tolist(), [])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_existing_casts_are_adapted_to_the_surrounding_type(
    digits: Any, onnx_file: Any, tmp_path: Path, precision: str
) -> None:
    path = onnx_file(f"{ENDS} {{ float = Cast<to = 1>(size) output = Mul(input, float) }}", size=np.int64([4]))
    made = of_file(path, recipe(digits, precision), digits, tmp_path)
    assert made.made_by.check.max_difference < 0.01 * made.made_by.check.max_output


def test_bf16_rounds_the_original_weights_and_computes_in_bfloat16(digits: Any, tmp_path: Path) -> None:
    made, _, graph = make(digits, tmp_path, "bf16")
    assert made.bytes < 0.6 * digits.artifact.bytes
    assert onnx.load(made.path).opset_import[0].version == 22
    assert graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    weights = [t for t in graph.initializer if len(t.dims) == 4]
    assert {t.data_type for t in weights} == {onnx.TensorProto.BFLOAT16}
    exact = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(digits.artifact.path).graph.initializer}
    for tensor in weights:
        want = exact[tensor.name]
        got = onnx.numpy_helper.to_array(tensor).astype(np.float32)
        assert (np.abs(got - want) <= np.abs(want) * 2**-8).all()
    check = made.made_by.check
    assert 0 < check.max_difference < 0.02 * check.max_output
    assert "rounded" in check.ran


def test_bf16_avoids_fp16_overflow_and_keeps_softmax_in_fp32(digits: Any, onnx_file: Any, tmp_path: Path) -> None:
    text = f"{ENDS} {{ less = Mul(input, tiny) more = Mul(less, big) output = Softmax(more) }}"
    path = onnx_file(text, big=np.float32([3e38]), tiny=np.float32([1e-38]))
    made = of_file(path, recipe(digits, "bf16"), digits, tmp_path)
    model = onnx.shape_inference.infer_shapes(onnx.load(made.path))
    kinds = {v.name: v.type.tensor_type.elem_type for v in model.graph.value_info}
    assert kinds[next(node for node in model.graph.node if "less" in node.output[0]).output[0]] == 16
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    assert kinds[softmax.input[0]] == onnx.TensorProto.FLOAT
    assert made.made_by.check.max_difference < 0.02


def test_the_emulation_rounds_every_bfloat16_result(tmp_path: Path) -> None:
    text = "(float[1] x) => (float[1] y) { x16 = Cast<to = 16>(x) y16 = Mul(x16, third) y = Cast<to = 1>(y16) }"
    model = onnx_text.model(text, opset=22, ir=10, third=np.asarray([1 / 3], ml_dtypes.bfloat16))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, tmp_path / "third.onnx")
    (found,) = onnx_check.compute_outputs(str(tmp_path / "third.onnx"), {"x": np.float32([1.01])}, "bf16")[0]
    x16, third16 = (np.asarray(v, ml_dtypes.bfloat16) for v in (1.01, 1 / 3))
    assert found == float((x16.astype(np.float32) * third16.astype(np.float32)).astype(ml_dtypes.bfloat16))


def test_a_result_that_overflows_is_refused(
    digits: Any, onnx_file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    infinite = onnx_file(f"{ENDS} {{ output = Div(input, zero) }}", zero=np.float32([0.0]))
    monkeypatch.setattr(onnx_precision, "to_fp16", lambda *_: (onnx.load(infinite), MakerFacts()))
    folder = tmp_path / "result"
    folder.mkdir()
    refuses("digits overflows in fp16", make, digits, folder, "fp16")


@pytest.mark.parametrize("precision", ["int8", "fp16", "bf16"])
def test_a_quantised_file_is_not_quantised_twice(digits: Any, tmp_path: Path, precision: str) -> None:
    once, *_ = make(digits, tmp_path)
    refuses("quantised already", OnnxPrecision().make, recipe(digits, precision), once, tmp_path)


def test_impossible_recipes_are_refused_in_one_line(digits: Any, tmp_path: Path) -> None:
    good = recipe(digits)
    bad = {
        "give --data": replace(good, data=None),
        "unknown int8 target 'tpu'": replace(good, options={"target": "tpu"}),
        "has no images except test images": replace(good, data=replace(digits.data, split="tuning")),
        "can't be made fp8": replace(good, precision="fp8"),
    }
    for said, wrong in bad.items():
        refuses(said, OnnxPrecision().make, wrong, digits.artifact, tmp_path)


def test_calibration_images_of_another_size_are_refused(digits: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.zeros((4, 1, 9, 9), np.uint8))
    for name in ("labels", "calibration"):
        np.save(tmp_path / f"{name}.npy", np.arange(4))
    wrong = replace(recipe(digits), data=DataSpec("nines", str(tmp_path), split="calibration"))
    refuses("nines are 1x9x9, but the model reads 1x8x8", OnnxPrecision().make, wrong, digits.artifact, tmp_path)


def test_batches_share_one_recipe_chain_and_int8_depends_on_the_target(digits: Any) -> None:
    def chain(precision: str, target: str, batch: int = 1, **options: Any) -> Recipe:
        trial: Trial = digits.trial(target, precision, batch, **options)
        return convert_recipe(trial, target)

    assert chain("fp32", "openvino").maker == "onnx_export"
    assert chain("fp16", "openvino") == chain("fp16", "onnxruntime", batch=8)
    int8 = chain("int8", "openvino", batch=1, method="percentile", streams=2)
    assert int8 == chain("int8", "openvino", batch=8, method="percentile", streams=1)
    assert int8 != chain("int8", "onnxruntime", method="percentile")
    assert int8.options == {"target": "openvino", "samples": 128, "method": "percentile"}
    assert int8.data is not None and int8.data.split == "calibration"
    assert int8.parent is not None and int8.parent.maker == "onnx_export" and int8.parent.dims.batch == 0


def test_int8_without_data_has_no_recipe(digits: Any) -> None:
    refuses("give --data", convert_recipe, replace(digits.trial("openvino", "int8"), data=DataSpec()), "openvino")


def test_tensorrt_gets_an_opset_supported_by_its_oldest_parser(digits: Any) -> None:
    def opset(target: str, **options: Any) -> Any:
        made = convert_recipe(digits.trial(target, "fp16", **options), target)
        assert made.parent is not None
        return made.parent.options.get("opset")

    assert (opset("tensorrt"), opset("tensorrt", opset=20), opset("openvino")) == (17, 20, None)
