"""How a sum over ranks is added: a collective has one of these values, as its `sums`.

`Plain` adds as the schedule or `jax.lax` does, `ByTree` by a balanced tree, and `Coded` what codes
of one byte stand for. Each says what is done to an operand first, how two numbers are added, which
algorithms add so, and what it sends in place of the sums of `jax.lax`. A collective that only moves
data has them too, for its transpose, which adds.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ringcoll.choose.plan import Plan
from ringcoll.choose.table import Algorithm, Table
from ringcoll.collectives.axes import rank_count
from ringcoll.costs.wire import FLOATS, Wire
from ringcoll.runtime.hop import Ranks, as_bits
from ringcoll.runtime.run import UNROLL_UP_TO
from ringcoll.runtime.scopes import send_through_hook
from ringcoll.runtime.value_types import device_kind, sharded_dims
from ringcoll.runtime.wire import decode, encode
from ringcoll.schedules.registry import EXCHANGES, LAX
from ringcoll.schedules.tree import balanced_algorithms, is_balanced

#: A wire as a caller gives it: a `Wire`, or the dtype of its codes.
WireLike = str | Wire
Decode = Callable[[Array], Array]
#: From a collective of a table, its bytes and the name of their dtype to a plan.
Pick = Callable[[str, int, str], Plan]

_CONTRACTS = ("cpu", None)  # None: it may be compiled for a CPU


@dataclass(frozen=True)
class Tree:
    """Floats are added by one balanced binary tree: `psum(x, "x", order=Tree(8))`.

    The bits of a sum then do not depend on how many ranks share its leaves. The number of ranks is
    a power of two, and divides the number of leaves. The leaves of a rank are consecutive, and its
    operand is their sum, added by pairs. An algorithm that adds by a different tree is refused, and
    so is a `wire`.

    Attributes:
        leaves: the number of leaves, a power of two.

    Raises:
        ValueError: the number of leaves is not a power of two.

    >>> total = ranks(lambda x: ringcoll.psum(x, "x", order=ringcoll.Tree(8)), out_specs=P())
    >>> print(total(jnp.arange(4.0)))  # (0 + 1) + (2 + 3)
    [6.]
    """

    leaves: int = 8

    def __post_init__(self) -> None:
        try:
            count = operator.index(self.leaves)
        except TypeError:
            count = 0
        if count < 1 or count & (count - 1):
            raise ValueError(
                f"ringcoll.Tree: leaves={self.leaves!r} is not a power of two; pass one, such as 8"
            )


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Every addition is rounded to one dtype. The algorithm decides how many there are."""

    dtype: np.dtype | None = None  # of partial sums; None: that of the operand
    wire: Wire | None = field(default=None, init=False)  # what messages hold in place of floats
    #: Whether leaves may share messages.
    packs: ClassVar[bool] = True

    def check(self, collective: Any, leaves: Sequence[Any], only_lax: Sequence[bool]) -> None:
        """Refuse leaves of a collective, and ranks, that it cannot add."""
        if self.dtype is not None:
            wide_dtype(self.dtype, *map(jax.typeof, leaves))

    def prepare(self, x: Array, platform: str | None = None) -> Array:
        """The operand before anything else is computed from it, on a platform or on the mesh's."""
        return x

    def wide(self, dtype: Any) -> Any:
        """The dtype of partial sums. Integers keep theirs, because their sums are exact."""
        return (self.dtype if jnp.issubdtype(dtype, jnp.inexact) else None) or dtype

    def widen(self, x: Array) -> Array:
        """x in the dtype of partial sums."""
        return x.astype(self.wide(x.dtype))

    def widened(self, f: Callable[[Any], Any], x: Any) -> Any:
        """f(x), computed in the dtype of partial sums."""
        narrow = jax.typeof(x).dtype
        if (wide := self.wide(narrow)) == narrow:  # a cast would lose a weak type
            return f(x)
        return f(jnp.astype(x, wide)).astype(narrow)

    def add(self, received: Array, mine: Array) -> Array:
        """The sum of a partial result that arrived and a contribution, rounded once."""
        return lax.add(self.widen(received), self.widen(mine))

    def fold(self, combine: Callable[[Array, Array], Array], every: Sequence[Array]) -> Array:
        """All ranks' arrays, combined."""
        return functools.reduce(combine, every)

    def within(
        self, collective: Any, axis: Any, x: Array, dim: int | None, by_lax: Callable
    ) -> Array:
        """The sum along an axis of a vmap, at `dim` of x."""
        return self.widened(by_lax, x)


