"""Pictures by matplotlib (the extra `bench`), which is imported only when a picture is drawn."""

import os
from io import BytesIO
from typing import Any

from ringcoll.io import files
from ringcoll.io.files import Path

#: What replaces white paper, black ink and the pale grid if the reader's device is dark.
_PAPER, _INK, _GRID = "#1c2029", "#e7e9ef", "#323947"
_DARK = (
    "@media (prefers-color-scheme:dark){"
    + "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in (("#ffffff", _PAPER), ("#000000", _INK), ("#eeeeee", _GRID))
        for what in ("fill", "stroke")
    )
    + f"text,[style='stroke: #000000']{{fill:{_INK}}}}}"  # their fill is black by default
)


def figure(call: str, path: Path, size: tuple[float, float]) -> Any:
    """An empty matplotlib figure.

    Args:
        call: the function that draws, for errors.
        path: the file, for errors.
        size: width and height in inches.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    return _matplotlib(call, path)(figsize=size, layout="constrained")


def check(call: str, path: Path) -> None:
    """Refuse a picture that cannot be drawn or written, before the work for it is done.

    Args:
        call: the function that draws, for errors.
        path: the file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: no format has this ending.
        OSError: the file cannot be written.
    """
    known = sorted(_matplotlib(call, path)().canvas.get_supported_filetypes())
    if _format(path) not in known:
        raise ValueError(
            f"Format {_format(path)!r} is not one of {', '.join(known)}; end the name with one"
        )
    files.check(path)


def save(picture: Any, path: Path) -> None:
    """Write a figure to a file; the ending of the path names the format (svg, png)."""
    from matplotlib import rc_context

    drawn = BytesIO()
    with rc_context({"svg.fonttype": "none"}):  # text as text
        picture.savefig(drawn, dpi=150, format=_format(path))
    files.write(path, in_the_dark(drawn.getvalue()))


def in_the_dark(picture: bytes) -> bytes:
    """An SVG by matplotlib, with colours for dark paper added; any other picture unchanged."""
    return picture.replace(b"</style>", f"\n{_DARK}</style>".encode(), 1)


def _format(path: Path) -> str:
    return os.path.splitext(path)[1][1:].lower()


def _matplotlib(call: str, path: Path) -> Any:
    """matplotlib's class of figures."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{call}({str(path)!r}) needs matplotlib: pip install -e '.[bench]'"
        ) from error
    return Figure
