"""What layers send and keep: counted in their programs."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import make_mesh
from test_matmul_structure import hops

from ringcoll import layers
from ringcoll.layers import tensor_parallel as tp
from ringcoll.matmuls import auto

N, D, F, V, S = 4, 8, 16, 32, 8
BUILT_IN = re.compile(r"\b(all_gather|psum|reduce_scatter|all_to_all)(_invariant)?\[")


def abstract(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


LAYERS = {
    "mlp": (tp.mlp, abstract(up=(D, F), down=(F, D))),
    "gated_mlp": (tp.gated_mlp, abstract(gate=(D, F), up=(D, F), down=(F, D))),
    "attention": (
        tp.attention,
        abstract(query=(D, 8, 4), key=(D, 4, 4), value=(D, 4, 4), out=(8, 4, D)),
    ),
}


def traced(layer, params, sequence_parallel, gradients, algorithm="ring"):
    """The program of a layer on four ranks, and of its gradients."""
    mesh, specs = make_mesh(N), tp.partition_specs(params, "x")
    x = jax.ShapeDtypeStruct((2, S, D), jnp.float32)
    data = P(None, "x" if sequence_parallel else None)

    def call(params, x):
        return layer(params, x, "x", sequence_parallel=sequence_parallel, algorithm=algorithm)

    def both(params, x):
        y, pull_back = jax.vjp(call, params, x)
        return pull_back(y)

    function, out = (both, (specs, data)) if gradients else (call, data)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(specs, data), out_specs=out)
    return jax.make_jaxpr(mapped)(params, x)


def rounds(program):
    """How often a shard goes round, in products under the wire and in collectives by rings."""
    text = str(program)
    collectives = text.count("= ringcoll_all_gather[") + 2 * text.count("= ringcoll_psum[")
    return hops(program.jaxpr) / (N - 1) + collectives


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_layer_goes_round_twice_each_way(name, sequence_parallel):
    """Forward: a gather, then a reduce-scatter. Backward: a gather and a reduce-scatter again.

    Replicated activations leave by a reduce-scatter and a gather. Backward, the cotangent of x is
    all-reduced; that of the result is on every rank already.
    """
    for gradients, times in ((False, 2), (True, 4)):
        program = traced(*LAYERS[name], sequence_parallel, gradients)
        assert rounds(program) == times
        assert not BUILT_IN.search(str(program))


def alone(params, x, axis_name, **how):
    """Nothing but a `row_linear`."""
    return tp.row_linear(params, jnp.tile(x, (1, N, 1)), axis_name, **how)


@pytest.mark.parametrize(
    ("layer", "params", "follows"),
    [*((*layer, True) for layer in LAYERS.values()), (alone, abstract(kernel=(D, F)), False)],
    ids=[*LAYERS, "row_linear"],
)
def test_auto_knows_whether_other_work_comes_before_a_scatter(layer, params, follows, monkeypatch):
    """Compilers fetch the weight of the scatter meanwhile."""
    seen = []

    def to_scatter(scatter, *_):
        seen.append(scatter.follows)
        return "lax"

    monkeypatch.setattr(auto, "to_scatter", to_scatter)
    traced(layer, params, True, gradients=False, algorithm="auto")
    assert seen == [follows]


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_no_logits_are_sent(n):
    """Nothing of the size of a vocabulary is an operand of a collective."""
    mesh = make_mesh(n)

    def loss(logits, labels):
        return tp.cross_entropy(logits, labels, "x", algorithm="ring").sum()

    def both(logits, labels):
        return jax.value_and_grad(loss)(logits, labels)

    mapped = jax.shard_map(
        both, mesh=mesh, in_specs=(P(None, "x"), P()), out_specs=(P(), P(None, "x"))
    )
    text = str(jax.make_jaxpr(mapped)(np.ones((6, 64 * n), jnp.bfloat16), np.zeros(6, int)))
    assert text.count("= ringcoll_pmax[") == 1
    assert text.count("= ringcoll_psum[") == 1
    assert not BUILT_IN.search(text)


def test_of_logits_no_float32_is_kept():
    """They are kept for the gradient in their own dtype."""
    logits = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((8,), jnp.int32)

    def kept(logits, labels):
        loss = partial(tp.cross_entropy, axis_name="x")
        return jax.tree.leaves(jax.vjp(lambda x: loss(x, labels), logits)[1])

    mesh = make_mesh(N)
    mapped = jax.shard_map(kept, mesh=mesh, in_specs=(P(None, "x"), P()), out_specs=P("x"))
    wide = [x for x in jax.eval_shape(mapped, logits, labels) if x.ndim == 2]
    assert {x.dtype for x in wide} == {jnp.dtype(jnp.bfloat16)}


def test_tokens_outside_the_vocabulary_make_nans():
    mesh, table = make_mesh(2), {"embedding": np.arange(24, dtype=np.float32).reshape(12, 2)}
    tokens = np.array([[0, 5, 6, 11, 12, -1, 3, 99]])

    def both(table, tokens):
        rows = tp.embed(table, tokens, "x")
        logits = tp.column_linear(jnp.ones((2, 6)), jnp.nan_to_num(rows), "x")
        return rows, tp.cross_entropy(logits, tokens, "x")

    specs = tp.partition_specs(table, "x")
    out = (P(None, "x"), P())
    mapped = jax.shard_map(both, mesh=mesh, in_specs=(specs, P()), out_specs=out)
    rows, losses = jax.jit(mapped)(table, tokens)
    is_one = (tokens >= 0) & (tokens < 12)
    np.testing.assert_array_equal(np.isnan(rows).all(-1), ~is_one)
    np.testing.assert_array_equal(np.isnan(losses), ~is_one)
    np.testing.assert_array_equal(rows[is_one], table["embedding"][tokens[is_one]])


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.uint32])
def test_tokens_may_be_narrow(dtype):
    """The vocabulary is larger than their dtype can count."""
    size = 2**16 if dtype in (np.int16, np.uint16) else 264
    mesh, table = make_mesh(2), {"embedding": np.arange(size, dtype=np.float32)[:, None]}
    tokens = np.array([[0, 7, 8, 131, 132, 255]], dtype)

    def both(table, tokens):
        logits = jnp.broadcast_to(table["embedding"].T / size, (6, size // 2))[None]
        return tp.embed(table, tokens, "x"), tp.cross_entropy(logits, tokens, "x")

    mapped = jax.shard_map(both, mesh=mesh, in_specs=(P("x"), P()), out_specs=(P(None, "x"), P()))
    rows, losses = jax.jit(mapped)(table, tokens)
    np.testing.assert_array_equal(rows[..., 0], tokens)
    wide = np.arange(size) / size
    expected = np.log(np.exp(wide).sum()) - wide[tokens.astype(int)]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=size * 2.0**-23)


@pytest.mark.parametrize("check_vma", [True, False])
def test_random_numbers_differ_where_they_should(check_vma):
    mesh = make_mesh(2, 1, 3)
    key = jax.random.key(0)

    def masks(axes):
        def mask():
            return jax.random.bits(layers.fold_rng_over_axis(key, axes), (1, 1, 1, 4))

        mapped = jax.shard_map(
            mask, mesh=mesh, in_specs=(), out_specs=P("x", "y", "z"), check_vma=check_vma
        )
        return np.asarray(jax.jit(mapped)())[:, 0]  # of each x and z

    assert len(np.unique(masks("x"), axis=0)) == 2
    np.testing.assert_array_equal(masks("x"), masks("x")[:, :1].repeat(3, 1))
    np.testing.assert_array_equal(masks("z"), masks("z")[:1].repeat(2, 0))
    assert len(np.unique(masks(("x", "y", "z")).reshape(6, 4), axis=0)) == 6
    assert len(np.unique(masks(()).reshape(6, 4), axis=0)) == 1


def test_gradients_are_summed_while_that_of_a_call_is_computed():
    """The sum starts after its cotangent is there, and ends before its gradient is used."""
    mesh = make_mesh(2)
    x, w = np.arange(8, dtype=np.float32), np.arange(4, dtype=np.float32)
    taken = np.array([1, 0, 3, 2])  # not a float: it has no gradient, and changes nothing

    def both(x, w):
        def loss(x, w):
            call = lambda x, taken: jnp.sin(x[taken])  # noqa: E731
            y, copied_w = tp.copied_beside(call, (x, taken), w, "x", algorithm="ring")
            return (y * copied_w).sum()

        return jax.grad(loss, (0, 1))(x, w)

    mapped = jax.shard_map(both, mesh=mesh, in_specs=(P("x"), P()), out_specs=(P("x"), P()))
    ct_x, ct_w = jax.jit(mapped)(x, w)
    rows = x.reshape(2, 4)
    # To within the roundings of a sine, a cosine and one product or sum.
    np.testing.assert_allclose(ct_w, np.sin(rows[:, taken]).sum(0), rtol=0, atol=2**-21)
    np.testing.assert_allclose(ct_x, (np.cos(rows) * w[taken]).reshape(-1), rtol=0, atol=2**-19)
    text = str(jax.make_jaxpr(mapped)(x, w))
    first, last = (find("optimization_barrier") for find in (text.index, text.rindex))
    # The gradient of the call is one product with a cosine, written back to its place.
    assert first < text.index("ringcoll_psum[") < last
    assert first < text.index("scatter-add") < last
