"""Results against earlier ones: compare, gate, bisect, self-test."""
