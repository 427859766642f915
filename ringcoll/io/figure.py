"""Pictures by matplotlib, which is of the extra `bench` and imported when one is made."""

import os
from io import BytesIO
from typing import Any

from ringcoll.io import files
from ringcoll.io.files import Path


def figure(call: str, path: Path, size: tuple[float, float]) -> Any:
    """An empty one, of so many inches.

    Args:
        call: what is to draw it.
        path: of the file.
        size: width and height.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    return _matplotlib(call, path)(figsize=size, layout="constrained")


def check(call: str, path: Path) -> None:
    """Refuse a picture that could not be made or written, while no work for it is lost.

    Args:
        call: what is to draw it.
        path: of the file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: no format has such an ending.
        OSError: the file cannot be written.
    """
    known = sorted(_matplotlib(call, path)().canvas.get_supported_filetypes())
    if _format(path) not in known:
        raise ValueError(
            f"Format {_format(path)!r} is not one of {', '.join(known)}; end the name with one"
        )
    files.check(path)


def save(made: Any, path: Path) -> None:
    """Write it; the ending of the path says which format (svg, png)."""
    from matplotlib import rc_context

    drawn = BytesIO()
    with rc_context({"svg.fonttype": "none"}):  # text as text
        made.savefig(drawn, dpi=150, format=_format(path))
    files.write(path, drawn.getvalue())


def _format(path: Path) -> str:
    return os.path.splitext(path)[1][1:].lower()


def _matplotlib(call: str, path: Path) -> Any:
    """What it makes figures by."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{call}({str(path)!r}) needs matplotlib: pip install 'ringcoll[bench]'"
        ) from error
    return Figure
