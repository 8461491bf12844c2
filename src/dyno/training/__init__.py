"""Train a classifier on your own images."""
