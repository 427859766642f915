"""Drop-ins for the collectives of `jax.lax`: the same names, signatures and semantics.

Each takes two keyword arguments more. `algorithm` is "auto" (the measured table of
`ringcoll.table`), the name of a schedule in `ringcoll.algorithms`, "lax" (the built-in,
for comparison), a `Table` of one's own, a `Schedule`, or a function that makes one of the
axis sizes. `accumulate_dtype` is the dtype of partial sums: a contribution that has not
been added to yet travels as it is, a partial sum travels wide, and the result is rounded
once. Below, n is the number of ranks, s the bytes of one rank's operand.

All work under `jit`, `vmap`, `grad`, `scan`, `cond`, `remat` and in eager `shard_map`, in
both `check_vma` modes; derivatives are lax's, by the same algorithm backward. What needs
no communication or what only lax can do is left to it: constants of a sum, axes given by
position, unreduced and reduced types, `axis_index_groups` of several sizes.

All raise what lax raises, in lax's words, before anything is sent: NameError for an axis
that is not bound; ValueError for a dimension out of bounds or that does not divide, for
groups that do not cover the axis, for an algorithm that does not exist or cannot run on
so many ranks, and for an `accumulate_dtype` narrower than the operand.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ringcoll.bodies import (
    AllGather,
    AllToAll,
    PsumScatter,
)
from ringcoll.calls import AxisName, Call, Groups, Pytree
from ringcoll.table import Algorithm
from ringcoll.wire import Hop


def all_gather(
    x: Pytree,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    algorithm: Algorithm = "auto",
    accumulate_dtype: Any = None,
) -> Pytree:
    """Every rank's x on every rank, stacked (or, tiled, end to end) along `axis`.

    `x: [a, b] -> [n, a, b]`, tiled `[n a, b]`; block r is rank r's, counted row-major
    over several axes. `to="invarying"` types the result as the same on all ranks.

    Ring: n-1 rounds of s bytes. Every algorithm sends (n-1) s bytes a rank; "bruck" does
    it in ceil(log2 n) rounds, "two_ended" in ceil((n-1)/2).

    Gradient: `psum_scatter` by the same algorithm, summed in `accumulate_dtype`; for
    `to="invarying"` a slice.

    Raises:
        ValueError: `axis` is out of bounds, `to` unknown.

    Source: Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication:
    theory, practice, and experience", Concurrency Computat.: Pract. Exper. 19 (2007).
    """
    call = Call(
        "all_gather",
        "all_gather",
        axis_name,
        axis_index_groups,
        algorithm,
        accumulate_dtype,
        dims={"axis": axis},
        adds_dim=not tiled,
        said={"tiled": tiled, "to": to},
        lax_only=to == "reduced",
    )
    groups = axis_index_groups

    def by_lax(x: Any, axis: int) -> Array:
        return lax.all_gather(x, axis_name, axis_index_groups=groups, axis=axis, tiled=tiled, to=to)

    def by_hand(x: Array, axis: int) -> Array:
        gather = AllGather(**call.params, dims=(axis,), to=to)
        return gather(x if tiled else jnp.expand_dims(x, axis))

    return call.each(x, by_lax, by_hand)


def psum_scatter(
    x: Pytree,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    algorithm: Algorithm = "auto",
    accumulate_dtype: Any = None,
) -> Pytree:
    """The sum of all ranks' x, of which rank r keeps block r along `scatter_dimension`.

    `x: [n, a, b] -> [a, b]`, tiled `[n a, b] -> [a, b]`.

    Ring: n-1 rounds of s/n bytes, each added to. With a wider `accumulate_dtype` a ring
    sends narrow in its first round and wide in the others; "direct" sends all of it
    narrow, in one round of n-1 messages, and rounds the sum once.

    Gradient: `all_gather` by the same algorithm.

    Raises:
        ValueError: the dimension is out of bounds, is not n, or does not divide by n.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", J. Parallel Distrib. Comput. 69 (2009).
    """
    call = Call(
        "psum_scatter",
        "psum_scatter",
        axis_name,
        axis_index_groups,
        algorithm,
        accumulate_dtype,
        dims={"scatter_dimension": scatter_dimension},
        said={"tiled": tiled},
    )
    groups = axis_index_groups

    def by_lax(x: Any, scatter_dimension: int) -> Array:
        return lax.psum_scatter(
            x,
            axis_name,
            scatter_dimension=scatter_dimension,
            axis_index_groups=groups,
            tiled=tiled,
        )

    def by_hand(x: Array, scatter_dimension: int) -> Array:
        mine = PsumScatter(**call.params, dims=(scatter_dimension,))(x)
        return mine if tiled else mine.squeeze(scatter_dimension)

    return call.each(x, by_lax, by_hand)


def all_to_all(
    x: Pytree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    algorithm: Algorithm = "auto",
) -> Pytree:
    """Block j of rank r's x along `split_axis` becomes block r of rank j's result.

    `x: [n, a, b] -> [n, a, b]` for split and concat 0; tiled `[n a, b] -> [a, n b]` for
    split 0 and concat 1.

    "pairwise": n-1 rounds of s/n bytes, the least there is; "bruck": ceil(log2 n) rounds
    of about s/2 bytes.

    Gradient: the all-to-all with the axes exchanged.

    Raises:
        ValueError: a dimension is out of bounds, is not n, or does not divide by n.

    Source: Bruck et al., IEEE Trans. Parallel Distrib. Syst. 8 (1997).
    """
    call = Call(
        "all_to_all",
        "all_to_all",
        axis_name,
        axis_index_groups,
        algorithm,
        dims={"split_axis": split_axis, "concat_axis": concat_axis},
        said={"tiled": tiled},
    )
    groups = axis_index_groups

    def by_lax(x: Any, split_axis: int, concat_axis: int) -> Array:
        return lax.all_to_all(
            x, axis_name, split_axis, concat_axis, axis_index_groups=groups, tiled=tiled
        )

    def by_hand(x: Array, split_axis: int, concat_axis: int) -> Array:
        split, concat = split_axis, concat_axis
        if tiled:
            return AllToAll(**call.params, dims=(split, concat))(x)
        if split == concat:  # the blocks are already one wide there
            return AllToAll(**call.params, dims=(split, split))(x)
        concat += split < concat  # lax counts it without the split dimension
        split += concat <= split
        blocks = AllToAll(**call.params, dims=(split, concat))(jnp.expand_dims(x, concat))
        return blocks.squeeze(split)

    return call.each(x, by_lax, by_hand)


def pswapaxes(
    x: Pytree,
    axis_name: AxisName,
    axis: int,
    *,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
) -> Pytree:
    """Exchange the mapped axis with the dimension `axis`, of size n.

    `x: [n, a] -> [n, a]` for axis 0: an `all_to_all` that splits and stacks there.

    Steps and bytes, gradient, raises, source: as `all_to_all`.
    """
    call = Call(
        "pswapaxes", "all_to_all", axis_name, axis_index_groups, algorithm, dims={"axis": axis}
    )
    return call.each(
        x,
        lambda x, axis: lax.pswapaxes(x, axis_name, axis, axis_index_groups=axis_index_groups),
        lambda x, axis: AllToAll(**call.params, dims=(axis, axis))(x),
    )


def ppermute(x: Pytree, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> Pytree:
    """Rank s of each pair (s, d) in `perm` sends its x to rank d; the others get zeros.

    `x: [a, b] -> [a, b]`. Several axes are counted row-major in the order given, in every
    version of JAX. Narrow floats travel as integers of their width (see `ringcoll.wire`).

    One round of s bytes.

    Gradient: the inverse permutation.

    Raises:
        TypeError: `perm` is no list or tuple.
        ValueError: a rank sends twice or receives twice.
    """
    return _permute(Call("ppermute", None, axis_name, said={"perm": perm}), x, perm)


def pshuffle(x: Pytree, axis_name: AxisName, perm: Sequence[int]) -> Pytree:
    """Rank i gets the x of rank `perm[i]`: `ppermute`, said the other way.

    `x: [a, b] -> [a, b]`. One round of s bytes.

    Gradient: the inverse permutation.

    Raises:
        ValueError: `perm` is no permutation.
    """
    call = Call("pshuffle", None, axis_name, said={"perm": perm})
    if set(perm) != set(range(len(perm))):
        raise call.refusal(ValueError, f"`perm` does not represent a permutation: {perm}")
    return _permute(call, x, list(zip(perm, range(len(perm)), strict=True)))


def _permute(call: Call, x: Pytree, perm: Sequence[tuple[int, int]]) -> Pytree:
    def pairs() -> tuple[tuple[int, int], ...]:
        if not isinstance(perm, list | tuple):
            raise TypeError(f"`perm` must be a list or a tuple. Got perm of type {type(perm)}")
        n = call.all_ranks()
        made = tuple((source % n, target % n) for source, target in perm)
        if any(len(set(ends)) < len(ends) for ends in zip(*made, strict=True)):
            got = tuple(map(tuple, perm))
            raise ValueError(f"ppermute sources and destinations must be unique, got {got}.")
        return made

    def by_lax(x: Any) -> Array:
        pairs()
        return lax.ppermute(x, call.axis_name, perm)

    def by_hand(x: Array) -> Array:
        return Hop(axes=call.axes, pairs=pairs())(x)

    return call.each(x, by_lax, by_hand)
