"""Claims: the figures on the pages about programs that were compiled, but not run.

`claims.json` holds all claims, `benchmarks.compiled.pages` shows them in tables, and
`python -m benchmarks claims` computes them again.
"""

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from benchmarks.compiled import (
    collectives,
    compiling,
    context,
    experts,
    grid,
    meshes,
    recipes,
)
from benchmarks.compiled.program_figures import Figures
from ringcoll import overlap
from ringcoll.costs import slices
from ringcoll.io.files import write

FILE = Path(__file__).with_name("claims.json")
#: How far a claim may be off: a share of its time, points of exposure, and a share of its
#: temporaries (or 1 MiB, if that is more).
TOLERANCE = {"time": 0.02, "exposed_points": 1.0, "temporaries": 0.02}

#: The commands, and the functions that make programs from their flags.
COMPILED: Mapping[str, compiling.Make] = {
    "overlap": grid.program,
    "collectives": collectives.program_of,
    "context": context.program_of,
    "experts": experts.program_of,
    "recipes": recipes.program_of,
    "meshes": meshes.program_of,
}


@dataclass(frozen=True)
class ClaimedProgram:
    """A program by its command in `python -m benchmarks`, and its flags.

    Attributes:
        run: the command.
        flags: names and values, sorted.
    """

    run: str
    flags: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, run: str, flags: Mapping[str, str]) -> "ClaimedProgram":
        """A program by its flags, in any order."""
        return cls(run, tuple(sorted(flags.items())))

    @property
    def command(self) -> str:
        """The command that prints its figures."""
        flags = [f"--{name} {value}" for name, value in self.flags]
        return " ".join(["python -m benchmarks", self.run, *flags])


@dataclass(frozen=True)
class Claim:
    """The figures of a program.

    Attributes:
        which: the program.
        jax, compiler: the versions that gave these figures.
        total_us: microseconds.
        exposed_percent: the percentage of the time that is exposed communication.
        temporaries: bytes.
        digest: the result of `digest` when the figures were saved.
    """

    which: ClaimedProgram
    jax: str
    compiler: str
    total_us: float
    exposed_percent: float
    temporaries: int
    digest: str | None = None

    def off(self, now: "Claim") -> list[str]:
        """The names of the figures that are off by more than `TOLERANCE`."""
        words = []
        if abs(now.total_us - self.total_us) > TOLERANCE["time"] * self.total_us:
            words.append("time")
        if abs(now.exposed_percent - self.exposed_percent) > TOLERANCE["exposed_points"]:
            words.append("exposure")
        off, least = abs(now.temporaries - self.temporaries), 2**20
        if off > max(TOLERANCE["temporaries"] * self.temporaries, least):
            words.append("temporaries")
        return words


def find(which: ClaimedProgram, cache: str | None = None) -> Claim:
    """Compile a program, here and now.

    Args:
        which: the program.
        cache: a folder of compiled programs; see `benchmarks.compiled.program_cache`.

    Raises:
        Exception: whatever JAX or the compiler raises.
    """
    found, _ = compiling.compile_one(dict(which.flags), COMPILED[which.run], cache=cache)
    return of_found(which, found)


@cache
def digest(which: ClaimedProgram) -> str:
    """A digest of everything that determines the figures of a program.

    That is what is compiled and the compiler, and the code and the chips that give times. As long
    as it is equal to the digest of a claim, to compute again would give the same figures.
    """
    program = compiling.key(dict(which.flags), COMPILED[which.run])
    return sha256(f"{program} {_timing((overlap, slices))}".encode()).hexdigest()[:16]


@cache
def _timing(modules: tuple[ModuleType, ...]) -> str:
    """The code of modules and packages that give times, and the rates of the chips.

    Comments and docstrings are left out.
    """
    files = [path for module in modules for path in _files(module)]
    code = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    for node in (node for tree in code for node in ast.walk(tree)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            del node.body[0]
    return "\n".join([*sorted(map(ast.unparse, code)), repr(sorted(overlap.CHIPS.items()))])


def _files(module: ModuleType) -> list[Path]:
    file = Path(module.__file__ or "")
    return sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]


def of_found(which: ClaimedProgram, found: Figures) -> Claim:
    """The figures of a compiled program as a claim."""
    return Claim(
        which,
        jax.__version__,
        compiler(),
        round(found.total, 2),
        round(100 * found.exposed / found.total, 2),
        found.temporaries or 0,
    )


def compiler() -> str:
    """The name and version of the compiler for TPUs."""
    try:
        return f"libtpu {version('libtpu')}"
    except PackageNotFoundError:
        return "no libtpu"  # no claim names such a compiler


def load(file: Path = FILE) -> list[Claim]:
    """All claims."""
    rows = json.loads(file.read_text(encoding="utf-8"))["claims"] if file.exists() else []
    return [_claim(row) for row in rows]


def _claim(row: Mapping[str, Any]) -> Claim:
    which = ClaimedProgram.of(row["run"], row["flags"])
    left_out = ("run", "flags", "command")
    return Claim(which, **{name: value for name, value in row.items() if name not in left_out})


def save(claims: Iterable[Claim], file: Path = FILE) -> None:
    """Write all claims, one per line, sorted by command and versions."""
    lines = [json.dumps(_row(claim)) for claim in sorted(claims, key=_place)]
    head = json.dumps({"tolerance": TOLERANCE})[:-1]
    write(file, f'{head}, "claims": [\n' + ",\n".join(lines) + "\n]}\n")


def _place(claim: Claim) -> tuple[str, str, str]:
    return claim.which.command, claim.jax, claim.compiler


def _row(claim: Claim) -> dict[str, Any]:
    which, rest = claim.which, asdict(claim)
    del rest["which"]
    return {"command": which.command, "run": which.run, "flags": dict(which.flags), **rest}


def fastest(claims: Sequence[Claim]) -> Claim:
    """The claim with the least time."""
    return min(claims, key=lambda claim: claim.total_us)
