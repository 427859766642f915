"""Who may import what, read off the sources; and proof that the reading notices.

A module imports only from modules above it in `ORDER`. Those `WITHOUT_JAX` know nothing of
it, one alone sends, and nothing private of JAX is touched. What reads compiled programs
stands below the library, so that the library cannot know it.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ringcoll

PACKAGE = Path(ringcoll.__file__).parent
ORDER = (
    "schedule",
    "listing",
    "algorithms",
    "phases",
    "slices",
    "routing",
    "pricing",
    "formulas",
    "precision",
    "cost",
    "matmul_cost",
    "files",
    "strict",
    "bounds",
    "table",
    "manual",
    "marks",
    "lowered",
    "joining",
    "loops_on_cpu",
    "hosts",
    "built_in",
    "choice",
    "axes",
    "primitive",
    "wire",
    "messages",
    "order",
    "engine",
    "turns",
    "pieces",
    "visitors",
    "scheduled",
    "refusals",
    "calls",
    "gathers",
    "all_to_alls",
    "all_reduces",
    "broadcasts",
    "permutes",
    "labels",
    "quickest",
    "forms",
    "how",
    "products",
    "factors",
    "matmuls",
    "sharded",
    "lax",
    "layers.parameters",
    "layers.replicas",
    "layers.linear",
    "layers.transformer",
    "layers.vocabulary",
    "layers.norms",
    "layers.randomness",
    "layers.tensor_parallel",
    "layers.gathered",
    "layers.scan",
    "layers.fsdp",
    "layers.__init__",
    "__init__",
    "debug.program",
    "debug.calls",
    "debug.consistent",
    "debug.watchdog",
    "debug.__init__",
    "text",
    "figure",
    "arguments",
    "draw.plan",
    "draw.steps",
    "draw.words",
    "draw.text",
    "draw.looks",
    "draw.legend",
    "draw.places",
    "draw.routes",
    "draw.picture",
    "draw.svg",
    "draw.source",
    "draw.page",
    "draw.command",
    "draw.__init__",
    "commands.__init__",
    "commands.plot",
    "commands.machine",
    "commands.cost",
    "commands.explain",
    "overlap.hlo",
    "overlap.work",
    "overlap.loops",
    "overlap.chips",
    "overlap.network",
    "overlap.embedding",
    "overlap.transfers",
    "overlap.lines",
    "overlap.costs",
    "overlap.roles",
    "overlap.pending",
    "overlap.timeline",
    "overlap.draw",
    "overlap.report",
    "overlap.advice",
    "overlap.budget",
    "overlap.gpus",
    "overlap.topology",
    "overlap.program",
    "overlap.child",
    "overlap.compilation",
    "overlap.reading",
    "overlap.examples",
    "overlap.limits",
    "overlap.command",
    "overlap.__init__",
    "__main__",
)
#: Drawing and reports come before what asks JAX for devices.
WITHOUT_JAX = (
    *ORDER[: ORDER.index("manual")],
    "labels",
    "quickest",
    *ORDER[ORDER.index("text") : ORDER.index("overlap.gpus")],
)
#: All that layers may know: types, collectives and matmuls, so that none bypasses a gradient.
LAYERS_KNOW = (
    *("layers", "table", "manual", "calls", "matmuls"),
    *("gathers", "all_to_alls", "all_reduces", "broadcasts", "permutes"),
)
LAZILY = {"figure": "matplotlib"}  # of the extra bench, and only when it is drawn
SENDERS = ("wire", "permutes")  # the second where the first is not for it: see `Call`
SOURCES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text(encoding="utf-8")
    for path in PACKAGE.rglob("*.py")
}


def imported(tree):
    """The full names of what a module imports, `from a import b` being a.b."""
    for node in ast.walk(tree):
        yield from imported_by(node)


def imported_by(node):
    """Those of one statement."""
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
                whole = getattr(node, "module", None) or alias.name
                if whole.split(".")[0] == "jax":
                    yield alias.asname or alias.name.split(".")[0]


def room(inner):
    """The module that a name inside the package is of; what is no module is its package's."""
    whole = ".".join(inner)
    names = [n.removesuffix(".__init__") for n in ORDER if n != "__init__"]
    within = [name for name in names if f"{whole}.".startswith(f"{name}.")]
    return max(within, key=len, default="__init__")


def without_types(module, tree):
    """What runs: the package names for type checkers what it imports when it is asked for."""
    for node in tree.body:
        is_if = module == "__init__" and isinstance(node, ast.If)
        if is_if and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    return tree


