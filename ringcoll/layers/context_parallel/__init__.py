"""Context-parallel attention: an axis shards the sequence, also inside attention.

Call `attention` inside `jax.shard_map`, on a rank's part of the sequence. `algorithm` chooses how
queries get the keys of other ranks:

- a gather ("ring", "bidirectional_ring", ...): keys and values travel, one shard after the other,
  while the scores of the shard before are computed;
- "lax": keys and values travel by the built-in all-gather, before anything is computed;
- "ulysses": queries, keys, values and results travel by all-to-alls; each rank attends to the whole
  sequence with a part of the heads;
- one of these for each axis: all-to-alls over the axes of "ulysses", the gather over the others;
- "auto": the fastest on the devices of the mesh by the model of `ringcoll.costs`.

`layout` says which positions a rank has. With a causal mask, the ranks of "contiguous" have unequal
work: the last rank sees all keys. In "zigzag", each rank has an early and a late part; in
"striped", each rank has every n-th position. In both, all ranks have equal work. Use `arrange` to
bring tokens and labels into a layout, `position_ids` for the numbers of the positions, and
`restore` for results.

Gradients are those of attention on one device. For them, keys and values travel again; their
gradients follow them and return to the owners (a *tour*: `ringcoll.schedules.tour`). So a rank
holds only its shard, the shards that travel, and its sums. This is true if shards walk from rank
to rank, as in "ring" and "bidirectional_ring" on one axis. With other schedules, a rank also holds
gradients that wait to be sent.
"""

from collections.abc import Hashable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from ringcoll.choose.plan import NAMED, Heads, Plan
from ringcoll.choose.table import Algorithm, Table
from ringcoll.collectives import choice
from ringcoll.collectives.all_gather import all_gather
from ringcoll.collectives.all_to_all import all_to_all
from ringcoll.collectives.axes import AxisName, axes_of, rank_count
from ringcoll.collectives.public import integer, public
from ringcoll.layers.context_parallel.auto import ULYSSES, Attention, fastest
from ringcoll.layers.context_parallel.layouts import check_layout, positions
from ringcoll.layers.context_parallel.overlapped import attend
from ringcoll.layers.context_parallel.softmax import AttentionKernel, BlockMask
from ringcoll.layers.context_parallel.tiles import NOWHERE, Mask
from ringcoll.layers.context_parallel.visits import AttentionOptions
from ringcoll.runtime.scopes import record_plan_at_lowering
from ringcoll.runtime.value_types import device_kind, explicit_spec, with_common_axes

__all__ = ["ULYSSES", "BlockMask", "arrange", "attention", "position_ids", "restore"]


#: Gradients are sums, so attention takes the algorithms of this collective.
OF_SUMS = "psum_scatter"


