"""Correctness and time of every collective, side by side with jax.lax: `python -m benchmarks`.

Not part of the installed package: run it from a checkout.
"""
