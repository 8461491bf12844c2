"""What a GPU and its host do while a model runs: whether one waits for the other, and what ends the run."""
