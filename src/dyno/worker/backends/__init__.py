"""One file or folder per backend, found by its name; a backend imports its library inside its methods."""
