"""Expert-parallel layers: an axis shards the experts, and the tokens.

Call `moe` inside `jax.shard_map`, on a rank's own tokens and experts: with E experts on n ranks,
expert e is on rank e // (E/n). Every token goes to the experts that the router chooses for it. No
token is dropped, however uneven the choice is. `algorithm` is how tokens get to experts:

- "gather": all tokens travel to all ranks, and the sums of the experts' results travel back;
- "ring", "bidirectional_ring": the same, block by block. While the experts work on one block of
  tokens, the next block arrives, and the sums of the previous block travel back;
- "ragged_all_to_all": a token travels only to the ranks of its experts, once for each expert, and
  each result travels back. These are fewer bytes if n is much larger than `top_k`;
- "auto": on TPUs the cheapest by `ringcoll.layers.expert_parallel.auto` for these shapes; elsewhere
  "gather".

Gradients are those of the same layer on one device, for tokens, router and experts. As for
`tensor_parallel`, take them outside `shard_map`, or inside under `check_vma=True`.

With tensor parallelism over a second axis, shard the features of the experts over it: `gate` and
`up` along their last dimension, `down` along its middle one. Do not shard the tokens over it. The
output is then a partial sum: add it up, `psum(moe(...).output, "model")`. `partition_specs` takes
both axes.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from ringcoll.choose.plan import NAMED, Plan
from ringcoll.collectives.all_gather import all_gather, psum_scatter
from ringcoll.collectives.axes import AxisName, axes_of, rank_count
from ringcoll.collectives.front_door import Pytree
from ringcoll.collectives.public import integer, public
from ringcoll.collectives.ragged_all_to_all import ragged_all_to_all
from ringcoll.layers.expert_parallel.auto import GATHER, RAGGED, RINGS, Mixture, fastest
from ringcoll.layers.expert_parallel.experts import (
    Experts,
    Kernel,
    count_each,
    experts_of,
    orders,
    permute,
    spread,
    weighted_sum,
)
from ringcoll.layers.expert_parallel.ring import by_ring
from ringcoll.layers.expert_parallel.routing import Routing, route
from ringcoll.layers.parameters import array_of, shard
from ringcoll.layers.replicas import shared
from ringcoll.layers.tensor_parallel import partition_specs as by_name
from ringcoll.runtime.scopes import record_plan_at_lowering
from ringcoll.runtime.value_types import device_kind, sharded_dims, with_common_axes

__all__ = ["ALGORITHMS", "Routed", "moe", "partition_specs", "shard"]

#: What `algorithm` may be.
ALGORITHMS = ("auto", GATHER, *RINGS, RAGGED)


class Routed(NamedTuple):
    """What `moe` returns: the result for each token, and the load-balancing loss, 1 at best."""

    output: Array
    balance_loss: Array


@public("layers.expert_parallel.")
def moe(
    x: Array,
    router: Array,
    experts: Any,
    axis_name: AxisName,
    *,
    top_k: int,
    normalize: bool = True,
    activation: Callable[[Array], Array] = jax.nn.silu,
    algorithm: str = "auto",
    max_send: int | None = None,
    precision: Any = None,
    kernel: Kernel | None = None,
) -> Routed:
    """A mixture of gated MLPs: each token goes to its `top_k` experts, wherever they are.

    `x: [..., t, d], router: [d, E], gate, up: [E/n, d, f], down: [E/n, f, d] -> [..., t, d]`, for
    the tokens of this rank. An expert makes `(activation(x @ gate) * (x @ up)) @ down`; a token
    gets the sum of its experts' results, weighted by the softmax of `x @ router`.

    Args:
        x: tokens of this rank; leading dimensions are tokens too.
        router: the same on all ranks.
        experts: a mapping or an object with this rank's gate, up and down (and the router, or not).
        axis_name: the axis, or axes, that the experts and the tokens are sharded over.
        top_k: the number of experts of a token.
        normalize: whether the weights of a token are divided by their sum. Pass False for
            `top_k=1`, or the output has no gradient for the router.
        activation: the activation of the gate.
        algorithm: see above.
        max_send: the largest number of rows that one rank may have for another; a token has a row
            for each of its experts there. It bounds buffers, and the messages of
            "ragged_all_to_all". A ring sends a rank's tokens in blocks; the bound of a block is in
            proportion to its tokens. "gather" bounds only the rows from all ranks together, by
            n max_send. If there are more rows, the output is NaN: with a ring, for the tokens of
            that round; otherwise, for all tokens.
        precision: the precision of the experts' products, as in `jax.lax.dot`.
        kernel: multiplies rows that are sorted by expert, `kernel(rows, weights, sizes)`, and has
            gradients: `[r, d], [E/n, d, f], [E/n] -> [r, f]`. Its results for rows after those of
            the last expert are not used. None for `jax.lax.ragged_dot`. XLA:TPU turns that into a
            dense product of all rows and experts; on TPU pass `gmm` of
            `jax.experimental.pallas.ops.tpu.megablox`, under `check_vma=False`.

    Returns:
        `Routed(output, balance_loss)`. The loss is E times a sum over the experts: the share of
        choices that fell on an expert, times its mean probability. It is computed over all ranks of
        the axis, and is the same on each. It is 1 if all experts are chosen equally often, and at
        most E. Its gradient is for the router (and x): add the loss to yours with a small factor,
        such as 0.01.

    With "gather" and the rings, every rank gathers the experts and weights of all tokens; tokens
    travel n-1 rounds, and so do sums, in the dtype of x. The weights are float32 or wider, and so
    is the sum over a token's experts on one rank. "gather" holds the tokens of all ranks, and as
    many rows as its experts may get: n t min(top_k, E/n), or n max_send. The rings hold 1/n of
    these rows, and compute them again for gradients. For that they keep the blocks of all rounds.
    With max_send they keep the rows of all rounds and their results instead: as many as "gather".

    With "ragged_all_to_all", every rank gathers how many tokens each rank has for each expert. A
    rank sends t top_k rows, and gets as many back. It holds as many rows as "gather".

    Gradient: for x the same messages in reverse; for the router a `psum`; for the experts nothing
    is sent. JAX refuses forward mode (`jvp`).

    Raises:
        KeyError: gate, up or down is missing.
        TypeError: x and the experts have different dtypes, or are not floats; top_k is not an
            integer.
        ValueError: shapes do not fit; E is not divisible by n; top_k is not in 1 to E; there is no
            such algorithm.

    Source: Shazeer et al., "Outrageously large neural networks" (2017); Lepikhin et al., "GShard"
    (2020), and Fedus et al., "Switch transformers" (2021), for the loss; Gale et al., "MegaBlocks"
    (2022), for experts that drop no token.

    >>> from ringcoll.layers import expert_parallel as ep
    >>> shapes = {"gate": (4, 2, 3), "up": (4, 2, 3), "down": (4, 3, 2)}
    >>> experts = {name: jnp.ones(shape) for name, shape in shapes.items()}
    >>> specs = P("x"), P(), ep.partition_specs(experts, "x")
    >>> layer = partial(ep.moe, axis_name="x", top_k=2, activation=jax.nn.relu)
    >>> moe = ranks(layer, specs, ep.Routed(P("x"), P()))
    >>> y, loss = moe(jnp.arange(8.0).reshape(4, 2), jnp.zeros((2, 4)), experts)
    >>> print(y.T, loss)
    [[  3.  75. 243. 507.]
     [  3.  75. 243. 507.]] 1.0
    """
    axes, n = axes_of(axis_name), rank_count(axis_name)
    x, router = array_of("x", x), array_of("router", router)
    others = jax.sharding.get_abstract_mesh().explicit_axes
    if others and (kernel is None or sharded_dims(x)):
        raise NotImplementedError(
            f"beside the explicit axes {others}, JAX has no ragged_dot, and x must be whole; "
            "give jax.shard_map(axis_names=) these too"
        )
    top_k = _checked(x, router, axis_name, top_k, algorithm)
    if max_send is not None and (max_send := integer("max_send", max_send)) < 1:
        raise ValueError(f"max_send={max_send}; pass 1 or more, or None")
    options = {"activation": activation, "precision": precision, "kernel": kernel}
    own = experts_of(experts, x, router.shape[1], n, **options)
    x, router = shared((x, router), axes)
    tokens = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    routing = route(tokens, router, axes, top_k, normalize)
    tokens, _ = with_common_axes([tokens, router], axes)
    count, d, f = own.gate.shape
    plan = Plan(algorithm, why=NAMED)
    if algorithm == "auto":
        mixture = Mixture(n, len(tokens), count, top_k, d, f, x.dtype.itemsize)
        plan = fastest(mixture, device_kind(), jax.sharding.get_abstract_mesh().size)
    form: Any = plan.algorithm
    tokens = record_plan_at_lowering("moe", axes, tokens, plan)
    if form == GATHER:
        y = _by_gather(tokens, routing, own, axes, max_send)
    elif form == RAGGED:
        y = _by_ragged_all_to_all(tokens, routing, own, axes, max_send)
    else:
        y = by_ring(tokens, routing, own, axes, max_send, form)
    return Routed(y.reshape(x.shape), routing.balance_loss)


def _checked(x: Array, router: Array, axis_name: AxisName, top_k: int, algorithm: Any) -> int:
    """Check the arguments of `moe`; return the number of experts of a token."""
    for name, array in {"x": x, "router": router}.items():
        if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
            raise TypeError(f"{name} is {array.dtype.name}; pass real floats, of 2 bytes or more")
    if x.ndim < 2 or router.ndim != 2 or x.shape[-1] != router.shape[0]:
        raise ValueError(
            f"x is {list(x.shape)}, the router {list(router.shape)}; pass x: [..., t, d] and "
            "router: [d, experts]"
        )
    total, n = router.shape[1], rank_count(axis_name)
    if total % n or not total:
        raise ValueError(
            f"{total} experts are not divisible by the {n} ranks of {axis_name!r}; use a multiple "
            "of the ranks; a router has a column for each expert"
        )
    number = integer("top_k", top_k)
    if not 1 <= number <= total:
        raise ValueError(f"top_k={number} of {total} experts; pass 1 to {total}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r}; choose from {', '.join(ALGORITHMS)}")
    return number


def _by_gather(
    x: Array, routing: Routing, experts: Experts, axes: tuple[Any, ...], max_send: int | None
) -> Array:
    """Send all tokens to all ranks; each rank computes the weighted sum of its experts' results."""
    everywhere = partial(all_gather, axis_name=axes, axis=0, tiled=True)
    tokens, ids, weights = everywhere((x, routing.ids, routing.weights))
    most = None if max_send is None else max_send * len(tokens) // max(len(x), 1)
    y = experts.weighted(tokens, ids, weights, axes, most)
    return psum_scatter(y, axes, scatter_dimension=0, tiled=True)


