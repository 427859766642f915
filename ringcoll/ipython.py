"""How IPython and Jupyter show a schedule, a plan and a price: as pictures and tables.

`import ringcoll` registers this in a running IPython. If ringcoll was imported before IPython
started, register it by `%load_ext ringcoll`.
"""

import sys
from functools import partial
from importlib import import_module
from typing import Any

#: For each type: what a notebook shows, the type's module and name, and the function that makes it,
#: as `ringcoll.draw.notebook` knows it.
_FORMATS = (
    ("image/svg+xml", "ringcoll.schedules.schedule", "Schedule", "schedule_svg"),
    ("image/svg+xml", "ringcoll.draw.plan", "Execution", "as_svg"),
    ("text/html", "ringcoll.costs.counts", "Price", "price_html"),
)


def load_ipython_extension(shell: Any) -> None:
    """Register a function for each type; `draw` is imported when the first value is shown."""
    for mime, module, name, function in _FORMATS:
        formatter = shell.display_formatter.formatters[mime]
        formatter.for_type_by_name(module, name, partial(_formatted, function))


def _formatted(function: str, value: object) -> str | None:
    """The picture or table of a value; None if it is wrong or too large to draw."""
    try:
        return getattr(import_module("ringcoll.draw.notebook"), function)(value)
    except ValueError:
        return None


def register() -> None:
    """Register in the IPython that runs, if one does."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython else None
    if shell is not None:
        load_ipython_extension(shell)
