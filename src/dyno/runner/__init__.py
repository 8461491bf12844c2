"""The run of a plan: files first, then rounds in turns, into a run folder that grows."""
