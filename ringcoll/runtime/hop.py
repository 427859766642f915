"""Messages between ranks: who takes part, who is where, and one hop.

Every message of a schedule is a `Ppermute`, and only `Ranks.hops` sends it.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringcoll.runtime import built_in
from ringcoll.runtime.hosts import Where
from ringcoll.runtime.primitive import Collective
from ringcoll.runtime.progress import marked, scope
from ringcoll.runtime.wire import Wire, decode, encode
from ringcoll.schedules.schedule import Round

Pairs = tuple[tuple[int, int], ...]


def as_bits(
    x: Array, floats: tuple[int, ...] | None = (8, 16), *, is_placed: bool = False
) -> tuple[Array, Callable[[Array], Array]]:
    """x as unsigned integers of its own width if it is a narrow float, and the way back.

    XLA:CPU (and no other) promotes narrow floats in collectives, even where nothing is
    computed: bf16 travels as f32, float8 as f16, twice the bytes and two conversions.
    Integers of the same width travel as they are, and a bitcast costs nothing there.

    Args:
        x: anything but a complex array.
        floats: the widths of floats that are made bits; None makes bits of every dtype.
        is_placed: whether the bits are put into a buffer. A barrier keeps the last placement from
            being fused with the bitcast back, and so copied.
    """
    dtype = x.dtype
    is_float = jnp.issubdtype(dtype, jnp.floating)
    if floats is not None and not (is_float and jnp.finfo(dtype).bits in floats):
        return x, lambda y: y
    if dtype == jnp.bool_:
        return x.astype(jnp.uint8), lambda y: y.astype(jnp.bool_)
    bits = jnp.dtype(f"uint{jax.dtypes.itemsize_bits(dtype)}")
    whole = lax.optimization_barrier if is_placed else lambda y: y
    return lax.bitcast_convert_type(x, bits), lambda y: lax.bitcast_convert_type(whole(y), dtype)


def multiply_add(index: Array, factor: int, addend: int = 0) -> Array:
    """index * factor + addend, in the index's dtype, without operations that change nothing."""
    if factor != 1:
        index = lax.mul(index, np.int32(factor))
    return lax.add(index, np.int32(addend)) if addend else index


def moved_as_bits(collective: Collective, x: Array) -> Array:
    """The result of jax.lax for a collective that only moves data; x travels as bits."""
    bits, back = as_bits(x)
    return back(collective.by_lax(bits))


def in_mesh_order(axes: Sequence[Hashable], pairs: Pairs) -> tuple[tuple[Hashable, ...], Pairs]:
    """Several axes and the ranks over them, renumbered in the order of the mesh.

    `ppermute` over a tuple of axes counts in mesh order whatever order it is given
    (JAX 0.10: silently; 0.12: raises), so it is given that order.
    """
    mesh = jax.sharding.get_abstract_mesh().axis_names
    order = [*mesh, *(a for a in axes if a not in mesh)]  # the axis of a vmap is not of the mesh
    ordered = tuple(sorted(axes, key=order.index))
    sizes = {a: lax.axis_size(a) for a in axes}

    def renumber(rank: int) -> int:
        digits = {}
        for a in reversed(axes):
            rank, digits[a] = divmod(rank, sizes[a])
        for a in ordered:
            rank = rank * sizes[a] + digits[a]
        return rank

    return ordered, tuple((renumber(s), renumber(d)) for s, d in pairs)


@dataclass(frozen=True, kw_only=True)
class Ppermute(Collective, name="ppermute"):
    """Rank s of each pair (s, d) sends its operand to rank d; the others get zeros."""

    pairs: Pairs
    is_hop: bool = True  # of a round, which is named and marked by `Ranks.hops`

    def by_lax(self, x: Array) -> Array:
        if len(self.axes) == 1:
            return built_in.ppermute(x, self.axes[0], self.pairs)
        axes, pairs = in_mesh_order(self.axes, self.pairs)
        return built_in.ppermute(x, axes, pairs)

    def by_hand(self, where: Where, *xs: Array) -> list[Array]:
        send = partial(moved_as_bits, self) if where.platform == "cpu" else self.by_lax
        if self.is_hop:
            return [send(x) for x in xs]
        with scope("ringcoll.ppermute"):
            return [marked(send, x, self.axes, to=self.pairs) for x in xs]

    def transpose(self, cts: Sequence[Array]) -> list[Array]:
        return replace(self, pairs=tuple((d, s) for s, d in self.pairs))(*cts)

    def under_vmap(self, x, dim, axis):  # without lax, whose rule wants every rank to send
        if len(self.axes) > 1:
            raise NotImplementedError(
                f"ppermute over {self.axes}: {axis.name!r} is the axis of a vmap; "
                "permute one axis at a time"
            )
        source = {d: s for s, d in self.pairs}
        sources = jnp.asarray([source.get(rank, axis.size) for rank in range(axis.size)])
        return jnp.take(x, sources, dim, mode="fill", fill_value=0), dim


