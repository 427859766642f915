"""Attention over ranks, and its gradients, against attention on one device, in float64.

Every result is a chain of at most four sums of no more than T = s + d terms, of numbers of order
one. Each is off by at most gamma(T) of its magnitudes; exponentials and quotients amplify that,
here by less than 64.
"""

from functools import partial
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import layer_cases
import numpy as np
import pytest
from covering import SEEDS, covering
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from layer_cases import MESHES, OTHERS, Place, check_each, close, compared, no_other_axes
from support import make_mesh, per_rank

import ringcoll
from ringcoll.layers import context_parallel as cp
from ringcoll.runtime import run as running

pytestmark = pytest.mark.usefixtures("small_tiles")


def test_attention():
    """All queries are 0, so a position gets the mean of the values up to it."""
    v = np.arange(16.0).reshape(4, 1, 2, 1, 2)  # of eight positions
    call = partial(cp.attention, axis_name="x", causal=True, algorithm="ring")
    y = per_rank(make_mesh(4), lambda v: call(0 * v, v, v), v)
    means = v.reshape(8, 2).cumsum(0) / np.arange(1, 9)[:, None]
    np.testing.assert_allclose(y.reshape(8, 2), means, rtol=1e-6)


def test_arrange_and_restore():
    x = np.array([0, 1, 6, 7, 2, 3, 4, 5])
    np.testing.assert_array_equal(cp.arrange(np.arange(8), 2, "zigzag", dim=0), x)
    np.testing.assert_array_equal(cp.restore(x, 2, "zigzag", dim=0), np.arange(8))


D, E = 4, 3
LAYOUTS = ["zigzag", "striped", "contiguous"]


def reference(q, k, v, ids=None, causal=True, window=None, scale=None):
    """Attention on one device, with all scores at once."""
    times, s = q.shape[2] // k.shape[2], q.shape[1]
    k, v = jnp.repeat(k, times, 2), jnp.repeat(v, times, 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (scale or q.shape[-1] ** -0.5)
    query, key = np.arange(s)[:, None], np.arange(s)[None]
    seen = np.ones((1, 1, s, s), bool)
    if causal:
        seen = seen & (key <= query)
    if window:
        seen = seen & (abs(query - key) < window)
    if ids is not None:
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)


def operands(s, batch=2, groups=2, heads=4, mean=0.0):
    """Queries, keys, values and segments of the whole sequence."""
    rng = np.random.default_rng(0)
    shapes = (heads, D), (groups, D), (groups, E)
    qkv = (rng.standard_normal((batch, s, *shape)) + mean for shape in shapes)
    return *qkv, np.sort(rng.integers(0, 3, (batch, s)), 1)


def over_ranks(mesh, axes, layout, check_vma=True, wrap=lambda f: f, **options):
    """A function of (q, k, v, ids); operands and result are in the order of positions."""

    def mapped(call, specs, out):
        options = {"in_specs": specs, "out_specs": out, "check_vma": check_vma}
        return jax.shard_map(call, mesh=mesh, **options)

    n = int(np.prod([mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes)]))
    return in_order(mapped, n, axes, layout, wrap, **options)


def in_order(over, n, axes, layout, wrap, batch=None, **options):
    """The same for a function `over` of a call, specs and the spec of the result."""
    spec = P(batch, axes)

    def whole(q, k, v, ids=None):
        def call(q, k, v, ids):
            def attend(q, k, v, ids=None):
                return cp.attention(q, k, v, axes, layout=layout, segment_ids=ids, **options)

            return wrap(attend)(q, k, v, *(() if ids is None else (ids,)))

        mapped = over(call, (spec, spec, spec, None if ids is None else spec), spec)
        q, k, v = (cp.arrange(x, n, layout) for x in (q, k, v))
        ids = None if ids is None else cp.arrange(ids, n, layout)
        return cp.restore(mapped(q, k, v, ids), n, layout)

    return whole


