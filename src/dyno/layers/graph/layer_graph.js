"use strict";
(() => {
  const COOL = [244, 246, 249], HOT = [230, 159, 0];  // of a layer that takes no time, and of the slowest
  const color = heat => `rgb(${COOL.map((from, k) => Math.round(from + heat * (HOT[k] - from)))})`;
  const label = node => [node.type, node.name, node.share === undefined ? "" : `${node.share} %`].filter(Boolean).join("\n");
  const said = node => Object.entries(node.about).map(([name, text]) => `${name}: ${text}`).join("\n");

  function style(ink) {
    return [
      { selector: "node", style: {
        label: "data(label)", "text-wrap": "wrap", "text-valign": "center", "font-size": 11, color: "#1c2430",
        shape: "round-rectangle", width: "data(width)", height: "data(height)", "background-color": "data(color)",
        "border-width": 1, "border-color": "#8a94a3" } },
      { selector: "edge", style: {
        width: 1.4, "line-color": "#8a94a3", "target-arrow-color": "#8a94a3", "target-arrow-shape": "triangle",
        "curve-style": "bezier", "arrow-scale": .8 } },
      { selector: ".other", style: { opacity: .22 } },
      { selector: ".chosen", style: { "border-width": 4, "border-color": ink } },
    ];
  }

  function drawn(graph, into) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    const drawing = document.createElement("div");
    caption.textContent = graph.title;
    drawing.className = "drawing";
    figure.append(caption, drawing);
    into.append(figure);
    const nodes = graph.nodes.map(node => {
      const lines = label(node).split("\n");
      return { data: {
        id: `${node.id}`, label: lines.join("\n"), part: node.part, heat: node.heat ?? 0, color: color(node.heat ?? 0),
        width: 16 + 6.3 * Math.max(...lines.map(line => line.length)), height: 8 + 14 * lines.length, said: said(node),
        words: `${label(node)} ${said(node)}`.toLowerCase() } };
    });
    const edges = graph.edges.map(([source, target]) => ({ data: { source: `${source}`, target: `${target}` } }));
    return cytoscape({
      container: drawing, elements: { nodes, edges }, style: style(getComputedStyle(into).color), autoungrabify: true,
      minZoom: .02, maxZoom: 3, layout: { name: "dagre", nodeSep: 14, rankSep: 26 },
    });
  }

  const marked = (graphs, chosen) => {
    for (const graph of graphs) {
      graph.elements().removeClass("chosen other");
      if (!chosen) continue;
      const own = graph.nodes().filter(chosen);
      graph.nodes().difference(own).addClass("other");
      own.addClass("chosen");
    }
  };

  // Readable, with the node in the middle; a whole network is too long for that.
  const shown = (graph, nodes) => { if (nodes.length) { graph.zoom(.9); graph.center(nodes.first()); } };
  const slowest = graph => graph.nodes().max(node => node.data("heat")).ele;

  function opened(box) {
    const about = box.querySelector(".about"), hint = about.textContent;
    const graphs = JSON.parse(box.querySelector("script").textContent).map(each => drawn(each, box.querySelector(".graphs")));
    for (const graph of graphs) {
      graph.resize();  // one beside it made it narrower
      graph.fit(undefined, 12);
      graph.on("tap", "node", event => {
        const node = event.target, part = node.data("part");
        marked(graphs, each => each === node || (part !== undefined && each.data("part") === part));
        const others = graphs.filter(other => other !== graph).map(other => [other, other.nodes(".chosen")]);
        for (const [other, nodes] of others) shown(other, nodes);
        about.textContent = [node, ...others.flatMap(([, nodes]) => nodes.toArray())].map(each => each.data("said")).join("\n\n");
      });
      graph.on("tap", event => { if (event.target === graph) { marked(graphs, null); about.textContent = hint; } });
    }
    box.querySelector("input").addEventListener("input", event => {
      const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
      marked(graphs, words.length ? each => words.every(word => each.data("words").includes(word)) : null);
      for (const graph of graphs) shown(graph, graph.nodes(".chosen"));
    });
    const actions = { slowest: () => graphs.forEach(graph => shown(graph, slowest(graph))), whole: () => graphs.forEach(graph => graph.fit(undefined, 12)) };
    for (const button of box.querySelectorAll("button")) button.addEventListener("click", actions[button.dataset.do]);
  }

  for (const box of document.querySelectorAll("details.layer-graph")) {
    const draw = () => { if (box.open && !box.dataset.drawn) { box.dataset.drawn = "yes"; opened(box); } };
    box.addEventListener("toggle", draw);
    draw();
  }
})();
