"""Attention over ranks, and its gradients, against attention on one device, in float64.

Every result is a chain of at most four sums of no more than T = s + d terms, of numbers of order
one. Each is off by at most gamma(T) of its magnitudes (see `test_matmul_gradients`); exponentials
and quotients amplify that, here by less than 64.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from processes import together
from support import SIZES, crossed, make_mesh, mostly_exhaustive, paired
from test_matmul_gradients import gamma

import ringcoll
from ringcoll.attention.auto import AttentionShape, fastest, seconds
from ringcoll.attention.tiles import Mask, plan
from ringcoll.layers import context_parallel as cp

pytestmark = pytest.mark.usefixtures("small_tiles")

BATCH, GROUPS, HEADS, D, E = 2, 2, 4, 4, 3
LENGTH = 6  # of a rank


def reference(q, k, v, causal, window=None, ids=None, scale=None):
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


def operands(s, groups=GROUPS, heads=HEADS):
    """Queries, keys, values, segments and the cotangent of the result, of the whole sequence."""
    rng = np.random.default_rng(0)
    shapes = (heads, D), (groups, D), (groups, E), (heads, E)
    q, k, v, ct = (rng.standard_normal((BATCH, s, *shape)) for shape in shapes)
    return q, k, v, np.sort(rng.integers(0, 3, (BATCH, s)), 1), ct


def over_ranks(shape, layout, segments, check_vma=True, wrap=lambda f: f, **options):
    """A function of (q, k, v, ids); operands and result are in the order of positions."""
    mesh, n = make_mesh(*shape), int(np.prod(shape))
    axes = mesh.axis_names if len(shape) > 1 else "x"
    spec = P(None, axes)
    specs = (*[spec] * 3, spec if segments else None)

    def attend(q, k, v, ids):
        ids = ids if segments else None
        return wrap(
            lambda *qkv: cp.attention(*qkv, axes, layout=layout, segment_ids=ids, **options)
        )(q, k, v)

    mapped = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=check_vma)

    def in_order(*xs):
        *qkv, ids = (x if x is None else cp.arrange(x, n, layout) for x in xs)
        return cp.restore(mapped(*qkv, ids if segments else None), n, layout)

    return in_order


def check(shape, layout, segments=False, *, length=LENGTH, jit=True, operands=operands, **options):
    """The result and the gradients of q, k and v, of all ranks."""
    s = int(np.prod(shape)) * length
    plain = {name: options.get(name) for name in ("causal", "window", "scale")}
    with jax.enable_x64(True):
        q, k, v, ids, ct = operands(s)
        ours = over_ranks(shape, layout, segments, **options)

        def with_gradients(call):
            def both(q, k, v):
                out, back = jax.vjp(call, q, k, v)
                return out, back(ct)

            return both

        one = with_gradients(lambda *x: reference(*x, **plain, ids=ids if segments else None))
        run = with_gradients(lambda *x: ours(*x, ids))
        found, expected = (jax.jit(run) if jit else run)(q, k, v), jax.jit(one)(q, k, v)
    found, expected = jax.tree.map(np.asarray, (found, expected))
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    tolerance = (
        4 * 64 * gamma(s + D) * max(np.abs(x).max(initial=0) for x in jax.tree.leaves(expected))
    )
    chex.assert_trees_all_close(found, expected, rtol=0, atol=float(tolerance))


@pytest.mark.parametrize(
    ("n", "algorithm", "layout", "causal", "check_vma"),
    paired(
        SIZES,
        ["ring", "bidirectional_ring", "lax", "two_ended", "bruck", "direct", "auto"],
        ["contiguous", "zigzag", "striped"],
        [True, True, False],
        [True, False],
    ),
)
def test_attention_is_that_of_one_device(n, algorithm, layout, causal, check_vma):
    options = {"causal": causal, "algorithm": algorithm, "check_vma": check_vma}
    check((n,), layout, **options)


@pytest.mark.parametrize(
    ("layout", "window", "algorithm", "n", "causal", "segments"),
    paired(
        ["contiguous", "zigzag", "striped"],
        [None, 1, 5, 100],
        ["ring", "two_ended", "bidirectional_ring", "lax"],
        [3, 4],
        [True, True, False],
        [True, False, False, True, True],
    ),
)
def test_windows_and_segments(layout, window, algorithm, n, causal, segments):
    check((n,), layout, segments, causal=causal, window=window, algorithm=algorithm)


BY_HEADS = {
    "heads": ((2,), "ulysses"),
    "heads, two axes": ((2, 2), "ulysses"),
    "minor axis": ((3, 2), ("ring", "ulysses")),
    "major axis": ((2, 3), ("ulysses", "bidirectional_ring")),
    "no exchange": ((2, 2), ("lax", "lax")),
    "hamiltonian": ((2, 2), "hamiltonian"),
    "auto": ((2, 2), "auto"),
}


@pytest.mark.parametrize(
    ("name", "layout", "segments"),
    paired(list(BY_HEADS), ["contiguous", "zigzag", "striped"], [False, True]),
)
def test_heads_are_exchanged_and_several_axes_gathered(name, layout, segments):
    shape, algorithm = BY_HEADS[name]
    many = partial(operands, groups=4, heads=8)
    check(shape, layout, segments, causal=True, algorithm=algorithm, operands=many)


@pytest.mark.exhaustive  # the most lanes, and the longest to compile
def test_by_all_links_of_a_torus():
    check((2, 2), "striped", True, causal=True, algorithm="torus")


@pytest.mark.parametrize(
    ("length", "layout", "algorithm"),  # several tiles and a part; 26 is 2 * 13
    crossed([22, 26], ["zigzag", "striped"], ["ring", "bidirectional_ring"]),
)
def test_many_tiles_and_parts_of_them(length, layout, algorithm):
    check((3,), layout, length=length, causal=True, algorithm=algorithm, scale=0.3)


def test_one_group_of_heads_and_more_lanes_than_rows():
    def one(s):
        return tuple(x[:1] for x in operands(s, groups=1))

    check((3,), "contiguous", causal=True, algorithm="bidirectional_ring", operands=one)


@pytest.mark.parametrize(
    "layout", mostly_exhaustive(["contiguous", "zigzag"], lambda layout: layout == "zigzag")
)
def test_more_rounds_than_are_written_out(layout, monkeypatch):
    """A loop visits shards of several offsets, so its lists have the tiles of all these offsets."""
    monkeypatch.setattr("ringcoll.runtime.engine.UNROLL_UP_TO", 2)
    check((5,), layout, causal=True, algorithm="ring")


@pytest.mark.exhaustive  # every operation is compiled by itself
def test_eagerly():
    check((2,), "zigzag", causal=True, algorithm="ring", jit=False)


WRAPS = {
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda *x: jax.vmap(f, 0)(*(y[:, None] for y in x))[:, 0],
    "scan": lambda f: lambda *x: jax.lax.scan(lambda c, _: (c, f(*x)), 0, jnp.arange(2))[1][0],
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_under_transformations(wrap):
    check((3,), "zigzag", causal=True, algorithm="ring", wrap=WRAPS[wrap])


@pytest.mark.parametrize("empty", ["batch", "heads", "width"])
def test_of_nothing_there_is_nothing(empty):
    """With no positions, no heads or no features; and with a very wide window."""
    dim = {"batch": 0, "heads": 2, "width": 3}[empty]

    def cut(s):
        *qkv, ids, ct = operands(s)
        few = [x if empty == "width" and x.shape[3] == E else np.take(x, [], dim) for x in qkv]
        few = [few[0], *(qkv[1:] if empty == "heads" else few[1:])]
        ct = ct if empty == "width" else np.take(ct, [], dim)
        return *few, ids[:0] if empty == "batch" else ids, ct

    options = {"causal": True, "algorithm": "ring", "window": 2**40, "scale": 1.0}
    check((2,), "contiguous", True, operands=cut, **options)


def test_narrow_floats_are_summed_in_float32():
    """In bfloat16, no further from float64 than the rounding of operands, weights and result."""
    q, k, v, ids, _ = operands(4 * LENGTH)
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    ours = over_ranks((4,), "zigzag", False, causal=True, algorithm="ring")
    found = jax.jit(ours)(*narrow, ids)
    assert found.dtype == jnp.bfloat16
    expected = reference(*(x.astype(jnp.float32) for x in narrow), True)
    worst = 2 * 2.0**-8 * float(abs(v).max())  # weights and result, each rounded once
    chex.assert_trees_all_close(found.astype(jnp.float32), expected, rtol=0, atol=worst)


def kernel_of(q, k, v, *, causal):
    """All scores at once, with their log-sum-exp, as a fused kernel returns them."""
    scores = jnp.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * q.shape[-1] ** -0.5
    if causal:
        scores = jnp.where(np.tri(*scores.shape[2:], dtype=bool), scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1)
    out = jnp.einsum("bhqk,bkd->bqhd", jnp.exp(scores - lse[..., None]), v[:, :, 0])
    return out, lse.transpose(0, 2, 1)


@pytest.mark.parametrize(
    ("layout", "ranks", "causal"),
    paired(
        ["contiguous", "zigzag"],
        [(1, "ring"), (4, "bidirectional_ring"), (2, "ulysses"), (3, "ring")],
        [True, True, True, False],
    ),
)
def test_a_kernel_computes_blocks(layout, ranks, causal):
    n, algorithm = ranks
    check((n,), layout, causal=causal, algorithm=algorithm, kernel=kernel_of)


def masked_kernel_of(q, k, v, *, mask):
    """The same with a mask, like fused kernels that take positions and segments."""
    scores = jnp.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask.visible()[:, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1)
    out = jnp.einsum("bhqk,bkd->bqhd", jnp.exp(scores - lse[..., None]), v[:, :, 0])
    return out, lse.transpose(0, 2, 1)


@pytest.mark.parametrize(
    ("layout", "ranks", "window", "segments", "causal"),
    paired(
        ["striped", "zigzag", "contiguous"],
        [(4, "ring"), (2, "ulysses"), (3, "lax")],
        [None, 2, 5],
        [True, False],
        [True, False],
    ),
)
def test_a_kernel_gets_the_mask_of_a_block(layout, ranks, window, segments, causal):
    n, algorithm = ranks
    if window is None and not segments and layout != "striped":
        segments = True
    options = {"causal": causal, "window": window, "algorithm": algorithm}
    check((n,), layout, segments, kernel=masked_kernel_of, **options)


def test_a_kernel_keeps_what_is_not_a_number():
    q, k, v, ids, _ = operands(2 * LENGTH)
    q = jnp.asarray(q).at[:, 3].set(jnp.nan)
    options = {"causal": True, "window": 3, "algorithm": "ring", "kernel": masked_kernel_of}
    out = jax.jit(over_ranks((2,), "contiguous", False, **options))(q, k, v, ids)
    assert np.isnan(np.asarray(out)).all(axis=(0, 2, 3)).tolist() == [
        row == 3 for row in range(2 * LENGTH)
    ]


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
    attend = over_ranks((2,), "zigzag", False, check_vma=False, **options)
    found, expected = jax.jit(attend)(q, k, v, None), reference(q, k, v, True)
    chex.assert_trees_all_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [[1, 1], [1] * 4])
def test_over_processes(devices):
    for text in together(devices, "tests/attention_spread.py"):
        assert "bidirectional_ring is right" in text


def test_layouts_bring_tokens_and_positions_in_and_back():
    for n in SIZES:
        for layout in ("contiguous", "zigzag", "striped"):
            x = np.arange(2 * 4 * n * 3).reshape(2, 4 * n, 3)
            arranged = cp.arrange(x, n, layout)
            chex.assert_trees_all_equal(np.asarray(cp.restore(arranged, n, layout)), x)
            held = partial(cp.position_ids, "x", 4, layout)
            mapped = jax.shard_map(held, mesh=make_mesh(n), in_specs=(), out_specs=P("x"))
            ids = jax.jit(mapped)()
            chex.assert_trees_all_equal(np.asarray(arranged), x[:, np.asarray(ids)])


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


def test_a_shard_travels_with_rows_first_where_tiles_gain(monkeypatch):
    monkeypatch.setattr("ringcoll.attention.visits.device_kind", lambda: "TPU v5p")
    check((3,), "zigzag", causal=True, algorithm="bidirectional_ring")
    q, k = ones(1, 4, 4, 2), ones(1, 4, 2, 2)  # two rows of two positions on a rank
    attend = over_ranks((2,), "contiguous", False, causal=True, algorithm="ring")
    text = jax.jit(attend).lower(q, k, k, None).as_text()
    sent = [line for line in text.splitlines() if "stablehlo.collective_permute" in line]
    assert [line.partition("(tensor<")[2].partition(">")[0] for line in sent] == ["1x4x4xf32"]


def test_auto_is_what_is_named_around_it():
    x = ones(1, 8, 2, 4)
    attend = over_ranks((4,), "contiguous", False, causal=True)
    with ringcoll.algorithm("two_ended"):
        text = jax.jit(attend).lower(x, x, x, None).as_text(debug_info=True)
    assert "attention(two_ended)" in text


def test_auto_takes_what_its_price_says(monkeypatch):
    monkeypatch.undo()  # with tiles as they are
    plan.cache_clear()
    for layout in ("contiguous", "zigzag", "striped"):
        for length in (512, 4096, 16384):
            for heads in (8, 2):
                shape = AttentionShape(1, length, 32, heads, 128, 128, 2)
                asked = shape, Mask(True), layout, (8,), "TPU v5 lite"
                found = seconds(*asked)
                chosen = found[fastest(*asked)]
                assert chosen <= 1.02 * min(found.values())
                assert ("ulysses",) not in found or heads == 8
    full, near = (
        seconds(
            AttentionShape(1, 512, 8, 8, 128, 128, 2), Mask(True, window), "contiguous", (8,), "v5p"
        )
        for window in (None, 512)
    )
    hops = (7, 1)  # where scores are few, a round is as long as its hop, but for the last one
    assert near["ring",] < full["ring",] * hops[1] / hops[0] * 1.5


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


Q, K = ones(1, 4, 4, 2), ones(1, 4, 2, 2)
REFUSED = {
    "dimensions": ((Q[0], K, K), {}, ValueError, "pass [batch, sequence, heads, width]"),
    "lengths": ((Q, K[:, :3], K), {}, ValueError, "batch and sequence"),
    "heads": ((Q[:, :, :3], K, K), {}, ValueError, "multiple of those of keys"),
    "widths": ((Q, K[..., :1], K), {}, ValueError, "of one width"),
    "dtypes": ((Q, K.astype(jnp.bfloat16), K), {}, TypeError, "k is bfloat16"),
    "integers": ((ones(1, 4, 4, 2, dtype=int),) * 3, {}, TypeError, "pass floats"),
    "no array": (("q", K, K), {}, TypeError, "attention("),
    "layout": ((Q, K, K), {"layout": "spiral"}, ValueError, "choose from contiguous, zigzag"),
    "odd": ((Q[:, :3], K[:, :3], K[:, :3]), {"layout": "zigzag"}, ValueError, "multiple of 2"),
    "window": ((Q, K, K), {"window": 0}, ValueError, "pass 1 or more"),
    "window of half": ((Q, K, K), {"window": 1.5}, TypeError, "not an integer"),
    "a list of layouts": ((Q, K, K), {"layout": ["zigzag"]}, ValueError, "choose from"),
    "scale": ((Q, K, K), {"scale": "half"}, TypeError, "scale='half' is not a number"),
    "kernel": ((Q, K, K), {"kernel": 1}, TypeError, "kernel=1; pass a function"),
    "bytes": ((Q.astype(jnp.float8_e5m2),) * 3, {}, TypeError, "of 2 bytes or more"),
    "segments": ((Q, K, K), {"segment_ids": ones(1, 4)}, TypeError, "pass integers"),
    "short segments": (
        *((Q, K, K), {"segment_ids": ones(1, 3, dtype=int)}),
        *(ValueError, "segment_ids are [1, 3]; pass [1, 4]"),
    ),
    "algorithm": ((Q, K, K), {"algorithm": "rings"}, ValueError, "choose from"),
    "an algorithm that cannot add": (
        *((Q, K, K), {"algorithm": "lax_as_bits"}),
        *(ValueError, "no algorithm 'lax_as_bits'"),
    ),
    "two algorithms": ((Q, K, K), {"algorithm": ("ring", "lax")}, ValueError, "one for each axis"),
    "uneven heads": ((Q, K, K), {"algorithm": "ulysses"}, ValueError, "4 heads of queries and 2"),
    "a kernel's shapes": (
        *((Q, K, K), {"kernel": lambda q, k, v, causal: (v[..., :1] + q[..., :1], q[..., 0])}),
        *(ValueError, "the kernel returned [2, 4, 2, 1], [2, 4, 2]; of [2, 4, 2, 2], return"),
    ),
    "axis": ((Q, K, K), {"axis_name": "y"}, NameError, "y"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    args, options, kind, words = REFUSED[name]
    options = {"axis_name": "x", "causal": True, "algorithm": "ring", **options}

    def call():
        return cp.attention(*args, **options)

    with pytest.raises(kind) as error:
        jax.shard_map(call, mesh=make_mesh(4), in_specs=(), out_specs=P(None, "x"))()
    assert words in str(error.value)
    assert "context_parallel.attention(q, k, v, axis_name=" in str(error.value)


@pytest.mark.parametrize("option", ["causal", "scale"])
def test_what_is_traced_is_refused(option):
    def call(value):
        return cp.attention(Q, K, K, "x", **{"causal": True, "algorithm": "ring", option: value})

    mapped = jax.shard_map(call, mesh=make_mesh(1), in_specs=(P(),), out_specs=P())
    with pytest.raises(TypeError, match=rf"attention\(q, k, v, .*: {option}.*; pass"):
        jax.jit(mapped)(np.float32(1))


def test_a_refusal_of_position_ids_repeats_the_call():
    run = jax.shard_map(
        lambda: cp.position_ids("x", 3, "zigzag"), mesh=make_mesh(1), in_specs=(), out_specs=P()
    )
    with pytest.raises(ValueError, match=r"position_ids\(axis_name='x', length=3, layout='zigzag'"):
        run()


@pytest.mark.parametrize("function", [cp.arrange, cp.restore])
def test_what_layouts_refuse(function):
    for arguments, words in (
        ((ones(2, 8), 4, "spiral"), "choose from"),
        ((ones(2, 6), 4, "contiguous"), "pad the sequence to a multiple of 4"),
        ((ones(2, 4), 4, "zigzag"), "pad the sequence to a multiple of 8"),
        ((ones(2, 8), 4, "zigzag", 2), "dim=2"),
        ((ones(2, 8), 0, "zigzag"), "n=0"),
    ):
        with pytest.raises(ValueError, match=words):
            function(*arguments)
    with pytest.raises(TypeError, match=r"n=2\.0 is not an integer; pass a Python int"):
        function(ones(2, 8), 2.0, "zigzag")
