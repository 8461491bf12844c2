"""Sentences of the verdict about a run as a whole: its devices, its routes, its mixed precisions."""
