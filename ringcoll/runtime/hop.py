"""Messages between ranks: the ranks that take part, their numbers, and one hop.

Every message of a schedule is a `Ppermute`, and only `Ranks.hops` sends it. (`ringcoll.ppermute`
is one outside of a schedule.)
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringcoll.runtime.hosts import Where
from ringcoll.runtime.primitive import Collective
from ringcoll.runtime.scopes import scope, send_through_hook
from ringcoll.runtime.wire import Wire, decode, encode
from ringcoll.schedules.schedule import Round

Pairs = tuple[tuple[int, int], ...]


def is_narrow(x: Array, widths: tuple[int, ...] = (8, 16)) -> bool:
    """Whether x has floats of these widths."""
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits in widths


def as_bits(
    x: Array, floats: tuple[int, ...] | None = (8, 16), *, is_placed: bool = False
) -> tuple[Array, Callable[[Array], Array]]:
    """x as unsigned integers of the same width if it is a narrow float, and a function back.

    XLA:CPU (but no other platform) promotes narrow floats in collectives, even if nothing is
    computed: bf16 travels as f32, float8 as f16: twice the bytes, and two conversions. Integers of
    the same width travel as they are, and a bitcast costs nothing there.

    Args:
        x: any array but a complex one.
        floats: the widths of floats that become integers; None: arrays of every dtype do.
        is_placed: whether the integers are put into a buffer. Then there is a barrier: otherwise
            the last placement is fused with the bitcast back, which copies it.
    """
    dtype = x.dtype
    if floats is not None and not is_narrow(x, floats):
        return x, lambda y: y
    if dtype == jnp.bool_:
        return x.astype(jnp.uint8), lambda y: y.astype(jnp.bool_)
    bits = jnp.dtype(f"uint{jax.dtypes.itemsize_bits(dtype)}")
    barrier = lax.optimization_barrier if is_placed else lambda y: y
    return lax.bitcast_convert_type(x, bits), lambda y: lax.bitcast_convert_type(barrier(y), dtype)


def multiply_add(index: Array, factor: int, addend: int = 0) -> Array:
    """index * factor + addend, in the dtype of index; factor 1 and addend 0 add no operation."""
    number = index.dtype.type
    if factor != 1:
        index = lax.mul(index, number(factor))
    return lax.add(index, number(addend)) if addend else index


def moved(collective: Collective, x: Array, platform: str) -> Array:
    """The result by jax.lax of a collective that only moves data; on CPU x travels as integers."""
    bits, back = as_bits(x) if platform == "cpu" else (x, lambda y: y)
    return back(collective.by_lax(bits))


def in_mesh_order(axes: Sequence[Hashable], pairs: Pairs) -> tuple[tuple[Hashable, ...], Pairs]:
    """Several axes in the order of the mesh, and the pairs of ranks renumbered for that order.

    `ppermute` over a tuple of axes counts ranks in the order of the mesh, even if the axes have
    a different order (JAX 0.10 does so silently; 0.12 raises an error). So it gets mesh order.
    """
    mesh = jax.sharding.get_abstract_mesh().axis_names
    order = [*mesh, *(a for a in axes if a not in mesh)]  # the axis of a vmap is not in the mesh
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
    is_hop: bool = True  # whether it is in a round, which `Ranks.hops` names and marks

    def by_lax(self, x: Array) -> Array:
        if len(self.axes) == 1:
            return lax.ppermute(x, self.axes[0], self.pairs)
        axes, pairs = in_mesh_order(self.axes, self.pairs)
        return lax.ppermute(x, axes, pairs)

    def lower(self, where: Where, *xs: Array) -> list[Array]:
        send = partial(moved, self, platform=where.platform)
        if self.is_hop:
            return [send(x) for x in xs]
        with scope("ringcoll.ppermute"):
            return [send_through_hook(send, x, self.axes, to=self.pairs) for x in xs]

    def transpose(self, cts: Sequence[Array]) -> list[Array]:
        return replace(self, pairs=tuple((d, s) for s, d in self.pairs))(*cts)

    def under_vmap(self, x, dim, axis):  # without lax: its rule requires that every rank sends
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
    `groups`, the members of each group by their place in it. `shape` has the sizes of the
    schedule's axes, major first; the number of a rank has one digit for each. A schedule may have
    only some of the digits, as a stage of recursive doubling does. Then it runs for each value of
    the other digits; `inner` is how many values the digits after its own have.

    With a `wire`, every hop encodes its messages, and decodes them to float32 or wider.
    """

    axes: tuple[Hashable, ...]
    sizes: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...] | None
    shape: tuple[int, ...]
    inner: int = 1
    wire: Wire | None = None

    @staticmethod
    def over(
        axes: Sequence[Hashable],
        groups: tuple[tuple[int, ...], ...] | None,
        *,
        all_axes: bool = False,
    ) -> "Ranks":
        """The ranks over `axes`, or in groups. Axes of size 1 are left out unless `all_axes`."""
        sizes = {a: lax.axis_size(a) for a in axes if all_axes or lax.axis_size(a) > 1}
        shape = (len(groups[0]),) if groups else tuple(sizes.values()) or (1,)
        return Ranks(tuple(sizes), tuple(sizes.values()), groups, shape)

    @property
    def size(self) -> int:
        """The number of ranks of the schedule."""
        return prod(self.shape)

    def number(self) -> Array:
        """This rank's number among all ranks."""
        if not self.axes:
            return jnp.int32(0)
        index = lax.axis_index(self.axes if len(self.axes) > 1 else self.axes[0])
        if self.groups is None:
            return index
        place = {rank: i for group in self.groups for i, rank in enumerate(group)}
        return jnp.asarray([place[rank] for rank in range(len(place))], jnp.int32)[index]

    def origin(
        self, offset: int, axis: int = 0, extra: Array | None = None, *, forward: bool = False
    ) -> Array:
        """The number, in the schedule, of this rank - offset, and - extra along `axis`.

        With `forward`, it is that of this rank + offset + extra.
        """
        # Python's // and % become many operations of XLA. With numbers that are not negative, one
        # operation is enough, and some digits need none. Every shard has such an index, so these
        # operations are half of a program.
        number, terms, sign = self.number(), [], 1 if forward else -1
        all_ranks = len(self.groups[0]) if self.groups else prod(self.sizes)
        for i, n in enumerate(self.shape):
            n32 = np.int32(n)  # with jax_enable_x64, a Python int would be an int64
            stride = prod(self.shape[i + 1 :])
            inner = stride * self.inner
            digit = number if inner == 1 else lax.div(number, np.int32(inner))
            if inner * n < all_ranks:  # otherwise there is no higher digit to remove
                digit = lax.rem(digit, n32)
            by: Array | np.int32 = np.int32(sign * (offset // stride) % n)
            if i == axis and extra is not None:
                by += sign * extra % n
            if isinstance(by, Array) or by:
                digit = lax.rem(lax.add(digit, by), n32)
            terms.append(multiply_add(digit, stride))
        return functools.reduce(lax.add, terms)

    def hops(self, name: str, moves: Round, messages: Sequence[Any]) -> list[Any]:
        """Send the messages of a round; return those that arrive.

        A message is an array or a pytree of arrays. Profiles show `name`.
        """
        wire, shifts = self.wire, [(move.axis, move.shift) for move in moves]

        def send(messages: list[Any]) -> list[Any]:
            received = []
            for message, shift in zip(messages, shifts, strict=True):
                axes, pairs = route(self, *shift)
                leaves, structure = jax.tree.flatten(message)
                arrived = Ppermute(axes=axes, pairs=pairs)(*leaves)
                received.append(jax.tree.unflatten(structure, arrived))
            return received

        with scope(name):
            sent = [encode(wire, x) for x in messages] if wire else list(messages)
            if wire and len(sent) > 1:
                # Without the barrier, a compiler runs one lane to its end before the next begins.
                sent = lax.optimization_barrier(sent)
            received = send_through_hook(send, sent, self.axes, self.groups, to=shifts)
            if wire is None:
                return received
            wide = [jnp.promote_types(x.dtype, jnp.float32) for x in messages]
            pairs = zip(received, messages, wide, strict=True)
            return [decode(wire, y, x.shape, dtype) for y, x, dtype in pairs]


@functools.lru_cache(maxsize=1024)
def route(ranks: Ranks, axis: int, shift: int) -> tuple[tuple[Hashable, ...], Pairs]:
    """The mesh axes, and the pairs of ranks on them, for a shift along an axis of the schedule."""
    stride, n = prod(ranks.shape[axis + 1 :]) * ranks.inner, ranks.shape[axis]

    def pairs(size: int, stride: int) -> Pairs:
        ahead = ((r // stride % n + shift) % n - r // stride % n for r in range(size))
        return tuple((r, r + a * stride) for r, a in enumerate(ahead))

    if ranks.groups:
        place = pairs(len(ranks.groups[0]), stride)
        within = tuple((group[s], group[d]) for group in ranks.groups for s, d in place)
        return ranks.axes, within
    # If one mesh axis has the whole digit, use only that axis: then their order does not matter.
    for i, name in enumerate(ranks.axes):
        inner = prod(ranks.sizes[i + 1 :])
        if stride % inner == 0 and inner * ranks.sizes[i] % (stride * n) == 0:
            return (name,), pairs(ranks.sizes[i], stride // inner)
    return ranks.axes, pairs(prod(ranks.sizes), stride)
