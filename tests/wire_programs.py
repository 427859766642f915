"""Compile a psum and an all-gather with a wire for a topology; print what they send as JSON.

python tests/wire_programs.py v5e:4x2
"""

import json
import re
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from ringcoll import overlap
from ringcoll.commands.overlap import mesh_on

#: The shape of a rank's operand, in bfloat16.
SHAPE = (1024, 128)
#: The type of a collective's result; it may be a tuple of several messages.
SENT = re.compile(
    r"= ([^=]*?) "
    r"(?:collective-permute|all-gather|all-to-all|all-reduce|reduce-scatter)(?:-start)?\("
)
#: The dtype of an array; a scalar in such a tuple is no message.
DTYPE = re.compile(r"(\w+)\[\d")


def both(x):
    """Collectives of computed operands whose results are used: a compiler may fuse both."""
    total = ringcoll.psum(2 * x, "x", wire="int8")
    return 2 * total, 2 * ringcoll.all_gather(2 * x, "x", wire="int8")


def sent(topology):
    """The dtypes of each message, and the bytes that a rank sends."""
    mesh = mesh_on(topology)
    shape = (SHAPE[0] * mesh.size, *SHAPE[1:])
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
    mapped = jax.shard_map(both, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    program = overlap.compile_for(topology, mapped, x)
    rows = overlap.report(program).rows
    return {
        "dtypes": [DTYPE.findall(shapes) for shapes in SENT.findall(program.text)],
        "messages": sum(row.count for row in rows),
        "bytes": sum(row.count * row.bytes for row in rows),
    }


if __name__ == "__main__":
    json.dump(sent(sys.argv[1]), sys.stdout)
