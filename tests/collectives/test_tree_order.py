"""`order=Tree(8)`: the bits of a sum do not depend on how many ranks share its leaves."""

from functools import reduce
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import SEEDS, covering
from support import assert_same, make_mesh, per_rank, python

import ringcoll
from ringcoll import Tree

LEAVES = 8
NORMAL = np.random.default_rng(0).standard_normal((LEAVES, 16, 4), np.float32)
#: The mesh, the axes, the groups, and the devices of each group in the order of its ranks.
PLACES = {
    "one rank": ((1,), "x", None, [[0]]),
    "two": ((2,), "x", None, [[0, 1]]),
    "four": ((4,), "x", None, [[0, 1, 2, 3]]),
    "xy": ((2, 2), ("x", "y"), None, [[0, 1, 2, 3]]),
    "yx": ((2, 2), ("y", "x"), None, [[0, 2, 1, 3]]),
    "eight": ((8,), "x", None, [[*range(8)]]),
    "groups": ((8,), "x", ((3, 0, 5, 6), (2, 7, 4, 1)), [[3, 0, 5, 6], [2, 7, 4, 1]]),
}
FACTORS = {
    "function": ["psum", "pmean", "psum_scatter", "gradient of all_gather"],
    "algorithm": ["auto", "lax", "halving_doubling", "one_shot"],
    "dtype": ["float32", "bfloat16", "complex64"],
    "place": [*PLACES],
    "check_vma": [True, False],
}


def forbidden(case):
    function, algorithm = case.get("function"), case.get("algorithm")
    return (
        (case.get("place") == "groups" and bool(case.get("check_vma")))  # lax has no groups there
        # One shot is for whole vectors; along two axes, each sum is balanced, but not their order.
        or (algorithm == "one_shot" and case.get("place") in ("xy", "yx"))
        or (algorithm == "one_shot" and function not in (None, "psum", "pmean"))
        or (function == "gradient of all_gather" and case.get("dtype") == "complex64")
    )


def normal(dtype):
    """Leaves of a dtype."""
    return np.asarray(jnp.asarray(NORMAL * (1 - 2j) if dtype == "complex64" else NORMAL, dtype))


def of_tree(x):
    """The sum of leaves, neighbours first, rounded to their dtype each time."""
    while len(x) > 1:
        x = x[::2] + x[1::2]
    return x[0]


def leaves_of(case):
    """The sum of each device's own leaves; of a group, all ranks together have all leaves."""
    devices = PLACES[case["place"]][3]
    n = len(devices[0])
    own = normal(case["dtype"]).reshape(n, LEAVES // n, 16, 4)
    places = np.argsort(np.ravel(devices))
    return np.concatenate([[of_tree(leaves) for leaves in own]] * len(devices))[places]


def run(case, x):
    _, axes, groups, devices = PLACES[case["place"]]
    options = {"algorithm": case["algorithm"], "order": Tree(LEAVES)}
    options |= {"axis_index_groups": groups} if groups else {}
    n = len(devices[0])
    if options["algorithm"] == "halving_doubling" and case["function"] not in ("psum", "pmean"):
        options["algorithm"] = "recursive_doubling"  # the name of the gather
    if case["function"] == "psum":
        return ringcoll.psum({"a": x, "b": -x[:3]}, axes, **options)["a"]
    if case["function"] == "pmean":
        return ringcoll.pmean(x, axes, **options) * n
    if case["function"] == "psum_scatter":
        return ringcoll.psum_scatter(x, axes, scatter_dimension=-2, tiled=True, **options)

    def loss(own):
        gathered = ringcoll.all_gather(own, axes, tiled=True, **options)
        return (gathered * x).sum()

    return jax.grad(loss)(jnp.zeros((16 // n, 4), x.dtype) + 0 * x[: 16 // n])


def expected(case):
    """The sum by the tree; of a scattered one, each device's part."""
    devices = PLACES[case["place"]][3]
    n, total = len(devices[0]), of_tree(normal(case["dtype"]))
    if case["function"] in ("psum", "pmean"):
        return np.stack([total] * n * len(devices))
    parts = np.concatenate([np.split(total, n)] * len(devices))
    return parts[np.argsort(np.ravel(devices))]


@pytest.mark.parametrize("seed", SEEDS)
def test_bits_are_those_of_the_tree(seed):
    def program_of(case):
        return PLACES[case["place"]][0], case["check_vma"]

    cases = sorted(covering(FACTORS, forbidden, seed), key=program_of)
    for (shape, check_vma), group in groupby(cases, program_of):
        some = list(group)

        def program(xs, some=some):
            return [run(case, x) for case, x in zip(some, xs, strict=True)]

        xs = [leaves_of(case) for case in some]
        found = per_rank(make_mesh(*shape), program, xs, check_vma=check_vma)
        for case, ours in zip(some, found, strict=True):
            assert_same({str(case): np.asarray(ours)}, {str(case): expected(case)})


def test_the_tree_is_not_the_order_of_the_leaves():
    """Else the test above could not fail."""
    assert (of_tree(NORMAL) != reduce(np.add, NORMAL)).any()


def test_axis_of_a_vmap():
    x = jnp.asarray(NORMAL)
    total = jax.vmap(lambda x: ringcoll.psum(x, "v", order=Tree()), axis_name="v")(x)
    mine = jax.vmap(
        lambda x: ringcoll.psum_scatter(x, "v", tiled=True, order=Tree()), axis_name="v"
    )
    assert_same(np.asarray(total[0]), of_tree(NORMAL))
    assert_same(np.asarray(mine(x)).reshape(16, 4), of_tree(NORMAL))


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
        per_rank(make_mesh(8), total, NORMAL)


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
for n in (1, 2, 8):
    def total(x, y):
        p = x * y  # an addition must not be contracted with it
        while p.shape[0] > 1:
            p = jnp.where(jnp.isnan(p), 0, p)
            p = p[::2] + p[1::2]
        return ringcoll.psum(p[0], "x", order=ringcoll.Tree(), algorithm="halving_doubling")
    mesh = jax.make_mesh((n,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:n])
    f = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=P("x"), out_specs=P()))
    seen.add(np.asarray(f(x, y)).tobytes())
print("different:", len(seen))
"""


def test_products_are_rounded_by_default_flags():
    run = python("-c", DEFAULT_FLAGS)
    assert "different: 1\n" in run.stdout, run.stdout + run.stderr[-2000:]
