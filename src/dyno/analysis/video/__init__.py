"""Video through a network: each stage alone and in the pipeline, what bounds the whole, and how many streams fit."""
