"""Under vmap, pmap, scan, cond, checkpoint and jit, on explicit and automatic axes: as lax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, LINEAR, MAIN, TRACED, first_algorithm, operand
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import assert_same, data, make_mesh, mostly_exhaustive, per_rank

import ringcoll.lax

PERMUTES = ("ppermute", "pshuffle")
REPLICATING = [case for case in MAIN if case.name in ("psum", "pmean", "pmax", "pmin")]


def ours_and_theirs(case, axes, n):
    """Our call and lax's, as functions of the operand alone."""
    (extra,) = first_algorithm(case, n)

    def theirs(x):
        if case.name != "pbroadcast":  # which lax cannot compile here
            return case.by_lax(x, axes, n)
        return lax.all_gather(x[None], axes, tiled=True)[case.options(n)["source"]]

    return lambda x: case.ours(ringcoll.lax, x, axes, n, **extra), theirs


@pytest.mark.parametrize("case", REPLICATING, ids=str)
def test_vmap_of_some_leaves(case):
    """The result of a leaf that is not mapped is not mapped, so `out_axes=None` takes it."""

    def program(x):
        def mapped(function):
            both = jax.vmap(function, ((0, None),), (0, None))
            return both((jnp.stack([x, 2 * x]), x))

        ours, theirs = ours_and_theirs(case, "x", 3)
        return mapped(ours), mapped(theirs)

    assert_same(*per_rank(make_mesh(3), program, operand(case, make_mesh(3), 3)))


@pytest.mark.parametrize("case", [*REPLICATING, MAIN[0]], ids=str)
def test_results_over_a_vmapped_axis_are_not_mapped(case):
    x = data((3, *case.shape(3)))
    ours, theirs = (
        jax.vmap(function, axis_name="v", out_axes=None)(x)
        for function in ours_and_theirs(case, "v", 3)
    )
    assert_same(ours, theirs)


def test_permuting_over_vmapped_and_mesh_axes_is_refused():
    """lax permutes in the order of the mesh, whatever order the call names."""

    def program(x):
        return jax.vmap(lambda x: ringcoll.lax.ppermute(x, ("v", "x"), [(0, 1)]), axis_name="v")(x)

    with pytest.raises(NotImplementedError, match="'v' is the axis of a vmap; permute one axis"):
        per_rank(make_mesh(2), program, data((2, 3)), check_vma=False)


def scatter_by_psum(scatter_dimension, tiled):
    """lax's own psum_scatter cannot be compiled if the mesh has explicit axes."""

    def scatter(x):
        total = lax.psum(x, "x")
        if not tiled:
            return lax.dynamic_index_in_dim(total, lax.axis_index("x"), scatter_dimension, False)
        size = x.shape[scatter_dimension] // 2
        return lax.dynamic_slice_in_dim(total, lax.axis_index("x") * size, size, scatter_dimension)

    return scatter


def untouched_dimensions(case):
    """The dimensions that y can shard: the call does not split, add to or create them.

    lax itself is wrong about explicit shardings if a call is not tiled.
    """
    options = case.options(2)
    if not options.get("tiled", case.name not in ("all_gather", "pswapaxes")):
        return []
    ndim = len(case.shape(2))
    named = {
        options[key] % ndim for key in options if key in ("axis", "scatter_dimension", "split_axis")
    }
    even = [dim for dim, size in enumerate(case.shape(2)) if size % 2 == 0]
    return [None, *(dim for dim in even if dim not in named)]


