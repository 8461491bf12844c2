"""Decoding in processes: threads of one process can't keep more than about eight cores busy with it."""
