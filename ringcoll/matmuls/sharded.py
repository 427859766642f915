"""A product of two sharded matrices: which collective it needs, and which product hides it."""

from collections.abc import Callable, Hashable
from typing import Any, Unpack

from jax import Array
from jax.sharding import PartitionSpec

from ringcoll.collectives.axes import rank_count
from ringcoll.matmuls.all_reduce import matmul_all_reduce
from ringcoll.matmuls.functions import all_gather_matmul, matmul_reduce_scatter
from ringcoll.matmuls.options import GatherOptions, with_options

Axes = tuple[Hashable, ...]


@with_options()
def sharded_matmul(
    a: Array,
    b: Array,
    a_spec: PartitionSpec,
    b_spec: PartitionSpec,
    out_spec: PartitionSpec,
    **options: Unpack[GatherOptions],
) -> Array:
    """This rank's shard of a @ b, sharded by `out_spec`; a and b are shards too, inside
    `shard_map`.

    A[I, J] B[J, K] -> C[I, K]. An index X or Y names the axis over which a dimension is sharded:

    | sharded | shapes | collective |
    |---|---|---|
    | J in neither | A[I_X, J] B[J, K_Y] -> C[I_X, K_Y] | none |
    | J in one | A[I, J_X] B[J, K] -> C[I, K] | an all-gather of A, under the product |
    | J in both | A[I, J_X] B[J_X, K] -> C[I, K] | an all-reduce; its first half is hidden |
    | | ... -> C[I_X, K] or C[I, K_X] | a reduce-scatter, under the product |
    | I and K, on one axis | A[I_X, J] B[J, K_X] -> C[I_X, K] or C[I, K_X] | an all-gather of \
the other, under the product |

    The last case cannot give C[I_X, K_X]: rank r would hold only the diagonal block r. A
    dimension that is sharded in an operand, but whole in `out_spec`, is gathered in the same way. A
    call uses at most one collective.

    Options: `ringcoll.GatherOptions`; only the cases with an all-gather use `residuals`. Steps,
    bytes and gradient: as the functions of `ringcoll.matmuls.functions`.

    Raises:
        TypeError: a or b is not an array, or a spec is not a `PartitionSpec`.
        ValueError: a or b is not a matrix; a spec names an axis twice or leaves a dimension open;
            or they need more than one collective, which the message names.

    Source: the four cases are those of "How to Scale Your Model" (2025), chapter 3.

    >>> specs = P(None, "x"), P("x", None), P("x", None)
    >>> matmul = ranks(lambda a, b: ringcoll.sharded_matmul(a, b, *specs), specs[:2], specs[2])
    >>> print(matmul(jnp.arange(16.0).reshape(4, 4), jnp.ones((4, 1))).T)
    [[ 6. 22. 38. 54.]]
    """
    for name, x in (("a", a), ("b", b)):
        ndim = getattr(x, "ndim", None)
        if ndim is None:
            raise TypeError(f"{name} is {x!r}, no array; pass this rank's shard")
        if ndim != 2:
            raise ValueError(
                f"{name} has {ndim} dimensions, and a matrix has 2; reshape it to a matrix, or "
                "call all_gather_einsum or einsum_reduce_scatter"
            )
    (a_i, a_j), (b_j, b_k), (c_i, c_k) = map(_axes, (a_spec, b_spec, out_spec))
    rank_count((*{*a_i, *a_j, *b_j, *b_k, *c_i, *c_k},))  # refuses an axis that is not bound
    if set(c_i) & set(c_k):
        raise ValueError("a rank would hold blocks of a diagonal only; shard one of I and K")
    needed: list[tuple[Callable[..., Array], Axes, dict[str, Any]]] = []
    if a_j != b_j:
        if a_j and b_j:
            raise ValueError(f"J is sharded over {a_j} in a and {b_j} in b; reshard one")
        which = {"operand": 0, "dim": -1} if a_j else {"operand": 1, "dim": -2}
        needed.append((all_gather_matmul, a_j or b_j, which))
    if a_j == b_j != ():
        if (c_i, c_k) == (a_i + a_j, b_k):
            needed.append((matmul_reduce_scatter, a_j, {"dim": -2}))
            c_i = a_i
        elif (c_i, c_k) == (a_i, b_k + b_j):
            needed.append((matmul_reduce_scatter, a_j, {"dim": -1}))
            c_k = b_k
        else:
            needed.append((matmul_all_reduce, a_j, {}))
    for have, want, name, which in (
        (a_i, c_i, "I", {"operand": 0, "dim": -2}),
        (b_k, c_k, "K", {"operand": 1, "dim": -1}),
    ):
        if have == want:
            continue
        if want:
            raise ValueError(
                f"{name} is sharded over {have or 'nothing'}, the result's over {want}"
            )
        needed.append((all_gather_matmul, have, which))
    if len(needed) > 1:
        names = ", ".join(f"{f.__name__} over {axes}" for f, axes, _ in needed)
        raise ValueError(f"it needs more than one collective ({names}); call one of them before")
    ((function, axes, own),) = needed or [(all_gather_matmul, (), {})]  # of one rank
    if function is not all_gather_matmul:
        del options["residuals"]
    return function(a, b, axes, **own, **options)


def _axes(spec: PartitionSpec) -> tuple[Axes, Axes]:
    """The axes over which the rows and the columns are sharded."""
    if not isinstance(spec, PartitionSpec):
        raise TypeError(f"{spec!r} is not a spec; write P('x', None)")
    if PartitionSpec.UNCONSTRAINED in spec:
        raise ValueError(f"{spec} leaves a dimension open; say how it is sharded")
    entries = (*spec, None, None)[: max(2, len(spec))]
    if len(entries) > 2:
        raise ValueError(f"{spec} is not the spec of a matrix")
    rows, columns = (
        () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        for entry in entries
    )
    if len({*rows, *columns}) < len(rows) + len(columns):
        raise ValueError(f"{spec} names an axis twice")
    return rows, columns
