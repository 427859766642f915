"""Leaves that share messages, and leaves that differ in dims or types: each is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import assert_same, data, make_mesh, per_rank

from benchmarks.collectives.references import REFERENCES
from ringcoll import Table, algorithms, lax
from ringcoll.choose.table import TableRow

N = 4
MESH = make_mesh(N)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_leaf_that_is_not_differentiated_stays_so_beside_one_that_is(check_vma):
    def loss(module):
        def program(a, count):
            def one(a):
                total, ranks = module.psum((a.sum(), count), "x")
                return total / module.pmax(ranks, "x")  # a pmax has no derivative

            return jax.grad(one)(a)

        return per_rank(MESH, program, data((N, 3)), np.full(N, 2.0, "f4"), check_vma=check_vma)

    assert_same(loss(lax), loss(jax.lax))


@pytest.mark.parametrize(
    ("leaves", "permutes"),
    [([13], 0), ([13] * 3, 0), ([13] * 4, 6), ([13] * 4 + [2**16 + 1], 12)],  # the last: by itself
)
def test_a_table_chooses_by_the_bytes_of_all_that_are_joined(leaves, permutes):
    rows = (TableRow("psum", "*", "lax", bytes=(None, 200)), TableRow("psum", "*", "ring"))
    psum = lambda xs: lax.psum(xs, "x", algorithm=Table(rows))  # noqa: E731
    mapped = jax.shard_map(psum, mesh=MESH, in_specs=P("x"), out_specs=P())
    text = jax.jit(mapped).lower([jnp.zeros((4, size)) for size in leaves]).as_text()
    assert text.count("stablehlo.collective_permute") == permutes


@pytest.mark.parametrize("algorithm", ["auto", "recursive_doubling"])
def test_leaves_are_not_joined_where_the_compiler_would_gather_them(algorithm):
    """The compiler may shard a leaf over an axis that is left to it, but not joined leaves."""
    mesh = make_mesh(4, 2, axis_type=AxisType.Auto)
    sharded = NamedSharding(mesh, P("x", "y"))
    leaves = [jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=sharded)] * 2
    mapped = jax.shard_map(
        lambda a, b: lax.psum((a, b), "x", algorithm=algorithm),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P(),
        axis_names={"x"},
    )
    assert "all-gather" not in jax.jit(mapped).lower(*leaves).compile().as_text()


def test_a_wide_sum_is_wide_over_a_vmapped_axis_too():
    """256 + 1 is 256 in bfloat16."""
    x = jnp.array([256] + [1] * 8, jnp.bfloat16)
    wide = lambda v: lax.psum(v, "i", accumulate_dtype=jnp.float32)  # noqa: E731
    assert jax.vmap(wide, axis_name="i", out_axes=None)(x) == 264


def test_a_mean_does_not_overflow_where_its_sum_would():
    mean = lambda v: lax.pmean(v, "x", accumulate_dtype=jnp.float32, algorithm="ring")  # noqa: E731
    assert_same(
        per_rank(MESH, mean, np.full((N, 2), 60000, np.float16)), np.full((N, 2), 60000, np.float16)
    )


def test_an_algorithm_of_one_s_own_sees_every_axis():
    mesh = make_mesh(4, 1)
    seen = []

    def mine(p, q):
        seen.append((p, q))
        return algorithms.torus(p, q)

    gather = lambda v: lax.all_gather(v, ("x", "y"), algorithm=mine)  # noqa: E731
    x = data((4, 3))
    assert_same(per_rank(mesh, gather, x), np.broadcast_to(x, (4, 4, 3)))
    assert set(seen) == {(4, 1)}


def test_a_stage_may_have_several_axes():
    def stages(n):
        return algorithms.ring(2, 2), algorithms.ring(n // 4)

    x = data((8, 3))
    results = per_rank(make_mesh(8), lambda v: lax.psum(v, "x", algorithm=stages), x)
    assert_same(results, np.broadcast_to(x.sum(0), x.shape))


#: Those that count dimensions from the last one alone.
FROM_THE_LAST = [
    case
    for case in CASES
    if (dims := [v for key, v in case.options(N).items() if key.endswith(("axis", "dimension"))])
    and max(dims) < 0
]


@pytest.mark.parametrize("deepest_first", [True, False])
def test_dims_are_counted_on_every_leaf_by_itself(deepest_first):
    leaves = {str(case): [data((N, *case.shape(N)))] for case in FROM_THE_LAST}
    for case in FROM_THE_LAST:
        leaves[str(case)].append(data((N, 2, *case.shape(N))) + 1)
        leaves[str(case)].sort(key=np.ndim, reverse=deepest_first)

    def program(leaves):
        calls = {str(case): (getattr(lax, case.name), case.options(N)) for case in FROM_THE_LAST}
        return {name: call(leaves[name], "x", **options) for name, (call, options) in calls.items()}

    results = per_rank(MESH, program, leaves)
    for case in FROM_THE_LAST:
        expected = [REFERENCES[case.name](x, **case.options(N)) for x in leaves[str(case)]]
        assert_same({str(case): results[str(case)]}, {str(case): expected})
    assert {case.name for case in FROM_THE_LAST} == {
        *("all_gather", "psum_scatter", "all_to_all", "pswapaxes")
    }


def test_an_axis_by_position_is_left_to_lax():
    x = data((N, 3, 2))
    both = [
        per_rank(MESH, lambda v, f=f: f(v), x, check_vma=False)
        for f in (
            lambda v: lax.psum(v, (0, "x"), algorithm="ring"),
            lambda v: jax.lax.psum(v, (0, "x")),
        )
    ]
    assert_same(*both)


def test_a_schedule_is_not_run_on_fewer_axes_than_it_was_made_for():
    def over_both(algorithm):
        one = lambda w: lax.psum(w, ("i", "x"), algorithm=algorithm)  # noqa: E731
        return per_rank(
            make_mesh(2), jax.vmap(one, axis_name="i"), data((2, 4, 3)), check_vma=False
        )

    by_lax = over_both("lax")
    assert_same(over_both(algorithms.ring), by_lax)  # a function is asked again
    with pytest.raises(ValueError, match=r"only \('x',\) are axes of a mesh.*pass a name"):
        over_both(algorithms.ring(8))


def test_a_dimension_may_be_an_array_that_is_known():
    x, first = data((N, 2, 3)), jnp.int32(0)
    gather = lambda v, dim: lax.all_gather(v, "x", axis=dim, tiled=True)  # noqa: E731
    assert_same(
        per_rank(MESH, lambda v: gather(v, first), x), per_rank(MESH, lambda v: gather(v, 0), x)
    )


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_a_symbolic_shape_is_left_to_lax(algorithm):
    mesh = make_mesh(4)

    def mapped(f):
        call = lambda x: f(x, "x", algorithm=algorithm)  # noqa: E731
        return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x")))

    (rows,) = export.symbolic_shape("rows")
    sharding = NamedSharding(mesh, P("x"))
    operand = jax.ShapeDtypeStruct((4 * rows, 3), np.float32, sharding=sharding)
    x = jax.device_put(data((8, 3)), sharding)
    total = mapped(lax.psum)
    assert_same(jax.jit(export.export(total)(operand).call)(x), total(x))
    with pytest.raises(ValueError, match="Cannot lower"):
        export.export(mapped(lax.all_gather))(operand)
