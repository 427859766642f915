"""What several commands take as arguments: collectives, numbers, axes, functions, files."""

import argparse
import importlib
import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from math import prod
from typing import Any

from ringcoll.costs.places import MOST_RANKS
from ringcoll.costs.wire import CODES, ENCODED, Wire
from ringcoll.io import figure, files
from ringcoll.schedules.registry import ALIASES, COLLECTIVES, TOUR, in_lax
from ringcoll.schedules.schedule import ScheduleError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
#: What `size` takes, for the help of an option.
SIZES = "K, M, G are powers of 1024, also as MB or MiB"
_MOST_BYTES = 2**60


class File(str):
    """A file that a command is to write, at which `check_files` looks before the work.

    Attributes:
        endings: of its name, if it has any, one of these; none are all.
    """

    endings: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuse what could not be written.

        Raises:
            OSError: its folder is missing, say.
            ValueError: it has another ending.
        """
        ending = os.path.splitext(self)[1]
        if ending and self.endings and ending.lower() not in self.endings:
            raise ValueError(f"{ending!r} is not one of {', '.join(self.endings)}")
        files.check(self)


class Svg(File):
    """A picture that we write ourselves."""

    endings = (".svg",)


class Page(File):
    """A page for a browser."""

    endings = (".html", ".htm")


class Trace(File):
    """A trace for Perfetto or Chrome."""

    endings = (".json",)


class Folder(File):
    """A folder that a command is to write files into."""

    def check(self) -> None:
        files.check_folder(self)


class PictureFile(File):
    """A file of a picture by matplotlib."""

    def check(self) -> None:
        """Refuse what could not be drawn, either.

        Raises:
            OSError: its folder is missing, say.
            ValueError: its ending is that of no format.
            ModuleNotFoundError: matplotlib is not installed.
        """
        figure.check("draw", self)


def check_files(args: argparse.Namespace) -> None:
    """End the program, before anything is done, if what it is to write could not be written."""
    if getattr(args, "process_id", None):  # the first process writes for all
        return
    for name, value in vars(args).items():
        if isinstance(value, File):
            option = f"--{name.replace('_', '-')} {value}"
            try:
                value.check()
            except OSError as error:
                cure = "name a file in a folder that exists and can be written"
                args.error(f"{option}: {error}; {cure}")
            except (ValueError, ModuleNotFoundError) as error:
                args.error(f"{option}: {error}")


@contextmanager
def writing(args: argparse.Namespace, name: str) -> Iterator[None]:
    """End the program with a message if the file of this argument cannot be written."""
    try:
        yield
    except OSError as error:  # a full disk: the rest was looked at before
        args.error(f"--{name} {getattr(args, name)}: {error}")


def collective(text: str) -> str:
    """The name of a collective, which may be written with hyphens: "all-reduce"."""
    return text.replace("-", "_")


def add_collective(parser: argparse.ArgumentParser) -> None:
    """Declare COLLECTIVE."""
    known = [*COLLECTIVES, TOUR, *(f"{alias} ({name})" for alias, name in ALIASES.items())]
    parser.add_argument(
        "collective",
        type=collective,
        choices=[*COLLECTIVES, TOUR, *ALIASES],
        metavar="COLLECTIVE",
        help=", ".join(known),
    )


def add_algorithm(which: Any) -> None:
    """Declare --algorithm and --function; in a group, one of the two may be given."""
    which.add_argument("--algorithm", metavar="NAME", help="an algorithm that `explain` lists")
    which.add_argument(
        "--function", type=algorithm, metavar="MODULE:FUNCTION", help="your own schedule"
    )


def add_wire(parser: argparse.ArgumentParser) -> None:
    """--wire."""
    known = ", ".join(CODES)
    how = f"what messages hold in place of bfloat16: {known}"
    parser.add_argument("--wire", choices=CODES, metavar="DTYPE", help=how)


def wire(codes: str | None, collective: str) -> Wire | None:
    """What messages of a collective hold in place of floats, if they do.

    Raises:
        ValueError: the collective has no wire.
    """
    if codes and in_lax(collective) not in ENCODED:
        raise ValueError(f"--wire {codes}: {collective} has no wire; leave it out")
    return Wire(codes) if codes else None


def size(text: str) -> int:
    """Bytes, of "512", "1K", "64M" or "1G", which are powers of 1024; "64MB" and "64MiB" are 64M.

    Raises:
        argparse.ArgumentTypeError: it is none of these, 0, or more than there can be.
    """
    found = re.fullmatch(r"([0-9]{1,19})(?:([KMG])I?)?B?", text.upper())
    number = int(found[1]) * _UNITS[found[2] or ""] if found else 0
    if not 0 < number <= _MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 512, 1K, 64M or 1G")
    return number


def sizes(text: str) -> list[int]:
    """Sizes with commas between them.

    Raises:
        argparse.ArgumentTypeError: as `size`.
    """
    return [size(one) for one in text.split(",")]


def shape(text: str) -> tuple[int, ...]:
    """The sizes of axes, major first, of "8" or "4x2".

    Raises:
        argparse.ArgumentTypeError: it is none of these, or 0.
    """
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a shape: give sizes above 0, such as 4x2"
        )
    return tuple(map(int, sizes))


def ranks(text: str) -> tuple[int, ...]:
    """The same, of as many ranks as a schedule is built of.

    Raises:
        argparse.ArgumentTypeError: it is none of these, or of more than `MOST_RANKS`.
    """
    made = shape(text)
    check_ranks(made)
    return made


def check_ranks(shape: tuple[int, ...]) -> None:
    """Refuse more ranks than a schedule is built of.

    Raises:
        argparse.ArgumentTypeError: they are more than `MOST_RANKS`.
    """
    if prod(shape) > MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"{'x'.join(map(str, shape))}: a schedule of more than {MOST_RANKS} ranks takes "
            "minutes and gigabytes to build; every rank does the same, so give fewer"
        )


def count(text: str) -> int:
    """A number above 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def seconds(text: str) -> float:
    """A time, of "3e-6".

    Raises:
        argparse.ArgumentTypeError: it is none, or below 0.
    """
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e9:  # of more, sums would be infinite
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds; write 3e-6, or 0")
    return number


