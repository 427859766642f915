"""What several commands take as arguments: a collective, sizes, axes, a function by its name."""

import argparse
import importlib
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from ringcoll.algorithms import ALIASES, COLLECTIVES

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


def check_call(function: Callable[..., Any], shape: Sequence[int]) -> None:
    """See that --function can be called with the sizes of the axes.

    Raises:
        ValueError: it cannot.
    """
    try:
        signature(function).bind(*shape)
    except TypeError as error:
        raise ValueError(
            f"--function: called with {tuple(shape)}, the sizes of the axes: {error}"
        ) from error
