"""What the jaxpr of a caller's function tells: the work of its products, and what it reads."""

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod
from typing import Any

from jax.extend.core import Literal, jaxprs_in_params

from ringcoll.costs.under_work import Work, nbytes


class _Kind(IntEnum):
    """What a value depends on; an operation has the largest kind of its operands."""

    FIXED = 0  # the same for every shard, so every piece of work reads it again
    SLICED = 1  # a slice of what is fixed, cut for the shard
    MOVING = 2  # the shard itself


@dataclass
class _Counted:
    """The work on one shard, while it is counted; `is_known` is False if a part cannot be."""

    sums: Container[tuple[int, ...]]
    flops: int = 0
    moved: Counter[str] = field(default_factory=Counter)  # bytes, by the names of `Work`
    is_known: bool = True
    kinds: dict[Any, _Kind] = field(default_factory=dict)

    def kind(self, value: Any) -> _Kind:
        is_literal = isinstance(value, Literal)
        return _Kind.FIXED if is_literal else self.kinds.get(value, _Kind.FIXED)

    def walk(self, jaxpr: Any, kinds: Sequence[_Kind], times: int) -> None:
        """Count the products of a jaxpr whose operands have these kinds, and that runs so often."""
        self.kinds.update(zip(jaxpr.invars, kinds, strict=True))
        for eqn in jaxpr.eqns:
            kinds = [self.kind(value) for value in eqn.invars]
            kind = max(kinds, default=_Kind.FIXED)
            if eqn.primitive.name == "dot_general":
                self.add(eqn, kinds, times)
                kind = _Kind.MOVING
            elif eqn.primitive.name == "dynamic_slice":
                kind = max(kinds[0], _Kind.SLICED)
            for inner in jaxprs_in_params(eqn.params):
                inner = getattr(inner, "jaxpr", inner)
                if len(inner.invars) == len(eqn.invars) and eqn.primitive.name != "while":
                    self.walk(inner, kinds, times * eqn.params.get("length", 1))
                else:
                    self.is_known &= "dot_general" not in str(inner)
            self.kinds.update(dict.fromkeys(eqn.outvars, kind))

    def add(self, eqn: Any, kinds: Sequence[_Kind], times: int) -> None:
        """Add one product."""
        (result,) = (v.aval for v in eqn.outvars)
        (contracted, _), _ = eqn.params["dimension_numbers"]
        lengths = [eqn.invars[0].aval.shape[dim] for dim in contracted]
        self.flops += times * 2 * result.size * prod(lengths)
        names = {_Kind.FIXED: "reread", _Kind.SLICED: "slice_reads", _Kind.MOVING: "read_once"}
        for value, kind in zip(eqn.invars, kinds, strict=True):
            self.moved[names[kind]] += times * nbytes(value.aval)
        name = "accumulated" if result.shape in self.sums else "read_once"
        self.moved[name] += times * nbytes(result)


def work_of(
    jaxpr: Any, moving: int, ranks: int, sums: Container[tuple[int, ...]] = ()
) -> Work | None:
    """The work on the shards of all ranks; None if there is no product, or one in a branch.

    Args:
        jaxpr: the work on one shard.
        moving: how many of its last operands are the shard.
        ranks: the number of shards.
        sums: the shapes of what is carried from shard to shard. A product of such a shape is
            assumed to be added to it.
    """
    found = _Counted(sums)
    fixed = len(jaxpr.invars) - moving
    found.walk(jaxpr, [_Kind.FIXED] * fixed + [_Kind.MOVING] * moving, 1)
    if not (found.is_known and found.flops):
        return None
    moved = found.moved
    return Work(
        flops=ranks * found.flops,
        read_once=ranks * moved["read_once"],
        reread=moved["reread"],
        slice_reads=ranks * moved["slice_reads"],
        accumulated=moved["accumulated"],
    )


#: Operations that move their first operand.
MOVES = [
    *("broadcast_in_dim", "copy", "dynamic_slice", "gather", "name", "pcast", "pvary", "reshape"),
    *("reshard", "rev", "sharding_constraint", "slice", "squeeze", "stop_gradient", "transpose"),
]
