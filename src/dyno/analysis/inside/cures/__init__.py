"""What may make an engine faster: which cause calls for it, and what came of trying it."""
