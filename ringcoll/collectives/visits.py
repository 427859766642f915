"""A function of the caller under the rounds of a schedule: it visits rows, or produces them.

`Rounds` runs it after the checks and the choice of a plan: for `ringcoll.gather` and its kin, for
the collective matmuls, attention and experts. By "lax" it runs once, for the rows of all ranks.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from ringcoll.choose.table import Algorithm
from ringcoll.collectives.all_gather import all_gather, psum_scatter
from ringcoll.collectives.by_schedule import built, title
from ringcoll.collectives.public import integer, public
from ringcoll.costs.wire import Wire
from ringcoll.runtime import run
from ringcoll.runtime.barriers import GATHER_ADD, GATHER_PLACE, REDUCE
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.parts import Layout, Part, shares
from ringcoll.runtime.scopes import scope
from ringcoll.runtime.slicing import (
    concatenated,
    dynamic_slice_in_dim,
    end_to_end,
    joined,
    placed,
    split,
    start_of,
)
from ringcoll.runtime.value_types import empty, type_in_words
from ringcoll.schedules.registry import LAX
from ringcoll.schedules.schedule import Schedule
from ringcoll.schedules.tour import cut as shortened
from ringcoll.schedules.tour import tour

Carry = TypeVar("Carry")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows that arrived in a round, or that are wanted for the next: of one shard or several.

    Each part is of one shard: all of its rows, or those that one lane of the schedule carries.

    Attributes:
        is_all: whether these are all shards, in order: by "lax" there is only this call.
    """

    is_all: bool = field(default=False, metadata={"static": True})
    _parts: tuple[Part, ...]
    _whole: Any = None  # the shards of all ranks, if they arrived as one array
    _ranks: Ranks = field(metadata={"static": True})
    _dim: int = field(metadata={"static": True})
    _size: int | None = field(metadata={"static": True})  # of a shard; None if it is not known
    _from_wire: bool = field(default=False, metadata={"static": True})
    _may_be_cut: bool = field(default=False, metadata={"static": True})  # lanes may divide shards

    @property
    @public("Rows.", arguments=False)
    def value(self) -> Any:
        """The rows that arrived, end to end along the dimension of the call; a pytree, as x."""
        if self.is_all:
            return self._whole
        values = [part.value for part in self._parts]
        if any(value is None for value in values):
            raise ValueError("nothing has arrived here; these rows are wanted: use take")
        # Decoded values are written to their place at once; a concatenation would copy them.
        return joined(values, self._dim, end_to_end if self._from_wire else concatenated)

    @property
    def origins(self) -> tuple[Array, ...]:
        """For each part, the rank to whose shard it belongs."""
        return tuple(part.origin for part in self._parts)

    @property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """For each part that arrived, the offsets at which its schedule may have it.

        In a loop there are several, and by "lax" all. On one axis, mostly, an offset is how far the
        origin is behind this rank.
        """
        return tuple(part.offsets for part in self._parts)

    @property
    @public("Rows.", arguments=False)
    def rows(self) -> tuple[tuple[int, int], ...]:
        """For each part, its first row in the shard, and the number of its rows.

        They are not known when `reduce` first asks for the type of what is produced: `take` works.
        """
        if self._size is None:
            raise ValueError(
                "rows is not known before the result; take the numbers of the rows in place of "
                "it: wanted.take(jnp.arange(m))"
            )
        return tuple(part.rows for part in self._parts)

    @public("Rows.", arguments=False)
    def take(self, x: Any, dim: int | None = None) -> Any:
        """The rows of x that belong to these parts, end to end; x has the rows of all ranks.

        Args:
            x: an array, or a pytree of arrays, with n or c * n times as many rows as a shard, for a
                whole number c.
            dim: the dimension of the rows; None is that of the call.

        Raises:
            ValueError: the number of rows is a different one.
        """

        def taken(x: Array) -> Array:
            along = self._along(x, dim)
            places = self._places(x, along)
            if self.is_all:
                return x
            parts = [
                dynamic_slice_in_dim(x, start, length, along, allow_negative_indices=False)
                for start, length in places
            ]
            return concatenated(parts, along)

        return jax.tree.map(taken, x)

    def parts(self) -> "Iterator[Rows]":
        """The parts, one by one. By "lax", this rank's own shard is the first."""
        if not self.is_all:
            for part in self._parts:
                yield replace(self, _parts=(part,))
            return
        for offset in range(self._ranks.size):
            part = replace(self._parts[0], origin=self._ranks.origin(offset), offsets=(offset,))
            wanted = replace(self, _parts=(part,), _whole=None, is_all=False)
            yield replace(wanted, _parts=(replace(part, value=wanted.take(self._whole)),))

    @public("Rows.", arguments=False)
    def join(self, of_parts: Sequence[Any]) -> Any:
        """Results of the `parts`, with as many rows, end to end as the rows of `value` are.

        Raises:
            ValueError: there are not as many results as parts, or as many rows.
        """
        if len(of_parts) != len(self._parts):
            raise ValueError(
                f"{len(of_parts)} results of {len(self._parts)} parts; join one for each"
            )
        for of_part, part in zip(of_parts, self._parts, strict=True):
            if self._size is not None:  # else `reduce` asks for a type
                checked(of_part, self._dim, part.rows[1])
        results = joined(of_parts, self._dim)
        if self.is_all:  # the parts were in a different order
            for rows, of_part in zip(self.parts(), of_parts, strict=True):
                results = rows._placed(results, of_part)
        return results

    def _placed(self, wholes: Any, rows: Any, dims: Any = None) -> Any:
        """Arrays of all ranks' rows, with these rows written where they belong."""

        def written(whole: Array, rows: Array, dim: int) -> Array:
            along = self._along(whole, dim)
            return placed(whole, rows, along, self._places(whole, along))

        leaves, structure = jax.tree.flatten(wholes)
        dims = [self._dim] * len(leaves) if dims is None else dims
        return jax.tree.unflatten(structure, map(written, leaves, jax.tree.leaves(rows), dims))

    def _along(self, x: Array, dim: int | None) -> int:
        """The dimension of the rows of x, counted from the first."""
        dim = integer("dim", self._dim if dim is None else dim)
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(
                f"{type_in_words(x)} has no dimension {dim}; pass that of its rows as dim"
            )
        return dim % x.ndim

    def _places(self, whole: Array, dim: int) -> list[tuple[Any, int]]:
        """Where the parts are in an array with the rows of all ranks: (start, length) of each."""
        length, ranks = whole.shape[dim], self._ranks.size
        size, parts = self._size, [part.rows for part in self._parts]
        if size is None:
            size = length // ranks
            parts = [(0, size)] * len(parts)
        times = length // (ranks * size) if size else 1
        if times * ranks * size != length:
            rows = f"{ranks} x {self._size}, ranks x rows of a shard" if self._size else f"{ranks}"
            raise ValueError(
                f"dimension {dim} of {type_in_words(whole)} is no multiple of {rows}; pass the "
                "rows of all ranks, padded to a multiple, and make a row of each"
            )
        return [
            (start_of(origin, times * size, times * first, length), times * rows)
            for origin, (first, rows) in zip(self.origins, parts, strict=True)
        ]