@dataclass(frozen=True)
class Ranks:
    """The ranks a schedule runs on, numbered as the schedule numbers them.

    They are the ranks over `axes` (of `sizes`, row-major in the order given) or, with
    `groups`, the members of each group by their place in it. `shape` are the sizes of the
    schedule's axes, major first; the number of a rank is cut into these digits. A schedule of only
    some of the digits, such as a stage of recursive doubling, runs for each value of the others;
    the digits after its own make `inner` numbers.
    """

    axes: tuple[Hashable, ...]
    sizes: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...] | None
    shape: tuple[int, ...]
    inner: int = 1

    @staticmethod
    def over(
        axes: Sequence[Hashable],
        groups: tuple[tuple[int, ...], ...] | None,
        *,
        all_axes: bool = False,
    ) -> "Ranks":
        """The ranks over `axes` (less those of size 1, unless all), or in groups."""
        sizes = {a: lax.axis_size(a) for a in axes if all_axes or lax.axis_size(a) > 1}
        shape = (len(groups[0]),) if groups else tuple(sizes.values()) or (1,)
        return Ranks(tuple(sizes), tuple(sizes.values()), groups, shape)

    @property
    def size(self) -> int:
        """The number of ranks of a schedule on these."""
        return prod(self.shape)

    def number(self) -> Array:
        """This rank's number among all."""
        if not self.axes:
            return jnp.int32(0)
        index = lax.axis_index(self.axes if len(self.axes) > 1 else self.axes[0])
        if self.groups is None:
            return index
        place = {rank: i for group in self.groups for i, rank in enumerate(group)}
        return jnp.asarray([place[rank] for rank in range(len(place))], jnp.int32)[index]

    def origin(
        self, offset: int, axis: int = 0, further: Array | None = None, *, ahead: bool = False
    ) -> Array:
        """The number, within the shape, of this rank - offset - further (along axis).

        `ahead` gives that of this rank + offset + further.
        """
        # Python's // and % become many operations of XLA. Numbers that are not negative need only
        # one, and some digits need none. Every shard has an index, so this is half of a program.
        number, moved, sign = self.number(), [], 1 if ahead else -1
        all_ranks = len(self.groups[0]) if self.groups else prod(self.sizes)
        for i, n in enumerate(self.shape):
            n32 = np.int32(n)  # by name: a Python int is an int64 where jax_enable_x64 is on
            stride = prod(self.shape[i + 1 :])
            inner = stride * self.inner
            digit = number if inner == 1 else lax.div(number, np.int32(inner))
            if inner * n < all_ranks:  # else there is no greater digit to take away
                digit = lax.rem(digit, n32)
            by: Array | np.int32 = np.int32(sign * (offset // stride) % n)
            if i == axis and further is not None:
                by += sign * further % n
            if isinstance(by, Array) or by:
                digit = lax.rem(lax.add(digit, by), n32)
            moved.append(multiply_add(digit, stride))
        return functools.reduce(lax.add, moved)

    def hops(
        self,
        name: str,
        moves: Round,
        messages: Sequence[Array],
        *,
        back: bool = False,
        wire: Wire | None = None,
    ) -> list[Array]:
        """The messages that arrive in a round, run forward or backward; profiles show `name`.

        With a wire they are encoded, and decoded when they arrive, to float32 at least.
        """
        shifts = [(move.axis, -move.shift if back else move.shift) for move in moves]

        def send(messages: list[Array]) -> list[Array]:
            routes = [route(self, *shift) for shift in shifts]
            return [
                Ppermute(axes=axes, pairs=pairs)(x)[0]
                for (axes, pairs), x in zip(routes, messages, strict=True)
            ]

        with scope(name):
            sent = [encode(wire, x) for x in messages] if wire else list(messages)
            if wire and len(sent) > 1:
                # Or a compiler runs a lane, with its coding, to its end before it begins the next.
                sent = lax.optimization_barrier(sent)
            came = marked(send, sent, self.axes, self.groups, to=shifts)
            if wire is None:
                return came
            wide = [jnp.promote_types(x.dtype, jnp.float32) for x in messages]
            pairs = zip(came, messages, wide, strict=True)
            return [decode(wire, y, x.shape, dtype) for y, x, dtype in pairs]


@functools.lru_cache(maxsize=1024)
def route(ranks: Ranks, axis: int, shift: int) -> tuple[tuple[Hashable, ...], Pairs]:
    """Over which axes, and between which ranks on them, a message moves by `shift`.

    The shift is along an axis of the schedule.
    """
    stride, n = prod(ranks.shape[axis + 1 :]) * ranks.inner, ranks.shape[axis]

    def pairs(size: int, stride: int) -> Pairs:
        ahead = ((r // stride % n + shift) % n - r // stride % n for r in range(size))
        return tuple((r, r + a * stride) for r, a in enumerate(ahead))

    if ranks.groups:
        place = pairs(len(ranks.groups[0]), stride)
        within = tuple((group[s], group[d]) for group in ranks.groups for s, d in place)
        return ranks.axes, within
    # One mesh axis holds the digit, if any does: then there is no order of axes to mind.
    for i, name in enumerate(ranks.axes):
        inner = prod(ranks.sizes[i + 1 :])
        if stride % inner == 0 and inner * ranks.sizes[i] % (stride * n) == 0:
            return (name,), pairs(ranks.sizes[i], stride // inner)
    return ranks.axes, pairs(prod(ranks.sizes), stride)
