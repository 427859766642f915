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

_PACKAGE = Path(__file__).parents[1]
#: The programs of `--example`. Their lines count as the user's.
_EXAMPLES = str(_PACKAGE / "commands" / "overlap_examples.py")


class Line(NamedTuple):
    """A line of source, and JAX's name of the operation; "" and 0 if unknown."""

    file: str = ""
    line: int = 0
    op_name: str = ""

    @property
    def source(self) -> str:
        """The file with its folder, and the line: "/home/me/train.py:41"."""
        return f"{self.file}:{self.line}" if self.file else ""

    @property
    def short(self) -> str:
        """The line in short, such as "train.py:41 psum"; ringcoll's collectives add the round."""
        at = re.split(r"[/\\]", self.source)[-1]
        ours = re.search(r"ringcoll\.(\w+)(?:\([^)]*\))?(.*?)(?:/[^/]*)?$", self.op_name)
        what = ours[1] + ours[2].replace("/", " ") if ours else self.op_name.rpartition("/")[2]
        return " ".join(filter(None, (at, what)))


class Lines:
    """The lines of the instructions of one program.

    Args:
        text: the text of the program.
        module: the same text, parsed.
    """

    def __init__(self, text: str, module: Module) -> None:
        self._module = module
        head = text.partition("\n%")[0].partition("\nENTRY")[0]
        self._files = {
            int(number): name
            for number, name in re.findall(r'^(\d+) "(.*)"$', _part(head, "FileNames"), re.M)
        }
        self._locations = _rows(_part(head, "FileLocations"), "file_name_id", "line")
        self._frames = _rows(_part(head, "StackFrames"), "file_location_id", "parent_frame_id")
        # The first frame has no parent. Some versions write every parent one too high.
        self._shift = next(iter(self._frames.values()), (0, 0))[1]

    def of(self, name: str) -> Line:
        """The line of an instruction; for a fusion with a collective, the collective's line."""
        return self._best(self._named[name]) if name in self._named else Line()

    @cached_property
    def _named(self) -> dict[str, Instruction]:
        """Every instruction by name; if computations share a name, the first one counts."""
        computations = reversed(self._module.computations.values())
        return {n: i for computation in computations for n, i in computation.by_name.items()}

    def _best(self, instruction: Instruction) -> Line:
        inside = [inner for _, inner in self._module.within(instruction) if is_collective(inner)]
        collectives = inside or [instruction]
        lines = [self._line(one) for one in collectives]
        # A compiler that rewrites a sum may drop its line, but keep the line of its addition.
        lines += [self._of_addition(one) for one in collectives]
        lines.append(self._line(instruction))
        return max(lines, key=lambda line: (bool(line.file), bool(line.op_name)))

    def _of_addition(self, instruction: Instruction) -> Line:
        """The line of a sum's addition, with the sum's name, which the parameters still have."""
        for body in self._module.called(instruction) if is_collective(instruction) else ():
            names = [given.attribute("op_name") or "" for given in body.parameters.values()]
            return self._line(body.root)._replace(op_name=max(names, default=""))
        return Line()

    def _line(self, instruction: Instruction) -> Line:
        op_name = instruction.attribute("op_name") or ""
        file, line = instruction.attribute("source_file"), instruction.number("source_line")
        if file:
            return Line(file, line or 0, op_name)
        stack = list(self._stack(instruction.number("stack_frame_id") or 0))
        theirs = [
            frame
            for frame in stack
            if frame[0] == _EXAMPLES or not frame[0].startswith(f"{_PACKAGE}/")
        ]
        # Without installed packages, and without code that is in no file, such as <string>.
        users = [f for f in theirs if "site-packages" not in f[0] and not f[0].startswith("<")]
        file, line = next(iter([*users, *theirs, *stack]), ("", 0))
        return Line(file, line, op_name)

    def _stack(self, frame: int) -> Iterator[tuple[str, int]]:
        """The file and line of a frame and of its callers, the innermost first."""
        seen: set[int] = set()
        while frame in self._frames and frame not in seen:
            seen.add(frame)
            location, parent = self._frames[frame]
            file, line = self._locations.get(location, (0, 0))
            if file in self._files:
                yield self._files[file], line
            frame = parent - self._shift


def _part(head: str, title: str) -> str:
    """The lines of a table: those below its title, up to an empty one."""
    found = re.search(rf"^{title}\n((?:\d.*\n?)*)", head, re.M)
    return found[1] if found else ""


def _rows(part: str, *keys: str) -> dict[int, tuple[int, int]]:
    """Two numbers of each row of a table, by the number of the row; 0 if one is missing."""
    rows = {}
    for number, fields in re.findall(r"^(\d+) \{(.*)\}$", part, re.M):
        found = [re.search(rf"\b{key}=(\d+)", fields) for key in keys]
        first, second = (int(one[1]) if one else 0 for one in found)
        rows[int(number)] = first, second
    return rows