jax.tree_util.register_dataclass(Rows)  # for `jax.checkpoint`


def own_rows(x: Any, ranks: Ranks, dim: int, *, whole: bool = True) -> Rows:
    """This rank's shard x, as the first visit may get it; `whole`: lanes do not divide shards."""
    size = row_count(x, dim)
    part = Part(ranks.origin(0), 0, (0, size), (0,), x)
    return Rows(_parts=(part,), _ranks=ranks, _dim=dim, _size=size, _may_be_cut=not whole)


def all_rows(ranks: Ranks, dim: int, size: int, value: Any = None) -> Rows:
    """The rows of all ranks, as a visit or `produce` gets them by "lax"."""
    every = range(ranks.size)
    parts = tuple(Part(jnp.int32(rank), 0, (0, size), tuple(every)) for rank in every)
    return Rows(_parts=parts, _whole=value, _ranks=ranks, _dim=dim, _size=size, is_all=True)


def any_rows(ranks: Ranks, dim: int) -> Rows:
    """This rank's rows of shards of any size, as `produce` may get them."""
    part = Part(ranks.origin(0), 0, (0, 0))
    return Rows(_parts=(part,), _ranks=ranks, _dim=dim, _size=None)


class CutShards(ValueError):
    """A function wants whole shards, and the lanes of the schedule cut them."""


