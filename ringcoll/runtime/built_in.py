"""The collectives of `jax.lax`, as they are when ringcoll is imported.

`ringcoll.replacing(jax.lax)` puts ringcoll's in their place. If ringcoll looked them up in
`jax.lax` at each call, its functions would then call themselves.
"""

from jax.lax import all_gather as all_gather
from jax.lax import all_to_all as all_to_all
from jax.lax import pbroadcast as pbroadcast
from jax.lax import pmax as pmax
from jax.lax import pmean as pmean
from jax.lax import pmin as pmin
from jax.lax import ppermute as ppermute
from jax.lax import pshuffle as pshuffle
from jax.lax import psum as psum
from jax.lax import psum_scatter as psum_scatter
from jax.lax import pswapaxes as pswapaxes
from jax.lax import ragged_all_to_all as ragged_all_to_all
