"""Layers as nested calls, and the traces and tree maps made from them."""

import re
from pathlib import Path

import numpy as np
import pytest

from browser import ask
from dyno.layers import graph_files, graph_page
from dyno.layers.align import FormSet
from dyno.layers.graph_files import Mark, build_timelines, iter_marks
from dyno.layers.times import Times
from dyno.worker.facts.job import LAYERS, MODULES, NODES, LayerGraph
from made_layers import form, layer

# `a` has two parts and some code between; `b` stands alone.
PARTS = {"a.0": "Conv2d", "a.1": "ReLU", "a": "Block", "b": "Linear", "": "Net"}
MODULE = form(MODULES, *(layer(name, kind, f"t{k}", f"t{k + 1}", modules=(name,))
                         for k, (name, kind) in enumerate(PARTS.items())), library="P")  # fmt: skip
GRAPH = form(NODES, *(layer(f"n{k}", "Conv", f"t{k}", f"t{k + 1}", modules=(name,), nodes=(f"n{k}",))
                      for k, name in enumerate([*PARTS][:4])))  # fmt: skip
ENGINE = form(
    LAYERS, layer("reorder", "Reorder", moves=True),
    layer("fused", "Convolution", "", "t2", nodes=("n0", "n1"), computes_in="float32", tactic="jit"),
    layer("x", "Add", "t2", "t3", nodes=("n2",)), layer("gone", "Relu", skipped=True),
    layer("last", "Gemm", "t3", "t4", nodes=("n3",)), library="E",
)  # fmt: skip
FORMS = [MODULE, ENGINE, GRAPH]
SECONDS = {
    0: np.array([[4e-6, 1e-6, 0.5e-6, 2e-6, 0.25e-6]] * 3),
    1: np.array([[1e-6, 3e-6, 2e-6, 0.0, 5e-6], [1e-6, 5e-6, 2e-6, 0.0, 5e-6], [9e-6, 4e-6, 2e-6, 0.0, 5e-6]]),
}


def found(*shown: int):
    times = {k: Times(np.ones(1), np.ones(6), SECONDS[k]) for k in (0, 1)}
    return build_timelines(FormSet(FORMS, {1: 2}, {0: 0, 1: 0}), times, shown)


def test_layers_are_nested_under_their_common_modules() -> None:
    module, engine = found(0, 1)
    assert [step.stack[1:] for step in module.steps] == [("a", "a.0"), ("a", "a.1"), ("a",), ("b",), ()]
    assert [step.stack[1:] for step in engine.steps] == [
        ("(conversions)", "reorder"), ("a", "a.0, .1: Convolution"), ("a", "Add"), ("b", "Gemm"),
    ]  # fmt: skip
    assert engine.medians.tolist() == [1e-6, 4e-6, 2e-6, 5e-6] and engine.runs_each == 2
    assert engine.describe_step(1) == {
        "layer": "fused", "type": "Convolution", "modules": "a.0 a.1", "computes in": "float32", "kernel": "jit",
        "output": "1x4x8x8 float32", "median, µs": "4.000", "share, %": "33.33",
    }  # fmt: skip
    assert module.describe_step(2)["own median, µs"] == "0.500"


def test_a_call_lasts_as_long_as_its_inner_calls() -> None:
    module, _ = found(0, 1)
    assert [*iter_marks(module.steps, [4, 1, 2, 3, 5], 100)] == [
        Mark("(model)", 100), Mark("a", 100), Mark("a.0", 100), Mark("a.0", 104, ends=True, step=0),
        Mark("a.1", 104), Mark("a.1", 105, ends=True, step=1), Mark("a", 107, ends=True, step=2),
        Mark("b", 107), Mark("b", 110, ends=True, step=3), Mark("(model)", 115, ends=True, step=4),
    ]  # fmt: skip


def test_a_trace_has_each_repeat() -> None:
    events = graph_files.chrome_trace(found(1), "test")["traceEvents"]
    repeats = [event for event in events if event["name"].startswith("repeat")]
    assert [event["name"] for event in repeats[::2]] == [f"repeat {k}, mean of 2 runs" for k in (1, 2, 3)]
    assert [event["ts"] for event in repeats] == pytest.approx([0, 11, 11, 24, 24, 44])


