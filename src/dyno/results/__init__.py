"""Results of a run: loaded once, and what follows from them: metrics, statistics, rankings, decisions."""
