"""Serving: the all-reduces of a decode step are small, so their cost is the start of messages.

    python -m examples.decode

With tensor parallelism a layer sums two vectors for each sequence, after attention and after the
MLP. If tokens are decoded one at a time, these are a few kilobytes. A ring sends the fewest bytes,
in 2(n-1) rounds. "recursive_doubling" and "one_shot" send whole vectors, in log2 n rounds. If
attention and MLP both read the layer's input (a parallel block), their sums share messages.

The first table is modelled (`ringcoll.costs`). The second table counts the messages of a program
that runs here. Weights and tokens are small integers, so all algorithms agree in every bit.
"""

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ringcoll import costs, lax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # instead of eight real ones

RANKS, LAYERS, BATCH, WIDTH, FEATURES = 8, 3, 4, 64, 128
ALGORITHMS = "ring", "halving_doubling", "recursive_doubling", "one_shot"
SPECS = {"mix": P(None, None, "model"), "out": P(None, "model"), "up": P(None, None, "model")}
SPECS["down"] = P(None, "model")


def table(machine: str, sequences: tuple[int, ...], width: int = 8192) -> None:
    """Print the modelled microseconds of one all-reduce of bfloat16, by sequences at a time."""
    model = costs.SWITCHES[machine]
    print(f"modelled on 8 {machine}: us of an all-reduce of [sequences, {width}] in bf16")
    print(f"{'sequences':>12}{'kB':>8}" + "".join(f"{name:>20}" for name in ALGORITHMS))
    for rows in sequences:
        size = 2 * rows * width
        paid = [costs.price("psum", algorithm, (RANKS,)) for algorithm in ALGORITHMS]
        times = [costs.seconds(one, size / RANKS, model) for one in paid]
        cells = [f"{1e6 * t:.1f}{' *' if t == min(times) else '  '}" for t in times]
        print(f"{rows:12}{size / 1000:8g}" + "".join(f"{cell:>20}" for cell in cells))


def decode(x: Array, weights: dict[str, Array], parallel: bool, algorithm: str) -> Array:
    """`x: [b, d]`, the same on all ranks, through all layers on a rank's weights."""

    def total(terms: Any) -> Any:
        return lax.psum(terms, "model", algorithm=algorithm)

    def layer(x: Array, w: dict[str, Array]) -> Array:
        def attention(x: Array) -> Array:  # of one token with itself: a product
            return jnp.sign(x @ w["mix"]) @ w["out"]

        def mlp(x: Array) -> Array:
            return jnp.sign(jax.nn.relu(x @ w["up"])) @ w["down"]

        if parallel:
            mixed, expanded = total((attention(x), mlp(x)))  # joined
            return jnp.sign(x + mixed + expanded)
        x = jnp.sign(x + total(attention(x)))
        return jnp.sign(x + total(mlp(x)))

    for i in range(LAYERS):
        x = layer(x, {name: w[i] for name, w in weights.items()})
    return x


def main() -> int:
    """Print both tables; 1 if an algorithm differs from the built-in."""
    table("h100", (1, 8, 64, 512))
    random, sizes = np.random.default_rng(0), {"mix": (WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
    sizes |= {"up": (WIDTH, FEATURES), "down": (FEATURES, WIDTH)}
    weights = {k: random.integers(-2, 3, (LAYERS, *s)).astype("float32") for k, s in sizes.items()}
    x = random.integers(-1, 2, (BATCH, WIDTH)).astype("float32")
    mesh, status = jax.make_mesh((RANKS,), ("model",), (AxisType.Auto,)), 0
    print(f"\na decode step of {LAYERS} layers on {RANKS} CPU devices: messages in turn")
    print(f"{'':24}{'a sum at a time':>18}{'parallel block':>18}")
    expected: dict[bool, np.ndarray] = {}
    for name in ("lax", *ALGORITHMS):
        cells = []
        for parallel in (False, True):
            step = partial(decode, parallel=parallel, algorithm=name)
            mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), SPECS), out_specs=P())
            lowered = jax.jit(mapped).lower(x, weights)
            result = np.asarray(lowered.compile()(x, weights))
            same = np.array_equal(result, expected.setdefault(parallel, result))
            status |= not same
            sent = lowered.as_text().count("stablehlo.collective_permute")
            cells.append(f"{sent or 'built-in'}{'' if same else ' DIFFERS'}")
        print(f"{name:24}" + "".join(f"{cell:>18}" for cell in cells))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