def test_tree_map_areas_are_shares_of_time() -> None:
    module, engine = found(0, 1)
    root = graph_page.build_tree(module)
    assert [(node.name, round(node.seconds * 1e6, 3)) for node in root.parts] == [
        ("a", 5.5), ("b", 2), ("itself", 0.25),
    ]  # fmt: skip
    assert [node.name for node in root.parts[0].parts] == ["a.0", "a.1", "itself"]
    boxes = [*graph_page.lay_out_boxes(graph_page.build_tree(engine).parts, 1200, 560)]
    areas = {node.name: 100 * box["dx"] * box["dy"] / (1200 * 560) for node, box in boxes}
    assert areas == pytest.approx({"a": 50, "b": 100 * 5 / 12, "reorder": 100 / 12})
    drawn = graph_page.draw_tree_maps([engine])
    assert "time by module, 12.0 µs in 4 layers" in drawn and not re.search(r"https?:|src=", drawn)
    assert re.findall(r"<i></i>(\w+) ([\d.]+) %", drawn) == [
        ("Gemm", "41.7"), ("Convolution", "33.3"), ("Add", "16.7"), ("Reorder", "8.3"),
    ]  # fmt: skip
    assert "time by operator" in graph_page.draw_tree_maps(
        build_timelines(FormSet([ENGINE]), {0: Times(np.ones(1), np.ones(3), SECONDS[1])}, [0])
    )


def test_names_are_escaped() -> None:
    hostile = form(MODULES, layer("<i>", "<b>"), library="<P>")
    times = {0: Times(np.ones(1), np.ones(3), np.ones((3, 1)))}
    assert not re.search("<P>|<i>[^<]|<b>", graph_page.draw_tree_maps(build_timelines(FormSet([hostile]), times, [0])))


def test_nodes_name_the_layer_that_runs_them() -> None:
    module, engine = found(0, 1)
    notes = graph_files.list_node_notes(FORMS, 2, {0: module, 1: engine}, 0)
    assert notes[1].lines == [
        "P: a.1, ReLU, own median 1.000 µs, share 12.90 %",
        "E: fused, Convolution, float32, median 4.000 µs, share 33.33 %, for 2 nodes",
    ]
    assert notes[3].facts["E: layer"] == "last" and "E: stands for" not in notes[3].facts
    without = [form(LAYERS, ENGINE.layers[0], library="E"), GRAPH]
    lines = build_timelines(FormSet(without, {0: 1}), {}, [0])
    assert graph_files.list_node_notes(without, 1, {0: lines[0]})[3].lines == [f"E: {graph_files.NO_TIME}"]


def test_graph_edges_are_the_tensors_between_layers() -> None:
    (graph,) = graph_files.build_explorer_graphs([ENGINE], found(1), "net")["graphs"]
    edges = {node["id"]: [edge["sourceNodeId"] for edge in node["incomingEdges"]] for node in graph["nodes"]}
    assert edges == {"0": [], "1": [], "2": ["1"], "4": ["2"]}
    assert [node["namespace"] for node in graph["nodes"]] == ["(conversions)", "a", "a", "b"]
    (module,) = graph_files.build_explorer_graphs([MODULE], found(0), "net")["graphs"]
    (inner,) = [node for node in module["nodes"] if node["id"] == "0"]
    assert (inner["namespace"], inner["label"]) == ("a", "Conv2d")
    assert graph_files.build_node_data(found(1))["E"]["results"]["4"] == {"value": 5.0}


# `block` adds its convolution's output to its input, in its own code.
NET = form(MODULES, *(layer(*each, modules=each[:1]) for each in (
    ("stem", "Conv2d", "x", "s"), ("block.conv", "Conv2d", "s", "c"), ("block", "Block", "s", "b"),
    ("head", "Linear", "b", "y"), ("", "Net", "x", "y"),
)), library="P")  # fmt: skip
FOLDED = form(
    LAYERS, layer("a", "nchwc.Conv", "x", "s"), layer("folded", "Identity", "s", "t", skipped=True),
    layer("b", "Conv", "t", "u"), layer("c", "Gemm", "u s", "y"), library="E</script>",
)  # fmt: skip
TAKEN = np.array([[1e-6, 0.0, 6e-6, 3e-6]] * 3)


