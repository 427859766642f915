"""What several commands take as arguments: a collective, numbers, axes, a function by its name."""

import argparse
import importlib
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

from ringcoll.algorithms import ALIASES, COLLECTIVES
from ringcoll.schedule import ScheduleError

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def add_collective(parser: argparse.ArgumentParser) -> None:
    """Declare COLLECTIVE."""
    known = [*COLLECTIVES, *(f"{alias} ({name})" for alias, name in ALIASES.items())]
    choices = [*COLLECTIVES, *ALIASES]
    parser.add_argument("collective", choices=choices, metavar="COLLECTIVE", help=", ".join(known))


def size(text: str) -> int:
    """Bytes, of "512", "1K", "64M" or "1G".

    Raises:
        argparse.ArgumentTypeError: it is none of these, or 0.
    """
    number, unit = (
        (text[:-1], _UNITS[text[-1].upper()]) if text[-1:].upper() in _UNITS else (text, 1)
    )
    if not number.isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 512, 1K, 64M or 1G")
    return int(number) * unit


def shape(text: str) -> tuple[int, ...]:
    """The sizes of axes, major first, of "8" or "4x2".

    Raises:
        argparse.ArgumentTypeError: it is none of these, or 0.
    """
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: give sizes above 0, such as 4x2")
    return tuple(map(int, sizes))


def count(text: str) -> int:
    """A number above 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
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
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds; write 3e-6, or 0")
    return number


def function(text: str) -> Callable[..., Any]:
    """What "module:function" names.

    Raises:
        argparse.ArgumentTypeError: there is none.
    """
    module, _, name = text.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no module:function ({error})") from error


def algorithm(text: str) -> Callable[..., Any]:
    """What "module:function" names, called by the name given here, and what it raises in words.

    Raises:
        argparse.ArgumentTypeError: there is none.
    """
    made = function(text)
    if not callable(made):
        raise argparse.ArgumentTypeError(
            f"{text!r} is a {type(made).__name__}; name a function from the sizes of the axes "
            "to a Schedule"
        )

    @wraps(made)
    def called(*shape: int) -> Any:
        try:
            return made(*shape)
        except ScheduleError:  # says all
            raise
        except Exception as error:
            *_, last = traceback.extract_tb(error.__traceback__)
            raise ScheduleError(
                f"--function {text}: called with {shape}, the sizes of the axes: "
                f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
            ) from error

    called.__name__ = text.partition(":")[2]
    return called
