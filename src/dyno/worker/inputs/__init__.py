"""A model's inputs: shapes, layouts, values, calibration images."""
