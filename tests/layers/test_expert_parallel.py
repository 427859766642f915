"""Mixtures of experts over ranks, and their gradients, against the same layer on one device.

In float64, with tolerances as in `test_layers`. Sums over features have D or F terms. Those of
gradients have as many terms as there are tokens.
"""

import re
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.sharding import PartitionSpec as P
from layer_references import moe as by_reference
from support import crossed, make_mesh, mostly_exhaustive, paired
from test_layers import close, with_gradients

from ringcoll.layers import expert_parallel as ep
from ringcoll.matmuls.auto_experts import Mixture, fastest, halves_pay

D, F, T = 6, 5, 7
#: (ranks, experts): each rank has at least one, most have several.
SIZES = [(1, 8), (2, 8), (3, 6), (4, 8), (5, 5), (8, 8)]
FORMS = ["gather", "ring", "bidirectional_ring", "ragged_all_to_all"]
ROUTINGS = ["random", "skewed", "to one", "to few"]


def arguments(n, experts, routing, seed=0):
    """Tokens of all ranks, a router, experts; some routings leave experts empty."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n * T, D))
    router = rng.standard_normal((D, experts))
    x[:, 0] = 1 + rng.random(n * T)  # a feature by which routers can choose
    if routing == "skewed":
        router[0] += np.linspace(4, 0, experts)
    elif routing == "to one":
        router[0, experts // 2] += 50
    elif routing == "to few":
        router[0, -2:] += 50
    weights = {
        "gate": rng.standard_normal((experts, D, F)),
        "up": rng.standard_normal((experts, D, F)) / D**0.5,
        "down": rng.standard_normal((experts, F, D)) / F**0.5,
    }
    return {"x": x, "router": router, "experts": weights}


def over(mesh, params, *, check_vma=True, features=None, **options):
    """The layer over a mesh, from whole operands to whole results."""
    experts = ep.partition_specs(params["experts"], "x", features=features)

    def layer(params):
        result = ep.moe(params["x"], params["router"], params["experts"], "x", **options)
        if features is not None:
            result = result._replace(output=jax.lax.psum(result.output, features))
        return result

    specs = {"x": P("x"), "router": P(), "experts": experts}
    out = ep.Routed(P("x"), P())
    return jax.shard_map(layer, mesh=mesh, in_specs=(specs,), out_specs=out, check_vma=check_vma)


@cache
def on_one_device(n, experts, routing, top_k):
    return with_gradients(partial(by_reference, top_k=top_k))(arguments(n, experts, routing))


@pytest.mark.parametrize(
    ("size", "form", "routing", "top_k", "check_vma"),
    paired(SIZES, FORMS, ROUTINGS, [2, 1, 3], [True, True, True, False, False]),
)
def test_outputs_losses_and_gradients_equal_those_of_one_device(
    size, form, routing, top_k, check_vma
):
    with jax.enable_x64(True):
        params = arguments(*size, routing)
        call = over(make_mesh(size[0]), params, top_k=top_k, algorithm=form, check_vma=check_vma)
        ours = with_gradients(lambda params: tuple(call(params)))(params)
        close(ours, on_one_device(*size, routing, top_k), terms=size[0] * T * D)


@pytest.mark.parametrize("form", mostly_exhaustive(FORMS, lambda form: form == "ragged_all_to_all"))
def test_under_transformations(form):
    """vmap of tokens alone and of all, of gradients too; a scan over layers; remat."""
    with jax.enable_x64(True):
        params = arguments(2, 4, "random")
        mapped = over(make_mesh(2), params, top_k=2, algorithm=form)

        def call(x):
            return mapped(params | {"x": x}).output

        def loss(params):
            return jnp.sin(mapped(params).output).sum()

        def layers(x):
            return jax.lax.scan(lambda x, _: (x + call(x), None), x, length=2)[0].sum()

        def written_out(x):
            y = x + call(x)
            return (y + call(y)).sum()

        @jax.jit
        def transformed(params):
            many = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)
            return {
                "tokens": jax.vmap(call)(many["x"]),
                "all": jax.vmap(jax.grad(loss))(many),
                "remat": jax.grad(jax.checkpoint(loss))(params),
                "scan": jax.grad(layers)(params["x"]),
            }

        @jax.jit
        def plain(params):
            twice = jax.tree.map(lambda x: 2 * x, params)
            each = jax.grad(loss)(params), jax.grad(loss)(twice)
            return {
                "tokens": jnp.stack([call(params["x"]), call(twice["x"])]),
                "all": jax.tree.map(lambda *xs: jnp.stack(xs), *each),
                "remat": each[0],
                "scan": jax.grad(written_out)(params["x"]),
            }

        close(transformed(params), plain(params), terms=2 * T * D)


def test_leading_dimensions_are_tokens_too():
    with jax.enable_x64(True):
        params = arguments(2, 4, "random")
        call = jax.jit(over(make_mesh(2), params, top_k=2))
        shaped = call(params | {"x": params["x"].reshape(2, T, D)})
        flat = call(params)
        assert shaped.output.shape == (2, T, D)
        close((shaped.output.reshape(-1, D), shaped[1]), tuple(flat), terms=D)


def test_weights_that_are_not_normalized():
    with jax.enable_x64(True):
        params, options = arguments(2, 4, "random"), {"top_k": 1, "normalize": False}
        ours = with_gradients(lambda params: tuple(over(make_mesh(2), params, **options)(params)))
        close(ours(params), with_gradients(partial(by_reference, **options))(params), 2 * T * D)


@pytest.mark.parametrize(
    ("form", "check_vma"),
    mostly_exhaustive(
        [(form, i % 2 == 0) for i, form in enumerate(FORMS)],
        lambda form, _: form in ("ring", "ragged_all_to_all"),
    ),
)
def test_experts_beside_tensor_parallelism(form, check_vma):
    with jax.enable_x64(True):
        params = arguments(2, 4, "skewed")
        params["experts"] = {  # features that divide
            name: np.concatenate([w, -w], 1 if name == "down" else 2)
            for name, w in params["experts"].items()
        }
        mesh = make_mesh(2, 2, names="xy")
        options = {"top_k": 2, "algorithm": form, "features": "y", "check_vma": check_vma}
        expected = with_gradients(partial(by_reference, top_k=2))(params)
        for max_send in (None, 2 * T - 1):  # a bound that holds
            call = over(mesh, params, max_send=max_send, **options)
            close(
                with_gradients(lambda params, call=call: tuple(call(params)))(params),
                expected,
                2 * T * D,
            )


def test_experts_over_two_axes_count_row_major():
    with jax.enable_x64(True):
        params = arguments(4, 8, "random")

        def layer(params):
            return ep.moe(*params, ("y", "x"), top_k=2, algorithm="bidirectional_ring")

        axes = ("y", "x")
        specs = (P(axes), P(), ep.partition_specs(params["experts"], axes))
        mapped = jax.shard_map(
            layer, mesh=make_mesh(2, 2), in_specs=(specs,), out_specs=ep.Routed(P(axes), P())
        )
        ours = jax.jit(mapped)(tuple(params.values()))
        close(tuple(ours), by_reference(params, top_k=2), terms=D)


@pytest.mark.parametrize(("form", "check_vma"), crossed(FORMS, [True, False]))
def test_a_bound_of_rows_that_holds_changes_nothing(form, check_vma):
    with jax.enable_x64(True):
        params = arguments(4, 8, "random")
        # 12 of the 14 rows that a rank may have for another: fewer than all, but enough here.
        options = {"top_k": 2, "algorithm": form, "max_send": 12, "check_vma": check_vma}
        ours = with_gradients(lambda params: tuple(over(make_mesh(4), params, **options)(params)))
        close(ours(params), on_one_device(4, 8, "random", 2), terms=4 * T * D)


@pytest.mark.parametrize(("n", "experts"), mostly_exhaustive(SIZES[2:], lambda n, _: n == 4))
def test_halves_of_a_round_that_are_multiplied_apart_change_nothing(n, experts, monkeypatch):
    """As on TPUs whose experts have many rows."""
    count = 0

    def product(rows, weights, sizes):
        nonlocal count
        count += 1
        return jax.lax.ragged_dot(rows, weights, sizes)

    how = {"top_k": 2, "algorithm": "bidirectional_ring", "max_send": 12, "kernel": product}

    def run(halves_pay):
        nonlocal count
        count = 0
        monkeypatch.setattr(ep, "halves_pay", lambda mixture, kind: halves_pay)
        call = over(make_mesh(n), params, **how)
        result = with_gradients(lambda params: tuple(call(params)))(params)
        return result, count

    with jax.enable_x64(True):
        params = arguments(n, experts, "random")
        (joined, few), (apart, many) = run(False), run(True)
        assert many > 1.5 * few
        for ours in (joined, apart):
            close(ours, on_one_device(n, experts, "random", 2), terms=n * T * D)


@pytest.mark.parametrize(("max_send", "often"), [(14, 1), (None, 5)])
def test_a_ring_that_keeps_its_rows_multiplies_them_once_for_the_weights(
    max_send, often, monkeypatch
):
    """Without a bound it multiplies in each visit: three blocks, and two halves of its own."""
    monkeypatch.setattr("test_expert_parallel.T", 8)  # so no product has as many rows as features

    def product(rows, weights, sizes):
        return rows @ weights[0]

    def loss(params):
        options = {"top_k": 2, "algorithm": "ring", "max_send": max_send, "kernel": product}
        return over(make_mesh(4), params, **options)(params).output.sum()

    params = jax.tree.map(jnp.float32, arguments(4, 8, "random"))
    text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text)
    assert sum(shape in (f"{D},{F}", f"{F},{D}") for shape in shapes) == 3 * often


@pytest.mark.parametrize("form", mostly_exhaustive(FORMS, lambda form: "ring" not in form))
def test_more_rows_than_the_bound_are_nan_and_never_dropped(form):
    with jax.enable_x64(True):
        params = arguments(2, 8, "to one")  # a rank has T rows for the one with that expert
        call = partial(over, make_mesh(2), params, top_k=1, algorithm=form)
        free, bound, less = (jax.jit(call(max_send=m))(params) for m in (None, T, T - 1))
        close(bound, free, terms=D)
        is_nan = jnp.isnan(less.output)
        assert is_nan.any()
        close(jnp.where(is_nan, 0, less.output), jnp.where(is_nan, 0, free.output), terms=D)


@pytest.mark.parametrize(
    ("kind", "ranks", "tokens", "algorithm"),
    [
        ("TPU v6 lite", 8, 128, "gather"),  # a ring would read the weights in every round
        ("TPU v6 lite", 8, 8192, "bidirectional_ring"),
        ("TPU v6 lite", 64, 8192, "ragged_all_to_all"),  # 8 times as many as a token's experts
        ("NVIDIA H100 80GB HBM3", 8, 8192, "gather"),  # measured: permutes are slow there
        ("cpu", 8, 8192, "gather"),
        (None, 8, 8192, "gather"),
    ],
)
def test_auto_goes_by_the_price(kind, ranks, tokens, algorithm):
    assert fastest(Mixture(ranks, tokens, 64 // ranks, 8, 4096, 4096, 2), kind) == algorithm


@pytest.mark.parametrize(
    ("kind", "tokens", "pays"),
    [
        ("TPU v5p", 8192, True),
        ("TPU v5p", 1024, False),  # both halves read the weights for longer than they compute
        ("TPU v6 lite", 8192, False),
        ("TPU v5p", 0, False),
        ("NVIDIA H100 80GB HBM3", 8192, False),
        ("cpu", 8192, False),
        (None, 8192, False),
    ],
)
def test_halves_are_multiplied_apart_if_they_compute_longer_than_they_read(kind, tokens, pays):
    ranks = 8 if kind == "TPU v6 lite" else 16
    assert halves_pay(Mixture(ranks, tokens, 64 // ranks, 8, 4096, 4096, 2), kind) == pays


WRONG = {
    "a router of other features": ({"router": (5, 4)}, {}, ValueError, "pass x: [..., t, d]"),
    "no tokens' dimension": ({"x": (6,)}, {}, ValueError, "x is [6]"),
    "experts that do not divide": (
        {"router": (6, 5)},
        {},
        ValueError,
        "5 experts are not divisible by the 2 ranks",
    ),
    "top_k too great": ({}, {"top_k": 5}, ValueError, "top_k=5 of 4 experts; pass 1 to 4"),
    "no expert": ({}, {"top_k": 0}, ValueError, "top_k=0"),
    "half an expert": ({}, {"top_k": 1.5}, TypeError, "top_k=1.5 is not an integer"),
    "no bound": ({}, {"max_send": 0}, ValueError, "max_send=0; pass 1 or more, or None"),
    "no such algorithm": ({}, {"algorithm": "rings"}, ValueError, "algorithm='rings'; choose from"),
    "all experts on each rank": ({"gate": (4, 6, 5)}, {}, ValueError, "gate [4, 6, 5]"),
    "experts that are not sharded": (
        {"gate": (4, 6, 5), "up": (4, 6, 5), "down": (4, 5, 6)},
        {},
        ValueError,
        "a rank has 4 experts, not 2 (4 over 2 ranks)",
    ),
    "down the other way": ({"down": (2, 6, 5)}, {}, ValueError, "down: [experts, f, d]"),
    "experts of other features": (
        {"gate": (2, 3, 5), "up": (2, 3, 5), "down": (2, 5, 3)},
        {},
        ValueError,
        "x has 6 features, and the experts take 3; pass x: [..., t, d]",
    ),
    "another dtype": ({"dtype": jnp.bfloat16}, {}, TypeError, "gate is float32"),
    "integers": ({"dtype": jnp.int32}, {}, TypeError, "x is int32; pass real floats"),
    "floats of one byte": ({"dtype": jnp.float8_e5m2}, {}, TypeError, "of 2 bytes or more"),
    "no such axis": ({}, {"axis_name": "z"}, NameError, "layers.moe(x, router, experts, axis_nam"),
    "no array of tokens": (
        {"x": None},
        {},
        TypeError,
        "ringcoll.layers.moe: x=None is not an array; pass an array",
    ),
    "no router": ({"router": None}, {}, TypeError, "layers.moe: router=None is not an array"),
    "no array of weights": ({"up": None}, {}, TypeError, "layers.moe: up=None is not an array"),
    "an axis twice": ({}, {"axis_name": ("x", "x")}, ValueError, "name each axis once"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_say_what_is_wrong_before_anything_is_sent(case):
    changed, options, kind, words = WRONG[case]
    shapes = {"x": (7, 6), "router": (6, 4), "gate": (2, 6, 5), "up": (2, 6, 5), "down": (2, 5, 6)}
    of_x = changed.get("dtype", jnp.float32)

    def layer():
        x, router, *weights = (
            None if shape is None else jnp.zeros(shape, of_x if name == "x" else jnp.float32)
            for name, shape in (shapes | changed).items()
            if name in shapes
        )
        experts = dict(zip(("gate", "up", "down"), weights, strict=True))
        return ep.moe(x, router, experts, **({"axis_name": "x", "top_k": 2} | options))

    mapped = jax.shard_map(layer, mesh=make_mesh(2), in_specs=(), out_specs=P("x"))
    with pytest.raises(kind) as raised:
        jax.eval_shape(mapped)
    assert words in str(raised.value)


@pytest.mark.parametrize(("form", "max_send"), crossed(FORMS, [None, 1]))
def test_of_no_tokens_there_are_no_results(form, max_send):
    params = jax.tree.map(jnp.float32, arguments(2, 4, "random"))
    params["x"] = params["x"][:0]
    call = over(make_mesh(2), params, top_k=2, algorithm=form, max_send=max_send)

    @jax.jit
    def run(params):
        results, back = jax.vjp(call, params)
        return results, *back(jax.tree.map(jnp.ones_like, results))

    results, gradients = jax.device_get(run(params))
    assert (results.output.shape, results.balance_loss) == ((0, D), 0)
    chex.assert_trees_all_equal_shapes(gradients, params)
    assert not any(map(np.any, jax.tree.leaves(gradients)))


def test_specs_of_leaves_without_experts_are_refused():
    leaf = jax.ShapeDtypeStruct((6, 5), jnp.float32)
    with pytest.raises(
        ValueError, match=r"mlp/up has 2 dimensions; experts need their own dimension"
    ):
        ep.partition_specs({"mlp": {"up": leaf}}, "x")
    stacked = jax.ShapeDtypeStruct((3, 4, 6, 5), jnp.float32)
    assert ep.partition_specs({"up": stacked}, "x") == {"up": P(None, "x", None, None)}


@pytest.mark.parametrize(("form", "max_send"), crossed(FORMS, [None, 9]))
def test_results_have_the_dtype_of_the_tokens_whatever_a_kernel_returns(form, max_send):
    def product(rows, weights, sizes):
        return jax.lax.ragged_dot(rows, weights, sizes).astype(jnp.float32)

    params = jax.tree.map(jnp.bfloat16, arguments(2, 4, "random"))
    options = {"top_k": 2, "algorithm": form, "max_send": max_send, "kernel": product}
    call = over(make_mesh(2), params, **options)
    assert jax.eval_shape(call, params).output.dtype == jnp.bfloat16
    gradients = jax.eval_shape(jax.grad(lambda params: call(params).output.sum()), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("bfloat16")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["gather", "ring", "ragged_all_to_all"])
def test_a_kernel_of_pallas_multiplies_the_rows(form, monkeypatch):
    monkeypatch.setattr("test_expert_parallel.T", 8)  # its tiles have 8 rows
    kernel = partial(gmm, tiling=(8, 128, 128), interpret=True)
    params = jax.tree.map(jnp.float32, arguments(2, 4, "random"))
    ours, plain = (
        with_gradients(lambda params, call=call: tuple(call(params)))(params)
        for call in (
            over(make_mesh(2), params, top_k=2, algorithm=form, check_vma=False, kernel=one)
            for one in (kernel, None)
        )
    )
    chex.assert_trees_all_close(ours, plain, rtol=0, atol=1e-5)
