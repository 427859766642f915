"""One ring written in many ways, to see which of them a compiler overlaps.

A formulation has a name such as "2lanes-joined-tied"; each part of the name is a choice:

  1lane, 2lanes  whole shards in one direction, or half of each shard in each direction
  joined         the halves of two lanes multiplied as one matmul, not as two
  tied           a barrier in each round, over the shards that arrive and the products so far
  loop           a `fori_loop` instead of one round after the other

`python -m benchmarks overlap --algorithm LIST` compiles them. The engine of the library uses the
best of them, for any schedule. A gather is 2lanes-joined-tied; if its products are added, it is
a loop without barriers (`adding` of `benchmarks.compiled.rivals`). A scatter is
2lanes-joined-tied-loop; if messages take longer than products, it runs by turns
(`ringcoll.runtime.turns`). `overlap.md` says which one is best for which machine, and why.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import jax.numpy as jnp
from jax import Array, lax

Formulation = Callable[[Array, Array], Array]


def _names() -> tuple[str, ...]:
    choices = product(("1lane", "2lanes"), ("", "joined"), ("", "tied"), ("", "loop"))
    names = ["-".join(filter(None, choice)) for choice in choices]
    return tuple(name for name in names if not name.startswith("1lane-joined"))


NAMES = _names()
FORMS = ("all_gather_matmul", "matmul_reduce_scatter")


def formulation(form: str, name: str) -> Formulation:
    """The function of x and w for one of `FORMS`; it runs in `shard_map` over an axis x."""
    chosen = name.split("-")
    function = dict(zip(FORMS, (_gathered, _scattered), strict=True))[form]
    return partial(
        function,
        lanes=1 if "1lane" in chosen else 2,
        joined="joined" in chosen,
        tied="tied" in chosen,
        loop="loop" in chosen,
    )


def _gathered(x: Array, w: Array, lanes: int, joined: bool, tied: bool, loop: bool) -> Array:
    """x: [m/n, k], w: [k, f] -> [m, f]."""
    n, rows = lax.axis_size("x"), x.shape[0] // lanes

    def multiplied(i, pieces, out):
        for lane, y in enumerate(_products(pieces, w, joined)):
            at = rank_after(-i if lane == 0 else i) * lanes * rows + lane * rows
            out = lax.dynamic_update_slice_in_dim(out, y, at, 0)
        return out

    def step(i, state):
        pieces, out = state
        coming = [hop(piece, 1 - 2 * lane) for lane, piece in enumerate(pieces)]
        state = coming, multiplied(i, pieces, out)
        return lax.optimization_barrier(state) if tied else state

    out = lax.pcast(lax.empty((n * x.shape[0], w.shape[1]), x.dtype), "x", to="varying")
    return multiplied(n - 1, *_turns(n - 1, step, (jnp.split(x, lanes), out), loop))


def _scattered(x: Array, w: Array, lanes: int, joined: bool, tied: bool, loop: bool) -> Array:
    """x: [m, k/n], w: [k/n, f] -> [m/n, f]."""
    n = lax.axis_size("x")
    rows = x.shape[0] // n // lanes

    def products(i, w):
        """This rank's products for the blocks whose sums arrive in round i."""
        places = [
            rank_after(-1 - i if lane == 0 else 1 + i) * lanes + lane for lane in range(lanes)
        ]
        pieces = [lax.dynamic_slice_in_dim(x, at * rows, rows, 0) for at in places]
        return _products(pieces, w, joined)

    def step(i, state):
        sums, w = state
        came = [hop(y, 1 - 2 * lane) for lane, y in enumerate(sums)]
        state = [a + b for a, b in zip(came, products(i + 1, w), strict=True)], w
        return lax.optimization_barrier(state) if tied else state

    sums, _ = _turns(n - 1, step, (products(0, w), w), loop)
    return jnp.concatenate(sums)


def _products(pieces: list[Array], w: Array, joined: bool) -> list[Array]:
    if joined:
        return jnp.split(jnp.concatenate(pieces) @ w, len(pieces))
    return [piece @ w for piece in pieces]


def _turns(turns: int, step: Callable, state, loop: bool):
    if loop:
        return lax.fori_loop(0, turns, step, state)
    for i in range(turns):
        state = step(i, state)
    return state


def rank_after(further) -> Array:
    """The number of the rank `further` places after this one on the ring."""
    return (lax.axis_index("x") + further) % lax.axis_size("x")


def hop(x: Array, shift: int) -> Array:
    """The x of the rank `shift` places before this one."""
    n = lax.axis_size("x")
    return lax.ppermute(x, "x", [(rank, (rank + shift) % n) for rank in range(n)])