def _by_ragged_all_to_all(
    x: Array, routing: Routing, experts: Experts, axes: tuple[Any, ...], max_send: int | None
) -> Array:
    """Send each token to the ranks of its experts, a row for each expert, and the results back.

    Rows are sorted by expert before they are sent, and arrive sorted: a rank has a slice for each
    expert. Every rank has the numbers of rows that go from each rank to each expert.
    """
    me, count, (tokens, k) = lax.axis_index(axes), experts.count, routing.ids.shape
    order, back = orders(routing.ids)
    n, most = rank_count(axes), tokens * min(k, count)
    table = all_gather(count_each(routing.ids.reshape(-1), n * count), axes, axis=0)  # [n, E]
    fits = jnp.array(True)
    if max_send is not None and max_send < most:
        most, fits = max_send, table.reshape(n, n, count).sum(2).max() <= max_send
        table = jnp.where(fits, table, 0)
    of_expert = table.sum(0).reshape(n, count)
    there = _before(of_expert, 1).reshape(-1)[None] + _before(table, 0)  # where rows arrive: [n, E]
    home = _before(table, 1)  # where they were: [n, E]
    sends = table[me]
    here = [lax.dynamic_slice_in_dim(part, me * count, count, 1) for part in (table, there, home)]
    gets, arrived, left = (part.reshape(-1) for part in here)

    rows = spread(x, order, back, jnp.ones((tokens, k), bool))
    exchange = partial(ragged_all_to_all, axis_name=axes, max_send=max(most, 1))
    buffer, _ = with_common_axes([jnp.zeros((n * most, x.shape[1]), x.dtype), rows], axes)
    rows = exchange(rows, buffer, home[me], sends, there[me], gets)
    rows = experts.mlp(rows, of_expert[me])
    buffer, _ = with_common_axes([jnp.zeros((tokens * k, x.shape[1]), x.dtype), rows], axes)
    rows = exchange(rows, buffer, arrived, gets, left, sends)
    y = weighted_sum(permute(rows, back, order).reshape(tokens, k, x.shape[1]), routing.weights)
    return jnp.where(fits, y, jnp.nan)


