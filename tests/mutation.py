"""Do the tests notice? Make small wrong changes to the code, and run the tests that must fail.

    python tests/mutation.py --list               the mutants, by room
    python tests/mutation.py                      all of them: about an hour on a core
    python tests/mutation.py --only draw          the mutants of one room
    python tests/mutation.py --only "draw 3"      one mutant
    python tests/mutation.py --file ringcoll/collectives/front_door.py

`mutants.toml` lists the mutants. Each has a text that occurs once in a file, the text to put in
its place, the harm, and the tests that should notice. It is made in a copy of the tree, never in
the checkout. Its tests run in a new process and stop at the first that fails.

The status is 0 if every mutant did as its entry says. It is 1 if a mutant survives whose entry
does not say why (`survives`), or is noticed although its entry says that it survives. It is 2 if a
test fails without any mutant, because then its failure shows nothing.

Existing tools do not fit. mutmut forks a process in which JAX already has threads. Both mutmut and
cosmic-ray make thousands of mutants by rule, and here each costs seconds of compiling. A list of
faults that someone might make tells more.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent.parent
LIST = Path(__file__).with_name("mutants.toml")
#: A mutant whose tests run longer than this many seconds hangs; the suite would notice that too.
PATIENCE = 600
_LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "*.egg-info", "results")


@dataclass(frozen=True)
class Mutant:
    """A wrong change.

    Attributes:
        room: the room of the code (a subpackage); the list is ordered by rooms.
        number: its number within the room, from 1.
        file: the file that is changed, as a path from the root.
        before: a text that occurs in the file once.
        after: the text to put in its place.
        harm: what would go wrong.
        tests: the tests that should notice, as pytest names them.
        survives: why they do not notice, if that is known.
    """

    room: str
    number: int
    file: str
    before: str
    after: str
    harm: str
    tests: Sequence[str]
    survives: str = ""

    @property
    def name(self) -> str:
        return f"{self.room} {self.number}"

    def of(self, text: str) -> str:
        """The text of its file, changed.

        Raises:
            ValueError: the text does not occur exactly once; the entry must follow the code.
        """
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: {count} times in {self.file}: {self.before!r}")
        return text.replace(self.before, self.after)

    def __str__(self) -> str:
        return f"{self.name}: {self.file}: {self.harm}"


def mutants() -> list[Mutant]:
    """All mutants of the list."""
    rooms = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return [Mutant(room, i, **one) for room, of in rooms.items() for i, one in enumerate(of, 1)]


def passes(tree: Path, tests: Sequence[str]) -> bool:
    """Whether tests of a tree pass; a test that hangs does not pass.

    Raises:
        ValueError: there are no such tests.
    """
    options = ("-x", "-q", "-m", "", "-p", "no:cacheprovider")  # the exhaustive tests, too
    command = [sys.executable, "-m", "pytest", *options, *tests]
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                command, cwd=tree, stdout=output, stderr=output, timeout=PATIENCE * len(tests)
            )
        except subprocess.TimeoutExpired:
            return False
        output.seek(0)
        if done.returncode in (4, 5):  # pytest's words for it: wrong usage, and no tests
            raise ValueError(output.read().decode(errors="replace"))
    return done.returncode == 0


def survives(mutant: Mutant, tree: Path) -> bool:
    """Whether a mutant's tests pass in a copy of the tree. The change is undone afterwards."""
    path = tree / mutant.file
    text = path.read_text(encoding="utf-8")
    compiled = Path(importlib.util.cache_from_source(str(path)))
    try:
        compiled.unlink(missing_ok=True)  # it may be as old and as long
        path.write_text(mutant.of(text), encoding="utf-8")
        return passes(tree, mutant.tests)
    finally:
        compiled.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")


def run(chosen: Sequence[Mutant]) -> int:
    """Run the mutants one after the other, print their results, and return the exit status."""
    amiss = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(HERE, tree, ignore=_LEFT_OUT)
        if not passes(tree, sorted({test for mutant in chosen for test in mutant.tests})):
            print("a test fails, or hangs, without any mutant; run them as they are first")
            return 2
        for mutant in chosen:
            start = time.monotonic()
            lives = survives(mutant, tree)
            print(
                f"{'SURVIVED' if lives else 'died':8} {time.monotonic() - start:4.0f} s  {mutant}"
            )
            sys.stdout.flush()
            if lives != bool(mutant.survives):
                amiss.append(mutant)
    died = len(chosen) - sum(bool(m.survives) != (m in amiss) for m in chosen)
    print(f"{died} of {len(chosen)} died; not as listed: {', '.join(m.name for m in amiss) or '-'}")
    return int(bool(amiss))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        action="append",
        metavar="ROOM",
        help='run this room, or one mutant: "ROOM NUMBER"',
    )
    parser.add_argument(
        "--file", action="append", metavar="PATH", help="run the mutants of this file"
    )
    parser.add_argument("--list", action="store_true", help="list the mutants; run nothing")
    args = parser.parse_args(arguments)
    chosen = [
        mutant
        for mutant in mutants()
        if (not args.only or {mutant.room, mutant.name} & {*args.only})
        and (not args.file or mutant.file in args.file)
    ]
    if not chosen:
        parser.error("there is no such mutant; --list names them")
    if args.list:
        for mutant in chosen:
            print(mutant, *([f"\n    survives: {mutant.survives}"] if mutant.survives else []))
        return 0
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what is not changed is compiled once
    return run(chosen)


if __name__ == "__main__":
    sys.exit(main())
