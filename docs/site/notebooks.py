"""Lessons and tutorials: one source each, as a notebook to open and as a page of the site.

A source is a Python program in jupytext's percent format. A cell with the tag `solution` is code
like any other where the source runs. Readers get it folded, below an empty cell of their own.
"""

import base64
import os
import posixpath
import textwrap
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import jupytext
from links import ROOT
from nbclient import NotebookClient
from nbformat import NotebookNode, v4

#: Extras of the wheel that a notebook needs on Colab.
EXTRAS = {"06_reading_the_schedule": "[tpu]", "nnx_strategies": "[examples]"}
#: Where `mkdocs gh-deploy` puts the site, and so the notebooks.
BRANCH = "gh-pages"
_INSTALL = """\
# Run this cell first, on Colab or wherever ringcoll is not installed yet.
import importlib.util

if importlib.util.find_spec("ringcoll") is None:
    %pip install --quiet "ringcoll{extras} @ git+{repository}"
"""
#: The same where the repository has no public address.
_INSTALL_FROM_FILE = """\
# Run this cell first. Where ringcoll is not installed yet, write into RINGCOLL what pip should
# install: the path of its wheel, or of a checkout.
import importlib.util

RINGCOLL = ""

if importlib.util.find_spec("ringcoll") is None:
    if not RINGCOLL:
        raise ModuleNotFoundError("no ringcoll: write the path of its wheel into RINGCOLL")
    %pip install --quiet "{{RINGCOLL}}{extras}"
"""
_OPEN = "<details>\n<summary>Solution</summary>\n\n"


def read(source: Path) -> NotebookNode:
    """The notebook of a source, without output.

    Raises:
        ValueError: it does not begin with a title.
    """
    notebook = jupytext.read(source, fmt="py:percent")
    # What a script does by itself, such as reading its arguments, is no part of the notebook.
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type != "raw"]
    if not notebook.cells[0].source.startswith("# "):
        raise ValueError(f"{source}: its first cell is not text with a title; see the lessons")
    return notebook


def is_solution(cell: NotebookNode) -> bool:
    """Whether a cell is folded for readers."""
    return cell.cell_type == "code" and "solution" in cell.metadata.get("tags", ())


def for_readers(notebook: NotebookNode, name: str, repository: str) -> NotebookNode:
    """A notebook to open: it installs what it needs, and folds its solutions.

    Where the repository has no public address, the first cell asks for a wheel or a checkout.
    """
    opened = v4.new_notebook(metadata={"kernelspec": _KERNEL, "language_info": {"name": "python"}})
    words = _INSTALL if repository else _INSTALL_FROM_FILE
    install = words.format(extras=EXTRAS.get(name, ""), repository=repository)
    opened.cells.append(v4.new_code_cell(install, id="install"))
    for number, cell in enumerate(notebook.cells):
        if is_solution(cell):
            opened.cells.append(v4.new_code_cell("# Your own:\n", id=f"own-{number}"))
            text = f"{_OPEN}```python\n{cell.source}\n```\n\n</details>"
            opened.cells.append(v4.new_markdown_cell(text, id=f"solution-{number}"))
        else:
            copy = deepcopy(cell)
            copy.id = f"cell-{number}"
            opened.cells.append(copy)
    return opened


_KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def execute(notebook: NotebookNode, folder: str) -> None:
    """Run every cell in a process of its own, solutions too.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
        RuntimeError: a cell prints a warning.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLCONFIGDIR": folder}
    where = {"metadata": {"path": folder}}
    times = {"timeout": 600, "startup_timeout": 300}  # CI is slow at times
    quiet = ["--IPKernelApp.log_level=ERROR"]
    client = NotebookClient(
        notebook, kernel_name="python3", extra_arguments=quiet, resources=where, **times
    )
    client.execute(env=env)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr" and "Warning" in output.text:
                raise RuntimeError(f"a cell warns: {output.text}\n{cell.source}")


def as_markdown(notebook: NotebookNode, page: str, repository: str) -> str:
    """The page of a notebook, with what its cells printed."""
    title, *cells = notebook.cells
    head, _, rest = title.source.strip().partition("\n")
    return "\n\n".join([head, _buttons(page, repository), rest.strip(), *_parts(cells)]) + "\n"


def _parts(cells: list[NotebookNode]) -> Iterator[str]:
    for cell in cells:
        if cell.cell_type == "markdown":
            yield cell.source
        elif is_solution(cell):
            inner = "\n\n".join(_code(cell))
            yield '??? success "Solution"\n\n' + textwrap.indent(inner, "    ")
        elif cell.source.strip():
            yield from _code(cell)


def _buttons(page: str, repository: str) -> str:
    """Links that open the notebook."""
    notebook = page.replace(".md", ".ipynb")
    download = f"[Download the notebook]({posixpath.basename(notebook)}){{ .md-button download }}"
    if not repository:
        return (
            f"{download}\n\nIts first cell says how to install ringcoll, where it is not there yet."
        )
    github = "https://github.com/"
    if not repository.startswith(github):
        return download
    where = repository.removeprefix(github).removesuffix(".git").strip("/")
    colab = f"https://colab.research.google.com/github/{where}/blob/{BRANCH}/{notebook}"
    return f"[Open in Colab]({colab}){{ .md-button .md-button--primary }}\n{download}"


def _code(cell: NotebookNode) -> Iterator[str]:
    yield f"```python\n{cell.source}\n```"
    printed = ""
    for output in cell.get("outputs", ()):
        if output.output_type == "stream":
            if output.name == "stdout":
                printed += output.text
            continue
        if printed:
            yield _printed(printed)
            printed = ""
        yield _shown(output.data)
    if printed:
        yield _printed(printed)


def _printed(text: str) -> str:
    return f'<div class="printed" markdown>\n\n```text\n{text.rstrip()}\n```\n\n</div>'


def _shown(data: dict[str, Any]) -> str:
    if svg := data.get("image/svg+xml"):
        return image(svg, "what the cell above returns")
    if html := data.get("text/html"):
        return f"<div>\n{html}\n</div>"  # a block, in which Markdown changes nothing
    return _printed(data.get("text/plain", ""))


def image(svg: str, words: str) -> str:
    """A picture that is part of its page."""
    coded = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{words}" src="data:image/svg+xml;base64,{coded}">'
