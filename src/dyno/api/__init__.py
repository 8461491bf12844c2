"""What Python users call, and the command line too: measure a study, read a result, evaluate, take."""
