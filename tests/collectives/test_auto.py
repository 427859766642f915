"""The compiled program of algorithm="auto": lax's own program where the table says lax."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import make_mesh

from ringcoll import lax
from ringcoll.choose.table import default_table

CALLS = {
    "all_gather": lambda lib, x: lib.all_gather(x, "x", tiled=True),
    "psum_scatter": lambda lib, x: lib.psum_scatter(x, "x", tiled=True),
    "psum": lambda lib, x: lib.psum(x, "x"),
    "pmean": lambda lib, x: lib.pmean(x, "x"),
    "pmax": lambda lib, x: lib.pmax(x, "x"),
    "pmin": lambda lib, x: lib.pmin(x, "x"),
    "all_to_all": lambda lib, x: lib.all_to_all(x, "x", 0, 0, tiled=True),
}
#: The functions that only move data.
MOVES = ("all_gather", "all_to_all")


def operations(lib, name, dtype, elements):
    """Every operation of the compiled program with the shape of its result, in order."""
    mesh = make_mesh(8)
    spec = P("x")
    mapped = jax.shard_map(
        lambda x: CALLS[name](lib, x), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    operand = jax.ShapeDtypeStruct((8 * elements,), dtype, sharding=NamedSharding(mesh, spec))
    text = jax.jit(mapped).lower(operand).compile().as_text()
    found = re.findall(r" = (.+?) ([a-z][a-z0-9-]*)\(", text)
    assert any(op == "parameter" for _, op in found)
    return found


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("name", CALLS)
def test_where_the_table_says_lax_the_program_is_lax_own(name, dtype):
    if dtype == jnp.bfloat16 and name in MOVES:
        return  # it travels as integers
    row = "psum" if name in ("pmean", "pmax", "pmin") else name
    n_bytes = 512 * jnp.dtype(dtype).itemsize
    picked = default_table().pick(row, "cpu", 8, n_bytes, jnp.dtype(dtype).name, jax.__version__)
    assert picked == "lax"
    assert operations(lax, name, dtype, 512) == operations(jax.lax, name, dtype, 512)


@pytest.mark.parametrize("elements", [512, 2**16])
@pytest.mark.parametrize("name", MOVES)
def test_narrow_floats_are_moved_as_integers(name, elements):
    op = name.replace("_", "-")

    def moved(program):
        """The dtypes that the collective moves. (The shape of a tuple begins with a bracket.)"""
        return {shape.strip("(")[:3] for shape, kind in program if kind == op}

    ours = operations(lax, name, jnp.bfloat16, elements)
    assert moved(ours) == {"u16"}
    assert not any("f32" in shape for shape, _ in ours)
    # If this fails, XLA on CPU no longer promotes, and `moved` can go.
    theirs = operations(jax.lax, name, jnp.bfloat16, elements)
    assert moved(theirs) == {"f32"}
