"""Images that were normalised by a guess, since a file doesn't say how its network was trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dyno.analysis.records.results import Results, TrialResult
from dyno.analysis.verdict.findings import WARNING, Finding


def findings(results: Results) -> Iterator[Finding]:
    """Yield a warning for each model whose images were normalised by a guess."""
    sentences = dict.fromkeys(f"{t.given}: {text}" for t in results if t.good and (text := guessed(t, results)))
    yield from (Finding(WARNING, sentence) for sentence in sentences)


def guessed(t: TrialResult, results: Results) -> str:
    """Describe the guessed normalisation of the trial's images, and how to give another; "" where it isn't a guess."""
    if not results.models.get((t.given, t.size), {}).get("preprocess_guessed"):
        return ""
    mean, std = (t.spec["model"]["preprocess"][name] for name in ("mean", "std"))
    none, one, byte = (_join_values([value] * len(mean)) for value in (0, 1, 0.003922))
    return (
        f"images were normalised by mean {_join_values(mean)} and std {_join_values(std)}, as the file doesn't say "
        "by what; where the network was trained otherwise, its answers are wrong: "
        f"give --mean and --std ({none} and {one} for pixels in 0..1, {none} and {byte} for pixels in 0..255)."
    )


def _join_values(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)
