"""`order="tree"`: the bits of products do not depend on how many ranks share them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import assert_same, make_mesh, mostly_exhaustive

import ringcoll

TREE = {"order": "tree", "leaves": 8}
RNG = np.random.default_rng(0)
X, UP, DOWN = (RNG.standard_normal(s, np.float32) for s in ((16, 24), (24, 64), (64, 24)))
HIDDEN = RNG.standard_normal((16, 64), np.float32)


def columns_then_rows(options):
    def layer(x, up, down):
        hidden = ringcoll.all_gather_matmul(x, {"up": up}, "x", **options)["up"]
        return ringcoll.matmul_reduce_scatter(hidden, down, "x", **options)

    return layer, (P("x"), P(None, "x"), P("x")), P("x"), (X, UP, DOWN)


def all_reduce(options):
    fused = options["algorithm"] != "halving_doubling"

    def layer(x, w):
        return ringcoll.matmul_all_reduce(x, w, "x", fused=fused, **options)

    return layer, (P(None, "x"), P("x")), P(), (HIDDEN, DOWN)


def sharded(options):
    specs = P(None, "x"), P("x"), P("x")

    def layer(x, w):
        return ringcoll.sharded_matmul(x, w, *specs, **options)

    return layer, specs[:2], specs[2], (HIDDEN, DOWN)


@pytest.mark.parametrize(
    ("form", "algorithm", "dtype", "wide"),
    mostly_exhaustive(
        [
            (columns_then_rows, "auto", jnp.float32, None),
            (columns_then_rows, "recursive_doubling", jnp.bfloat16, jnp.float32),
            (all_reduce, "auto", jnp.bfloat16, None),
            (all_reduce, "halving_doubling", jnp.float32, None),
            (all_reduce, "halving_doubling", jnp.bfloat16, jnp.float32),
            (sharded, "auto", jnp.float32, None),
        ],
        lambda form, *_: form is sharded,
    ),
)
def test_as_one_rank(form, algorithm, dtype, wide):
    options = {"algorithm": algorithm, "accumulate_dtype": wide, **TREE}
    layer, in_specs, out, operands = form(options)
    operands, expected = [jnp.asarray(x).astype(dtype) for x in operands], None
    for n, check_vma in ((1, True), (2, False), (4, True), (8, True)):
        mapped = jax.shard_map(
            layer, mesh=make_mesh(n), in_specs=in_specs, out_specs=out, check_vma=check_vma
        )

        def run(*operands, mapped=mapped):
            y, pull_back = jax.vjp(mapped, *operands)
            return y, pull_back(jnp.cos(y))

        got = jax.jit(run)(*operands)
        expected = expected or got
        assert_same(got, expected)
    exact = np.float64(operands[-2]) @ np.float64(operands[-1]) if len(operands) == 2 else None
    if exact is not None:
        assert np.abs(np.float64(got[0]) - exact).max() < 0.1 * np.abs(exact).max()


def test_refused():
    def product(x, w):
        return ringcoll.matmul_reduce_scatter(x, w, "x", **TREE)

    mapped = jax.shard_map(
        product, mesh=make_mesh(2), in_specs=(P(None, "x"), P("x")), out_specs=P("x")
    )
    with pytest.raises(ValueError, match=r"of size 6 on each rank .* 4 leaves of a rank"):
        mapped(jnp.ones((4, 12)), jnp.ones((12, 4)))
    x = jnp.ones((2, 2))
    with pytest.raises(ValueError, match="order='tree', and ranks add nothing here; leave it out"):
        ringcoll.sharded_matmul(x, x, P(), P(), P(), **TREE)


@pytest.mark.parametrize("fused", [True, False])
def test_integers_are_not_widened_to_floats(fused):
    x, w = jnp.full((2, 4), 2**12 + 1), jnp.full((4, 2), 2**13 + 3)
    options = {"fused": fused, "order": "tree", "leaves": 2, "accumulate_dtype": jnp.float32}
    summed = jax.shard_map(
        lambda x, w: ringcoll.matmul_all_reduce(x, w, "x", **options),
        mesh=make_mesh(2),
        in_specs=(P(None, "x"), P("x")),
        out_specs=P(),
    )
    np.testing.assert_array_equal(jax.jit(summed)(x, w), x @ w)
