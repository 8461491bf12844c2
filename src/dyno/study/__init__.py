"""Studies: options, model sources, the expansion into trials, and refusals."""
