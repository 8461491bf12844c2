"""Layer errors in words and tables: which call of a module became which tensor, the tables, and the sentences."""
