"""Do the tests notice? Make small wrong changes at random places of a room, and run its tests.

    python tests/mutation.py collectives -n 40 --seed 1
    python tests/mutation.py matmuls/plans.py -n 10 --tests tests/matmuls tests/costs

A room is a folder or a file of `ringcoll/`. Its tests are those of the same folder of `tests/`,
without the exhaustive ones, unless `--tests` names others. Each change is made in a copy of the
tree, and its tests stop at the first that fails. What survives is printed with its line: read
whether it is a fault that no test notices, or a program that is as right as before.

Existing tools do not fit: mutmut forks a process in which JAX already has threads; cosmic-ray
lists every mutant in a database first; and neither drops arguments or swaps them.
"""

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

HERE = Path(__file__).parent.parent
#: A mutant whose tests run longer than this many seconds hangs; the suite would notice that too.
PATIENCE = 1200
_LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "*.egg-info", "results")
_SWAPS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
#: Methods that return a changed array, so a call of them can be forgotten.
_CHANGES = ("astype", "reshape", "swapaxes", "transpose", "conj")


class Mutant(NamedTuple):
    """A wrong change of a file.

    Attributes:
        file: as a path from the root.
        tree: the syntax of the whole file.
        place: the parent of the node that changes, its field, and its index if the field is a list.
        node, slip: what is there, and what comes in its place.
    """

    file: Path
    tree: ast.Module
    place: tuple[ast.AST, str, int | None]
    node: ast.AST
    slip: ast.AST

    def text(self) -> str:
        """The text of the file with the change."""
        self._put(self.slip)
        text = ast.unparse(ast.fix_missing_locations(self.tree))
        self._put(self.node)
        return text

    def _put(self, node: ast.AST) -> None:
        parent, field, index = self.place
        if index is None:
            setattr(parent, field, node)
        else:
            getattr(parent, field)[index] = node

    def __str__(self) -> str:
        line = getattr(self.node, "lineno", 0)
        return f"{self.file}:{line}: {_short(self.node)}  ->  {_short(self.slip)}"


def _short(node: ast.AST) -> str:
    """The first line of a node's code."""
    return ast.unparse(node).splitlines()[0]


def slips(node: ast.AST) -> Iterator[ast.AST]:
    """What someone might have written by accident in place of an expression or a statement."""

    def changed(**fields: object) -> ast.AST:
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    def without(items: list, i: int) -> list:
        return items[:i] + items[i + 1 :]

    match node:
        case ast.Call(func=function, args=args, keywords=keywords):
            for i, keyword in enumerate(keywords):
                if keyword.arg != "strict":
                    yield changed(keywords=without(keywords, i))
            if len(args) > 1 and ast.dump(args[0]) != ast.dump(args[1]):
                yield changed(args=[args[1], args[0], *args[2:]])
            if isinstance(function, ast.Attribute) and function.attr in _CHANGES:
                yield function.value
        case ast.BinOp(op=op) if type(op) in _SWAPS:
            yield changed(op=_SWAPS[type(op)]())
        case ast.BoolOp(op=op, values=values):
            yield changed(op=_SWAPS[type(op)]())
            yield values[0]
            yield values[-1]
        case ast.Compare(ops=[op]) if type(op) in _SWAPS:
            yield changed(ops=[_SWAPS[type(op)]()])
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse
        case ast.Tuple(elts=[first, second], ctx=ast.Load()) if ast.dump(first) != ast.dump(second):
            yield changed(elts=[second, first])
        case ast.Constant(value=bool(value)):
            yield changed(value=not value)
        case ast.Constant(value=int(value)):
            yield changed(value=value + 1)
        case ast.If():
            yield changed(test=ast.Constant(True))
            yield changed(test=ast.Constant(False))
        case ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield ast.Pass()


def places(tree: ast.Module) -> list[tuple[ast.AST, str, int | None]]:
    """Where a slip can be: the parent, its field, and the index if the field is a list.

    Not in annotations, decorators, messages of errors, what only type checkers read, and `strict`
    of `zip`, which only checks.
    """
    found: list[tuple[ast.AST, str, int | None]] = []

    def visit(parent: ast.AST) -> None:
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for i, child in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(child, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
                    continue
                if isinstance(child, ast.keyword) and child.arg == "strict":
                    continue
                if not isinstance(child, ast.AST) or "TYPE_CHECKING" in ast.dump(child)[:60]:
                    continue
                found.append((parent, field, i if isinstance(value, list) else None))
                visit(child)

    visit(tree)
    return found


def mutants(file: Path) -> list[Mutant]:
    """Every mutant of a file."""
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    made = []
    for place in places(tree):
        parent, field, index = place
        node = getattr(parent, field) if index is None else getattr(parent, field)[index]
        made += [Mutant(file, tree, place, node, slip) for slip in slips(node)]
    return made


def survives(mutant: Mutant, tree: Path, tests: Sequence[str]) -> bool:
    """Whether all tests of a copy of the tree pass with a mutant, which is undone afterwards."""
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8")
    path.write_text(mutant.text(), encoding="utf-8")
    try:
        return passes(tree, tests)
    finally:
        path.write_text(text, encoding="utf-8")


def passes(tree: Path, tests: Sequence[str]) -> bool:
    """Whether tests of a tree pass. A test that hangs does not pass.

    Raises:
        ValueError: there are no such tests.
    """
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode in (4, 5):  # pytest's numbers for wrong usage, and for no tests
        raise ValueError(done.stdout.decode() + done.stderr.decode())
    return done.returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a mutant survives, 2 if the tests fail without any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("room", type=Path, help="a folder or a file of ringcoll/")
    parser.add_argument("-n", type=int, default=40, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="in place of the room's own")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    args = parser.parse_args(arguments)
    source = HERE / "ringcoll" / args.room
    files = sorted(source.rglob("*.py")) if source.is_dir() else [source]
    every = [mutant for file in files for mutant in mutants(file.relative_to(HERE))]
    chosen = random.Random(args.seed).sample(every, min(args.n, len(every)))
    tests = args.tests or [f"tests/{args.room.parts[0]}"]

    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for job in range(args.jobs):
            trees.put(Path(shutil.copytree(HERE, f"{folder}/{job}", ignore=_LEFT_OUT)))
        if not passes(trees.queue[0], tests):
            print("the tests fail, or hang, without any mutant")
            return 2

        def died(mutant: Mutant) -> bool:
            tree = trees.get()
            try:
                return not survives(mutant, tree, tests)
            finally:
                trees.put(tree)

        dead = 0
        with ThreadPoolExecutor(args.jobs) as pool:
            for mutant, has_died in zip(chosen, pool.map(died, chosen), strict=True):
                dead += has_died
                if not has_died:
                    print(f"survived: {mutant}", flush=True)
    print(f"{dead} of {len(chosen)} mutants of {args.room} died (seed {args.seed})")
    return int(dead < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
