"""What a model is fed: shapes, layouts, values, calibration images."""
