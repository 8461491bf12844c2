"""Stored records, read back: trials, rounds, arrays, and what the GPU did."""
