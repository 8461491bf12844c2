"""Looking inside: layers of models and engines, and their times, from Python."""
