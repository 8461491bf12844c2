"""Layers for other tools: traces, graphs with times in them, notes on ONNX nodes, and the tree map of a page."""
