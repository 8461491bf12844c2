"""Jobs that look inside a model: its layers, their times, their errors, and what hardware counters say of them."""
