"""Collective matmuls as real TPU compilers schedule them: ours against the built-in forms.

No TPU is needed: every program is compiled for the topology (libtpu, the extra tpu), and its
schedule is priced by `ringcoll.overlap`, whose model and assumptions are in its docstring.

  plain     the built-in collective, then the multiplication (or the other way about)
  compiler  jit with shardings and no shard_map: XLA's own collective matmul where it finds one
  others    algorithms of ringcoll.all_gather_matmul and ringcoll.matmul_reduce_scatter;
            /regather gathers once more for the gradient, in place of keeping
  above     how far the total is above the longer of computing (plain's) and communicating
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from benchmarks import options, report

PLAIN, COMPILER = "plain", "compiler"
OURS = ("ring", "bidirectional_ring", "bidirectional_ring/regather", "two_ended")
TOPOLOGIES = ("v5e:4x2", "v5p:2x2x2", "v6e:4x2")
SHAPES = ("8192x8192x28672", "4096x4096x14336", "2048x4096x4096")


@dataclass(frozen=True)
class Form:
    """A matmul with a collective: its operands' shardings and how it is called by hand."""

    shapes: Callable[[int, int, int], tuple[tuple[int, int], tuple[int, int]]]
    ins: tuple[P, P]
    out: P
    by_hand: Callable[..., Array]
    plain: Callable[[Array, Array], Array]


FORMS = {
    "all_gather_matmul": Form(
        lambda m, k, f: ((m, k), (k, f)),
        (P("x"), P(None, "x")),
        P(None, "x"),
        lambda x, w, **how: ringcoll.all_gather_matmul(x, w, "x", **how),
        lambda x, w: lax.all_gather(x, "x", tiled=True) @ w,
    ),
    "matmul_reduce_scatter": Form(
        lambda m, k, f: ((m, f), (f, k)),
        (P(None, "x"), P("x")),
        P("x"),
        lambda x, w, residuals="", **how: ringcoll.matmul_reduce_scatter(x, w, "x", **how),
        lambda x, w: lax.psum_scatter(x @ w, "x", tiled=True),
    ),
    "weight_gather": Form(
        lambda m, k, f: ((8 * m, k), (k, f)),
        (P("x"), P("x")),
        P("x"),
        lambda x, w, **how: ringcoll.all_gather_matmul(x, w, "x", operand=1, **how),
        lambda x, w: x @ lax.all_gather(w, "x", tiled=True),
    ),
}


