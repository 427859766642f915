"""Check and time every collective, side by side with jax.lax: `python -m benchmarks`.

This is not part of the installed package: run it from a checkout.
"""
