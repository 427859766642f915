"""Claims: the figures on the pages about programs that were compiled or modelled, but not run.

`claims.json` holds all claims, `benchmarks.compiled.pages` shows them in tables, and
`python -m benchmarks claims` computes them again.
"""

import ast
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

import benchmarks.referee
from benchmarks.collectives import candidates, scale
from benchmarks.compiled import collectives, compiling, context, experts, fsdp, grid, layers
from benchmarks.compiled.program_figures import Figures
from benchmarks.referee import referee
from ringcoll import algorithms, costs, overlap, schedules
from ringcoll.commands import machine
from ringcoll.costs import machines, slices
from ringcoll.io.files import write
from ringcoll.overlap import gpus

FILE = Path(__file__).with_name("claims.json")
#: How far a claim may be off: a share of its time, points of exposure, and a share of its
#: temporaries (or 1 MiB, if that is more).
TOLERANCE = {"time": 0.02, "exposed_points": 1.0, "temporaries": 0.02}

#: The commands that compile programs, and the functions that make programs from their flags.
COMPILED: Mapping[str, compiling.Make] = {
    "overlap": grid.program,
    "layers": layers.program_of,
    "fsdp": fsdp.program_of,
    "collectives": collectives.program_of,
    "context": context.program_of,
    "experts": experts.program_of,
}
#: The commands that only model, and the functions that give seconds from their flags.
MODELLED: Mapping[str, Callable[..., float]] = {
    "scale": scale.seconds_of,
    "referee": referee.seconds_of,
    "candidates": candidates.seconds_of,
}
#: The code of these models, and of what they call.
MODELS = (schedules, costs, algorithms, machine, scale, candidates, benchmarks.referee)


@dataclass(frozen=True)
class ClaimedProgram:
    """A program by its command in `python -m benchmarks`, and its flags.

    Attributes:
        run: the command.
        flags: names and values, sorted.
        profile: whether times are from the compiler's static profile.
    """

    run: str
    flags: tuple[tuple[str, str], ...]
    profile: bool = False

    @classmethod
    def of(cls, run: str, flags: Mapping[str, str], profile: bool = False) -> "ClaimedProgram":
        """A program by its flags, in any order."""
        return cls(run, tuple(sorted(flags.items())), profile)

    @property
    def command(self) -> str:
        """The command that prints its figures."""
        flags = [f"--{name} {value}" for name, value in self.flags]
        return " ".join(["python -m benchmarks", self.run, *flags, *["--profile"] * self.profile])

    @property
    def is_on_gpus(self) -> bool:
        """Whether it is compiled for GPUs."""
        return gpus.is_named(dict(self.flags).get("topology", ""))

    @property
    def compiler(self) -> str:
        """The name and version of the compiler for its topology; "" if nothing is compiled."""
        if self.run in MODELLED:
            return ""
        name = "jax-cuda13-pjrt" if self.is_on_gpus else "libtpu"
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"no {name}"  # no claim names such a compiler


@dataclass(frozen=True)
class Claim:
    """The figures of a program.

    Attributes:
        which: the program.
        jax, compiler: the versions that gave these figures; compiler is "" if it is modelled.
        total_us: microseconds; 0 if the text of the program has no times.
        exposed_percent: the percentage of the time that is exposed communication.
        temporaries, program: bytes; None if nothing is compiled.
        profiled: whether times are from the profile; the compiler cannot profile every program.
        hidden: how many collectives have a matmul under them, and how many there are; None for
            TPUs.
        digest: the result of `digest` when the figures were saved.
    """

    which: ClaimedProgram
    jax: str
    compiler: str
    total_us: float
    exposed_percent: float | None = None
    temporaries: int | None = None
    program: int | None = None
    profiled: bool = False
    hidden: tuple[int, int] | None = None
    digest: str | None = None

    def off(self, now: "Claim") -> list[str]:
        """The names of the figures that are off by more than `TOLERANCE`."""
        words = []
        if abs(now.total_us - self.total_us) > TOLERANCE["time"] * self.total_us:
            words.append("time")
        points = abs((now.exposed_percent or 0) - (self.exposed_percent or 0))
        if points > TOLERANCE["exposed_points"]:
            words.append("exposure")
        temporaries, least = self.temporaries or 0, 2**20
        off = abs((now.temporaries or 0) - temporaries)
        if off > max(TOLERANCE["temporaries"] * temporaries, least):
            words.append("temporaries")
        if now.profiled != self.profiled:
            words.append("profile")
        if now.hidden != self.hidden:
            words.append("hidden collectives")
        return words


