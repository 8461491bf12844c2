"""Notes that a study keeps beside its records: where blocks were measured, and which routes were tried."""
