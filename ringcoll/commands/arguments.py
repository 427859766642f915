"""Arguments that several commands take: collectives, numbers, axes, functions, files."""

import argparse
import importlib
import re
import sys
import traceback
from collections.abc import Callable
from functools import partial, wraps
from itertools import product
from typing import Any, NoReturn

from ringcoll.costs.places import sizes_in
from ringcoll.costs.wire import CODES, ENCODED, Wire
from ringcoll.io import files
from ringcoll.io.text import columns
from ringcoll.runtime.scopes import users_line
from ringcoll.schedules.registry import ALIASES, COLLECTIVES, TOUR, in_lax
from ringcoll.schedules.schedule import ScheduleError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
#: Which units `size` reads, for the help of an option.
SIZES = "K, M, G are powers of 1024, also as MB or MiB"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose help has the lines of the description."""

    def __init__(self, **options: Any) -> None:
        helps = partial(argparse.RawDescriptionHelpFormatter, width=columns())
        super().__init__(**{"formatter_class": helps, **options})

    def error(self, message: str) -> NoReturn:
        """Print the command and what is wrong, with the cure after a semicolon; status 2."""
        cure = "" if ";" in message else "; -h explains the arguments"  # argparse names no cure
        self.exit(2, f"{self.prog}: error: {message}{cure}\n")


class File(str):
    """A file that a command will write; `check_files` checks it before the work."""


def check_files(args: argparse.Namespace) -> None:
    """End the program, before it does anything, if one of its files cannot be written."""
    if getattr(args, "process_id", None):  # the first process writes for all
        return
    for name, value in vars(args).items():
        if isinstance(value, File):
            try:
                files.check(value)
            except OSError as error:
                cure = "name a file in a folder that exists and can be written"
                args.error(f"--{name.replace('_', '-')} {value}: {error.strerror}; {cure}")


def write(file: str, content: str) -> None:
    """Write a file, and say where, beside what is printed."""
    files.write(file, content)
    print(f"wrote {file}", file=sys.stderr)


def collective(text: str) -> str:
    """The name of a collective, which may be written with hyphens: "all-reduce"."""
    return text.replace("-", "_")


def add_collective(parser: argparse.ArgumentParser, *more: str) -> None:
    """Declare the argument COLLECTIVE: a collective that has schedules, or one of `more`."""
    known = [*COLLECTIVES, TOUR, *(f"{alias} ({name})" for alias, name in ALIASES.items()), *more]
    parser.add_argument(
        "collective",
        type=collective,
        choices=[*COLLECTIVES, TOUR, *ALIASES, *more],
        metavar="COLLECTIVE",
        help=", ".join(known),
    )


def add_algorithm(which: Any) -> None:
    """Declare --algorithm and --function in an exclusive group: a user gives one of the two."""
    which.add_argument("--algorithm", metavar="NAME", help="an algorithm that `explain` lists")
    which.add_argument(
        "--function", type=algorithm, metavar="MODULE:FUNCTION", help="your own schedule"
    )


def add_wire(parser: argparse.ArgumentParser) -> None:
    """Declare --wire."""
    known = ", ".join(CODES)
    meaning = f"what messages hold in place of bfloat16: {known}"
    parser.add_argument("--wire", choices=CODES, metavar="DTYPE", help=meaning)


def wire(codes: str | None, collective: str) -> Wire | None:
    """The `Wire` of a collective whose messages hold these codes; None without codes.

    Raises:
        ValueError: the collective has no wire.
    """
    if codes and in_lax(collective) not in ENCODED:
        raise ValueError(f"--wire {codes}: {collective} has no wire; leave it out")
    return Wire(codes) if codes else None


def size(text: str) -> int:
    """Read a number of bytes: "512", "1K", "64M" or "1G". K, M and G are powers of 1024.

    "64MB" and "64MiB" are the same as "64M".

    Raises:
        argparse.ArgumentTypeError: it is not a size, or it is 0.
    """
    found = re.fullmatch(r"([0-9]{1,19})(?:([KMG])I?)?B?", text.upper())
    number = int(found[1]) * _UNITS[found[2] or ""] if found else 0
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 512, 1K, 64M or 1G")
    return number


def sizes(text: str) -> list[int]:
    """Read sizes with commas between them.

    Raises:
        argparse.ArgumentTypeError: as `size`.
    """
    return [size(one) for one in text.split(",")]


def shape(text: str) -> tuple[int, ...]:
    """Read the sizes of axes, major first: "8" or "4x2".

    Raises:
        argparse.ArgumentTypeError: it is not a shape, or a size is 0.
    """
    sizes = sizes_in(text)
    if not sizes:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a shape: give sizes above 0, such as 4x2"
        )
    return sizes


def matmul_sizes(text: str) -> tuple[int, int, int]:
    """Read the sizes m, k and f of a matmul.

    Raises:
        argparse.ArgumentTypeError: they are not three sizes above 0.
    """
    sizes = shape(text)
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} does not have three sizes; write MxKxF")
    m, k, f = sizes
    return m, k, f


def shapes(text: str) -> list[tuple[int, ...]]:
    """Read a list of shapes, such as "2..8,3,4x4". A range means powers of two, also for an axis.

    Raises:
        argparse.ArgumentTypeError: it is not such a list.
    """
    items = text.lower().split(",")
    return [shape for item in items for shape in product(*map(_range, item.split("x")))]


def _range(text: str) -> list[int]:
    """The numbers of "8", or the powers of two of "2..8"."""
    first, dots, last = text.partition("..")
    try:
        low, high = int(first), int(last) if dots else int(first)
    except ValueError:
        low, high = 1, 0
    numbers = [2**k for k in range(high.bit_length()) if low <= 2**k <= high] if dots else [low]
    if low < 1 or high < low or not numbers:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of ranks; write 8, 2..256 or 4x4"
        )
    return numbers


def count(text: str) -> int:
    """Read a number above 0.

    Raises:
        argparse.ArgumentTypeError: it is not a number, or it is 0.
    """
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def function(text: str) -> Callable[..., Any]:
    """Import the function that "module:function" names.

    Raises:
        argparse.ArgumentTypeError: there is no such function, or importing the module failed.
    """
    module, _, name = text.partition(":")
    try:
        imported = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # importing a module may raise anything
        raise argparse.ArgumentTypeError(
            f"{text!r}: importing {module!r} failed: {in_a_line(error)}"
        ) from error
    if not hasattr(imported, name):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a module:function"
            + (f"; {module!r} has no {name!r}" if name else f"; write {module}:NAME")
        )
    return getattr(imported, name)


def in_a_line(error: BaseException) -> str:
    """An exception in one line: its type, its message, and the last line of the user's code."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):  # its message already names the line
        return f"{words} ({error.filename})"
    file, line = users_line(traceback.extract_tb(error.__traceback__))
    return f"{words} ({file}, line {line})" if file else words


