"""`gather`, `reduce` and `tour`: recipes, by every algorithm, against one device."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import SEEDS, any_of, covering
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import make_mesh, per_rank

import ringcoll
from ringcoll import (
    Move,
    Schedule,
    all_gather_map,
    gather,
    map_reduce_scatter,
    per_shard,
    reduce,
    tour,
)
from ringcoll.runtime import run as running

MESH = make_mesh(4)  # of one axis, x


def test_all_gather_map():
    x, w = np.arange(24.0).reshape(4, 2, 3), np.arange(6.0).reshape(3, 2)
    y = per_rank(MESH, lambda x: all_gather_map(lambda r: r @ w, x, "x", algorithm="ring"), x)
    np.testing.assert_array_equal(y, [x.reshape(8, 3) @ w] * 4)


def test_map_reduce_scatter():
    x, w = np.arange(96.0).reshape(4, 8, 3), np.arange(6.0).reshape(3, 2)
    y = per_rank(MESH, lambda x: map_reduce_scatter(lambda r: r @ w, x, "x", algorithm="ring"), x)
    np.testing.assert_array_equal(y, (x.sum(0) @ w).reshape(4, 2, 2))


def test_gather():
    def visit(total, arrived):  # which are added up, and which end up in the order of ranks
        return total + arrived.value.sum(), 10 * arrived.value

    x = np.arange(8.0).reshape(4, 2)
    total, y = per_rank(MESH, lambda x: gather(x, "x", visit, 0.0, algorithm="ring"), x)
    np.testing.assert_array_equal(total, [28] * 4)
    np.testing.assert_array_equal(y, [10 * np.arange(8)] * 4)


def test_reduce():
    x = np.arange(32.0).reshape(4, 8)  # each rank contributes two rows to each
    y = per_rank(MESH, lambda x: reduce(lambda w: 10 * w.take(x), "x", algorithm="ring"), x)
    np.testing.assert_array_equal(y, 10 * x.sum(0).reshape(4, 2))


def test_tour():
    def visit(total, arrived):  # what each rank adds to a shard comes home with it
        return total + arrived.value.sum(), arrived.value * (1 + lax.axis_index("x"))

    x = np.arange(8.0).reshape(4, 2)
    total, y = per_rank(MESH, lambda x: tour(x, "x", visit, 0.0, algorithm="ring"), x)
    np.testing.assert_array_equal(total, [28] * 4)
    np.testing.assert_array_equal(y, (1 + 2 + 3 + 4) * x)


F32, BF16 = jnp.float32, jnp.bfloat16
#: Recipes of few operations.
BRIEF = ("placed", "reduced")
#: Sizes of the mesh, axes, and groups. The exhaustive cases have all of them.
USUAL_RANKS = [
    *(((n,), "x", None) for n in (1, 3, 8)),
    *(((2, 3), ("y", "x"), None), ((8,), "x", ((0, 5, 2, 7), (6, 1, 3, 4)))),
]
RANKS = [
    *USUAL_RANKS,
    *(((n,), "x", None) for n in (2, 4, 5)),
    *(((2, 3), ("x", "y"), None), ((2, 3), "y", None)),
]


def backwards(*shape):
    """An algorithm of one's own: a ring in the other direction."""
    n = int(np.prod(shape))
    return Schedule(shape, tuple((Move(-1, (-t % n,)),) for t in range(n - 1)))


