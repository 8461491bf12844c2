"""A run as one file: write it, check its verdict by its samples, and repeat it elsewhere."""
