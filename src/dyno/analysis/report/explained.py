"""The pairs of a run that `dyno explain RUN A B` explained, as parts of its page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dyno.analysis.inside import pairs, reasons, waterfall, waterfall_tables
from dyno.analysis.layer_files import explained_page
from dyno.analysis.records.results import Results
from dyno.worker.spec import UserError

TOP = 20  # parts of the model that are listed


@dataclass(frozen=True)
class ExplanationSection:
    """One pair: the names of both, and its chart, tables, sentences and graphs as HTML, or why it can't be read."""

    title: str
    html: Any
    problem: str = ""


def explained(results: Results, prefix: str) -> list[ExplanationSection]:
    """Return the stored pairs whose trials the run still has; `prefix` begins the ids in their charts."""
    from markupsafe import Markup

    names = {trial.id: f"{trial.configuration}, {trial.model} at batch {trial.batch}" for trial in results}
    parts = []
    for number, (path, a, b) in enumerate(pairs.stored(results.folder)):
        if a not in names or b not in names:
            continue
        title = f"from {names[a]} to {names[b]}"
        try:
            found = waterfall.waterfall(pairs.read(path))
        except (OSError, ValueError, UserError) as e:
            parts.append(ExplanationSection(title, "", f"{path.name} can't be read ({e}); explain the pair again"))
            continue
        sentences = [reason.text for reason in reasons.reasons(found)]
        shown = waterfall_tables.tables(found, TOP)
        html = explained_page.fragment(found, shown, sentences, f"{prefix}-why{number}")
        parts.append(ExplanationSection(title, Markup(f"{html}\n{explained_page.graphs(found)}")))
    return parts
