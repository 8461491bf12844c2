"""`dyno video`: a video through a model's engines, and what bounds them."""
