"""Charts of a run."""
