"""Where a PyTorch module comes from (a library's name, MODULE:FUNCTION, FILE.py:FUNCTION, a saved file), and its weights."""
