"""What collective matmuls send, forward and backward, and what they never do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from operations import count, hops, parts_of
from support import make_mesh

import ringcoll
from ringcoll.runtime import run as running

N = 4


def gather(**options):
    call = lambda x, w: ringcoll.all_gather_matmul(x, w, "x", **options)  # noqa: E731
    return call, (P("x"), P(None, "x"))


def scatter(**options):
    call = lambda x, w: ringcoll.matmul_reduce_scatter(x, w, "x", **options)  # noqa: E731
    return call, (P(None, "x"), P("x"))


def before_barriers(jaxpr):
    """For each barrier of a program, in order: how many products and hops it comes after."""
    needed, found = {}, []
    for equation in jaxpr.eqns:
        mine = set().union(*(needed.get(id(x), ()) for x in equation.invars))
        if "dot_general" in f"{equation.primitive.name} {[*parts_of(equation)]}":
            mine |= {("product", id(equation))}
        if equation.primitive.name == "ringcoll_ppermute":
            mine |= {("hop", id(equation))}
        if equation.primitive.name == "optimization_barrier":
            kinds = [kind for kind, _ in mine]
            found.append((kinds.count("product"), kinds.count("hop")))
        needed.update((id(out), mine) for out in equation.outvars)
        found += [barrier for part in parts_of(equation) for barrier in before_barriers(part)]
    return found


@pytest.mark.parametrize(
    ("make", "shapes", "expected"),
    [
        # A shard is sent on when the shard before it is multiplied.
        (gather, ((2, 6), (6, 8)), [(1, 1), (2, 2), (3, 3)]),
        # The first product; the next one alone; its sum with the arrived one. Then, in a loop, each
        # turn's product alone, and its sum.
        (scatter, ((8, 2), (2, 6)), [(1, 0), (2, 0), (2, 1), (1, 0), (1, 1)]),
    ],
)
def test_a_compiler_must_keep_the_products_of_rounds_apart(make, shapes, expected):
    call, _ = make(algorithm="ring")
    traced = jax.make_jaxpr(call, axis_env=[("x", N)])(*map(np.ones, shapes))
    assert before_barriers(traced.jaxpr) == expected


@pytest.mark.parametrize("residuals", ["save", "regather"])
def test_products_that_are_added_up_are_a_loop_without_barriers(residuals):
    """With a barrier, or unrolled, a compiler copies their sum in every round."""
    call, _ = gather(algorithm="ring", dim=-1, residuals=residuals)
    traced = jax.make_jaxpr(call, axis_env=[("x", N)])(np.ones((5, 2)), np.ones((2 * N, 6)))
    assert count(traced.jaxpr, "optimization_barrier") == 0
    assert count(traced.jaxpr, "scan") == 1
    assert count(traced.jaxpr, "dot_general") == 2  # the loop's product, and the last one
    assert hops(traced.jaxpr) == N - 1


def test_a_long_ring_is_a_loop():
    def program(n):
        call, _ = gather(algorithm="ring")
        traced = jax.make_jaxpr(call, axis_env=[("x", n)])(np.ones((2, 3)), np.ones((3, 2)))
        return str(traced).count("\n")

    assert program(64) == program(256)


@pytest.mark.parametrize(("algorithm", "shards"), [("ring", 2), ("bidirectional_ring", 3)])
@pytest.mark.parametrize(("make", "out"), [(gather, P(None, "x")), (scatter, P("x"))])
def test_beside_operands_and_result_two_shards_are_held(make, out, algorithm, shards, monkeypatch):
    """A shard that is multiplied or summed, one on the wire, and what one round multiplies.

    A bidirectional ring also holds the two joined halves. This is so for loops. XLA:CPU knows no
    barriers, so if rounds are unrolled, it may multiply all shards before it sends any.
    """
    monkeypatch.setattr(running, "UNROLL_UP_TO", 0)  # a scatter is a loop in any case
    n, rows, k, f = 8, 64, 512, 128  # of one rank; what travels is [rows, k]
    shapes = ((n * rows, k), (k, n * f)) if make is gather else ((n * rows, n * f), (n * f, k))
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def held(**options):
        call, ins = make(**options)
        mapped = jax.shard_map(call, mesh=make_mesh(n), in_specs=ins, out_specs=out)
        compiled = jax.jit(mapped).lower(*operands).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert held(algorithm=algorithm) <= 4 * (shards * rows * k + rows * f) + 2**10
    assert held(algorithm="lax") >= 4 * n * rows * k


def test_a_buffer_stays_in_its_scan():
    """Outside, JAX would make it once, and each turn would copy it."""
    call, _ = gather(algorithm="ring")

    def loss(w, x):
        layer = jax.checkpoint(lambda x, w: (call(x, w).sum() * x, None))
        return jax.lax.scan(layer, x, w)[0].sum()

    traced = jax.make_jaxpr(jax.grad(loss), axis_env=[("x", N)])(
        np.ones((2, 6, 8)), np.ones((2, 6))
    )
    outside = [equation.primitive.name for equation in traced.jaxpr.eqns]
    assert outside.count("scan") == 2
    assert "ringcoll_empty" not in outside
    assert count(traced.jaxpr, "ringcoll_empty") > 0
