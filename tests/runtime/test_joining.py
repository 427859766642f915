"""Neighbouring all-reduces share their messages, and their results do not change."""

from threading import Thread

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P
from support import assert_same, crossed, data, every_rank, make_mesh, per_rank

import ringcoll
from ringcoll import lax
from ringcoll.debug import deadline
from ringcoll.runtime import joining

N = 4
MESH = make_mesh(N)
#: Of the ring.
HOPS = 2 * (N - 1)


def psum(x, axis="x", **options):
    return lax.psum(x, axis, **{"algorithm": "ring", **options})


def lowered(program, *operands, mesh=MESH, check_vma=True):
    return jax.jit(every_rank(mesh, program, check_vma)).lower(*operands).as_text()


def hops(program, *operands, **options):
    return lowered(program, *operands, **options).count("stablehlo.collective_permute")


def leaves(*sizes, dtype=jnp.float32, ranks=N):
    return [data((ranks, size), dtype, ranks) for size in sizes]


def check(program, *operands, permutes, mesh=MESH, check_vma=True):
    """The results are lax's on every rank, and so many permutes are sent."""

    def by(module):
        choose = lambda x, axis="x", **options: (  # noqa: E731
            module.psum(x, axis) if module is jax.lax else psum(x, axis, **options)
        )
        return lambda *xs: program(choose, *xs)

    assert hops(by(lax), *operands, mesh=mesh, check_vma=check_vma) == permutes
    ours, theirs = (
        per_rank(mesh, by(module), *operands, check_vma=check_vma) for module in (lax, jax.lax)
    )
    assert_same(ours, theirs)


@pytest.mark.parametrize("check_vma", [True, False])
def test_leaf_by_leaf_is_one_ring(check_vma):
    tree = {"a": leaves(5, 12, 1, 0), "b": leaves(7)[0]}
    program = lambda psum, t: jax.tree.map(psum, t)  # noqa: E731
    check(program, tree, permutes=HOPS, check_vma=check_vma)


@pytest.mark.parametrize(
    ("algorithm", "function"),
    crossed(
        ["ring", "recursive_doubling", "bidirectional_ring", "bruck"],
        ["psum", "pmean", "pmax", "pmin", "pbroadcast"],
    ),
)
def test_every_all_reduce_joins(function, algorithm):
    tree = leaves(5, 12, 3)
    source = (2,) if function == "pbroadcast" else ()
    ours = lambda x: getattr(lax, function)(x, "x", *source, algorithm=algorithm)  # noqa: E731
    assert hops(lambda t: jax.tree.map(ours, t), tree) == hops(ours, tree)
    each, at_once = (
        per_rank(MESH, program, tree, check_vma=True)
        for program in (lambda t: jax.tree.map(ours, t), ours)
    )
    assert_same(each, at_once)


def test_what_needs_a_result_moves_behind_the_joined_one():
    def program(psum, tree):
        return jax.tree.map(lambda x: jnp.exp2(psum(x) / N) + x, tree)

    check(program, leaves(5, 12, 3), permutes=HOPS)


def test_what_needs_a_result_is_not_joined_with_it():
    def chain(psum, x):
        for _ in range(3):
            x = psum(x)
        return x

    check(chain, leaves(5), permutes=3 * HOPS, check_vma=False)


def test_those_that_need_one_are_joined_with_each_other():
    def program(psum, a, b, c):
        total = psum(a)
        return total, psum(b * total), psum(c * total)

    check(program, *leaves(5, 5, 5), permutes=2 * HOPS)


def test_over_one_axis_and_then_the_other():
    mesh = make_mesh(2, 3)
    tree = [data((6, size), ranks=6) for size in (5, 12, 3)]
    program = lambda psum, t: jax.tree.map(lambda x: psum(psum(x, "x"), "y"), t)  # noqa: E731
    check(program, tree, permutes=2 + 4, mesh=mesh)


def test_of_each_dtype_axis_algorithm_and_option_by_itself():
    mesh = make_mesh(2, 3)

    def program(a, b):
        return [
            psum(a, "x"),
            psum(b, "x"),
            psum(a, "y"),
            psum(a, "x", algorithm="bidirectional_ring"),
            psum(b, "x", accumulate_dtype=jnp.float32),
            lax.pmax(a, "x", algorithm="ring"),
        ]

    a, b = data((6, 5), ranks=6), data((6, 5), jnp.bfloat16, 6)
    alone = [hops(lambda a, b, i=i: program(a, b)[i], a, b, mesh=mesh) for i in range(6)]
    assert hops(program, a, b, mesh=mesh) == sum(alone)
    assert hops(lambda a, b: [program(a, b), program(a, b)], a, b, mesh=mesh) == sum(alone)


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x @ x,
        lambda x: jax.lax.all_gather(x, "x").sum(0),
        lambda x: jax.lax.fori_loop(0, x.shape[0], lambda i, x: x * 0.5, x),
        lambda x: jax.lax.cond(x[0, 0] > 1, lambda x: x + 1, lambda x: x, x),
        jax.lax.optimization_barrier,
        lambda x: jnp.sort(x, 0),
    ],
)
def test_nothing_is_joined_across_work(between):
    def program(psum, a, b):
        total = psum(a)
        return total, between(a), psum(b)

    a, b = data((N, 5, 5)), data((N, 3))
    check(program, a, b, permutes=2 * HOPS)


