"""Tables of the layers of a vocabulary, and what they do with tokens that are not in it.

Bounds are those of `test_tensor_parallel`. Logits have the mean 100, where bfloat16 has steps of a
half: a loss that is computed in it is wrong by more than the bound.
"""

from functools import cache, partial

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
    equal,
    messages,
    no_such_way,
    over_ranks,
    precisions,
    values,
    ways,
)
from support import make_mesh, per_rank

from ringcoll.layers import tensor_parallel as tp


def test_embed():
    table, tokens = np.arange(24.0).reshape(4, 3, 2), np.array([11, 0, 5, 7])
    call = partial(tp.embed, tokens=tokens, axis_name="x", algorithm="ring")
    y = per_rank(make_mesh(4), call, {"embedding": table})
    np.testing.assert_array_equal(y, table.reshape(12, 2)[tokens].reshape(4, 1, 2))


def test_unembed():
    x, w = np.arange(8.0).reshape(4, 1, 2), np.arange(24.0).reshape(4, 2, 3)
    call = partial(tp.unembed, axis_name="x", algorithm="ring")
    y = per_rank(make_mesh(4), call, {"unembedding": w}, x)
    np.testing.assert_array_equal(y, x.reshape(4, 2) @ w)


def test_cross_entropy():
    logits, labels = np.arange(16.0).reshape(4, 2, 2) % 5, np.array([6, 1])  # two of 8 on a rank
    call = partial(tp.cross_entropy, labels=labels, axis_name="x", algorithm="ring")
    losses = np.log(np.exp(logits).sum((0, 2))) - [logits[3, 0, 0], logits[0, 1, 1]]
    np.testing.assert_allclose(per_rank(make_mesh(4), call, logits), [losses] * 4, rtol=1e-6)


D = 4
FACTORS = {
    "layer": ["embed", "unembed", "cross_entropy"],
    "mesh": [*MESHES],
    "algorithm": ["auto", "ring", "bidirectional_ring"],
    "sequence_parallel": [True, False],
    "check_vma": [True, False],
    "dtype": ["float64", "bfloat16", "float32"],
    "ids": ["int32", "uint8", "int64"],
    "precision": [None, "highest"],
    "batch": [2, None, 0],
    "others": OTHERS,
}


def not_compiled(case):
    """XLA (0.12) cannot compile a `shard_map` all of whose operands are empty, as here backward.

    JAX gathers in one, if rows are sharded over an explicit axis, and not in a `vmap`.
    """
    layer, gathers = case.get("layer"), case.get("others") == "explicit"
    empty = case.get("batch") == 0 and (layer == "unembed" or (layer == "embed" and gathers))
    batched = layer == "embed" and gathers and case.get("way") == "vmap"
    return empty or batched or no_such_way(case)


