"""The collectives of `jax.lax`, as they are when ringcoll is imported.

`ringcoll.replacing(jax.lax)` puts ringcoll's in their place. If ringcoll looked them up in
`jax.lax` at each call, its functions would then call themselves.
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
