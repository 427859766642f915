"""Where a file of the repository is in the site, and the links of a page rewritten to that."""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
#: Pages that stand elsewhere in the site than in `docs`.
MOVED = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def in_site(path: str) -> str | None:
    """Where a file of the repository is in the site; None if it is not there.

    >>> in_site("benchmarks/pages/wire.md"), in_site("docs/limits.md"), in_site("ringcoll/lax.py")
    ('evidence/wire.md', 'limits.md', None)
    >>> in_site("examples/lessons/03_backward.py")
    'lessons/03_backward.md'
    """
    if path in MOVED:
        return MOVED[path]
    folder, name = posixpath.split(path)
    if folder == "benchmarks/pages":
        return f"evidence/{name}"
    if folder == "examples":
        return f"{folder}/{name.removesuffix('.py')}.md"
    if folder in ("examples/lessons", "examples/tutorials"):
        page = f"{name.removesuffix('.py')}.md" if name.endswith(".py") else name
        return f"{posixpath.basename(folder)}/{page}"
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def rewritten(text: str, path: str, repository: str) -> str:
    """The text of a page of the repository, with links that hold in the site.

    A link to a source leads to `repository`; where that is "", it is only its text.

    >>> rewritten("[a](../docs/limits.md#programs) [b](../x.py)", "benchmarks/README.md", "")
    '[a](limits.md#programs) b'
    """
    here = posixpath.dirname(in_site(path) or "")

    def link(found: re.Match[str]) -> str:
        bang, words, target = found.groups()
        file, hash, anchor = target.partition("#")
        if not file or re.match(r"[a-z]+:", target):
            return found[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
        if to := in_site(there):
            return f"{bang}[{words}]({posixpath.relpath(to, here or '.')}{hash}{anchor})"
        return f"[{words}]({repository}/blob/main/{there})" if repository else words

    return outside_code(text, lambda part: _LINK.sub(link, part))


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Change what is not in fences."""
    done, at = [], 0
    for code in FENCED.finditer(text):
        done += [change(text[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*done, change(text[at:])])
