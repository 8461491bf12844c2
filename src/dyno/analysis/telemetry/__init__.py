"""Telemetry of jobs: what they did to the device over time, the energy of an image, and memory by who counts it."""
