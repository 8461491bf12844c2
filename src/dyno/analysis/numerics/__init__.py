"""Where two runtimes part, layer by layer: which call became which tensor, the table, and what it says in words."""