def test_large_operands_are_not_joined():
    big = joining.JOIN_UP_TO // 4 + 1
    tree = [jax.ShapeDtypeStruct((N, size), jnp.float32) for size in (big, big, 5, 7)]
    assert hops(lambda t: jax.tree.map(psum, t), tree) == 3 * HOPS


def test_inside_of_loops_branches_and_functions():
    def both(psum, pair):
        return tuple(map(psum, pair))

    def program(psum, a, b):
        step = jax.jit(lambda pair: both(psum, pair))
        looped, _ = jax.lax.scan(lambda pair, _: (both(psum, pair), None), (a, b), length=2)
        chosen = jax.lax.cond(a.size > 1, lambda p: both(psum, p), lambda p: p, (a, b))
        return looped, chosen, step((a, b)), step((b, a)), jax.remat(step)((a, b))

    check(program, *leaves(5, 7), permutes=4 * HOPS, check_vma=False)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_are_those_of_lax(check_vma):
    def program(psum, tree):
        def loss(tree):
            return sum(
                (x * x).sum() for x in jax.tree.map(lambda x: psum(x * jnp.float32(2)), tree)
            )

        return jax.grad(loss)(tree)

    # The cotangent is summed only if its type does not say that all ranks have the same.
    check(program, leaves(5, 12), permutes=HOPS * (1 if check_vma else 2), check_vma=check_vma)


def test_a_batch_joins_too():
    program = lambda psum, t: jax.vmap(lambda t: jax.tree.map(psum, t))(t)  # noqa: E731
    check(program, [data((N, 3, size)) for size in (5, 2)], permutes=HOPS)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.complex64, jnp.bool_])
def test_every_dtype(dtype):
    program = lambda psum, t: jax.tree.map(psum, t)  # noqa: E731
    check(program, leaves(5, 12, dtype=dtype), permutes=HOPS)


def test_an_exported_program_is_whole():
    mapped = jax.shard_map(
        lambda t: jax.tree.map(psum, t), mesh=MESH, in_specs=P("x"), out_specs=P()
    )
    tree = leaves(5, 12)
    exported = export.deserialize(export.export(jax.jit(mapped))(tree).serialize())
    placed = jax.device_put(tree, jax.NamedSharding(MESH, P("x")))
    results = jax.tree.map(np.asarray, jax.jit(exported.call)(placed))
    assert_same(results, [x.sum(0, keepdims=True) for x in tree])


def test_of_several_platforms_nothing_waits():
    mapped = jax.shard_map(
        lambda t: jax.tree.map(psum, t), mesh=MESH, in_specs=P("x"), out_specs=P()
    )
    platforms = ["cpu", "tpu"]
    text = export.export(jax.jit(mapped), platforms=platforms)(leaves(5, 12)).mlir_module()
    assert text.count("stablehlo.collective_permute") == len(platforms) * 2 * HOPS


def test_a_watched_program_runs_call_by_call():
    with deadline(60):
        assert hops(lambda t: jax.tree.map(psum, t), leaves(5, 12)) == 2 * HOPS


def test_under_a_mesh_of_explicit_axes():
    mesh = make_mesh(N, axis_type=jax.sharding.AxisType.Explicit)
    with jax.set_mesh(mesh):
        tree = jax.device_put(leaves(5, 12), P("x"))
        assert hops(lambda t: jax.tree.map(psum, t), tree, mesh=mesh) == HOPS


def test_another_thread_lowers_a_program_meanwhile():
    def other():
        seen.append(hops(lambda t: jax.tree.map(psum, t), leaves(3, 4)))

    def rule(ctx, x):
        thread = Thread(target=other)
        thread.start()
        thread.join()
        return [x]

    seen: list[int] = []
    nested = Primitive("lowers_another")
    nested.def_abstract_eval(lambda x: x)
    mlir.register_lowering(nested, rule)
    program = lambda a, b: (psum(a), nested.bind(psum(b)))  # noqa: E731
    assert hops(program, *leaves(5, 7)) == HOPS
    assert seen == [HOPS]


def test_asking_by_context_joins_as_well():
    with ringcoll.algorithm("ring"):
        program = lambda t: jax.tree.map(lambda x: lax.psum(x, "x"), t)  # noqa: E731
        assert hops(program, leaves(5, 12)) == HOPS


def test_profiles_show_the_scope_and_the_line_of_the_first_call():
    def of_the_user(x):
        with jax.named_scope("mine"):
            return psum(x)

    program = lambda a, b: (of_the_user(a), psum(b))  # noqa: E731
    lowered = jax.jit(every_rank(MESH, program, True)).lower(*leaves(5, 7))
    assert "mine/ringcoll.psum(ring)/all_gather" in lowered.compile().as_text()
    assert "of_the_user" in lowered.as_text(debug_info=True)
