"""Routes to an ONNX file: the usual route first, others if it fails, and any single route by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import onnx_text
from dyno.jobs.progress import Progress
from dyno.runner.execute import Files
from dyno.study.plan import add_routes, list_other_routes, options_of
from dyno.study.study import Choice
from dyno.worker import registry
from dyno.worker.facts.files import MakerFacts
from dyno.worker.makers.precision import OnnxStatic, static_of
from dyno.worker.nets.local_code import sha256_with_imports
from dyno.worker.spec import Artifact, Dims, ModelSpec, Recipe, Runtime, Trial
from refusals import refuses

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")

ATTENTION = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.patch = nn.Parameter(torch.randn(1, 1, 16)), nn.Conv2d(3, 16, 8, 8)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 10)
    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        q, k, v = self.qkv(x).reshape(x.shape[0], -1, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        x = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head(x.transpose(1, 2).flatten(2)[:, 0])

def net(): return Net()
"""


def _trial(source: str, name: str = "onnxruntime", batch: int = 2, **options: Any) -> Trial:
    return Trial(ModelSpec("net", source), name, "fp32", Dims(batch, 32, 32), options, runtime=Runtime(threads=1))


def _file(recipe: Recipe | None) -> Artifact:
    assert recipe is not None
    made = Files(Progress(quiet=True)).make_file(recipe)
    assert isinstance(made, Artifact), made
    return made


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("net") / "attention.py"
    path.write_text(ATTENTION)
    return f"{path}:net"


def test_a_static_engine_tries_a_folded_graph_before_other_routes(net: str) -> None:
    recipe = registry.find("tensorrt").recipe(replace(_trial(net, "tensorrt"), runtime=Runtime(device="cuda:0")))
    found = []
    while recipe is not None:
        file = recipe.parent
        assert file is not None
        exported = file.parent if file.maker == OnnxStatic.name else file
        assert exported is not None
        found.append((file.maker, exported.options.get("exporter"), exported.dims.batch))
        recipe = recipe.fallback
    assert found == [("onnx_static", None, 0), ("onnx_static", "torchscript", 2), ("onnx_export", None, 2)]


def test_an_explicit_route_has_no_fallback(net: str) -> None:
    recipe = registry.find("onnxruntime").recipe(_trial(net, exporter="torchscript", static=True))
    assert recipe is not None and recipe.fallback is None and recipe.dims.batch == 2


def test_folding_removes_shape_operators_from_attention(net: str) -> None:
    made = _file(registry.find("onnxruntime").recipe(_trial(net, fold=True, exporter="dynamo")))
    kinds = {node.op_type for node in onnx.load(made.path).graph.node}
    assert not kinds & {"Shape", "Expand", "ConstantOfShape"}
    assert made.made_by.onnx_route == "dynamo opset 18, folded" and made.inputs[0].shape == (2, 3, 32, 32)


@pytest.mark.slow
def test_attention_keys_are_swapped_by_one_transpose(net: str) -> None:
    graph = onnx.load(_file(registry.find("onnxruntime").recipe(_trial(net, exporter="dynamo"))).path).graph
    makers = {name: node for node in graph.node for name in node.output}
    products = [n for n in graph.node if n.op_type == "MatMul" and "Softmax" in {r.op_type for r in graph.node}]
    scores = [n for n in products if any(r.op_type == "Softmax" and r.input[0] == n.output[0] for r in graph.node)]
    (score,) = scores
    back = makers[score.input[1]]
    back = makers[back.input[0]] if back.op_type == "Mul" else back
    assert back.op_type == "Transpose" and [*back.attribute[0].ints] == [0, 1, 3, 2]


def test_a_failed_route_falls_back_to_the_next_and_is_reported(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good = registry.find("onnxruntime").recipe(_trial(net, exporter="torchscript"))
    assert good is not None
    bad = replace(good, options={"exporter": "none such"}, fallback=good)
    made = Files(Progress(quiet=True)).make_file(bad)
    assert isinstance(made, Artifact)
    assert "made by another route (torchscript opset 18), because the usual one ended as failed" in str(
        made.made_by.warnings
    )
    again = Files(Progress(quiet=True)).make_file(bad)  # cached: the failing route isn't tried again
    assert isinstance(again, Artifact) and again.sha256 == made.sha256


@pytest.mark.parametrize(
    ("batch_size", "said"), [("x.shape[0]", "up to batch 4"), ("len(x)", "right with few images and not with 17")]
)
def test_a_batch_dependent_module_gets_a_file_per_batch(tmp_path: Path, batch_size: str, said: str) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\n\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
        f"        return x.mean((2, 3)) * (2 if {batch_size} > 4 else 1)\n\ndef net():\n    return Net()\n"
    )
    model = ModelSpec("net", f"{tmp_path / 'net.py'}:net", sha256_with_imports(tmp_path / "net.py"))
    trial, files = replace(_trial(model.source), model=model), Files(Progress(quiet=True))
    for batch in (1, 8):
        made = files.make_file(
            registry.find("onnxruntime").recipe(replace(trial, dims=replace(trial.dims, batch=batch)))
        )
        assert isinstance(made, Artifact) and made.inputs[0].shape[0] == batch
        assert said in str(made.made_by.warnings)
        x = np.ones((batch, 3, 32, 32), np.float32)
        (out,) = onnxruntime.InferenceSession(made.path).run(None, {"input": x})
        assert (out == (2 if batch == 8 else 1)).all()


