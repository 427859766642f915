# %% [markdown]
"""
# A trace of one step, with its rounds

The trace of one step names ringcoll's collectives and their rounds.

    python -m examples.tutorials.profiling
    python -m examples.tutorials.profiling --output results/trace

The operations of a round have its name, such as `ringcoll.psum(ring)/reduce_scatter/round 3`. If a
long ring is a loop, the name is `rounds 2 to 31`, and the operations run once for each round.
`jax.profiler` writes the trace, for Perfetto and XProf, and this program reads it. On a CPU the
events of a trace have the names of instructions. The metadata of the compiled program say which
round an instruction belongs to.
"""

# %%
import argparse
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

import ringcoll
from ringcoll.learn import agree, integers, make_mesh, place, show, start
from ringcoll.overlap.hlo import parse

start(8)
N = 8


# %% [markdown]
"""
## A step, and its trace
"""

# %%


def step(x: Array, w: Array) -> tuple[Array, Array]:
    """`x: [m/n, k], w: [k, f/n]`: a product under its gather, and a sum of all ranks."""
    y = ringcoll.all_gather_matmul(x, w, "x", algorithm="ring")  # [m, f/n]
    return y, ringcoll.psum(x, "x", algorithm="ring")


def traced(folder: Path, program: Any, *operands: Array) -> tuple[Any, Path]:
    """Run a compiled program under the profiler; returns its result and the trace."""
    jax.block_until_ready(program(*operands))  # keep one-time work out of the trace
    with jax.profiler.trace(folder), jax.profiler.StepTraceAnnotation("step", step_num=0):
        result = jax.block_until_ready(program(*operands))
    written = folder.glob("plugins/profile/*/*.trace.json.gz")
    return result, max(written, key=lambda path: path.stat().st_mtime_ns)


def names(program: Any) -> dict[str, str]:
    """The collective and the round of each instruction of a compiled program, by its name."""
    found = {}
    for computation in parse(program.as_text()).computations.values():
        for instruction in computation.instructions:
            # If the round is in a loop, JAX puts names of its own between collective and round.
            op_name = instruction.attribute("op_name") or ""
            if name := re.search(r"(ringcoll\..*rounds? [\d to]*\d)/ppermute", op_name):
                found[instruction.name] = name[1]
    return found


def events(trace: Path) -> Iterator[tuple[str, int, float, float]]:
    """The events of a trace: instruction, device, start and duration in microseconds."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        for event in json.load(file)["traceEvents"]:
            args = event.get("args", {})
            if event.get("ph") == "X" and "hlo_op" in args and "device_ordinal" in args:
                device = int(args["device_ordinal"])
                yield args["hlo_op"], device, float(event["ts"]), float(event["dur"])


# %% [markdown]
"""
## The rounds in the trace
"""

# %%


def main(argv: Sequence[str] | None = None) -> None:
    """Trace a step, and find the rounds in it."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.tutorials.profiling",
        description="Trace a step, and print when each round started.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = Path("results/trace")
    parser.add_argument("--output", type=Path, default=where, metavar="DIR", help=f"({where})")
    folder = parser.parse_args(argv).output

    mesh = make_mesh(x=N)
    host = integers(32 * N, 64), integers(64, 16 * N, seed=1)
    specs = P("x"), P(None, "x")
    x, w = (place(mesh, h, s) for h, s in zip(host, specs, strict=True))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(None, "x"), P()))
    program = jax.jit(mapped).lower(x, w).compile()
    (y, total), trace = traced(folder, program, x, w)
    agree("the product", numpy=host[0] @ host[1], ringcoll=y)
    agree("the sum", numpy=host[0].reshape(N, 32, 64).sum(0), ringcoll=total)

    rounds = names(program)
    spans: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for instruction, device, at, duration in events(trace):
        if instruction in rounds:
            spans[rounds[instruction]].append((device, at, duration))
    expected = [f"ringcoll.all_gather_einsum(ring)/round {i}" for i in range(1, N)]
    for half in ("reduce_scatter", "all_gather"):
        expected += [f"ringcoll.psum(ring)/{half}/round {i}" for i in range(1, N)]
    for name in expected:
        if sorted(device for device, _, _ in spans[name]) != list(range(N)):
            raise AssertionError(f"{name}: in the trace of {spans[name]}, not once on each device")
    begin = min(at for span in spans.values() for _, at, _ in span)
    rows = []
    for name in expected:
        _, starts, durations = zip(*spans[name], strict=True)
        times = min(starts) - begin, np.median(durations), max(durations)
        rows.append((name, *(f"{t:.0f}" for t in times)))
    heads = ("round", "starts\nus", "median of\nthe devices", "longest")
    show("Measured: the rounds of a step, in the trace", heads, rows)
    print(
        f"the trace: {trace}",
        "  open it at https://ui.perfetto.dev, or all of --output by XProf (pip install xprof);",
        "  a row is a thread; a bar on it is an instruction, such as ppermute.42, with hlo_op and",
        "  device_ordinal among its arguments; the bar of a round lasts until all ranks have met.",
        sep="\n",
    )


# %% tags=["active-ipynb"]
# main([])

# %% tags=["active-py"]
if __name__ == "__main__":
    main()

# %% [markdown]
"""
The exercises use `compiled`, which compiles a function of a rank's eight numbers:
"""


# %%
def compiled(function: Any) -> Any:
    mapped = jax.shard_map(function, mesh=make_mesh(x=N), in_specs=P("x"), out_specs=P())
    return jax.jit(mapped).lower(np.ones(8 * N, np.float32)).compile()


# %% [markdown]
"""
## Exercise 1: names of a different algorithm

How many rounds does `psum` by `"bruck"` have on eight ranks, and what are their names? Compile it,
and look into `names(program)`. You need no trace."""


# %% tags=["solution"]
called = sorted({*names(compiled(lambda x: ringcoll.psum(x, "x", algorithm="bruck"))).values()})
print(*called, sep="\n")
assert len(called) == 6  # three rounds of the reduce-scatter, three of the all-gather
assert called[0] == "ringcoll.psum(bruck)/all_gather/round 1"

# %% [markdown]
"""
## Exercise 2: a name of your own

Put the sum into `with jax.named_scope("gradients"):`. Where is this name in the text of the
compiled program: before or after the name of the round?
"""


# %% tags=["solution"]
def named(x: Array) -> Array:
    with jax.named_scope("gradients"):
        return ringcoll.psum(x, "x", algorithm="ring")


found = re.findall(r'op_name="([^"]*gradients/[^"]*round 1/[^"]*)"', compiled(named).as_text())
print("named", found[0])
assert all("gradients/ringcoll.psum(ring)" in name for name in found)
