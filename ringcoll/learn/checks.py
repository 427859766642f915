"""Statements that are printed if they are true and fail if not, and tables."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import jax
import numpy as np

from ringcoll.io.text import aligned


def claim(text: str, holds: object) -> None:
    """Print a claim if it is true.

    Raises:
        AssertionError: it is not true.

    >>> learn.claim("two and two are four", 2 + 2 == 4)
    ✓ two and two are four
    """
    if not holds:
        raise AssertionError(f"it does not hold: {text}")
    print(f"✓ {text}")


def agree(what: str, *, allowed: float = 0.0, **ways: Any) -> None:
    """Check that several ways give the same result on every device, and print so.

    If the result is an array, its shape, its sharding and the shard of the first device are printed
    too.

    Args:
        what: the result, in words.
        allowed: the largest allowed difference from the first way.
        ways: the result of each way, as a pytree, by the name of the way.

    Raises:
        AssertionError: they differ.

    >>> x = jnp.arange(8.0)
    >>> learn.agree("twice", whole=2 * x, ranks=ranks(lambda x: x + x)(x))
    twice: whole = ranks, exactly
      [8] by P('x',), [2] on each device; the first has [0. 2.]
    """
    first, *_ = ways
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(ways[first])]
    worst = 0.0
    for name, result in ways.items():
        for right, leaf in zip(expected, jax.tree.leaves(result), strict=True):
            if leaf.shape != right.shape:
                raise AssertionError(f"{what}: {name} is {leaf.shape}, {first} {right.shape}")
            for shard, there in _shards(leaf):  # copies of a shard too
                off = float(np.max(np.abs(shard - right[there]), initial=0))
                if not off <= allowed:  # true for NaN too
                    words = f"{name} is {off:.1e} off {first}, {allowed:.1e} is allowed"
                    raise AssertionError(f"{what}: {words}")
                worst = max(worst, off)
    accuracy = f"except {worst:.1e}, {allowed:.1e} allowed" if allowed else "exactly"
    print(f"{what}: {' = '.join(ways)}, {accuracy}")
    if isinstance(result, jax.Array):
        print(f"{' ' * (len(what) - len(what.lstrip()))}  {_described(result)}")


def _described(x: jax.Array) -> str:
    shard = np.asarray(x.addressable_shards[0].data)
    numbers = np.array2string(shard.reshape(-1)[:4], precision=3, max_line_width=200)
    more = " ..." if shard.size > 4 else ""
    spec = getattr(x.sharding, "spec", "no spec")
    cut = f"{[*x.shape]} by {spec}, {[*shard.shape]} on each device"
    return f"{cut}; the first has {numbers}{more}"


def _shards(x: Any) -> Sequence[tuple[np.ndarray, Any]]:
    if not isinstance(x, jax.Array):
        return [(np.asarray(x), ...)]
    return [(np.asarray(shard.data), shard.index) for shard in x.addressable_shards]


def gamma(terms: int) -> float:
    """The error bound of a sum of `terms` products in float32, for any order of additions.

    It is relative to the sum of absolute values. Each term has at most `terms` roundings (Higham,
    "Accuracy and Stability of Numerical Algorithms", section 3.1).

    >>> f"{learn.gamma(8):.1e}"
    '4.8e-07'
    """
    unit = float(np.finfo(np.float32).eps) / 2
    return terms * unit / (1 - terms * unit)


def show(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; a head may have several lines.

    >>> learn.show("Squares", ["n", "n\\nsquared"], [(1, 1), (12, 144)])
    <BLANKLINE>
    Squares
              n
    n   squared
    -----------
    1         1
    12      144
    """
    by_line = zip_longest(*(head.split("\n")[::-1] for head in heads), fillvalue="")
    above = [*by_line][::-1]
    lines = [*aligned([*above, *([f"{cell}" for cell in row] for row in rows)])]
    lines.insert(len(above), "-" * max(map(len, lines)))
    print(f"\n{title}", *lines, sep="\n")
