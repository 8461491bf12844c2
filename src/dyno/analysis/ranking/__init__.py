"""Which trials may be compared, which of them are right, and which are worth choosing."""
