"""PyTorch modules and their weights: by a library's name, MODULE:FUNCTION, FILE.py:FUNCTION, or from a saved file."""
