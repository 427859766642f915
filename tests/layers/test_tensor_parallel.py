"""Tables of tensor-parallel layers: results and gradients against one device, in float64.

A result is a chain of sums of at most T terms. Each sum is off by at most gamma(T) of the sum of
the magnitudes of its terms, and a layer has at most eight sums one after the other. The data and so
the magnitudes are of order one. So a result may be off by 8 gamma(T) of its largest element, times
32 for what exponentials and quotients amplify. In narrower floats the linear layers get small
integers, whose sums are exact in any order.
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
    dtypes,
    equal,
    messages,
    no_such_others,
    no_such_way,
    over_ranks,
    precisions,
    values,
    ways,
)
from support import make_mesh, per_rank

from ringcoll import algorithms
from ringcoll.layers import tensor_parallel as tp


def test_column_linear():
    x, w = np.arange(8.0).reshape(4, 1, 2), np.arange(24.0).reshape(4, 2, 3)
    y = per_rank(make_mesh(4), lambda x, w: tp.column_linear(w, x, "x", algorithm="ring"), x, w)
    np.testing.assert_array_equal(y, x.reshape(4, 2) @ w)


def test_row_linear():
    x, w = np.arange(32.0).reshape(4, 4, 2), np.arange(24.0).reshape(4, 2, 3)
    y = per_rank(make_mesh(4), lambda x, w: tp.row_linear(w, x, "x", algorithm="ring"), x, w)
    np.testing.assert_array_equal(y, (x @ w).sum(0).reshape(4, 1, 3))


def test_mlp_and_gated_mlp():
    x, up = np.arange(8.0).reshape(4, 1, 2) - 3, np.arange(24.0).reshape(4, 2, 3) - 11
    params, gate = {"up": up, "down": np.arange(24.0).reshape(4, 3, 2)}, {"gate": up + 5}
    options = {"axis_name": "x", "activation": jax.nn.relu, "algorithm": "ring"}
    one = per_rank(make_mesh(4), partial(tp.mlp, **options), params, x)
    two = per_rank(make_mesh(4), partial(tp.gated_mlp, **options), params | gate, x)
    rows, down = x.reshape(4, 2), params["down"]
    hidden = np.maximum(rows @ up, 0), np.maximum(rows @ (up + 5), 0) * (rows @ up)
    right = [(h @ down).sum(0).reshape(4, 1, 2) for h in hidden]
    np.testing.assert_array_equal([one, two], right)


def test_attention():
    """All queries are 0, so every token gets the mean of all values; a rank has one head."""
    x, w = np.arange(8.0).reshape(4, 1, 2), np.arange(16.0).reshape(4, 2, 1, 2)
    params = {"query": 0 * w, "key": w, "value": w, "out": w.reshape(4, 1, 2, 2)}
    call = partial(tp.attention, axis_name="x", causal=False, algorithm="ring")
    y = per_rank(make_mesh(4), call, params, x)
    right = np.einsum("d,rdhk,rhke->e", x.mean((0, 1)), w, params["out"])
    np.testing.assert_array_equal(y, [[right]] * 4)


D = 4
LINEAR = {
    "column_linear": (tp.column_linear, reference.linear, ("up",)),
    "row_linear": (tp.row_linear, reference.linear_of_heads, ("down",)),
    "mlp": (tp.mlp, reference.mlp, ("up", "down")),
    "gated_mlp": (tp.gated_mlp, reference.gated_mlp, ("gate", "up", "down")),
}
OPTIONS = {
    "algorithm": ["auto", "ring", algorithms.two_ended],
    "sequence_parallel": [True, False],
    "residuals": ["save", "regather"],
    "precision": [None, "highest"],
    "preferred_element_type": [None, "float64"],
    "accumulate_dtype": [None, "float64"],
}
FACTORS = OPTIONS | {
    "layer": [*LINEAR],
    "mesh": [*MESHES],
    "check_vma": [True, False],
    "dtype": ["float64", "bfloat16", "float32"],
    "bias": ["same dtype", "another dtype", None],
    "batch": [2, None, 0],
    "others": OTHERS,
    "variant": [False, True],  # a kernel of heads; of an MLP, an activation that is given
}


def not_linear(case):
    """XLA (0.12) cannot compile a `shard_map` all of whose operands are empty, as here backward.

    If types are not checked, JAX divides the cotangent of a result that n ranks share by n.
    """
    empty = (case.get("layer"), case.get("batch")) == ("column_linear", 0)
    shared = not (case.get("check_vma", True) or case.get("sequence_parallel", True))
    rounds = case.get("dtype", "float64") != "float64" and case.get("mesh") in UNEVEN
    wide = {case.get("preferred_element_type"), case.get("accumulate_dtype")} & {case.get("dtype")}
    return empty or (shared and rounds) or no_such_way(case) or "float64" in wide


#: Meshes whose ranks are no power of two.
UNEVEN = [mesh for mesh in MESHES if Place(mesh).n not in (1, 2, 4, 8)]


@cache
def linear_cases(seed):
    return covering(FACTORS | {"way": ways(seed)}, not_linear, seed)


def has_heads(case):
    return case["variant"] and case["layer"] in ("column_linear", "row_linear")


def linear(rng, case, n, by_rows):
    """The parameters of one linear layer, and their specs."""
    dtype, axes = case["dtype"], Place(case["mesh"]).axes
    cut = (3 * n, 2) if has_heads(case) else (3 * n,)
    kernel = values(rng, (*cut, D) if by_rows else (D, *cut), dtype)
    spec = P(axes) if by_rows else P(None, axes)
    if case["bias"] is None:
        return kernel, spec
    other = "float32" if dtype == "float64" else "float64"
    of_bias = dtype if case["bias"] == "same dtype" else other
    bias = values(rng, (D,) if by_rows else cut, dtype).astype(of_bias)
    return {"kernel": kernel, "bias": bias}, {"kernel": spec, "bias": P() if by_rows else P(axes)}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layer", LINEAR)
def test_linear_layers(layer, seed):
    check_each((case for case in linear_cases(seed) if case["layer"] == layer), check_linear)


def check_linear(case):
    place, rng = Place(case["mesh"]), np.random.default_rng(0)
    ours, theirs, names = LINEAR[case["layer"]]
    n, dtype, exact = place.n, case["dtype"], case["dtype"] != "float64"
    by_name = {name: linear(rng, case, n, by_rows=name == "down") for name in names}
    params, specs = ({name: pair[i] for name, pair in by_name.items()} for i in (0, 1))
    if len(names) == 1:
        params, specs = params[names[0]], specs[names[0]]
    (lead, of_batch), s = place.batch(case["batch"]), 2 * n
    sequence = place.axes if case["sequence_parallel"] else None
    by_columns, by_rows = P(*of_batch, None, place.axes), P(*of_batch, sequence)
    features = (D,)
    into, out = by_rows, by_rows
    if case["layer"] == "column_linear":
        out = by_columns
    if case["layer"] == "row_linear":
        into = by_columns
        features = (3 * n, 2) if has_heads(case) else (3 * n,)
    x = values(rng, (*lead, s, *features), dtype)
    options = {name: case[name] for name in OPTIONS}
    given = {}
    if len(names) > 1 and (case["variant"] or exact):
        given["activation"] = jax.nn.relu if exact else jnp.sin

    def layer(params, x):
        return ours(params, x, place.axes, **options, **given)

    mapped = over_ranks(case, WAYS[case["way"]](layer), (specs, into), out)
    y, program = compared(
        lambda of: mapped(*of),
        lambda of: partial(theirs, **given)(*of),
        ((params, x),),
        exact=exact,
        jit=case["way"] != "eager",
        check=equal if exact else partial(close, terms=1000),
    )
    assert y.dtype == (case["preferred_element_type"] or dtype)
    if case["way"] != "eager":
        wanted = case["precision"]
        assert precisions(program) == {wanted and jax.lax.Precision(wanted)}
        if case["preferred_element_type"] is None and case["accumulate_dtype"] is None:
            assert messages(program) <= {dtype, *dtypes(params)}


HEADS = {
    "mesh": ["the first of two axes", "the second of three axes", "two axes in the other order"],
    "keys": ["cut", "whole", "one head", "cut over the first axis"],
    "sequence_parallel": [True, False],
    "check_vma": [True, False],
    "causal": [True, False],
    "rotary_base": [100.0, None],
    "positions": ["of each row", None, "of the sequence"],
    "attend": ["given", None],
    "bias": [True, False],
    "precision": [None, "highest"],
    "batch": [2, None],
    "way": ["jit", "remat"],
    "dtype": ["float64", "bfloat16"],
    "others": OTHERS,
}


def not_heads(case):
    """Heads of keys are cut over the first of two axes only if there are two."""
    axes = MESHES[case.get("mesh", "two axes")][1]
    first = case.get("keys") == "cut over the first axis" and isinstance(axes, str)
    rows = case.get("batch", 2) is None and case.get("positions") == "of each row"
    return first or rows or no_such_others(case)


@pytest.mark.parametrize("seed", SEEDS)
def test_attention_of_heads(seed):
    check_each(covering(HEADS, not_heads, seed), check_attention)


def check_attention(case):
    """Scores of `jax.nn.dot_product_attention` are float32; those of the reference are float64."""
    place, rng, k = Place(case["mesh"]), np.random.default_rng(3), 4
    n, axes, dtype = place.n, place.axes, case["dtype"]
    cut = {"cut": axes, "whole": (), "one head": (), "cut over the first axis": axes[0]}
    groups = {"whole": 2, "one head": 1}.get(case["keys"], 2 * n)
    # A rank's queries may begin within the queries of a head of keys.
    heads = {1: n, 2: 2 * n if n % 2 else 3 * n}.get(groups, 4 * n)
    shapes = {"query": (D, heads, k), "key": (D, groups, k), "value": (D, groups, k)}
    of_keys = cut[case["keys"]] or None
    specs = {"query": P(None, axes), "key": P(None, of_keys), "value": P(None, of_keys)}
    params = {name: values(rng, shape, "float64") for name, shape in shapes.items()}
    params["out"], specs["out"] = rng.standard_normal((heads, k, D)) / heads, P(axes)
    if case["bias"]:
        for name, shape in {**shapes, "out": (0, D)}.items():
            params[name] = {"kernel": params[name], "bias": values(rng, shape[1:], "float64")}
            bias = P() if name == "out" else P(*specs[name][1:])
            specs[name] = {"kernel": specs[name], "bias": bias}
    (lead, of_batch), s = place.batch(case["batch"]), 2 * n
    x = rng.standard_normal((*lead, s, D))
    params, x = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), (params, x))
    positions = {"of the sequence": 1000 + 3 * np.arange(s)[::-1]}.get(case["positions"])
    if case["positions"] == "of each row":
        positions = 7 * np.arange(lead[0])[:, None] + np.arange(s)
    attend = {"given": partial(reference.attend, causal=case["causal"])}.get(case["attend"])
    options = {name: case[name] for name in ("sequence_parallel", "precision", "causal")}
    options |= {"rotary_base": case["rotary_base"], "attend": attend}
    is_typed = case["check_vma"] and case["keys"] != "one head"
    options["kv_heads"] = None if is_typed or groups == 1 else groups

    def layer(params, x, positions):
        return tp.attention(params, x, axes, positions=positions, **options)

    into = P(*of_batch, axes if case["sequence_parallel"] else None)
    of_rows = None if positions is None else P(*of_batch[: positions.ndim - 1])
    layer = jax.numpy_rank_promotion("allow")(WAYS[case["way"]](layer))
    mapped = over_ranks(case, layer, (specs, into, of_rows), into)

    def right(floats, positions=None):
        params, x = floats
        base = case["rotary_base"]
        return reference.attention(params, x, case["causal"], positions, base)

    # Queries, keys, values, weights, heads and the result are rounded, forward and back.
    single = np.float64 if attend else np.float32
    y, program = compared(
        lambda floats, positions=None: mapped(*floats, positions),
        right,
        ((params, x),) if positions is None else ((params, x), positions),
        check=partial(close, terms=10_000, roundings=8, narrowest=single),
    )
    assert y.dtype == dtype
    if case["precision"]:
        assert jax.lax.Precision.HIGHEST in precisions(program)
