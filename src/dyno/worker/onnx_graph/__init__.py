"""Operations on an ONNX graph."""
