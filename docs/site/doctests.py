"""Docstrings end with examples that are doctests: this marks them as code.

Signatures end with `**options: Unpack[...]`: this shows the options and their defaults.
"""

import inspect
import re
from pkgutil import resolve_name
from typing import Any

import griffe

#: Lines from a `>>>` to the next empty line.
_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


def fenced(text: str) -> str:
    """A docstring with fences around its examples.

    >>> print(fenced("Sums.\\n\\n>>> 1 + 1\\n2"))
    Sums.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)


class Doctests(griffe.Extension):
    """Changes the docstring of everything that is loaded, and signatures with options."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        options = [p.name for p in func.parameters if str(p.annotation).startswith("Unpack[")]
        if not options or not hasattr(resolve_name(func.canonical_path), "__wrapped__"):
            return
        del func.parameters[options[0]]
        for name, shown in inspect.signature(resolve_name(func.canonical_path)).parameters.items():
            if name not in func.parameters:
                kind, default = griffe.ParameterKind.keyword_only, repr(shown.default)
                func.parameters.add(griffe.Parameter(name, kind=kind, default=default))
