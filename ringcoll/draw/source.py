"""The source code of an algorithm, as text and as HTML with highlighting."""

import ast
import inspect
import keyword
import re
import textwrap
from collections.abc import Callable
from functools import partial
from html import escape
from typing import Any


def source(function: Callable[..., Any]) -> str:
    """The source of a function without wrappers and docstring; "" if Python cannot find it."""
    try:
        code = textwrap.dedent(inspect.getsource(_undecorated(function)))
        (definition,) = ast.parse(code).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""
    lines = code.splitlines(keepends=True)
    if isinstance(definition, ast.FunctionDef) and ast.get_docstring(definition):
        doc = definition.body[0]
        del lines[doc.lineno - 1 : doc.end_lineno]
    return "".join(lines).rstrip()


def paragraphs(function: Callable[..., Any]) -> list[str]:
    """The paragraphs of a docstring, without examples; the first is one line."""
    doc = inspect.getdoc(_undecorated(function)) or ""
    parts = [part.strip() for part in doc.split("\n\n")]
    return [" ".join(part.split()) for part in parts if part and not part.startswith(">>>")]


def _undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside decorators and partials."""
    while isinstance(unwrapped := inspect.unwrap(function), partial):
        function = unwrapped.func
    return unwrapped


def highlight(code: str) -> str:
    """The code as HTML, with a span for each keyword, string, comment, number and name."""
    spans, end = [], 0
    for word in _WORD.finditer(code):
        spans.append(escape(code[end : word.start()]))
        spans.append(f'<span class="{word.lastgroup}">{escape(word[0])}</span>')
        end = word.end()
    return "".join(spans) + escape(code[end:])


#: The words that get a colour. The name of a group is the class of the span.
_WORD = re.compile(
    r"""(?P<comment>\#.*)
    | (?P<string>(?:\b[bfruBFRU]{1,2})?(?:\"{3}(?s:.*?)\"{3} | '{3}(?s:.*?)'{3}
        | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'))
    | (?P<name>(?<=\bdef\ )\w+ | (?<=\bclass\ )\w+)
    | (?P<keyword>\b(?:KEYWORDS)\b)
    | (?P<number>\b\d[\w.]*)""".replace("KEYWORDS", "|".join(keyword.kwlist)),
    re.VERBOSE,
)
