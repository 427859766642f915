"""Join neighbouring all-reduces of small operands, so that they share messages.

`jax.tree.map(lambda g: psum(g, "x"), gradients)` makes one call for each leaf. XLA joins
neighbouring built-in all-reduces, but not the messages of a schedule.

So a small all-reduce by ringcoll is first lowered to a placeholder. When the whole program has
been lowered, placeholders of one kind become one, if there is no other work between them and none
needs the result of another. Light operations between them that need a result are moved behind them.
Then every placeholder is lowered again, as one collective of all its operands.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import source_info_util
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from ringcoll.runtime import lowering

#: Operands of up to this many bytes share a message: up to this size, rounds take longer than the
#: two copies that joining needs. Measured on CPU.
JOIN_UP_TO = 1 << 18

Lower = Callable[..., Sequence[Any]]

_PLACEHOLDER, _NUMBERS = "ringcoll_joining", "ringcoll.numbers"

#: Operations that may take long, or must not be moved; nothing is joined across them.
_WORK = lowering.COLLECTIVES | {
    f"stablehlo.{name}"
    for name in (
        "case",
        "cholesky",
        "convolution",
        "custom_call",
        "dot_general",
        "fft",
        "if",
        "optimization_barrier",
        "rng",
        "rng_bit_generator",
        "sort",
        "triangular_solve",
        "while",
    )
}


def is_small(x: Any) -> bool:
    """Whether an array, or an array of this type, may share messages.

    It must be small, hold plain numbers, and not be sharded over any other axis.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or not isinstance(x.size, int):
        return False
    mesh = jax.sharding.get_abstract_mesh()
    alone = set(mesh.axis_names) == set(mesh.manual_axes)
    return alone and x.size * x.dtype.itemsize <= JOIN_UP_TO


class _Environment(NamedTuple):
    """What JAX knows at the place where a collective is lowered, besides the lowering context."""

    mesh: AbstractMesh
    is_checked: bool


class _Waiting(NamedTuple):
    """A collective that waits to be lowered."""

    environment: _Environment
    collective: Hashable
    lower: Lower
    context: mlir.LoweringRuleContext
    kind: Hashable  # collectives are joined only if these are equal


def lower_later(
    context: mlir.LoweringRuleContext,
    collective: Hashable,
    lower: Lower,
    operands: Sequence[ir.Value],
) -> Sequence[ir.Value]:
    """The results of a collective that is lowered later, when the program is complete.

    Args:
        context: the context of its lowering, for one platform.
        collective: the collective; collectives that may be joined are equal.
        lower: `(context, *operands, collective=...)` lowers it for operands of one dtype.
        operands: its operands in the lowering; they are small.
    """
    program = lowering.then(context.module_context.module, lowering.FIRST, _JoinedProgram)
    mesh = jax.sharding.get_abstract_mesh()
    mesh = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))
    x: Any = context.avals_in[0]
    # If types are checked, the operands of an all-reduce vary over its axes.
    environment = _Environment(mesh, bool(x.mat.varying))
    kind = environment, collective, x.dtype, x.mat
    program.waiting.append(_Waiting(environment, collective, lower, context, kind))
    return _placeholder([len(program.waiting) - 1], operands).results


def _placeholder(numbers: Sequence[int], operands: Sequence[ir.Value]) -> ir.Operation:
    types = [x.type for x in operands]
    op = stablehlo.CustomCallOp(types, operands, _PLACEHOLDER).operation
    op.attributes[_NUMBERS] = ir.DenseI64ArrayAttr.get(numbers)
    return op


def _numbers(op: ir.Operation) -> list[int]:
    """The numbers of the collectives that a placeholder replaces; an empty list for other ops."""
    return list(ir.DenseI64ArrayAttr(op.attributes[_NUMBERS])) if _NUMBERS in op.attributes else []


