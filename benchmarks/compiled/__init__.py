"""Matmuls and layers compiled for real machines, and the claims that the pages make about them."""
