"""Matmuls and layers compiled for real machines, and the claims of the pages about them."""
