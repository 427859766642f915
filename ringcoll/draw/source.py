"""The source code of an algorithm, as text and as HTML with highlighting."""

import ast
import inspect
import keyword
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from functools import partial
from html import escape
from io import StringIO
from typing import Any


def source(function: Callable[..., Any]) -> str:
    """The source of a function without wrappers and docstring; "" if Python cannot find it."""
    try:
        code = textwrap.dedent(inspect.getsource(_undecorated(function)))
        (definition,) = ast.parse(code).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""
    lines = code.splitlines(keepends=True)
    if (
        isinstance(definition, ast.FunctionDef)
        and ast.get_docstring(definition)
        and len(definition.body) > 1
    ):
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
    lines = code.splitlines(keepends=True)
    spans, row, column = [], 1, 0
    for kind, (start_row, start), (end_row, end) in _words(code):
        spans.append(escape(_between(lines, (row, column), (start_row, start))))
        word = escape(_between(lines, (start_row, start), (end_row, end)))
        spans.append(f'<span class="{kind}">{word}</span>')
        row, column = end_row, end
    return "".join(spans) + escape(_between(lines, (row, column), (len(lines) + 1, 0)))


def _words(code: str) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """The kind, start and end of each word that gets a colour; a place is (row from 1, column)."""
    strings = {tokenize.STRING} | {
        getattr(tokenize, name, -1)  # since Python 3.12
        for name in ("FSTRING_START", "FSTRING_MIDDLE", "FSTRING_END")
    }
    before = ""
    for token in tokenize.generate_tokens(StringIO(code).readline):
        kind = ""
        if token.type == tokenize.COMMENT:
            kind = "comment"
        elif token.type in strings:
            kind = "string"
        elif token.type == tokenize.NUMBER:
            kind = "number"
        elif token.type == tokenize.NAME and keyword.iskeyword(token.string):
            kind = "keyword"
        elif token.type == tokenize.NAME and before in ("def", "class"):
            kind = "name"
        if kind:
            yield kind, token.start, token.end
        before = token.string


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """The text from one place to another."""
    (row, column), (end_row, end_column) = start, end
    if row == end_row:
        return lines[row - 1][column:end_column] if row <= len(lines) else ""
    last = lines[end_row - 1][:end_column] if end_row <= len(lines) else ""
    return lines[row - 1][column:] + "".join(lines[row : end_row - 1]) + last
