"""Pages: one file of HTML that contains its style, script and data, and loads no other file."""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any


def page(title: str, body: str, script: str, data: Any) -> str:
    """The text of a page in the style that all our pages share.

    Args:
        title: the title of the window.
        body: HTML.
        script: it finds the data in the element `data`.
        data: anything that JSON can write.
    """
    # HTML ends a script at "</", so the data must not contain that.
    written = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return part(
        "ringcoll.web",
        "page.html",
        title=escape(title),
        style=part("ringcoll.web", "page.css"),
        body=body,
        data=written,
        script=script,
    )


def part(package: str, name: str, **values: str) -> str:
    """A file of a package; its $names are replaced if values are given."""
    text = files(package).joinpath(name).read_text(encoding="utf-8")
    return Template(text).substitute(values) if values else text


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table in HTML; the first row and the first column are heads."""
    head, *body = rows
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = [
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in body
    ]
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
