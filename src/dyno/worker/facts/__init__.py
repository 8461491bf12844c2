"""Facts of an engine, a file and a job: small frozen records by subject, stored as JSON."""
