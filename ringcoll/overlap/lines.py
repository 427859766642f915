"""Find the source line of an instruction in the metadata of the text.

Newer texts start with tables of files, locations and frames, and instructions name a frame. In
older texts an instruction names its file and line.
"""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ringcoll.overlap.hlo import Instruction, Module
from ringcoll.overlap.transfers import is_collective

#: A file, a line and a function.
StackFrame = tuple[str, int, str]
_PACKAGE = Path(__file__).parents[1]
#: The programs of `--example`. Their lines count as the user's.
_EXAMPLES = str(_PACKAGE / "commands" / "overlap_examples.py")
#: Packages whose lines are nobody's model: JAX, and libraries that models are made of.
_LIBRARIES = (
    *("python", "jax", "jaxlib", "ringcoll", "flax", "equinox", "haiku", "optax", "penzai"),
    *("keras", "haliax", "chex", "einops", "jaxtyping", "beartype", "lineax", "aqt", "qwix"),
)
#: The function of `jax.lax` that makes an operation, by the operation's name.
CALLS = {"reduce_scatter": "psum_scatter"} | {
    name: name
    for name in (
        "all_gather",
        "psum",
        "pmax",
        "pmin",
        "ppermute",
        "all_to_all",
        "ragged_all_to_all",
    )
}


class Line(NamedTuple):
    """A line of source, JAX's name of the operation, the function called; "" and 0 if unknown."""

    file: str = ""
    line: int = 0
    op_name: str = ""
    function: str = ""
    user: str = ""  # the user's own line, if the source is an installed package's

    @property
    def source(self) -> str:
        """The file with its folder, and the line: "/home/me/train.py:41"."""
        return f"{self.file}:{self.line}" if self.file else ""

    @property
    def place(self) -> str:
        """The line without its folder: "train.py:41"."""
        return re.split(r"[/\\]", self.source)[-1]

    @property
    def operation(self) -> str:
        """JAX's operation: "dot_general"."""
        name = self.op_name.rpartition("/")[2]
        # A compiler that joins operations writes "(this/psum:that/psum)".
        return (name if "(" in name else name.rstrip(")")).removesuffix("_invariant")

    @property
    def short(self) -> str:
        """What the line calls: "train.py:41 psum, gradient", "layer.py:7 psum (train.py:41)"."""
        # `jax.checkpoint` computes a part of the forward pass again, inside the backward pass.
        _, again, name = self.op_name.rpartition("rematted_computation")
        gradient = "transpose(" in name
        ours = re.search(r"ringcoll\.(\w+)", self.op_name)
        called = self.function or (ours[1] if ours else "")
        if not called and not (self.file and gradient):  # a gather's gradient is no gather
            called = CALLS.get(self.operation, "" if self.file else self.operation)
        when = ", gradient" if gradient else ", recomputed" if again else ""
        return f"{self.place} {called}".strip() + f" ({self.user})" * bool(self.user) + when