def pair(returned: Any) -> tuple[Any, Any]:
    """What a visit returned, if it is a pair."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"visit returns {type(returned).__name__}, and no pair; return (carry, rows), as in "
            "jax.lax.scan; rows may be None"
        )
    return returned


def per_shard(
    visit: Callable[[Carry, Rows], tuple[Carry, Any]],
) -> Callable[[Carry, Rows], tuple[Carry, Any]]:
    """A visit of all that arrived in a round, from a `visit` of one whole shard.

    A schedule of several lanes runs by its first one, which then carries whole shards.

    >>> def counts(x):
    ...     def visit(found, shard):
    ...         return found.at[shard.origins[0]].add(shard.value.sum()), None
    ...     return ringcoll.gather(x, "x", ringcoll.per_shard(visit), jnp.zeros(4))[0]
    >>> print(ranks(counts)(jnp.arange(8.0))[:4])  # on every rank: the sum of each shard
    [ 1.  5.  9. 13.]
    """

    if not callable(visit):
        kind = type(visit).__name__
        raise TypeError(f"ringcoll.per_shard: visit is a {kind}, no function; pass a function")

    def visit_all(carry: Carry, arrived: Rows) -> tuple[Carry, Any]:
        if arrived._may_be_cut:
            raise CutShards("per_shard: shards arrived in parts; loop over arrived.parts()")
        results = []
        for part in arrived.parts():
            carry, rows = pair(visit(carry, part))
            results.append(rows)
        return carry, arrived.join(results)

    return visit_all


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How a caller's function runs in rounds.

    By "lax" it runs once, for all ranks, after (or before) the collective.

    Attributes:
        name: the name of the call, for profiles.
        axes, groups: the ranks.
        algorithm: the algorithm of a gather.
        collective: the algorithm of the collective; it is read only if `algorithm` is "lax".
        dim: the dimension along which shards are joined.
        wire: what the messages of a gather hold in place of floats.
        needed: the offsets of the shards that some rank needs; None: all. The others are not sent,
            except by "lax".
        whole: whether shards must not be cut.
    """

    name: str
    axes: tuple[Hashable, ...]
    groups: tuple[tuple[int, ...], ...] | None = None
    algorithm: Algorithm
    collective: Algorithm = LAX
    dim: int
    wire: Wire | None = None
    needed: frozenset[int] | None = None
    whole: bool = False

    def ranks(self) -> Ranks:
        """The ranks, as the digits of the schedule."""
        return Ranks.over(self.axes, self.groups) if self.algorithm == LAX else self._built()[1]

    def gather(
        self,
        x: Any,
        visit: Callable[[Carry, Rows], tuple[Carry, Any]],
        carry: Carry,
        rows: Any = None,
        dims: Sequence[int] | None = None,
        *,
        adds: bool = False,
    ) -> tuple[Carry, Any]:
        """Visit the shards of all ranks; see `ringcoll.gather`.

        Args:
            x, visit, carry: as for `ringcoll.gather`.
            rows: the types of the rows that the visit of this rank's own shard returns.
            dims: for each array of them, the dimension of the rows; None: that of the call.
            adds: whether products are added to the carry.
        """
        size = row_count(x, self.dim)
        with scope(title(self.name, self.algorithm, "all_gather")):
            if self.algorithm == LAX:
                return visit(carry, self._gathered(x))
            schedule, ranks = self._built(size)
            layout = self._layout(size, schedule.lanes)
            if self.needed is not None:
                schedule = shortened(schedule, self.needed)

            def visit_round(state: Any, parts: list[Part]) -> Any:
                (carry, placed), arrived = state, self._rows(parts, ranks, size)
                carry, rows = visit(carry, arrived)
                return carry, arrived._placed(placed, rows, dims)

            order = GATHER_ADD if adds else GATHER_PLACE
            state = carry, self._buffers(rows, dims, ranks)
            return run.gather(schedule, ranks, layout, x, visit_round, state, order, self.wire)

    def reduce(self, produce: Callable[[Rows], Any], size: int) -> Any:
        """The sum of what all ranks produce; see `ringcoll.reduce`. A shard has `size` rows."""
        with scope(title(self.name, self.algorithm, "psum_scatter")):
            if self.algorithm == LAX:
                return self._scattered(produce(all_rows(self.ranks(), self.dim, size)), size)
            schedule, ranks = self._built(size)
            layout = self._layout(size, schedule.lanes)

            def contributions(parts: Sequence[Part]) -> list[Any]:
                return split_rows(produce(self._rows(parts, ranks, size)), self.dim, parts)

            mine = run.reduce(schedule, ranks, layout, contributions, run.added, REDUCE)
            return joined(mine, self.dim)

    def tour(
        self,
        x: Any,
        visit: Callable[[Carry, Rows], tuple[Carry, Any]],
        carry: Carry,
        *,
        halved: bool = False,
    ) -> tuple[Carry, Any]:
        """Visit the shards of all ranks, and bring sums home; see `ringcoll.tour`.

        `halved`: a rank visits its own shard in halves, under the first and the last message.
        """
        size = row_count(x, self.dim)
        with scope(title(self.name, self.algorithm, "all_gather")):
            if self.algorithm == LAX:
                carry, every = visit(carry, self._gathered(x))
                return carry, self._scattered(every, size)
            schedule, ranks = self._built(size)
            layout = self._layout(size, schedule.lanes)

            def visit_round(carry: Carry, parts: list[Part]) -> tuple[Carry, list[Any]]:
                carry, results = visit(carry, self._rows(parts, ranks, size))
                return carry, split_rows(results, self.dim, parts)

            run_on = tour(schedule, self.needed), ranks, layout
            carry, sums = run.tour(*run_on, x, visit_round, carry, GATHER_PLACE, halved=halved)
            return carry, joined(sums, self.dim)

    def _built(self, size: int | None = None) -> tuple[Schedule, Ranks]:
        """The gather and its ranks. Lanes cut shards only if each gets some of the `size` rows."""
        schedule, ranks = built("all_gather", self.algorithm, self.axes, self.groups)
        is_cut = not self.whole and (size is None or size >= schedule.lanes)
        return schedule if is_cut else schedule.whole(), ranks

    def _layout(self, size: int, lanes: int) -> Layout:
        """The layout of shards of `size` rows, which lanes cut along the same dimension."""
        return Layout(self.dim, size, self.dim, shares(size, lanes))

    def _rows(self, parts: Sequence[Part], ranks: Ranks, size: int) -> Rows:
        """What arrived or is wanted in a round."""
        return Rows(
            _parts=tuple(parts),
            _ranks=ranks,
            _dim=self.dim,
            _size=size,
            _from_wire=self.wire is not None,
        )

    def _buffers(self, rows: Any, dims: Sequence[int] | None, ranks: Ranks) -> Any:
        """Buffers that are not filled, for n times as many rows as these types have."""
        leaves, structure = jax.tree.flatten(rows)

        def buffer(aval: jax.core.ShapedArray, dim: int) -> Array:
            shape = list(aval.shape)
            shape[dim] *= ranks.size
            return empty(shape, aval, ranks.axes)

        dims = [self.dim] * len(leaves) if dims is None else dims
        return jax.tree.unflatten(structure, map(buffer, leaves, dims))

    def _gathered(self, x: Any) -> Rows:
        """The shards of all ranks, by the collective."""
        value = all_gather(x, self.axes, axis=self.dim, wire=self.wire, **self._of_collective())
        return all_rows(self.ranks(), self.dim, row_count(x, self.dim), value)

    def _scattered(self, every: Any, size: int) -> Any:
        """This rank's shard of a sum, by the collective."""
        every = checked(every, self.dim, self.ranks().size * size)
        return psum_scatter(every, self.axes, scatter_dimension=self.dim, **self._of_collective())

    def _of_collective(self) -> dict[str, Any]:
        return {"axis_index_groups": self.groups, "tiled": True, "algorithm": self.collective}


def row_count(tree: Any, dim: int) -> int:
    """The number of rows of the arrays of a tree."""
    return jax.tree.leaves(tree)[0].shape[dim]


def checked(rows: Any, dim: int, count: int) -> Any:
    """The rows that a caller's function made, if there are so many."""
    if wrong := {x.shape[dim] for x in jax.tree.leaves(rows)} - {count}:
        raise ValueError(
            f"{min(wrong)} rows along dimension {dim}, in place of {count}; make a row for each "
            "that is wanted"
        )
    return rows


def split_rows(rows: Any, dim: int, parts: Sequence[Part]) -> list[Any]:
    """The rows of each part, of rows that are end to end."""
    lengths = [part.rows[1] for part in parts]
    return split(checked(rows, dim, sum(lengths)), dim, lengths)
