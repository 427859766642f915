"""Rings that others published for the same matmuls, rewritten here.

Each is a function of x and w in `shard_map` over an axis x, for one form of
`benchmarks.compiled.programs`. If the authors keep weights in another order, `ARRANGED` puts them
in that order outside the program, so that this takes no time in the program.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from benchmarks.compiled.ring_formulations import hop, rank_after

Call = Callable[[Array, Any], Array]

#: Names and sources.
SOURCES: Mapping[str, str] = {
    "notebook": "JAX's notebook on shard_map: half of each shard either way, two matmuls a round",
    "looped": "Pope et al., arXiv 2211.05102, looped collective einsum: a loop that adds up in "
    "its matmul, weights arranged in the order of its turns",
    "columns": "the tensor-parallel tutorials of the University of Amsterdam: each direction has "
    "its own half of w, and the halves are kept as two arrays",
    "adding": "the plainest: a loop both ways, one matmul a turn, which adds to the sum",
}


def _halves(w: Array) -> tuple[Array, Array]:
    first, second = jnp.split(w, 2, 1)
    return first, second


def _varying(shape: tuple[int, ...], like: Array) -> Array:
    return lax.pcast(jnp.zeros(shape, like.dtype), "x", to="varying")


def _forwarded(pieces: list[Array]) -> list[Array]:
    """Send the first piece to the next rank, the second to the rank before."""
    return [hop(piece, 1 - 2 * lane) for lane, piece in enumerate(pieces)]


def _origins(turn: Any) -> list[Array]:
    """The ranks whose pieces a rank holds after `turn` hops."""
    return [rank_after(-turn), rank_after(turn)]


def _gathered(turn: Callable, pieces: list[Array], out: Any, loop: bool = False) -> Any:
    """Run `turn(i, pieces, out)` on the pieces after i hops, i < n; the last is not in the loop."""

    def step(i, state):
        pieces, out = state
        return _forwarded(pieces), turn(i, pieces, out)

    n, state = lax.axis_size("x"), (pieces, out)
    if loop:
        state = lax.fori_loop(0, n - 1, step, state)
    else:
        for i in range(n - 1):
            state = step(i, state)
    return turn(n - 1, *state)


def _scattered(contribution: Callable, loop: bool = False) -> list[Array]:
    """The finished sums; `made(i)` is this rank's contribution to sums after i hops."""
    n = lax.axis_size("x")

    def step(i, sums):
        return [a + b for a, b in zip(_forwarded(sums), contribution(i), strict=True)]

    if loop:
        return lax.fori_loop(1, n, step, contribution(0))
    sums = contribution(0)
    for i in range(1, n):
        sums = step(i, sums)
    return sums


def _rows_gathered(x: Array, w: Array, loop: bool = False) -> Array:
    n, rows = lax.axis_size("x"), x.shape[0] // 2

    def turn(i, pieces, out):
        for lane, (piece, origin) in enumerate(zip(pieces, _origins(i), strict=True)):
            at = (2 * origin + lane) * rows
            out = lax.dynamic_update_slice_in_dim(out, piece @ w, at, 0)
        return out

    return _gathered(turn, jnp.split(x, 2), _varying((2 * n * rows, w.shape[1]), x), loop)


def _rows_gathered_by_columns(x: Array, halves: tuple[Array, Array]) -> Array:
    """Whole shards in both directions, one direction for each half of the result."""
    n, rows = lax.axis_size("x"), x.shape[0]

    def turn(i, pieces, outs):
        return [
            lax.dynamic_update_slice_in_dim(out, piece @ half, origin * rows, 0)
            for piece, half, out, origin in zip(pieces, halves, outs, _origins(i), strict=True)
        ]

    outs = [_varying((n * rows, half.shape[1]), x) for half in halves]
    return jnp.concatenate(_gathered(turn, [x, x], outs), 1)


def _sliced(w: Array, turn: Any, rows: int) -> list[Array]:
    """The rows of w for the two pieces of a turn."""
    places = [(2 * origin + lane) * rows for lane, origin in enumerate(_origins(turn))]
    return [lax.dynamic_slice_in_dim(w, at, rows, 0) for at in places]


