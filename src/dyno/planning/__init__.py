"""From a study to trials: what the models are, which images, which backends, and what is refused."""