def graph_of(form: LayerGraph, parts: dict[int, int] | None = None, *, timed: bool = True):
    times = {0: Times(np.ones(1), np.ones(3), TAKEN)} if timed else {}
    (timeline,) = build_timelines(FormSet([form], {}, {0: 0} if form.form == MODULES else {}), times, [0])
    return graph_page.draw_graph(form, timeline, parts or {})


def test_edges_go_from_writer_to_reader() -> None:
    drawn = graph_of(FOLDED, {0: 5, 3: 7})
    assert [node["id"] for node in drawn["nodes"]] == [0, 2, 3]
    assert drawn["edges"] == [(0, 2), (2, 3), (0, 3)], "through the layer that doesn't run"
    assert [(n["type"], n["share"], n.get("part")) for n in drawn["nodes"]] == [
        ("Conv", 10.0, 5), ("Conv", 60.0, None), ("Gemm", 30.0, 7),
    ]  # fmt: skip
    assert drawn["nodes"][1]["heat"] == 1 and drawn["nodes"][1]["about"]["median, µs"] == "6.000"


def test_inputs_of_a_residual_sum_flow_into_its_block() -> None:
    drawn = graph_of(NET, timed=False)
    assert {(0, 1), (0, 2), (1, 2), (2, 3), (3, 4)} <= set(drawn["edges"])
    assert "share" not in drawn["nodes"][0] and "heat" not in drawn["nodes"][0]


def test_graphs_too_large_or_empty_are_omitted() -> None:
    drawn = graph_of(FOLDED)
    assert graph_page.draw_graphs([]) == graph_page.draw_graphs([drawn | {"nodes": []}]) == ""
    assert graph_page.draw_graphs([drawn | {"nodes": drawn["nodes"] * graph_page.MAX_LAYERS}]) == ""
    content = graph_page.draw_graphs([drawn]).split("application/json", 1)[1]
    assert "</script>" not in content.removesuffix("</script>\n</details>")


@pytest.mark.slow
def test_a_browser_draws_finds_and_pairs_layers(tmp_path: Path) -> None:
    graphs = graph_of(FOLDED, {0: 1, 2: 2, 3: 3}), graph_of(NET, {0: 1, 1: 2, 3: 3}, timed=False)
    figure = graph_page.draw_graphs(graphs)
    written = tmp_path / "page.html"
    opened = figure.replace('class="layer-graph"', 'class="layer-graph" open')
    written.write_text(graph_page.make_page("Layers", f"{opened}\n{graph_page.graph_scripts()}"), encoding="utf-8")
    script = """
      const [engine, net] = [...document.querySelectorAll(".drawing")].map(each => each._cyreg.cy);
      const chosen = graph => graph.nodes(".chosen").map(node => node.data("label"));
      const search = document.querySelector(".layer-graph input");
      const type = text => {
        search.value = text;
        search.dispatchEvent(new Event("input"));
        return [chosen(engine), chosen(net)];
      };
      const found = { nodes: [engine.nodes().length, net.nodes().length] };
      found.titles = [...document.querySelectorAll("figcaption")].map(each => each.textContent);
      found.ordered = engine.nodes().map(node => node.position("y"));
      found.conv = type("conv block");
      type("");
      engine.getElementById("2").emit("tap");
      found.tapped = [chosen(engine), chosen(net)];
      found.about = document.querySelector(".layer-graph .about").textContent;
      document.querySelector("button[data-do=whole]").click();
      say(found);"""
    found = ask(written, script, tmp_path / "probe.html", "--virtual-time-budget=4000")
    assert found["nodes"] == [3, 5] and found["titles"] == ["E</script>", "P"]
    assert found["ordered"] == sorted(found["ordered"]) and len(set(found["ordered"])) == 3
    assert found["conv"] == [[], ["Conv2d\nblock.conv"]]
    assert found["tapped"] == [["Conv\n60 %"], ["Conv2d\nblock.conv"]]
    assert "median, µs: 6.000" in found["about"] and "layer: block.conv" in found["about"]
