"""Costs read off a schedule: counts, routes, seconds, rounding. No JAX."""
