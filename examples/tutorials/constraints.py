# %% [markdown]
# # Constrain an intermediate result: `with_sharding_constraint`, and what the compiler makes of it.
#
#     python -m examples.tutorials.constraints
#
# Under `jit` you shard the operands, and the compiler chooses how every intermediate result is
# sharded: it propagates shardings forward and backward through the program. `jax.debug` shows its
# choice. `jax.lax.with_sharding_constraint` overrules it at one place, and the compiler inserts the
# collectives that this takes. In `shard_map`, by ringcoll, you write these collectives yourself.

# %%
import re
from collections import Counter
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringcoll import lax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)  # instead of eight real ones
mesh = jax.make_mesh((2, 4), ("x", "y"), (AxisType.Auto,) * 2)


def place(array, spec):
    """Put an array on the mesh."""
    return jax.device_put(array, NamedSharding(mesh, spec))


def collectives(compiled):
    """The collectives of a compiled program, counted."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = Counter(re.findall(rf" ({kinds})(?:-start)?\(", compiled.as_text()))
    return ", ".join(f"{n} {kind}" for kind, n in sorted(found.items())) or "none"


# %% [markdown]
# ## What is propagated
#
# Two layers. The rows of `tokens` are cut over x; the weights are cut over y as in tensor
# parallelism, `up` by columns and `down` by rows. All numbers are small integers: sums are exact in
# any order, and all results below have the same bits.

# %%
random = np.random.default_rng(0)
host = [random.integers(-2, 3, s).astype(np.float32) for s in ((16, 8), (8, 32), (32, 8))]
expected = np.maximum(host[0] @ host[1], 0) @ host[2]
specs = P("x"), P(None, "y"), P("y")
tokens, up, down = (place(array, spec) for array, spec in zip(host, specs, strict=True))
chosen: dict[str, Any] = {}


def layers(tokens, up, down, hidden=None, out=None):
    """Two layers; `hidden` and `out` constrain the sharding of what they make."""
    made = jax.nn.relu(tokens @ up)
    if hidden is not None:
        made = jax.lax.with_sharding_constraint(made, NamedSharding(mesh, hidden))
    jax.debug.inspect_array_sharding(made, callback=lambda s: chosen.update(hidden=s))
    result = made @ down
    if out is not None:
        result = jax.lax.with_sharding_constraint(result, NamedSharding(mesh, out))
    return result


def spec_of(sharding, ndim=2):
    """A sharding as one of the specs used here, or in its own words."""
    known = [P(), P("x"), P("y"), P(None, "x"), P(None, "y"), P("x", "y"), P(("x", "y"))]
    same = (s for s in known if NamedSharding(mesh, s).is_equivalent_to(sharding, ndim))
    return str(next(same, sharding))


def by_compiler(hidden=None, out=None):
    """Compile with these constraints, run, and print what the compiler chose."""
    program = jax.jit(partial(layers, hidden=hidden, out=out)).lower(tokens, up, down).compile()
    result = program(tokens, up, down)
    np.testing.assert_array_equal(result, expected)
    asked = f"hidden {hidden or '-'}, result {out or '-'}"
    print(f"asked: {asked}")
    print(f"  hidden is {spec_of(chosen['hidden'])}, result is {spec_of(result.sharding)}")
    print(f"  sent: {collectives(program)}")
    return result


print("without a constraint:")
by_compiler()

# %% [markdown]
# Nothing said how `hidden` is sharded. Its rows come from `tokens` and its columns from `up`. The
# second product adds up over y, so it ends in an all-reduce.
#
# ## Constraints
#
# A constraint on the result asks for rows over both axes: then each device needs only its part of
# the sum. The compiler for CPUs sums all of it nevertheless, and cuts the sum. A constraint on
# `hidden` takes its columns off y: they are gathered, and since `down` is still cut over y, the sum
# stays. With rows over both axes the weights are gathered, and nothing is left to add up.

# %%
print("\nwith constraints:")
scattered = by_compiler(out=P(("x", "y")))
by_compiler(hidden=P("x"))
by_compiler(hidden=P("x"), out=P("x"))
by_compiler(hidden=P(("x", "y")), out=P(("x", "y")))

# %% [markdown]
# A constraint changes where numbers are, never what they are. It is no cast either: outside `jit`
# it moves the array at once.
#
# ## The same by hand
#
# In `shard_map` a spec only says what enters and leaves. In between you see shards, and each
# collective stands in the code. Nothing is propagated, so nothing can be chosen behind your back.

# %%


def reduced(tokens, up, down):
    """`[m/2, d], [d, f/4], [f/4, d] -> [m/2, d]`: what the compiler chose by itself."""
    return lax.psum(jax.nn.relu(tokens @ up) @ down, "y", algorithm="ring")


def cut(tokens, up, down):
    """The same `-> [m/8, d]`: each rank keeps its part of the sum, and half the bytes travel."""
    made = jax.nn.relu(tokens @ up) @ down
    return lax.psum_scatter(made, "y", tiled=True, algorithm="ring")


def gathered(tokens, up, down):
    """`hidden` as `P("x")`: weights are gathered, and nothing is added up."""
    up = lax.all_gather(up, "y", axis=1, tiled=True, algorithm="ring")
    down = lax.all_gather(down, "y", axis=0, tiled=True, algorithm="ring")
    return jax.nn.relu(tokens @ up) @ down


print("\nby hand:")
for function, out in ((reduced, P("x")), (cut, P(("x", "y"))), (gathered, P("x"))):
    # check_vma=False: JAX cannot know that gathered weights are the same on all ranks.
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    program = jax.jit(mapped).lower(tokens, up, down).compile()
    result = program(tokens, up, down)
    np.testing.assert_array_equal(result, expected)
    print(f"{function.__name__}: result is {spec_of(result.sharding)}, {collectives(program)}")
    if function is cut:
        assert result.sharding.is_equivalent_to(scattered.sharding, 2)
print("numpy = jit = jit with each constraint = ringcoll, exactly")
