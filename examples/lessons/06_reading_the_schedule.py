# %% [markdown]
"""
# Lesson 6: reading the compiled program

A transfer *can* be hidden under a product, but the compiler decides whether it is. Its decision is
in the text of the compiled program. There a transfer is a pair of instructions, a start and a done.
The chip waits at the done if the transfer has not ended:

    collective-permute-start   the shard leaves
    fusion                     the product, while the shard travels
    collective-permute-done    the chip waits for the shard: this wait is exposed

`ringcoll.overlap` reads that text, and adds up the times. The compiler for TPUs needs no TPU
(`pip install -e ".[tpu]"`). Most figures below are for eight v5e chips. They come from compiled
programs, not from a measurement. `help(ringcoll.overlap)` describes the model.
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
claim("no message is hidden: a CPU waits for each", cpus.exposed_share == 1)

# %% [markdown]
"""
## For TPUs, without a TPU

`ringcoll.mesh` orders eight chips so that successive ranks are neighbours. If the compiler for TPUs
is not installed, the next cell prints how to install it, and the cells after that print nothing.
"""

# %%
mesh: Mesh | None = None
try:
    mesh = ringcoll.mesh("v5e:4x2")
except ModuleNotFoundError as missing:
    print(missing)
reports = {}
if mesh:
    for matmul in (plain, ours):
        program = compiled(matmul, mesh, 4096, 4096, 40960)
        reports[matmul] = overlap.report(program)
        print(str(reports[matmul]).partition("\nassumed:")[0])
    gathered, ring = (reports[matmul].exposed_share for matmul in (plain, ours))
    claim(f"for TPUs, plain: the chip waits {gathered:.0%} of the time", gathered > 0.2)
    claim(f"ours: it waits {ring:.0%} of the time", ring < 0.02)

# %% [markdown]
"""
A notebook shows a report as a picture: the chip is above, the wire below. The first picture is the
plain program, the second is ours.
"""

# %%
reports.get(plain)

# %%
reports.get(ours)

# %% [markdown]
"""
## The text itself

These are the starts, dones and products of our program, in the order of its text. A line is a
round; the last product hides nothing. (A product is a fusion of kind kOutput.)
"""

# %%
words = {"permute-start(": "start", "permute-done(": "done", "kind=kOutput": "multiply"}
if mesh:
    found = re.findall("|".join(map(re.escape, words)), program.as_text())
    story = " ".join(words[word] for word in found)
    print(story.replace("done ", "done\n"))
    claim("a product is between each start and its done", story.count("start multiply done") == 7)
    sent = sum(row.count for row in reports[ours].rows)
    claim(f"{found.count('permute-start(')} starts send {sent} times", sent == 7)

# %% [markdown]
"""
## Exercise 1: count before you compile

`algorithm="two_ended"` sends to both neighbours at once, and `"bruck"` doubles the shards held in
each round. How many messages does a rank send with each, on 8 ranks? Answer first, then count in
the compiled program for CPUs. (With `"bruck"`, `all_gather_matmul` multiplies several shards per
round.)
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

Turn this lesson into a test for CI, with `overlap.assert_overlapped`. Allow a tenth of the time to
be exposed: then the test passes for `ours` and fails for `plain`. (This needs the compiler for
TPUs. For CPUs both fail, because every message is exposed there.)
"""


# %% tags=["solution"]
def refusal(matmul: Callable[[Array, Array], Array], mesh: Mesh) -> str:
    """The error of the test for a program; "" if it passes."""
    try:
        overlap.assert_overlapped(compiled(matmul, mesh, 4096, 4096, 40960), max_exposed=0.1)
    except AssertionError as error:
        return str(error)
    return ""


if mesh:
    print(refusal(plain, mesh))
    claim("the plain program is refused", "exposed" in refusal(plain, mesh))
    claim("ours passes", not refusal(ours, mesh))
