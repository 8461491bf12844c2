"""Card of a run for a model's README: its verdict in Markdown, and a badge in SVG.

Both are written from the verdict's decisions and the rows of its table, without computing anything again.
"""

from __future__ import annotations

import dataclasses
import html
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dyno.cli.options import REPEATABLE
from dyno.formatting import escape_markdown, format_number, format_ratio, format_size, join_names, markdown_table
from dyno.report.sections import about_run
from dyno.report.verdict import decisions
from dyno.report.verdict.findings import Decision, format_ms
from dyno.report.verdict.verdict import read_verdict
from dyno.results.ranking import (
    LATENCY,
    THROUGHPUT,
    compare_first,
    describe_configuration,
    keep_eligible,
    rank_goals,
    sort_rows,
)
from dyno.results.run_data import RunData
from dyno.store import sha256_of
from dyno.study.study import Study
from dyno.table import is_missing
from dyno.worker.record import write_text
from dyno.worker.spec import clean_text

if TYPE_CHECKING:
    import pandas as pd

PACK_SUFFIX = ".pack.zip"
CARD_SUFFIX, BADGE_SUFFIX = ".card.md", ".svg"
SURE_COLOUR, DOUBTFUL_COLOUR, NEUTRAL_COLOUR = "#2e7d32", "#9a6700", "#6e7781"  # colours of badges by certainty
STATE_COLOURS = {decisions.DECIDED: SURE_COLOUR, "close": SURE_COLOUR, "not compared": NEUTRAL_COLOUR}
STATE_WORDS = {"open": "undecided", "tie": "equal"}  # badge text for several possible winners
BADGE_LABEL = "dyno"
BADGE_HEIGHT, BADGE_MARGIN, LETTER_WIDTH = 20, 6, 6.6  # pixels; mean width of a letter at 11 pixels
TABLE_HEAD = ("model", "batch", "fastest", "latency", "images/s", "speed-up [95 % interval]")
RIGHT_ALIGNED = (False, True, False, True, True, True)


def card_paths(file: Path) -> tuple[Path, Path]:
    """Return the paths of the card and the badge next to a pack."""
    stem = file.name.removesuffix(PACK_SUFFIX) if file.name.endswith(PACK_SUFFIX) else file.stem
    return file.with_name(f"{stem}{CARD_SUFFIX}"), file.with_name(f"{stem}{BADGE_SUFFIX}")


def write_card(run: RunData, study: Study, file: Path) -> tuple[Path, Path]:
    """Write the card and the badge of a run next to its pack; return their paths."""
    card, badge = card_paths(file)
    verdict = read_verdict(run).decisions
    text, colour = _describe_badge(verdict, run)
    write_text(badge, draw_badge(text, colour))
    lines = [
        "### Inference speed", "", f"![{BADGE_LABEL}: {escape_markdown(text)}]({quote(badge.name)})", "",
        *_write_verdict(run, verdict), *_write_proof(run, study, file), "",
    ]  # fmt: skip
    write_text(card, "\n".join(lines))
    return card, badge


def _write_verdict(run: RunData, verdict: Sequence[Decision]) -> Iterator[str]:
    for decision in verdict:
        yield f"- {escape_markdown(decision.sentence)}"
        yield from (
            f"  - {name}: {escape_markdown(text)}" for name, text in decision.answers if name in ("real", "right")
        )
    if rows := [*_list_fastest(run)] if any(decision.by for decision in verdict) else []:
        yield from ("", markdown_table(TABLE_HEAD, rows, RIGHT_ALIGNED).rstrip("\n"))
    yield ""


def _write_proof(run: RunData, study: Study, file: Path) -> Iterator[str]:
    """Yield the run's method and versions, the hash of its pack, and commands to repeat and verify it."""
    versions = (run.records.environment.get("versions") or {}).items()
    facts = {
        "Measured": ", ".join(filter(None, about_run(run.records))),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions if version),
    }
    yield from (f"- {name}: {escape_markdown(text)}" for name, text in facts.items() if text)
    yield f"- Proof: {escape_markdown(file.name)}, sha256 `{sha256_of(file)}`"
    commands = write_command(study), f"dyno verify {shlex.quote(file.name)}"
    yield from ("", "```bash", *map(clean_text, commands), "```")


