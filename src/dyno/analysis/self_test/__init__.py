"""The self-test: what the instrument's own measurements of equal and of slowed-down processes say of this machine."""
