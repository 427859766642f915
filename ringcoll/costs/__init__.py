"""What a schedule costs: counts, routes, seconds and rounding. Nothing here imports JAX."""