@public("layers.context_parallel.")
def attention(
    q: Array,
    k: Array,
    v: Array,
    axis_name: AxisName,
    *,
    causal: bool,
    algorithm: Algorithm | Sequence[Algorithm] = "auto",
    layout: str = "contiguous",
    segment_ids: Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    kernel: AttentionKernel | None = None,
) -> Array:
    """Attention over a sequence that is cut over ranks.

    `q: [b, s/n, h, d], k: [b, s/n, g, d], v: [b, s/n, g, e] -> [b, s/n, h, e]`, h a multiple of g:
    heads i*h/g to (i+1)*h/g - 1 of queries see head i of keys. The softmax is exact, in float32 or
    wider, and computed tile by tile: no temporary grows with the square of s/n.

    Args:
        causal: whether a position sees only itself and those before it.
        algorithm: see above.
        layout: which positions a rank has: "contiguous", "zigzag" or "striped".
        segment_ids: `[b, s/n]`, integers: a position sees only positions of its own segment.
        window: a position sees only positions that are less than this many positions away. Shards
            that no query sees are not sent.
        scale: the scale of the scores; None for 1/sqrt(d).
        kernel: computes a block: `kernel(q, k, v, causal=...) -> (out, lse)` for queries
            `[b, s, h, d]`, keys `[b, s, 1, d]` and values `[b, s, 1, e]`. lse is the log-sum-exp
            `[b, s, h]` of the scores, which the kernel scales itself. With a window, segment_ids or
            a striped layout it is called as `kernel(q, k, v, mask=...)`, with None or a
            `BlockMask`; if a query sees no key, its lse is -inf. Gradients do not use the kernel.

    A ring makes n-1 rounds, each with the keys and values of one shard. The backward pass makes 2
    more hops, and also sends equally many sums, in float32 or wider.

    Gradient: see above. JAX refuses forward mode (`jvp`).

    Raises:
        TypeError: an argument is not an array, or dtypes differ, segment_ids are not integers, or
            causal or scale is traced (multiply q by a scale that is learned).
        ValueError: shapes do not fit; the ranks of "ulysses" do not divide the heads; there is no
            such layout or algorithm; s/n is odd in a zigzag; a kernel returns other shapes.

    Source: Liu et al., "Ring attention with blockwise transformers" (2023); Brandon et al.,
    "Striped attention" (2023); Jacobs et al., "DeepSpeed Ulysses" (2023).

    >>> from ringcoll.layers import context_parallel as cp
    >>> attend = partial(cp.attention, axis_name="x", causal=True, algorithm="ring")
    >>> spec = P(None, "x")
    >>> x = jnp.ones((1, 8, 2, 4))
    >>> ranks(attend, (spec, spec, spec), spec)(x, x, jnp.cumsum(x, 1))[0, :, 0, 0]
    Array([1. , 1.5, 2. , 2.5, 3. , 3.5, 4. , 4.5], dtype=float32)
    """
    axes = axes_of(axis_name)
    _check_arrays(q, k, v, segment_ids)
    sizes = tuple(map(lax.axis_size, axes))
    if isinstance(causal, jax.core.Tracer):
        raise TypeError("causal is traced; pass True or False")
    mask = Mask(bool(causal), _window(window))
    scale = _scale(scale, q.shape[3])
    check_layout(layout, prod(sizes), prod(sizes) * q.shape[1])
    per_axis, plan = _per_axis(axes, algorithm), None
    if per_axis is None:
        (batch, length, _, d) = q.shape
        heads, groups = _heads_of_a_device(q), _heads_of_a_device(k)
        shape = batch, length, heads, groups, (d, v.shape[3]), q.dtype.itemsize
        of = jax.sharding.get_abstract_mesh().size
        plan = fastest(Attention(sizes, layout, mask, *shape), device_kind(), of)
        over = plan.form.axes if isinstance(plan.form, Heads) else ()
        per_axis = tuple(ULYSSES if i in over else plan.algorithm for i in range(len(sizes)))
    exchanged = tuple(i for i, name in enumerate(per_axis) if name == ULYSSES)
    gathers = [name for name in per_axis if name != ULYSSES]
    gathered = tuple(axis for i, axis in enumerate(axes) if i not in exchanged)
    gather = gathers[0] if gathers else "ring"  # a ring of one rank, which has no rounds
    algorithm = choice.resolve_algorithm(gather, OF_SUMS, gathered)
    if plan is None:
        form = Heads(exchanged) if exchanged else None
        plan = Plan(algorithm if gathers else ULYSSES, why=NAMED, form=form)
    q, k, v = record_plan_at_lowering("attention", axes, (q, k, v), plan)

    if jax.sharding.get_abstract_mesh().explicit_axes:  # a device has whole sequences of its own
        batch, heads = (jax.typeof(x).sharding.spec[dim] for x, dim in ((q, 0), (k, 2)))
        q, k, v = (jax.reshard(x, PartitionSpec(batch, None, heads)) for x in (q, k, v))
        if segment_ids is not None:
            segment_ids = jax.reshard(segment_ids, PartitionSpec(batch))

    across, n = tuple(axes[i] for i in exchanged), prod(sizes[i] for i in exchanged)
    ids = [] if segment_ids is None else [_ids(segment_ids, gathered, across, n)]
    q, k, v, *ids = with_common_axes([q, k, v, *ids], axes)
    heads, groups = q.shape[2], k.shape[2]
    kv = jnp.concatenate([k, v], -1)
    if across:
        if heads % n or groups % n:
            raise ValueError(
                f"{heads} heads of queries and {groups} of keys over {n} ranks by {ULYSSES!r}; "
                "make both multiples of the ranks, or gather"
            )
        q, kv = (all_to_all(x, across, 2, 1, tiled=True) for x in (q, kv))
    kernel = kernel and _checked(kernel)
    where = layout, sizes, exchanged
    options = AttentionOptions(gathered, algorithm, mask, *where, scale, kernel)
    batch, length, heads, d = q.shape
    groups = kv.shape[2]
    rows = q.reshape(batch, length, groups, heads // groups, d).transpose(0, 2, 3, 1, 4)
    out = attend(options, rows, kv.transpose(0, 2, 1, 3), ids[0] if ids else None)
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, out.shape[-1])
    return all_to_all(out, across, 1, 2, tiled=True) if across else out


