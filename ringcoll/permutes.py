"""Permutations: one hop, said as pairs or as an order."""

from collections.abc import Sequence
from typing import Any

from jax import Array, lax

from ringcoll.calls import AxisName, Call, Pytree
from ringcoll.wire import Ppermute


def ppermute(x: Pytree, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> Pytree:
    """Rank s of each pair (s, d) in `perm` sends its x to rank d; the others get zeros.

    `x: [a, b] -> [a, b]`. Several axes are counted row-major in the order given, in every
    version of JAX. Narrow floats travel as integers of their width (see `ringcoll.wire`).

    One round of s bytes.

    Gradient: the inverse permutation.

    Raises:
        TypeError: `perm` is no list or tuple.
        ValueError: a rank sends twice or receives twice.

    n, s and what all of them raise: see `ringcoll.lax`.
    """
    return _permute(Call("ppermute", None, axis_name, said={"perm": perm}), x, perm)


def pshuffle(x: Pytree, axis_name: AxisName, perm: Sequence[int]) -> Pytree:
    """Rank i gets the x of rank `perm[i]`: `ppermute`, said the other way.

    `x: [a, b] -> [a, b]`. One round of s bytes.

    Gradient: the inverse permutation.

    Raises:
        ValueError: `perm` is no permutation.

    n, s and what all of them raise: see `ringcoll.lax`.
    """
    call = Call("pshuffle", None, axis_name, said={"perm": perm})
    if set(perm) != set(range(len(perm))):
        raise call.refusal(ValueError, f"`perm` does not represent a permutation: {perm}")
    return _permute(call, x, list(zip(perm, range(len(perm)), strict=True)))


def _permute(call: Call, x: Pytree, perm: Sequence[tuple[int, int]]) -> Pytree:
    def pairs() -> tuple[tuple[int, int], ...]:
        if not isinstance(perm, list | tuple):
            raise TypeError(f"`perm` must be a list or a tuple. Got perm of type {type(perm)}")
        n = call.rank_count()
        made = tuple((source % n, target % n) for source, target in perm)
        if any(len(set(ends)) < len(ends) for ends in zip(*made, strict=True)):
            got = tuple(map(tuple, perm))
            raise ValueError(f"ppermute sources and destinations must be unique, got {got}.")
        return made

    def by_lax(x: Any) -> Array:
        pairs()
        return lax.ppermute(x, call.axis_name, perm)

    def by_hand(x: Array) -> Array:
        return Ppermute(axes=call.axes, pairs=pairs(), is_hop=False)(x)

    return call.each(x, by_lax, by_hand)
