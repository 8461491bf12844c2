"""Layer errors: graphs with tensors marked as outputs, graphs cut around layers, and each layer's error."""
