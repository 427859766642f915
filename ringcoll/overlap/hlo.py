"""Read scheduled HLO text: its computations, instructions, shapes and attributes.

The text of a compiled program (`compiled.as_text()`) lists the instructions of every
computation in the order in which they are executed. Nothing here has a time.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

#: A text that names more ranks is garbled: their places would fill the memory.
MOST_RANKS = 2**20
#: The memory space of the host, as XLA's `Layout::kHostMemorySpace`.
HOST = 5


class HloError(ValueError):
    """The text is not a scheduled HLO program."""


@contextmanager
def as_hlo_error() -> Iterator[None]:
    """Raise what a garbled text leads to as an `HloError`."""
    try:
        yield
    except HloError:
        raise
    except (ArithmeticError, LookupError, RuntimeError, StopIteration, ValueError) as error:
        raise HloError(
            f"the text cannot be read ({type(error).__name__}: {error}); if it is cut off or "
            "changed, pass compiled.as_text(); if a mesh was given, it may be a different one"
        ) from error


@dataclass(frozen=True, slots=True)
class Shape:
    """An array: its element type, its dimensions, its memory space (0 is main memory)."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def elements(self) -> int:
        return prod(self.dims)

    @property
    def bytes(self) -> float:
        width = re.search(r"\d+", self.dtype)  # bf16, f8e4m3fn, s4, c64
        bits = int(width[0]) if width else {"pred": 8}.get(self.dtype, 0)
        return self.elements * bits / 8


@dataclass(frozen=True)
class Instruction:
    """One line: `name = shapes opcode(operands), attributes`. The shapes of a tuple are flat."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool = False

    @property
    def bytes(self) -> float:
        """The bytes of the result."""
        return sum(shape.bytes for shape in self.shapes)

    def attribute(self, key: str) -> str | None:
        """The value of an attribute, with its braces; None if there is none."""
        # A backend_config may be written as a string with escaped quotes.
        match = re.search(rf'(?:^|[\s,{{])(?:\\?")?{key}(?:\\?")?[=:]\s*', self.attributes)
        if match is None:
            return None
        return _value(self.attributes, match.end()).strip('"')

    def number(self, key: str) -> int | None:
        """The value of an attribute if it is a whole number; None if not."""
        value = self.attribute(key)
        return int(value) if value is not None and re.fullmatch(r"-?\d+", value) else None

    @cached_property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that it runs, including the `to_apply` of a reduction."""
        values = [self.attribute(key) for key in _CALLS]
        names = [name for value in values if value for name in re.findall(_NAME, value)]
        return tuple(name.lstrip("%") for name in names)


@dataclass(frozen=True)
class Computation:
    """A list of instructions in the order of execution."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction."""
        readers: dict[str, list[Instruction]] = {i.name: [] for i in self.instructions}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operands):
                if name in readers:
                    readers[name].append(instruction)
        return readers

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The instruction of each parameter, by its number."""
        return {int(i.operands[0]): i for i in self.instructions if i.opcode == "parameter"}

    @property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.root), self.instructions[-1])

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions of this computation that an instruction reads."""
        return [self.by_name[name] for name in instruction.operands if name in self.by_name]


