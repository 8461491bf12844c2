"""Darknet's networks: the architecture from a .cfg, the weights from a .weights, as a PyTorch module."""