FACTORS = {
    "recipe": [
        *("placed", "mapped", "summed", "tree", "each", "reduced", "reduced map", "reduced tree"),
        *("toured", "toured tree"),
    ],
    "algorithm": [
        *("auto", "lax", "ring", "bidirectional_ring", "two_ended", "bruck", "direct"),
        backwards,
    ],
    "ranks": USUAL_RANKS,
    "dim": [0, 1, -1],
    "rows": [3, 4, 0],
    "transform": ["none", "eager", "remat", "vmap", "scan"],
    "check_vma": [True, False],
    "unrolled": [24, 1],
}
forbidden = any_of(
    [
        lambda ranks, check_vma: bool(ranks[2]) and check_vma,
        lambda ranks, algorithm: len(ranks[0]) > 1 and ranks[1] != "y" and algorithm is backwards,
        lambda rows, recipe: rows == 0 and recipe in ("summed", "each", "toured", "toured tree"),
        # JAX 0.10 cannot read an empty array that shard_map makes eagerly.
        lambda rows, transform: rows == 0 and transform == "eager",
        # Each operation is then a program by itself, so these are recipes of few, on few ranks.
        lambda ranks, transform: ranks[0] != (3,) and transform == "eager",
        lambda recipe, transform: recipe not in BRIEF and transform == "eager",
    ]
)


def times(x, w, dim):
    """A product along the dimension that is not cut."""
    return x @ w if dim == 0 else w.T @ x


def over_rows(x, w, dim):
    """A product along the dimension that is cut; w has as many rows."""
    return x.T @ w if dim == 0 else x @ w


def ours(recipe, axes, groups, dim, algorithm, x, w, weights):
    """The recipe on one rank. x: its shard, or its contributions to all; w: [4, 4]."""
    n = len(groups[0]) if groups else int(np.prod([lax.axis_size(a) for a in axes]))
    options = {"dim": dim, "algorithm": algorithm, "axis_index_groups": groups}

    def placed(_, arrived):
        return None, times(arrived.value, w, dim)

    def summed(y, arrived):
        return y + over_rows(arrived.value, arrived.take(weights, 0), dim), None

    def tree(carry, arrived):
        a, b = arrived.value["a"], arrived.value["b"]
        return carry, (a, times(b.astype(F32), w, dim))

    def each(y, arrived):
        y = y.at[arrived.origins[0]].add(arrived.value.sum())
        return y, times(arrived.value, w, dim)

    def produced(wanted):
        return times(wanted.take(x), w, dim)

    if recipe == "placed":
        return gather(x, axes, placed, None, **options)[1]
    if recipe == "mapped":
        return all_gather_map(lambda rows: times(rows, w, dim), x, axes, **options)
    if recipe == "summed":
        return gather(x, axes, summed, jnp.zeros((4, 4)), **options)[0]
    if recipe == "tree":
        pair = {"a": x, "b": x.astype(BF16)}
        return gather(pair, axes, tree, None, **options)[1]
    if recipe == "each":
        return gather(x, axes, per_shard(each), jnp.zeros(n), **options)

    def toured(found, arrived):
        results = []
        for part in arrived.parts():
            found = found.at[part.origins[0]].add(part.value.sum())
            results.append((1 + lax.axis_index(axes)) * times(part.value, w, dim))
        total = arrived.join(results)
        return found, total if recipe == "toured" else {"a": total, "b": arrived.value}

    if recipe.startswith("toured"):
        return tour(x, axes, toured, jnp.zeros(n), **options)
    if recipe == "reduced":
        return reduce(produced, axes, **options)
    if recipe == "reduced map":
        return map_reduce_scatter(lambda rows: times(rows, w, dim), x, axes, **options)

    def both(wanted):
        return wanted.join([{"a": produced(one), "b": one.take(x)} for one in wanted.parts()])

    return reduce(both, axes, **options)


def expected(recipe, team, own, axes_are_grouped, dim, xs, w, weights):
    """The same for the rank at place `own` of a team, from the operands of all ranks."""
    shards = [xs[member] for member in team]
    if recipe.startswith("reduced"):
        mine = [jnp.split(x, len(team), dim)[own] for x in shards]
        total = sum(times(x, w, dim) for x in mine)
        return {"a": total, "b": sum(mine)} if recipe == "reduced tree" else total
    if recipe.startswith("toured"):
        # Without groups, the number of a rank over the axes is its place in the team.
        numbers = team if axes_are_grouped else range(len(team))
        total = sum(1 + number for number in numbers) * times(shards[own], w, dim)
        sums = jnp.stack([x.sum() for x in shards])
        return sums, total if recipe == "toured" else {"a": total, "b": len(team) * shards[own]}
    every = jnp.concatenate(shards, dim)
    if recipe == "summed":
        return over_rows(every, weights, dim)
    if recipe == "each":
        return jnp.stack([x.sum() for x in shards]), times(every, w, dim)
    if recipe == "tree":
        return every, times(every.astype(BF16).astype(F32), w, dim)
    return times(every, w, dim)


