"""Every image once through a session: answers and detections."""
