"""A ring of experts: blocks of tokens travel, and a sum of the results follows each block.

While the experts work on the tokens of one round, the tokens of the next round arrive, and the sums
of the previous round travel back. Backward, cotangents of the sums travel in place of the tokens,
and gradients of the tokens follow them.

A round has few rows for each expert. A gradient of the weights is as large as the weights, so a
product for it in every round would take longer to write than to compute. If a bound (`max_send`)
says how many rows there can be, the rows of all rounds are kept and multiplied once. Without a
bound, there must be room for every choice, which is too much to keep: then each round computes its
rows again, and adds its gradient of the weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringcoll.collectives.all_gather import all_gather
from ringcoll.collectives.visits import Rounds, Rows
from ringcoll.layers.expert_parallel.experts import Experts, Kernel
from ringcoll.layers.expert_parallel.routing import Routing
from ringcoll.runtime.value_types import with_common_axes


def by_ring(
    x: Array,
    routing: Routing,
    experts: Experts,
    axes: tuple[Any, ...],
    max_send: int | None,
    algorithm: str,
) -> Array:
    """The weighted sums of all experts' results for this rank's tokens: `[t, d] -> [t, d]`."""
    leaves, structure = jax.tree.flatten((x, routing.ids, routing.weights, experts))
    x, ids, weights, experts = jax.tree.unflatten(structure, with_common_axes(leaves, axes))
    table = all_gather((weights, ids), axes, axis=0, tiled=True)  # [n t, k]
    return _mixed(_Ring(axes, algorithm, max_send, max(len(x), 1)), x, *table, experts)


@dataclass(frozen=True)
class _Ring:
    """Brings the tokens of all ranks to this rank's experts.

    Attributes:
        axes, algorithm, max_send: as for `moe`.
        tokens: the number of tokens of a rank, or 1 if it has none.
    """

    axes: tuple[Any, ...]
    algorithm: str
    max_send: int | None
    tokens: int

    def tour(
        self, x: Array, visit: Callable[[Any, Rows], tuple[Any, Array]], carry: Any
    ) -> tuple[Any, Array]:
        """Bring the tokens of all ranks to the visit, and the sums of its results home."""
        rounds = Rounds(name="moe", axes=self.axes, algorithm=self.algorithm, dim=0)
        return rounds.tour(x, visit, carry, halved=True)

    def work(self, at: Rows, ids: Array, x: Array, weights: Array, experts: Experts) -> Array:
        """The weighted sums of this rank's experts' results for the tokens of a round."""
        return experts.weighted(x, at.take(ids), at.take(weights), self.axes, self.most(len(x)))

    def most(self, tokens: int) -> int | None:
        """The most rows that this many tokens may have; None without a bound."""
        return None if self.max_send is None else -(-self.max_send * tokens // self.tokens)

    def keeps(self) -> bool:
        """Whether the rows of all rounds are kept for gradients."""
        return self.max_send is not None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed(ring: _Ring, x: Array, weights: Array, ids: Array, experts: Experts) -> Array:
    def visit(_: None, arrived: Rows) -> tuple[None, Array]:
        return None, ring.work(arrived, ids, arrived.value, weights, experts)

    return ring.tour(x, visit, None)[1]


def _forward(ring: _Ring, x: Array, weights: Array, ids: Array, experts: Experts) -> Any:
    saved = list[Any]()

    def visit(_: None, arrived: Rows) -> tuple[None, Array]:
        x = arrived.value
        if ring.keeps():
            result, of_round = _keeping(ring, arrived, ids, x, weights, experts)
        else:
            result, of_round = ring.work(arrived, ids, x, weights, experts), x
        saved.append(of_round)
        return None, result

    return ring.tour(x, visit, None)[1], (saved, weights, ids, experts)


def _backward(ring: _Ring, residuals: Any, ct: Array) -> tuple[Any, ...]:
    saved, weights, ids, experts = residuals
    if not ring.keeps():
        # Without the barrier, a compiler would keep the forward pass's results instead of computing
        # them again.
        saved, ct = lax.optimization_barrier((saved, ct))
    rounds, products = iter(saved), list[Any]()

    def visit(sums: Any, arrived: Rows) -> tuple[Any, Array]:
        of_round, ct = next(rounds), arrived.value
        if ring.keeps():
            pull, multiplied = of_round
            dx, dweights, cts = pull(ct)
            gradients = [dweights]
            products.append([(*operands, ct) for operands, ct in zip(multiplied, cts, strict=True)])
        else:
            recompute = partial(ring.work, arrived, ids)
            dx, *gradients = jax.vjp(recompute, of_round, weights, experts)[1](ct)
        # They stay on this rank: they are added in float32, and rounded once.
        exact = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), gradients)
        return exact if sums is None else jax.tree.map(lax.add, sums, exact), dx

    sums, dx = ring.tour(ct, visit, None)
    like = [weights, experts][: len(sums)]
    dweights, *of_experts = jax.tree.map(lambda total, x: total.astype(x.dtype), sums, like)
    if ring.keeps():
        leaves, structure = jax.tree.flatten(experts)
        pairs = zip(leaves, zip(*products, strict=True), strict=True)
        of_leaves = [_of_weights(experts.product, w, rounds) for w, rounds in pairs]
        of_experts = [jax.tree.unflatten(structure, of_leaves)]
    return dx, dweights, None, *of_experts


_mixed.defvjp(_forward, _backward)


def _keeping(
    ring: _Ring, at: Rows, ids: Array, x: Array, weights: Array, experts: Experts
) -> tuple[Array, Any]:
    """The work of a round, its pull-back, and the rows that were multiplied, with their sizes.

    The pull-back returns the cotangents of the products in place of the gradients of the weights.
    """
    every, most = len(x) * min(ids.shape[-1], experts.count), ring.most(len(x))
    count = every if most is None else min(most, every)
    zeros = [jnp.zeros((count, w.shape[-1]), x.dtype) for w in jax.tree.leaves(experts)]
    zeros = with_common_axes([*zeros, x], ())[:-1]

    def work(x: Array, weights: Array, zeros: Sequence[Array]) -> tuple[Array, Any]:
        multiplied, added = [], iter(zeros)

        def product(rows: Array, w: Array, sizes: Array) -> Array:
            multiplied.append((rows, sizes))
            y = experts.product(rows, w, sizes)
            return y + next(added).astype(y.dtype)

        return ring.work(at, ids, x, weights, replace(experts, kernel=product)), multiplied

    result, pull, multiplied = jax.vjp(work, x, weights, zeros, has_aux=True)
    return result, (pull, multiplied)


def _of_weights(product: Kernel, weights: Array, rounds: Sequence[tuple[Array, ...]]) -> Array:
    """The gradient of weights, by one product of the rows of all rounds.

    Args:
        product: multiplies rows that are sorted by expert.
        weights: `[e, d, f]`.
        rounds: for each round, the rows, the number of rows of each expert, and the cotangents of
            the products.
    """
    rows, sizes, cts = zip(*rounds, strict=True)
    experts = []  # the expert of each row; unused rows come last
    for x, of_round in zip(rows, sizes, strict=True):
        at = jnp.arange(len(x), dtype=of_round.dtype)
        experts.append((at[:, None] >= jnp.cumsum(of_round)[None]).sum(1))
    order = jnp.argsort(jnp.concatenate(experts), stable=True)
    together, ct = (jnp.take(jnp.concatenate(x), order, axis=0, mode="clip") for x in (rows, cts))
    total = sum(sizes[1:], sizes[0])
    y, pull = jax.vjp(lambda w: product(together, w, total), weights)
    return pull(ct.astype(y.dtype))[0]