def complaints(module, source):
    """What is wrong with a module's imports, one line each."""
    tree = without_types(module, ast.parse(source))
    late = {node for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f)}
    early = [node for node in ast.walk(tree) if node not in late]
    for name in imported(tree):
        root, *inner = name.split(".")
        if root == LAZILY.get(module):
            if name in {n for node in early for n in imported_by(node)}:
                yield f"imports {name}: only inside the function that needs it"
        elif root not in {"ringcoll", "jax", "numpy", *sys.stdlib_module_names}:
            yield f"imports {name}: only jax, numpy and the standard library are there at run time"
        if root == "jax" and module in WITHOUT_JAX:
            yield f"imports {name}: it must not know JAX"
        if root == "jax" and any(map(is_private, inner)):
            yield f"imports {name}: it is private"
        if root == "ringcoll":
            above = [n.removesuffix(".__init__") for n in ORDER[: ORDER.index(module)]]
            if not inner or room(inner) not in above:
                yield f"imports {name}: only {', '.join(above)} are above it"
            elif module.startswith("layers.") and room(inner).split(".")[0] not in LAYERS_KNOW:
                yield f"imports {name}: layers are made of {', '.join(LAYERS_KNOW)} alone"
            if any(map(is_private, inner)):
                yield f"imports {name}: it is private to {room(inner)}"
    jax_names = set(of_jax(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        path = ast.unparse(node).split(".")
        if path[0] in jax_names and any(map(is_private, path[1:])):
            yield f"uses {ast.unparse(node)}: it is private"
        is_lax_s = path[0] in {*jax_names, "built_in"}
        if node.attr == "ppermute" and is_lax_s and module not in SENDERS:
            yield f"uses {ast.unparse(node)}: only wire sends"


def test_every_module_has_its_place():
    assert set(SOURCES) == set(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_imports(module):
    assert list(complaints(module, SOURCES[module])) == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("cost", "import jax.numpy as jnp", "must not know JAX"),
        ("table", "from jax import Array", "must not know JAX"),
        ("cost", "def f():\n    import jax", "must not know JAX"),
        ("wire", "from jax._src import core", "private"),
        ("wire", "import jax._src.core", "private"),
        ("wire", "import jax\njax._src.core.f()", "private"),
        ("wire", "import jax as j\nj.numpy._f", "private"),
        ("wire", "from jax import lax as l\nl._f", "private"),
        ("wire", "from ringcoll.engine import gather", "above it"),
        ("wire", "from ringcoll import scheduled", "above it"),
        ("wire", "import ringcoll", "above it"),
        ("wire", "from .primitive import Collective", "standard library"),
        ("scheduled", "from ringcoll.visitors import _start", "private to visitors"),
        ("engine", "from jax import lax\nlax.ppermute(x, 'x', [])", "only wire sends"),
        ("engine", "import jax\njax.lax.ppermute", "only wire sends"),
        ("engine", "from ringcoll import built_in\nbuilt_in.ppermute", "only wire sends"),
        ("calls", "import chex", "standard library"),
        ("overlap.hlo", "import jax", "must not know JAX"),
        ("overlap.hlo", "from ringcoll.overlap.work import flops", "above it"),
        ("overlap.hlo", "from ringcoll import overlap", "above it"),
        ("__init__", "from ringcoll import overlap as overlap", "above it"),
        ("gathers", "from ringcoll.overlap.chips import CHIPS", "above it"),
        ("gathers", "if TYPE_CHECKING:\n    from ringcoll import overlap", "above it"),
        ("__init__", "if OTHER:\n    from ringcoll import overlap", "above it"),
        ("layers.linear", "from ringcoll.engine import gather", "layers are made of"),
        ("layers.linear", "from ringcoll.products import gathered", "layers are made of"),
        ("layers.linear", "from ringcoll.layers.norms import rms_norm", "above it"),
        ("figure", "from matplotlib.figure import Figure", "only inside the function"),
        ("overlap.report", "def f():\n    import matplotlib", "standard library"),
    ],
)
def test_the_rules_bite(module, source, complaint):
    assert any(complaint in said for said in complaints(module, source))
    assert not list(complaints(module, "import math\nimport numpy as np\nnp._private"))


@pytest.mark.parametrize("module", ORDER)
def test_files_are_short(module):
    assert len(SOURCES[module].splitlines()) < 300


def test_import_initialises_no_backend_and_needs_nothing_else():
    # A platform that does not exist fails as soon as a device is asked for, not before.
    program = """
import sys
import ringcoll
roots = {name.partition(".")[0] for name in sys.modules}
print(sorted(roots & {"chex", "hypothesis", "pytest", "rich", "matplotlib", "benchmarks"}))
late = ("ringcoll.overlap", "ringcoll.draw", "ringcoll.debug")
print([name for name in sys.modules if name.startswith(late)])
shown = {*ringcoll.__all__, "overlap", "draw", "debug", "__version__"}
print(set(dir(ringcoll)) == shown, hasattr(ringcoll, "typo"))
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
