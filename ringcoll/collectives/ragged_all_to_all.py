"""Ragged all-to-all: the exchange of slices of different sizes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.interpreters import ad
from jax.typing import ArrayLike

from ringcoll.choose.plan import Plan
from ringcoll.choose.table import Algorithm
from ringcoll.collectives import rows
from ringcoll.collectives.all_to_all import AllToAll
from ringcoll.collectives.axes import AxisName, Groups, as_tuples, axes_of, check_ranks, rank_count
from ringcoll.collectives.by_schedule import ScheduledCollective, title
from ringcoll.collectives.front_door import check_by_lax, is_for_lax
from ringcoll.collectives.public import integer, public
from ringcoll.collectives.sums import WireLike, sums_of
from ringcoll.runtime.hop import Ranks, as_bits
from ringcoll.runtime.hosts import Where
from ringcoll.runtime.scopes import scope, send_through_hook
from ringcoll.runtime.slicing import LONG
from ringcoll.runtime.value_types import varying, with_common_axes, zeros
from ringcoll.schedules.registry import LAX

_INTEGERS = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


@dataclass(frozen=True, kw_only=True)
class RaggedAllToAll(ScheduledCollective, name="ragged_all_to_all"):
    """Slices of the first operand, written into the second. The other operands say which and where.

    Attributes:
        max_send: the most rows for one rank; None: the rows of operand or output, whichever are
            fewer.
        calls: the number of calls that a `vmap` has joined, with their rows end to end.
        adds: whether it is a transpose. Then it adds the rows that arrive to those of `output`, and
            output_offsets say where this rank adds them.
    """

    collective = "ragged_all_to_all"
    max_send: int | None = None
    calls: int = 1
    adds: bool = False

    def by_lax(self, x: Array, *others: Array) -> Array:
        output, starts, counts, targets, arrivals = others
        if self.adds:
            exchange = partial(lax.all_to_all, split_axis=0, concat_axis=0, tiled=True)
            targets = exchange(targets, self.axes, axis_index_groups=self.groups)
        ranks = {"axis_name": self.axes, "axis_index_groups": self.groups}
        return lax.ragged_all_to_all(x, output, starts, counts, targets, arrivals, **ranks)

    def lower(self, where: Where, *xs: Array, plan: Plan | None = None) -> list[Array]:
        operand, output, *integers = xs
        if 0 in operand.shape or 0 in output.shape:
            return [output]
        n = Ranks.over(self.axes, self.groups).size
        fewest = min(len(operand), len(output))
        most = len(integers[0]) // (n * self.calls) * fewest  # every slice may have all rows
        bound = fewest if self.max_send is None else min(self.max_send, most)
        sent = jax.ShapeDtypeStruct((n * bound, *operand.shape[1:]), operand.dtype)
        by = replace(self, algorithm=(plan or self.plan([sent], where)).algorithm)
        # TPUs refuse groups of one rank. The built-in cannot send encoded rows that share scales.
        has_built_in = where.platform != "cpu" and n > 1 and not self.sums.wire
        with scope(title(self.collective, by.algorithm, self.collective)):
            if by.algorithm == LAX and has_built_in:
                return send_through_hook(
                    lambda xs: [by.by_lax(*xs)], list(xs), self.axes, self.groups
                )
            if max(n * bound, len(operand), len(output)) >= LONG:
                raise ValueError(
                    f"ringcoll.ragged_all_to_all: {len(operand)} rows to {len(output)}, in {n} "
                    f"blocks of {bound}: an int32 cannot count them; pass a smaller max_send, or "
                    "fewer, longer rows"
                )
            at, sends, to, gets = (x.astype(jnp.int32) for x in integers)
            if bound < most:
                at, to = self.checked([at, to], sends.reshape(n, -1), bound, where)
            if not self.adds:
                (to,) = self.exchange().lower(where, to)
            at, sends, to, gets = (x.reshape(n, -1) for x in (at, sends, to, gets))
            algorithm = "auto" if by.algorithm == LAX else by.algorithm
            exchange = partial(replace(self.exchange(algorithm), sums=self.sums).lower, where)
            if self.sums.wire:
                (blocks,) = exchange(rows.blank(rows.take(operand, at, sends, bound), sends, bound))
                joined = rows.add if self.adds else rows.put
                return [joined(blocks, output, to, gets, bound)]
            if self.adds:
                (blocks,) = exchange(rows.take(operand, at, sends, bound))
                return [rows.add(blocks, output, to, gets, bound)]
            (narrow, back), (buffer, _) = as_bits(operand), as_bits(output)
            (blocks,) = exchange(rows.take(narrow, at, sends, bound))
            return [back(rows.put(blocks, buffer, to, gets, bound))]

    def checked(
        self, offsets: Sequence[Array], sends: Array, bound: int, where: Where
    ) -> Sequence[Array]:
        """The offsets, if no rank has more rows for another rank than fit into a block.

        Otherwise all ranks of the mesh raise an exception, also those of other groups and along
        other axes: a rank that did not would wait for the others in its next collective. Only CPUs
        check this, because a callback is slow elsewhere. JAX has callbacks only if every axis of
        the mesh is manual.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if where.platform != "cpu" or set(mesh.axis_names) != set(mesh.manual_axes):
            return offsets
        most = jnp.max(jnp.sum(sends, 1, dtype=jnp.int32))
        axes = mesh.axis_names or self.axes
        most = lax.pmax(varying(most, axes), axes)
        refuse = partial(_refuse_more, bound)
        zero = jax.pure_callback(refuse, jax.ShapeDtypeStruct((), jnp.int32), most)
        # The offsets need the result even if they are constants; compilers drop unused callbacks.
        return [x + zero for x in offsets]

    def exchange(self, algorithm: Algorithm = "auto") -> AllToAll:
        """The exchange of arrays with equal parts for every rank, such as offsets."""
        return AllToAll(axes=self.axes, groups=self.groups, dims=(0, 0), algorithm=algorithm)

    def types(self, *avals: Any) -> tuple[list[Any], set[Any]]:
        program = jax.make_jaxpr(self.by_lax)(*avals)
        return [*program.out_avals], set(program.effects)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        (y,), moving = self(*primals), tangents[:2]
        if all(type(t) is ad.Zero for t in moving):
            return [y], [ad.Zero(jax.typeof(y).to_tangent_aval())]
        as_arrays = [zeros(_type_of(t)) if type(t) is ad.Zero else t for t in moving]
        return [y], self(*as_arrays, *primals[2:])

    def pulled_back(self, cts: Sequence[Any], *xs: Any) -> list[Any]:
        (ct,), (operand, output, at, sends, to, gets) = cts, xs
        if type(ct) is ad.Zero:
            return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in xs]
        if not self.adds:
            (to,) = self.exchange()(to)
        of_operand = of_output = None
        if ad.is_undefined_primal(operand):
            back = replace(self, adds=True)
            zero = zeros(_type_of(operand))
            (of_operand,) = back(ct, zero, to, gets, at, sends)
        if ad.is_undefined_primal(output):
            written = rows.within(to, gets, len(ct)).any(0)
            of_output = ct if self.adds else rows.select(written, jnp.zeros_like(ct), ct)
        return [of_operand, of_output, None, None, None, None]

    def batch(
        self, axis: Any, xs: Sequence[Array], dims: Sequence[int | None]
    ) -> tuple[list[Array], Sequence[int | None]]:
        """The rows of all calls end to end, and their slices for each rank side by side."""
        if axis.name in self.axes:
            raise NotImplementedError(
                f"{self.primitive.name} over the vmapped axis {axis.name!r}, as in lax; "
                "use a mesh axis"
            )
        size = axis.size

        def batched(x: Array, dim: int | None, to: int) -> Array:
            return jnp.moveaxis(x, dim, to) if dim is not None else jnp.stack([x] * size, to)

        operand, output = (batched(x, dim, 0) for x, dim in zip(xs[:2], dims[:2], strict=True))
        integers = [
            batched(x.astype(jnp.int32), dim, 1) for x, dim in zip(xs[2:], dims[2:], strict=True)
        ]
        at, sends, to, gets = integers  # [slices, size]
        calls = jnp.arange(size, dtype=jnp.int32)[None]
        at, to = at + calls * operand.shape[1], to + calls * output.shape[1]
        most = None if self.max_send is None else size * self.max_send
        merged = replace(self, max_send=most, calls=size * self.calls)
        whole = (operand, output, at, sends, to, gets)
        flat = [lax.collapse(x, 0, 2) for x in whole]  # a row may have no elements
        (y,) = merged(*flat)
        return [y.reshape(output.shape)], [0]