def find(which: ClaimedProgram, cache: str | None = None) -> Claim:
    """Compile or price a program, here and now.

    Args:
        which: the program.
        cache: a folder of compiled programs; see `benchmarks.compiled.program_cache`.

    Raises:
        Exception: whatever JAX or the compiler raises.
    """
    flags = dict(which.flags)
    if which.run in MODELLED:
        seconds = MODELLED[which.run](**flags)
        return Claim(which, jax.__version__, "", round(seconds * 1e6, 2))
    found, _ = compiling.compile_one(flags, COMPILED[which.run], profile=which.profile, cache=cache)
    return of_found(which, found)


@cache
def digest(which: ClaimedProgram) -> str:
    """A digest of everything that determines the figures of a program.

    That is what is compiled and the compiler, or the flags of a model, and the code and the
    machines that give times. As long as it is equal to the digest of a claim, to compute again
    would give the same figures.
    """
    if which.run in MODELLED:
        text = f"{which.command} {_timing(MODELS)}"
    else:
        program = compiling.key(dict(which.flags), COMPILED[which.run], profile=which.profile)
        # For GPUs, the whole model of costs gives times.
        rooms = (overlap, costs) if which.is_on_gpus else (overlap,)
        text = f"{program} {_timing((*rooms, slices))}"
    return sha256(text.encode()).hexdigest()[:16]


@cache
def _timing(modules: tuple[ModuleType, ...]) -> str:
    """The code of modules and packages that give times, and the rates of the machines.

    Comments and docstrings are left out.
    """
    files = [path for module in modules for path in _files(module)]
    code = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    for node in (node for tree in code for node in ast.walk(tree)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            del node.body[0]
    rates = machines.MACHINES if costs in modules else overlap.CHIPS
    return "\n".join([*sorted(map(ast.unparse, code)), repr(sorted(rates.items()))])


def _files(module: ModuleType) -> list[Path]:
    file = Path(module.__file__ or "")
    return sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]


def of_found(which: ClaimedProgram, found: Figures) -> Claim:
    """The figures of a compiled program as a claim."""
    hidden = [sum(column) for column in zip((0, 0), *found.hidden.values(), strict=True)]
    return Claim(
        which,
        jax.__version__,
        which.compiler,
        round(found.total, 2),
        round(100 * found.exposed / found.total, 2) if found.total else None,
        found.temporaries,
        found.program_bytes,
        found.profiled,
        (hidden[0], hidden[1]) if which.is_on_gpus else None,
    )


def load(file: Path = FILE) -> list[Claim]:
    """All claims."""
    rows = json.loads(file.read_text(encoding="utf-8"))["claims"] if file.exists() else []
    return [_claim(row) for row in rows]


def _claim(row: Mapping[str, Any]) -> Claim:
    which = ClaimedProgram.of(row["run"], row["flags"], row["profile"])
    left_out = ("kind", "run", "flags", "profile", "command", "hidden")
    rest = {name: value for name, value in row.items() if name not in left_out}
    hidden = row["hidden"]
    return Claim(which, **rest, hidden=None if hidden is None else (hidden[0], hidden[1]))


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
    flags = {"run": which.run, "flags": dict(which.flags), "profile": which.profile}
    kind = "compiled" if claim.compiler else "modelled"
    return {"command": which.command, "kind": kind, **flags, **rest}


def fastest(claims: Sequence[Claim]) -> Claim:
    """The claim with the least time."""
    return min(claims, key=lambda claim: claim.total_us)
