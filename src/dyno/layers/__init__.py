"""Inside a network: inspect, profile, explain, compare layer by layer, and cold starts."""