def algorithm(text: str) -> Callable[..., Any]:
    """Import a user's schedule, "module:function", wrapped as in `_called`.

    Raises:
        argparse.ArgumentTypeError: there is no such function.
    """
    failed = "called with {}, the sizes of the axes: {}; a program is for overlap and explain"
    return _called(text, "the sizes of the axes to a Schedule", failed)


def program(text: str) -> Callable[..., Any]:
    """Import a user's program, "module:function", which is called with a mesh.

    Raises:
        argparse.ArgumentTypeError: there is no such function.
    """
    failed = "called with the mesh: {1}; a schedule is for draw, cost and export"
    return _called(text, "a mesh to a function and its operands", failed)


def _called(text: str, does: str, failed: str) -> Callable[..., Any]:
    """Import a user's function and wrap it, so that whatever it raises becomes a `ScheduleError`.

    Args:
        text: "module:function".
        does: what the function should map to what, for the message if it is not a function.
        failed: the message if a call fails, of its operands and the error.
    """
    user_function = function(text)
    if not callable(user_function):
        raise argparse.ArgumentTypeError(
            f"{text!r} is a {type(user_function).__name__}; name a function from {does}"
        )

    @wraps(user_function)
    def called(*operands: Any) -> Any:
        try:
            return user_function(*operands)
        except (Exception, SystemExit) as error:
            words = failed.format(operands, in_a_line(error))
            raise ScheduleError(f"--function {text}: {words}") from error

    called.__name__ = text.partition(":")[2]
    return called
