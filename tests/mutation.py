"""Do the tests notice? Small wrong changes to the code, each beside the tests that must fail.

    python tests/mutation.py --list               the mutants, by room
    python tests/mutation.py                      all of them: about an hour on a core
    python tests/mutation.py --only draw          of one room
    python tests/mutation.py --only "draw 3"      one
    python tests/mutation.py --file ringcoll/collectives/front_door.py

`mutants.toml` holds them: a text that stands once in a file, what stands there instead, the harm,
and the tests that ought to notice. Each is made in a copy of the tree, never in the checkout; the
tests run in a process of their own and stop at the first that fails. The status is 1 if a mutant
survives whose entry does not say why (`survives`), or dies although it does; and 2 if a test
fails without any mutant, for then nothing can be said.

Maintained tools were looked at: mutmut forks a process in which JAX has threads already, and both
it and cosmic-ray make thousands of mutants by rule. Here each costs seconds of compiling, and a
list of faults that someone might make tells more.
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
#: After so many seconds a mutant hangs, which the suite would notice as well.
PATIENCE = 600
_LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "*.egg-info", "results")


@dataclass(frozen=True)
class Mutant:
    """A wrong change.

    Attributes:
        room: of the code, under which it is listed.
        number: within the room, from 1.
        file: that is changed, from the root.
        before: a text that stands in it once.
        after: what stands there instead.
        harm: what would go wrong.
        tests: that ought to notice, as pytest names them.
        survives: why they do not, if that is known.
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
            ValueError: there is not one place to change; the code has moved on, and so must this.
        """
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: {count} times in {self.file}: {self.before!r}")
        return text.replace(self.before, self.after)

    def __str__(self) -> str:
        return f"{self.name}: {self.file}: {self.harm}"


def mutants() -> list[Mutant]:
    """All of the list."""
    rooms = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return [Mutant(room, i, **one) for room, of in rooms.items() for i, one in enumerate(of, 1)]


def passes(tree: Path, tests: Sequence[str]) -> bool:
    """Whether tests of a tree pass; one that hangs does not.

    Raises:
        ValueError: there are no such tests.
    """
    options = ("-x", "-q", "-m", "", "-p", "no:cacheprovider")  # the exhaustive tests, too
    command = [sys.executable, "-m", "pytest", *options, *tests]
    with tempfile.TemporaryFile() as said:
        try:
            done = subprocess.run(
                command, cwd=tree, stdout=said, stderr=said, timeout=PATIENCE * len(tests)
            )
        except subprocess.TimeoutExpired:
            return False
        said.seek(0)
        if done.returncode in (4, 5):  # pytest's words for it: wrong usage, and no tests
            raise ValueError(said.read().decode(errors="replace"))
    return done.returncode == 0


def survives(mutant: Mutant, tree: Path) -> bool:
    """Whether its tests pass in a copy of the tree where the change is made, and then unmade."""
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
    """Make one after the other, say what came of it; returns the exit status."""
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
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="ROOM", help='a room, or "ROOM NUMBER"')
    parser.add_argument("--file", action="append", metavar="PATH", help="those of a file")
    parser.add_argument("--list", action="store_true", help="name them, and run nothing")
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
