"""What frames are read from and written to: videos, images, cameras, raw frames, through PyAV or OpenCV."""
