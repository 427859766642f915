"""Compile the programs of `test_overlap_tpu`, and print their reports as JSON.

python tests/tpu_programs.py             the small ones
python tests/tpu_programs.py exhaustive  those of README's headline, and of layers
"""

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np
import wire_programs
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from benchmarks.compiled import check_claims, compiling, pages, recorded_claims, whole_steps
from benchmarks.compiled.whole import STEPS
from ringcoll import overlap
from ringcoll.commands.overlap import mesh_on
from ringcoll.layers import tensor_parallel
from ringcoll.placement import topology

TOPOLOGY = "v5e:4x2"
mesh = mesh_on(TOPOLOGY)
#: Types of the axes of the meshes for which a profile is made; None: as `ringcoll.mesh` has them.
AXIS_TYPES = {
    "default": None,
    "auto": (AxisType.Auto, AxisType.Auto),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}


def ring(x, w, step):
    """Eight matmuls and seven hops; `step` says what the hop may depend on."""
    n, rank, rows = 8, lax.axis_index("x"), x.shape[0]
    out = lax.pcast(jnp.zeros((n * rows, w.shape[1]), x.dtype), "x", to="varying")
    for i in range(n):
        x, y = step(x, w, i)
        out = lax.dynamic_update_slice(out, y, ((rank - i) % n * rows, 0))
    return out


def hop(x, i):
    n = lax.axis_size("x")
    return lax.ppermute(x, "x", [(r, (r + 1) % n) for r in range(n)]) if i < 7 else x


def overlapped(x, w, i):
    return hop(x, i), x @ w


def after_the_matmul(x, w, i):
    x, y = lax.optimization_barrier((x, x @ w))
    return hop(x, i), y


def loop(x, w):
    """A loop in which each turn sends a shard and multiplies it."""
    out = lax.pcast(jnp.zeros((8 * x.shape[0], w.shape[1]), x.dtype), "x", to="varying")

    def turn(i, state):
        x, out = state
        y = x @ w
        return hop(x, 0), lax.dynamic_update_slice(out, y, (i * x.shape[0], 0))

    return lax.fori_loop(0, 7, turn, (x, out))[1]


def plain(x, w):
    return lax.all_gather(x, "x", tiled=True) @ w


def layers(x, w):
    """Four layers; the weights of each are gathered before it uses them."""
    for _ in range(4):
        x = jnp.tanh(x @ lax.all_gather(w, "x", tiled=True) * 2)
        w = w + 1
    return x


def with_gradients(call):
    """The result and both gradients; the cotangent waits for the result, as a loss's does."""

    def both(x, w):
        y, pull_back = jax.vjp(call, x, w)
        return y, *pull_back(y * y)

    return both


def gathers(**options):
    return lambda x, w: ringcoll.all_gather_matmul(x, w, "x", **options)


def scatters(**options):
    return lambda x, w: ringcoll.matmul_reduce_scatter(x, w, "x", **options)


COLUMNS = (P("x", None), P(None, "x")), P(None, "x")
ROWS = (P("x", None), P("x", None)), P("x", None)
DOWN = (P(None, "x"), P("x", None)), P("x", None)
SHAPES = (4096, 4096), (4096, 40960)
#: Quick to compile, and yet a matmul of a shard (27 us) is longer than its hop (24 us).
SMALL = (2048, 2048), (2048, 40960)
DOWN_SHAPES = (4096, 40960), (40960, 4096)


def jitted(f, shapes, sharded, mesh):
    """A jitted function, and the shapes and shardings of its operands."""
    specs, out = sharded
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out)), operands


def reported(f, shapes=SHAPES, sharded=COLUMNS):
    """The report of a function, as plain data."""
    return judged(*jitted(f, shapes, sharded, mesh))


def judged(f, operands):
    """The report of a function that may be jitted, and whether it is overlapped."""
    return read(jax.jit(f).lower(*operands).compile())


def read(compiled):
    """The report of a compiled program, and whether it is overlapped."""
    report = overlap.report(compiled)
    try:
        overlap.assert_overlapped(compiled)
        verdict = "green"
    except AssertionError as error:
        verdict = f"red: {error}"
    return {**report.to_dict(), "verdict": verdict, "text": str(report)}


