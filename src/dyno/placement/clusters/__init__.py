"""Clusters: places on other hosts, of Ray or of Slurm, and how a block is begun there and followed from here."""
