"""Who may import what, read off the sources; and proof that the reading notices.

A room imports only from rooms above it in `ROOMS`; inside a room, imports run in no circle.
What knows no JAX imports nothing that does, one file alone sends, and nothing private of JAX is
touched. The library does not know the reader of compiled programs, and the reader knows nothing of
how the library runs.
"""

import ast
import builtins
import os
import re
import subprocess
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import jax
import pytest

import ringcoll
from benchmarks.compiled import pages

PACKAGE = Path(ringcoll.__file__).parent
#: A room is a folder, or a file beside the folders.
ROOMS = (
    "io",
    "ipython",
    "schedules",
    "algorithms",
    "costs",
    "placement",
    "runtime",
    "choose",
    "collectives",
    "matmuls",
    "lax",
    "xla_cpu",
    "layers",
    "transform",
    "__init__",
    "debug",
    "draw",
    "formats",
    "overlap",
    "learn",
    "commands",
    "__main__",
)
#: Rooms and modules that know no JAX.
WITHOUT_JAX = (
    *("io", "ipython", "schedules", "algorithms", "costs", "choose", "draw", "formats"),
    *(f"matmuls.{name}" for name in ("labels", "plans")),
)
#: All that layers may know: prices, collectives and matmuls, so that none bypasses a gradient; and
#: types. They know nothing of schedules but their names.
LAYERS_KNOW = (
    *("layers", "choose", "costs", "collectives", "matmuls"),
    *("runtime.scopes", "runtime.value_types", "schedules.registry"),
)
#: All that the reader of compiled programs may know, so that it reads anybody's programs.
OVERLAP_KNOWS = ("overlap", "placement", "costs", "io")
#: The second is for modules that the first is not for: see `Call`.
SENDERS = ("runtime.hop", "collectives.permute")
SOURCES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text(encoding="utf-8")
    for path in PACKAGE.rglob("*.py")
}
MODULES = sorted(SOURCES)


def imported(tree):
    """The full names of what a module imports, `from a import b` being a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def of_jax(tree):
    """The names under which a module knows JAX and what it imports from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                module = getattr(node, "module", None) or alias.name
                if module.split(".")[0] == "jax":
                    yield alias.asname or alias.name.split(".")[0]


def module_of(inner):
    """The module of a name inside the package; a name that is no module belongs to its package."""
    for length in range(len(inner), 0, -1):
        name = ".".join(inner[:length])
        for module in (name, f"{name}.__init__"):
            if module in SOURCES:
                return module
    return "__init__"


def is_in(module, places):
    """Whether a module is one of these places, or in one of them."""
    return any(f"{module}.".startswith(f"{place}.") for place in places)


def without_types(module, tree):
    """The code that runs: for type checkers alone, the package also names its lazy imports."""
    for node in tree.body:
        is_if = module == "__init__" and isinstance(node, ast.If)
        if is_if and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    return tree


