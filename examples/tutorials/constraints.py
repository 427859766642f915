# %% [markdown]
"""
# Constrain an intermediate result

`with_sharding_constraint`, what the compiler does with it, and the same in `shard_map`.

    python -m examples.tutorials.constraints

Under `jit` you shard the operands, and the compiler chooses how every intermediate result is
sharded: it propagates shardings forward and backward through the program. `jax.debug` shows its
choice. `jax.lax.with_sharding_constraint` overrules the choice for one result, and the compiler
inserts the collectives that this needs. In `shard_map`, with ringcoll, you write these collectives
yourself.
"""

# %%
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from ringcoll import lax
from ringcoll.learn import agree, integers, make_mesh, place, sent, start

start(8)
mesh = make_mesh(x=2, y=4)
KNOWN = [P(), P("x"), P("y"), P(None, "x"), P(None, "y"), P("x", "y"), P(("x", "y"))]

# %% [markdown]
"""
## What is propagated

There are two layers. The rows of `tokens` are cut over x. The weights are cut over y as in tensor
parallelism, `up` by columns and `down` by rows. All numbers are small integers. So sums are exact
in any order, and all results below have the same bits.
"""

# %%
shapes = (16, 8), (8, 32), (32, 8)
host = [integers(*shape, seed=seed, largest=2) for seed, shape in enumerate(shapes)]
expected = (host[0] @ host[1]).clip(0) @ host[2]
specs = P("x"), P(None, "y"), P("y")
operands = [place(mesh, array, spec) for array, spec in zip(host, specs, strict=True)]
chosen: dict[str, Any] = {}


def layers(tokens: Array, up: Array, down: Array, hidden: P | None, out: P | None) -> Array:
    """Two layers; `hidden` and `out` constrain the shardings of their results."""
    activations = jax.nn.relu(tokens @ up)
    if hidden is not None:
        activations = jax.lax.with_sharding_constraint(activations, NamedSharding(mesh, hidden))
    jax.debug.inspect_array_sharding(activations, callback=lambda s: chosen.update(hidden=s))
    result = activations @ down
    if out is not None:
        result = jax.lax.with_sharding_constraint(result, NamedSharding(mesh, out))
    return result


def spec_of(sharding: Sharding) -> str:
    """A matrix's sharding as one of the specs used here, or in its own words."""
    same = (s for s in KNOWN if NamedSharding(mesh, s).is_equivalent_to(sharding, 2))
    return str(next(same, sharding))


def by_compiler(hidden: P | None = None, out: P | None = None) -> Any:
    """Compile with these constraints, run, and print what the compiler chose and sends."""
    program = jax.jit(partial(layers, hidden=hidden, out=out)).lower(*operands).compile()
    result = program(*operands)
    print(f"\nconstraints: hidden {hidden or '-'}, result {out or '-'}")
    print(f"  hidden is {spec_of(chosen['hidden'])}, result is {spec_of(result.sharding)}")
    print(f"  sent: {sent(program)}; {sent(program).bytes:g} bytes")
    agree("  the result", numpy=expected, jit=result)
    return program


print("without a constraint:")
plain = by_compiler()

# %% [markdown]
"""
No constraint says how `hidden` is sharded. So its rows are cut as those of `tokens`, and its
columns as those of `up`. The second product adds up over y, so it ends in an all-reduce.

## Constraints

The first constraint below cuts the rows of the result over both axes. Then each device needs only
its part of the sum. But the compiler for CPUs still computes the whole sum, and cuts it afterwards.
The second constraint says that the columns of `hidden` are not cut over y. So they are gathered.
`down` is still cut over y, so the sum over y stays. The last constraint cuts the rows of `hidden`
over both axes. Then the weights are gathered, and nothing is left to add up.
"""

# %%
print("with constraints:")
by_compiler(out=P(("x", "y")))
by_compiler(hidden=P("x"))
by_compiler(hidden=P("x"), out=P("x"))
by_compiler(hidden=P(("x", "y")), out=P(("x", "y")))

# %% [markdown]
"""
A constraint changes where numbers are, never their values. It does not only change a type: outside
`jit` it moves the array at once.

## The same in shard_map

In `shard_map` a spec only describes the operands and results of the function. Inside it you see
shards, and every collective is in the code. The compiler propagates nothing there, so it chooses
nothing for you.
"""

# %%


def reduced(tokens: Array, up: Array, down: Array) -> Array:
    """`[m/2, d], [d, f/4], [f/4, d] -> [m/2, d]`: what the compiler chose by itself."""
    return lax.psum(jax.nn.relu(tokens @ up) @ down, "y", algorithm="ring")


def cut(tokens: Array, up: Array, down: Array) -> Array:
    """The same `-> [m/8, d]`: each rank keeps its part of the sum, and sends half the bytes."""
    terms = jax.nn.relu(tokens @ up) @ down
    return lax.psum_scatter(terms, "y", tiled=True, algorithm="ring")


def gathered(tokens: Array, up: Array, down: Array) -> Array:
    """`hidden` as `P("x")`: weights are gathered, and nothing is added up."""
    up = lax.all_gather(up, "y", axis=1, tiled=True, algorithm="ring")
    down = lax.all_gather(down, "y", axis=0, tiled=True, algorithm="ring")
    return jax.nn.relu(tokens @ up) @ down


def by_hand(function: Callable[..., Array], out: P) -> Any:
    """Compile and run a function of a rank's shards, and print what it sends."""
    # check_vma=False: JAX cannot know that gathered weights are the same on all ranks.
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    program = jax.jit(mapped).lower(*operands).compile()
    agree(f"  {function.__name__}", numpy=expected, ringcoll=program(*operands))
    print(f"    sent: {sent(program)}; {sent(program).bytes:g} bytes")
    return program


print("by hand:")
full, half = by_hand(reduced, P("x")), by_hand(cut, P(("x", "y")))
assert sent(half).bytes == sent(full).bytes / 2
by_hand(gathered, P("x"))
print("numpy = jit = jit with each constraint = ringcoll, exactly")

# %% [markdown]
"""
## Exercise 1: a constraint that changes nothing

Constrain `hidden` so that the program sends the same as without any constraint. Why is that
constraint still useful?
"""

# %% tags=["solution"]
same = by_compiler(hidden=P("x", "y"))
assert sent(same).kinds == sent(plain).kinds
print("the sharding stays the same if a new line, or a new compiler, would change the choice")

# %% [markdown]
"""
## Exercise 2: rows over both axes, in shard_map

Write what the compiler did for `hidden=P(("x", "y"))`. The ranks along y have the same rows. Each
takes a quarter of them, and nothing is added up. `by_hand` checks your function.
"""


# %% tags=["solution"]
def rows_over_both(tokens: Array, up: Array, down: Array) -> Array:
    size = tokens.shape[0] // jax.lax.axis_size("y")
    mine = jax.lax.dynamic_slice_in_dim(tokens, jax.lax.axis_index("y") * size, size)
    return gathered(mine, up, down)  # [m/8, d]


program = by_hand(rows_over_both, P(("x", "y")))
assert sent(program).permuted == 2 * 3 * (8 * 32 * 4) / 4  # three quarters of both weights
