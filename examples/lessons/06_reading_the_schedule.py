# %% [markdown]
"""
# Lesson 6: reading the compiled program

A transfer *could* hide under a product, but the compiler decides whether it does. Its decision is
in the text of the compiled program. There a transfer is a pair, its start and its done, and the
chip waits at the done:

    collective-permute-start   the shard leaves
    fusion                     the product, meanwhile
    collective-permute-done    it has arrived, or the chip waits: that is exposed

`ringcoll.overlap` reads that text, and adds up the times. The compiler for TPUs needs no TPU
(`pip install "ringcoll[tpu]"`). Most figures below are for eight v5e chips that are not here, so
they are compiled and not measured. `help(ringcoll.overlap)` describes the model.
"""

# %%
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from ringcoll import overlap
from ringcoll.learn import claim, messages, start

start(8)

# %% [markdown]
"""
## For CPUs

These are the two programs of lesson 5, compiled for operands that are only shapes.
"""

# %%


def plain(x: Array, w: Array) -> Array:
    return lax.all_gather(x, "x", tiled=True) @ w


def ours(x: Array, w: Array) -> Array:
    return ringcoll.all_gather_matmul(x, w, "x", algorithm="ring")


def compiled(matmul: Callable[[Array, Array], Array], mesh: Mesh, m: int, k: int, f: int) -> Any:
    """Compile a program for operands that are only shapes."""
    specs = P("x", None), P(None, "x")
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((m, k), (k, f)), specs, strict=True)
    ]
    mapped = jax.shard_map(matmul, mesh=mesh, in_specs=specs, out_specs=P(None, "x"))
    return jax.jit(mapped).lower(*operands).compile()


cpus = overlap.report(compiled(ours, jax.make_mesh((8,), ("x",)), 512, 512, 512))
claim("for CPUs: 7 messages", [row.count for row in cpus.rows] == [1] * 7)
claim("and no product under any: a CPU waits for each", cpus.exposed_share == 1)

# %% [markdown]
"""
## For TPUs that are not here

`overlap.mesh` has eight chips, ordered so that successive ranks are neighbours. Without the
compiler for TPUs, the cells from here on print how to install it, or nothing.
"""

# %%
mesh: Mesh | None = None
try:
    mesh = overlap.mesh("v5e:4x2")
except ModuleNotFoundError as missing:
    print(missing)
reports = {}
if mesh:
    for matmul in (plain, ours):
        program = compiled(matmul, mesh, 4096, 4096, 40960)
        reports[matmul] = overlap.report(program)
        print(str(reports[matmul]).partition("\nassumed:")[0])
    gathered, ring = (reports[matmul].exposed_share for matmul in (plain, ours))
    claim(f"for TPUs, plain: the chip waits for {gathered:.0%} of the time", gathered > 0.2)
    claim(f"ours: for {ring:.0%}", ring < 0.02)

# %% [markdown]
"""
A notebook draws a report: what the chip does above, what the wire does below. First gather, then
multiply; then ours.
"""

# %%
reports.get(plain)

# %%
reports.get(ours)

# %% [markdown]
"""
## The text itself

This is our program, compiled last, to read for yourself. The rounds are a loop of two rounds a
turn, so the text has two. (A product is a fusion of kind kOutput.)
"""

# %%
words = {"permute-start(": "start", "permute-done(": "done", "kind=kOutput": "multiply"}
if mesh:
    found = re.findall("|".join(map(re.escape, words)), program.as_text())
    story = " ".join(words[word] for word in found)
    print(story.replace("done ", "done\n"))
    claim("from each start to its done is a product", story.count("start multiply done") == 2)
    sent = sum(row.count for row in reports[ours].rows)  # the last shard returns to its rank
    starts = found.count("permute-start(")
    claim(f"{starts} starts in a loop of 4 turns send {sent} times", sent == 8)

# %% [markdown]
"""
## Exercise 1: count before you compile

`algorithm="two_ended"` sends to both neighbours at once, and `"bruck"` doubles. How many messages
does a rank send by each, on 8 ranks? Say it, then count in the compiled program for CPUs. (For the
second one, `all_gather_matmul` multiplies several shards a round.)
"""

# %% tags=["solution"]
for algorithm, count in {"two_ended": 7, "bruck": 3}.items():

    def by(x: Array, w: Array, algorithm: str = algorithm) -> Array:
        return ringcoll.all_gather_matmul(x, w, "x", algorithm=algorithm)

    program = compiled(by, jax.make_mesh((8,), ("x",)), 512, 512, 512)
    claim(f"by {algorithm}: {count} messages", messages(program) == count)

# %% [markdown]
"""
## Exercise 2: a test

Write the lesson as a test for CI, by `overlap.assert_overlapped`: it passes for `ours` and fails
for `plain`, if more than a tenth of the time is exposed. (This needs the compiler for TPUs. For
CPUs both fail: every message is exposed there.)
"""


# %% tags=["solution"]
def refusal(matmul: Callable[[Array, Array], Array], mesh: Mesh) -> str:
    """What the test says of a program; "" if it passes."""
    try:
        overlap.assert_overlapped(compiled(matmul, mesh, 4096, 4096, 40960), max_exposed=0.1)
    except AssertionError as error:
        return str(error)
    return ""


if mesh:
    print(refusal(plain, mesh))
    claim("the plain program is refused", "exposed" in refusal(plain, mesh))
    claim("ours passes", not refusal(ours, mesh))
