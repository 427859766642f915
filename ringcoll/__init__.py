"""Collective algorithms for JAX, written by hand."""
