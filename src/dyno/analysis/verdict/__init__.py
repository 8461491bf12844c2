"""What the numbers say, in sentences."""
