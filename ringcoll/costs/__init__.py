"""What a schedule costs: counts, routes, seconds and rounding. No JAX."""