def function(text: str) -> Callable[..., Any]:
    """What "module:function" names.

    Raises:
        argparse.ArgumentTypeError: there is none, or importing the module failed.
    """
    module, _, name = text.partition(":")
    try:
        made = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported
        if isinstance(error, SyntaxError) or _frames(error)[1:]:  # it is there, and began
            raise argparse.ArgumentTypeError(
                f"{text!r}: importing {module} failed: {in_a_line(error)}"
            ) from error
        raise argparse.ArgumentTypeError(f"{text!r} is not a module:function ({error})") from error
    try:
        return getattr(made, name)
    except AttributeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a module:function ({error})") from error


def in_a_line(error: BaseException) -> str:
    """What was raised, and where in code that is neither ours nor installed."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):  # whose words have the line
        return f"{said} ({error.filename})"
    ours = os.path.dirname(os.path.dirname(__file__)) + os.sep
    places = [f"{frame.filename}, line {frame.lineno}" for frame in _frames(error)]
    theirs = [at for at in places if "site-packages" not in at and not at.startswith(ours)]
    return f"{said} ({theirs[-1]})" if theirs else said


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Where an error went through, without what Python does to import."""
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename != importlib.__file__
    ]


def algorithm(text: str) -> Callable[..., Any]:
    """What "module:function" names, called by the name given here, and what it raises in words.

    Raises:
        argparse.ArgumentTypeError: there is none.
    """
    return _called(text, "the sizes of the axes to a Schedule", "{}, the sizes of the axes")


def program(text: str) -> Callable[..., Any]:
    """The same, called with a mesh.

    Raises:
        argparse.ArgumentTypeError: there is none.
    """
    return _called(text, "a mesh to a function and its operands", "the mesh")


def _called(text: str, does: str, given: str) -> Callable[..., Any]:
    made = function(text)
    if not callable(made):
        raise argparse.ArgumentTypeError(
            f"{text!r} is a {type(made).__name__}; name a function from {does}"
        )

    @wraps(made)
    def called(*operands: Any) -> Any:
        try:
            return made(*operands)
        except ScheduleError:  # says all
            raise
        except (Exception, SystemExit) as error:
            raise ScheduleError(
                f"--function {text}: called with {given.format(operands)}: {in_a_line(error)}"
            ) from error

    called.__name__ = text.partition(":")[2]
    return called
