"""Two runs of a video compared end to end and stage by stage, B with A."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dyno.analysis import stats
from dyno.analysis.formatting import plain, ratio
from dyno.analysis.presentation.limits import limits_of, printed
from dyno.analysis.presentation.table import FINE, TEXT, Column, Row, Table
from dyno.analysis.presentation.table_kind import TableKind
from dyno.analysis.records.results import TrialResult
from dyno.analysis.video import runs
from dyno.analysis.video.runs import VideoRun

WHOLE = "end to end"
COMPARED = TableKind("video-comparison", "Videos, B against A",
                     "Time per frame of two runs of one video, end to end and in each stage.",
                     command="dyno compare RUN RUN")  # fmt: skip
COLUMNS = (
    Column("label", "model, backend with its options, precision, batch, size", kind=TEXT, title="trial"),
    Column("part", "the whole, or a stage of the pipeline while the others run", kind=TEXT),
    Column("a_ms", "A's time per frame", "ms", title="A ms"),
    Column("b_ms", "B's", "ms", title="B ms"),
    Column("ratio", "B's time over A's: above 1 is slower", kind=FINE, title="B / A", interval=True),
    *limits_of("ratio", "", FINE),
    Column("verdict", "whether that is real: end to end over all trials as one family, and so the stages", kind=TEXT),
    Column("rounds_a", "of A", rank=2),
    Column("rounds_b", "of B", rank=2),
)  # fmt: skip
OTHER_VIDEO = "not comparable: another video, or another number of streams"
Pair = tuple[VideoRun, VideoRun]


def table(trials: Sequence[tuple[TrialResult, TrialResult]]) -> Table | None:
    """Build rows of the videos of the pairs (A's trial, B's); None where no pair has any on both sides."""
    pairs = [(a, b) for x, y in trials if (a := runs.filmed(x)) and (b := runs.filmed(y))]
    if not pairs:
        return None
    same = [pair for pair in pairs if _make_shot_key(pair[0]) == _make_shot_key(pair[1])]
    wholes = [(pair, WHOLE, pair[0].seconds, pair[1].seconds) for pair in same]
    rows = [*_judge_parts(wholes), *_judge_parts([each for pair in same for each in _iter_stages(pair)])]
    rows += [{"label": b.trial.label, "part": WHOLE, "verdict": OTHER_VIDEO} for a, b in pairs if (a, b) not in same]
    order = [b.trial.label for _, b in pairs]
    rows.sort(key=lambda row: order.index(row["label"]))
    return COMPARED.of(COLUMNS, rows, notes=tuple(_write_sentences(rows)), group=("label",), printed=printed(COLUMNS))


def _make_shot_key(one: VideoRun) -> tuple[int, ...]:
    """Return the facts that must be equal in two videos."""
    facts = one.typical.facts
    return facts.frames, facts.height, facts.width, facts.streams


def _iter_stages(pair: Pair) -> Iterator[tuple[Pair, str, list[float], list[float]]]:
    """Yield the times per frame of each stage that both pipelines have, by round."""
    a, b = ([{stage.name: stage.beside.value for stage in video.stages} for video in one.videos] for one in pair)
    for name in a[0]:
        if all(name in each for each in (*a, *b)):
            yield pair, name, [each[name] for each in a], [each[name] for each in b]


def _judge_parts(parts: Sequence[tuple[Pair, str, list[float], list[float]]]) -> list[Row]:
    """Return a row for each part, all judged as one family."""
    decided = stats.decide_family([stats.unpaired(b, a) for _, _, a, b in parts])
    return [
        {
            "label": pair[1].trial.label, "part": name, "a_ms": 1e3 * stats.center(a).value,
            "b_ms": 1e3 * stats.center(b).value, "ratio": 1 / speedup.value, "ratio_low": 1 / speedup.high,
            "ratio_high": 1 / speedup.low, "verdict": speedup.verdict, "rounds_a": len(a), "rounds_b": len(b),
        }
        for (pair, name, a, b), speedup in zip(parts, decided, strict=True)
    ]  # fmt: skip


def _write_sentences(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row["part"] == WHOLE and "ratio" in row:
            shown = ratio(row["ratio"], row["ratio_low"], row["ratio_high"])
            yield f"{plain(row['label'])} end to end: B takes {shown} A's time per frame: {row['verdict']}."
    yield "A stage's time is that in the pipeline. The gate's conditions are on inference alone."
