"""Evaluation of every image in a session: class scores and detections."""
