"""Matmuls and layers as real compilers schedule them, and the claims of the pages."""
