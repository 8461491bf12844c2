"""Rooms of the source and their permitted imports: the table that a gate enforces, and its page.

python tools/rooms.py          # write the generated part of docs/architecture.md
python tools/rooms.py --check  # exit code 1 where the page differs from the code
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- made by tools/rooms.py -->", "<!-- end -->"

# Parts of the worker that the host may use: shared data, backends' declarations, and the hash of a model's own code.
BORDER = (
    "facts spec inspection record backend registry tasks plugins system extras jobs.turns training.options "
    "video.options serving.options serving.rates option_values nets.local_code"
)

# Room -> rooms that it may import, within its own tree; imports never point upwards, not even inside functions.
HOST = {
    "formatting": "",
    "table": "formatting",
    "jobs": "",
    "store": "jobs",
    "data": "",
    "results": "formatting table",
    "study": "formatting jobs store data results",
    "report": "formatting table results",
    "runner": "formatting table jobs store results study report",
    "winner": "formatting jobs store results runner",
    "devices": "formatting jobs store results study runner",
    "api": "jobs store results study report runner winner devices",
    "evaluation": "formatting table results study report api",
    "cli.options": "jobs study",
    "cli.exits": "formatting jobs store study cli.options",
    "video": "formatting table jobs store results study report runner api cli.options cli.exits",
    "serving": "formatting table jobs store results study report runner api video cli.options cli.exits",
    "layers": "formatting table jobs store results study report runner winner cli.options cli.exits",
    "regression": "formatting table jobs store results study report runner winner video api cli.options cli.exits",
    "trtexec": "jobs results runner",
    "cli.run_folders": "formatting store results report runner cli.options",
    "packs": "formatting table store results study report runner api cli.options cli.exits cli.run_folders",
    "cli.commands": "formatting table jobs store results study report runner devices api evaluation layers regression "
    "trtexec cli.options cli.exits cli.run_folders",
    "training": "formatting table jobs store data results study report runner api cli.options cli.exits cli.commands",
    "cli": "formatting table jobs store data results study report runner winner devices api evaluation video serving "
    "layers training regression packs trtexec",
}
WORKER = {
    "facts": "",
    "spec": "facts",
    "inspection": "facts spec",
    "record": "facts spec inspection",
    "option_values": "spec",
    "system": "spec",
    "extras": "spec system",
    "plugins": "",
    "backend": "facts spec inspection option_values system",
    "inputs": "facts spec",
    "tasks": "spec inspection plugins inputs",
    "sessions": "facts spec backend option_values extras system inputs",
    "onnx_graph": "facts spec record extras system inputs tasks sessions",
    "nets": "facts spec inspection plugins extras inputs tasks sessions onnx_graph",
    "layers": "facts spec backend inputs sessions nets onnx_graph",
    "numerics": "facts spec backend nets sessions onnx_graph",
    "makers": "facts spec backend option_values extras system inputs sessions nets onnx_graph",
    "backends": "facts spec record backend option_values extras system inputs sessions nets onnx_graph layers makers",
    "registry": "spec plugins backend backends makers",
    "measure": "spec backend sessions",
    "evaluation": "facts spec record backend inputs tasks",
    "training": "facts spec record option_values inputs sessions nets",
    "video": "facts spec backend option_values extras inputs sessions tasks measure",
    "serving": "spec backend option_values extras inputs measure",
    "snippets": "spec plugins registry inputs tasks sessions nets backends",
    "journal": "spec record backend system measure evaluation",
    "jobs": "facts spec inspection record backend registry extras system inputs sessions nets onnx_graph layers "
    "numerics backends tasks measure evaluation video serving journal",
    "main": "facts spec record backend registry system training snippets jobs journal",
}
# Further worker modules for single rooms of the host: pure functions that both sides must do alike.
PURE = "facts spec record option_values extras plugins system tasks jobs.turns numerics.closeness serving.rates"
BESIDES = {
    "dyno.results": PURE,
    "dyno.report": PURE,
    "dyno.trtexec": PURE,
    "dyno.table": PURE,
    "dyno.formatting": PURE,
    "dyno.layers": f"{BORDER} numerics.closeness",
    "dyno.regression": f"{BORDER} numerics.closeness",
    "dyno.data": "facts.json_values spec record extras plugins inputs.specs",
    # `dyno doctor` lists the broken plug-ins of every kind.
    "dyno.cli": f"{BORDER} snippets nets.huggingface",
    "dyno.study": f"{BORDER} nets.models nets.saved_modules nets.checkpoint nets.huggingface inputs.specs "
    "inputs.modules sessions.torch_support",
}


def _named(root: str, rooms: str) -> tuple[str, ...]:
    return tuple(f"{root}.{room}" for room in rooms.split())


def may_import() -> dict[str, tuple[str, ...]]:
    """Return for each room the dyno prefixes that it may import; a module's longest prefix decides."""
    rules = {"dyno.__main__": ("dyno.cli",), "dyno": (*_named("dyno", "api evaluation results"), "dyno.worker.spec")}
    rules["dyno"] += _named("dyno", "layers video serving training regression packs")
    for room, below in HOST.items():
        name = f"dyno.{room}"
        rules[name] = (name, *_named("dyno", below), *_named("dyno.worker", BESIDES.get(name, BORDER)))
    for name in ("dyno.cli", "dyno.devices", "dyno.packs", "dyno.regression", "dyno.runner"):
        rules[name] += ("dyno.__version__",)
    for room, below in WORKER.items():
        rules[f"dyno.worker.{room}"] = (f"dyno.worker.{room}", *_named("dyno.worker", below))
    rules["dyno.worker"] = ()
    return rules


def rooms() -> Iterator[tuple[str, Path]]:
    """Yield each room's dotted name and its folder or file."""
    for root, names in (("dyno", HOST), ("dyno.worker", WORKER)):
        for name in names:
            place = SRC.joinpath(*root.split("."), *name.split("."))
            yield f"{root}.{name}", place if place.is_dir() else place.with_suffix(".py")


def what_it_is(place: Path) -> str:
    """Return the first paragraph of the room's docstring."""
    file = place / "__init__.py" if place.is_dir() else place
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def _link(name: str, place: Path) -> str:
    return f"[`{name.removeprefix('dyno.')}`](../{place.relative_to(ROOT).as_posix()})"


def _list(root: str, names: dict[str, str]) -> Iterator[str]:
    for name, place in rooms():
        if name.startswith(f"{root}.") and name.removeprefix(f"{root}.") in names:
            yield f"- {_link(name, place)}: {what_it_is(place)}"


def generated() -> str:
    """Return the picture and the lists."""
    arrows = [
        f"  {room} --> {below}" for room, names in HOST.items() for below in _nearest(names) if "." not in room + below
    ]
    parts = ["```mermaid\ngraph TD", *arrows, "  jobs -. job.json, record.json .-> worker", "```"]
    parts += ["", "### The host", "", *_list("dyno", HOST)]
    names = [_link(name, place) for name, place in rooms() if name.startswith("dyno.worker.")]
    parts += ["", "### The worker", "", f"From bottom to top: {', '.join(names)}."]
    return "\n".join(parts)


def _nearest(names: str) -> list[str]:
    """Return the rooms below that no other one of them imports."""
    below = names.split()
    return [one for one in below if not any(one in HOST.get(other, "").split() for other in below)]


def main() -> int:
    """Write the page's generated part, or with --check return 1 if it is outdated."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    page = f"{head}{BEGIN}\n\n{generated()}\n\n{END}{rest.partition(END)[2]}"
    if "--check" in sys.argv:
        return int(page != text)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
