"""Requests to a network as they come: latency by rate, queue against compute, and the highest rate that holds."""
