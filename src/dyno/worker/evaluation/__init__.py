"""Every image once through a session: class scores and detections."""
