"""Continuous integration that holds exposed communication to a budget, without a TPU.

    python -m examples.overlap_budget          exit status 0: within the budget
    python -m examples.overlap_budget --plain  exit status 1: gather, then multiply

The step of a tensor-parallel MLP is compiled for 8 TPU chips by the TPU compiler (`pip install
-e ".[tpu]"`; no TPU is needed). `overlap.assert_overlapped` reads the compiler's schedule, and
raises if the chip waits for messages longer than the budget allows. If a change of the step exposes
a gather, the build fails, and the error names the gather's line of source.

Put your own step and shapes in place of these, and call the file in your CI.
"""

import argparse
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from ringcoll import overlap

TOPOLOGY = "v5e:4x2"
TOKENS, WIDTH, FEATURES = 4096, 4096, 16384
#: The shares of the time in which the chip may wait: for anything, and for built-in gathers.
BUDGET = {"total": 0.05, "all-gather": 0.0}
SPECS = P("x"), P(None, "x"), P("x")


def plain(x: Array, up: Array, down: Array) -> Array:
    """`x: [m/n, d], up: [d, f/n], down: [f/n, d] -> [m/n, d]`: gather, multiply twice, scatter."""
    rows = jax.lax.all_gather(x, "x", tiled=True)
    return jax.lax.psum_scatter(jax.nn.relu(rows @ up) @ down, "x", tiled=True)


def overlapped(x: Array, up: Array, down: Array) -> Array:
    """The same shapes; messages travel under the products."""
    activations = jax.nn.relu(ringcoll.all_gather_matmul(x, up, "x"))
    return ringcoll.matmul_reduce_scatter(activations, down, "x")


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, and compare with the budget; 1 if it is over."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.overlap_budget",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plain", action="store_true", help="gather, then multiply")
    step = plain if parser.parse_args(argv).plain else overlapped

    mesh = ringcoll.mesh(TOPOLOGY)
    shapes = (TOKENS, WIDTH), (WIDTH, FEATURES), (FEATURES, WIDTH)
    operands = [
        ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, SPECS, strict=True)
    ]
    mapped = jax.shard_map(step, mesh=mesh, in_specs=SPECS, out_specs=P("x"))
    program = overlap.compile_for(TOPOLOGY, mapped, *operands)
    found = overlap.report(program)
    print(f"{step.__name__} on {TOPOLOGY}, compiled: {found.exposed * 1e6:.0f} us exposed", end="")
    print(f", {found.exposed_share:.1%} of the time; the budget is {BUDGET['total']:.0%}")
    try:
        overlap.assert_overlapped(program, max_exposed=BUDGET)
    except AssertionError as over:
        print(over, file=sys.stderr)
        return 1
    print("within the budget")
    return 0


if __name__ == "__main__":
    sys.exit(main())