def complaints(module, source):
    """What is wrong with a module's imports, one line each."""
    tree = without_types(module, ast.parse(source))
    room = module.split(".")[0]
    for name in imported(tree):
        root, *inner = name.split(".")
        if root not in {"ringcoll", "jax", "numpy", *sys.stdlib_module_names}:
            yield f"imports {name}: only jax, numpy and the standard library are there at run time"
        if root == "jax" and is_in(module, WITHOUT_JAX):
            yield f"imports {name}: it must not know JAX"
        if root == "jax" and any(map(is_private, inner)):
            yield f"imports {name}: it is private"
        if root == "ringcoll":
            target = module_of(inner)
            if target.split(".")[0] not in ROOMS[: ROOMS.index(room) + ("." in module)]:
                yield f"imports {name}: only {', '.join(ROOMS[: ROOMS.index(room)])} are above it"
            elif is_in(module, WITHOUT_JAX) and not is_in(target, WITHOUT_JAX):
                yield f"imports {name}: it must not know JAX, as that does"
            elif room == "layers" and not is_in(target, LAYERS_KNOW):
                yield f"imports {name}: layers are made of {', '.join(LAYERS_KNOW)} alone"
            elif room == "overlap" and not is_in(target, OVERLAP_KNOWS):
                yield f"imports {name}: overlap stands on {', '.join(OVERLAP_KNOWS)} alone"
            if any(map(is_private, inner)):
                yield f"imports {name}: it is private to {target}"
    jax_names = set(of_jax(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        path = ast.unparse(node).split(".")
        if path[0] in jax_names and any(map(is_private, path[1:])):
            yield f"uses {ast.unparse(node)}: it is private"
        if node.attr == "ppermute" and path[0] in jax_names and module not in SENDERS:
            yield f"uses {ast.unparse(node)}: only {SENDERS[0]} sends"


def circle(sources):
    """Modules that import each other in a circle, or none."""
    graph = {}
    for module, source in sources.items():
        tree = without_types(module, ast.parse(source))
        names = (name.split(".") for name in imported(tree))
        graph[module] = {module_of(inner) for root, *inner in names if root == "ringcoll"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_the_page_for_readers_has_the_files_and_their_lines():
    page = Path(pages.__file__).parents[2].joinpath("docs/reading.md").read_text()
    files = re.findall(r"^\| `([\w/.]+)`", page, re.MULTILINE)
    lines = sum(len((PACKAGE / file).read_text().splitlines()) for file in files)
    said = re.search(r"(\w+) files, about ([\d,]+) lines", page)
    assert said[1] == {6: "six", 7: "seven"}[len(files)]
    assert int(said[2].replace(",", "")) == round(lines, -2)


@pytest.mark.parametrize("module", MODULES)
def test_imports(module):
    assert list(complaints(module, SOURCES[module])) == []


def test_no_imports_run_in_a_circle():
    assert circle(SOURCES) == []
    run = "from ringcoll.runtime.looped import reduce\n"
    assert "runtime.run" in circle(
        SOURCES | {"runtime.run": run, "runtime.looped": "from ringcoll.runtime import run"}
    )


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("costs.model", "import jax.numpy as jnp", "must not know JAX"),
        ("choose.table", "from ringcoll.runtime import hop", "must not know JAX"),
        ("runtime.hop", "from jax._src import core", "private"),
        ("runtime.hop", "from jax import lax as l\nl._f", "private"),
        ("runtime.hop", "from ringcoll.collectives.placing import gather_along", "above it"),
        ("runtime.hop", "from .primitive import Collective", "standard library"),
        ("collectives.choice", "from ringcoll.collectives.placing import _start", "private to"),
        ("runtime.run", "from jax import lax\nlax.ppermute", "hop sends"),
        ("overlap.program", "from ringcoll.runtime import hop", "overlap stands on"),
        ("__init__", "from ringcoll import overlap as overlap", "above it"),
        ("lax", "if TYPE_CHECKING:\n    from ringcoll import overlap", "above it"),
        ("layers.linear", "from ringcoll.runtime.run import gather", "layers are made of"),
        ("overlap.report", "def f():\n    import matplotlib", "standard library"),
    ],
)
def test_the_rules_bite(module, source, complaint):
    assert any(complaint in found for found in complaints(module, source))
    assert not list(complaints(module, "import math\nimport numpy as np\nnp._private"))


def test_import_initialises_no_backend_and_needs_nothing_else():
    # A platform that does not exist fails as soon as a device is asked for, not before.
    program = """
import sys
import ringcoll
roots = {name.partition(".")[0] for name in sys.modules}
print(sorted(roots & {"chex", "hypothesis", "pytest", "rich", "matplotlib", "benchmarks"}))
rooms = ("debug", "draw", "formats", "layers", "learn", "overlap")
late = tuple(f"ringcoll.{name}" for name in rooms)
print([name for name in sys.modules if name.startswith(late)])
public = {*ringcoll.__all__, "__version__"}
print(set(rooms) < public == {*dir(ringcoll)}, hasattr(ringcoll, "typo"))
print(callable(ringcoll.debug.deadline), callable(ringcoll.draw.plan), ringcoll.overlap.__name__)
import jax
try:
    jax.devices()
except RuntimeError:
    print("no device was asked for before")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "JAX_PLATFORMS": "none_such"},
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    late = ["True False", "True True ringcoll.overlap"]
    assert done.stdout.split("\n")[:5] == ["[]", "[]", *late, "no device was asked for before"]


def types_in(source):
    """The public classes and types that a module defines; several may have a type variable `T`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and "TypeVar" not in ast.unparse(node.value):
            yield from re.findall(r"^[A-Z]\w*[a-z]\w*$", ast.unparse(node.targets[0]))


def test_no_two_types_have_one_name():
    counts = Counter(name for source in SOURCES.values() for name in types_in(source))
    assert len(counts) > 100
    assert [name for name, count in counts.items() if count > 1] == []


PAGE = (PACKAGE.parent / "docs/architecture.md").read_text(encoding="utf-8")
#: What each module defines, also inside of classes and functions, and their parameters.
DEFINED = {
    module: {
        node.arg if isinstance(node, ast.arg) else node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.arg)
    }
    for module, source in SOURCES.items()
}
KNOWN = {*dir(jax.lax), *dir(builtins), "check_vma"}.union(*DEFINED.values())


def missing(code):
    """What does not exist of some code in prose: a path, a name, or one such as `Class.method`."""
    if re.fullmatch(r"[\w/]+(/|\.py|\.json)", code):
        if not [*PACKAGE.rglob(code), *PACKAGE.parent.glob(code)]:
            yield code
        return
    for name in re.findall(r"([A-Za-z_][\w.]*)(?=\(|=|$)", code):
        first, *rest = name.split(".")
        found = [{"jax": jax, "lax": jax.lax, "ringcoll": ringcoll}.get(first)]
        for module, defined in DEFINED.items():
            if first in (module.rpartition(".")[2], *defined):
                owner = import_module(f"ringcoll.{module.removesuffix('__init__').rstrip('.')}")
                found.append(getattr(owner, first, owner))
        for part in rest:
            found = [getattr(owner, part) for owner in found if hasattr(owner, part)]
        if not found if rest else first not in KNOWN:
            yield name


def test_the_prose_of_the_page_names_what_exists():
    prose = PAGE.partition("<!-- rooms -->")[0]
    codes = {code for code in re.findall(r"`([^`]+)`", prose) if not code.startswith("python ")}
    assert len(codes) > 50
    assert [name for code in codes for name in missing(code)] == []
    wrong = ["added_up", "engine.add", "Psum.lowered", "no/", "hops.py", "psum(x, to_all=1)"]
    assert [name for code in wrong for name in missing(code)] == [*wrong[:-1], "to_all"]


def test_the_page_has_every_room_in_this_order_and_its_docstring():
    shown = [re.sub(r"/|\.py", "", name) for name in pages.ROOM.findall(PAGE)]
    assert shown == [room for room in ROOMS if not room.startswith("__")]
    assert pages.with_rooms(PAGE) == PAGE, "python -m benchmarks claims --write"
