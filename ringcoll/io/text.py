"""Sizes and times in words, tables, lines and unknown names, as commands print them."""

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

#: The most columns that a command prints.
WIDTH = 100


def columns() -> int:
    """The columns of the terminal, at most `WIDTH`."""
    return min(shutil.get_terminal_size().columns, WIDTH)


def wrapped(lines: Iterable[str], then: str = "      ", width: int = WIDTH) -> Iterator[str]:
    """The lines, each of at most `width` columns; `then` begins what goes on below."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent=then, break_on_hyphens=False)
    for line in lines:
        yield from wrapper.wrap(line) or [line]


def guess(name: object, known: Sequence[str]) -> str:
    """The question for an unknown name, with the known name that is nearest; "" if none is near."""
    near = get_close_matches(str(name), known, 1)
    return f"did you mean {near[0]!r}?" if near else ""


def choose(name: object, known: Iterable[str]) -> str:
    """The cure for an unknown name: the known name that is nearest, then all names."""
    names = [*known]
    return f"{guess(name, names)} choose from {', '.join(names)}".lstrip()


def bytes_in_words(size: float) -> str:
    """A number of bytes in words: 4096 is "4K"."""
    for unit in ("", "K", "M"):
        if size < 1024:
            return f"{size:.4g}{unit}"
        size /= 1024
    return f"{size:.4g}G"


def seconds_in_words(seconds: float) -> str:
    """A time in words: 0.00123 is "1.23 ms"."""
    for unit in ("us", "ms"):
        seconds *= 1e6 if unit == "us" else 1e-3
        if seconds < 999.5:
            return f"{seconds:.3g} {unit}"
    return f"{seconds / 1e3:.4g} s"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    """The lines of a table. The first `left` columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        words = [
            f"{word:<{w}}" if i < left else f"{word:>{w}}" for i, (word, w) in enumerate(cells)
        ]
        yield "  ".join(words).rstrip()
