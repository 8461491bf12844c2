"""The command line: each command is a call into the rooms below."""
