"""What several commands take as arguments: axes, and a function by its name."""

import argparse
import importlib
from collections.abc import Callable
from typing import Any


def shape(text: str) -> tuple[int, ...]:
    """The sizes of axes, major first, of "8" or "4x2"."""
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: give sizes above 0, such as 4x2")
    return tuple(map(int, sizes))


def function(text: str) -> Callable[..., Any]:
    """What "module:function" names."""
    module, _, name = text.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no module:function ({error})") from error
