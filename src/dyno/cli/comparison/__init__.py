"""`dyno compare` and `dyno bisect`."""
