"""Encoding and decoding of one message: bounds on hostile data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import crossed

from ringcoll import Wire
from ringcoll.costs.wire import CODES
from ringcoll.runtime.wire import decode, encode

BLOCK = 32
TINY = 2.0**-126
#: Shapes whose blocks are flat, flat and padded, down columns, and one short block.
SHAPES = [(4, 96), (7, 13), (2 * BLOCK, 128), (3,), (), (2 * BLOCK, 256)]


def blocks_of(x, block):
    """For every value, the number of its block: by the docstring of `Wire`, not by its code."""
    rows = x.size // x.shape[-1] if x.ndim else 1
    if x.ndim and x.shape[-1] % 128 == 0 and rows % block == 0:
        row, column = np.divmod(np.arange(x.size), x.shape[-1])
        return (row // block * x.shape[-1] + column).reshape(x.shape)
    count = -(-x.size // block)
    return (np.arange(x.size) // -(-x.size // count)).reshape(x.shape)


def largest_in_block(x, block):
    """For every value, the largest magnitude in its block."""
    numbers = blocks_of(x, block)
    largest = np.zeros(numbers.max() + 1)
    np.maximum.at(largest, numbers.reshape(-1), abs(x).reshape(-1).astype(float))
    return largest[numbers]


def hostile(shape, dtype):
    """Finite data: one huge value, zeros, subnormals, all equal, all magnitudes, the largest."""
    rng = np.random.default_rng(0)
    normal = np.asarray(rng.normal(size=shape))
    about = jnp.finfo(dtype)
    huge = normal.copy()
    huge.reshape(-1)[:1] = 1e4
    spread = normal * 10.0 ** rng.integers(-4, 4, shape)
    found = {
        "normal": normal,
        "huge": huge,
        "zeros": 0 * normal,
        "signed zeros": -0.0 * abs(normal),
        "equal": 0 * normal - 3.25,
        "spread": spread,
        "subnormal": normal * float(about.smallest_subnormal) * 8,
        "tiny": normal * float(about.tiny),
        "largest": np.sign(normal) * float(about.max),
        "one of each": np.where(abs(normal) < 0.1, 1.0, 0.0),
    }
    return {name: np.asarray(x, dtype) for name, x in found.items()}


@pytest.mark.parametrize(("codes", "dtype"), crossed([*CODES], ["bfloat16", "float16", "float32"]))
def test_values_come_back_within_the_bound_of_their_block(codes, dtype):
    wire, about = Wire(codes, BLOCK), jnp.finfo(dtype)

    def there_and_back(x):
        message = encode(wire, x)
        return message, decode(wire, message, x.shape, x.dtype)

    data = [hostile(shape, dtype) for shape in SHAPES]
    stacks = [np.stack([*some.values()]) for some in data]
    done = jax.jit(lambda xs: [jax.vmap(there_and_back)(x) for x in xs])(stacks)
    lost = 2 * TINY + float(about.smallest_subnormal)
    for before, after in zip(data, done, strict=True):
        for (name, x), message, y in zip(before.items(), *after, strict=True):
            assert message.dtype == jnp.uint8
            assert message.size == wire.nbytes(x.size), name
            rounded = wire.error + float(about.eps) / 2
            bound = rounded * largest_in_block(x, BLOCK) + lost
            err = abs(np.asarray(y, float) - np.asarray(x, float))
            assert (err <= bound).all(), (name, x.shape, (err / bound).max())
            if "zeros" in name:
                assert not np.asarray(y).any()


def test_a_message_of_nothing_is_a_scale():
    """A lane may have no rows or columns; for any block."""
    for shape in ((0,), (4, 0), (0, 128), (4, 0, 128)):
        for block in (1, 2, 128):
            message = encode(Wire("int8", block), jnp.zeros(shape))
            assert message.size == Wire("int8", block).nbytes(0)
            assert decode(Wire("int8", block), message, shape, jnp.float32).shape == shape


@pytest.mark.parametrize("codes", CODES)
def test_infinities_and_nans_of_a_block(codes):
    x = np.random.default_rng(0).normal(size=(6, BLOCK)).astype(np.float32)
    x[1, 3], x[2, 4], x[3, 5], x[3, 6], x[3, 7] = np.inf, -np.inf, np.nan, np.inf, -np.inf
    wire, finite = Wire(codes, BLOCK), np.isfinite(x)
    y = np.asarray(jax.jit(lambda x: decode(wire, encode(wire, x), x.shape, x.dtype))(x))
    np.testing.assert_array_equal(y[~finite], x[~finite])
    with_some = ~finite.all(1)
    assert np.isnan(y[with_some][finite[with_some]]).all()
    assert np.isfinite(y[~with_some]).all()


def test_a_wire_says_what_is_wrong_with_it():
    for arguments, words in {
        ("int4",): "dtype='int4' has no codes; choose from 'int8'",
        (jnp.int16,): "dtype='int16' has no codes",
        (("int8",),): "has no codes; choose from 'int8'",
        ("int8", 0): "block=0 holds no value; pass 1 or more",
    }.items():
        with pytest.raises(ValueError, match=words):
            Wire(*arguments)
    with pytest.raises(TypeError, match=r"block=1\.5 is not an integer; pass one such as 128"):
        Wire("int8", 1.5)
