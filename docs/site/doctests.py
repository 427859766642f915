"""Docstrings end with examples that are doctests: this marks them as code."""

import re
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
    """Changes the docstring of everything that is loaded."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
