"""Joins neighbouring all-reduces of small operands, so that they share their messages.

`jax.tree.map(lambda g: psum(g, "x"), gradients)` is one call a leaf, as people write it. XLA joins
built-in all-reduces that stand beside each other, but not the messages of a schedule.

So a small all-reduce by ringcoll is first lowered to a placeholder. When the whole program has
been lowered, placeholders of one kind become one, if there is no other work between them and none
needs the result of another. Lighter operations between them that need a result move behind. Then
every placeholder is lowered for good, as one collective of all its operands.
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

#: Operands of up to this many bytes share a message: below it, the rounds cost more than
#: the two copies of joining. Measured on CPU by `python -m benchmarks join`.
JOIN_UP_TO = 1 << 18

Lower = Callable[..., Sequence[Any]]

_PLACEHOLDER, _NUMBERS = "ringcoll_joining", "ringcoll.numbers"

#: Operations that may take long, or are not to be moved; nothing is joined across them.
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
    """What JAX knows where a collective is lowered, besides the lowering context."""

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
    """The results of a collective that is lowered when the program is whole.

    Args:
        context: in which it is lowered, for one platform; its operands are small.
        collective: equal for those that may be joined.
        lower: `(context, *operands, collective=...)` lowers it, of operands of one dtype.
        operands: those of the lowering.
    """
    program = lowering.then(context.module_context.module, lowering.FIRST, _JoinedProgram)
    mesh = jax.sharding.get_abstract_mesh()
    mesh = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))
    x: Any = context.avals_in[0]
    # An all-reduce's operands vary over its axes wherever types are checked.
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
    """The numbers of the collectives that a placeholder stands for; none for another operation."""
    return list(ir.DenseI64ArrayAttr(op.attributes[_NUMBERS])) if _NUMBERS in op.attributes else []


@dataclass
class _JoinedProgram:
    """The collectives that wait in a program, by number."""

    waiting: list[_Waiting] = field(default_factory=list)

    def __call__(self, module: ir.Module) -> None:
        """Join placeholders, and lower the placeholders that are left."""
        if len(self.waiting) > 1:
            self._join(module.operation)
        where: dict[_Environment, list[ir.Operation]] = defaultdict(list)

        def find(op: ir.Operation) -> ir.WalkResult:
            if numbers := _numbers(op):
                where[self.waiting[numbers[0]].environment].append(op)
            return ir.WalkResult.ADVANCE

        module.operation.walk(find)
        for environment, placeholders in where.items():
            # Publicly, the axes are known only inside a `shard_map`.
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
        """Join the placeholders among operations that follow on each other."""
        i = 0
        while i < len(stretch):
            after = self._join_first(stretch[i:]) if _numbers(stretch[i]) else None
            if after:
                stretch[i:] = after  # which may begin with another placeholder
            else:
                i += 1

    def _join_first(self, stretch: list[ir.Operation]) -> list[ir.Operation] | None:
        """The operations after the first, a placeholder, was joined with others; None if none."""
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
        """Lower them for good, in a `shard_map` of x, which is returned as it is."""
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
    """One placeholder for several, in the place of the last."""
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
