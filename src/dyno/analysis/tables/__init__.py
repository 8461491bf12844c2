"""Tables of a run or of two, and how they are printed."""
