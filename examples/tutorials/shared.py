"""Shared by the tutorials: eight devices, comparisons of results, and counts of bytes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.measuring import report
from ringcoll import overlap

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # instead of eight real ones

EPS = float(np.finfo(np.float32).eps)


def make_mesh(explicit: bool = False, **sizes: int) -> Mesh:
    """A mesh of the first devices: `make_mesh(x=2, y=4)`."""
    kind = AxisType.Explicit if explicit else AxisType.Auto
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices
    )


def place(mesh: Mesh, x: Any, spec: PartitionSpec) -> jax.Array:
    """Put an array on the mesh."""
    return jax.device_put(x, NamedSharding(mesh, spec))


def integers(*shape: int, seed: int = 0, largest: int = 4) -> np.ndarray:
    """Integers from -largest to largest as float32, so that small sums and products are exact."""
    values = np.random.default_rng(seed).integers(-largest, largest, shape, endpoint=True)
    return values.astype(np.float32)


def agree(what: str, *, allowed: float = 0.0, **ways: Any) -> None:
    """Check that several ways give the same result on every device, and print that.

    Args:
        what: the result, in words.
        allowed: the largest difference to the first way.
        ways: the results, pytrees, by the name of their way.

    Raises:
        AssertionError: they differ.
    """
    first, *_ = ways
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(ways[first])]
    worst = 0.0
    for name, result in ways.items():
        for right, leaf in zip(expected, jax.tree.leaves(result), strict=True):
            if leaf.shape != right.shape:
                raise AssertionError(f"{what}: {name} is {leaf.shape}, {first} {right.shape}")
            for shard, there in _shards(leaf):  # also every copy
                off = float(np.max(np.abs(shard - right[there]), initial=0))
                if not off <= allowed:  # NaN is not
                    words = f"{name} is {off:.1e} off {first}, {allowed:.1e} is allowed"
                    raise AssertionError(f"{what}: {words}")
                worst = max(worst, off)
    how = f"except {worst:.1e}, {allowed:.1e} allowed" if allowed else "exactly"
    print(f"{what}: {' = '.join(ways)}, {how}")


def _shards(x: Any) -> Sequence[tuple[np.ndarray, Any]]:
    if not isinstance(x, jax.Array):
        return [(np.asarray(x), ...)]
    return [(np.asarray(shard.data), shard.index) for shard in x.addressable_shards]


def gamma(terms: int) -> float:
    """The error bound of a sum of so many products in float32, in any order of additions.

    It is relative to the sum of absolute values; each term has at most `terms` roundings (Higham,
    "Accuracy and Stability of Numerical Algorithms", section 3.1).
    """
    return terms * EPS / 2 / (1 - terms * EPS / 2)


@dataclass(frozen=True)
class Sent:
    """By kind of collective, their number in a program, and the bytes that a rank sends by them."""

    kinds: Mapping[str, tuple[int, float]]

    @property
    def bytes(self) -> float:
        """The bytes of all collectives."""
        return sum(size for _, size in self.kinds.values())

    @property
    def permuted(self) -> float:
        """The bytes of permutes; ringcoll's collectives send no others."""
        return self.kinds.get("collective-permute", (0, 0))[1]

    def __str__(self) -> str:
        """`all-gather, 14 collective-permute`"""
        words = (f"{n} {kind}" if n > 1 else kind for kind, (n, _) in self.kinds.items())
        return ", ".join(words) or "none"


def sent(compiled: Any) -> Sent:
    """What a compiled program sends.

    A permute sends the bytes of its operand. A built-in collective counts with the bytes of the
    best algorithm (`ringcoll.overlap`).
    """
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for row in overlap.report(compiled).rows:
        count[row.kind] += row.count
        size[row.kind] += round(row.count * row.bytes)
    return Sent({kind: (count[kind], size[kind]) for kind in sorted(count)})


def show(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1) -> None:
    """Print a table."""
    made = report.table(*heads, left=left)
    for row in rows:
        made.add_row(*map(str, row))
    report.show(title, made)