def _list_fastest(run: RunData) -> Iterator[tuple[str, ...]]:
    """Yield a row per model, size, device and batch: the fastest configuration, or the candidates."""
    has_several = run.frame["device"].nunique() > 1
    for ranking in rank_goals(run):
        for batch, rows in ranking.group.groupby("batch", sort=True):
            sorted_rows = sort_rows(keep_eligible(rows), run.trials)
            if sorted_rows.empty:
                continue
            contest, first = compare_first(sorted_rows, LATENCY, run), sorted_rows.iloc[0]
            names = [describe_configuration(row) for row in (first, *(row for row, _ in contest.rivals))]
            name = decisions.name_set(names, contest, run) if contest.rivals else names[0]
            where = ranking.scope + (format_size(str(first["size"]), " at size ") if ranking.sizes else "")
            where += f" on {first['device']}" if has_several else ""
            cells = where, str(batch), name, format_ms(first[LATENCY]), _format_rate(first), _format_gain(first)
            yield tuple(escape_markdown(cell) for cell in cells)


def _format_rate(row: pd.Series) -> str:
    return "" if is_missing(row[THROUGHPUT]) else format_number(row[THROUGHPUT])


def _format_gain(row: pd.Series) -> str:
    if is_missing(row["speedup"]):
        return ""
    ratio = format_ratio(row["speedup"], row["speedup_low"], row["speedup_high"])
    return "reference" if row["trial"] == row["reference"] else f"{ratio} ({row['verdict']})"


def _describe_badge(verdict: Sequence[Decision], run: RunData) -> tuple[str, str]:
    """Return a badge's text and colour from the first decision: speed-up and winner, or the lack of a winner."""
    decision = verdict[0] if verdict else None
    if decision is None or not decision.candidates:
        return "no winner", NEUTRAL_COLOUR
    rows = run.frame.set_index("trial")
    names = [describe_configuration(rows.loc[id]) for id in decision.candidates[:2]]
    colour = STATE_COLOURS.get(decision.badge, DOUBTFUL_COLOUR)
    if len(decision.candidates) > 1:
        rest_count = len(decision.candidates) - len(names)
        winners = join_names([*names, *([f"{rest_count} more"] if rest_count else [])])
        return f"{winners}: {STATE_WORDS.get(decision.badge, decision.badge)}", colour
    gain = next((figure.value for figure in decision.figures if figure.name == "speed-up"), "")
    if gain in ("undecided", "unproven"):
        return f"{names[0]}: {gain}", colour
    return f"{gain} {names[0]}".strip(), colour


def draw_badge(text: str, colour: str) -> str:
    """Draw a badge as SVG; its text is fitted, so that the font's width doesn't matter."""
    widths = [round(len(label) * LETTER_WIDTH) + 2 * BADGE_MARGIN for label in (BADGE_LABEL, text)]
    title, total = html.escape(f"{BADGE_LABEL}: {text}"), sum(widths)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{BADGE_HEIGHT}" role="img" '
        f'aria-label="{title}">',
        f"<title>{title}</title>",
        f'<rect width="{total}" height="{BADGE_HEIGHT}" rx="3" fill="#3b4048"/>',
        f'<path d="M{widths[0]} 0h{widths[1] - 3}a3 3 0 0 1 3 3v{BADGE_HEIGHT - 6}a3 3 0 0 1-3 3H{widths[0]}z" '
        f'fill="{colour}"/>',
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">',
    ]
    for label, left, width in zip((BADGE_LABEL, text), (0, widths[0]), widths, strict=True):
        parts.append(
            f'<text x="{left + BADGE_MARGIN}" y="14" textLength="{width - 2 * BADGE_MARGIN}" '
            f'lengthAdjust="spacingAndGlyphs">{html.escape(label)}</text>'
        )
    return "\n".join([*parts, "</g>", "</svg>", ""])


def write_command(study: Study) -> str:
    """Return the command line of a study without two sides."""
    args = ["dyno", "run", *study.models]
    for field in dataclasses.fields(study):
        value = getattr(study, field.name)
        flags, default = field.metadata.get("flags", ""), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.name == "models" or value in (None, default):
            continue
        flag = flags.split()[0] if flags else f"--{field.name.replace('_', '-')}"
        args += _write_option(field.name, flag, value)
    return shlex.join(args)


def _write_option(name: str, flag: str, value: Any) -> list[str]:
    if name == "runtime":
        return [arg for key in value for arg in (flag, f"{key}=PYTHON")]
    if isinstance(value, Mapping):
        return [arg for key, item in value.items() for arg in (flag, f"{key}={_format_word(item)}")]
    if name in REPEATABLE:
        return [arg for item in value for arg in (flag, str(item))]
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    text = ",".join(map(_format_word, value)) if isinstance(value, tuple) else _format_word(value)
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]


def _format_word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
