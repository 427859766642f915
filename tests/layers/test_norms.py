"""Tables of norms and of `copied`; random numbers; a sum beside a call.

Data have the mean 100: in bfloat16, or with the mean of float32 squares in bfloat16, the variance
would be lost.
"""

from functools import partial

import jax
import jax.numpy as jnp
import layer_references as reference
import numpy as np
import pytest
from covering import SEEDS, covering
from jax.sharding import PartitionSpec as P
from layer_cases import (
    MESHES,
    OTHERS,
    WAYS,
    Place,
    check_each,
    close,
    compared,
    compiled,
    dtypes,
    messages,
    no_such_way,
    over_ranks,
    ways,
)
from support import make_mesh, per_rank

from ringcoll import layers
from ringcoll.layers import tensor_parallel as tp

MESH = make_mesh(4)  # of one axis, x


def test_rms_norm_and_layer_norm():
    x = np.array([3.0, -3, 1, -1, 0]) * [[1], [2], [4], [8]]  # of mean 0 and roots 2, 4, 8, 16
    params = {"scale": np.arange(5.0), "bias": np.arange(5.0) + 7}
    rms = per_rank(MESH, lambda x: tp.rms_norm({"scale": np.arange(5.0)}, x, "x", epsilon=0), x)
    y = per_rank(MESH, lambda x: tp.layer_norm(params, x, "x", epsilon=0), x + 100)
    np.testing.assert_array_equal(rms, [[0, -1.5, 1, -1.5, 0]] * 4)
    np.testing.assert_array_equal(y, [[7, 6.5, 10, 8.5, 11]] * 4)


def test_copied():
    """The gradient of what all ranks use is the sum of theirs."""

    def loss(w, x):
        return (layers.copied(w, "x", algorithm="ring") * x).sum()

    x = np.arange(12.0).reshape(4, 3)
    gradients = per_rank(MESH, lambda x: jax.grad(loss)(jnp.ones(3), x), x)
    np.testing.assert_array_equal(gradients, [x.sum(0)] * 4)


D = 8
NORMS = {
    "norm": ["rms_norm", "layer_norm", "layer_norm without bias"],
    "mesh": ["the first of two axes", "the second of three axes", "two axes in the other order"],
    "is_sharded": [True, False],
    "check_vma": [True, False],
    "dtype": ["bfloat16", "float32", "float64"],
    "of_params": ["float32", "bfloat16"],
    "epsilon": [None, 9.0],
    "batch": [2, None, 0],
    "others": OTHERS,
}


@pytest.mark.parametrize("seed", SEEDS)
def test_norms(seed):
    check_each(covering(NORMS | {"way": ways(seed)}, no_such_way, seed), check_norm)


def check_norm(case):
    place, rng = Place(case["mesh"]), np.random.default_rng(2)
    lead, of_batch = place.batch(case["batch"])
    x = (100 + 3 * rng.standard_normal((*lead, 2 * place.n, D))).astype(jnp.dtype(case["dtype"]))
    kind, _, unbiased = case["norm"].partition(" ")
    names = ["scale"] if unbiased or kind == "rms_norm" else ["scale", "bias"]
    params = {name: rng.standard_normal(D).astype(case["of_params"]) for name in names}
    spec = P(*of_batch, place.axes if case["is_sharded"] else None)
    given = {} if case["epsilon"] is None else {"epsilon": case["epsilon"]}
    names = place.mesh.axis_names if case["others"] == "manual" else place.mine
    axes = () if not case["is_sharded"] and {*names} == {*place.mine} else names
    ours, theirs = getattr(tp, kind), partial(getattr(reference, kind), **given)
    layer = WAYS[case["way"]](lambda params, x: ours(params, x, axes, **given))
    mapped = over_ranks(case, layer, (P(), spec), spec)

    def compare(found, expected):
        (y, gradients), (right, gradients_right) = found, expected
        close(y, right, terms=10_000, roundings=1)
        # Under `check_vma=False` JAX divides the cotangent by the ranks that share it, and adds the
        # gradients of all ranks in their dtype.
        narrowest = "float32" if case["check_vma"] and x.dtype != np.float64 else x.dtype
        roundings = 3 if case["check_vma"] else 3 + place.mesh.size
        close(gradients, gradients_right, terms=10_000, roundings=roundings, narrowest=narrowest)

    y, _ = compared(
        lambda of: mapped(*of),
        lambda of: theirs(*of),
        ((params, x),),
        jit=case["way"] != "eager",
        check=compare,
    )
    assert y.dtype == x.dtype