def _contraction(x: Array, w: Array, cut: Callable, loop: bool, joined: bool) -> Array:
    """`cut(w, turn, rows)` gives the factors for the two pieces of a turn."""

    def turn(i, pieces, total):
        factors = cut(w, i, pieces[0].shape[1])
        if joined:
            return total + jnp.concatenate(pieces, 1) @ jnp.concatenate(factors)
        return total + pieces[0] @ factors[0] + pieces[1] @ factors[1]

    total = _varying((x.shape[0], w.shape[1]), x)
    return _gathered(turn, jnp.split(x, 2, 1), total, loop)


def _in_turn(w: Array, turn: Any, rows: int) -> list[Array]:
    return [lax.dynamic_slice_in_dim(w, 2 * turn * rows, 2 * rows, 0)]


def _in_order_of_turns(w: Array) -> Array:
    n = lax.axis_size("x")
    return jnp.concatenate([part for i in range(n) for part in _sliced(w, i, w.shape[0] // n // 2)])


def _contraction_by_columns(x: Array, halves: tuple[Array, Array]) -> Array:
    """Whole shards in both directions, one direction for each half of the result."""

    def turn(i, pieces, totals):
        k = x.shape[1]
        return [
            total + piece @ lax.dynamic_slice_in_dim(half, origin * k, k, 0)
            for piece, half, total, origin in zip(pieces, halves, totals, _origins(i), strict=True)
        ]

    totals = [_varying((x.shape[0], half.shape[1]), x) for half in halves]
    return jnp.concatenate(_gathered(turn, [x, x], totals, loop=True), 1)


def _blocks(x: Array, i: Any, parts: int) -> list[Array]:
    """The rows of x for the two sums after i hops: half a block each, or a block each."""
    rows = x.shape[0] // lax.axis_size("x") // parts
    places = [parts * origin + lane * (parts - 1) for lane, origin in enumerate(_origins(i + 1))]
    return [lax.dynamic_slice_in_dim(x, at * rows, rows, 0) for at in places]


def _rows_scattered(x: Array, w: Array, loop: bool, joined: bool) -> Array:
    def contribution(i):
        blocks = _blocks(x, i, 2)
        if joined:
            return jnp.split(jnp.concatenate(blocks) @ w, 2)
        return [block @ w for block in blocks]

    return jnp.concatenate(_scattered(contribution, loop))


def _rows_scattered_by_columns(x: Array, halves: tuple[Array, Array]) -> Array:
    def contribution(i):
        return [block @ half for block, half in zip(_blocks(x, i, 1), halves, strict=True)]

    return jnp.concatenate(_scattered(contribution), 1)


#: By name, then by form.
RIVALS: Mapping[str, Mapping[str, Call]] = {
    "notebook": {
        "all_gather_matmul": _rows_gathered,
        "matmul_reduce_scatter": partial(_rows_scattered, loop=False, joined=False),
        "contraction_gather": partial(_contraction, cut=_sliced, loop=False, joined=False),
    },
    "looped": {
        "all_gather_matmul": partial(_rows_gathered, loop=True),
        "matmul_reduce_scatter": partial(_rows_scattered, loop=True, joined=True),
        "contraction_gather": partial(_contraction, cut=_in_turn, loop=True, joined=True),
    },
    "columns": {
        "all_gather_matmul": _rows_gathered_by_columns,
        "matmul_reduce_scatter": _rows_scattered_by_columns,
        "contraction_gather": _contraction_by_columns,
    },
    "adding": {
        "contraction_gather": partial(_contraction, cut=_sliced, loop=True, joined=True),
    },
}
#: By name and form, the function that rearranges w before the program.
ARRANGED: Mapping[tuple[str, str], Callable[[Array], Any]] = {
    ("looped", "contraction_gather"): _in_order_of_turns,
    **{("columns", form): _halves for form in RIVALS["columns"]},
}
