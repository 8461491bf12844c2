"""trtexec's numbers and Dyno's, in each other's terms."""
