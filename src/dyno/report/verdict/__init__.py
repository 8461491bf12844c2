"""Sentences on a run: who wins, by how much, and what to beware of."""