@pytest.mark.parametrize("check_vma", mostly_exhaustive([True, False], lambda check_vma: check_vma))
def test_explicit_axes(check_vma):
    """Every case over x, on operands of which an explicit y shards one dimension after another."""
    mesh = make_mesh(2, 2, axis_type=AxisType.Explicit)
    cases = [*LINEAR.values(), *REPLICATING]
    placed = [(case, dim) for case in cases for dim in untouched_dimensions(case)]

    def put(case, dim):
        x = operand(case, make_mesh(2), 2)
        spec = ["y" if d == dim else None for d in range(x.ndim - 1)]
        return jax.device_put(x, NamedSharding(mesh, P("x", *spec)))

    def program(*operands):
        pairs = []
        for (case, _), x in zip(placed, operands, strict=True):
            ours, theirs = ours_and_theirs(case, "x", 2)
            if case.name == "psum_scatter":
                theirs = scatter_by_psum(**(case.canonical or case.options)(2))
            pairs.append((ours(x[0])[None], theirs(x[0])[None]))
        return pairs

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            program, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=check_vma
        )
        results = jax.jit(mapped)(*(put(case, dim) for case, dim in placed))
    for (case, dim), (ours, theirs) in zip(placed, results, strict=True):
        np.testing.assert_array_equal(ours, theirs, f"{case} {dim}")
        assert ours.sharding == theirs.sharding, f"{case} {dim}"


@pytest.mark.parametrize("check_vma", [True, False])
def test_an_explicitly_sharded_dimension_is_split_into_blocks_that_do_not_divide(check_vma):
    mesh = make_mesh(2, 2, axis_type=AxisType.Explicit)
    x = jax.device_put(data((12, 4)), NamedSharding(mesh, P(("x", "y"))))  # blocks of 3 on 2

    def by(library, **options):
        exchange = lambda v: library.all_to_all(v, "x", 0, 0, tiled=True, **options)  # noqa: E731
        mapped = jax.shard_map(
            exchange, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=check_vma
        )
        with jax.set_mesh(mesh):
            return jax.jit(mapped)(x)

    ours, theirs = by(ringcoll.lax, algorithm="pairwise"), by(lax)
    np.testing.assert_array_equal(ours, theirs)
    assert ours.sharding == theirs.sharding


@pytest.mark.parametrize("name", ["psum", "pmean", "pmax", "pmin"])
def test_python_scalars_in_a_program_that_is_run_under_vmap(name):
    """They reach the primitive as Python scalars, which have no shape."""

    def of_all(module):
        reduce = jax.custom_jvp(lambda x: getattr(module, name)(x, "batch"))
        reduce.defjvp(lambda primals, tangents: (reduce(*primals), *tangents))

        def one(_, x):
            return jaxpr_as_fun(jax.make_jaxpr(reduce)(x))(x)[0]

        mapped = jax.vmap(one, axis_name="batch", in_axes=(0, None), out_axes=None)
        return jnp.asarray(mapped(jnp.arange(4.0), 2.0))

    assert_same(of_all(ringcoll.lax), of_all(lax))


def test_constants_over_a_vmapped_axis():
    """Results have lax's weak types too: that of a Python number does not widen a bfloat16."""
    cases = [case for case in CASES if case.shape(3) == ()]
    cases += [case for case in MAIN if case.name in (*PERMUTES, "pbroadcast")]

    def program(traced):
        def of_all(call):
            return {
                f"{case} of {type(x)}": jax.vmap(lambda _: call(case, x), axis_name="v")(batch)  # noqa: B023
                for case in cases
                for x in (3, 0.1, True, np.float32(0.1), np.int8(3), traced)
            }

        batch = jnp.arange(3)
        return (
            of_all(lambda case, x: case.ours(ringcoll.lax, x, "v", 3)),
            of_all(lambda case, x: case.by_lax(x, "v", 3)),
        )

    ours, theirs = jax.jit(program)(0.1)
    assert_same(ours, theirs)
    assert jax.tree.map(jax.typeof, ours) == jax.tree.map(jax.typeof, theirs)


def test_every_source_that_is_traced():
    """By every algorithm, under vmap and scan. A source that is not a rank gives zeros."""
    n = 3
    sources = np.arange(-n - 1, n + 1)

    def program(x):
        def by(**extra):
            send = lambda source: ringcoll.lax.pbroadcast(x, "x", source, **extra)  # noqa: E731
            return jax.vmap(send)(sources), lax.map(send, sources)

        return {str(extra): by(**extra) for extra in ({}, *TRACED.algorithms(n))}

    x = data((n, 3))
    expected = np.concatenate([0 * x[:1], x, x, 0 * x[:1]])
    for name, results in per_rank(make_mesh(n), program, x, check_vma=False).items():
        for result in results:
            np.testing.assert_array_equal(result, np.stack([expected] * n), name)