def teams(shape, axes, groups):
    """For each device, the ranks that take part with it, in their order, and its place there."""
    if groups:
        return {r: (group, group.index(r)) for group in groups for r in group}
    names, at = "xy"[: len(shape)], np.arange(np.prod(shape)).reshape(shape)
    order = [names.index(axis) for axis in axes]
    found = {}
    for place in np.ndindex(*shape):
        index = tuple(slice(None) if i in order else p for i, p in enumerate(place))
        part = at[index]
        part = part if len(order) < 2 else part.transpose(order)
        team = part.reshape(-1).tolist()
        found[int(at[place])] = team, team.index(at[place])
    return found


TRANSFORMS = {
    "none": lambda f: f,
    "eager": lambda f: f,
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda x: jax.tree.map(lambda y: y[1], jax.vmap(f)(jnp.stack([2 * x, x]))),
    "scan": lambda f: lambda x: jax.tree.map(lambda y: y[1], lax.map(f, jnp.stack([2 * x, x]))),
}


def check(monkeypatch, recipe, algorithm, ranks, dim, rows, transform, check_vma, unrolled):
    """Values on all ranks, and gradients by x and w, are those of one device."""
    monkeypatch.setattr(running, "UNROLL_UP_TO", unrolled)
    shape, axes, groups = ranks
    count, rng = int(np.prod(shape)), np.random.default_rng(0)
    of = teams(shape, axes, groups)
    n = len(of[0][0])
    length = rows * n if recipe.startswith("reduced") else rows
    x_shape = (length, 4) if dim == 0 else (4, length)
    xs = rng.integers(-2, 3, (count, *x_shape)).astype(F32)
    w = rng.integers(-2, 3, (4, 4)).astype(F32)
    weights = rng.integers(-2, 3, (rows * n, 4)).astype(F32)
    mesh, spec = make_mesh(*shape), P(tuple("xy"[: len(shape)]))

    def one_rank(x, w, weights):
        run = partial(ours, recipe, tuple(axes), groups, dim, algorithm)
        y = TRANSFORMS[transform](lambda x: run(x, w, weights))(x[0])
        return jax.tree.map(lambda leaf: leaf[None], y)

    mapped = jax.shard_map(
        one_rank, mesh=mesh, in_specs=(spec, P(), P()), out_specs=spec, check_vma=check_vma
    )

    def on_one(xs, w, weights):
        of_ranks = [
            expected(recipe, *of[r], bool(groups), dim, xs, w, weights) for r in range(count)
        ]
        return jax.tree.map(lambda *ys: jnp.stack(ys), *of_ranks)

    def with_slopes(function, *operands):
        def loss(*operands):
            return sum((leaf**2).sum() for leaf in jax.tree.leaves(function(*operands)))

        # The gradient of a tree is rounded to bfloat16, in an order of its own. Those by arrays of
        # no elements are constants, with which JAX cannot lower some shard_maps.
        has_slopes = rows and recipe != "tree"
        slopes = jax.grad(loss, (0, 1, 2))(*operands) if has_slopes else ()
        return function(*operands), slopes

    if transform == "eager":
        found, wanted = mapped(xs, w, weights), on_one(xs, w, weights)
    else:
        found, wanted = (
            jax.jit(partial(with_slopes, function))(xs, w, weights) for function in (mapped, on_one)
        )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("part", range(4))
def test_recipes_are_those_of_one_device(part, seed, monkeypatch):
    factors = FACTORS | {"ranks": RANKS} if seed else FACTORS
    for case in covering(factors, forbidden, seed)[part::4]:
        try:
            check(monkeypatch, **case)
        except BaseException:
            print(case)
            raise


