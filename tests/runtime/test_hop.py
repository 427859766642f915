"""Ranks and hops against NumPy's arithmetic: digits, parts, groups, axes in any order."""

import itertools
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import everywhere
from support import assert_same, make_mesh, per_rank

from ringcoll import Wire
from ringcoll.costs.wire import CODES
from ringcoll.runtime.contributions import Key, message
from ringcoll.runtime.hop import Ppermute, Ranks, as_bits, multiply_add
from ringcoll.schedules.schedule import Move

# The mesh, the axes in the order given, and how a schedule may cut the ranks.
CASES = [
    ((8,), "x", [(8,), (2, 4), (2, 2, 2)]),
    ((2, 4), "xy", [(2, 4), (4, 2), (8,)]),  # (4, 2): a digit across two axes
    ((2, 4), "yx", [(4, 2), (2, 4), (8,), (2, 2, 2)]),
    ((2, 2, 2), "zx", [(2, 2), (4,)]),
    ((2, 2, 2), "yxz", [(2, 2, 2), (4, 2), (8,)]),
    ((1, 3, 2), "zxy", [(2, 3), (6,), (3, 2)]),
    ((1, 5), "x", [(1,)]),
]
GROUPS = ((5, 0, 3, 6), (1, 7, 2, 4))


def moved(number, digits, by):
    """The number with something added to each of its digits."""
    cut = np.unravel_index(number, digits)
    return np.ravel_multi_index([c + b for c, b in zip(cut, by, strict=True)], digits, "wrap")


def hops(digits):
    return [(axis, shift) for axis, n in enumerate(digits) for shift in (1, -1, 2) if shift % n]


def hop(ranks, x, axis, shift):
    """x from the rank `shift` before this one."""
    return ranks.hops("a round", (Move(shift, (0,), axis),), [x])[0]


@pytest.mark.parametrize(("mesh", "axes", "cuts"), CASES, ids=lambda case: str(case))
def test_ranks_against_numpy(mesh, axes, cuts):
    def program(x):
        ranks = Ranks.over(tuple(axes), None)
        results = {}
        for digits in cuts:
            cut = replace(ranks, shape=digits)
            results[digits] = (
                [cut.origin(offset) for offset in range(cut.size)],
                [cut.origin(offset, forward=True) for offset in range(cut.size)],
                [cut.origin(1 % cut.size, axis, x * 0 + 3) for axis in range(len(digits))],
                [hop(cut, x, axis, shift) for axis, shift in hops(digits)],
            )
        return ranks.number(), results

    x = np.arange(np.prod(mesh), dtype=np.int32)
    number, results = per_rank(make_mesh(*mesh), program, x)
    expected, others = everywhere(mesh, axes)
    np.testing.assert_array_equal(number, expected)
    by_number = {
        place: rank for rank, place in enumerate(zip(number.tolist(), others, strict=True))
    }
    for digits, (origins, targets, further, received) in results.items():
        for offset in range(np.prod(digits)):
            by = np.array(np.unravel_index(offset, digits))
            np.testing.assert_array_equal(origins[offset], moved(number, digits, -by))
            np.testing.assert_array_equal(targets[offset], moved(number, digits, by))
        one = np.array(np.unravel_index(1 % np.prod(digits), digits))
        for axis, origin in enumerate(further):
            unit = np.eye(len(digits), dtype=int)[axis]
            np.testing.assert_array_equal(origin, moved(number, digits, -one - 3 * unit))
        for (axis, shift), arrived in zip(hops(digits), received, strict=True):
            unit = np.eye(len(digits), dtype=int)[axis]
            sender = moved(number, digits, -shift * unit)
            ranks = [by_number[place] for place in zip(sender.tolist(), others, strict=True)]
            np.testing.assert_array_equal(arrived, ranks)


def test_a_part_of_the_digits():
    digits = (2, 2, 2)
    parts = [(0, 1), (1, 2), (1, 3), (0, 2)]

    def program(x):
        ranks = Ranks.over(("y", "x"), None)
        cuts = [
            replace(ranks, shape=digits[start:stop], inner=prod(digits[stop:]))
            for start, stop in parts
        ]
        origins = [[cut.origin(offset) for offset in range(cut.size)] for cut in cuts]
        return origins, [hop(cut, x, 0, 1) for cut in cuts], [np.int32(cut.size) for cut in cuts]

    mesh = (4, 2)
    x = np.arange(8, dtype=np.int32)
    origins, received, sizes = per_rank(make_mesh(*mesh), program, x)
    number, _ = everywhere(mesh, "yx")
    cut = np.array(np.unravel_index(number, digits))
    for (start, stop), by_offset, arrived, size in zip(
        parts, origins, received, sizes, strict=True
    ):
        shape = digits[start:stop]
        assert (size == np.prod(shape)).all()
        within = np.ravel_multi_index(cut[start:stop], shape)
        for offset, origin in enumerate(by_offset):
            by = -np.array(np.unravel_index(offset, shape))
            np.testing.assert_array_equal(origin, moved(within, shape, by))
        unit = np.eye(3, dtype=int)[start]
        sender = moved(number, digits, -unit)
        np.testing.assert_array_equal(arrived, [list(number).index(s) for s in sender])


def test_groups():
    def program(x):
        ranks = Ranks.over(("x",), GROUPS)
        square = replace(ranks, shape=(2, 2))
        hopped = hop(ranks, x, 0, 1), hop(square, x, 0, 1), hop(square, x, 1, 1)
        return ranks.number(), [ranks.origin(o) for o in range(4)], hopped

    x = np.arange(8, dtype=np.int32)
    number, origins, hopped = per_rank(make_mesh(8), program, x)
    for group in np.array(GROUPS):
        np.testing.assert_array_equal(number[group], np.arange(4))
        for offset, origin in enumerate(origins):
            np.testing.assert_array_equal(origin[group], (np.arange(4) - offset) % 4)
        for arrived, sender in zip(hopped, ([3, 0, 1, 2], [2, 3, 0, 1], [1, 0, 3, 2]), strict=True):
            np.testing.assert_array_equal(arrived[group], group[sender])