class Lines:
    """The lines of the instructions of one program.

    Args:
        text: the text of the program.
        module: the same text, parsed.
    """

    def __init__(self, text: str, module: Module) -> None:
        self._module = module
        head = text.partition("\n%")[0].partition("\nENTRY")[0]
        self._files, self._functions = (
            dict(re.findall(r'^(\d+) "(.*)"$', _part(head, title), re.M))
            for title in ("FileNames", "FunctionNames")
        )
        self._locations = _rows(
            _part(head, "FileLocations"), "file_name_id", "function_name_id", "line"
        )
        self._frames = _rows(_part(head, "StackFrames"), "file_location_id", "parent_frame_id")
        # The first frame has no parent. Some versions write every parent one too high.
        self._shift = next(iter(self._frames.values()), (0, 0))[1]

    def of(self, name: str) -> Line:
        """The line of an instruction; for a fusion with a collective, the collective's line."""
        return self._best(self._named[name]) if name in self._named else Line()

    @cached_property
    def _named(self) -> dict[str, Instruction]:
        """Every instruction by name."""
        computations = self._module.computations.values()
        return {n: i for computation in computations for n, i in computation.by_name.items()}

    def _best(self, instruction: Instruction) -> Line:
        inside = [inner for _, inner in self._module.within(instruction) if is_collective(inner)]
        collectives = inside or [instruction]
        lines = [self._line(collective) for collective in collectives]
        # A compiler that rewrites a sum may drop its line, but keep the line of its addition.
        lines += [self._line_of_addition(collective, instruction) for collective in collectives]
        lines.append(self._line(instruction))
        return max(lines, key=lambda line: (bool(line.file), bool(line.op_name)))

    def _line_of_addition(self, collective: Instruction, around: Instruction) -> Line:
        """The line of a sum's addition, with the sum's name, which the parameters still have.

        `around` is the sum, or the fusion that contains it.
        """
        for body in self._module.called(collective) if is_collective(collective) else ():
            names = [parameter.attribute("op_name") or "" for parameter in body.parameters.values()]
            stack, added = self._stack_of(body.root), self._line_of_operand(around)
            own = [
                stack[len(reused) :] for reused in self._reused if stack[: len(reused)] == reused
            ]
            line = self._line(body.root, max(own, key=len, default=None))
            if not own and self._additions.count(stack) > 1:
                line = added  # JAX reuses the addition of an earlier line
            path, name = added.op_name.rpartition("/")[0], max(names, default="")
            return line._replace(op_name=f"{path}/{name}" if path and "/" not in name else name)
        return Line()

    @cached_property
    def _additions(self) -> list[list[StackFrame]]:
        """The stacks of the additions of all sums."""
        return [
            self._stack_of(body.root)
            for computation in self._module.computations.values()
            for instruction in filter(is_collective, computation.instructions)
            for body in self._module.called(instruction)
        ]

    @cached_property
    def _reused(self) -> list[list[StackFrame]]:
        """The stacks of which JAX made additions. A later sum's is below; the first one's too."""
        halves = ((s[: len(s) // 2], s[len(s) // 2 :]) for s in self._additions)
        return [first for first, second in halves if first and first == second]

    def _line_of_operand(self, instruction: Instruction) -> Line:
        """The line of what makes the first operand."""
        makers = [self._named[name] for name in instruction.operands[:1] if name in self._named]
        inside = [inner for maker in makers for _, inner in self._module.within(maker)]
        lines = (self._line(maker) for maker in (*makers, *inside))
        return next((line for line in lines if line.file), Line())

    def _stack_of(self, instruction: Instruction) -> list[StackFrame]:
        """The frames of an instruction, the innermost first; an older text names only one."""
        if file := instruction.attribute("source_file"):
            return [(file, instruction.number("source_line") or 0, "")]
        return list(self._stack(instruction.number("stack_frame_id") or 0))

    def _line(self, instruction: Instruction, stack: list[StackFrame] | None = None) -> Line:
        op_name = instruction.attribute("op_name") or ""
        stack = self._stack_of(instruction) if stack is None else stack
        models = [frame for frame in stack if _package(frame[0]) not in _LIBRARIES]
        # Code that is in no file, such as <string>, only if there is no other.
        named = [frame for frame in models if not frame[0].startswith("<")]
        if not stack:
            return Line(op_name=op_name)
        file, line, _ = frame = next(iter([*named, *models, *stack]))
        own = (Line(*theirs[:2]).place for theirs in named if not _package(theirs[0]))
        # Of the calls inside of this line, the outermost of a public function.
        inside = (function for _, _, function in reversed(stack[: stack.index(frame)]))
        called = (name for name in inside if re.fullmatch(r"[a-zA-Z]\w*", name))
        user = next(own, "") if _package(file) else ""
        return Line(file, line, op_name, next(called, ""), user)

    def _stack(self, frame: int) -> Iterator[StackFrame]:
        """The file, line and function of a frame and of its callers, the innermost first."""
        seen: set[int] = set()
        while frame in self._frames and frame not in seen:
            seen.add(frame)
            location, parent = self._frames[frame]
            file, function, line = map(str, self._locations.get(location, (0, 0, 0)))
            if file in self._files:
                yield self._files[file], int(line), self._functions.get(function, "")
            frame = parent - self._shift


def _package(file: str) -> str:
    """The installed package that a file belongs to; "python" if it is Python's own; else ""."""
    if file.startswith(f"{_PACKAGE}/"):
        return "ringcoll" * (file != _EXAMPLES)
    match = re.search(r"(?:site|dist)-packages[/\\](\w+)", file)
    return match[1] if match else "python" * ("/lib/python3." in file)


def _part(head: str, title: str) -> str:
    """The lines of a table: those below its title, up to an empty one."""
    match = re.search(rf"^{title}\n((?:\d.*\n?)*)", head, re.M)
    return match[1] if match else ""


def _rows(part: str, *keys: str) -> dict[int, tuple[int, ...]]:
    """The numbers of each row of a table, by the number of the row; 0 if one is missing."""
    rows = {}
    for number, fields in re.findall(r"^(\d+) \{(.*)\}$", part, re.M):
        matches = (re.search(rf"\b{key}=(\d+)", fields) for key in keys)
        rows[int(number)] = tuple(int(match[1]) if match else 0 for match in matches)
    return rows
