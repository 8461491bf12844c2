"use strict";
const all = selector => [...document.querySelectorAll(selector)];

function sorted(table, head, column) {
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = row => row.cells[column].dataset.v;
  const order = (a, b) => {
    const x = value(a), y = value(b);
    if (x === "" || y === "") return (x === "") - (y === "");  // empty cells stay last
    const numeric = isFinite(x) && isFinite(y);
    return (down ? -1 : 1) * (numeric ? x - y : x.localeCompare(y));
  };
  table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
}

// What is shown of a table, in its present order.
function asMarkdown(table) {
  const line = cells => "| " + cells.map(text => text.trim().replaceAll("|", "\\|")).join(" | ") + " |";
  const shown = row => [...row.cells].filter(cell => !cell.hidden);
  const heads = shown(table.tHead.rows[0]), rows = [...table.tBodies[0].rows].filter(row => !row.hidden);
  return [line(heads.map(head => head.textContent)), line(heads.map(head => head.classList.contains("n") ? "---:" : "---")),
    ...rows.map(row => line(shown(row).map(cell => cell.textContent)))].join("\n") + "\n";
}

// A list of a table's columns, of which each can be shown or hidden.
function picker(table) {
  const made = document.createElement("details");
  made.className = "picker";
  made.append(Object.assign(document.createElement("summary"), { textContent: "columns" }));
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: !head.hidden });
    box.addEventListener("change", () => {
      for (const row of table.rows) row.cells[column].hidden = !box.checked;
    });
    const label = document.createElement("label");
    label.append(box, ` ${head.textContent}`);
    made.append(label);
  });
  return made;
}

function button(text, title, action) {
  const made = document.createElement("button");
  Object.assign(made, { type: "button", className: "tool", textContent: text, title });
  made.addEventListener("click", () => action(made));
  return made;
}

function copied(table, pressed) {
  const done = said => { pressed.textContent = said; setTimeout(() => pressed.textContent = "Markdown", 1500); };
  const area = document.createElement("textarea");  // a page from a file has no clipboard but this in some browsers
  area.value = asMarkdown(table);
  document.body.append(area);
  area.select();
  done(document.execCommand("copy") ? "copied" : "can't copy");
  area.remove();
}

for (const table of all("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) =>
    head.querySelector("button").addEventListener("click", () => sorted(table, head, column)));
  if (table.querySelector("th[hidden]")) table.closest(".box").after(picker(table));
  table.closest(".table").prepend(button("Markdown", "Copy this table as Markdown", pressed => copied(table, pressed)));
}

for (const chart of all(".chart:not(.narrow)")) {
  let zoom = null;
  chart.before(button("zoom", "Zoom with the wheel, move by dragging", pressed => {
    if (zoom) { zoom.destroy(); zoom = null; pressed.textContent = "zoom"; return; }
    const drawing = chart.querySelector("svg");
    drawing.style.height = `${drawing.getBoundingClientRect().height}px`;
    zoom = svgPanZoom(drawing, { controlIconsEnabled: true, maxZoom: 40 });
    pressed.textContent = "done";
  }));
}

for (const select of all(".part > select")) {
  const panels = [...select.parentElement.querySelectorAll(":scope > .panel")];
  select.addEventListener("change", () => panels.forEach((panel, place) => panel.hidden = place !== select.selectedIndex));
}

// Rows and trials with all of the words; a heading above a table counts as part of its rows.
const words = document.querySelector(".tools input"), count = document.querySelector(".tools output");
words.addEventListener("input", () => {
  const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0, rows = 0;
  const filter = (each, text) => {
    each.hidden = !wanted.every(word => text.toLowerCase().includes(word));
    rows += 1, shown += !each.hidden;
  };
  for (const table of all("section table.sortable")) {
    const title = table.closest(".table")?.querySelector("h3")?.textContent ?? "";
    if (!table.closest(".trial")) for (const row of table.tBodies[0].rows) filter(row, `${title} ${row.textContent}`);
  }
  for (const option of all("select[aria-label=trial] option")) filter(option, option.textContent);
  count.textContent = wanted.length ? `${shown} of ${rows} rows` : "";
});

const opened = target => { for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true; };
const follow = () => opened(location.hash && document.getElementById(location.hash.slice(1)));
addEventListener("hashchange", follow);
follow();
// On paper nothing can be unfolded; what was folded is so again afterwards.
let unfolded = [];
addEventListener("beforeprint", () => {
  unfolded = [...unfolded, ...all("details:not(.picker):not([open])")];
  for (const each of unfolded) each.open = true;
});
addEventListener("afterprint", () => {
  for (const each of unfolded) each.open = false;
  unfolded = [];
});
