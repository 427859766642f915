"""Permutations: one hop, given as pairs of ranks or as an order of ranks."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from ringcoll.collectives.axes import AxisName, are_all_ranks, axes_of, rank_count
from ringcoll.collectives.front_door import Pytree, bind_leaves
from ringcoll.collectives.public import public
from ringcoll.runtime.hop import Pairs, Ppermute


@public()
def ppermute(
    x: Pytree, axis_name: AxisName, perm: Sequence[tuple[int, int]], *, algorithm: None = None
) -> Pytree:
    """Rank s of each pair (s, d) in `perm` sends its x to rank d; the others get zeros.

    `x: [a, b] -> [a, b]`. Several axes are counted row-major in the order given, in every
    version of JAX. Narrow floats travel as integers of their width (see `ringcoll.runtime.hop`).

    One round of s bytes. There is no `algorithm` to choose.

    Gradient: the inverse permutation.

    Raises:
        TypeError: `perm` is not a list or tuple (with jax 0.10.2, an iterable) of pairs of ints, or
            an `algorithm` is given.
        IndexError: there is no such rank: ranks count from 0, or from the last with -1.
        ValueError: a rank sends twice or receives twice.

    n, s and what all of them raise: see `ringcoll.lax`.

    >>> send = ranks(lambda x: ringcoll.ppermute(x, "x", [(0, 1), (1, 2)]))
    >>> print(send(jnp.array([3, 1, 4, 1])))
    [0 3 1 0]
    """
    _refuse(algorithm)
    pairs = _pairs(perm)  # read it only once: it may be an iterator
    lax.ppermute((), axis_name, perm)  # lax 0.12 takes only lists and tuples
    return _permute(x, axis_name, pairs)


@public()
def pshuffle(
    x: Pytree, axis_name: AxisName, perm: Sequence[int], *, algorithm: None = None
) -> Pytree:
    """Rank i gets the x of rank `perm[i]`: a `ppermute` given by the sources.

    `x: [a, b] -> [a, b]`. One round of s bytes, without an `algorithm`.

    Gradient: the inverse permutation.

    Raises:
        TypeError: `perm` is not a list of ints, or an `algorithm` is given.
        ValueError: `perm` is not a permutation.

    n, s and what all of them raise: see `ringcoll.lax`.

    >>> turn = ranks(lambda x: ringcoll.pshuffle(x, "x", [1, 2, 3, 0]))
    >>> print(turn(jnp.array([3, 1, 4, 1])))
    [1 4 1 3]
    """
    _refuse(algorithm)
    try:
        is_permutation = are_all_ranks(perm, len(perm))
    except TypeError as error:
        raise TypeError(
            f"`perm` is not a list of ranks: {error}; pass the ranks 0..n-1 in their new order"
        ) from error
    if not is_permutation:
        raise ValueError(f"`perm` does not represent a permutation: {perm}; name each rank once")
    return _permute(x, axis_name, tuple((int(source), to) for to, source in enumerate(perm)))


def _refuse(algorithm: Any) -> None:
    if algorithm is not None:
        raise TypeError(f"algorithm={algorithm!r}: a permutation is one hop; leave it out")


def _permute(x: Pytree, axis_name: AxisName, perm: Pairs) -> Pytree:
    if not jax.tree.leaves(x):
        return x
    axes = axes_of(axis_name)
    hash(axis_name)  # refuses a list of axes, as lax does
    pairs = _among(perm, rank_count(axes))
    return bind_leaves(x, axis_name, Ppermute(axes=axes, pairs=pairs, is_hop=False))


def _among(perm: Pairs, n: int) -> Pairs:
    """The pairs among n ranks, counted from 0.

    Raises:
        ValueError: a rank sends or receives twice.
        IndexError: there is no such rank.
    """
    pairs = tuple((source % n, target % n) for source, target in perm)
    if any(len(set(ends)) < len(ends) for ends in zip(*pairs, strict=True)):
        raise ValueError(
            f"ppermute sources and destinations must be unique, got {perm}.; let every rank send "
            "once and receive once at most"
        )
    if unknown := [rank for pair in perm for rank in pair if not -n <= rank < n]:
        raise IndexError(
            f"{unknown[0]} in `perm` is not a rank; pass 0 to {n - 1}, or -1 for the last"
        )
    return pairs


def _pairs(perm: Any) -> Pairs:
    """Read `perm`, which may be anything, as pairs of whole numbers."""
    words = "`perm` must be a list or a tuple of pairs of ranks"
    cure = "pass pairs (source, target)"
    try:
        pairs = [tuple(map(operator.index, pair)) for pair in perm]
    except TypeError as error:
        raise TypeError(f"{words}: {error}; {cure}") from error
    for pair in pairs:
        if len(pair) != 2:
            raise ValueError(f"{words}: {pair} is not a pair; {cure}")
    return tuple((source, target) for source, target in pairs)
