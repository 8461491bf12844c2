"""The layer where an engine departs from a reference: errors planted in files and engines, and errors of fusion."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import onnx_text
from dyno.worker.backend import Backend, Session
from dyno.worker.backends.onnx_runtime import ONNX_RUNTIME, OnnxRuntime
from dyno.worker.backends.open_vino import OPENVINO
from dyno.worker.facts.job import LayerErrors
from dyno.worker.jobs import layers
from dyno.worker.numerics import compare as numerics_compare
from dyno.worker.spec import Artifact, DataSpec, Dims, Job, ModelSpec, Runtime, Trial
from refusals import refuses

onnx = pytest.importorskip("onnx")
FP32 = (1e-3, 1e-3, 1e-8)  # limits: error, then relative and absolute closeness of values


def network(scale: float = 1.0) -> Any:
    """Build two convolutions, a difference of branches, a pool and a product, all named; `scale` multiplies a middle
    tensor and is divided out again."""
    rng = np.random.default_rng(0)
    arrays = {
        "w1": rng.standard_normal((8, 3, 3, 3)) / 5, "w2": rng.standard_normal((8, 8, 3, 3)) / 8,
        "w3": rng.standard_normal((8, 8, 3, 3)) / 8, "w4": rng.standard_normal((8, 10)),
        "up": np.array(scale), "down": np.array(1 / scale),
    }  # fmt: skip
    text = """(float[1, 3, 8, 8] x) => (float[1, 10] y) {
        [conv1] c1 = Conv<pads = [1, 1, 1, 1]>(x, w1) [relu1] r1 = Relu(c1)
        [conv2] c2 = Conv<pads = [1, 1, 1, 1]>(r1, w2) [relu2] r2 = Relu(c2)
        [conv3] c3 = Conv<pads = [1, 1, 1, 1]>(r1, w3) [difference] d = Sub(r2, c3)
        [larger] u = Mul(d, up) [relu3] v = Relu(u) [smaller] s = Mul(v, down)
        [pool] p = GlobalAveragePool(s) [flat] f = Flatten(p) [product] y = MatMul(f, w4)
    }"""
    return onnx_text.model(text, ir=9, **{name: np.asarray(array, np.float32) for name, array in arrays.items()})


def scaled(model: Any, weight: str, factor: float) -> Any:
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    tensor = next(t for t in copy.graph.initializer if t.name == weight)
    array = onnx.numpy_helper.to_array(tensor) * np.float32(factor)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float32), weight))
    return copy


class Changing(OnnxRuntime):
    """ONNX Runtime that changes every given graph."""

    def change(self, graph: Any) -> None:
        raise NotImplementedError

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        assert artifact is not None
        model = onnx.load(artifact.path)
        self.change(model.graph)
        path = Path(artifact.path).with_name("changed.onnx")
        onnx.save(model, path)
        return super().load(trial, replace(artifact, path=str(path)))


class WrongConvolution(Changing):
    """A backend with a wrong kernel for the second convolution."""

    def change(self, graph: Any) -> None:
        for node in [node for node in graph.node if node.name.startswith("conv2")]:
            wrong = onnx.helper.make_node("Neg", [f"{node.output[0]}/minus"], [node.output[0]])
            node.output[0] += "/minus"
            graph.node.insert([*graph.node].index(node) + 1, wrong)


class HalfTensor(Changing):
    """A backend that keeps one tensor in FP16 at any size."""

    def change(self, graph: Any) -> None:
        make, kinds = onnx.helper.make_node, onnx.TensorProto
        for node in [node for node in graph.node if node.name.startswith("larger")]:
            name, place = node.output[0], [*graph.node].index(node) + 1
            node.output[0] = f"{name}/single"
            graph.node.insert(place, make("Cast", [f"{name}/half"], [name], to=kinds.FLOAT))
            graph.node.insert(place, make("Cast", [f"{name}/single"], [f"{name}/half"], to=kinds.FLOAT16))


class WrongFusion(Changing):
    """A backend that loses the second convolution's ReLU in fusion, unless the tensor between them is an output."""

    def change(self, graph: Any) -> None:
        outputs = {value.name for value in graph.output}
        for node in graph.node:
            convolved = any(node.input and node.input[0] == n.output[0] for n in graph.node if n.name == "conv2")
            if node.op_type == "Relu" and convolved and node.input[0] not in outputs:
                node.op_type = "Identity"


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that compares two graphs: the first in ONNX Runtime node by node, the second in a backend."""

    def run(first: Any, second: Any, backend: Backend = ONNX_RUNTIME, **settings: Any) -> LayerErrors:
        paths = []
        for number, model in enumerate((first, second)):
            paths.append(tmp_path / f"{number}.onnx")
            onnx.save(model, paths[-1])
        monkeypatch.setattr(layers, "find", {"onnxruntime": ONNX_RUNTIME, "own": backend}.__getitem__)
        images, one = DataSpec(count=3), Runtime(threads=1)
        trial = Trial(ModelSpec("net", ""), "own", "fp32", Dims(1, 8, 8), settings, data=images, runtime=one)
        artifacts = [Artifact("onnx", str(path), "", 0, "fp32", (), (), 0.0) for path in paths]
        layers.store_reference(
            Job("reference", trial=trial, artifact=artifacts[0], options={"runs": 3}), tmp_path, stages.append
        )
        more = {
            "graph": str(paths[1]),
            "reference_graph": str(paths[0]),
            "reference": str(tmp_path / "tensors"),
            "limits": FP32,
        }
        job = Job("layer_errors", trial=trial, artifact=artifacts[1], options={**more, "always": False})
        return layers.compare_engine(job, tmp_path, stages.append)

    stages = run.stages = []
    return run


def own(found: LayerErrors) -> dict[str, float]:
    return {layer.tensor: layer.own.error for layer in found.layers}


def first(found: LayerErrors) -> str:
    return next(layer.tensor for layer in found.layers if layer.total.error > FP32[0])


@pytest.mark.parametrize("backend", [ONNX_RUNTIME, OPENVINO], ids=["onnxruntime", "openvino"])
def test_equal_graphs_have_no_suspects(compare: Any, backend: Backend) -> None:
    found = compare(network(), network(), backend)
    assert found.unmodified is not None and found.unmodified.error < 1e-5 and found.unmodified.close == 1
    assert [layer.tensor for layer in found.layers] == ["c1", "r1", "c2", "r2", "c3", "d", "u", "v", "s", "p", "f", "y"]
    assert max(own(found).values()) < 1e-5 and not found.suspects and found.cut is None
    assert {layer.tensor: layer.reads for layer in found.layers}["d"] == ("c3", "r2")


@pytest.mark.parametrize("backend", [ONNX_RUNTIME, OPENVINO], ids=["onnxruntime", "openvino"])
def test_a_changed_weight_is_found_and_confirmed(compare: Any, backend: Backend) -> None:
    found = compare(network(), scaled(network(), "w3", 1.5), backend)
    assert found.suspects == ("c3",) == (first(found),)
    errors = own(found)
    assert errors.pop("c3") == pytest.approx(0.5, rel=1e-3) and max(errors.values()) < 1e-5  # the others inherit it
    assert found.unmodified and found.cut and found.substituted
    assert found.unmodified.error > 0.05 and found.cut.error == pytest.approx(found.unmodified.error, rel=1e-3)
    assert found.substituted.error < 1e-5
    effects = {layer.tensor: layer.effect for layer in found.layers}
    assert effects["c3"] == pytest.approx(found.unmodified.error, rel=1e-3)


def test_a_swapped_branch_is_found(compare: Any) -> None:
    swapped = network()
    next(node for node in swapped.graph.node if node.name == "difference").input[:] = ["c3", "r2"]
    found = compare(network(), swapped)
    assert found.suspects == ("d",) == (first(found),) and own(found)["d"] == pytest.approx(2, rel=1e-3)
    assert found.substituted is not None and found.substituted.error < 1e-5


def test_a_wrong_kernel_of_an_engine_is_found(compare: Any) -> None:
    found = compare(network(), network(), WrongConvolution())
    assert found.suspects == ("c2",) == (first(found),) and own(found)["c2"] == pytest.approx(2, rel=1e-3)
    assert found.substituted and found.substituted.error < 1e-5


def test_fusion_errors_hidden_by_marking_are_found_by_cutting(compare: Any) -> None:
    found = compare(network(), network(), WrongFusion())
    assert found.unmodified and found.unmodified.error > 0.05 and found.marked and found.marked.error < 1e-5
    assert max(layer.total.error for layer in found.layers) < 1e-5  # marking every tensor hides the error
    assert found.boundary == ("c2", "r2") and found.suspects == ("c2", "r2")
    assert found.cut and found.cut.error == pytest.approx(found.unmodified.error, rel=1e-3)
    assert found.substituted and found.substituted.error < 1e-5


def test_an_overflow_is_found_where_it_begins(compare: Any) -> None:
    found = compare(network(3e4), network(3e4), HalfTensor(), optimization="disable")
    broken = [layer for layer in found.layers if layer.total.nonfinite]
    assert broken[0].tensor == first(found) == "u" and broken[0].own.nonfinite
    assert found.unmodified and found.unmodified.nonfinite and not np.isfinite(found.unmodified.error)
    assert (
        found.suspects == ("u",)
        and found.substituted
        and (found.substituted.nonfinite, found.substituted.error) < (1, 1e-3)
    )


def test_an_overflow_visible_only_when_marked_is_not_a_suspect(compare: Any) -> None:
    """ONNX Runtime lacks FP16 kernels on a CPU: it continues in FP32 until a tensor is marked."""
    from onnxconverter_common import float16

    found = compare(network(3e4), float16.convert_float_to_float16(network(3e4), 1e-8, 65504.0, keep_io_types=True))
    broken = [layer for layer in found.layers if layer.total.nonfinite]
    assert broken[0].tensor == "u" and broken[0].own.nonfinite
    assert (
        found.unmodified and found.unmodified.nonfinite == 0 and found.unmodified.error < FP32[0] and not found.suspects
    )


def test_comparing_in_parts_gives_the_same_result(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = scaled(network(), "w2", -1.0)
    at_once = compare(network(), wrong)
    monkeypatch.setattr(numerics_compare, "MAX_MARKED_B", 1)
    in_parts = compare(network(), wrong)
    assert (at_once.parts, in_parts.parts) == (1, 11) and at_once.suspects == in_parts.suspects == ("c2",)
    assert own(at_once) == pytest.approx(own(in_parts))
    assert compare.stages[:2] == ["run the reference", "run the unmodified engine"]


def test_fewer_runs_are_compared_when_memory_is_short(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics_compare, "MAX_KEPT_B", 1)
    found = compare(network(), scaled(network(), "w2", -1.0))
    assert (found.runs, found.suspects) == (1, ("c2",))


def test_an_error_in_an_if_branch_is_found(compare: Any) -> None:
    """Subgraphs of an If read tensors from the outer graph, and are cut out with them."""

    def with_branch(value: float) -> Any:
        model = network()
        make = onnx.helper.make_node
        then, other = (onnx.helper.make_graph(
            [make("Mul", ["f", f"k{n}"], [f"out{n}"], f"inner{n}")], f"b{n}", [],
            [onnx.helper.make_tensor_value_info(f"out{n}", onnx.TensorProto.FLOAT, [1, 8])],
            [onnx.numpy_helper.from_array(np.asarray(value if n else 1.0, np.float32), f"k{n}")],
        ) for n in (1, 0))  # fmt: skip
        nodes = [*model.graph.node]
        nodes[-1].input[0] = "g"
        del model.graph.node[:]
        model.graph.node.extend([
            *nodes[:-1], make("ReduceSum", ["f"], ["sum"], "sum", keepdims=0),
            make("Greater", ["sum", "low"], ["more"], "more"),
            make("If", ["more"], ["g"], "branch", then_branch=then, else_branch=other), nodes[-1],
        ])  # fmt: skip
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(-1e9, np.float32), "low"))
        return model

    found = compare(with_branch(1.0), with_branch(2.0))
    assert found.suspects == ("g",) and found.substituted and found.substituted.error < 1e-5
    assert {layer.tensor: set(layer.reads) for layer in found.layers}["g"] == {"f", "sum"}


def test_graphs_without_common_layers_are_refused(compare: Any) -> None:
    other = network()
    inner = {node.output[0] for node in other.graph.node} - {"y"}
    for node in other.graph.node:
        for names in (node.input, node.output):
            names[:] = [f"{name}_of_another" if name in inner else name for name in names]
    refuses("it shares no layer's tensor with the reference", compare, network(), other)


def test_another_network_with_the_same_tensor_names_is_refused(compare: Any) -> None:
    other = network()
    other.graph.node[0].attribute.append(onnx.helper.make_attribute("strides", [2, 2]))
    refuses(r"most tensors of .*1\.onnx have other shapes .* these are different networks", compare, network(), other)


def test_unmatched_tensors_are_counted(compare: Any) -> None:
    """Tensors without a counterpart belong to the next tensor that has one."""
    other = scaled(network(), "w2", 1.5)
    kept = {"x", "c1", "y"}
    for node in other.graph.node:
        for names in (node.input, node.output):
            names[:] = [n if n in kept or n[0] == "w" or n in ("up", "down") else f"{n}_renamed" for n in names]
    found = compare(network(), other)
    assert [layer.tensor for layer in found.layers] == ["c1", "y"] and found.suspects == ("y",)
    assert (found.unmatched, found.reference_layers) == (10, 12)


def test_non_finite_inputs_are_refused(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    feeds = [{"x": np.full((1, 3, 8, 8), value, np.float32)} for value in (1, np.nan)]
    monkeypatch.setattr(layers.input_data, "read_trial_batches", lambda *_: feeds)
    refuses("input 'x' has values that are NaN or infinite", compare, network(), network())


def test_errors_are_found_in_graphs_with_nameless_nodes(compare: Any) -> None:
    wrong = scaled(network(), "w3", 1.5)
    for node in wrong.graph.node:
        node.ClearField("name")
    found = compare(network(), wrong)
    assert found.suspects == ("c3",) and found.substituted and found.substituted.error < 1e-5


def test_negligible_errors_are_not_suspects(compare: Any) -> None:
    wrong: Sequence[tuple[str, float]] = (("w1", 1.0001), ("w2", 1.5), ("w3", 1.5))
    model = network()
    for weight, factor in wrong:
        model = scaled(model, weight, factor)
    assert set(compare(network(), model).suspects) <= {"c2", "c3"}


@pytest.mark.parametrize(
    ("errors", "effects", "found"),
    [
        ([1.0] * 12, [None] * 12, [*range(8)]),
        ([np.inf, *[1.0] * 3, *[np.inf] * 8], [None] * 12, [0, *range(4, 11)]),
        ([1.0, 4.0, 2.0, 2.0], [None] * 4, [1, 2]),  # 20 of 25
        ([1.0, 4.0, 2.0, 2.1], [None] * 4, [1, 3]),
        ([2.0, 1.0, 4.0, 2.1], [None] * 4, [2, 3]),
        ([2.0, 2.0, 4.0, 2.0], [None] * 4, [0, 1, 2]),
        ([1.0, 1.0, 4.0], [3.0, None, 0.0], [0]),
    ],
)
def test_suspects_are_the_fewest_layers_with_four_fifths_of_the_squared_error(
    errors: list[float], effects: list[float | None], found: list[int]
) -> None:
    pairs = zip(errors, effects, strict=True)
    layers = [SimpleNamespace(tensor=i, own=SimpleNamespace(error=e), effect=f) for i, (e, f) in enumerate(pairs)]
    assert numerics_compare.list_suspects(layers) == found  # type: ignore[arg-type]


def test_rescaled_tensors_are_left_out(compare: Any) -> None:
    """As in a graph with layers rescaled against each other before quantisation."""
    found = compare(network(), scaled(scaled(network(), "up", 4.0), "down", 0.25))
    assert found.mismatched == 2 and {"u", "v"}.isdisjoint(layer.tensor for layer in found.layers)
    assert max(own(found).values()) < 1e-5 and found.unmodified and found.unmodified.error < 1e-5


def test_a_relu_absorbed_by_quantisation_is_not_an_error(compare: Any) -> None:
    """A quantiser absorbs it into the clamping at 0, and gives the convolution its output's name."""
    quantised = network()
    make, nodes = onnx.helper.make_node, [*quantised.graph.node]
    names = {node.name: node for node in nodes}
    names["conv1"].output[0] = "r1"
    scale = [onnx.numpy_helper.from_array(np.asarray(0.02, np.float32), "scale"),
             onnx.numpy_helper.from_array(np.asarray(0, np.uint8), "zero")]  # fmt: skip
    quantised.graph.initializer.extend(scale)
    for reader in (names["conv2"], names["conv3"]):
        reader.input[0] = "restored"
    del quantised.graph.node[:]
    quantised.graph.node.extend([
        names["conv1"], make("QuantizeLinear", ["r1", "scale", "zero"], ["q"], "quantise"),
        make("DequantizeLinear", ["q", "scale", "zero"], ["restored"], "restore"), *nodes[2:],
    ])  # fmt: skip
    found = compare(network(), quantised)
    first_own, *others = own(found).values()
    assert found.layers[0].tensor == "r1" and 1e-4 < first_own < 0.05 and max(others) < 1e-5
    assert found.mismatched == 0
