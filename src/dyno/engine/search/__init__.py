"""Searches: trials that a study adds by itself, because what was measured or made calls for them."""
