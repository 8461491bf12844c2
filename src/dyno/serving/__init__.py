"""Engines under requests: the session, its figures, tables and sentences."""
