"""A model's layers: the calls of a PyTorch module's parts, the nodes of an ONNX graph."""
