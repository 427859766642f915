"""The collectives of `jax.lax`, as they are when ringcoll is imported.

A program may put ours in their place (`jax.lax.psum = ringcoll.psum`). If they were looked up
when they are called, ours would then call themselves.
"""

from jax.lax import (
    all_gather,
    all_to_all,
    pbroadcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    pswapaxes,
)

__all__ = [
    "all_gather",
    "all_to_all",
    "pbroadcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "pswapaxes",
]
