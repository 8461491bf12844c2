"""Kinds of jobs: run a trial, alone or in turns, inspect a model, time its layers, test it for long, find the peak."""
