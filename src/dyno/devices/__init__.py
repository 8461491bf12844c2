"""Studies on several GPUs or hosts: where each trial runs, through processes, Ray or Slurm."""
