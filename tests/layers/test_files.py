"""Files for other tools: valid by each tool's specification, with the tables' numbers."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

import dyno
from dyno.layers.profiling import ProfileResult

pytestmark = pytest.mark.usefixtures("preloaded", "unreported")

QUICK = ("--runs", 10, "--seconds", 0.03, "--warmup", 0.02)
FORMS = ("PyTorch", "ONNX Runtime", "OpenVINO")
# speedscope's schema of sampled profiles, file-format-spec.ts: https://github.com/jlfwong/speedscope
SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def profiled() -> ProfileResult:
    return dyno.profile(
        "torchvision:resnet18", "onnxruntime", "openvino", sizes=("64",), runs=10, top=0, seconds=0.03, warmup=0.02
    )


def saved(profiled: ProfileResult, path: Path) -> Any:
    assert profiled.save(path) == [path]
    return json.loads(path.read_text(encoding="utf-8"))


def layers_us(profiled: ProfileResult) -> list[float]:
    """Return the microseconds of each form's layers, from the tables."""
    return [1e3 * row["layers_ms"] for row in profiled.tables[1].rows]


def test_trace_calls_nest_and_add_up(profiled: ProfileResult, tmp_path: Path) -> None:
    events = saved(profiled, tmp_path / "r.trace.json")["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [name.rpartition(" ")[0] for name in names.values()] == [*FORMS]
    for (pid, name), times in zip(names.items(), profiled.times.values(), strict=True):
        open_calls: list[dict[str, Any]] = []
        own = [event for event in events if event["pid"] == pid and event["ph"] in "BE"]
        assert [event["ts"] for event in own] == sorted(event["ts"] for event in own)
        lasted, calls = [], set()
        for event in own:
            if event["ph"] == "B":
                open_calls.append(event)
                continue
            begun = open_calls.pop()
            assert begun["name"] == event["name"]
            if not open_calls:
                lasted.append(event["ts"] - begun["ts"])
            if "args" in event:
                calls.add((event["args"]["layer"], event["args"]["type"]))
        assert not open_calls
        assert lasted == pytest.approx(1e6 * times.layers.sum(axis=1), abs=0.001 * times.layers.shape[1])
        rows = [row for row in profiled.tables[0].rows if row["form"] == name]
        assert len(calls) == len({(row["layer"] or row["modules"], row["type"]) for row in rows})


def test_flame_graphs_have_medians_below_modules(profiled: ProfileResult, tmp_path: Path) -> None:
    found = saved(profiled, tmp_path / "r.speedscope.json")
    jsonschema.validate(found, SCHEMAS["speedscope"])
    frames = [frame["name"] for frame in found["shared"]["frames"]]
    for profile, total in zip(found["profiles"], layers_us(profiled), strict=True):
        assert len(profile["samples"]) == len(profile["weights"])
        assert sum(profile["weights"]) == pytest.approx(total) == pytest.approx(profile["endValue"])
        stacks = [[frames[k] for k in sample] for sample in profile["samples"]]
        assert all(stack[0] == "(model)" for stack in stacks)
        assert any(stack[1:4] == ["layer1", "layer1.0", "layer1.0.conv1"] for stack in stacks) or any(
            stack[1:3] == ["layer1", "layer1.0"] and stack[3].startswith("layer1.0.conv1, .bn1") for stack in stacks
        )


def test_model_explorer_graphs_match_their_node_data(profiled: ProfileResult, tmp_path: Path) -> None:
    collection = saved(profiled, tmp_path / "r.explorer.json")
    data = saved(profiled, tmp_path / "r.node-data.json")
    jsonschema.validate(data, SCHEMAS["node_data"])
    assert collection["label"] == "resnet18" and [graph["id"] for graph in collection["graphs"]] == [*data]
    for graph, total in zip(collection["graphs"], layers_us(profiled), strict=True):
        ids = [node["id"] for node in graph["nodes"]]
        edges = [edge["sourceNodeId"] for node in graph["nodes"] for edge in node["incomingEdges"]]
        assert len(set(ids)) == len(ids) and len(edges) >= 20 and set(edges) <= set(ids)
        assert any(node["namespace"] == "layer4/1" for node in graph["nodes"])
        results = data[graph["id"]]["results"]
        assert [*results] == ids
        assert sum(each["value"] for each in results.values()) == pytest.approx(total, abs=0.001 * len(ids))
        assert [stop["stop"] for stop in data[graph["id"]]["gradient"]] == [0, 1]


@pytest.mark.parametrize("beside", [False, True], ids=["weights in it", "weights beside it"])
def test_an_annotated_graph_computes_the_same(profiled: ProfileResult, tmp_path: Path, beside: bool) -> None:
    onnx, ort = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    (file,) = profiled.graphs.values()
    given = tmp_path / "given.onnx"
    onnx.save(onnx.load(file.path), given, save_as_external_data=beside, location="w.bin", size_threshold=1024)
    found = dyno.profile(str(given), "onnxruntime", runs=10, top=0, seconds=0.03, warmup=0.02) if beside else profiled
    assert found.save(tmp_path / "r.onnx") == [tmp_path / "r.onnx"]
    assert (tmp_path / "r.onnx.data").exists() == beside
    onnx.checker.check_model(str(tmp_path / "r.onnx"), full_check=True)
    x = np.random.default_rng(0).standard_normal((1, 3, 64, 64)).astype(np.float32)
    outputs = [ort.InferenceSession(path).run(None, {"input": x})[0] for path in (given, tmp_path / "r.onnx")]
    np.testing.assert_array_equal(*outputs)
    title = next(found.forms[k].library for k in found.times if "ONNX Runtime" in found.forms[k].library)
    times = {row["layer"]: row["time_us"] for row in found.tables[0].rows if row["form"] == title}
    nodes = onnx.load(tmp_path / "r.onnx", load_external_data=False).graph.node
    convolutions = [node for node in nodes if node.op_type == "Conv"]
    assert len(convolutions) == 20
    for node in convolutions:
        facts = {entry.key.removeprefix(f"dyno: {title}: "): entry.value for entry in node.metadata_props}
        assert facts["computes in"] == "float32" and facts["type"].endswith("Conv")
        assert float(facts["median, µs"]) == pytest.approx(times[facts["layer"]], abs=0.001)
        assert any(line.startswith(f"{title}: {facts['layer']}, ") for line in node.doc_string.splitlines())


def test_the_page_is_self_contained(profiled: ProfileResult, tmp_path: Path) -> None:
    assert profiled.save(tmp_path / "r.html") == [tmp_path / "r.html"]
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and '<meta charset="utf-8">' in page
    assert page.count('<figure class="tree-map">') == 3 and page.count("<table") == 4
    assert not re.search(r"<script[^>]*\ssrc=|<link|<img|@import|(src|href)=[\"']?(https?:)?//", page)
    assert "prefers-color-scheme: dark" in page and "layer4" in page
    assert profiled.html in page


def test_files_are_saved_from_the_command_line(call: Any, onnx_file: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    named = onnx.load(onnx_file)
    named.graph.node[0].name = "sum"
    onnx.save(named, onnx_file)
    _, out, err = call(
        "profile", onnx_file, *QUICK, "--save", "m.onnx.trace.json", "--save", "o.onnx", "--format", "html", code=0
    )
    assert "saved m.onnx.trace.json, for Perfetto" in err and "saved o.onnx, for Netron" in err
    assert '<figure class="tree-map">' in out and "time by operator" in out
    assert json.loads((tmp_path / "m.onnx.trace.json").read_text(encoding="utf-8"))["displayTimeUnit"] == "ms"
    _, _, err = call("inspect", onnx_file, "onnxruntime", "--save", "i.onnx", "--save", "i.explorer.json", code=0)
    (node,) = onnx.load(tmp_path / "i.onnx").graph.node
    facts = {entry.key: entry.value for entry in node.metadata_props}
    assert any(key.endswith(": layer") and "ONNX Runtime" in key for key in facts)
    assert not any("µs" in key for key in facts)
    assert len(json.loads((tmp_path / "i.explorer.json").read_text(encoding="utf-8"))["graphs"]) == 2


def test_two_graphs_are_two_files(call: Any, onnx_file: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    other = onnx.load(onnx_file)
    other.graph.node[0].op_type = "Mul"
    onnx.save(other, tmp_path / "other.onnx")
    call("profile", onnx_file, "other.onnx", *QUICK, "--save", "o.onnx", code=0)
    kinds = [onnx.load(tmp_path / name).graph.node[0].op_type for name in ("o.onnx", "o-2.onnx")]
    assert kinds == ["Add", "Mul"]


def test_unsupported_save_targets_are_refused_before_measuring(refused: Any, onnx_file: Path, tmp_path: Path) -> None:
    known = ".explorer.json (Model Explorer), .onnx (Netron)"
    model = "torchvision:resnet18"
    said = refused("profile", model, "--save", "a.json")
    assert said.startswith("'a.json' can't be saved; end its name in one of .tr")
    assert refused("inspect", model, "--save", "a.csv") == f"'a.csv' can't be saved; end its name in one of {known}"
    assert refused("inspect", model, "--save", "a.html") == (
        f"a.html needs times of layers; `dyno profile` saves it, `dyno inspect` saves {known}"
    )
    assert refused("profile", model, "--save", "a.onnx") == (
        "a.onnx needs an ONNX graph, but no form is made from one; add onnxruntime, or another that is"
    )
    assert refused("profile", model, "--save", "nowhere/a.html") == (
        "nowhere/a.html can't be written (No such file or directory); give a file in another folder"
    )
    (tmp_path / "f.html").mkdir()
    assert refused("profile", model, "--save", "f.html") == "f.html is a folder; give a file to save to"
    assert refused("profile", onnx_file, "--save", onnx_file) == (
        f"{onnx_file} is the model itself; give another file to save to"
    )


def test_a_single_file_is_saved_from_python(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    dyno.inspect(module, "onnx", sizes=("16",), save=str(tmp_path / "net.explorer.json"))
    assert json.loads((tmp_path / "net.explorer.json").read_text(encoding="utf-8"))["graphs"]
