"""Layer errors: graphs with tensors marked as outputs and graphs cut around layers, and how far each layer is off."""
