"""What is compared: options, model sources, the expansion into trials, and refusals."""