@pytest.mark.parametrize("order", list(itertools.permutations("xyz"))[::2], ids="".join)
def test_a_hop_over_several_axes_counts_in_the_order_given(order):
    mesh, n = (2, 1, 4), 8
    pairs = tuple((s, (3 * s + 1) % n) for s in range(n))
    x = np.arange(n, dtype=np.float32)
    arrived = per_rank(make_mesh(*mesh), lambda x: Ppermute(axes=order, pairs=pairs)(x)[0], x)
    number, _ = everywhere(mesh, order)
    for source, target in pairs:
        assert arrived[list(number).index(target)] == list(number).index(source)


@pytest.mark.parametrize("check_vma", [True, False, "under vmap"])
def test_who_is_sent_nothing_has_zeros(check_vma):
    """Also on the axis of a vmap, where JAX itself would fill with NaN, or the least number."""
    send = Ppermute(axes=("x",), pairs=((2, 0), (0, 1)))
    dtypes = ("float32", "bfloat16", "int32", "bool", "complex64")
    xs = {dtype: np.array([5, 6, 7]).astype(jnp.dtype(dtype)) for dtype in dtypes}

    def program(xs):
        return {dtype: send(x)[0] for dtype, x in xs.items()}

    if check_vma == "under vmap":
        arrived = jax.device_get(jax.vmap(program, axis_name="x")(xs))
    else:
        arrived = per_rank(make_mesh(3), program, xs, check_vma=check_vma)
    assert_same(arrived, {d: np.array([7, 5, 0]).astype(jnp.dtype(d)) for d in dtypes})


@pytest.mark.parametrize("codes", CODES)
def test_what_arrives_by_a_wire_is_decoded_wide(codes):
    """Whatever the dtype of the message; one message alone, and two lanes; forward and back."""
    wire, largest = Wire(codes, 4), 127 if codes == "int8" else 7
    xs = {
        dtype: np.tile(np.array([largest, 3, -largest, 1]).astype(jnp.dtype(dtype)), (3, 2))
        * np.array([1, 2, 4]).astype(jnp.dtype(dtype)).reshape(3, 1)
        for dtype in ("bfloat16", "float16", "float32")
    }
    moves = (Move(1, (0,)), Move(-1, (0,), lane=1))

    def program(xs):
        ranks = Ranks.over(("x",), None)
        return {
            (dtype, lanes, back): ranks.hops(
                "a round", moves[:lanes], [x, 2 * x][:lanes], back=back, wire=wire
            )
            for dtype, x in xs.items()
            for lanes, back in ((1, False), (2, False), (2, True))
        }

    found = per_rank(make_mesh(3), lambda xs: {str(k): v for k, v in program(xs).items()}, xs)
    for dtype, x in xs.items():
        for lanes, back in ((1, False), (2, False), (2, True)):
            arrived = found[str((dtype, lanes, back))]
            assert len(arrived) == lanes
            for lane, y in enumerate(arrived):
                assert y.dtype == np.float32, (dtype, lanes, back)
                shift = (1, -1)[lane] * (-1 if back else 1)
                right = np.roll(np.float32(x), shift, 0) * (lane + 1)
                # A scale is smaller by 2**-22: in a narrow dtype, that would be lost.
                np.testing.assert_allclose(y, right * (1 - 2.0**-22), rtol=2.0**-23)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "float16", "bfloat16", "float8_e4m3fn", "float32", "int4"]
)
def test_bits_there_and_back(dtype):
    x = jnp.arange(-4, 4).astype(dtype)
    for floats in ((8, 16), None):
        bits, back = as_bits(x, floats)
        assert_same(back(bits), x)
        width = 8 if dtype == "bool" else jnp.finfo(dtype).bits if "float" in dtype else None
        if floats is None or (width in (8, 16) and dtype != "bool"):
            assert jnp.issubdtype(bits.dtype, jnp.unsignedinteger)
            assert width in (None, jnp.iinfo(bits.dtype).bits)
        else:
            assert bits is x


def test_a_message_has_the_widest_dtype_of_its_shards():
    narrow, wide = jnp.full(2, 1.5, jnp.bfloat16), jnp.full(2, 1 / 3, jnp.float32)
    keys = Key(0, 0), Key(0, 1), Key(0, 2)
    held = dict(zip(keys, (narrow, wide, narrow), strict=True))
    for some in (keys[:2], keys[1:]):
        of_some = np.stack([np.float32(held[key]) for key in some])
        assert_same(np.asarray(message(held, some)), of_some)
    of_rounds = message(held, [keys[:1], keys[1:2]])  # one message narrow, and one wide
    assert_same(np.asarray(of_rounds), np.stack([np.float32(held[key])[None] for key in keys[:2]]))


@pytest.mark.parametrize(
    ("factor", "addend", "operations"), [(1, 0, 0), (3, 0, 1), (1, 2, 1), (3, 2, 2)]
)
def test_indices_take_no_operation_that_changes_nothing(factor, addend, operations):
    """Every shard has such an index: these operations are half of a program."""
    traced = jax.make_jaxpr(lambda index: multiply_add(index, factor, addend))(np.int32(5))
    assert len(traced.jaxpr.eqns) == operations
    assert int(multiply_add(jnp.int32(5), factor, addend)) == 5 * factor + addend
