"""Code shared by sessions of several backends: GPU memory, streams, copies, PyTorch's settings."""
