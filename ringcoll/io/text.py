"""Sizes and times in words, and tables, as commands print them."""

from collections.abc import Iterator, Sequence


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
