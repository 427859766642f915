"""The names of collectives and rounds in profiles: those in the compiled program."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from support import make_mesh

import ringcoll
from ringcoll import algorithms
from ringcoll.overlap.hlo import parse
from ringcoll.runtime import run as running


def names(function, n=8):
    """The scopes of every permute, as often as there are permutes, in order of names."""
    mesh = make_mesh(n)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    text = jax.jit(mapped).lower(jnp.ones((n * n, 2))).compile().as_text()
    instructions = [i for c in parse(text).computations.values() for i in c.instructions]
    permutes = [i for i in instructions if i.opcode == "collective-permute"]
    op_names = [i.attribute("op_name") for i in permutes]
    return sorted(re.search(r"ringcoll\..*(?=/ppermute)", name)[0] for name in op_names)


def rounds(prefix, *numbers):
    return [f"{prefix}/round {number}" for number in numbers]


HALVES = ("all_gather", "reduce_scatter")
#: A call on four ranks, and the names of its permutes.
CALLS = [
    (
        lambda x: ringcoll.psum(x, "x", algorithm="ring"),
        [name for half in HALVES for name in rounds(f"ringcoll.psum(ring)/{half}", 1, 2, 3)],
    ),
    (  # both moves of a round bear its name
        lambda x: ringcoll.all_gather(x, "x", tiled=True, algorithm="two_ended"),
        rounds("ringcoll.all_gather(two_ended)", 1, 1, 2),
    ),
    (
        lambda x: ringcoll.all_to_all(x, "x", 0, 0, tiled=True, algorithm="bruck"),
        rounds("ringcoll.all_to_all(bruck)", 1, 2),
    ),
    (
        lambda x: ringcoll.pmax(x, "x", algorithm="recursive_doubling"),
        [f"ringcoll.pmax(recursive_doubling)/stage {i}/round 1" for i in (1, 2)],
    ),
    (  # a gather as an all-reduce, which has a different name
        lambda x: ringcoll.pmin(x, "x", algorithm=algorithms.recursive_doubling),
        [
            name
            for half in HALVES
            for name in rounds(f"ringcoll.pmin(halving_doubling)/{half}", 1, 2)
        ],
    ),
    (
        lambda x: ringcoll.all_gather_matmul(x, x.T, "x", algorithm="bruck"),
        rounds("ringcoll.all_gather_einsum(bruck)", 1, 2),
    ),
    (
        lambda x: ringcoll.matmul_reduce_scatter(x, x.T, "x", algorithm="bruck"),
        rounds("ringcoll.einsum_reduce_scatter(bruck)", 1, 2),
    ),
    (
        lambda x: ringcoll.all_gather(x, "x", algorithm=algorithms.ring(4)),
        rounds("ringcoll.all_gather(given)", 1, 2, 3),
    ),
]


def test_every_collective_has_its_name():
    expected = [name for _, of_call in CALLS for name in of_call]
    # Of different operands, because a compiler would join equal hops.
    found = names(lambda x: [call(i * x) for i, (call, _) in enumerate(CALLS, 2)], 4)
    assert found == sorted(expected)


def test_plain_rounds_have_no_barriers():
    for call, _ in CALLS[:3]:
        mapped = jax.shard_map(call, mesh=make_mesh(4), in_specs=P("x"), out_specs=P("x"))
        assert "optimization_barrier" not in jax.jit(mapped).lower(jnp.ones((16, 2))).as_text()


def test_the_rounds_of_a_loop_share_a_name(monkeypatch):
    monkeypatch.setattr(running, "UNROLL_UP_TO", 2)
    found = names(lambda x: ringcoll.psum(x, "x", algorithm="ring"))
    ends = [re.sub(r"while/body/\w+/", "", name) for name in found]  # JAX's own of the loop
    # A sum sends its first contributions before the loop.
    rounds = ["all_gather/rounds 1 to 7", "reduce_scatter/round 1", "reduce_scatter/rounds 2 to 7"]
    assert ends == [f"ringcoll.psum(ring)/{which}" for which in rounds]
