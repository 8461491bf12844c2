"""What a model is made of: its forms aligned with each other, their totals, and the tables of both."""
