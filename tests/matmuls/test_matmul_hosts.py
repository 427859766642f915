"""What "auto" is for a matmul between hosts on CPU."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from ringcoll.matmuls import auto_hosts
from ringcoll.matmuls.labels import Gather, Product, Scatter


def between(m, k, f, n=4, dtype=np.float32, jax="0.12.0"):
    """The choices for rows(...) and summed(...) between hosts on CPU."""
    kind = np.dtype(dtype)
    x, w, columns, part = (
        SimpleNamespace(shape=shape, size=int(np.prod(shape)), dtype=kind)
        for shape in ((m // n, k), (k, f), (m, k // n), (k // n, f))
    )
    gather = Gather("m", "mk", (Product("kf", "mf", kind),))
    scatter = Scatter("m", "mf", (("mk", "kf"),), kind)
    return (
        auto_hosts.to_gather(gather, x, [w], n),
        auto_hosts.to_scatter(scatter, [(columns, part)], n, jax),
    )


def test_between_hosts_the_ring_is_taken_where_it_hides_more_than_its_messages_cost():
    assert between(1024, 1024, 16384) == ("ring", "ring")
    assert between(128, 128, 128) == ("lax", "lax")
    # Little work and many bytes: the built-in gather sends as much as the ring. The
    # built-in sum sends twice that.
    assert between(8192, 8192, 8) == ("lax", "ring")
    assert between(8192, 8, 8192) == ("ring", "ring")


def test_between_hosts_narrow_floats_are_sent_wide_by_the_built_in():
    assert between(8192, 8192, 8, dtype=np.float16)[0] == "ring"
    assert between(8192, 8192, 8, dtype=jnp.bfloat16)[0] == "ring"
    assert between(8192, 8192, 8, dtype=np.int16)[0] == "lax"


def test_between_two_hosts_the_built_in_gathers_unless_it_sends_wide():
    assert between(1024, 1024, 16384, n=2)[0] == "lax"
    assert between(1024, 1024, 16384, n=2, dtype=jnp.bfloat16)[0] == "ring"


def test_between_two_hosts_a_hop_is_a_swap_that_takes_twice_its_bytes():
    assert between(4096, 16, 4096, n=3)[1] == "ring"
    assert between(4096, 16, 4096, n=2)[1] == "lax"


def test_where_the_built_in_sum_is_sometimes_wrong_it_is_not_taken():
    assert between(256, 64, 64, jax="0.10.2") == ("lax", "ring")
