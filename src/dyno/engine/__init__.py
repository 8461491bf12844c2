"""Runs what was planned: files first, then rounds, into a run folder that grows."""
