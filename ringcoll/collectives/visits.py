"""A function of the caller under the rounds of a schedule: it visits shards, or produces rows.

The engine knows lanes and slots; a caller's function gets rows: all that arrived in a round, end to
end, and where they belong. `ringcoll.gather` and its kin are these runs after the checks and the
choice of a plan, and the collective matmuls are too.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringcoll.choose.table import Algorithm
from ringcoll.collectives.all_gather import all_gather, psum_scatter
from ringcoll.collectives.all_to_all import all_to_all
from ringcoll.collectives.by_schedule import built, named
from ringcoll.collectives.public import integer, public
from ringcoll.costs.wire import Wire
from ringcoll.runtime import engine, turns
from ringcoll.runtime.barriers import GATHER_ADD, GATHER_PLACE, REDUCE
from ringcoll.runtime.contributions import Shard, Slot
from ringcoll.runtime.hop import Ranks
from ringcoll.runtime.slicing import (
    concatenated,
    dynamic_slice_in_dim,
    end_to_end,
    joined,
    placed,
    share,
    start_of,
)
from ringcoll.runtime.value_types import type_in_words, zeros
from ringcoll.runtime.wire import encoded_once
from ringcoll.schedules.registry import LAX
from ringcoll.schedules.schedule import Schedule
from ringcoll.schedules.tour import cut as shortened
from ringcoll.schedules.tour import tour

Carry = TypeVar("Carry")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The rows that are sent next: of one shard or several, or of a part of each.

    Attributes:
        origins: for each part, the rank to whose shard it belongs.
        rows: for each part, its first row in the shard, and the number of its rows. They are not
            known when `reduce` first asks for the type of what is produced: `wanted.take(numbers)`
            is.
        is_all: whether these are all shards, in order: by "lax" there is only this call.
    """

    origins: tuple[Array, ...]
    is_all: bool = False
    _rows: tuple[tuple[int, int], ...]
    _of: "_Shards"

    @property
    @public("Wanted.", arguments=False)
    def rows(self) -> tuple[tuple[int, int], ...]:
        if self._of.size is None:
            raise ValueError(
                "wanted.rows is not known before the result; take the numbers of the rows in "
                "place of it: wanted.take(jnp.arange(m))"
            )
        return self._rows

    @public("Wanted.", arguments=False)
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

    def _along(self, x: Array, dim: int | None) -> int:
        """The dimension of the rows of x, counted from the first."""
        dim = integer("dim", self._of.dim if dim is None else dim)
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(
                f"{type_in_words(x)} has no dimension {dim}; pass that of its rows as dim"
            )
        return dim % x.ndim

    def _places(self, whole: Array, dim: int) -> list[tuple[Any, int]]:
        """Where the parts are in an array with the rows of all ranks: (start, length) of each."""
        length, size, ranks = whole.shape[dim], self._of.size, self._of.ranks.size
        parts = [(0, length // ranks)] if size is None else self.rows
        size = length // ranks if size is None else size
        times = length // (ranks * size) if size else 1
        if times * ranks * size != length:
            rows = f"{ranks} x {size}" if size else f"{ranks}"
            raise ValueError(
                f"dimension {dim} of {type_in_words(whole)} is no multiple of {rows}; pass the "
                "rows of all ranks, padded to a multiple"
            )
        return [
            (start_of(origin, times * size, times * first, length), times * rows)
            for origin, (first, rows) in zip(self.origins, parts, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Arrived(Wanted):
    """What arrived in one round: one shard or several, or a part of each.

    Attributes:
        value: the parts end to end along the dimension of the call; a pytree, as x.
        origins: for each part, the rank from which it came.
        offsets: for each part, the offsets at which its schedule may have it: in a loop there are
            several, and by "lax" all. On one axis, mostly, how far its origin is behind this rank.
        rows, is_all: as for `Wanted`.
    """

    value: Any
    offsets: tuple[tuple[int, ...], ...]

    @public("Arrived.", arguments=False)
    def place(self, whole: Any, rows: Any, dim: int | None = None) -> Any:
        """`whole`, an array with the rows of all ranks, with `rows` written where they belong.

        Args:
            whole: as x of `take`.
            rows: the rows of the parts, end to end; their dtype becomes that of `whole`. A pytree,
                if `whole` is one.
            dim: the dimension of the rows; None is that of the call.

        Raises:
            ValueError: the number of rows, or their shape, is a different one.
        """

        def written(whole: Array, rows: Array) -> Array:
            along = self._along(whole, dim)
            places = self._places(whole, along)
            count = sum(length for _, length in places)
            if rows.shape != (*whole.shape[:along], count, *whole.shape[along + 1 :]):
                raise ValueError(
                    f"{type_in_words(rows)} are no {count} rows of {type_in_words(whole)}; make as "
                    "many rows as arrived, of its shape"
                )
            rows = rows.astype(whole.dtype)
            return rows if self.is_all else placed(whole, rows, along, places)

        return jax.tree.map(written, whole, rows)

    def parts(self) -> "Iterator[Arrived]":
        """The parts, one by one. By "lax", this rank's own shard is the first."""
        dim, ranks, size = self._of.dim, self._of.ranks, self._of.size
        if not self.is_all:
            values = _split(self.value, dim, [count for _, count in self.rows])
            parts = zip(self.origins, self.offsets, self.rows, values, strict=True)
            for origin, offsets, rows, value in parts:
                where: dict[str, Any] = {"origins": (origin,), "offsets": (offsets,)}
                yield replace(self, **where, _rows=(rows,), value=value)
            return
        for offset in range(ranks.size):
            where = {"origins": (ranks.origin(offset),), "offsets": ((offset,),)}
            part = replace(self, **where, _rows=((0, size or 0),), is_all=False)
            yield replace(part, value=part.take(self.value))

    @public("Arrived.", arguments=False)
    def join(self, of_parts: Sequence[Any]) -> Any:
        """Results of the `parts`, with as many rows, end to end as the rows of `value` are.

        Raises:
            ValueError: there are not as many results as parts, or as many rows.
        """
        if len(of_parts) != len(self.rows):
            raise ValueError(
                f"{len(of_parts)} results of {len(self.rows)} parts; join one for each"
            )
        for of_part, (_, count) in zip(of_parts, self.rows, strict=True):
            _checked(of_part, self._of.dim, count)
        results = joined(of_parts, self._of.dim)
        if self.is_all:  # the parts were in a different order
            for part, of_part in zip(self.parts(), of_parts, strict=True):
                results = part.place(results, of_part)
        return results


for _kind, _data in ((Wanted, ["origins"]), (Arrived, ["origins", "value"])):  # for `checkpoint`
    _fixed = [field.name for field in fields(_kind) if field.name not in _data]
    jax.tree_util.register_dataclass(_kind, _data, _fixed)


class CutShards(ValueError):
    """A function wants whole shards, and the lanes of the schedule cut them."""


def per_shard(visit: Callable[[Carry, Arrived], Carry]) -> Callable[[Carry, Arrived], Carry]:
    """A visit of all that arrived in a round, from a `visit` of one whole shard.

    A schedule of several lanes runs by its first one, which then carries whole shards.

    >>> def counts(x):
    ...     def visit(found, arrived):
    ...         return found.at[arrived.origins[0]].add(arrived.value.sum())
    ...     return ringcoll.gather(x, "x", ringcoll.per_shard(visit), jnp.zeros(4))
    >>> print(ranks(counts)(jnp.arange(8.0))[:4])  # on every rank: the sum of each shard
    [ 1.  5.  9. 13.]
    """

    def visit_all(carry: Carry, arrived: Arrived) -> Carry:
        if arrived._of.lanes > 1:
            raise CutShards("per_shard: shards arrived in parts; loop over arrived.parts()")
        for part in arrived.parts():
            carry = visit(carry, part)
        return carry

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

    def own(self, x: Any) -> Arrived:
        """This rank's shard x, as the first visit may get it.

        Unless the rounds are `whole`, it looks as if it were cut, so that `per_shard` refuses it.
        """
        shard, lanes = Shard(x, self.ranks().origin(0), 0, (0,)), 1 if self.whole else 2
        return _Shards(self.ranks(), self.dim, _rows(x, self.dim), lanes).arrived([shard])

    def wanted(self) -> Wanted:
        """This rank's rows, of shards of a size that is not known, as `produce` may get them."""
        ranks = self.ranks()
        return Wanted(origins=(ranks.origin(0),), _rows=(), _of=_Shards(ranks, self.dim))

    def wanted_all(self, size: int) -> Wanted:
        """The rows of all ranks, of shards of `size` rows, as `produce` gets them by "lax"."""
        return Wanted(**_Shards(self.ranks(), self.dim, size).every())

    def blocks(self, x: Any, ranks: Ranks) -> list[Any]:
        """The blocks of an exchange: number d is for the rank that is d ahead."""
        size = _rows(x, self.dim) // ranks.size

        def sliced(x: Array, to: int) -> Array:
            dim = self.dim % x.ndim
            start = start_of(ranks.origin(to, forward=True), size, 0, x.shape[dim])
            return dynamic_slice_in_dim(x, start, size, dim, allow_negative_indices=False)

        return [jax.tree.map(partial(sliced, to=d), x) for d in range(ranks.size)]

    def gather(
        self, x: Any, visit: Callable[[Carry, Arrived], Carry], carry: Carry, *, adds: bool = False
    ) -> Carry:
        """Visit the shards of all ranks; see `ringcoll.gather`. `adds`: products are added."""
        size = _rows(x, self.dim)
        with named(self.name, self.algorithm, "all_gather"):
            if self.algorithm == LAX:
                return visit(carry, self._gathered(x))
            schedule, ranks = self._built(size)
            shards = _Shards(ranks, self.dim, size, schedule.lanes)
            if self.needed is not None:
                schedule = shortened(schedule, self.needed)
            # Decoded values are written to their place at once; a concatenation would copy them.
            join = end_to_end if self.wire else concatenated

            def visit_round(carry: Carry, latest: list[Shard]) -> Carry:
                return visit(carry, shards.arrived(latest, join))

            own, order = shards.by_lane(x), GATHER_ADD if adds else GATHER_PLACE
            of_rounds: tuple[Any, Any] = own, visit_round
            if self.wire:
                of_rounds = encoded_once(self.wire, own, visit_round)
            return engine.gather(schedule, ranks, *of_rounds, carry, order)

    def reduce(self, produce: Callable[[Wanted], Any], size: int, *, by_turns: bool = False) -> Any:
        """The sum of what all ranks produce; see `ringcoll.reduce`. A shard has `size` rows."""
        with named(self.name, self.algorithm, "psum_scatter"):
            if self.algorithm == LAX:
                return self._scattered(produce(self.wanted_all(size)), size)
            schedule, ranks = self._built(size)
            by_turns &= size >= 2 * schedule.lanes
            shards = _Shards(ranks, self.dim, size, schedule.lanes * (1 + by_turns))

            def contributions(slots: Sequence[Slot], received: Sequence[Any] = ()) -> list[Any]:
                mine = produce(Wanted(**shards.of(slots)))
                sums = engine.added(joined(received, self.dim), mine) if received else mine
                return shards.split(sums, slots)

            def start(slot: Slot) -> Any:
                program, out = jax.make_jaxpr(lambda: contributions([slot]), return_shape=True)()
                return jax.tree.unflatten(jax.tree.structure(*out), map(zeros, program.out_avals))

            if by_turns:
                parts = turns.reduce(schedule, ranks, contributions, start)
            else:
                parts = engine.reduce(schedule, ranks, contributions, engine.added, REDUCE)
            return joined(parts, self.dim)

    def tour(
        self,
        x: Any,
        visit: Callable[[Carry, Arrived], tuple[Carry, Any]],
        carry: Carry,
        *,
        halved: bool = False,
    ) -> tuple[Carry, Any]:
        """Visit the shards of all ranks, and bring sums home; see `ringcoll.tour`.

        `halved`: a rank visits its own shard in halves, under the first and the last message.
        """
        size = _rows(x, self.dim)
        with named(self.name, self.algorithm, "all_gather"):
            if self.algorithm == LAX:
                carry, every = visit(carry, self._gathered(x))
                return carry, self._scattered(every, size)
            schedule, ranks = self._built(size)
            shards = _Shards(ranks, self.dim, size, schedule.lanes)

            def visit_round(carry: Carry, latest: list[Shard]) -> tuple[Carry, list[Any]]:
                carry, results = visit(carry, shards.arrived(latest))
                return carry, shards.split(results, latest)

            path, own = tour(schedule, self.needed), shards.by_lane(x)
            dim = self.dim if halved else None
            carry, sums = engine.tour(
                path, ranks, own, visit_round, carry, GATHER_PLACE, halves_along=dim
            )
            return carry, joined(sums, self.dim)

    def exchange(self, x: Any, visit: Callable[[Carry, Arrived], Carry], carry: Carry) -> Carry:
        """Send each rank its block of x, and visit what arrives; see `ringcoll.exchange`."""
        size = _rows(x, self.dim) // Ranks.over(self.axes, self.groups).size
        with named(self.name, self.algorithm, "all_to_all"):
            if self.algorithm == LAX:
                value = all_to_all(x, self.axes, self.dim, self.dim, **self._of_collective())
                every = _Shards(self.ranks(), self.dim, size)
                return visit(carry, every.arrived_all(value))
            schedule, ranks = built("all_to_all", self.algorithm, self.axes, self.groups)
            shards = _Shards(ranks, self.dim, size)

            def visit_round(carry: Carry, latest: list[Shard]) -> Carry:
                return visit(carry, shards.arrived(latest))

            blocks = self.blocks(x, ranks)
            return engine.exchange(schedule, ranks, blocks, visit_round, carry, GATHER_PLACE)

    def _built(self, size: int | None = None) -> tuple[Schedule, Ranks]:
        """The gather and its ranks. Lanes cut shards only if each gets some of the `size` rows."""
        schedule, ranks = built("all_gather", self.algorithm, self.axes, self.groups)
        is_cut = not self.whole and (size is None or size >= schedule.lanes)
        return schedule if is_cut else schedule.whole(), ranks

    def _gathered(self, x: Any) -> Arrived:
        """The shards of all ranks, by the collective."""
        value = all_gather(x, self.axes, axis=self.dim, wire=self.wire, **self._of_collective())
        return _Shards(self.ranks(), self.dim, _rows(x, self.dim)).arrived_all(value)

    def _scattered(self, every: Any, size: int) -> Any:
        """This rank's shard of a sum, by the collective."""
        every = _checked(every, self.dim, self.ranks().size * size)
        return psum_scatter(every, self.axes, scatter_dimension=self.dim, **self._of_collective())

    def _of_collective(self) -> dict[str, Any]:
        return {"axis_index_groups": self.groups, "tiled": True, "algorithm": self.collective}


class _Shards(NamedTuple):
    """The shards of `ranks`, each with `size` rows along `dim`, which `lanes` divide.

    If the size is None, it is that of the array of which rows are taken.
    """

    ranks: Ranks
    dim: int
    size: int | None = None
    lanes: int = 1

    def by_lane(self, x: Any) -> list[Any]:
        """The shares of the lanes of a shard."""
        lengths = [share(self.size or 0, self.lanes, lane)[1] for lane in range(self.lanes)]
        return _split(x, self.dim, lengths)

    def of(self, slots: Sequence[Slot | Shard]) -> dict[str, Any]:
        """Whose rows these are, as `Wanted` has them."""
        origins, rows = (tuple(slot.origin for slot in slots), tuple(map(self._part, slots)))
        return {"origins": origins, "_rows": rows, "_of": self}

    def every(self) -> dict[str, Any]:
        """All rows, as `Wanted` has them."""
        slots = [Slot(jnp.int32(rank), 0) for rank in range(self.ranks.size)]
        return {**self.of(slots), "is_all": True}

    def arrived(self, shards: Sequence[Shard], join: Callable[..., Any] = concatenated) -> Arrived:
        """Shards as a visit gets them, end to end."""
        value = joined([shard.value for shard in shards], self.dim, join)
        offsets = tuple(shard.offsets for shard in shards)
        return Arrived(**self.of(shards), value=value, offsets=offsets)

    def arrived_all(self, value: Any) -> Arrived:
        """All shards, as a visit gets them."""
        n = self.ranks.size
        return Arrived(**self.every(), value=value, offsets=(tuple(range(n)),) * n)

    def split(self, rows: Any, slots: Sequence[Slot | Shard]) -> list[Any]:
        """The rows of each slot, of rows that are end to end."""
        lengths = [self._part(slot)[1] for slot in slots]
        return _split(_checked(rows, self.dim, sum(lengths)), self.dim, lengths)

    def _part(self, slot: Slot | Shard) -> tuple[int, int]:
        """The first row of a slot in its shard, and the number of its rows."""
        start, length = share(self.size or 0, self.lanes, slot.lane)
        if isinstance(slot, Slot):
            return start, length
        return start + slot.first, _rows(slot.value, self.dim)


def _rows(tree: Any, dim: int) -> int:
    return jax.tree.leaves(tree)[0].shape[dim]


def _checked(rows: Any, dim: int, count: int) -> Any:
    """The rows that a caller's function made, if there are so many."""
    if wrong := {x.shape[dim] for x in jax.tree.leaves(rows)} - {count}:
        raise ValueError(
            f"{min(wrong)} rows along dimension {dim}, in place of {count}; make a row for each "
            "that is wanted"
        )
    return rows


def _split(tree: Any, dim: int, lengths: Sequence[int]) -> list[Any]:
    """The same consecutive rows of all arrays."""
    if len(lengths) == 1:
        return [tree]
    starts = np.cumsum([0, *lengths[:-1]])

    def cut(start: int, rows: int) -> Any:
        return jax.tree.map(lambda x: lax.slice_in_dim(x, start, start + rows, axis=dim), tree)

    return [cut(int(start), rows) for start, rows in zip(starts, lengths, strict=True)]
