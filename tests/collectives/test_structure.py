"""The lowered program: where its messages go, in what order, in which dtype.

`test_calls` compares the number of messages and their bytes with the price.

Programs are lowered for a mesh without devices, so also for 512 ranks.
"""

import re
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sent import PERMUTE, messages
from support import distinct, make_mesh

import ringcoll
from ringcoll import algorithms
from ringcoll.runtime import engine

SHARD = 12  # elements of a shard: up to six lanes share it evenly

#: One rank's operand, if shards have 12 elements, and the call.
CALLS = {
    "all_gather": (lambda n: (SHARD,), ringcoll.all_gather),
    "psum_scatter": (lambda n: (n, SHARD), ringcoll.psum_scatter),
    "all_to_all": (lambda n: (n, SHARD), partial(ringcoll.all_to_all, split_axis=0, concat_axis=0)),
    "psum": (lambda n: (n, SHARD), ringcoll.psum),
    "pbroadcast": (lambda n: (n, SHARD), partial(ringcoll.pbroadcast, source=1)),
}


def lower(function, shape, operand, dtype=jnp.float32, check_vma=True):
    """The StableHLO of a function of one rank's operand, for CPUs that are not there."""
    mesh = AbstractMesh(shape, tuple("xyz"[: len(shape)]))
    spec = P(mesh.axis_names)
    mapped = jax.shard_map(
        lambda x: jax.tree.map(lambda y: y[None], function(x[0])),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=check_vma,
    )
    x = jax.ShapeDtypeStruct((prod(shape), *operand), dtype, sharding=NamedSharding(mesh, spec))
    return jax.jit(mapped).trace(x).lower(lowering_platforms=("cpu",)).as_text()


def program(collective, algorithm, shape, dtype=jnp.float32, **keywords):
    operand, call = CALLS[collective]
    axes = tuple("xyz"[: len(shape)])

    def function(x):
        return call(x, axis_name=axes, algorithm=algorithm, **keywords)

    return lower(function, shape, operand(prod(shape)), dtype)


def sent_by(collective, algorithm, shape, **keywords):
    """The messages; they all go everywhere, and no built-in is sent."""
    sent = messages(program(collective, algorithm, shape, **keywords))
    assert all(len(set(message.pairs)) == prod(shape) for message in sent)
    assert {message.kind for message in sent} <= {PERMUTE}
    return sent


@pytest.mark.parametrize("shape", [(5,), (8,), (4, 2)], ids=str)
def test_messages_go_where_the_schedule_says(shape):
    for algorithm in distinct("all_gather", *shape):
        schedule = algorithms.build("all_gather", algorithm, shape)
        moves = [move for _, move in schedule.numbered_moves()]

        def pairs(move, sign, schedule=schedule):
            ranks = range(schedule.size)
            return {(r, schedule.step(r, move.axis, sign * move.shift)) for r in ranks}

        # (Along an axis of the mesh, XLA numbers the ranks as we do.)
        for sent, move in zip(sent_by("all_gather", algorithm, shape), moves, strict=True):
            assert set(sent.pairs) == pairs(move, 1)
            assert prod(sent.shape) == len(move.offsets) * SHARD // schedule.lanes
        back = sent_by("psum_scatter", algorithm, shape)
        moves = [move for moves in reversed(schedule.rounds) for move in moves]
        for sent, move in zip(back, moves, strict=True):
            assert set(sent.pairs) == pairs(move, -1)


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

    mapped = jax.shard_map(
        lambda x: [y[None] for y in every(x[0])], mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    text = jax.jit(mapped).lower(x).compile().as_text()
    sent = re.findall(r"= (?:\()?(\w+)\[\S* collective-permute(?:-start)?\(", text)
    assert len(sent) == 3 + 6 + 6 + 2 + 1
    assert set(sent) == {kind}


@pytest.mark.parametrize("collective", ["all_gather", "psum_scatter", "psum"])
@pytest.mark.parametrize("algorithm", ["ring", "bidirectional_ring"])
def test_the_program_does_not_grow_with_a_long_ring(collective, algorithm):
    texts = {n: program(collective, algorithm, (n,)) for n in (64, 256, 512)}
    once = 2 if algorithm == "ring" else 4  # in the loop, and beside it
    expected = {"all_gather": once, "psum_scatter": once, "psum": 2 * once}
    assert {len(messages(text)) for text in texts.values()} == {expected[collective]}
    assert len({text.count("\n") for text in texts.values()}) == 1
    long = program(collective, algorithm, (engine.UNROLL_UP_TO + 1,))  # the last without a loop
    assert long.count("\n") > texts[512].count("\n")
