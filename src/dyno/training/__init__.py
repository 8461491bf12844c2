"""Train a classifier on one's own images."""
