"""A model's layers: the calls of a PyTorch module's parts, or the nodes of an ONNX graph."""
