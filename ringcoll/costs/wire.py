"""A narrow wire as data: what messages hold, how many bytes they have, how large the error is."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import NamedTuple

import numpy as np

#: Bytes of a scale, a float32.
SCALE = 4
#: Codes are computed in float32, and some platforms round twice on the way to a float8.
_SLACK = 1 + 2**-6

#: The dtypes of operands that a wire encodes, and the bytes of an element.
FLOATS: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
#: The collectives whose messages may hold codes.
ENCODED = ("all_gather", "psum_scatter", "psum", "pmean", "all_to_all", "ragged_all_to_all")


class Codes(NamedTuple):
    """The codes of a dtype: the largest code, and its distance from the next smaller one."""

    largest: int
    step: int


CODES: Mapping[str, Codes] = {
    "int8": Codes(127, 1),
    "float8_e4m3fn": Codes(448, 32),
    "float8_e5m2": Codes(57344, 8192),
}


@dataclass(frozen=True)
class Wire:
    """What messages hold in place of floats: a code of one byte each, and a scale for each block.

    `wire="int8"` is `Wire("int8")`. A block of b values with the largest magnitude m has the scale
    m / (the largest code), a float32, and values are rounded to the nearest code. A block of zeros
    arrives as zeros. The codes and the scales of a message are one array of bytes: b + 4 bytes per
    block. With b = 128, that is 0.516 of the bytes of bfloat16.

    A block is `block` values that follow each other: down a column if 128 divides the last
    dimension and `block` divides the rows; otherwise in the order of the flattened message. If
    `block` does not divide a message, its blocks are shorter, all of one length, with a few zeros
    at the end. A block that holds an inf or a NaN has no scale: inf and NaN arrive unchanged, and
    its finite values arrive as NaN.

    Args:
        dtype: the dtype of the codes: "int8", "float8_e4m3fn" or "float8_e5m2".
        block: the most values that share a scale.

    Raises:
        ValueError: there are no such codes, or `block` is less than 1.
        TypeError: `block` is not a whole number.

    >>> total = ranks(lambda x: ringcoll.psum(x, "x", wire=ringcoll.Wire("int8")), out_specs=P())
    >>> print(total(jnp.array([127.0, 1.3, 127.0, 1.3, 127.0, 1.3, 127.0, 1.3])))  # 4 x [127, 1.3]
    [508.   4.]
    """

    dtype: str = "int8"
    block: int = 128

    def __post_init__(self) -> None:
        name = self.dtype
        if not isinstance(name, str):
            try:
                name = np.dtype(name).name
            except TypeError:
                name = repr(name)
        object.__setattr__(self, "dtype", name)
        if name not in CODES:
            known = ", ".join(map(repr, CODES))
            raise ValueError(f"dtype={self.dtype!r} has no codes; choose from {known}")
        try:
            object.__setattr__(self, "block", index(self.block))
        except TypeError as error:
            words = f"block={self.block!r} is not an integer; pass one such as 128"
            raise TypeError(words) from error
        if self.block < 1:
            raise ValueError(f"block={self.block} holds no value; pass 1 or more, such as 128")

    @property
    def codes(self) -> Codes:
        """The largest code, and its distance from the next smaller one."""
        return CODES[self.dtype]

    @property
    def error(self) -> float:
        """The largest change of a value, relative to the largest magnitude in its block.

        Two more errors are not included: platforms flush float32 values below 2**-126 to zero, and
        a result is rounded to the operand's dtype.

        >>> print(f"{ringcoll.Wire('int8').error:.4f} {ringcoll.Wire('float8_e4m3fn').error:.4f}")
        0.0040 0.0363
        """
        return 0.5 * self.codes.step / self.codes.largest * _SLACK

    def blocks(self, count: int) -> tuple[int, int]:
        """The number of blocks of a message of `count` values, and the length of each block."""
        number = max(1, -(-count // self.block))
        return number, -(-count // number)

    def nbytes(self, count: int) -> int:
        """The bytes of a message of `count` values.

        >>> ringcoll.Wire("int8").nbytes(1024), ringcoll.Wire("int8").nbytes(10)
        (1056, 14)
        """
        number, size = self.blocks(count)
        return number * (size + SCALE)

    def ratio(self, itemsize: int) -> float:
        """The bytes of a long message over those of its values, which have `itemsize` bytes."""
        return (1 + SCALE / self.block) / itemsize
