"""The layers of a form as a graph in a page: what is drawn, and what a browser makes of it."""

from pathlib import Path

import numpy as np
import pytest

from browser import ask
from dyno.layers import graph_page
from dyno.layers.graph_files import timelines
from dyno.layers.times import Times
from dyno.worker.facts.job import LAYERS, MODULES, Layer, LayerGraph, Port


def port(*names: str) -> tuple[Port, ...]:
    return tuple(Port(name, (1, 2), "float32") for name in names)


def module(name: str, kind: str, reads: str, writes: str) -> Layer:
    return Layer(name=name, type=kind, inputs=port(reads), outputs=port(writes), modules=(name,))


# `block` adds what its convolution returns to what it was given, by its own code.
MODULE = LayerGraph(form=MODULES, library="P", layers=(
    module("stem", "Conv2d", "x", "s"), module("block.conv", "Conv2d", "s", "c"), module("block", "Block", "s", "b"),
    module("head", "Linear", "b", "y"), module("", "Net", "x", "y"),
))  # fmt: skip
ENGINE = LayerGraph(form=LAYERS, library="E</script>", layers=(
    Layer(name="a", type="nchwc.Conv", inputs=port("x"), outputs=port("s")),
    Layer(name="folded", type="Identity", inputs=port("s"), outputs=port("t"), skipped=True),
    Layer(name="b", type="Conv", inputs=port("t"), outputs=port("u")),
    Layer(name="c", type="Gemm", inputs=port("u", "s"), outputs=port("y")),
))  # fmt: skip
SECONDS = np.array([[1e-6, 0.0, 6e-6, 3e-6]] * 3)


def graph_of(form: LayerGraph, parts: dict[int, int] | None = None, *, timed: bool = True):
    times = {0: Times(np.ones(1), np.ones(3), SECONDS)} if timed else {}
    (timeline,) = timelines([form], {}, {0: 0} if form.form == MODULES else {}, times, [0])
    return graph_page.draw_graph(form, timeline, parts or {})


def test_edges_go_from_what_writes_to_what_reads() -> None:
    drawn = graph_of(ENGINE, {0: 5, 3: 7})
    assert [node["id"] for node in drawn["nodes"]] == [0, 2, 3]
    assert drawn["edges"] == [(0, 2), (2, 3), (0, 3)], "through the layer that doesn't run"
    assert [(n["type"], n["share"], n.get("part")) for n in drawn["nodes"]] == [
        ("Conv", 10.0, 5), ("Conv", 60.0, None), ("Gemm", 30.0, 7),
    ]  # fmt: skip
    assert drawn["nodes"][1]["heat"] == 1 and drawn["nodes"][1]["about"]["median, µs"] == "6.000"


def test_what_a_block_adds_itself_flows_into_it() -> None:
    drawn = graph_of(MODULE, timed=False)
    assert {(0, 1), (0, 2), (1, 2), (2, 3), (3, 4)} <= set(drawn["edges"])
    assert "share" not in drawn["nodes"][0] and "heat" not in drawn["nodes"][0]


def test_what_is_too_large_or_empty_is_left_out() -> None:
    drawn = graph_of(ENGINE)
    assert graph_page.graph_figure([]) == graph_page.graph_figure([drawn | {"nodes": []}]) == ""
    assert graph_page.graph_figure([drawn | {"nodes": drawn["nodes"] * graph_page.MOST}]) == ""
    assert "</script>" not in graph_page.graph_figure([drawn]).split("application/json", 1)[1].removesuffix(
        "</script>\n</details>"
    )


@pytest.mark.slow
def test_a_browser_draws_finds_and_pairs_layers(tmp_path: Path) -> None:
    figure = graph_page.graph_figure(
        [graph_of(ENGINE, {0: 1, 2: 2, 3: 3}), graph_of(MODULE, {0: 1, 1: 2, 3: 3}, timed=False)]
    )
    written = tmp_path / "page.html"
    opened = figure.replace('class="layer-graph"', 'class="layer-graph" open')
    written.write_text(graph_page.whole_page("Layers", f"{opened}\n{graph_page.graph_scripts()}"), encoding="utf-8")
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