def gated_mlp(algorithm):
    """A layer for 8192 tokens, sharded by sequence, with its gradients; and its operands."""

    def operand(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def call(x, weights):
        return tensor_parallel.gated_mlp(weights, x, "x", algorithm=algorithm)

    by_sequence, columns, rows = P(None, "x"), P(None, "x"), P("x", None)
    specs = {"gate": columns, "up": columns, "down": rows}
    shapes = {"gate": (4096, 14336), "up": (4096, 14336), "down": (14336, 4096)}
    operands = (
        operand((1, 8192, 4096), by_sequence),
        {name: operand(shapes[name], spec) for name, spec in specs.items()},
    )
    sharded = {"in_specs": (by_sequence, specs), "out_specs": by_sequence}
    return with_gradients(jax.shard_map(call, mesh=mesh, **sharded)), operands


def whole_step(form):
    """A step of the benchmark, fully sharded: 4096 tokens a chip."""
    step = replace(STEPS["fsdp8-mlp4096"], tokens=(8, 4096), width=2048, hidden=8192)
    return whole_steps.program(step, form, mesh_on(TOPOLOGY, {"fsdp": 8}))


def headline():
    """The programs of README's headline, and how they differ from their claims."""
    known, programs, off = check_claims.here(recorded_claims.load()), {}, {}
    for which in dict.fromkeys(pages.headline(pages.tables())):
        flags = dict(which.flags)
        found, program = compiling.compile_one(flags, recorded_claims.COMPILED[which.run])
        programs[flags["topology"], flags["form"], flags["algorithm"]] = program
        if which in known:
            now = recorded_claims.of_found(which, found)
            off[which.command] = {"off": known[which].off(now), "now": str(now)}
    return programs, off


def small():
    """Small programs: what the compiler overlaps and what it does not; meshes; refusals."""
    reports = {
        "overlapped": reported(lambda x, w: ring(x, w, overlapped), SMALL),
        "after_the_matmul": reported(lambda x, w: ring(x, w, after_the_matmul), SMALL),
        "loop": reported(loop, SMALL),
        "plain": reported(plain, SMALL),
    }
    flat = topology.devices("v5e:8x8")
    far = Mesh(np.array(flat), ("x",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of `jax.make_mesh`, which knows no better order
        hops = {
            name: [axis.hops for axis in ringcoll.describe(on).axes.values()]
            for name, on in {
                **{name: ringcoll.mesh(name) for name in ("v5e:4x2", "v5e:8x8", "v5p:2x2x2")},
                "two axes": ringcoll.mesh("v5e:4x2", a=4, b=2),
                "far": far,
            }.items()
        }
    reports["hops"] = hops
    reports["wire"] = wire_programs.sent(TOPOLOGY)
    with TemporaryDirectory() as folder:
        f, operands = jitted(loop, SMALL, COLUMNS, mesh)
        jax.jit(f).lower(*operands).compile(compiler_options={"xla_dump_to": folder})
        reports["dumped"] = overlap.report(folder, mesh=mesh).to_dict()
        for text in Path(folder).glob("*after_codegen.txt"):
            text.unlink()
        reports["dumped before code"] = overlap.report(folder, mesh=mesh).to_dict()
    f, operands = jitted(plain, ((512, 512), (512, 512)), COLUMNS, mesh)
    for name, call in {
        "topology": lambda: ringcoll.mesh("v5e:5x7"),
        "axes": lambda: ringcoll.mesh(TOPOLOGY, x=4),
        "kind": lambda: overlap.compile_for("v5p:2x2x2", f, *operands),
        "slice": lambda: overlap.compile_for("v5e:2x2", f, *operands),
    }.items():
        try:
            call()
        except ValueError as error:
            reports[f"refused {name}"] = str(error)
    return reports


def exhaustive():
    """Our matmuls, layers and steps compared with the built-in forms; a static profile."""
    reports = {"layers": reported(layers, ((32768, 4096), (4096, 4096)), ROWS)}
    of_headline, reports["headline"] = headline()
    for algorithm, as_claimed in (("auto", "auto"), ("lax", "plain")):
        options = {"algorithm": algorithm}
        gathered = of_headline[TOPOLOGY, "all_gather_matmul", as_claimed]
        scattered = of_headline[TOPOLOGY, "matmul_reduce_scatter", as_claimed]
        reports |= {
            f"gathers {algorithm}": read(gathered),
            f"scatters {algorithm}": read(scattered),
            f"gathers both {algorithm}": reported(
                with_gradients(gathers(**options)),
                sharded=(COLUMNS[0], (P(None, "x"), *COLUMNS[0])),
            ),
            f"scatters both {algorithm}": reported(
                with_gradients(scatters(**options)),
                DOWN_SHAPES,
                (DOWN[0], (P("x", None), *DOWN[0])),
            ),
        }
        reports[f"gated_mlp {algorithm}"] = judged(*gated_mlp(algorithm))
    for form in ("plain", "ours"):
        reports[f"step {form}"] = judged(*whole_step(form))
    for name, types in AXIS_TYPES.items():
        axes = ringcoll.mesh(TOPOLOGY, x=8, y=1, axis_types=types)
        f, operands = jitted(plain, ((512, 512), (512, 512)), COLUMNS, axes)
        profiled = overlap.report(overlap.compile_for(TOPOLOGY, f, *operands, profile=True))
        reports[f"profiled {name}"] = {**profiled.to_dict(), "text": str(profiled)}
    return reports


json.dump(exhaustive() if sys.argv[1:] == ["exhaustive"] else small(), sys.stdout)