def kernel_of(q, k, v, *, causal=None, mask=None):
    """All scores at once, with their log-sum-exp, as a fused kernel returns them."""
    scores = jnp.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * q.shape[-1] ** -0.5
    if causal:
        scores = jnp.where(np.tri(*scores.shape[2:], dtype=bool), scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask.visible()[:, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1)
    out = jnp.einsum("bhqk,bkd->bqhd", jnp.exp(scores - lse[..., None]), v[:, :, 0])
    return out, lse.transpose(0, 2, 1)


WAYS = {
    "jit": lambda f: f,
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda *x: jax.vmap(f)(*(y[:, None] for y in x))[:, 0],
    "scan": lambda f: lambda *x: jax.lax.scan(lambda c, _: (c, f(*x)), 0, jnp.arange(2))[1][0],
}
TABLE = {
    "mesh": [*MESHES],
    "algorithm": [
        *("ring", "bidirectional_ring", "lax", "two_ended", "bruck", "auto", "ulysses"),
        *("hamiltonian", ("ring", "ulysses"), ("ulysses", "bidirectional_ring")),
    ],
    "layout": LAYOUTS,
    "causal": [True, False],
    "window": [None, 5, 1, 100],
    "segments": [False, True],
    "length": [6, 22, 2],  # one tile and a part; several tiles, filled up; less than a tile
    "heads": [(4, 8), (1, 2), (4, 4)],  # of keys, and of queries
    "scale": [None, 0.3],
    "kernel": [None, kernel_of],
    "batch": [2, 1, 0],
    "dtype": ["float64", "bfloat16", "float32"],
    "way": [*WAYS],
    "unroll_up_to": [8, 2],
    "others": OTHERS,
    "check_vma": [True, False],
}
#: A program takes seconds to compile, so the usual table has few values of what costs most.
USUAL = {
    "mesh": ["the second of three axes", "two axes in the other order"],
    "algorithm": ["ring", "bidirectional_ring", "lax", ("ring", "ulysses")],
    "window": [None, 5, 1],
    "length": [6, 22],
    "batch": [2, 2, 0],
    "heads": [(4, 8), (1, 2)],
    "dtype": ["float64", "bfloat16"],
    "way": ["jit", "remat", "vmap"],
}


def no_attention(case):
    axes = MESHES[case.get("mesh", "two axes")][1]
    algorithm, heads = case.get("algorithm", "lax"), case.get("heads", (4, 8))
    of_axes = isinstance(algorithm, tuple) or algorithm == "hamiltonian"
    by_heads = "ulysses" in algorithm
    ranks = 1 if "mesh" not in case else Place(case["mesh"]).n
    uneven = by_heads and (heads[0] == 1 or ranks not in (1, 2, 4))
    batched = case.get("way") in ("vmap", "scan") and case.get("batch", 2) == 0
    # The kernel scales by the width, and there is no need of it for the gradients.
    scaled = bool(case.get("kernel")) and case.get("scale") is not None
    # XLA (0.12) cannot compile a `shard_map` in another one, all of whose operands are empty, and
    # JAX cannot make one in a `vmap` along an explicit axis.
    inside = case.get("batch", 2) == 0 or case.get("way") == "vmap"
    batched |= case.get("others") == "explicit" and inside
    batched |= case.get("others", "manual") != "manual" and no_other_axes(case)
    return (of_axes and isinstance(axes, str)) or uneven or batched or scaled


@pytest.mark.parametrize("seed", SEEDS)
def test_attention_is_that_of_one_device(seed):
    check_each(covering(TABLE if seed else TABLE | USUAL, no_attention, seed), check)


def check(case):
    place, dtype = Place(case["mesh"]), case["dtype"]
    s, (groups, heads) = place.n * case["length"], case["heads"]
    *qkv, ids = operands(s, case["batch"] * place.replicas, groups, heads)
    qkv = tuple(x.astype(jnp.dtype(dtype)) for x in qkv)
    masking = {name: case[name] for name in ("causal", "window", "scale")}
    ours = in_order(
        partial(layer_cases.over_ranks, case),
        place.n,
        place.axes,
        case["layout"],
        WAYS[case["way"]],
        batch=place.others or None,
        algorithm=case["algorithm"],
        kernel=case["kernel"],
        **masking,
    )
    others = (ids,) if case["segments"] else ()
    with mock.patch.object(running, "UNROLL_UP_TO", case["unroll_up_to"]):
        y, _ = compared(
            lambda qkv, *ids: ours(*qkv, *ids),
            lambda qkv, *ids: reference(*qkv, *ids, **masking),
            (qkv, *others),
            check=partial(close, terms=4 * (s + D), roundings=6),  # weights, sums and results
        )
    assert y.dtype == dtype


def splash(q, k, v, *, causal):
    """JAX's fused attention for TPUs, interpreted."""
    length, heads, width = q.shape[1:]
    mask = (masks.CausalMask if causal else masks.FullMask)((length, length))
    attend = kernels.make_splash_mqa(
        masks.MultiHeadMask([mask] * heads),
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
        interpret=True,
        block_sizes=kernels.BlockSizes(block_q=128, block_kv=128, block_kv_compute=128),
    )

    def one(q, k, v):
        out, (lse,) = attend(q * width**-0.5, k, v)
        return out, lse

    out, lse = jax.vmap(one)(q.transpose(0, 2, 1, 3), k[:, :, 0], v[:, :, 0])
    return out.transpose(0, 2, 1, 3), lse.transpose(0, 2, 1)


def test_a_kernel_of_pallas_computes_blocks():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 512, h, 128), np.float32) for h in (2, 1, 1))
    options = {"causal": True, "algorithm": "ring", "kernel": splash}
    attend = over_ranks(make_mesh(2), "x", "zigzag", check_vma=False, **options)
    found, expected = jax.jit(attend)(q, k, v), reference(q, k, v)
    chex.assert_trees_all_close(found, expected, rtol=0, atol=2e-5)