def _type_of(absent: Any) -> jax.core.ShapedArray:
    """The type of a zero tangent, or of an operand that is not known."""
    return absent.aval


@public()
def ragged_all_to_all(
    operand: ArrayLike,
    output: ArrayLike,
    input_offsets: ArrayLike,
    send_sizes: ArrayLike,
    output_offsets: ArrayLike,
    recv_sizes: ArrayLike,
    *,
    axis_name: AxisName,
    axis_index_groups: Groups = None,
    algorithm: Algorithm = "auto",
    max_send: int | None = None,
    wire: WireLike | None = None,
) -> Array:
    """Slices of `operand` travel to all ranks, which write them into `output`.

    `operand: [a, s], output: [b, s] -> [b, s]`. The other four are arrays of `[k n]` integers: k
    slices for each rank, in the order of the ranks. Slice i is the `send_sizes[i]` rows of
    `operand` from `input_offsets[i]` on. Its receiver writes it from row `output_offsets[i]` on.
    `recv_sizes` are the sizes of the slices that arrive. The other rows of `output` are kept.

    This runs on every platform; lax's does not run on CPU. On TPU and GPU, "lax" is lax's own
    collective, and so is "auto", unless your table says otherwise. Any other algorithm is one of
    `all_to_all`, and sends a block of `max_send` rows to every rank.

    `max_send` is the most rows that a rank sends to one rank; by default, the rows of `operand` or
    of `output`, whichever are fewer. If the slices of a rank for one rank have more rows together,
    all ranks raise an exception on CPU. Elsewhere the rows that do not fit arrive as NaN, or as the
    largest or smallest integer. lax's own collective needs no `max_send`. As in lax, a single slice
    must fit into `operand` and `output`; no platform checks that.

    Steps and bytes: as an `all_to_all` of blocks of `max_send` rows, and one of the offsets.

    With a `wire` the blocks are encoded once, by the rank that has them; the offsets are not. It
    always sends blocks, even if lax has a built-in.

    Gradient: the rows travel back. If slices of `operand` overlap, their gradients are added;
    lax's own gradient keeps only one of them. The gradient of `output` is zero in rows that were
    written.

    Raises:
        ValueError: offsets or sizes are not four arrays of k n integers, k at least 1; operand and
            output differ in their dimensions after the first; groups differ in size; or `max_send`
            is less than 1.
        TypeError: operand and output differ in dtype.
        NotImplementedError: the axis is that of a `vmap`.

    n, `algorithm` and what all of them raise: see `ringcoll.lax`.

    >>> def send(x):  # rank r sends its row to rank r + 1, and nothing to the others
    ...     r = jax.lax.axis_index("x")
    ...     to_next = (jnp.arange(4) == (r + 1) % 4).astype(int)
    ...     from_last = (jnp.arange(4) == (r - 1) % 4).astype(int)
    ...     zeros = jnp.zeros(4, int)
    ...     out = -jnp.ones(2, int)
    ...     return ringcoll.ragged_all_to_all(
    ...         x, out, zeros, to_next, zeros, from_last, axis_name="x", algorithm="pairwise"
    ...     )
    >>> print(ranks(send)(jnp.array([3, 1, 4, 1])))
    [ 1 -1  3 -1  1 -1  4 -1]
    """
    xs: Any = operand, output, input_offsets, send_sizes, output_offsets, recv_sizes
    axes, groups = axes_of(axis_name), as_tuples(axis_index_groups)
    of: Any = {"algorithm": algorithm, "sums": sums_of(wire=wire)}
    collective = RaggedAllToAll(axes=axes, groups=groups, **of)
    types = list(map(jax.typeof, xs))
    check_by_lax(axis_name, collective, *types)
    check_ranks(axes, groups)
    _check(*types, n=rank_count(axes) if groups is None else len(groups[0]))
    if max_send is not None:
        if (max_send := integer("max_send", max_send)) < 1:
            raise ValueError(f"max_send={max_send}; pass 1 or more")
        collective = replace(collective, max_send=max_send)
    if any(is_for_lax(collective, x) for x in xs):
        return collective.by_lax(*xs)
    collective = collective.resolved([operand], [False])
    return collective(*with_common_axes(list(map(jnp.asarray, xs)), axes))[0]


