"""The pairs of a run that `dyno explain RUN A B` explained, as parts of its page."""

from __future__ import annotations

from dyno.layers import graph_page, pairs, reasons, waterfall, waterfall_tables
from dyno.layers.graph_page import graph_scripts as graph_scripts
from dyno.report.sections import ExplanationSection
from dyno.results.trial_result import Results
from dyno.worker.spec import UserError

TOP = 20  # parts of the model that are listed


def explained_section(results: Results, prefix: str) -> list[ExplanationSection]:
    """Return the stored pairs whose trials the run still has; `prefix` begins the ids in their charts."""
    from markupsafe import Markup

    names = {trial.id: f"{trial.configuration}, {trial.model} at batch {trial.batch}" for trial in results}
    parts = []
    for number, (path, a, b) in enumerate(pairs.list_stored_pairs(results.folder)):
        if a not in names or b not in names:
            continue
        title = f"from {names[a]} to {names[b]}"
        try:
            found = waterfall.make_waterfall(pairs.read_pair(path))
        except (OSError, ValueError, UserError) as e:
            parts.append(ExplanationSection(title, "", f"{path.name} can't be read ({e}); explain the pair again"))
            continue
        sentences = [reason.text for reason in reasons.list_reasons_why(found)]
        shown = waterfall_tables.list_waterfall_tables(found, TOP)
        html = graph_page.explained_fragment(found, shown, sentences, f"{prefix}-why{number}")
        parts.append(ExplanationSection(title, Markup(f"{html}\n{graph_page.explained_graphs(found)}")))
    return parts
