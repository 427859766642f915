"""Mixtures of experts over ranks, and their gradients, against the same layer on one device.

Bounds are those of `test_tensor_parallel`. Sums over features have D or F terms. Those of gradients
have as many terms as there are tokens.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import layer_references as reference
import numpy as np
import pytest
from covering import SEEDS, covering
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.sharding import PartitionSpec as P
from layer_cases import (
    MESHES,
    Place,
    check_each,
    close,
    compared,
    precisions,
    with_gradients,
)
from support import make_mesh, per_rank

import ringcoll
from ringcoll.layers import expert_parallel as ep
from ringcoll.layers.expert_parallel.auto import Mixture, fastest


def test_moe():
    """The router sends the unit vector e to expert e, which is on rank e."""
    chosen, w = np.array([[3, 0], [1, 2], [0, 1], [2, 3]]), np.arange(16.0).reshape(4, 1, 1, 4)
    experts = {"gate": w.swapaxes(2, 3), "up": w.swapaxes(2, 3) + 1, "down": w + 2}
    options = {"top_k": 1, "activation": lambda x: x, "algorithm": "ring"}
    x, router = np.eye(4)[chosen], 99 * np.eye(4)
    call = lambda x, w: ep.moe(x, router, w, "x", **options).output  # noqa: E731
    y = per_rank(make_mesh(4), call, x, experts)
    diagonal = w.reshape(4, 4).diagonal()[:, None]  # what an expert has for its vector
    np.testing.assert_array_equal(y, (diagonal * (diagonal + 1) * (w[:, 0, 0] + 2))[chosen])


def test_specs_of_experts_that_are_stacked():
    stacked = {"up": jax.ShapeDtypeStruct((3, 4, 6, 5), jnp.float32), "router": np.ones((6, 4))}
    specs = {"up": P(None, "x", None, "y"), "router": P()}
    assert ep.partition_specs(stacked, "x", features="y") == specs


D, F, T = 6, 4, 7
FORMS = ["gather", "ring", "bidirectional_ring", "ragged_all_to_all"]
#: A program takes seconds to compile, so the usual table has few values of what costs most.
USUAL = {
    "mesh": ["the second of three axes", "two axes in the other order"],
    "algorithm": ["auto", "ring", "bidirectional_ring", "ragged_all_to_all"],
    "choice": [("two there", 3, "filled"), ("random", 4, None)],
    "tokens": [(2, 4), (T,), (0,)],
    "way": ["jit", "vmap of tokens"],
}


def arguments(n, routing, dtype="float64", tokens=T):
    """Tokens of all ranks, a router, three experts a rank. Some routings leave experts empty.

    "two there" sends every token to the last two experts, which are on one rank, and then to the
    first: with a `top_k` of 3 each rank has 2 t rows for the last one, and room for 3 t.
    """
    rng, experts = np.random.default_rng(5), 3 * n
    x, router = rng.standard_normal((n * tokens, D)), rng.standard_normal((D, experts))
    x[:, 0] = 1 + rng.random(n * tokens)  # a feature by which routers can choose
    if routing == "to one":
        router[0, experts // 2] += 50
    elif routing == "two there":
        router[0, -2:] += 60
        router[0, 0] += 30
    weights = {
        "gate": rng.standard_normal((experts, D, F)),
        "up": rng.standard_normal((experts, D, F)) / D**0.5,
        "down": rng.standard_normal((experts, F, D)) / F**0.5,
    }
    params = {"x": x, "router": router, "experts": weights}
    return jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), params)


def most_rows(params, n, top_k):
    """The largest number of rows that a rank has for another."""
    chosen = np.argsort(-(np.float64(params["x"]) @ np.float64(params["router"])), 1)[:, :top_k]
    ranks = (chosen // 3).reshape(n, -1)
    return max(np.bincount(of, minlength=n).max() for of in ranks)


def over(
    mesh,
    params,
    axes="x",
    check_vma=True,
    features=None,
    tokens=(),
    wrap=lambda call: call,
    **options,
):
    """The layer over a mesh, from whole operands to whole results."""
    experts = ep.partition_specs(params["experts"], axes, features=features)

    def layer(params):
        x = params["x"].reshape(*tokens, *params["x"].shape[-1:]) if tokens else params["x"]
        result = ep.moe(x, params["router"], params["experts"], axes, **options)
        assert result.output.shape == x.shape
        output = result.output.reshape(params["x"].shape)
        return (jax.lax.psum(output, features) if features else output), result.balance_loss

    specs = {"x": P(axes), "router": P(), "experts": experts}
    return jax.shard_map(
        wrap(layer), mesh=mesh, in_specs=(specs,), out_specs=(P(axes), P()), check_vma=check_vma
    )


def ragged(rows, weights, sizes):
    return jax.lax.ragged_dot(rows, weights, sizes).astype(jnp.float32)


TABLE = {
    "mesh": [*MESHES],
    "algorithm": [*FORMS, "auto"],
    "choice": [  # the routing, `top_k`, and the bound
        ("two there", 3, "filled"),
        ("random", 1, None),
        ("random", 2, "filled"),
        ("random", 3, "more"),
        ("to one", 2, "filled"),
        ("two there", 2, None),
        ("random", 4, None),  # a rank has three
    ],
    "normalize": [True, False],
    "dtype": ["float64", "bfloat16"],
    "of_router": ["float32", "its own"],
    "activation": [None, jnp.sin],
    "precision": ["highest", None],
    "kernel": [None, ragged],
    "tokens": [(T,), (2, 4), (1,), (0,)],
    "way": ["jit", "vmap of tokens", "remat of vmap of all"],
    "has_features": [False, True],
    "check_vma": [True, False],
}


def no_mixture(case):
    """Features are cut over an axis that is left. JAX cannot batch the kernel, which is narrow.

    A ring fills its blocks in proportion, as random routers do not.
    """
    name = case.get("mesh", "the second of three axes")
    alone = case.get("has_features", False) and "first" not in name and "three" not in name
    narrow = (
        case.get("precision") or case.get("dtype") == "float64" or "vmap" in case.get("way", "")
    )
    uneven = case.get("choice") == ("random", 2, "filled") and "ring" in case.get("algorithm", "")
    too_few = case.get("choice") == ("random", 4, None) and name == "one rank"
    return bool(alone or uneven or too_few or (case.get("kernel") and narrow))


def not_usual(case):
    """A ring under `vmap` takes longest to compile."""
    return no_mixture(case) or (
        "ring" in case.get("algorithm", "") and case.get("way", "jit") != "jit"
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mixture_of_experts(seed):
    factors = (TABLE, no_mixture) if seed else (TABLE | USUAL, not_usual)
    check_each(covering(*factors, seed), check)


def batched(call, names):
    """A batch of two, of the operands of these names; the results of the second."""

    def run(params):
        axes = {name: 0 if name in names else None for name in params}
        twice = {n: jax.tree.map(lambda x: jnp.stack([x, x]), params[n]) for n in names}
        both = jax.vmap(call, in_axes=(axes,))(params | twice)
        return jax.tree.map(lambda y: y[1], both)

    return run


WAYS = {
    "jit": lambda call: call,
    "vmap of tokens": partial(batched, names=("x",)),
    "remat of vmap of all": lambda call: jax.checkpoint(batched(call, ("x", "router", "experts"))),
}


def check(case):
    place, tokens, (routing, top_k, most) = Place(case["mesh"]), case["tokens"], case["choice"]
    n, dtype = place.n, case["dtype"]
    params = arguments(n, routing, dtype, int(np.prod(tokens)))
    if case["of_router"] != "its own":
        params["router"] = params["router"].astype(case["of_router"])
    features = None
    if case["has_features"]:
        features = place.others[-1]
        params["experts"] = {  # features that the ranks divide
            name: np.concatenate([w, -w, w], 1 if name == "down" else 2)
            for name, w in params["experts"].items()
        }
    options = {"top_k": top_k, "normalize": case["normalize"]}
    if case["activation"]:
        options["activation"] = case["activation"]
    filled = most_rows(params, n, top_k)
    bound = {"filled": max(filled, 1), "more": filled + 2}.get(most)
    given = {name: case[name] for name in ("algorithm", "precision", "kernel", "check_vma")}
    ours = over(
        place.mesh,
        params,
        place.axes,
        features=features,
        tokens=tokens,
        wrap=WAYS[case["way"]],
        max_send=bound,
        **given,
        **options,
    )

    wide = jnp.promote_types(jnp.promote_types(dtype, params["router"].dtype), jnp.float32)

    def compare(found, expected):
        # Rounded are hidden numbers, their products, results and sums, forward and back.
        (y, loss), gradients = found
        (y_right, loss_right), gradients_right = expected
        close((y, loss), (y_right, loss_right), 1000 * n, roundings=6, narrowest=wide)
        close(gradients, gradients_right, 1000 * n, roundings=12, narrowest=dtype)

    right = partial(reference.moe, **options)
    (y, loss), program = compared(ours, right, (params,), check=compare)
    assert (y.dtype, loss.dtype) == (dtype, wide)
    if case["precision"]:
        assert jax.lax.Precision.HIGHEST in precisions(program)


@pytest.mark.parametrize(("max_send", "often"), [(14, 1), (None, 5)])
def test_a_ring_that_keeps_its_rows_multiplies_them_once_for_the_weights(
    max_send, often, monkeypatch
):
    """Without a bound it multiplies in each visit: three blocks, and two halves of its own."""

    def product(rows, weights, sizes):
        return rows @ weights[0]

    def loss(params):
        options = {"top_k": 2, "algorithm": "ring", "max_send": max_send, "kernel": product}
        return over(make_mesh(4), params, **options)(params)[0].sum()

    params = arguments(4, "random", "float32", tokens=8)  # no product has as many rows as features
    text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text)
    assert sum(shape in (f"{D},{F}", f"{F},{D}") for shape in shapes) == 3 * often


def test_a_token_has_no_more_rows_than_there_are_experts_on_a_rank():
    """And the plan says who named the algorithm."""
    rows = []

    def product(x, weights, sizes):
        rows.append(len(x))
        return jax.lax.ragged_dot(x, weights, sizes)

    params = arguments(2, "random", "float32")
    layer = over(make_mesh(2), params, top_k=5, algorithm="gather", kernel=product)
    told = {call: str(plan) for call, plan in ringcoll.explain(layer)(params).plans}
    assert set(rows) == {2 * T * 3}
    assert told[f"moe over x=2, float32[{T},{D}]"] == "gather: named by the caller"


@pytest.mark.parametrize("form", FORMS)
def test_more_rows_than_the_bound_are_nan_and_never_dropped(form):
    """A rank has T rows for the one with the expert that all tokens choose."""
    params = arguments(2, "to one", "float32")

    def run(params):
        call = partial(over, make_mesh(2), params, top_k=1, algorithm=form)
        return [call(max_send=most)(params)[0] for most in (None, T, T - 1)]

    free, bound, less = jax.device_get(jax.jit(run)(params))
    np.testing.assert_array_equal(bound, free)
    is_nan = np.isnan(less)
    assert is_nan.any()
    assert form in ("ring", "bidirectional_ring") or is_nan.all()
    np.testing.assert_array_equal(less[~is_nan], free[~is_nan])


@pytest.mark.parametrize(
    ("kind", "ranks", "tokens", "algorithm"),
    [
        ("TPU v6 lite", 8, 128, "gather"),  # a ring would read the weights in every round
        ("TPU v6 lite", 8, 8192, "bidirectional_ring"),
        ("TPU v5 lite", 2, 8192, "ring"),  # its first and last hop hide under halves of its own
        ("TPU v6 lite", 64, 8192, "ragged_all_to_all"),  # 8 times as many as a token's experts
        ("NVIDIA H100 80GB HBM3", 8, 8192, "gather"),
        ("cpu", 8, 8192, "gather"),
        (None, 8, 8192, "gather"),
    ],
)
def test_auto_goes_by_the_price(kind, ranks, tokens, algorithm):
    plan = fastest(Mixture(ranks, tokens, 64 // ranks, 8, 4096, 4096, 2), kind)
    assert plan.algorithm == algorithm
    assert plan.why


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["gather", "ring", "ragged_all_to_all"])
def test_a_kernel_of_pallas_multiplies_the_rows(form):
    kernel = partial(gmm, tiling=(8, 128, 128), interpret=True)
    params = arguments(2, "random", "float32", tokens=8)  # its tiles have 8 rows
    ours, plain = (
        jax.jit(with_gradients(call))(params)
        for call in (
            over(make_mesh(2), params, top_k=2, algorithm=form, check_vma=False, kernel=one)
            for one in (kernel, None)
        )
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), ours, plain)