@dataclass(frozen=True)
class Found:
    """What one program costs; times in microseconds."""

    topology: str
    form: str
    backward: bool
    shape: str
    algorithm: str
    total: float
    exposed: float
    communication: float
    temporaries: int | None
    program_bytes: int | None
    compile_seconds: float
    profiled: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which programs, and where to write what is found."""
    add, listed = parser.add_argument, options.listed
    add("--topology", default=",".join(TOPOLOGIES), metavar="LIST", help="such as v5e:4x2")
    add("--form", type=listed(*FORMS), default="all", metavar="LIST", help=", ".join(FORMS))
    known = (PLAIN, COMPILER, *OURS)
    add("--algorithm", type=listed(*known), default="all", metavar="LIST", help=", ".join(known))
    add("--shape", default=",".join(SHAPES), metavar="LIST", help="m x k x f")
    add("--direction", type=listed("forward", "both"), default="all", metavar="LIST")
    add("--profile", action="store_true", help="costs from the static profile (slow)")
    add("-J", "--json", metavar="PATH", help="write what was found")
    add("--draw", metavar="DIR", help="write a timeline of every program, a PNG each")


def run(args: argparse.Namespace) -> int:
    """Compile every program, and print a table a shape."""
    todo = [
        (topology, form, direction == "both", shape, algorithm)
        for topology in args.topology.split(",")
        for form in args.form
        for direction in args.direction
        for shape in args.shape.split(",")
        for algorithm in args.algorithm
    ]
    found, failed = [], []
    for one in report.progress(todo, len(todo), "compiling", lambda one: " ".join(map(str, one))):
        try:
            found.append(_found(*one, args.profile, args.draw))
        except Exception as error:  # a compiler may refuse a program; the others still count
            failed.append(f"{one}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    _print(found)
    for line in failed:
        report.console().print(f"[red]failed[/red] {line}")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(one) for one in found], indent=1))
    return 1 if failed else 0


def _found(
    topology: str,
    form: str,
    backward: bool,
    shape: str,
    algorithm: str,
    profile: bool,
    draw: str | None,
) -> Found:
    from ringcoll import overlap  # it needs libtpu only when asked

    mesh = overlap.mesh(topology)
    function, operands = program(FORMS[form], shape, algorithm, mesh)
    function = with_gradient(function) if backward else function
    start = time.perf_counter()
    compiled = overlap.compile_for(topology, function, *operands)
    seconds = time.perf_counter() - start
    if profile:
        compiled = overlap.compile_for(topology, function, *operands, profile=True)
    seen = overlap.report(compiled)
    if draw:
        name = f"{form}-{'both' if backward else 'forward'}-{topology}-{shape}-{algorithm}"
        Path(draw).mkdir(parents=True, exist_ok=True)
        seen.draw(Path(draw) / f"{name.replace(':', '-').replace('/', '-')}.png")
    micro = 1e6
    return Found(
        topology,
        form,
        backward,
        shape,
        algorithm,
        seen.total * micro,
        seen.exposed * micro,
        seen.communication * micro,
        seen.temporaries,
        seen.program_bytes,
        seconds,
        bool(compiled.profile),
    )


def program(
    form: Form, shape: str, algorithm: str, mesh: Any, dtype: Any = jnp.bfloat16
) -> tuple[Callable, tuple]:
    """A function and its operands, as `overlap.compile_for` takes them."""
    sizes = form.shapes(*(int(size) for size in shape.split("x")))
    operands = tuple(
        jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))
        for size, spec in zip(sizes, form.ins, strict=True)
    )
    if algorithm == COMPILER:
        out = NamedSharding(mesh, form.out)
        return jax.jit(lambda x, w: x @ w, out_shardings=out), operands
    name, _, residuals = algorithm.partition("/")
    how = {"algorithm": name, **({"residuals": residuals} if residuals else {})}
    function = form.plain if name == PLAIN else lambda x, w: form.by_hand(x, w, **how)
    return jax.shard_map(function, mesh=mesh, in_specs=form.ins, out_specs=form.out), operands


def with_gradient(function: Callable, cotangent: Callable = lambda y: y * y) -> Callable:
    """Forward and backward; the cotangent waits for the result, as that of a loss does."""

    def both(x: Array, w: Array) -> Any:
        y, pull_back = jax.vjp(function, x, w)
        return y, pull_back(cotangent(y))

    return both


def _print(found: list[Found]) -> None:
    heads = ["topology", "form", "direction", "shape", "algorithm"]
    figures = (
        "total\nus", "exposed\n%", "above\n%", "plain\nover it", "compiler\nover it",
        "temp\nMiB", "program\nKiB", "compile\ns",
    )  # fmt: skip
    made = report.table(*heads, *figures)
    for one in found:
        same = [
            other
            for other in found
            if (other.topology, other.form, other.backward, other.shape)
            == (one.topology, one.form, one.backward, one.shape)
        ]
        total = {other.algorithm: other.total for other in same}
        plain = next((other for other in same if other.algorithm == PLAIN), None)
        least = max(plain.total - plain.exposed, one.communication) if plain else None
        over = [
            f"{total[name] / one.total:.2f}" if name in total else "" for name in (PLAIN, COMPILER)
        ]
        made.add_row(
            one.topology,
            one.form,
            "both" if one.backward else "forward",
            one.shape,
            one.algorithm,
            f"{one.total:.0f}",
            f"{100 * one.exposed / one.total:.1f}",
            f"{100 * (one.total / least - 1):.0f}" if least else "",
            *over,
            "" if one.temporaries is None else f"{one.temporaries / 2**20:.0f}",
            "" if one.program_bytes is None else f"{one.program_bytes / 2**10:.0f}",
            f"{one.compile_seconds:.1f}",
        )
    report.console().print(made)