@public("layers.context_parallel.")
def arrange(x: ArrayLike, n: int, layout: str, dim: int = 1) -> Array:
    """A whole sequence in the order of a layout: rank r has part r of n equal parts.

    `x: [b, s, ...] -> [b, s, ...]`, along `dim`. Call it outside `shard_map`.

    Gradient: `restore`.

    Raises:
        ValueError: there is no such layout, or the sequence cannot be cut into equal parts.

    Source: as `attention`.

    >>> from ringcoll.layers import context_parallel as cp
    >>> print(cp.arrange(jnp.arange(8), 2, "zigzag", dim=0))
    [0 1 6 7 2 3 4 5]
    """
    return _reorder(x, _order(jnp.shape(x), n, layout, dim), dim)


@public("layers.context_parallel.")
def restore(x: ArrayLike, n: int, layout: str, dim: int = 1) -> Array:
    """Bring a sequence from the order of a layout back into the order of its positions.

    `x: [b, s, ...] -> [b, s, ...]`, along `dim`: the inverse of `arrange`.

    Gradient: `arrange`.

    Raises, source: as `arrange`.

    >>> from ringcoll.layers import context_parallel as cp
    >>> print(cp.restore(cp.arrange(jnp.arange(8), 4, "striped", dim=0), 4, "striped", dim=0))
    [0 1 2 3 4 5 6 7]
    """
    order = _order(jnp.shape(x), n, layout, dim)
    return _reorder(x, np.argsort(order), dim)


def _reorder(x: ArrayLike, order: np.ndarray, dim: int) -> Array:
    """x in this order along a dimension, with the same sharding."""
    x = jnp.asarray(x)
    index = (*[slice(None)] * (dim % x.ndim), order)
    return x.at[index].get(out_sharding=explicit_spec(x))


@public("layers.context_parallel.")
def position_ids(axis_name: AxisName, length: int, layout: str = "contiguous") -> Array:
    """The positions that this rank has: `[length]`, for `rotary`. `length` is s/n.

    Call it inside `shard_map`. Nothing is sent.

    Gradient: none, they are integers.

    Raises:
        NameError: an axis is not bound.
        ValueError: there is no such layout, or it cannot cut this length.

    Source: as `attention`.

    >>> from ringcoll.layers import context_parallel as cp
    >>> print(ranks(lambda: cp.position_ids("x", 2, "zigzag"), ())())
    [0 7 1 6 2 5 3 4]
    """
    n = rank_count(axis_name)
    check_layout(layout, n, n * integer("length", length))
    table = jnp.asarray(positions(layout, n, length))
    return table[lax.axis_index(axes_of(axis_name))]


def _order(shape: Sequence[int], n: int, layout: str, dim: int) -> np.ndarray:
    """The positions of a whole sequence in the order of a layout."""
    n, dim = integer("n", n), integer("dim", dim)
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"dim={dim} of {len(shape)} dimensions; pass one")
    check_layout(layout, n, shape[dim])
    return positions(layout, n, shape[dim] // n).reshape(-1)


def _check_arrays(q: Any, k: Any, v: Any, ids: Any) -> None:
    """Refuse operands that do not fit each other."""
    named = {"q": q, "k": k, "v": v}
    types = {name: jax.typeof(x) for name, x in named.items()}
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in types.items())
    query, key, value = types.values()
    if any(x.ndim != 4 for x in types.values()):
        raise ValueError(f"{shapes}; pass [batch, sequence, heads, width]")
    if not query.shape[:2] == key.shape[:2] == value.shape[:2]:
        raise ValueError(f"{shapes}; batch and sequence must be the same on a rank")
    if key.shape[2] != value.shape[2] or not key.shape[2] or query.shape[2] % key.shape[2]:
        raise ValueError(f"{shapes}; make heads of queries a multiple of those of keys")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"{shapes}; queries and keys must be of one width")
    dtypes = {name: x.dtype for name, x in types.items()}
    is_float = jnp.issubdtype(query.dtype, jnp.floating) and query.dtype.itemsize > 1
    if len(set(dtypes.values())) > 1 or not is_float:
        found = ", ".join(f"{name} is {dtype.name}" for name, dtype in dtypes.items())
        raise TypeError(f"{found}; pass floats of one dtype, of 2 bytes or more")
    if ids is None:
        return
    typed = jax.typeof(ids)
    if not jnp.issubdtype(typed.dtype, jnp.integer):
        raise TypeError(f"segment_ids are {typed.dtype.name}; pass integers")
    if typed.shape != query.shape[:2]:
        raise ValueError(f"segment_ids are {list(typed.shape)}; pass {list(query.shape[:2])}")


