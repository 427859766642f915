"""Makes the site of what is written elsewhere: once in the repository, and nowhere twice.

- README, CONTRIBUTING, CHANGELOG and the pages beside the benchmarks become pages of the site.
- Lessons and tutorials become pages, with what they print, and notebooks (`notebooks.py`).
- Each example program is a page: its docstring, then its source.
- The reference has a section for each public name, and one for each command.
- A drawing, from `<!-- draw COLLECTIVE ALGORITHM N -->` to `<!-- end -->` on a page, becomes a
  picture by `ringcoll.draw`.
"""

import argparse
import ast
import inspect
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import nbformat
import notebooks
from links import ROOT, in_site, rewritten
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

from ringcoll import __main__ as commands
from ringcoll import draw

ELSEWHERE = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/README.md",
    "benchmarks/pages/*",
    "examples/*/*.svg",
)
EXAMPLES = ("examples/*.py",)
SOURCES = ("examples/lessons/[0-9]*.py", "examples/tutorials/*.py")
_CHOICE = ("ringcoll.collectives.choice", "ringcoll.choose.table")
_GATHERING = ("ringcoll.collectives.gathering", "ringcoll.collectives.visits")
#: The pages of the reference: the module that is described first, the one whose public names
#: follow, and the places that they must be defined in, if it has others too.
REFERENCE: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "collectives": ("ringcoll.lax", "ringcoll.lax", ()),
    "matmuls": ("ringcoll.matmuls.functions", "ringcoll", ("ringcoll.matmuls",)),
    "gather": ("ringcoll.collectives.gathering", "ringcoll", _GATHERING),
    "schedules": ("ringcoll.schedules.schedule", "ringcoll", ("ringcoll.schedules",)),
    "algorithms": ("ringcoll.algorithms", "ringcoll.algorithms", ("ringcoll.algorithms",)),
    "choice": ("ringcoll.choose.table", "ringcoll", _CHOICE),
    **{
        f"layers.{name}": (f"ringcoll.layers.{name}", f"ringcoll.layers.{name}", ())
        for name in ("tensor_parallel", "fsdp", "context_parallel", "expert_parallel")
    },
    **{
        name: (f"ringcoll.{name}", f"ringcoll.{name}", ())
        for name in (
            "layers",
            "costs",
            "overlap",
            "draw",
            "formats",
            "debug",
            "learn",
        )
    },
}
#: How much a page counts in a search, by its folder: who looks for a word wants it explained.
_BOOST = {"lessons": 4, "evidence": 0.5, "changelog.md": 0.5, "contributing.md": 0.5}
_DRAW = re.compile(r"<!-- draw (\w+) (\w+) (\d+) -->.*?<!-- end -->", re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of each folder into the navigation."""
    config.nav = _with_folders(config.nav)
    return config


def _with_folders(nav: Any) -> Any:
    if isinstance(nav, dict):
        return {title: _with_folders(entry) for title, entry in nav.items()}
    if isinstance(nav, str):
        return _folder(nav) if nav.endswith("/") else nav
    entries: list[Any] = []
    for entry in nav:
        found = _with_folders(entry)
        entries += found if isinstance(entry, str) and isinstance(found, list) else [found]
    return entries


def _folder(folder: str) -> list[str]:
    if folder == "reference/":
        return [f"reference/{name}.md" for name in (*REFERENCE, "commands")]
    found = (in_site(path) or "" for path in _paths((*ELSEWHERE, *EXAMPLES, *SOURCES)))
    return [page for page in found if page.startswith(folder) and page.endswith(".md")]


def _paths(patterns: tuple[str, ...]) -> Iterator[str]:
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            if path.name != "__init__.py" and path.suffix != ".json":
                yield str(path.relative_to(ROOT))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that stand elsewhere or are made here."""

    def add(where: str, content: str | bytes) -> None:
        if old := files.get_file_from_path(where):
            files.remove(old)
        files.append(File.generated(config, where, content=content))

    files.remove(files.get_file_from_path("README.md"))
    for path in _paths(ELSEWHERE):
        if path.endswith(".md"):
            text = (ROOT / path).read_text(encoding="utf-8")
            add(in_site(path), rewritten(text, path, config.extra["repository"]))
        else:
            add(in_site(path), (ROOT / path).read_bytes())
    for page, where in REFERENCE.items():
        add(f"reference/{page}.md", reference(page, *where))
    add("reference/commands.md", all_commands())
    for path in _paths(EXAMPLES):
        add(in_site(path), example(path))
    for name, content in made_of_sources(config).items():
        add(name, content)
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Say which page the logo opens. MkDocs takes only one that is in no section."""
    home = files.get_file_from_path("index.md")
    nav.homepage = home.page if home else None
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of pages in `docs`, and draw; a search finds lessons first."""
    page.meta["search"] = {"boost": _BOOST.get(page.file.src_uri.partition("/")[0], 1)}
    if not page.file.generated_by:
        markdown = rewritten(markdown, f"docs/{page.file.src_uri}", config.extra["repository"])
    return _DRAW.sub(lambda found: picture(found[1], found[2], int(found[3])), markdown)


def picture(collective: str, algorithm: str, n: int) -> str:
    """A picture for a page, drawn now."""
    plan = draw.plan(collective, algorithm, (n,))
    return notebooks.image(draw.as_svg(plan), plan.title)


def example(path: str) -> str:
    """The page of a program: its docstring, whose first line is the title, and its source."""
    source = (ROOT / path).read_text(encoding="utf-8")
    title, _, words = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    code = source.split('"""', 2)[2].strip()
    head = f"---\ntitle: {Path(path).stem}\n---\n\n"  # of the navigation, where there is less room
    return f"{head}# {title.rstrip('.')}\n\n`{path}`\n{words}\n\n```python\n{code}\n```\n"


def reference(page: str, described: str, module: str, places: tuple[str, ...]) -> str:
    """A page of the reference: the docstring of a module, then each public name."""
    listed = import_module(module)
    names = getattr(listed, "__all__", sorted(vars(listed)))
    things = {name: getattr(listed, name) for name in names if not name.startswith("_")}
    parts = [f"# {page}", f"::: {described}\n    options:\n      {_ALONE}"]
    for name, thing in things.items():
        if not inspect.ismodule(thing) and (not places or _is_of(thing, places)):
            parts.append(f"::: {module}.{name}")
    return "\n\n".join(parts)


#: Of a module: its docstring, without a heading.
_ALONE = "members: []\n      show_root_heading: false\n      show_root_toc_entry: false"


def _is_of(thing: Any, rooms: tuple[str, ...]) -> bool:
    where = getattr(thing, "__module__", None) or ""
    return any(f"{where}.".startswith(f"{room}.") for room in rooms)


def all_commands() -> str:
    """What every command says of itself and of its options."""
    parts = ["# Commands", "Each is `python -m ringcoll` and its name."]
    parser = argparse.ArgumentParser(prog="python -m ringcoll")
    choices = parser.add_subparsers()
    commands.add_commands(choices, commands.COMMANDS)
    for name, command in choices.choices.items():
        command.formatter_class = partial(argparse.RawDescriptionHelpFormatter, width=88)
        parts += [f"## {name}", f"```text\n{command.format_help()}```"]
    return "\n\n".join(parts)


def made_of_sources(config: MkDocsConfig) -> dict[str, str]:
    """Pages and notebooks of lessons and tutorials, executed two at a time."""
    repository = config.extra["repository"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        page_of = partial(_made, repository, folder, config.extra["execute"])
        return {name: text for files in pool.map(page_of, _paths(SOURCES)) for name, text in files}


def _made(repository: str, folder: str, is_executed: bool, path: str) -> list[tuple[str, str]]:
    name, page = Path(path).stem, in_site(path) or ""
    notebook = notebooks.read(ROOT / path)
    to_open = notebooks.for_readers(notebook, name, repository)
    if is_executed:
        notebooks.execute(notebook, folder)
    text = rewritten(notebooks.as_markdown(notebook, page, repository), path, repository)
    return [(page, text), (page.replace(".md", ".ipynb"), nbformat.writes(to_open))]
