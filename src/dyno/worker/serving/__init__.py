"""Requests to a network as they come: arrivals, batches with a deadline, instances, and the highest rate that holds."""