def mapped(function, **options):
    return jax.shard_map(function, mesh=make_mesh(8), in_specs=P("x"), out_specs=P("x"), **options)


def test_an_axis_of_a_vmap():
    copied = partial(all_gather_map, lambda rows: rows, axis_name="i", algorithm="ring")
    y = jax.vmap(copied, axis_name="i")(jnp.arange(8.0).reshape(4, 2))
    np.testing.assert_array_equal(y, np.tile(np.arange(8.0), (4, 1)))


def kept(carry, arrived):
    return carry, None


def test_beside_an_explicit_axis():
    """JAX cannot lower the built-in sum there."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), (AxisType.Auto, AxisType.Explicit))

    def both(x):
        mine = reduce(lambda wanted: 2 * wanted.take(x), "x")
        mine += ringcoll.psum_scatter(x, "x", tiled=True)
        mine += jax.grad(lambda x: ringcoll.all_gather(x, "x", tiled=True).sum())(mine)
        return mine + tour(mine, "x", lambda c, a: (c, a.value), 0)[1]

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(both, in_specs=P(), out_specs=P("x"), axis_names={"x"})
        np.testing.assert_array_equal(jax.jit(mapped)(jnp.arange(8.0)), 20 + 60 * np.arange(8.0))


@pytest.mark.parametrize("algorithm", ["lax", "ring", "direct"])
def test_a_carry_that_is_made_anew_and_a_visit_with_a_checkpoint(algorithm):
    """In a loop, the carry keeps its type."""

    def visit(carry, arrived):
        total = carry[1] + arrived.value.T @ arrived.take(jnp.ones((16, 2)))
        return (False, total), None

    def call(x):
        start = True, jnp.zeros((3, 2))
        found, _ = gather(np.ones((2, 3), np.float32), "x", visit, start, algorithm=algorithm)
        again, _ = gather(x, "x", jax.checkpoint(visit), start, algorithm=algorithm)
        return found[1] + again[1]

    y = jax.jit(mapped(call))(jnp.ones((16, 3)))
    np.testing.assert_array_equal(y, np.full((24, 2), 32.0))


class Pair(NamedTuple):
    own: jax.Array


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("spec", [P("y"), P("y", "x"), P(("y", "x"))])
def test_beside_an_explicit_axis_rows_keep_their_sharding(spec, check_vma):
    mesh = make_mesh(2, 3, axis_type=AxisType.Explicit)
    doubled = partial(all_gather_map, lambda rows: 2 * rows, axis_name="y", algorithm="ring")
    x = np.arange(36.0, dtype=F32).reshape(18, 2)
    options = {"in_specs": P("y"), "out_specs": P("y"), "check_vma": check_vma}
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(doubled, axis_names={"y"}, **options)
        found = jax.jit(mapped)(jax.device_put(x, spec))
        assert found.sharding.spec == P(*spec, *[None] * (2 - len(spec)))
    np.testing.assert_array_equal(found, 2 * np.tile(x, (3, 1)))


REFUSED = {
    "visit returns a carry of bfloat16[3], in place of float32[3]": (
        TypeError, lambda x: gather(x, "x", lambda c, a: (c.astype(BF16), None), jnp.zeros(3))
    ),
    "unbound axis name: y; the axes here are 'x'": (
        NameError, lambda x: gather(x, "y", kept, jnp.zeros(3))
    ),
    "x has no array": (TypeError, lambda x: gather((), "x", kept, jnp.zeros(3))),
    "x has 1 rows along dim, in place of 2": (
        ValueError, lambda x: gather((x, x[:1]), "x", kept, jnp.zeros(3))
    ),
    "dim: axis 2 is out of bounds": (ValueError, lambda x: gather(x, "x", kept, x, dim=2)),
    "what is returned has 1 rows along dim, in place of 2": (
        ValueError, lambda x: gather(x, "x", lambda c, a: (c, a.value[:1]), 0)
    ),
    "dimension 0 of float32[17,3] is no multiple of 8 x 2": (
        ValueError, lambda x: gather(x, "x", lambda c, a: (c, a.take(jnp.ones((17, 3)))), 0)
    ),
    "dimension 0 of float32[9,2] is no multiple of 8": (
        ValueError, lambda x: reduce(lambda wanted: wanted.take(jnp.ones((9, 2))), "x")
    ),
    "no algorithm 'rign'; did you mean 'ring'?": (
        ValueError, lambda x: gather(x, "x", kept, jnp.zeros(3), algorithm="rign")
    ),
    "visit returns a carry of ('float32[3]',), in place of Pair(": (
        TypeError, lambda x: gather(x, "x", lambda c, a: ((c.own,), None), Pair(jnp.zeros(3)))
    ),
    "what is produced is bool": (TypeError, lambda x: reduce(lambda wanted: x > 0, "x")),
    "what is produced has no array": (TypeError, lambda x: reduce(lambda wanted: None, "x")),
    "produce makes 5 rows where 40 are wanted": (
        ValueError, lambda x: reduce(lambda wanted: jnp.ones(5), "x")
    ),
    "produce makes 2 rows where 16 are wanted, and 2 where 2 are": (
        ValueError, lambda x: reduce(lambda wanted: x, "x", algorithm="ring")
    ),
    "work=1000.0; pass a ringcoll.costs.Work(flops)": (
        TypeError, lambda x: gather(x, "x", kept, jnp.zeros(3), algorithm="ring", work=1e3)
    ),
    "rows is not known before the result; take the numbers": (
        ValueError, lambda x: reduce(lambda wanted: x[: wanted.rows[0][1]], "x")
    ),
    "accumulate_dtype=float16 cannot hold every float32": (
        ValueError, lambda x: tour(x, "x", lambda c, a: (c, a.value), 0, accumulate_dtype="float16")
    ),
    "a Table is only for collectives": (
        ValueError, lambda x: gather(x, "x", kept, x, algorithm=ringcoll.Table())
    ),
    "axis_index_groups are of several sizes": (
        ValueError, lambda x: gather(x, "x", kept, x, axis_index_groups=[[0], [*range(1, 8)]])
    ),
    "must cover all indices exactly once": (
        ValueError, lambda x: gather(x, "x", kept, x, axis_index_groups=[[0, 1]])
    ),
    "visit returns a carry of float32[16,3], in place of float32[2,3]": (
        TypeError, lambda x: gather(x, "x", lambda c, a: (a.value, None), x, algorithm="lax")
    ),
    "float32[16,3] has no dimension 2": (
        ValueError, lambda x: gather(x, "x", lambda c, a: (a.take(jnp.ones((16, 3)), 2), 0), 0)
    ),
    "visit returns list, and no pair": (
        TypeError, lambda x: tour(x, "x", lambda c, a: [c, a.value], x)
    ),
    "ringcoll.tour(x, visit, carry, axis_name='x', dim=0): ": (  # JAX's words, behind the call
        TypeError, lambda x: tour(x, "x", lambda c, a: (c, "rows"), x)
    ),
    "what a visit makes is bool": (
        TypeError, lambda x: tour(x, "x", lambda c, a: (c, a.value > 0), x)
    ),
    "visit is a float, no function; pass a function": (
        TypeError, lambda x: gather(x, "x", 0.0, kept)
    ),
    "produce is a DynamicJaxprTracer, no function": (TypeError, lambda x: reduce(x, "x")),
    "0 results of 1 parts": (
        ValueError, lambda x: tour(x, "x", lambda c, a: (c, a.join([])), x, algorithm="ring")
    ),
    "1 rows along dimension 0, in place of 2": (
        ValueError,
        lambda x: gather(x, "x", lambda c, a: (c, a.join([p.value[:1] for p in a.parts()])), 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_mistakes_are_refused_in_words(words):
    kind, call = REFUSED[words]
    with pytest.raises(kind) as refused:
        jax.eval_shape(mapped(call), jnp.zeros((16, 3)))
    assert str(refused.value).startswith("ringcoll.")
    assert words in str(refused.value)
