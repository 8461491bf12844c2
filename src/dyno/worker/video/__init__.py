"""Video through a network: frames are read, prepared, answered, drawn and written in overlapping stages."""
