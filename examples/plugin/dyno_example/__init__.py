"""What Dyno can be given from outside, one of each; see docs/extending.md."""