def test_a_kernel_keeps_what_is_not_a_number():
    q, k, v, _ = operands(12)
    q = jnp.asarray(q).at[:, 3].set(jnp.nan)
    options = {"causal": True, "window": 3, "algorithm": "ring", "kernel": kernel_of}
    out = jax.jit(over_ranks(make_mesh(2), "x", "contiguous", **options))(q, k, v)
    assert np.isnan(np.asarray(out)).all(axis=(0, 2, 3)).tolist() == [i == 3 for i in range(12)]


@pytest.mark.parametrize("empty", ["heads", "width"])
def test_of_nothing_there_is_nothing(empty):
    """With no heads, or no features of one position on a rank; and with a very wide window."""
    q, k, v, ids = operands(12 if empty == "heads" else 2)
    q = q[:, :, :0] if empty == "heads" else q[..., :0]
    k = k if empty == "heads" else k[..., :0]
    options = {"causal": True, "window": 2**40, "scale": 1.0}
    ours = over_ranks(make_mesh(2), "x", "contiguous", algorithm="ring", **options)
    with jax.enable_x64(True):
        compared(
            lambda qkv: ours(*qkv, ids),
            lambda qkv: reference(*qkv, ids, **options),
            ((q, k, v),),
            check=partial(close, terms=100),
        )


@pytest.mark.parametrize("mesh", MESHES)
def test_layouts_bring_tokens_and_positions_in_and_back(mesh):
    place = Place(mesh)
    for layout in LAYOUTS:
        x = np.arange(2 * 4 * place.n * 3).reshape(2, 4 * place.n, 3)
        arranged = cp.arrange(x, place.n, layout)
        chex.assert_trees_all_equal(np.asarray(cp.restore(arranged, place.n, layout)), x)
        held = partial(cp.position_ids, place.axes, 4, layout)
        mapped = jax.shard_map(held, mesh=place.mesh, in_specs=(), out_specs=P(place.axes))
        ids = np.asarray(jax.jit(mapped)())
        assert ids.dtype == np.int32
        chex.assert_trees_all_equal(np.asarray(arranged), x[:, ids])


def test_layouts_of_arrays_that_are_sharded_over_an_explicit_axis():
    with jax.set_mesh(make_mesh(4, axis_type=AxisType.Explicit)):
        sequence = np.arange(32).reshape(2, 16)
        x = jax.device_put(sequence, P(None, "x"))
        arranged = jax.jit(lambda x: cp.arrange(x, 4, "zigzag"))(x)
        assert jax.typeof(arranged).sharding.spec == P(None, "x")
        chex.assert_trees_all_equal(np.asarray(cp.restore(arranged, 4, "zigzag")), sequence)
        chex.assert_trees_all_equal(
            np.asarray(arranged), np.asarray(cp.arrange(sequence, 4, "zigzag"))
        )


@pytest.mark.parametrize("heads", [4, 8])
def test_auto_counts_the_heads_of_a_device(heads):
    """Over four ranks, a device has two or four heads, as the others are on an explicit axis."""
    types = AxisType.Auto, AxisType.Explicit
    mesh = jax.make_mesh((4, 2), ("x", "t"), axis_types=types)
    x = jax.random.normal(jax.random.key(0), (1, 16, heads, 4))
    spec = P(None, "x")

    def attend(x, algorithm):
        call = partial(cp.attention, axis_name="x", causal=True, algorithm=algorithm)
        mapped = jax.shard_map(
            lambda x: call(x, x, x), in_specs=spec, out_specs=spec, axis_names={"x"}
        )
        return np.asarray(jax.jit(mapped)(x))

    with jax.set_mesh(mesh):
        x = jax.device_put(x, P(None, None, "t"))
        np.testing.assert_allclose(attend(x, "auto"), attend(x, "ring"), atol=1e-5)


def test_auto_is_what_is_named_around_it():
    x = jnp.ones((1, 8, 2, 4))
    attend = over_ranks(make_mesh(4), "x", "contiguous", causal=True)
    with ringcoll.algorithm("two_ended"):
        text = jax.jit(attend).lower(x, x, x).as_text(debug_info=True)
        (_, plan), *_ = ringcoll.explain(attend)(x, x, x).plans
    assert "attention(two_ended)" in text
    assert str(plan) == "two_ended: named by the caller"
