"""Detection in videos: the session, its figures, tables and sentences."""
