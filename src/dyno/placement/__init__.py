"""Placement: which block of a study is measured on which device; each block by the engine, in a separate process."""