def _check(operand: Any, output: Any, *integers: Any, n: int) -> None:
    """Refuse types that lax accepts but with which the call could not be lowered."""
    if () in (operand.shape, output.shape) or operand.shape[1:] != output.shape[1:]:
        raise ValueError(
            f"operand and output are {operand.shape} and {output.shape}; let them differ only in "
            "their first dimension"
        )
    if operand.dtype != output.dtype:
        raise TypeError(f"operand is {operand.dtype} and output is {output.dtype}; cast one")
    sizes = [x.shape[0] for x in integers]
    if len(set(sizes)) > 1 or sizes[0] % n:
        lengths = ", ".join(f"{name}: {size}" for name, size in zip(_INTEGERS, sizes, strict=True))
        raise ValueError(
            f"the lengths of offsets and sizes are not one multiple of {n} ranks ({lengths}); pass "
            f"a multiple of {n} of each"
        )


def _refuse_more(bound: int, most: Array) -> np.ndarray:
    """The callback, which returns 0.

    It must not compute with JAX arrays: that may need the thread it runs on.
    """
    if int(most) > bound:
        raise ValueError(
            f"ringcoll.ragged_all_to_all: send_sizes: a rank has {int(most)} rows for another, and "
            f"a block has {bound}; pass max_send={int(most)}, or more"
        )
    return np.zeros((), np.int32)
