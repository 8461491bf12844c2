"""What a network is for: which data it is measured on, how its outputs lie, what is kept of them, and what it is worth."""
