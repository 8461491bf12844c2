"""Hosts of a cluster: Ray and Slurm."""
