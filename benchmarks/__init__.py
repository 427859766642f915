"""Check and time every collective, side by side with jax.lax: `python -m benchmarks`.

This is not part of the installed package: run it from a checkout.
"""

import time

#: The time at which this program began: importing the rest takes seconds.
START = time.perf_counter()
