"""Algorithms as data: moves, schedules and their proof, and the registry of algorithms. No JAX."""
