"""Where a PyTorch module comes from, and its weights."""
