"""Requests to a network over time: arrivals, batches with a deadline, instances, and the highest sustained rate."""
