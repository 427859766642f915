"""One hop: what who is sent nothing has, wires, bits, messages. For routes see `test_calls`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import assert_same, make_mesh, per_rank

from ringcoll import Wire
from ringcoll.costs.wire import CODES
from ringcoll.runtime.contributions import Key, message
from ringcoll.runtime.hop import Ppermute, Ranks, as_bits, multiply_add
from ringcoll.schedules.schedule import Move


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
