"""`dyno serve-test`: requests at given times to a model's engines, and the highest rate that holds a bound."""