def _before(sizes: Array, dim: int) -> Array:
    """For each size, the sum of the sizes before it along a dimension."""
    return lax.cumsum(sizes, dim) - sizes


@public("layers.expert_parallel.", arguments=False)
def partition_specs(
    params: Pytree, axis_name: AxisName, *, features: AxisName | None = None
) -> Pytree:
    """How the weights of experts are sharded, by their names: a tree of `PartitionSpec`s.

    `gate, up: [..., E, d, f], down: [..., E, f, d]`: experts over `axis_name`, and the features f
    over the axis `features`, if it is given. A leaf whose path has none of these names (a router,
    say) is whole on every rank. Dimensions are counted from the last, so blocks may be stacked.

    Raises:
        ValueError: a leaf has too few dimensions.

    >>> from ringcoll.layers import expert_parallel as ep
    >>> shapes = {"up": (8, 2, 4), "down": (8, 4, 2), "router": (2, 8)}
    >>> params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    >>> ep.partition_specs(params, "x", features="model")
    {'down': P('x', 'model', None), 'router': P(), 'up': P('x', None, 'model')}
    """
    experts, columns = {"gate": -3, "up": -3, "down": -3}, {"gate": -1, "up": -1, "down": -2}
    by_expert = by_name(params, axis_name, columns=experts, rows={})
    by_feature = by_name(params, features, columns=columns, rows={})

    def both(one: PartitionSpec, other: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*[a or b for a, b in zip(one, other, strict=True)])

    return jax.tree.map(both, by_expert, by_feature)
