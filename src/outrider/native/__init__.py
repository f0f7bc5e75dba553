"""Kernels that are compiled on the user's machine, for its CPU, when a compiler is there; everything also works without them."""