def test_fixed_shapes_incompatible_with_a_file_are_refused(tmp_path: Path) -> None:
    onnx_text.write(tmp_path / "m.onnx", "(float[n, 3, 8, 8] x) => (float[n, 3, 8, 8] y) { y = Relu(x) }", ir=10)
    from dyno.worker.onnx_graph.file import prepare_given

    parent = prepare_given(str(tmp_path / "m.onnx"), None, tmp_path)
    trial = replace(_trial(f"file:{tmp_path / 'm.onnx'}"), dims=Dims(4, 16, 16))
    recipe = static_of(Recipe("onnx_export", "onnx", "fp32", trial.model, trial.dims), trial)
    refuses("fixed height 8", OnnxStatic().make, recipe, parent, tmp_path)
    made = OnnxStatic().make(replace(recipe, dims=Dims(4, 8, 8)), parent, tmp_path)
    assert made.inputs[0].shape == (4, 3, 8, 8) == made.outputs[0].shape
    assert np.prod(made.outputs[0].shape) == 768


@pytest.mark.parametrize(
    ("operators", "exporter", "folds", "routes"),
    [
        ("Conv Relu Add GlobalAveragePool Gemm", "dynamo", False, ()),
        ("Conv Relu Add GlobalAveragePool Gemm", "dynamo", True, ()),
        ("", "dynamo", False, ()),
        ("Conv MatMul Softmax", "dynamo", False, ("torchscript", "dynamo+static+fold")),
        ("Conv MatMul Softmax", "dynamo", True, ("torchscript+static+fold",)),
        ("Conv MatMul Softmax", "torchscript", False, ("torchscript+static+fold",)),
        ("Conv MatMul Softmax", "torchscript", True, ()),
    ],
)
def test_other_routes_are_listed_where_their_graph_may_differ(
    operators: str, exporter: str, folds: bool, routes: tuple[str, ...]
) -> None:
    made_by = MakerFacts(operators=dict.fromkeys(operators.split(), 1), exporter=exporter)
    assert list_other_routes(made_by, folds) == routes
    assert all(options_of(route) for route in routes)


def test_a_torch_export_program_has_no_traced_routes() -> None:
    """PyTorch refuses its free batch ("JIT Tracing of SymInts"): each such route cost a failed row and ten seconds."""
    made_by = MakerFacts(operators={"MatMul": 1}, exporter="dynamo")
    assert list_other_routes(made_by, is_folded=False, program=True) == ("dynamo+static+fold",)
    assert list_other_routes(made_by, is_folded=True, program=True) == ()


def test_route_names_become_options() -> None:
    assert options_of("torchscript+opset17+static+fold") == {
        "exporter": "torchscript", "opset": 17, "static": True, "fold": True,
    }  # fmt: skip
    choices = [Choice("pytorch"), Choice("onnxruntime", {"spinning": False})]
    found = add_routes(choices, ("dynamo", "torchscript"))
    assert [c.options.get("exporter") for c in found] == [None, "dynamo", "torchscript"]
    assert found[1].options["spinning"] is False
    assert len(add_routes(choices, ("all",))) == 5 and len(add_routes(choices, ("all",), file=True)) == 2
    refuses("a route is made of dynamo, torchscript", options_of, "tracing")


def test_a_transformer_in_half_precision_runs_on_a_cpu(dyno: Any, net: str, tmp_path: Path) -> None:
    words = ("--precision", "fp16", "--size", 32, "--rounds", 1, "--seconds", 0.05, "--block", 0.01, "--warmup", 0.02,
             "--boundaries", "model")  # fmt: skip
    dyno("run", net, *words, "--backend", "onnxruntime", "--out", tmp_path / "run", code=0)
