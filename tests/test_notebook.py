"""The notebook of examples/ runs from top to bottom and displays its result."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples/quickstart.ipynb"
# Inserted before the first cell: forks the jobs.
FORKED = """
import sys
sys.path.insert(0, {tests!r})
import preloaded
from dyno.jobs import launcher
launcher.subprocess = preloaded.Processes({server!r})
"""
SHORT = "seconds=0.05, block=0.01, warmup=0.02"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory, preloaded: str) -> list[Any]:
    """Code cells of the notebook, run in an empty folder."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "figures of another machine are no example"
    code = FORKED.format(tests=str(Path(__file__).parent), server=preloaded)
    for cell in notebook.cells:
        cell.source = cell.source.replace("seconds=0.2", SHORT)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(code))
    limits = {"timeout": 900, "startup_timeout": 900, "iopub_timeout": 600}
    NotebookClient(notebook, **limits, resources={"metadata": {"path": str(folder)}}).execute()
    assert (folder / "runs/notebook/report.html").is_file()
    return [cell for cell in notebook.cells[1:] if cell.cell_type == "code"]


def shown(cell: Any, kind: str) -> str:
    return "\n".join(output.data.get(kind, "") for output in cell.outputs if "data" in output)


def test_a_result_shows_decisions_trials_and_a_chart(cells: list[Any]) -> None:
    html = shown(next(cell for cell in cells if cell.source == "result"), "text/html")
    assert "<strong>" in html and "real: " in html and "data:image/svg+xml;base64," in html
    assert all(f"<td>{name}</td>" in html for name in ("pytorch", "onnxruntime", "openvino"))
    assert "<script" not in html and "<button" not in html


def test_progress_is_shown_and_plots_are_drawn(cells: list[Any]) -> None:
    lines = shown(next(cell for cell in cells if "study.run" in cell.source), "text/html")
    assert "after round 1 of 3" in lines and "after round 2 of 3" in lines, lines
    assert shown(next(cell for cell in cells if "plt.hist" in cell.source), "image/png")


def test_the_difference_is_explained(cells: list[Any]) -> None:
    outputs = next(cell for cell in cells if "dyno.explain" in cell.source).outputs
    assert "From A to B" in "".join(output.get("text", "") for output in outputs)
