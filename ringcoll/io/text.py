"""Sizes and times in words, tables, lines and unknown names, as commands print them."""

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import zip_longest

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


def seconds_in_words(seconds: float, like: float | None = None) -> str:
    """A time in words: 0.00123 is "1.23 ms". All times of a table have the unit of one, `like`."""
    units, most = {"us": 1e6, "ms": 1e3, "s": 1.0}, seconds if like is None else like
    unit = next((unit for unit, count in units.items() if most * count < 999.5), "s")
    count, digits = seconds * units[unit], 4 if unit == "s" else 3
    return f"{count:.0f} {unit}" if count >= 999.5 else f"{count:.{digits}g} {unit}"


def folded(rows: Sequence[Sequence[str]], width: int = WIDTH) -> list[tuple[str, ...]]:
    """The rows of a table in which cells of the widest columns go on below, but no word is cut."""
    columns = [*zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    least = [max(map(len, " ".join(column).split())) for column in columns]
    while sum(widths) + 2 * (len(widths) - 1) > width and widths != least:
        spare = [have if have > need else 0 for have, need in zip(widths, least, strict=True)]
        widths[spare.index(max(spare))] -= 1
    wrap = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)
    cells = [map(wrap, row, widths) for row in rows]
    return [line for row in cells for line in zip_longest(*row, fillvalue="")]


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    """The lines of a table. The first `left` columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        words = [
            f"{word:<{w}}" if i < left else f"{word:>{w}}" for i, (word, w) in enumerate(cells)
        ]
        yield "  ".join(words).rstrip()
