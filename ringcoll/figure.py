"""Pictures by matplotlib, which is of the extra `bench` and imported when one is made."""

from os import PathLike
from typing import Any

Path = str | PathLike[str]


def figure(call: str, path: Path, size: tuple[float, float]) -> Any:
    """An empty one, of so many inches.

    Args:
        call: what is to draw it.
        path: of the file.
        size: width and height.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{call}({str(path)!r}) needs matplotlib: pip install 'ringcoll[bench]'"
        ) from error
    return Figure(figsize=size, layout="constrained")


def save(made: Any, path: Path) -> None:
    """Write it; the ending of the path says which format (svg, png)."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):  # text as text
        made.savefig(path, dpi=150)
