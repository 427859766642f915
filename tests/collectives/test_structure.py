"""The lowered program: the dtype of its messages, and its length.

`test_calls` compares the number of messages and their bytes with the price.

Programs are lowered for a mesh without devices, so also for 512 ranks.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sent import messages
from support import every_rank, make_mesh

import ringcoll
from ringcoll.runtime import run as running

SHARD = 12  # elements of a shard


def program(collective, algorithm, n):
    """The StableHLO of a call, for CPUs that are not there."""
    mesh = AbstractMesh((n,), ("x",))
    call = partial(getattr(ringcoll, collective), axis_name="x", algorithm=algorithm)
    x = jax.ShapeDtypeStruct((n, n, SHARD), "float32", sharding=NamedSharding(mesh, P("x")))
    traced = jax.jit(every_rank(mesh, call, check_vma=True)).trace(x)
    return traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_narrow_floats_stay_narrow_in_the_compiled_program(dtype):
    kind = f"u{8 * jnp.dtype(dtype).itemsize}"
    mesh, x = make_mesh(4), jnp.ones((4, 4, SHARD), dtype)

    def every(x):
        return [
            ringcoll.all_gather(x, "x", algorithm="ring"),
            ringcoll.psum_scatter(x, "x", algorithm="bidirectional_ring"),
            ringcoll.psum(x, "x", algorithm="direct"),
            ringcoll.all_to_all(x, "x", 0, 0, algorithm="bruck"),
            ringcoll.ppermute(x, "x", [(0, 1)]),
        ]

    text = jax.jit(every_rank(mesh, every, check_vma=True)).lower(x).compile().as_text()
    sent = re.findall(r"= (?:\()?(\w+)\[\S* collective-permute(?:-start)?\(", text)
    assert len(sent) == 3 + 6 + 6 + 2 + 1
    assert set(sent) == {kind}


@pytest.mark.parametrize("collective", ["all_gather", "psum_scatter", "psum"])
@pytest.mark.parametrize("algorithm", ["ring", "bidirectional_ring"])
def test_the_program_does_not_grow_with_a_long_ring(collective, algorithm):
    texts = {n: program(collective, algorithm, n) for n in (64, 256, 512)}
    ways = 1 if algorithm == "ring" else 2
    # A sum sends its first contributions beside the loop.
    expected = {"all_gather": ways, "psum_scatter": 2 * ways, "psum": 3 * ways}
    assert {len(messages(text)) for text in texts.values()} == {expected[collective]}
    assert len({text.count("\n") for text in texts.values()}) == 1
    long = program(collective, algorithm, running.UNROLL_UP_TO + 1)  # the last without a loop
    assert long.count("\n") > texts[512].count("\n")
