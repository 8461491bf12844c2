"""Parts of the fault campaign; `benchmarks/faults.py` runs it."""
