"""What bounds a video's way through a network: each stage alone and in the pipeline, two bounds, the limiting stage."""