#: In the operand's own dtype.
PLAIN = Plain()


class Exchanged(Plain):
    """Sums that lax cannot add.

    By "lax", built-ins exchange contributions, and the owner of a sum adds them.
    """

    #: Whether each rank adds whole vectors that are small or cannot be cut.
    adds_whole: ClassVar[bool] = False

    def refusal(self, algorithm: Algorithm, collective: str, shape: tuple[int, ...]) -> str:
        """Why a collective does not add so by an algorithm; "" if it does."""
        return ""

    def plan(
        self, pick: Pick, collective: str, shape: tuple[int, ...], count: int, dtype: np.dtype
    ) -> Plan:
        """The plan for `count` elements; `pick` takes it from a table."""
        found = pick(collective, count * dtype.itemsize, dtype.name)
        if collective == "all_gather" or not self.refusal(found.algorithm, collective, shape):
            return found
        return Plan(LAX, why=f"{found.algorithm} does not add by the balanced tree")

    def gather(self, x: Array, dim: int, ranks: Ranks) -> Array:
        """All-gather along `dim`, by the built-in."""
        return gathered(x, dim, ranks)

    def exchange(self, x: Array, split: int, concat: int, ranks: Ranks) -> Array:
        """All-to-all, by the built-in."""
        raise NotImplementedError

    def reduce_scatter(self, x: Array, dim: int, ranks: Ranks) -> Array:
        """Reduce-scatter along `dim`: a built-in exchanges contributions, and their owner adds."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ByTree(Exchanged):
    """Sums by one balanced binary tree, with the same bits wherever its levels are computed."""

    order: Tree
    adds_whole = True

    def check(self, collective: Any, leaves: Sequence[Any], only_lax: Sequence[bool]) -> None:
        super().check(collective, leaves, only_lax)
        order, axes, groups = self.order, collective.axes, collective.groups
        if any(isinstance(axis, int) for axis in axes) or not axes:
            raise ValueError(f"order={order} over {axes}; name an axis of the mesh or of a vmap")
        if groups and len(set(map(len, groups))) > 1:
            raise ValueError(f"order={order} needs groups of one size; pass those, or leave it out")
        ranks = len(groups[0]) if groups else rank_count(tuple(axes))
        if order.leaves % ranks:
            raise ValueError(
                f"order={order}: {order.leaves} leaves are not divisible by {ranks} ranks; pass as "
                "many leaves as the most ranks that are to give the same bits"
            )

    def refusal(self, algorithm: Algorithm, collective: str, shape: tuple[int, ...]) -> str:
        # An all_gather adds only in its gradient, which is a psum_scatter.
        collective = "psum_scatter" if collective == "all_gather" else collective
        adds_by_any = isinstance(algorithm, Table) or algorithm in ("auto", LAX)
        if adds_by_any or is_balanced(collective, algorithm, shape):
            return ""
        choose_from = ", ".join(("auto", *balanced_algorithms(collective, shape), LAX))
        return (
            f"algorithm={algorithm!r} does not add by the balanced tree of order=Tree(...) on "
            f"{prod(shape)} ranks; choose from {choose_from}"
        )

    def prepare(self, x: Array, platform: str | None = None) -> Array:
        """x, rounded to its dtype before anything else is computed from it.

        XLA:CPU changes roundings in two ways. It rounds a * b + c only once if both operations are
        in one kernel. It leaves out the rounding of a narrow float that it widens again. Whether it
        does so depends on what else a rank computes. It does neither to this result.
        """
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        if x.dtype == jnp.bfloat16:  # round by an operation that no compiler leaves out
            return lax.reduce_precision(x.astype(jnp.float32), 8, 7).astype(x.dtype)
        if (platform or device_kind()) not in _CONTRACTS:
            return x
        # A selection between a product and an addition keeps LLVM from contracting them. A barrier
        # does so too, but not in jax 0.10. A minimum with infinity does not: LLVM removes it.
        return lax.select(jnp.isnan(x), jnp.full_like(x, jnp.nan), x)

    def add(self, received: Array, mine: Array) -> Array:
        a, b = self.widen(received), self.widen(mine)
        if a.dtype == jnp.bfloat16:
            wide = lax.add(a.astype(jnp.float32), b.astype(jnp.float32))
            return lax.reduce_precision(wide, 8, 7).astype(a.dtype)
        return lax.add(a, b)

    def fold(self, combine: Callable[[Array, Array], Array], every: Sequence[Array]) -> Array:
        """Neighbours first; the number of arrays is a power of two."""
        while len(every) > 1:
            every = [combine(a, b) for a, b in zip(every[::2], every[1::2], strict=True)]
        return every[0]

    def _total(self, x: Array, dim: int) -> Array:
        """The sum of the slices along a dimension; the result does not have the dimension."""
        wide = self.widen(x)
        slices = [lax.index_in_dim(wide, i, dim, keepdims=False) for i in range(x.shape[dim])]
        return self.fold(self.add, slices)

    def within(
        self, collective: Any, axis: Any, x: Array, dim: int | None, by_lax: Callable
    ) -> Array:
        if len(collective.axes) > 1:
            raise NotImplementedError(
                f"{collective.primitive.name} over {collective.axes} with order=Tree(...): "
                f"{axis.name!r} is the axis of a vmap, and the others are not; sum over them in "
                "separate calls"
            )
        if dim is None:
            return super().within(collective, axis, x, dim, by_lax)
        total = self._total(self.prepare(x), dim).astype(x.dtype)
        return collective.parts(total, axis.size)

    def reduce_scatter(self, x: Array, dim: int, ranks: Ranks) -> Array:
        bits, back = as_bits(x)
        blocks = back(_exchanged(bits, dim, ranks))
        shape = (*x.shape[:dim], ranks.size, x.shape[dim] // ranks.size, *x.shape[dim + 1 :])
        return self._total(blocks.reshape(shape), dim)


@dataclass(frozen=True, kw_only=True)
class Coded(Exchanged):
    """Messages hold codes. What they stand for is added in float32 or wider."""

    wire: Wire
    packs = False  # in one message, leaves would share scales

    def check(self, collective: Any, leaves: Sequence[Any], only_lax: Sequence[bool]) -> None:
        super().check(collective, leaves, only_lax)
        for leaf, is_only_lax in zip(leaves, only_lax, strict=True):
            aval = jax.typeof(leaf)
            if aval.dtype.name not in FLOATS:
                raise TypeError(
                    f"wire: an operand of {aval.dtype.name} is not encoded, only "
                    f"{', '.join(FLOATS)} are; leave wire out for it, or cast it"
                )
            if is_only_lax and isinstance(leaf, jax.core.Tracer):
                raise ValueError(
                    "wire: jax.lax alone can do this call, and it has no wire; leave wire out, or "
                    "see `ringcoll.lax` for the calls that are lax's"
                )
            if sharded_dims(aval) or not isinstance(aval.size, int):
                raise ValueError(
                    f"wire: an operand of type {aval} has dimensions that are sharded over an "
                    "explicit axis, or symbolic; leave wire out, or make the axis manual in "
                    "jax.shard_map"
                )

    def plan(
        self, pick: Pick, collective: str, shape: tuple[int, ...], count: int, dtype: np.dtype
    ) -> Plan:
        """An exchange of bytes: by the built-in, or by a schedule of one round.

        Both encode each contribution only once.
        """
        moves = collective in ("all_gather", *EXCHANGES)
        found = pick(collective if moves else "all_to_all", self.wire.nbytes(count), "uint8")
        return found if moves or found.algorithm == LAX else replace(found, algorithm="direct")

    def wide(self, dtype: Any) -> Any:
        return self.dtype or jnp.promote_types(dtype, jnp.float32)

    def gather(self, x: Array, dim: int, ranks: Ranks) -> Array:
        messages = gathered(encode(self.wire, x)[None], 0, ranks)
        return _joined(jax.vmap(lambda m: decode(self.wire, m, x.shape, x.dtype))(messages), dim)

    def exchange(self, x: Array, split: int, concat: int, ranks: Ranks) -> Array:
        arrived, decoded = self._arrived(x, split, ranks)
        return _joined(jax.vmap(decoded)(arrived), concat).astype(x.dtype)

    def reduce_scatter(self, x: Array, dim: int, ranks: Ranks) -> Array:
        arrived, decoded = self._arrived(x, dim, ranks)
        if ranks.size > UNROLL_UP_TO:
            return jnp.sum(self.widen(jax.vmap(decoded)(arrived)), 0)
        # With these additions, XLA:CPU decodes while it adds. A `sum` would read decoded values
        # from memory.
        return functools.reduce(lax.add, (self.widen(decoded(each)) for each in arrived))

    def _arrived(self, x: Array, split: int, ranks: Ranks) -> tuple[Array, Decode]:
        """The messages for this rank, `[n, bytes]`, and a function that decodes one.

        It decodes to float32 or wider.
        """
        blocks = jnp.split(x, ranks.size, split)
        if ranks.size > UNROLL_UP_TO:
            messages = jax.vmap(partial(encode, self.wire))(jnp.stack(blocks))
        else:  # TPUs would copy stacked blocks, and also their float32 values
            messages = jnp.stack([encode(self.wire, block) for block in blocks])
        wide = jnp.promote_types(x.dtype, jnp.float32)
        decoded = partial(decode, self.wire, shape=blocks[0].shape, dtype=wide)
        return _exchanged(messages, 0, ranks), decoded


def gathered(x: Array, dim: int, ranks: Ranks) -> Array:
    """The shards of all ranks, end to end along `dim`."""
    bits, back = as_bits(x)
    return back(_moved(partial(lax.all_gather, axis=dim), bits, ranks))


def _exchanged(x: Array, dim: int, ranks: Ranks) -> Array:
    """The blocks of all ranks for this one, end to end along `dim`."""
    return _moved(partial(lax.all_to_all, split_axis=dim, concat_axis=dim), x, ranks)


def _moved(built_in: Callable[..., Array], x: Array, ranks: Ranks) -> Array:
    send = partial(built_in, axis_name=ranks.axes, axis_index_groups=ranks.groups, tiled=True)
    return send_through_hook(send, x, ranks.axes, ranks.groups)


def _joined(blocks: Array, dim: int) -> Array:
    """Blocks `[n, *block]`, end to end along `dim`."""
    shape = list(blocks.shape[1:])
    shape[dim] *= len(blocks)
    return jnp.moveaxis(blocks, 0, dim).reshape(shape)


def sums_of(accumulate_dtype: Any = None, order: Any = None, wire: Any = None) -> Plain:
    """The sums of a call with these arguments."""
    dtype = None if accumulate_dtype is None else wide_dtype(accumulate_dtype)
    if wire is None and order is None:
        return Plain(dtype=dtype)
    if order is None:
        wire = Wire(wire) if isinstance(wire, str) else wire
        if not isinstance(wire, Wire):
            raise TypeError(f"wire={wire!r} is not a wire; pass 'int8', or a ringcoll.Wire")
        return Coded(dtype=dtype, wire=wire)
    if not isinstance(order, Tree):
        raise TypeError(f"order={order!r} is not an order; pass ringcoll.Tree(8), or leave it out")
    if wire is not None:
        raise ValueError(
            f"order={order} with a wire: its codes depend on ranks; leave order out, or the wire"
        )
    return ByTree(dtype=dtype, order=order)


def wide_dtype(accumulate_dtype: Any, *types: Any) -> np.dtype:
    """The dtype of partial sums.

    Refused if it cannot hold every value of these types.
    """
    try:
        wide = jnp.dtype(accumulate_dtype)
    except TypeError as error:
        raise TypeError(
            f"accumulate_dtype={accumulate_dtype!r} is not a dtype; pass one such as jnp.float32"
        ) from error
    for dtype in (t.dtype for t in types):
        if jnp.issubdtype(dtype, jnp.inexact) and not _holds(wide, dtype):
            raise ValueError(
                f"accumulate_dtype={wide.name} cannot hold every {dtype.name}; pass a dtype with "
                "as many digits and exponents"
            )
    return wide


def _holds(wide: Any, dtype: Any) -> bool:
    """Whether every value of `dtype`, floating or complex, is a value of `wide`."""
    if not jnp.issubdtype(wide, jnp.inexact):
        return False
    if jnp.issubdtype(wide, jnp.complexfloating) != jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    w, d = jnp.finfo(wide), jnp.finfo(dtype)
    return w.nmant >= d.nmant and w.maxexp >= d.maxexp and w.minexp <= d.minexp