COPIED = {
    "function": ["copied", "copied_beside"],
    "mesh": [*MESHES],
    "algorithm": ["auto", "ring", "recursive_doubling"],
    "reduce_dtype": ["float32", None, "float64"],
    "check_vma": [True, False],
}


@pytest.mark.parametrize("seed", SEEDS)
def test_copies(seed):
    check_each(covering(COPIED, seed=seed), check_copied)


def check_copied(case):
    """Ranks add 256 and ones, which in bfloat16 are 256: the sum shows in which dtype they add."""
    place, wide = Place(case["mesh"]), case["reduce_dtype"]
    options = {name: case[name] for name in ("algorithm", "reduce_dtype")}
    axes, own = place.axes, P(place.axes)
    of_ranks = np.ones((place.n, 3)) + np.arange(3)
    of_ranks[0] *= 256 if wide else 2
    floats = {name: np.arange(3).astype(name) for name in ("bfloat16", "float32", "complex64")}
    tree = floats | {"int32": np.arange(3, dtype=np.int32), "varying": np.ones(3, np.float32)}

    def call(tree, ct):
        def used(floats):
            varying = jax.lax.pcast(tree["varying"], axes, to="varying")
            given = tree | floats | {"varying": varying}
            if case["function"] == "copied":
                copies = layers.copied(given, axes, **options)
            else:
                _, copies = layers.copied_beside(jnp.sin, (0 * ct[0],), given, axes, **options)
            assert dtypes(copies) == dtypes(tree)
            return {name: copies[name] for name in floats}, copies

        _, back, copies = jax.vjp(used, floats, has_aux=True)
        (gradients,) = back({name: ct[0].astype(name) for name in floats})
        gradients = {name: x + (0 * ct[0]).astype(name) for name, x in gradients.items()}
        copies = jax.tree.map(lambda x: x + (0 * ct[0]).astype(x.dtype), copies)
        return jax.tree.map(lambda x: x[None], (copies, gradients))

    mapped = over_ranks(case, call, (P(), own), own)
    if not case["check_vma"]:  # the edge of `shard_map` would sum the sums
        words = f"{case['function']}: shard_map has check_vma=False; leave it out"
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(mapped, tree, of_ranks)
        return
    traced = jax.jit(mapped).trace(tree, of_ranks)
    copies, gradients = jax.device_get(compiled(traced)(tree, of_ranks))
    for name, copy in copies.items():
        np.testing.assert_array_equal(copy, np.broadcast_to(tree[name], (place.n, 3)))
    right = np.broadcast_to(of_ranks.sum(0), of_ranks.shape)
    for name, gradient in gradients.items():
        assert gradient.dtype == name
        np.testing.assert_array_equal(gradient, right.astype(name))
    sums = messages(traced.jaxpr.jaxpr, "ringcoll_psum")
    assert sums == ({wide} if wide else {"bfloat16", "float32"})


@pytest.mark.parametrize("check_vma", [True, False])
def test_random_numbers_differ_where_they_should(check_vma):
    def of(axes):
        key = layers.fold_rng_over_axis(jax.random.key(0), axes)
        return jax.random.bits(key, 4)

    mesh, ranks = make_mesh(2, 1, 3), np.zeros(6)

    def masks(axes):  # of each x and z
        return per_rank(mesh, lambda _: of(axes), ranks, check_vma=check_vma).reshape(2, 3, 4)

    assert len(np.unique(masks("x"), axis=0)) == 2
    np.testing.assert_array_equal(masks("x"), masks("x")[:, :1].repeat(3, 1))
    np.testing.assert_array_equal(masks("z"), masks("z")[:1].repeat(2, 0))
    assert len(np.unique(masks(("x", "y", "z")).reshape(6, 4), axis=0)) == 6
    assert (masks(("x", "z")) != masks(("z", "x")))[:, 1:].any()
    assert len(np.unique(masks(()).reshape(6, 4), axis=0)) == 1
