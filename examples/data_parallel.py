"""Data parallelism with many small parameters: their gradients share one ring's messages.

    python -m examples.data_parallel

A model has matrices, and many vectors: biases, scales of norms. Each rank computes the gradients of
its own examples, and the ranks average them. `jax.tree.map(jax.lax.pmean)` makes one all-reduce for
each parameter. A small all-reduce spends nearly all its time on the start of messages. With a named
algorithm, `ringcoll.pmean` of the whole tree sends small parameters together. Large parameters,
whose bytes take longer than a start, travel alone.

All numbers are small integers or powers of two, so nothing is rounded. Parameters are equal in
every bit, for any order of additions.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ringcoll
from ringcoll.costs import price

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # instead of eight real ones

RANKS, ROWS, WIDTH, LAYERS, LARGE = 8, 4, 16, 12, 1024
RATE = 2.0**-3
Params = dict[str, Array]
Mean = Callable[[Params], Params]


def init() -> Params:
    """A scale and a bias for every layer, and one matrix."""
    random = np.random.default_rng(0)
    names = [f"{kind} {layer}" for layer in range(LAYERS) for kind in ("scale", "bias")]
    vectors = {name: jnp.asarray(random.integers(-1, 2, WIDTH), jnp.float32) for name in names}
    shape = LARGE, LARGE
    return vectors | {"matrix": jnp.asarray(random.integers(-1, 2, shape), jnp.float32)}


def loss(params: Params, x: Array) -> Array:
    """A sum over layers, so that gradients stay small integers; `x: [rows, LARGE]`."""
    rows = x[:, :WIDTH]
    layers = [rows * params[f"scale {i}"] + params[f"bias {i}"] for i in range(LAYERS)]
    return sum(map(jnp.sum, layers), jnp.sum(x @ params["matrix"])) / len(x)


def step(mean: Mean, params: Params, x: Array) -> Params:
    """One step of a rank: gradients of its own rows, their mean, and the update."""
    own = jax.tree.map(lambda w: jax.lax.pcast(w, "data", to="varying"), params)
    gradients = mean(jax.grad(loss)(own, x))
    return jax.tree.map(lambda w, g: w - RATE * g, params, gradients)


MEANS: dict[str, Mean] = {
    "lax, leaf by leaf": lambda g: jax.tree.map(lambda leaf: jax.lax.pmean(leaf, "data"), g),
    "ringcoll, ring": lambda g: ringcoll.pmean(g, "data", algorithm="ring"),
    "ringcoll, halving_doubling": lambda g: ringcoll.pmean(g, "data", algorithm="halving_doubling"),
}


def messages(text: str) -> tuple[int, int]:
    """All-reduces and permutes that a program asks for, before XLA changes them."""
    return text.count("stablehlo.all_reduce"), text.count("stablehlo.collective_permute")


def main() -> int:
    """Take a step in every way; 1 if parameters differ."""
    mesh = jax.make_mesh((RANKS,), ("data",), (AxisType.Auto,))
    params = init()
    shape = RANKS * ROWS, LARGE
    x = np.random.default_rng(1).integers(-2, 3, shape).astype(np.float32)
    print(f"{len(params)} parameters, {2 * LAYERS} of them of {4 * WIDTH} B, on {RANKS} ranks")
    print(f"{'':28}{'all-reduces':>12}{'messages':>10}  parameters after a step")
    expected, found = None, {}
    for name, mean in MEANS.items():
        mapped = jax.shard_map(
            partial(step, mean), mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
        )
        program = jax.jit(mapped)
        found[name] = messages(program.lower(params, x).as_text())
        result: Any = jax.tree.map(np.asarray, program(params, x))
        expected = expected or result
        same = all(np.array_equal(result[leaf], expected[leaf]) for leaf in params)
        words = "as by lax, in every bit" if same else "differ"
        print(f"{name:28}{found[name][0]:12}{found[name][1]:10}  {words}")
        if not same:
            return 1
    rounds = int(price("psum", "ring", (RANKS,)).rounds)
    print(f"a ring's all-reduce has {rounds} rounds: one for the joined leaves, one for the matrix")
    joined = found["ringcoll, ring"] == (0, 2 * rounds)
    return int(not joined or found["lax, leaf by leaf"] != (len(params), 0))


if __name__ == "__main__":
    sys.exit(main())
