"""What commands read and print: sizes, times, functions by name, tables."""

import argparse
import importlib
from collections.abc import Callable, Iterator, Sequence

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


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


def bytes_in_words(size: float) -> str:
    """4096 as 4K."""
    for unit in ("", "K", "M"):
        if size < 1024:
            return f"{size:.4g}{unit}"
        size /= 1024
    return f"{size:.4g}G"


def seconds_in_words(seconds: float) -> str:
    """0.00123 as 1.23 ms."""
    for unit in ("us", "ms"):
        seconds *= 1e6 if unit == "us" else 1e-3
        if seconds < 999.5:
            return f"{seconds:.3g} {unit}"
    return f"{seconds / 1e3:.4g} s"


def function(text: str) -> Callable:
    """The function that "module:function" names.

    Raises:
        argparse.ArgumentTypeError: there is none.
    """
    module, _, name = text.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no module:function ({error})") from error


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    """The lines of a table, the first columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        words = [
            f"{word:<{w}}" if i < left else f"{word:>{w}}" for i, (word, w) in enumerate(cells)
        ]
        yield "  ".join(words).rstrip()
