"""Sharded parameters: specs, gathers at use, products while they arrive; exact without a wire.

Data are small integers. Where gradients are summed in a wider dtype, one rank's is 256 and the
others' are ones, which bfloat16 would lose.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import SEEDS, covering
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layer_cases import (
    MESHES,
    OTHERS,
    WAYS,
    Place,
    check_each,
    compared,
    equal,
    messages,
    no_such_others,
    over_ranks,
    precisions,
    values,
)
from support import make_mesh, per_rank

from ringcoll import Wire
from ringcoll.layers import fsdp


def test_specs_and_shard_on_the_mesh_of_jax():
    with jax.set_mesh(make_mesh(4)):
        params = {"w": np.ones((4, 4), np.float32)}
        assert fsdp.specs(params, "x", min_size=0) == {"w": P("x", None)}
        placed = fsdp.shard(params, {"w": P("x", None)})["w"]
    assert placed.sharding == NamedSharding(make_mesh(4), P("x", None))


def test_gather():
    w = np.arange(24.0).reshape(4, 2, 3)
    y = per_rank(make_mesh(4), lambda w: fsdp.gather(w, P("x"), "x", algorithm="ring"), w)
    np.testing.assert_array_equal(y, [w.reshape(8, 3)] * 4)


def test_linear():
    x, w = np.arange(32.0).reshape(4, 1, 8), np.arange(24.0).reshape(4, 2, 3)
    y = per_rank(make_mesh(4), lambda x, w: fsdp.linear(w, x, "x", algorithm="ring"), x, w)
    np.testing.assert_array_equal(y, x @ w.reshape(8, 3))


@pytest.mark.parametrize(
    ("shape", "options", "spec"),
    [
        ((8, 16), {}, P(None, "x")),  # the larger
        ((16, 16), {}, P("x", None)),  # the first of equal ones
        ((6, 9), {}, P()),  # neither divides
        ((6, 8), {}, P(None, "x")),  # the one that does
        ((4,), {}, P()),  # small
        ((2, 4), {}, P(None, "x")),  # as many as the fewest that are sharded
        ((4,), {"min_size": 0}, P("x")),
        ((16, 8), {"leading": 1}, P(None, "x")),  # of layers that are stacked
        ((16, 8), {"leading": 1, "min_size": 16}, P()),  # each of them small
        ((8, 16), {"base": P(None, "y")}, P("x", "y")),  # the other dimension
        ((9, 16), {"base": P(None, "y")}, P(None, "y")),
        ((8, 16), {"axis_name": ("x", "y")}, P(None, ("x", "y"))),
        ((0, 16), {"min_size": 0}, P(None, "x")),
        ((), {"min_size": 0}, P()),
        ((16, 8), {"dim": -1}, P(None, "x")),  # not the largest, but as asked for
        ((8, 16), {"dim": 0}, P("x", None)),
        ((16, 9), {"dim": -1}, P("x", None)),  # where that can be
        ((8,), {"dim": -2}, P("x")),
        ((8, 16), {"dtype": np.int32}, P()),  # `gather` is of floats, and of codes
        ((8, 16), {"dtype": bool}, P()),
        ((8, 16), {"dtype": np.int8}, P(None, "x")),
        ((16, 8), {"dtype": jnp.int4}, P("x", None)),
        ((8, 16), {"dtype": jnp.float8_e4m3fn}, P(None, "x")),
    ],
)
def test_specs(shape, options, spec):
    options = {"min_size": 8, "axis_name": "x", "mesh": make_mesh(4, 2), **options}
    dtype = options.pop("dtype", np.float32)
    if "base" in options:
        options["base"] = {"w": options["base"]}
    assert fsdp.specs({"w": jax.ShapeDtypeStruct(shape, dtype)}, **options) == {"w": spec}


GATHER = {
    "mesh": [*MESHES],
    "dim": [1, 0, None],
    "own": ["float32", "bfloat16", "float64"],
    "dtype": ["bfloat16", None, "float32"],
    "reduce_dtype": ["float32", None, "float64"],
    "replicas": [True, False],
    "algorithm": ["ring", "auto", "bidirectional_ring"],
    "others": OTHERS,
    "codes": ["int8", "int4", "uint8"],
    "check_vma": [True, False],
}


def no_such_replicas(case):
    """Replicas are over the other axes, which then are manual."""
    replicas = case.get("others", "manual") != "manual" and case.get("replicas", False)
    return replicas or no_such_others(case)


@pytest.mark.parametrize("seed", SEEDS)
def test_gathers(seed):
    check_each(covering(GATHER, no_such_replicas, seed), check_gather)


def check_gather(case):
    place, own, axes = Place(case["mesh"]), jnp.dtype(case["own"]), Place(case["mesh"]).axes
    result = jnp.dtype(case["dtype"] or own)
    sums = jnp.dtype(case["reduce_dtype"] or result)
    spec = P(*[axes if dim == case["dim"] else None for dim in range(2)])
    replicas = place.others if case["replicas"] else ()
    ranks = ((axes,) if isinstance(axes, str) else axes) + replicas
    options = {name: case[name] for name in ("dtype", "reduce_dtype", "algorithm")}
    w = (250 + np.arange(6 * place.n**2) % 8).reshape(2 * place.n, 3 * place.n).astype(own)
    count = place.n * (place.replicas if replicas else 1)
    # Without types, the edge of `shard_map` sums in the dtype of the parameters.
    weights = np.ones((count, 1, 1))
    weights[0] = 256 if case["check_vma"] and sums.itemsize > 2 else 2
    others = {  # not floats: they come back as they are
        "seed": np.array([2, 3]),
        "codes": (np.arange(6 * place.n**2).reshape(w.shape) % 8).astype(jnp.dtype(case["codes"])),
    }

    def layer(params, weights):
        called = {"activation": jnp.sin, "missing": None}
        all_specs = {**specs, "activation": P(), "missing": P()}
        gathered = fsdp.gather(params | called, all_specs, axes, replicas=replicas, **options)
        assert gathered["activation"] is jnp.sin
        y = (gathered["w"] * weights[0].astype(result))[None]
        return y, {name: gathered[name][None] for name in others}

    specs = {"w": spec, "seed": P(), "codes": spec}
    mapped = over_ranks(case, layer, (specs, P(ranks)), (P(ranks), P(ranks)))

    def with_gradient(w, weights):
        y, back, unchanged = jax.vjp(
            lambda params: mapped(params, weights), {"w": w} | others, has_aux=True
        )
        (gradients,) = back(jnp.ones_like(y))
        assert {gradients[name].dtype for name in others} == {jax.dtypes.float0}
        return y, unchanged, gradients["w"]

    traced = jax.jit(with_gradient).trace(w, weights)
    y, unchanged, gradient = jax.device_get(traced.lower().compile()(w, weights))
    assert (y.dtype, gradient.dtype) == (result, own)
    np.testing.assert_array_equal(y, w.astype(result)[None] * weights.astype(result))
    for name, leaf in others.items():
        assert unchanged[name].dtype == leaf.dtype
        np.testing.assert_array_equal(unchanged[name], np.broadcast_to(leaf, (count, *leaf.shape)))
    np.testing.assert_array_equal(gradient, np.full(w.shape, weights.sum()).astype(own))
    program = traced.jaxpr.jaxpr
    is_sharded = case["dim"] is not None
    assert messages(program, "ringcoll_all_gather") == ({result.name} if is_sharded else set())
    assert messages(program, "ringcoll_psum_scatter") == ({sums.name} if is_sharded else set())
    is_summed = case["check_vma"] and (replicas or not is_sharded)
    assert messages(program, "ringcoll_psum") == ({sums.name} if is_summed else set())


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("own", ["float8_e4m3fn", "float8_e5m2", "float16", "float32"])
def test_dtypes_that_jax_does_not_promote(own, check_vma):
    """Gradients are summed in the wider one, and have the dtype of the parameter."""
    params = {"w": jnp.ones((4, 4), own), "b": jnp.ones(4, own)}
    specs = {"w": P("x"), "b": P()}

    def gradients(dtype):
        def layer(params, x):
            whole = fsdp.gather(params, specs, "x", dtype=dtype)
            assert {leaf.dtype for leaf in whole.values()} == {jnp.dtype(dtype)}
            return x * (whole["w"].sum(0) + whole["b"])[None].astype(x.dtype)

        out = {"mesh": make_mesh(4), "out_specs": P("x"), "check_vma": check_vma}
        mapped = jax.shard_map(layer, in_specs=(specs, P("x")), **out)
        y, back = jax.vjp(lambda params: mapped(params, jnp.ones((4, 4))), params)
        return y, *back(16 * jnp.ones_like(y))

    for dtype in "float32", "bfloat16", "float8_e5m2", "float8_e4m3fn":
        y, gradient = jax.jit(gradients, static_argnums=0)(dtype)
        np.testing.assert_array_equal(y, np.full((4, 4), 5))
        for name, leaf in gradient.items():
            assert leaf.dtype == own
            np.testing.assert_array_equal(np.float32(leaf), np.full(params[name].shape, 64), name)


def test_leaves_that_are_no_arrays_are_whole():
    """As the functions of an Equinox module; what it filters out may keep its spec."""
    params = {"w": np.ones((4, 4), np.float32), "activation": jnp.sin, "slope": 0.5, "none": None}
    specs = fsdp.specs(params, "x", mesh=make_mesh(4), min_size=0)
    assert specs == {"w": P("x", None), "activation": P(), "slope": P(), "none": None}
    placed = fsdp.shard(params, specs, make_mesh(4))
    assert placed["w"].sharding.spec == P("x", None)
    assert (placed["activation"], placed["slope"]) == (jnp.sin, 0.5)
    arrays = params | dict.fromkeys(("activation", "slope"))
    assert fsdp.shard(arrays, specs, make_mesh(4))["activation"] is None


LINEAR = {
    "mesh": [*MESHES],
    "dim": [1, 0],
    "algorithm": ["ring", "auto", "bidirectional_ring"],
    "dtype": ["float64", "bfloat16", "float32"],
    "of_kernel": ["float32", "bfloat16", "float64"],
    "bias": ["float32", None, "bfloat16"],
    "is_sharded": [True, False],  # the batch, over all axes
    "replicas": [True, False],
    "rows": [(2,), (2, 3), (0,), (1,)],
    "residuals": ["save", "regather"],
    "precision": ["highest", None],
    "accumulate_dtype": [None, "float64"],
    "preferred_element_type": [None, "float64"],
    "way": ["jit", "remat", "scan over layers"],
    "others": OTHERS,
    "check_vma": [True, False],
}
LINEAR_WAYS = WAYS | {
    "scan over layers": lambda call: (
        lambda params, x: jax.lax.scan(
            jax.checkpoint(lambda c, layer: (c, call(layer, x))),
            0,
            jax.tree.map(lambda leaf: leaf[None], params),
        )[1][0]
    )
}


@pytest.mark.parametrize("seed", SEEDS)
def test_linear_layers(seed):
    check_each(covering(LINEAR, no_such_replicas, seed), check_linear)


def check_linear(case):
    place, rng = Place(case["mesh"]), np.random.default_rng(4)
    axes, n, dtype = place.axes, place.n, case["dtype"]
    replicas = place.others if case["replicas"] else ()
    every = place.mine + place.others
    ranks, count = (every, place.mesh.size) if case["others"] == "manual" else (axes, n)
    first, *rest = case["rows"]
    rows = first * place.mesh.size if case["is_sharded"] else first
    x = values(rng, (rows, *rest, 2 * n), "bfloat16").astype(dtype)
    kernel = values(rng, (2 * n, 3 * n), "bfloat16").astype(case["of_kernel"])
    params = {"kernel": kernel}
    spec = {"kernel": P(*[axes if dim == case["dim"] else None for dim in range(2)])}
    if case["bias"] is not None:
        params["bias"], spec["bias"] = np.arange(3 * n).astype(case["bias"]), P()
    names = ("algorithm", "residuals", "precision", "accumulate_dtype", "preferred_element_type")
    options = {name: case[name] for name in names}

    def layer(params, x):
        return fsdp.linear(params, x, axes, replicas=replicas, **options)[None]

    data = P(every) if case["is_sharded"] else P()
    mapped = over_ranks(case, LINEAR_WAYS[case["way"]](layer), (spec, data), P(ranks))

    def right(of):
        params, x = of
        y = x @ params["kernel"] + params.get("bias", jnp.zeros(3 * n))
        if case["is_sharded"]:
            return y.reshape(count, rows // count, *y.shape[1:])
        return jnp.broadcast_to(y[None], (count, *y.shape))

    y, program = compared(lambda of: mapped(*of), right, ((params, x),), exact=True, check=equal)
    assert y.dtype == (case["preferred_element_type"] or dtype)
    assert precisions(program) == {case["precision"] and jax.lax.Precision.HIGHEST}


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_bytes_are_sent_and_only_where_it_is_asked_to(check_vma):
    """With a wire; what is not encoded stays exact."""
    mesh, rng = make_mesh(2, 2), np.random.default_rng(0)
    params = {"w": rng.normal(size=(64, 64)).astype(np.float32), "b": np.ones(64, np.float32)}
    specs = {"w": P(None, "x"), "b": P()}
    x = rng.normal(size=(8, 64)).astype(np.float32)

    def of(**wires):
        def loss(params, x):
            gathered = fsdp.gather(params, specs, "x", replicas="y", **wires)
            return ((x @ gathered["w"] + gathered["b"][None]) ** 2).sum(keepdims=True)

        mapped = jax.shard_map(
            loss,
            mesh=mesh,
            in_specs=(specs, P(("x", "y"))),
            out_specs=P(("x", "y"), None),
            check_vma=check_vma,
        )
        return jax.jit(jax.value_and_grad(lambda p: mapped(p, x).sum()))

    exact = of()(params)[1]
    for wires in {"wire": "int8"}, {"gradient_wire": Wire("int8", 64)}:
        program = of(**wires)
        got = program(params)[1]
        off = abs(got["w"] - exact["w"]).max() / abs(exact["w"]).max()
        assert 1e-5 < off < 0.05, (wires, off)
        if "gradient_wire" in wires:  # the others' gradients are exact
            np.testing.assert_allclose(got["b"], exact["b"], rtol=1e-5)
        sent = re.findall(r'"stablehlo\.(\w+)".*ui8', program.lower(params).as_text())
        of_replicas = ["all_to_all", "all_gather"] if check_vma else []  # else the edge sums them
        assert sent == (["all_gather"] if "wire" in wires else ["all_to_all", *of_replicas])
