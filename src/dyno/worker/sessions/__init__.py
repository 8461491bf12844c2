"""Code that sessions of several backends share: GPU memory, streams, copies, PyTorch's settings."""
