"""`order=Tree(8)`: what is refused, and sums by XLA's default flags. For bits see `test_calls`."""

import numpy as np
import pytest
from support import make_mesh, per_rank, python

import ringcoll
from ringcoll import Tree


def test_leaves_are_added_in_pairs():
    x = np.array([[2**24], [1], [1], [1]], np.float32)  # 2**24 + 1 is 2**24
    options = {"order": Tree(4), "algorithm": "halving_doubling"}
    y = per_rank(make_mesh(4), lambda x: ringcoll.psum(x, "x", **options), x)
    np.testing.assert_array_equal(y, [[2**24 + 2]] * 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": "ring"}, "choose from auto, halving_doubling, one_shot, lax"),
        ({"order": Tree(4)}, "4 leaves are not divisible by 8 ranks"),
        ({"wire": "int8"}, "order=Tree.* with a wire: .*; leave order out, or the wire"),
        ({"order": "tree"}, r"order='tree' is not an order; pass ringcoll.Tree\(8\)"),
        ({"order": 8}, r"order=8 is not an order; pass ringcoll.Tree\(8\)"),
    ],
)
def test_refused(options, words):
    def total(x):
        return ringcoll.psum(x, "x", **{"order": Tree(), **options})

    kind = ValueError if isinstance(options.get("order", Tree()), Tree) else TypeError
    with pytest.raises(kind, match=words):
        per_rank(make_mesh(8), total, np.ones((8, 2), np.float32))


@pytest.mark.parametrize("leaves", [6, 0, -8, 8.0, "8"])
def test_leaves_that_are_not_a_power_of_two_are_refused(leaves):
    with pytest.raises(ValueError, match=r"leaves=.* is not a power of two; pass one, such as 8"):
        Tree(leaves)


DEFAULT_FLAGS = """
import os
os.environ["XLA_FLAGS"] = ""
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
import jax, jax.numpy as jnp, numpy as np, ringcoll
from jax.sharding import PartitionSpec as P
x, y = np.random.default_rng(0).standard_normal((2, 8, 999), np.float32)
seen = set()
for dtype, n in [(dtype, n) for dtype in ("float32", "bfloat16") for n in (1, 8)]:
    def total(x, y):
        p = x * y  # an addition must not be contracted with it
        while p.shape[0] > 1:
            p = jnp.where(jnp.isnan(p), 0, p)
            p = p[::2] + p[1::2]
        return ringcoll.psum(p[0], "x", order=ringcoll.Tree(), algorithm="halving_doubling")
    mesh = jax.make_mesh((n,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:n])
    f = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=P("x"), out_specs=P()))
    seen.add(np.asarray(f(x.astype(dtype), y.astype(dtype))).tobytes())
print("different:", len(seen))
"""


def test_products_are_rounded_by_default_flags():
    run = python("-c", DEFAULT_FLAGS)
    assert "different: 2\n" in run.stdout, run.stdout + run.stderr[-2000:]
