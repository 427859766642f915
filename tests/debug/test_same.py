"""`same_by_all`: what it runs, and that it finds a function that depends on the order of shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support import make_mesh

import ringcoll
from ringcoll.debug import same_by_all

X = np.arange(32, dtype=np.float32).reshape(16, 2)


def on_ranks(function, n=4):
    return jax.shard_map(function, mesh=make_mesh(n), in_specs=P("x"), out_specs=P("x"))


def product(x):
    return ringcoll.all_gather_map(lambda rows: rows @ jnp.ones((2, 3)), x, "x")


def in_order_of_arrival(x):
    def visit(seen, arrived):
        return seen + 1, arrived.value * seen

    return ringcoll.gather(x, "x", visit, 1.0)[1]


def wrong_gradient(x):
    @jax.custom_vjp
    def gathered(x):
        return ringcoll.all_gather(x, "x", tiled=True)

    def back(_, ct):
        both = ringcoll.reduce(lambda wanted: wanted.take(ct), "x")
        asked = ringcoll.all_gather(jnp.ones(2), "x").sum() * lax.axis_index("x")
        early = ringcoll.gather(ct, "x", lambda c, a: (c * 0 + a.value[0, 0], None), 0.0)[0]
        return (both + 0 * asked + early,)

    gathered.defvjp(lambda x: (gathered(x), None), back)
    return gathered(x)


def test_a_right_function_gives_the_result_by_the_built_ins():
    mapped = on_ranks(lambda both: {"a": product(both["a"]), "b": ringcoll.pmax(both["b"], "x")})
    both = {"a": X, "b": np.arange(4, dtype=np.int32)}
    scaled = lambda both, by: jax.tree.map(lambda x: x * by, mapped(both))  # noqa: E731
    found, expected = same_by_all(scaled)(both, by=2.0), jax.jit(scaled)(both, 2.0)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (in_order_of_arrival, "by 'ring', the result differs from that by 'lax'"),
        (wrong_gradient, "the gradient of array 0 of the operands differs"),
    ],
)
def test_what_depends_on_the_algorithm_is_named(function, words):
    with pytest.raises(AssertionError, match=words):
        same_by_all(on_ranks(function))(X)


def test_a_tolerance_and_no_gradients():
    almost = on_ranks(lambda x: 1e4 + 0 * in_order_of_arrival(x))
    checked = same_by_all(almost, gradients=False, tolerance=0.0)
    np.testing.assert_array_equal(checked(X), np.full((64, 2), 1e4))


def test_shard_map_says_which_out_specs_are_wrong():
    def same(x):
        return ringcoll.gather(x, "x", lambda c, a: (c + a.value.sum(), a.value), 0.0)

    mapped = jax.shard_map(same, mesh=make_mesh(4), in_specs=P("x"), out_specs=P())
    with pytest.raises(ValueError, match="out_specs is P"):
        same_by_all(mapped)(X)


def test_a_function_in_which_nothing_can_change_is_refused():
    fixed = on_ranks(lambda x: ringcoll.psum_scatter(x, "x", tiled=True, algorithm="ring"))
    with pytest.raises(ValueError, match="no call of the function can run by another algorithm"):
        same_by_all(fixed)(X)
    with pytest.raises(TypeError, match="no function that can be traced"):
        same_by_all(3)
