"""Algorithms as data: moves, schedules, their proof, and the registry. Nothing here imports JAX."""
