"""Kinds of jobs: run a trial (alone or interleaved), inspect a model, profile layers, stress-test, find the peak."""