@dataclass
class _JoinedProgram:
    """The collectives that wait in a program, by number."""

    waiting: list[_Waiting] = field(default_factory=list)

    def __call__(self, module: ir.Module) -> None:
        """Join placeholders, and then lower those that remain."""
        if len(self.waiting) > 1:
            self._join(module.operation)
        where: dict[_Environment, list[ir.Operation]] = defaultdict(list)

        def find(op: ir.Operation) -> ir.WalkResult:
            if numbers := _numbers(op):
                where[self.waiting[numbers[0]].environment].append(op)
            return ir.WalkResult.ADVANCE

        module.operation.walk(find)
        for environment, placeholders in where.items():
            # With the public API of JAX, the axes are known only inside a `shard_map`.
            lower = partial(self._lower, placeholders)
            mapped = jax.shard_map(
                lower, in_specs=P(), out_specs=P(), check_vma=environment.is_checked
            )
            with jax.sharding.use_abstract_mesh(environment.mesh):
                jax.eval_shape(mapped, 0)

    def _join(self, op: ir.Operation) -> None:
        """Join the placeholders inside an operation that have no work between them."""
        for region in op.regions:
            for block in region.blocks:
                stretch: list[ir.Operation] = []
                for inner in [each.operation for each in block.operations]:
                    if _numbers(inner) or not _is_work(inner):
                        stretch.append(inner)
                        continue
                    self._join_stretch(stretch)
                    self._join(inner)
                    stretch = []
                self._join_stretch(stretch)

    def _join_stretch(self, stretch: list[ir.Operation]) -> None:
        """Join the placeholders among consecutive operations."""
        i = 0
        while i < len(stretch):
            after = self._join_first(stretch[i:]) if _numbers(stretch[i]) else None
            if after:
                stretch[i:] = after  # `after` may begin with another placeholder
            else:
                i += 1

    def _join_first(self, stretch: list[ir.Operation]) -> list[ir.Operation] | None:
        """Join the first operation, a placeholder, with others; the new operations, or None."""
        first, *others = stretch
        kind = self.waiting[_numbers(first)[0]].kind
        members, needing = [first], set(first.results)
        moves = set[ir.Operation]()
        for op in others:
            if not needing.isdisjoint(lowering.operands(op)):
                moves.add(op)
            elif (numbers := _numbers(op)) and self.waiting[numbers[0]].kind == kind:
                members.append(op)
            else:
                continue
            needing.update(op.results)
        if len(members) == 1:
            return None
        last = stretch.index(members[-1])
        behind = [op for op in stretch[:last] if op in moves]
        gone = moves.union(members)
        ahead = [op for op in stretch[:last] if op not in gone]
        joined = _as_one(members)
        for op in reversed(behind):
            op.move_after(joined)
        return [*ahead, joined, *behind, *stretch[last + 1 :]]

    def _lower(self, placeholders: list[ir.Operation], x: Array) -> Array:
        """Lower the placeholders, in a `shard_map` of x; return x unchanged."""
        for op in placeholders:
            first, *_ = members = [self.waiting[number] for number in _numbers(op)]
            contexts = [each.context for each in members]
            context = first.context.replace(
                avals_in=[aval for each in contexts for aval in each.avals_in],
                avals_out=[aval for each in contexts for aval in each.avals_out],
            )
            where = source_info_util.user_context(  # profiles show the line of the first call
                context.traceback, name_stack=source_info_util.new_name_stack()
            )
            with where, ir.InsertionPoint(op), op.location:
                results = first.lower(context, *op.operands, collective=first.collective)
            _replace([op], [y if isinstance(y, ir.Value) else y[0] for y in results])
        return x


def _as_one(placeholders: list[ir.Operation]) -> ir.Operation:
    """Replace several placeholders by one, at the place of the last."""
    with ir.InsertionPoint(placeholders[-1]), placeholders[-1].location:
        joined = _placeholder(
            [number for op in placeholders for number in _numbers(op)],
            [x for op in placeholders for x in op.operands],
        )
    _replace(placeholders, joined.results)
    return joined


def _replace(placeholders: Sequence[ir.Operation], results: Iterable[ir.Value]) -> None:
    old = [x for op in placeholders for x in op.results]
    for x, y in zip(old, results, strict=True):
        x.replace_all_uses_with(y)
    for op in placeholders:
        op.erase()


def _is_work(op: ir.Operation) -> bool:
    return op.name in _WORK or not op.name.startswith(("stablehlo.", "chlo."))
