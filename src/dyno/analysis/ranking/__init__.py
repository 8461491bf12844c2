"""Which trials may be compared, whose outputs are correct, and which are best."""
