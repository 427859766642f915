"""The collectives of `jax.lax`, as they are when ringcoll is imported.

A program may replace them by ours (`jax.lax.psum = ringcoll.psum`). If we looked them up in
`jax.lax` at each call, ours would then call themselves.
"""

from jax.lax import (
    all_gather,
    all_to_all,
    pbroadcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    pshuffle,
    psum,
    psum_scatter,
    pswapaxes,
    ragged_all_to_all,
)

__all__ = [
    "all_gather",
    "all_to_all",
    "pbroadcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "ragged_all_to_all",
]