def _window(window: Any) -> int | None:
    if window is None:
        return None
    width = integer("window", window)
    if width < 1:
        raise ValueError(f"window={width}; pass 1 or more, or None")
    return min(width, int(NOWHERE))  # a wider window would not fit an int32


def _scale(scale: Any, width: int) -> float:
    if scale is None:
        return float(max(width, 1) ** -0.5)
    try:
        return float(scale)
    except (TypeError, ValueError) as error:  # also if it is traced
        raise TypeError(
            f"scale={scale!r} is not a number; pass a Python float, or multiply q by the number"
        ) from error


def _heads_of_a_device(x: Array) -> int:
    """The heads of `x: [b, l, h, d]`; of those that are sharded over explicit axes, the share."""
    spec, mesh = explicit_spec(x) or [None] * 3, jax.sharding.get_abstract_mesh()
    names = spec[2] if isinstance(spec[2], tuple) else (spec[2],)
    return x.shape[2] // prod(mesh.shape[name] for name in names if name is not None)


def _per_axis(axes: tuple[Hashable, ...], algorithm: Any) -> tuple[Algorithm, ...] | None:
    """The algorithm of each axis, with at most one gather; None for "auto"."""
    if isinstance(algorithm, tuple | list):
        if len(algorithm) != len(axes):
            raise ValueError(
                f"algorithm={algorithm!r} for {len(axes)} axes; pass one for each axis"
            )
        gathers = {name for name in algorithm if name != ULYSSES}
        if len(gathers) > 1 or "auto" in gathers:
            raise ValueError(f"algorithm={algorithm!r}; name one gather, and {ULYSSES!r}")
        return tuple(algorithm)
    if isinstance(algorithm, Table):
        raise ValueError("algorithm: a Table is only for collectives; pass a name for each axis")
    if algorithm == "auto":  # unless `ringcoll.algorithm` names one for all calls
        algorithm = choice.resolve_algorithm(algorithm, OF_SUMS, axes)
    return None if algorithm == "auto" else (algorithm,) * len(axes)


def _checked(kernel: AttentionKernel) -> AttentionKernel:
    """The kernel with a check that its results fit its operands."""

    def checked(q: Array, k: Array, v: Array, **masking: Any) -> tuple[Array, Array]:
        results = kernel(q, k, v, **masking)
        wanted = [(*q.shape[:3], v.shape[3]), q.shape[:3]]
        if (shapes := [jnp.shape(x) for x in jax.tree.leaves(results)]) != wanted:
            returned = ", ".join(str([*shape]) for shape in shapes) or "nothing"
            raise ValueError(
                f"the kernel returned {returned}; of {[*q.shape]}, return (out, lse) of "
                f"{[*wanted[0]]} and {[*wanted[1]]}"
            )
        out, lse = jax.tree.leaves(results)
        return out, lse

    return checked


def _ids(ids: Array, gathered: tuple[Any, ...], across: tuple[Any, ...], n: int) -> Array:
    """The segments of the positions of all ranks: `[ranks that gather, batch, s]`."""
    batch, length = ids.shape
    every = all_gather(jnp.asarray(ids), (*gathered, *across))
    ranks = len(every) // n
    by_rank = every.reshape(ranks, n, batch, length).swapaxes(1, 2)
    return by_rank.reshape(ranks, batch, n * length)
