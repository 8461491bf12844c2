"""What a model is made of, read: the calls of a PyTorch module's parts, the nodes of an ONNX graph."""
