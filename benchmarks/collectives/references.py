"""Every collective in NumPy: from all ranks' operands to all ranks' results.

Each reference maps `[n, *operand]` to `[n, *result]`; index r is rank r. Its other arguments are
those that the collective takes after its axis.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.collectives import ragged

Reference = Callable[..., np.ndarray]


def _fold(op: Callable[..., np.ndarray], x: np.ndarray) -> np.ndarray:
    """Combine all ranks' operands in a dtype in which NumPy does not round."""
    wide = np.dtype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    return reduce(op, (row.astype(wide) for row in x)).astype(x.dtype)


def _everywhere(one: np.ndarray, n: int) -> np.ndarray:
    return np.broadcast_to(one, (n, *one.shape))


def psum(x: np.ndarray) -> np.ndarray:
    """The sum; booleans are summed as int32."""
    return _everywhere(_fold(np.add, x.astype(np.int32) if x.dtype == bool else x), len(x))


def pmean(x: np.ndarray) -> np.ndarray:
    """The sum divided by n, in the dtype in which JAX divides."""
    total, n = _to_divide(x)
    return total / n


def pmean_by_reciprocal(x: np.ndarray) -> np.ndarray:
    """The mean as XLA computes it on some platforms: the sum times 1/n, which is rounded."""
    total, n = _to_divide(x)
    return total * (1 / n)


def _to_divide(x: np.ndarray) -> tuple[np.ndarray, Any]:
    total = psum(x)
    kind = jnp.true_divide(jnp.zeros((), total.dtype), 1).dtype
    return total.astype(kind), kind.type(len(x))


def all_gather(x: np.ndarray, axis: int = 0, tiled: bool = False, to: str = "") -> np.ndarray:
    """All operands, end to end if tiled, otherwise along a new dimension."""
    return _everywhere((np.concatenate if tiled else np.stack)(list(x), axis), len(x))


def psum_scatter(x: np.ndarray, scatter_dimension: int = 0, tiled: bool = False) -> np.ndarray:
    """Each rank's block of the sum."""
    return np.stack(_cut(_fold(np.add, x), len(x), scatter_dimension, tiled))


def all_to_all(x: np.ndarray, split_axis: int, concat_axis: int, tiled: bool = False) -> np.ndarray:
    """The blocks of all operands for a rank, in the order of their ranks."""
    join = np.concatenate if tiled else np.stack
    sent = [_cut(row, len(x), split_axis, tiled) for row in x]
    return np.stack([join(blocks, concat_axis) for blocks in zip(*sent, strict=True)])


def _cut(x: np.ndarray, n: int, dim: int, tiled: bool) -> list[np.ndarray]:
    """A block for each rank; if not `tiled`, blocks lose the dimension."""
    blocks = np.split(x, n, dim)
    return blocks if tiled else [block.squeeze(dim) for block in blocks]


def pswapaxes(x: np.ndarray, axis: int) -> np.ndarray:
    """An `all_to_all` that splits and stacks the same dimension."""
    return all_to_all(x, axis, axis)


def pbroadcast(x: np.ndarray, source: int) -> np.ndarray:
    """The operand of one rank."""
    return _everywhere(x[source], len(x))


def ppermute(x: np.ndarray, perm: Sequence[tuple[int, int]]) -> np.ndarray:
    """Each target gets its source's operand; ranks without a source get zeros."""
    out = np.zeros_like(x)
    for source, target in perm:
        out[target] = x[source]
    return out


def pshuffle(x: np.ndarray, perm: Sequence[int]) -> np.ndarray:
    """Rank i gets the operand of rank `perm[i]`."""
    return x[list(perm)]


#: References by the name of the function.
REFERENCES: dict[str, Reference] = {
    "all_gather": all_gather,
    "psum_scatter": psum_scatter,
    "psum": psum,
    "pmean": pmean,
    "pmax": lambda x: _everywhere(_fold(np.maximum, x), len(x)),
    "pmin": lambda x: _everywhere(_fold(np.minimum, x), len(x)),
    "all_to_all": all_to_all,
    "pswapaxes": pswapaxes,
    "pbroadcast": pbroadcast,
    "ppermute": ppermute,
    "pshuffle": pshuffle,
    "ragged_all_to_all": ragged.reference,
}


#: Other results that count as right.
OTHERS: dict[str, Reference] = {"pmean": pmean_by_reciprocal}


def _to_source(ct: np.ndarray, source: int) -> np.ndarray:
    return np.where((np.arange(len(ct)) == source).reshape(-1, *[1] * (ct.ndim - 1)), psum(ct), 0)


#: The transpose of each linear collective, on all ranks' cotangents.
TRANSPOSES: dict[str, Reference] = {
    "all_gather": lambda ct, axis=0, tiled=False, to="": psum_scatter(ct, axis, tiled),
    "psum_scatter": lambda ct, scatter_dimension=0, tiled=False: all_gather(
        ct, scatter_dimension, tiled
    ),
    "psum": psum,
    "pmean": pmean,
    "all_to_all": lambda ct, split_axis, concat_axis, tiled=False: all_to_all(
        ct, concat_axis, split_axis, tiled
    ),
    "pswapaxes": pswapaxes,
    "pbroadcast": _to_source,
    "ppermute": lambda ct, perm: ppermute(ct, [(target, source) for source, target in perm]),
    "pshuffle": lambda ct, perm: pshuffle(ct, np.argsort(perm).tolist()),
    "ragged_all_to_all": ragged.transpose,
}
