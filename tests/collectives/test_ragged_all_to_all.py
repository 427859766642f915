"""`ragged_all_to_all`: every rank's rows against NumPy, gradients, `vmap`, refusals.

jax.lax cannot run its own function on CPU, so only its types and errors are compared.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import (
    SIZES,
    assert_same,
    crossed,
    data,
    distinct,
    every_rank,
    make_mesh,
    mostly_exhaustive,
    per_rank,
    runnable,
)

import ringcoll
from benchmarks.collectives.ragged import moved as reference
from ringcoll import pricing
from ringcoll.collectives import rows

ROW = (2, 3)


def packed(sizes, order):
    """Where slices of these sizes start if they lie in this order, with gaps between them."""
    starts = np.zeros_like(sizes)
    starts[order] = np.cumsum(sizes[order] + 1) - sizes[order]
    return starts


def integers(n, slices=1, seed=0):
    """Offsets and sizes of all ranks, no two alike: gaps, empty slices, any order."""
    rng = np.random.default_rng([seed, n, slices])
    sends = rng.integers(0, 4, (n, n, slices))
    gets = sends.swapaxes(0, 1).reshape(n, -1)
    at = np.stack([packed(one.reshape(-1), rng.permutation(n * slices)) for one in sends])
    to = np.stack([packed(one, rng.permutation(n * slices)) for one in gets])
    to = to.reshape(n, n, slices).swapaxes(0, 1).reshape(n, -1)
    return [x.astype(np.int32) for x in (at, sends.reshape(n, -1), to, gets)]


def arrays(n, numbers, dtype="float32", row=ROW):
    """Operands and outputs that hold all slices and one more row."""
    at, sends, to, _ = numbers
    rows, ends = int((at + sends).max()) + 1, int((to + sends).max()) + 1
    whole = data((n, rows + ends, *row), jnp.dtype(dtype), n)
    return [whole[:, :rows], whole[:, rows:]]


def call(*xs, **options):
    return ringcoll.ragged_all_to_all(*xs, axis_name="x", **options)


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("n", mostly_exhaustive(SIZES, (1, 3, 5).__contains__))
def test_rows_arrive_and_the_others_stay(n, slices):
    numbers = integers(n, slices)
    xs = *arrays(n, numbers), *numbers

    def program(*xs):
        algorithms = "auto", "lax", *distinct("all_to_all", n)
        return {algorithm: call(*xs, algorithm=algorithm) for algorithm in algorithms}

    for algorithm, y in per_rank(make_mesh(n), program, *xs).items():
        assert_same({algorithm: np.asarray(y)}, {algorithm: reference(*xs)})


@pytest.mark.parametrize(("jit", "check_vma"), crossed([True, False], [True, False]))
def test_in_every_mode(jit, check_vma):
    numbers = integers(3)
    xs = *arrays(3, numbers), *numbers
    y = per_rank(make_mesh(3), partial(call, algorithm="bruck"), *xs, jit=jit, check_vma=check_vma)
    assert_same(np.asarray(y), reference(*xs))


GROUPS = ((4, 1, 2), (0, 5, 3))


def in_groups():
    """Operands and results of six ranks in two groups, whose ranks are in no order."""
    places = np.argsort(np.ravel(GROUPS))
    both = zip(integers(3), integers(3, seed=1), strict=True)
    numbers = [np.concatenate(two)[places] for two in both]
    xs = *arrays(6, numbers), *numbers
    expected = np.empty_like(xs[1])
    for group in map(list, GROUPS):
        expected[group] = reference(*(x[group] for x in xs))
    return xs, expected


@pytest.mark.parametrize("algorithm", ["auto", "pairwise"])
def test_in_groups(algorithm):
    """A rank counts the ranks of its group."""
    xs, expected = in_groups()
    program = partial(call, axis_index_groups=GROUPS, algorithm=algorithm)
    y = per_rank(make_mesh(6), program, *xs, check_vma=False)
    assert_same(np.asarray(y), expected)


def test_over_two_axes():
    numbers = integers(6)
    xs = *arrays(6, numbers), *numbers

    def program(*xs):
        return ringcoll.ragged_all_to_all(*xs, axis_name=("x", "y"), algorithm="pairwise")

    assert_same(np.asarray(per_rank(make_mesh(3, 2), program, *xs)), reference(*xs))


def test_a_rank_may_have_nothing_at_all():
    n, nothing = 2, [np.zeros((2, 2), np.int32)] * 4
    full, empty = data((n, 3, 2)), np.zeros((n, 0, 2), np.float32)
    for operand, output in ((full, full + 1), (empty, full), (full, empty)):
        y = per_rank(make_mesh(n), call, operand, output, *nothing)
        assert_same(np.asarray(y), output)


# -- max_send --


def lowered(program, *xs):
    """The StableHLO of the program of every rank."""
    mapped = every_rank(make_mesh(len(xs[0])), program, check_vma=True)
    return jax.jit(mapped).lower(*xs).as_text()


@pytest.mark.parametrize("slices", [1, 3])
def test_messages_are_those_of_the_price_and_as_small_as_max_send_says(slices):
    numbers = integers(4, slices)
    xs, most = (*arrays(4, numbers), *numbers), int(numbers[1].reshape(4, 4, slices).sum(2).max())
    for algorithm in runnable("all_to_all", 4):
        program = partial(call, algorithm=algorithm, max_send=most)
        assert_same(np.asarray(per_rank(make_mesh(4), program, *xs)), reference(*xs))
        text = lowered(program, *xs)
        price = pricing.price("ragged_all_to_all", algorithm, (4,))
        sent = re.findall(r"collective_permute.*-> tensor<(\d+)x(\d+)x2x3xf32>", text)
        assert (len(sent), sum(int(k) for k, _ in sent)) == (price.messages, price.sent)
        assert {int(rows) for _, rows in sent} == {most}


def test_a_program_checks_only_what_may_be_wrong():
    numbers = integers(2)
    xs, more = (*arrays(2, numbers), *numbers), [np.tile(x, 2) for x in numbers]
    both = [np.stack([x, x], 1) for x in xs]
    assert "callback" not in lowered(call, *xs)
    assert "callback" not in lowered(jax.vmap(call), *both)
    assert "callback" not in lowered(partial(call, max_send=99), *xs)
    assert "callback" in lowered(partial(call, max_send=2), *xs)
    assert "callback" in lowered(jax.vmap(partial(call, max_send=2)), *both)
    assert "callback" in lowered(call, *xs[:2], *more)  # slices may share rows


@pytest.mark.parametrize(("dtype", "lost"), [("float32", np.nan), ("int8", -128), ("uint8", 255)])
def test_elsewhere_than_on_cpu_rows_that_do_not_fit_are_seen(dtype, lost):
    """Two ranks, two slices each. A block holds three rows, but the first gets four."""
    at, sizes = np.array([[4, 0], [6, 2]], np.int32), np.array([[2, 2], [1, 1]], np.int32)
    blocks, output = jnp.array([1, 2, 3, 4, 5, 0], dtype), jnp.full(8, 9, dtype)
    result = rows.put(blocks, output, at, sizes, 3)
    assert_same(np.asarray(result), np.array([3, lost, 5, 9, 1, 2, 4, 9]).astype(dtype))


REFUSED = jax.errors.JaxRuntimeError


@pytest.mark.parametrize("slices", [1, 3])
def test_more_rows_than_max_send_are_refused_by_all_ranks(slices):
    """Ranks along the other axis of the mesh have fewer rows, but would wait for ever."""
    numbers = [np.tile(x, (2, 1)) for x in integers(3, slices)]
    numbers[1][:3] = numbers[3][:3] = 0
    most = int(numbers[1].reshape(6, 3, slices).sum(2).max())
    xs = *arrays(6, numbers), *numbers

    def run(max_send):
        def program(*xs):
            y = ringcoll.ragged_all_to_all(*xs, axis_name="y", max_send=max_send)
            return y, lax.psum(y, ("x", "y"))

        return jax.block_until_ready(per_rank(make_mesh(2, 3), program, *xs))[0]

    with pytest.raises(REFUSED, match=f"has {most} rows for another.*{most - 1}"):
        run(most - 1)
    expected = [reference(*(x[half] for x in xs)) for half in (slice(3), slice(3, 6))]
    assert_same(np.asarray(run(most)), np.concatenate(expected))
    jax.effects_barrier()  # JAX waits for callbacks, and no longer for those that raised


def test_compilers_keep_the_check_also_if_offsets_are_constants():
    def program(x):
        zeros, sizes = jnp.zeros(2, jnp.int32), jnp.array([2, 0])
        return call(x, jnp.zeros_like(x), zeros, sizes, zeros, sizes, max_send=1)

    mapped = jax.shard_map(program, mesh=make_mesh(2), in_specs=P("x"), out_specs=P("x"))
    assert "callback" in jax.jit(mapped).lower(data((6, 2))).compile().as_text()


def test_rows_that_are_sent_twice_to_a_rank_may_be_more_than_there_are():
    """Two slices have the same rows. By default a block has no room for both."""
    operand, output = data((1, 3, 2)), np.zeros((1, 6, 2), np.float32)
    numbers = [np.array([x], np.int32) for x in ([0, 0], [3, 3], [0, 3], [3, 3])]
    with pytest.raises(REFUSED, match="a rank has 6 rows for another"):
        jax.block_until_ready(per_rank(make_mesh(1), call, operand, output, *numbers))
    y = per_rank(make_mesh(1), partial(call, max_send=6), operand, output, *numbers)
    assert_same(np.asarray(y), np.concatenate([operand, operand], 1))
    jax.effects_barrier()


# -- gradients and transformations --


def pulled_back(ct, rows, numbers):
    """The gradients of operand and output: rows travel back, and gradients of one row are added."""
    at, sends, to, _ = numbers
    slices = sends.shape[1] // len(ct)
    to_operand, to_output = np.zeros((len(ct), rows, *ct.shape[2:]), ct.dtype), ct.copy()
    for rank, number in np.ndindex(sends.shape):
        target, size = number // slices, sends[rank, number]
        source, start = slice(at[rank, number], at[rank, number] + size), to[rank, number]
        to_operand[rank, source] += ct[target, start : start + size]
        to_output[target, start : start + size] = 0
    return to_operand, to_output


def overlapping(n):
    """Each rank sends the same rows to several ranks. Every third rank receives no rows."""
    at, sends, _, _ = integers(n)
    at, sends = at % 3, np.where(np.arange(n) % 3 == 1, 0, sends)
    gets = sends.T.copy()
    to = np.cumsum(gets + 1, 1) - gets
    return [x.astype(np.int32) for x in (at, sends, to.T, gets)]


@pytest.mark.parametrize(
    ("n", "overlap", "check_vma", "algorithm"),
    crossed([3, 4], [False, True], [True, False], ["bruck", "auto"]),
)
def test_gradients(n, overlap, check_vma, algorithm):
    """First and second gradients, backward and forward, of operand and output, under remat."""
    numbers = overlapping(n) if overlap else integers(n, 3)
    operand, output = arrays(n, numbers)
    ct = data((n, *output.shape[1:])) + 1

    def program(operand, output, ct, *numbers):
        @jax.checkpoint
        def function(operand, output):
            return call(operand, output, *numbers, algorithm=algorithm)

        y, back = jax.vjp(function, operand, output)
        once = back(ct)
        _, there = jax.vjp(lambda ct: back(ct), ct)
        tangents = operand + 1, 2 * output
        _, moved = jax.jvp(function, (operand, output), tangents)
        (of_operand,) = jax.vjp(lambda x: function(x, output), operand)[1](ct)
        return y, once, there(tangents)[0], moved, of_operand

    results = per_rank(make_mesh(n), program, operand, output, ct, *numbers, check_vma=check_vma)
    y, once, twice, moved, of_operand = jax.tree.map(np.asarray, results)
    expected = pulled_back(ct, operand.shape[1], numbers)
    assert_same(y, reference(operand, output, *numbers))
    assert_same(once, expected)
    assert_same(of_operand, expected[0])
    assert_same(moved, reference(operand + 1, 2 * output, *numbers))
    assert_same(twice, moved)  # the transpose of the transpose


def test_vmap_in_groups_of_some_operands():
    """Operands are mapped along the last dimension, sizes along the first, outputs not at all."""
    xs, expected = in_groups()
    operand, output, *numbers = xs
    fewer = [numbers[0], numbers[1] // 2, numbers[2], numbers[3] // 2]
    batch = np.stack([operand, 2 * operand], -1)
    both = [np.stack(two, 1) for two in zip(numbers, fewer, strict=True)]

    def program(operand, output, *numbers):
        function = partial(call, axis_index_groups=GROUPS, algorithm="bruck", max_send=3)
        return jax.vmap(function, (-1, None, 0, 0, 0, 0), 1)(operand, output, *numbers)

    y = np.asarray(per_rank(make_mesh(6), program, batch, output, *both, check_vma=False))
    assert_same(y[:, :, 0], expected)
    for group in map(list, GROUPS):
        halved = reference(*(x[group] for x in (2 * operand, output, *fewer)))
        assert_same(y[group, :, 1], halved)


def test_vmap_of_gradients_in_a_scan():
    numbers = integers(3)
    operand, output = arrays(3, numbers)
    scales = np.tile(np.arange(1, 5, dtype=np.float32).reshape(2, 2), (3, 1, 1))

    def program(operand, output, scales, *numbers):
        def loss(operand, scale):
            return (scale * call(operand, output, *numbers, algorithm="pairwise")).sum()

        def step(carry, scales):
            return carry, jax.vmap(jax.grad(loss), (None, 0))(operand, scales)

        return lax.scan(step, 0, scales)[1]

    y = np.asarray(per_rank(make_mesh(3), program, operand, output, scales, *numbers))
    ones, _ = pulled_back(np.ones_like(output), operand.shape[1], numbers)
    assert_same(y, scales[..., *[None] * operand[0].ndim] * ones[:, None, None])


@pytest.mark.parametrize(
    "dtype",
    mostly_exhaustive(
        ["bool", "int4", "int8", "uint32", "float8_e4m3fn", "bfloat16", "float16", "complex64"],
        ("bool", "int4", "bfloat16").__contains__,
    ),
)
def test_dtypes_of_data_and_of_numbers(dtype):
    numbers = [
        x.astype(kind) for x, kind in zip(integers(3), ("i2", "u1", "i4", "u4"), strict=True)
    ]
    operand, output = arrays(3, integers(3), dtype)
    for algorithm in ("auto", "pairwise"):
        y = per_rank(make_mesh(3), partial(call, algorithm=algorithm), operand, output, *numbers)
        assert_same(np.asarray(y), reference(operand, output, *numbers))


def test_the_result_varies_as_any_operand_does():
    """lax gives it the type of `output`, which may be the same on all ranks before the call."""
    numbers = integers(2)
    xs = *arrays(2, numbers), *numbers

    def program(operand, output, *numbers):
        same = jnp.zeros(output.shape)
        z = ringcoll.ragged_all_to_all(operand, same, *numbers, axis_name="y")
        assert jax.typeof(same).mat.varying == frozenset()
        assert jax.typeof(z).mat.varying == {"x", "y"}
        return z

    both = [np.concatenate([x, x]) for x in xs]
    z = np.asarray(per_rank(make_mesh(2, 2), program, *both))
    xs = xs[0], np.zeros_like(xs[1]), *numbers
    assert_same(z, np.concatenate([reference(*xs)] * 2))


@pytest.mark.parametrize("algorithm", ["auto", "pairwise"])
def test_rows_that_are_sharded_over_another_axis(algorithm):
    """As with tensor-parallel experts: the compiler splits rows, forward and backward."""
    numbers = integers(2, 2)
    operand, output = arrays(2, numbers, row=(4,))
    mesh = jax.make_mesh(
        (2, 2), ("x", "y"), (AxisType.Auto, AxisType.Explicit), devices=jax.devices()[:4]
    )

    def one_rank(operand, output, *numbers):
        def function(operand, output):
            numbers_here = (x[0] for x in numbers)
            return call(operand[0], output[0], *numbers_here, algorithm=algorithm)[None]

        y, back = jax.vjp(function, operand, output)
        return y, back(y)

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(one_rank, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
        rows = (jax.device_put(x, P("x", None, "y")) for x in (operand, output))
        y, back = jax.jit(mapped)(*rows, *(jax.device_put(x, P("x")) for x in numbers))
    expected = reference(operand, output, *numbers)
    assert_same(np.asarray(y), expected)
    assert_same(jax.tree.map(np.asarray, back), pulled_back(expected, operand.shape[1], numbers))


def test_wide_integers_around():
    with jax.enable_x64(True):
        numbers = [x.astype(np.int64) for x in integers(3, 3)]
        xs = *arrays(3, numbers, "float64"), *numbers
        for algorithm in ("auto", "bruck"):
            y = per_rank(make_mesh(3), partial(call, algorithm=algorithm), *xs)
            assert_same(np.asarray(y), reference(*xs))


# -- refusals --

X, Y, ONE = jnp.zeros((4, 2)), jnp.zeros((5, 2)), jnp.zeros(2, jnp.int32)
REFUSALS = [
    ((X, Y, ONE, ONE.astype(float), ONE, ONE), {}, ValueError, "send_sizes must be integer type"),
    ((X, Y, ONE[None], *[ONE] * 3), {}, ValueError, "input_offsets must be rank 1 with positive"),
    ((X, Y, *[ONE] * 4), {"axis_name": "z"}, NameError, "unbound axis name: z.*the axes here are"),
    ((X, Y, *[ONE] * 4), {"axis_name": {"x"}}, TypeError, "'set'; pass a name, or a tuple"),
    ((X, Y[0], *[ONE] * 4), {}, ValueError, r"\(4, 2\) and \(2,\); let them differ only in their"),
    ((X, Y[:, :1], *[ONE] * 4), {}, ValueError, "let them differ only in their first dimension"),
    ((X, Y.astype(int), *[ONE] * 4), {}, TypeError, "operand is float32 and output is int32; cast"),
    ((X, Y, *[ONE] * 3, ONE[:1]), {}, ValueError, "recv_sizes: 1.*pass a multiple of 2 of each"),
    ((X, Y, *[jnp.zeros(3, int)] * 4), {}, ValueError, "one multiple of 2 ranks.*a multiple of 2"),
    ((X, Y, *[ONE] * 4), {"max_send": 0}, ValueError, "max_send=0.*pass 1 or more"),
    ((X, Y, *[ONE] * 4), {"max_send": 1.5}, TypeError, "max_send=1.5 is not an integer"),
    (
        (X, Y, *[ONE] * 4),
        {"algorithm": "ring"},
        ValueError,
        "choose from .*pairwise, bruck",
    ),
    ((X, Y, *[ONE] * 4), {"axis_index_groups": [[0]]}, ValueError, "in exactly one group"),
    (([[1.0]], Y, *[ONE] * 4), {}, TypeError, "not a valid JAX type; pass an array"),
]


@pytest.mark.parametrize(
    ("xs", "options", "kind", "words"), REFUSALS, ids=[words for *_, words in REFUSALS]
)
def test_refusals_name_the_call_and_the_cure(xs, options, kind, words):
    with pytest.raises(kind, match=f"(?s)ringcoll.ragged_all_to_all.*{words}"):
        trace(lambda: ringcoll.ragged_all_to_all(*xs, **({"axis_name": "x"} | options)))


def test_rows_that_an_int32_cannot_count_are_refused():
    rows = jax.ShapeDtypeStruct((2**31,), jnp.uint8)
    numbers = jax.ShapeDtypeStruct((4,), jnp.int32)
    mapped = jax.shard_map(call, mesh=make_mesh(2), in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(ValueError, match=r"(?s)in 2 blocks of 1073741824.*a smaller max_send"):
        jax.jit(mapped).lower(rows, rows, *[numbers] * 4)


def test_an_axis_of_a_vmap_is_refused_as_in_lax():
    batch = [jnp.stack([x, x]) for x in (X, Y, *[ONE] * 4)]
    with pytest.raises(NotImplementedError, match=r"over the vmapped axis 'v'.*use a mesh axis"):
        jax.vmap(partial(ringcoll.ragged_all_to_all, axis_name="v"), axis_name="v")(*batch)


def trace(program):
    def nothing_out():
        program()
        return ()

    jax.make_jaxpr(jax.shard_map(nothing_out, mesh=make_mesh(2), in_specs=(), out_specs=()))()
