"""Attention over several processes: each compares its ranks' results with one device's.

python tests/attention_spread.py --coordinator HOST:PORT --num-processes N --process-id I
"""

import argparse
from functools import partial

import conftest  # noqa: F401 (its flags)
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import make_mesh

from benchmarks.measuring import processes
from ringcoll.layers import context_parallel as cp

LAYOUT, SHAPE = "zigzag", (2, 48, 4, 8)


def one_device(q, k, v, ct):
    """The result and the gradients."""

    def attend(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    out, back = jax.vjp(attend, q, k, v)
    return out, *back(ct)


def over_ranks(mesh, algorithm, q, k, v, ct):
    spec = P(None, "x")
    options = {"axis_name": "x", "causal": True, "layout": LAYOUT, "algorithm": algorithm}
    attend = partial(cp.attention, **options)
    out, back = jax.vjp(
        jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec), q, k, v
    )
    return out, *back(ct)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    processes.add_arguments(parser)
    processes.start(parser.parse_args())
    n, rng = jax.device_count(), np.random.default_rng(0)
    batch, tokens, heads, width = SHAPE
    counts = heads, heads // 2, heads // 2, heads
    operands = [rng.standard_normal((batch, tokens, h, width), np.float32) for h in counts]
    with jax.default_device(jax.local_devices()[0]):
        expected = [np.asarray(x) for x in jax.jit(one_device)(*operands)]
        arranged = [np.asarray(cp.arrange(x, n, LAYOUT)) for x in operands]
        expected = [np.asarray(cp.arrange(x, n, LAYOUT)) for x in expected]
    mesh = make_mesh(n)
    sharding = NamedSharding(mesh, P(None, "x"))
    placed = [jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for x in arranged]
    for algorithm in (
        ("bidirectional_ring", "ulysses") if n == 2 else ("ring", "bidirectional_ring")
    ):
        found = jax.jit(partial(over_ranks, mesh, algorithm))(*placed)
        for mine, right in zip(found, expected, strict=True):
            for shard in mine.addressable_shards:
                np.testing.assert_allclose(shard.data, right[shard.index], rtol=0, atol=2e-5)
        print(f"{algorithm} is right", flush=True)


if __name__ == "__main__":
    main()
