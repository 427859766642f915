"""Find collectives that a compiled program could do without: `waste`.

Three faults are found, each inside one computation of the text. What cannot be proved from the text
is not reported, so a program may have faults that are not found.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ringcoll.io.text import bytes_in_words, seconds_in_words, wrapped
from ringcoll.overlap.chips import Chip, Gpu
from ringcoll.overlap.hlo import Computation, Instruction, Module, as_hlo_error
from ringcoll.overlap.reading import Reading, read
from ringcoll.overlap.rows import NO_LINE
from ringcoll.overlap.transfers import groups, is_collective
from ringcoll.overlap.work import RENAMING

RankGroups = frozenset[frozenset[int]]
#: On which groups of ranks a value is the same; None: on all ranks.
Same = RankGroups | None
_UNKNOWN: Same = frozenset()
#: The computation around a fusion, and the names of its operands there; None outside of one.
Given = tuple[Computation, Sequence[str]] | None
#: Operations whose result has every element of their operand; the first keep order and dtype too.
_MOVING = ("bitcast", "copy", "copy-done", "copy-start", "reshape", "all-gather-done")
_RENAMING = (*_MOVING, *RENAMING)
_SLICES = ("slice", "dynamic-slice")
#: Operations whose results may differ between ranks, whatever their operands are.
_DIFFERING = (
    *("parameter", "partition-id", "replica-id", "rng", "rng-bit-generator", "infeed", "recv"),
    *("custom-call", "while", "conditional", "call", "async-start", "async-done"),
    "rng-get-and-update-state",
)


@dataclass(frozen=True, slots=True)
class Waste:
    """Communication that a program could do without.

    Attributes:
        what: "gathered twice", "summed again" or "a slice of a sum".
        at: the lines of source of the collectives.
        bytes: what a rank sends by the last of them, in the whole program.
        seconds: the model's time of that, as in `report`; 0 without a chip.
        cure: what to write.
    """

    what: str
    at: tuple[str, ...]
    bytes: float
    seconds: float
    cure: str

    def __str__(self) -> str:
        time = f", {seconds_in_words(self.seconds)}" if self.seconds else ""
        first = f"{self.what}: {' and '.join(self.at)}: {bytes_in_words(self.bytes)} a rank{time}"
        return "\n".join(wrapped([first, f"    {self.cure}"], then="    "))


def waste(
    compiled: object,
    *,
    allow_unread: str | Iterable[str] = (),
    mesh: object = None,
    chip: str | Chip | Gpu | None = None,
) -> tuple[Waste, ...]:
    """What a compiled program communicates without need, the most bytes first.

    Three faults are found:

    - an array is gathered twice, in one pass over the model (a gradient may gather again what it
      did not keep; that is no fault);
    - an array is summed over ranks that all have the same array already, because it was summed or
      gathered over them;
    - of a sum, only a slice is used, of at most one half.

    Args:
        compiled, mesh, chip: as for `report`. Without a chip there are no times. It may be what
            `lower(...)` returns, which is compiled first.
        allow_unread: as for `assert_overlapped`.

    Raises:
        AssertionError: something could not be read, and is not allowed.
        HloError, TypeError, ValueError: as `report`, but not for want of a chip.

    >>> @partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
    ... def twice(x):
    ...     return jax.lax.psum(2 * jax.lax.psum(x, "x"), "x")
    >>> [found.what for found in overlap.waste(jax.jit(twice).lower(jnp.ones(8)))]
    ['summed again']
    """
    return _found(read(compiled, mesh, chip, allow_unread))


@as_hlo_error()
def _found(reading: Reading) -> tuple[Waste, ...]:
    found: defaultdict[tuple, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for computation, (what, (finder, cure)) in product(
        reading.module.computations.values(), _FAULTS.items()
    ):
        for collectives in finder(reading.module, computation):
            *_, last = names = [instruction.name for instruction in collectives]
            lines = [reading.lines.of(name) for name in names]
            if last not in reading.timeline.transfers or lines[-1].operation == "reduce_scatter":
                continue  # it never runs, is a part of a fusion, or is a scatter already
            sent, count = reading.timeline.transfers[last][0], reading.timeline.sums[last].runs
            along = reading.program.axes_along(sent.members)
            axes = repr(along[0] if len(along) == 1 else along) if along else "the axis"
            at = tuple(dict.fromkeys(line.short or NO_LINE for line in lines))
            key = what, at, cure.format(axes=axes)
            found[key] += np.array([sent.bytes, sent.seconds]) * count
    wastes = [
        Waste(fault, places, float(size), float(time), advice)
        for (fault, places, advice), (size, time) in found.items()
        if size
    ]
    return tuple(sorted(wastes, key=lambda one: -one.bytes))


def _twice(module: Module, computation: Computation) -> Iterator[tuple[Instruction, ...]]:
    """Gathers of the same operand, with the first one."""
    first: dict[tuple, Instruction] = {}
    for instruction in computation.instructions:
        if instruction.opcode.removesuffix("-start") != "all-gather":
            continue
        if len(instruction.operands) == 1:
            source = _source(computation, instruction.operands[0])
            passes = _passes(module, computation, instruction)
            key = source, _groups(module, instruction), instruction.attribute("dimensions"), passes
            before = first.setdefault(key, instruction)
            if before is not instruction and len(passes) == 1:
                yield before, instruction


def _source(computation: Computation, name: str) -> str:
    """The value of which this one has all elements, in a different shape or memory."""
    made = computation.by_name[name]
    return _source(computation, made.operands[0]) if made.opcode in _MOVING else name


def _passes(
    module: Module, computation: Computation, value: Instruction
) -> frozenset[tuple[bool, bool]]:
    """In which passes a value is used: backward or not, and computed again there or not.

    Its own name does not say: the partitioner names a gather after what made its operand.
    """
    found = frozenset[tuple[bool, bool]]()
    for user in computation.users[value.name]:
        name, within = user.attribute("op_name"), frozenset[tuple[bool, bool]]()
        if user.opcode == "fusion":  # it may have work of both passes
            body = next(module.called(user))
            for number, operand in enumerate(user.operands):
                if operand == value.name:
                    within |= _passes(module, body, body.parameters[number])
        elif name and user.opcode not in _RENAMING:
            within = frozenset({("transpose(" in name, "rematted_computation" in name)})
        if not within and user.opcode in (*_RENAMING, "fusion"):
            within = _passes(module, computation, user)
        found |= within
    return found


def _groups(module: Module, instruction: Instruction) -> RankGroups:
    return frozenset(map(frozenset, groups(instruction, module.ranks)))


def _is_sum(module: Module, instruction: Instruction) -> bool:
    body = next(module.called(instruction), None)
    is_all_reduce = instruction.opcode.removesuffix("-start") == "all-reduce"
    return is_all_reduce and body is not None and body.root.opcode == "add"


def _again(module: Module, computation: Computation) -> Iterator[tuple[Instruction, ...]]:
    """Sums of what is the same on all ranks over which it is summed."""
    same: dict[str, Same] = {}
    for instruction in computation.instructions:
        known = {same.get(name, _UNKNOWN) for name in instruction.operands} - {None}
        operands = _UNKNOWN if known else None
        if len(known) == 1:
            (operands,) = known
        if operands and _is_sum(module, instruction):
            summed = _groups(module, instruction)
            if all(any(group <= alike for alike in operands) for group in summed):
                yield (instruction,)
        same[instruction.name] = _same(module, instruction, operands)


def _same(module: Module, instruction: Instruction, operands: Same) -> Same:
    """On which ranks the result is the same, if the operands are the same on `operands`."""
    if instruction.opcode in ("constant", "iota"):
        return None
    if instruction.opcode.removesuffix("-start") in ("all-reduce", "all-gather"):
        # What was the same on other groups may differ now, if these cross them.
        return _groups(module, instruction)
    inside = [inner for _, inner in module.within(instruction) if inner.opcode != "parameter"]
    may_differ = any(i.opcode in _DIFFERING or is_collective(i) for i in (instruction, *inside))
    return _UNKNOWN if may_differ else operands


def _slices(module: Module, computation: Computation) -> Iterator[tuple[Instruction, ...]]:
    """Sums of which at most one half is used."""
    for instruction in computation.instructions:
        if _is_sum(module, instruction) and len(instruction.operands) == 1:
            used = _used(module, computation, instruction, instruction.shapes[0].elements)
            if 0 < used <= instruction.shapes[0].elements / 2:
                yield (instruction,)


def _used(
    module: Module,
    computation: Computation,
    value: Instruction,
    whole: int,
    around: Callable[[], int] = int,
    given: Given = None,
) -> int:
    """The elements of a value that slices of it use; `whole`, if something else uses it.

    `around`: counts what is used of the fusion whose result the value may be; 0 outside.
    `given`: in a fusion, where it is, and its operands.
    """
    used = around() or whole if value.root else 0
    for user in computation.users[value.name]:
        if user.opcode in _SLICES and user.operands[0] == value.name:
            starts = user.operands[1:]
            is_known = all(_is_known(module, computation, name, given) for name in starts)
            used += user.shapes[0].elements if is_known else whole
        elif user.opcode in (*_RENAMING, "all-reduce-done"):
            used += _used(module, computation, user, whole, around, given)
        elif user.opcode == "fusion":
            body = next(module.called(user))
            beyond = partial(_used, module, computation, user, whole)
            outside = computation, user.operands
            for number, name in enumerate(user.operands):
                if name == value.name:
                    inner = body.parameters[number]
                    used += _used(module, body, inner, whole, beyond, outside)
        else:
            return whole
    return used


def _is_known(module: Module, computation: Computation, name: str, given: Given) -> bool:
    """Whether a start is the same on all ranks, or follows from the number of the rank alone."""
    made = computation.by_name[name]
    if made.opcode == "parameter":
        if given is None:
            return False
        where, operands = given
        return _is_known(module, where, operands[int(made.operands[0])], None)
    inside = [inner for _, inner in module.within(made) if inner.opcode != "parameter"]
    free = ("partition-id", "replica-id")
    if any(is_collective(i) or i.opcode in {*_DIFFERING} - {*free} for i in (made, *inside)):
        return False
    names = () if made.opcode in ("constant", *free) else made.operands
    return all(_is_known(module, computation, operand, given) for operand in names)


#: Each fault: what finds it, and what to write.
_FAULTS: Mapping[str, tuple[Callable[[Module, Computation], Iterator[Any]], str]] = {
    "gathered twice": (
        _twice,
        "gather once, `whole = lax.all_gather(x, {axes}, tiled=True)`, and pass on `whole`",
    ),
    "summed again": (
        _again,
        "leave it out: along {axes}, what it adds is the same on each rank (to scale it, multiply)",
    ),
    "a slice of a sum": (
        _slices,
        "`lax.psum_scatter(x, {axes}, tiled=True)`, if each rank uses its own block; if all use "
        "the same slice, sum only that: `lax.psum(x[start:stop], {axes})`",
    ),
}