@dataclass(frozen=True)
class Module:
    """A program: its computations by name, and its entry. A name stands for one instruction."""

    name: str
    entry: Computation
    computations: dict[str, Computation]
    ranks: int = 1
    tiled: bool = False  # whether its layouts are tiled, which only a TPU's are
    meshes: tuple[Mapping[str, int], ...] = ()  # that it names: their axes and sizes

    def called(self, instruction: Instruction) -> Iterator[Computation]:
        """The computations that an instruction runs."""
        return (self.computations[n] for n in instruction.called if n in self.computations)

    def within(self, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """Every instruction in the computations that an instruction calls, at any depth."""
        for computation in self.called(instruction):
            for inner in computation.instructions:
                yield computation, inner
                yield from self.within(inner)


#: The attributes that name computations.
_CALLS = (
    *("calls", "to_apply", "body", "condition", "branch_computations"),
    *("true_computation", "false_computation", "called_computations"),
)
_NAME = r"[%\w.\-<>]+"
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
_LINE = re.compile(rf"^\s+(ROOT )?({_NAME}) = ")
_HEAD = re.compile(rf"^(ENTRY )?({_NAME}) (\(.*)?\{{$")  # HLO's short form has no (parameters)
_STOP = r"^\}(?![)}\],])|^\}, execution_thread="  # but not the brace of an attribute
_STATEMENT = re.compile(rf"{_LINE.pattern}|{_HEAD.pattern}|{_STOP}")
_OPEN, _CLOSE = "([{", ")]}"
_ORDER = ", device_ids="  # between the axes of a mesh and the chosen axes


def parse(text: str) -> Module:
    """Read a scheduled HLO program.

    Args:
        text: `compiled.as_text()`.

    Raises:
        HloError: the text is not HLO, or is not scheduled, such as the text of `lowered`.
    """
    heads = re.findall(r"^HloModule ([^\s,]*)(.*)$", text, re.MULTILINE)
    if not heads:
        raise HloError(
            f"the text is not HLO: no line begins with 'HloModule' ({text[:60]!r}...); "
            "pass compiled.as_text(), the compiled program itself, or a file or folder that exists"
        )
    if len(heads) > 1:
        raise HloError(
            f"the text has {len(heads)} programs, HloModule {', '.join(n for n, _ in heads)}; "
            "pass the text of one"
        )
    ((title, header),) = heads
    if "is_scheduled=true" not in header:
        raise HloError(
            f"HloModule {title} is not scheduled, so that its order means nothing; "
            "pass the text of jax.jit(f).lower(...).compile(), not that of lower(...)"
        )
    if re.search(r"=\n\s*\{$", text, re.MULTILINE):
        raise HloError(
            f"HloModule {title} is printed in the canonical form, which writes computations inside "
            "of instructions; pass compiled.as_text()"
        )
    computations: dict[str, Computation] = {}
    entry, name = None, ""
    lines: list[Instruction] = []
    types: dict[str, str] = {}
    taken: set[str] = set()
    whole = text[: text.rfind("\n}") + 2]  # leave out a computation that is cut off
    for line in _statements(whole):
        if match := _HEAD.match(line):
            name, lines, types = match[2].lstrip("%"), [], {}
            entry = name if match[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, _unique(lines, name, taken))
        elif match := _LINE.match(line):
            instruction = _instruction(line, match, types)
            lines += [*_elements(instruction.operands, types), instruction]
    if entry is None or entry not in computations or not computations[entry].instructions:
        raise HloError(
            f"HloModule {title} has no ENTRY computation with a name and instructions: the text is "
            "cut off, or printed without names; pass compiled.as_text()"
        )
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    ranks = prod(map(int, counts))
    if ranks > MOST_RANKS:
        raise HloError(f"HloModule {title} names {ranks} ranks; {MOST_RANKS} are the most")
    tiled, meshes = ":T(" in header, meshes_in(text)
    return Module(title, computations[entry], computations, ranks, tiled, tuple(meshes))


def meshes_in(text: str) -> Iterator[dict[str, int]]:
    """The meshes that a compiled program names in its groups, or a lowered one as `sdy.mesh`."""
    named = re.findall(r"""\bmesh(?: @\w+ = <)?\[(['"][^\]]*)\](?: \{|>)""", text)
    for axes in dict.fromkeys(named):
        yield {name: int(n) for name, n in re.findall(r"""['"]([^'"]*)['"]=(\d+)""", axes)}


def _unique(lines: Sequence[Instruction], name: str, taken: set[str]) -> tuple[Instruction, ...]:
    """The instructions of a computation, without names that an earlier one has."""
    new = {i.name: f"{i.name}@{name}" for i in lines if i.name in taken}
    taken |= {i.name for i in lines}

    def renamed(i: Instruction) -> Instruction:
        operands = tuple(new.get(operand, operand) for operand in i.operands)
        return replace(i, name=new.get(i.name, i.name), operands=operands)

    return tuple(map(renamed, lines) if new else lines)


def _statements(text: str) -> Iterator[str]:
    """The statements of a text; that of a Pallas kernel has several lines."""
    parts: list[str] = []
    for line in text.splitlines():
        if _STATEMENT.match(line):
            yield "".join(parts)
            parts = []
        parts.append(line)
    yield "".join(parts)


def _instruction(line: str, match: re.Match[str], types: dict[str, str]) -> Instruction:
    shape_end = _end(line, match.end())
    types[match[2].lstrip("%")] = line[match.end() : shape_end]
    opcode_end = line.find("(", shape_end)
    if opcode_end < 0:
        raise HloError(f"a line cannot be read: {line[:120]!r}; is the text cut off?")
    operands_end = _end(line, opcode_end)
    operands = _split(line[opcode_end + 1 : operands_end - 1])
    return Instruction(
        match[2].lstrip("%"),
        line[shape_end:opcode_end].strip(),
        tuple(_shapes(line[match.end() : shape_end])),
        # An operand may be written with its shape before its name.
        tuple(o.split()[-1].lstrip("%") for o in operands if o.strip()),
        line[operands_end:].lstrip(", "),
        match[1] is not None,
    )


def _elements(operands: Sequence[str], types: dict[str, str]) -> Iterator[Instruction]:
    """The `get-tuple-element`s that a dumped text writes as operands: %t#0 is element 0 of %t."""
    for operand in operands:
        whole, _, index = operand.rpartition("#")
        if index.isdecimal() and operand not in types:
            yield from _elements((whole,), types)  # %t#0#1 is an element of an element
            if whole in types:
                types[operand] = _split(types[whole][1:-1])[int(index)].strip()
                shapes = tuple(_shapes(types[operand]))
                yield Instruction(operand, "get-tuple-element", shapes, (whole,), f"index={index}")


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, dims, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        numbers = tuple(int(d) for d in re.findall(r"\d+", dims))
        yield Shape(dtype, numbers, int(space[1]) if space else 0)


def _end(text: str, start: int) -> int:
    """The end of the token at `start`: a space, comma or closing brace outside all braces."""
    depth, quoted = 0, False
    for i in range(start, len(text)):
        c = text[i]
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif c in _OPEN:
            depth += 1
        elif c in _CLOSE:
            depth -= 1
            if depth < 0:
                return i
            if depth == 0 and text[start] == "(":
                return i + 1
        elif depth == 0 and c in " ,":
            return i
    return len(text)


def _value(text: str, start: int) -> str:
    """The value that begins at `start`; `mesh['x'=8] {'x'}` is one value, also with device_ids."""
    end = _end(text, start)
    if text.startswith("mesh[", start):
        if text.startswith(_ORDER, end):
            end = _end(text, end + len(_ORDER))
        if text[end : end + 2] == " {":
            end = _end(text, end + 1)
    return text[start:end]


def _split(text: str) -> list[str]:
    """Split at the commas outside all braces."""
    parts, start = [], 0
    while start < len(text):
        end = start
        while end < len(text) and text[end] != ",":
            end = max(_end(text, end), end + 1)
        parts.append(re.sub(r"/\*.*?\*/", "", text[start:end]))
        start = end + 1
    return parts


def loop_part(module: Module, loop: Instruction, key: str) -> Computation:
    """The condition or the body of a loop."""
    return module.computations[(loop.attribute(key) or "").lstrip("%")]


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often the body of a `while` runs; None if the text does not say.

    Compilers for CPUs and GPUs write it as `known_trip_count`. If there is none, or a negative
    one, it is computed from a counter that starts at a constant, changes by a constant and is
    compared with a constant. The compiler for TPUs puts the counter on the left.
    """
    known = re.search(r"-?\d+", loop.attribute("known_trip_count") or "")
    if known and int(known[0]) >= 0:
        return int(known[0])
    condition, body = (loop_part(module, loop, key) for key in ("condition", "body"))
    test = condition.root
    direction = test.attribute("direction")
    if test.opcode != "compare" or direction not in _COMPARED:
        return None
    up, beyond = _COMPARED[direction]
    counter, limit = condition.operands(test)
    index = counter.number("index")
    carry = computation.operands(loop)[0]
    if index is None or carry.opcode != "tuple" or body.root.opcode != "tuple":
        return None
    first = _constant(computation, computation.by_name.get(carry.operands[index]))
    last, step = _constant(condition, limit), _step(body, index)
    if first is None or last is None or not step or up * step < 0:
        return None
    turns, rest = divmod(last + beyond - first, step)
    if not up and (rest or turns < 0):
        return None  # it passes the limit without being equal to it
    return max(0, turns + bool(rest))


#: Which way a counter must go (0: either), and what to add to its limit.
_COMPARED = {"LT": (1, 0), "LE": (1, 1), "GT": (-1, 0), "GE": (-1, -1), "NE": (0, 0)}


def _step(body: Computation, index: int) -> int | None:
    """How much the body adds to element `index` of the carry; None if it does something else."""
    total, at = 0, body.by_name.get(body.root.operands[index])
    while at is not None and at.opcode in ("add", "copy", "bitcast"):
        others = []
        for operand in body.operands(at):
            constant = _constant(body, operand)
            if constant is None:
                others.append(operand)
            else:
                total += constant
        at = others[0] if len(others) == 1 else None
    if at is None or at.opcode != "get-tuple-element" or at.number("index") != index:
        return None
    return total


def _constant(computation: Computation, instruction: Instruction | None) -> int | None:
    """The whole number that an instruction is; None if it is not a constant."""
    while instruction is not None and instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = next(iter(computation.operands(instruction)), None)
    if instruction is None or instruction.opcode != "constant":
        return None
    value = instruction.operands[0] if instruction.operands else ""
    return int(value) if re.fullmatch(r"-?\d+", value) else None
