"""trtexec's logs and command lines beside Dyno's own measurement."""
