"""What a comparison may fail on, and the smallest slow-down that it would have caught."""