@cache
def cases(seed):
    return covering(FACTORS | {"way": ways(seed)}, not_compiled, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layer", FACTORS["layer"])
def test_layers_of_a_vocabulary(layer, seed):
    check_each((case for case in cases(seed) if case["layer"] == layer), check)


def check(case):
    place, rng = Place(case["mesh"]), np.random.default_rng(1)
    axes, n, dtype, layer = place.axes, place.n, case["dtype"], case["layer"]
    (lead, of_batch), s, v = place.batch(case["batch"]), 2 * n, 3 * n
    ids = rng.integers(0, v, (*lead, s)).astype(case["ids"])
    sequence = axes if case["sequence_parallel"] else None
    options = {"algorithm": case["algorithm"]}
    if layer != "cross_entropy":
        options["sequence_parallel"] = case["sequence_parallel"]
    if layer == "unembed":
        options["precision"] = case["precision"]
    ours, theirs = getattr(tp, layer), getattr(reference, layer)
    exact, result = layer != "cross_entropy" and dtype != "float64", dtype
    if layer == "embed":
        floats, others = ({"embedding": values(rng, (v, D), dtype)},), (ids,)
        specs, out = ({"embedding": P(axes)}, P(*of_batch, None)), P(*of_batch, sequence)
    elif layer == "unembed":
        x = values(rng, (*lead, s, D), dtype)
        floats, others = ({"unembedding": values(rng, (D, v), dtype)}, x), ()
        specs = {"unembedding": P(None, axes)}, P(*of_batch, sequence)
        out = P(*of_batch, None, axes)
    else:
        x = (100 + 3 * rng.standard_normal((*lead, s, v))).astype(jnp.dtype(dtype))
        floats, others = ((), x), (ids,)
        specs, out = (P(), P(*of_batch, None, axes), P(*of_batch, None)), P(*of_batch, None)
        result = jnp.promote_types(dtype, jnp.float32)

    def call(params, *data):
        given = data if layer == "cross_entropy" else (params, *data)
        return ours(*given, axes, **options)

    mapped = over_ranks(case, WAYS[case["way"]](call), specs, out)
    y, program = compared(
        lambda floats, *others: mapped(*floats, *others),
        lambda floats, *others: theirs(*floats[layer == "cross_entropy" :], *others),
        (floats, *others),
        exact=exact,
        jit=case["way"] != "eager",
        check=equal if exact else partial(close, terms=1000, roundings=3),
    )
    assert y.dtype == result
    if case["way"] != "eager":
        wanted = case["precision"] if layer == "unembed" else None
        assert precisions(program) <= {wanted and jax.lax.Precision(wanted)}
        assert messages(program) <= {jnp.dtype(result).name}


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32])
def test_of_a_token_outside_the_vocabulary_there_is_nan(dtype):
    """Also if the vocabulary is larger than the dtype of the tokens can count."""
    size = 264 if dtype is np.uint8 else 12
    tokens = np.array([[0, 5, 6, 11, 12, -1, 3, 99]])
    tokens = np.abs(tokens) % 256 if dtype is np.uint8 else tokens
    table = {"embedding": np.arange(2 * size, dtype=np.float32).reshape(size, 2)}

    def both(table, tokens):
        rows = tp.embed(table, tokens, "x")
        logits = jnp.zeros((*tokens.shape, size // 2), jnp.float32)
        return rows, tp.cross_entropy(logits, tokens, "x")

    mapped = jax.shard_map(
        both, mesh=make_mesh(2), in_specs=(P("x"), P()), out_specs=(P(None, "x"), P())
    )
    of_tokens = lambda table: jax.jit(mapped)(table, tokens.astype(dtype))  # noqa: E731
    (rows, losses), (forward, _) = jax.jvp(of_tokens, (table,), (table,))
    is_one = (tokens >= 0) & (tokens < size)
    np.testing.assert_array_equal(np.isnan(rows).all(-1), ~is_one)
    np.testing.assert_array_equal(np.isnan(losses), ~is_one)
    np.testing.assert_array_equal(rows[is_one], table["embedding"][tokens[is_one]])
    np.testing.assert_array_equal(forward[is_one], rows[is_one])  # they are linear in the table
    np.testing.assert_allclose(losses[is_one], np.log(size), rtol=2.0**-22)


def losses_of(logits, labels, **options):
    mapped = jax.shard_map(
        partial(tp.cross_entropy, axis_name="x", **options),
        mesh=make_mesh(4),
        in_specs=(P(None, "x"), P()),
        out_specs=P(),
    )
    return mapped(logits, labels)


@pytest.mark.parametrize("shift", [200.0, -200.0])
def test_large_logits_have_a_loss_and_its_derivatives(shift):
    """exp(200) overflows float32, and exp(-200) is 0. Second derivatives go forward over back."""
    rng = np.random.default_rng(4)
    logits, along = rng.standard_normal((2, 3, 8)).astype(np.float32)
    logits, labels = logits + np.float32(shift), np.array([0, 5, 7])

    def derivatives(losses, logits, along):
        total = lambda logits: (losses(logits, labels) ** 2).sum()  # noqa: E731
        value, slope = jax.value_and_grad(total)(logits)
        return value, slope, jax.jvp(jax.grad(total), (logits,), (along,))[1]

    found = jax.jit(partial(derivatives, losses_of))(logits, along)
    expected = jax.jit(partial(derivatives, reference.cross_entropy))(logits, along)
    for got, wanted in zip(found, expected, strict=True):
        # float32: a logit of 200 has roundings of 2**-16, which a loss of order ten keeps
        np.testing.assert_allclose(got, wanted, rtol=0, atol=500 * 2.0**-16)


def test_no_logits_are_sent_and_none_are_kept_in_float32():
    """Nothing of the size of a vocabulary is an operand of a collective."""
    logits, labels = jax.ShapeDtypeStruct((6, 64 * 4), jnp.bfloat16), np.zeros(6, int)
    kept = []

    def both(logits, labels):
        losses, back = jax.vjp(lambda x: tp.cross_entropy(x, labels, "x", algorithm="ring"), logits)
        kept.extend(x.dtype for x in jax.tree.leaves(back) if x.ndim == 2)
        return losses, back(losses)[0]

    mapped = jax.shard_map(
        both, mesh=make_mesh(4), in_specs=(P(None, "x"), P()), out_specs=(P(), P(None, "x"))
    )
    text = str(jax.make_jaxpr(mapped)(logits, labels))
    assert {*kept} == {jnp.dtype(jnp.bfloat16)}
    assert (text.count("= ringcoll_pmax["), text.count("= ringcoll_psum[")) == (1, 1)
    assert not any(f" {name}[" in text for name in ("all_gather", "psum", "pmax", "all_to_all"))
