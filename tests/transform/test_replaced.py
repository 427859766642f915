"""`ringcoll.replaced`: collectives of other people's code are ours, to the last bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import MAIN
from jax import lax
from jax.sharding import PartitionSpec as P
from sent import permutes
from support import assert_same, data, make_mesh, per_rank

import ringcoll
from ringcoll import debug
from ringcoll.choose.table import Table, TableRow

N = 3
RING = 2 * (N - 1)  # messages of an all-reduce


@pytest.mark.parametrize("algorithm", ["bruck", "lax"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_every_collective(algorithm, check_vma):
    """Forward and backward; each is found by its primitive."""
    n = 4
    # lax's own of the rest do not run on CPU; groups have no sum if types are checked.
    cases = [case for case in MAIN if case.name not in ("pbroadcast", "ragged_all_to_all")]
    operands = [data((n, *case.shape(n)), ranks=n) for case in cases]

    def calls(*xs):
        y = [case.by_lax(x, "x", n) for case, x in zip(cases, xs, strict=True)]
        gathered, pull_back = jax.vjp(lambda x: lax.all_gather(x, "x"), xs[0])
        return y, pull_back(gathered), lax.all_gather(xs[0], "x", axis=-1)

    def both(*xs):
        theirs, ours = calls(*xs), ringcoll.replaced(calls, algorithm=algorithm)(*xs)
        assert jax.tree.map(jax.typeof, theirs) == jax.tree.map(jax.typeof, ours)
        return theirs, ours

    theirs, ours = per_rank(make_mesh(n), both, *operands, check_vma=check_vma)
    assert_same(ours, theirs)
    found = jax.make_jaxpr(ringcoll.replaced(lambda *xs: per_rank(make_mesh(n), calls, *xs)))
    text = str(found(*operands)).replace("ringcoll_psum", "")
    assert "psum" not in text.replace("psum_scatter", "")


def test_options():
    x = np.array([[1], [256], [1]], jnp.bfloat16)  # the ring adds them up from the second
    for wide, sums in ((None, 256), ("float32", 258)):
        f = ringcoll.replaced(
            lambda x: (lax.psum(x, "x"), lax.pmax(x, "x")), algorithm="ring", accumulate_dtype=wide
        )
        total, greatest = per_rank(make_mesh(3), f, x)
        assert (float(total[0, 0]), float(greatest[1, 0])) == (sums, 256)

    def both(x):
        return lax.pmax(lax.pmean(x, "x"), "x")

    assert permutes(ringcoll.replaced(both)) == 0
    assert permutes(ringcoll.replaced(both, algorithm="ring", only="psum")) == RING
    assert permutes(ringcoll.replaced(both, algorithm="ring")) == 2 * RING
    table = Table((TableRow("psum", "*", "ring", ranks=(N, N + 1)),))
    assert (
        permutes(ringcoll.replaced(both, algorithm=table)) == 2 * RING
    )  # a row of psum is also pmax's
    shifted = lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True)  # noqa: E731
    assert permutes(ringcoll.replaced(shifted, algorithm="ring")) == 0  # there is none: "auto"


def test_a_program_of_lax_is_checked_by_all_algorithms():
    def f(x):
        return jnp.sin(lax.all_gather(lax.psum_scatter(x, "x", tiled=True), "x", tiled=True))

    mapped = jax.shard_map(f, mesh=make_mesh(N), in_specs=P("x"), out_specs=P("x"))
    x = data((N * N, 2))
    assert_same(debug.same_by_all(ringcoll.replaced(mapped))(x), jax.jit(mapped)(x))


ROWS, FEATURES = 4, 6  # of a rank


def features(n):
    """`[n rows, f]`: nothing is rounded. Half of the rows are their mean + 2, and half - 2."""
    random = np.random.default_rng(n)
    signs = np.repeat([-2.0, 2.0], n * ROWS // 2)
    columns = [mean + random.permutation(signs) for mean in range(FEATURES)]
    return np.stack(columns, 1).astype(np.float32)


@pytest.mark.parametrize(("n", "check_vma"), [(2, True), (4, False)])
def test_a_batch_norm_makes_the_same_by_ours(n, check_vma):
    linen = pytest.importorskip("flax.linen")
    x, weights = features(n), data((n * ROWS, FEATURES), ranks=n * ROWS)
    norm = linen.BatchNorm(False, momentum=0.5, epsilon=0.0, axis_name="x")
    statistics = {"mean": jnp.zeros(FEATURES), "var": jnp.ones(FEATURES)}

    def per_rank(x, weights):
        def loss(x, scale):
            parameters = {"scale": scale, "bias": scale + 1}
            variables = {"params": parameters, "batch_stats": statistics}
            y, changed = norm.apply(variables, x, mutable=["batch_stats"])
            return (y * weights).sum(), (y, changed)

        results = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, x[0])
        return jax.tree.map(lambda leaf: leaf[None], results)

    specs = {"in_specs": P("x"), "out_specs": P("x"), "check_vma": check_vma}
    mapped = jax.shard_map(per_rank, mesh=make_mesh(n), **specs)
    ours = jax.jit(ringcoll.replaced(mapped, algorithm="ring"))
    text = str(ours.trace(x, weights).jaxpr)
    assert "ringcoll_psum" in text
    assert "psum" not in text.replace("ringcoll_psum", "").replace("psum_invariant", "")
    assert_same(ours(x, weights), jax.jit(mapped)(x, weights))
