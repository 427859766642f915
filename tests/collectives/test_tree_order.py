"""`order="tree"`: the bits of a sum do not depend on how many ranks share its leaves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import assert_same, make_mesh, python

import ringcoll

LEAVES = 8
DTYPES = ("float32", "bfloat16")
NORMAL = np.random.default_rng(0).standard_normal((LEAVES, 16, 3), np.float32)


def over(n, function, out, check_vma=True):
    mapped = jax.shard_map(
        function, mesh=make_mesh(n), in_specs=P("x"), out_specs=out, check_vma=check_vma
    )
    return jax.jit(mapped)


def of_rank(x):
    """The sum of a rank's own leaves, neighbours first."""
    while x.shape[0] > 1:
        x = x[::2] + x[1::2]
    return x[0]


def program(algorithm):
    """Sums of operands by dtype, and the specs of their results."""
    options = {"order": "tree", "leaves": LEAVES}
    scatter = {"halving_doubling": "recursive_doubling", "one_shot": "lax"}.get(
        algorithm, algorithm
    )

    def sums(x):
        own = of_rank(x)
        total = ringcoll.psum({"a": own, "b": -own[:3]}, "x", algorithm=algorithm, **options)
        mean = ringcoll.pmean(own, "x", algorithm=algorithm, **options) * jax.lax.axis_size("x")
        mine = ringcoll.psum_scatter(
            own, "x", scatter_dimension=-2, tiled=True, algorithm=scatter, **options
        )
        return total, mean, mine

    specs = dict.fromkeys(DTYPES, (P(), P(), P("x")))
    return lambda xs: {dtype: sums(x) for dtype, x in xs.items()}, specs


@pytest.mark.parametrize("algorithm", ["auto", "lax", "halving_doubling", "one_shot"])
def test_as_one_rank(algorithm):
    function, out = program(algorithm)
    xs = {dtype: np.asarray(jnp.asarray(NORMAL, dtype)) for dtype in DTYPES}
    expected = None
    for n, check_vma in ((1, True), (2, False), (4, True), (8, algorithm in ("lax", "one_shot"))):
        got = over(n, function, out, check_vma)(xs)
        expected = expected or got
        assert_same(got, expected)
    by_chain = functools.reduce(np.add, NORMAL)
    assert (np.asarray(got["float32"][0]["a"]) != by_chain).any()


def test_gradient_of_a_gather():
    def gradient(x, weights):
        def loss(x):
            gathered = ringcoll.all_gather(x, "x", tiled=True, order="tree", leaves=LEAVES)
            return (gathered * of_rank(weights)).sum()

        return jax.grad(loss)(x)

    x, expected = jnp.zeros(16), None
    for n in (1, 2, 4, 8):
        mapped = jax.shard_map(
            gradient, mesh=make_mesh(n), in_specs=(P("x"), P("x")), out_specs=P("x")
        )
        got = jax.jit(mapped)(x, jnp.asarray(NORMAL[:, :, 0]))
        expected = got if expected is None else expected
        assert_same(got, expected)


def test_axis_of_a_vmap():
    x = jnp.asarray(NORMAL)
    total = jax.vmap(lambda x: ringcoll.psum(x, "v", order="tree"), axis_name="v")(x)
    mine = jax.vmap(
        lambda x: ringcoll.psum_scatter(x, "v", tiled=True, order="tree"), axis_name="v"
    )
    assert_same(total[0], of_rank(x))
    assert_same(mine(x).reshape(16, 3), of_rank(x))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": "ring"}, "choose from auto, halving_doubling, one_shot, lax"),
        ({"leaves": 4}, "leaves=4 are not divisible by 8 ranks"),
        ({"leaves": 6}, "leaves=6 is not a power of two"),
        ({"wire": "int8"}, "order='tree' with a wire: .*; leave order out, or the wire"),
        ({"order": "ring"}, "order='ring'; choose from None, 'tree'"),
    ],
)
def test_refused(options, words):
    def total(x):
        return ringcoll.psum(x, "x", **{"order": "tree", **options})

    with pytest.raises(ValueError, match=words):
        over(8, total, P())(jnp.asarray(NORMAL))


def test_leaves_may_be_an_integer_of_numpy():
    x = jnp.asarray(NORMAL)
    by = lambda leaves: over(8, lambda x: ringcoll.psum(x, "x", order="tree", leaves=leaves), P())  # noqa: E731
    assert_same(by(np.int64(8))(x), by(8)(x))


DEFAULT_FLAGS = """
import os
os.environ["XLA_FLAGS"] = ""
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
import jax, jax.numpy as jnp, numpy as np, ringcoll
from jax.sharding import PartitionSpec as P
x, y = np.random.default_rng(0).standard_normal((2, 8, 999), np.float32)
seen = set()
for n in (1, 2, 4, 8):
    def total(x, y):
        p = x * y  # an addition must not be contracted with it
        while p.shape[0] > 1:
            p = jnp.where(jnp.isnan(p), 0, p)
            p = p[::2] + p[1::2]
        return ringcoll.psum(p[0], "x", order="tree", algorithm="halving_doubling")
    mesh = jax.make_mesh((n,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:n])
    f = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=P("x"), out_specs=P()))
    seen.add(np.asarray(f(x, y)).tobytes())
print("different:", len(seen))
"""


def test_products_are_rounded_by_default_flags():
    run = python("-c", DEFAULT_FLAGS)
    assert "different: 1\n" in run.stdout, run.stdout + run.stderr[-2000:]
