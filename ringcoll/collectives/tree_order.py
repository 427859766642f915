"""The order of a sum whose bits do not depend on the number of ranks: `order=Tree(8)`."""

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from ringcoll.collectives.axes import Grouped, rank_count


@dataclass(frozen=True)
class Tree:
    """Floats are added by one balanced binary tree: `psum(x, "x", order=Tree(8))`.

    The bits of a sum then do not depend on how many ranks share its leaves. The number of ranks is
    a power of two, and divides the number of leaves. The leaves of a rank are consecutive, and its
    operand is their sum, added by pairs. An algorithm that adds by a different tree is refused, and
    so is a `wire`.

    Attributes:
        leaves: the number of leaves, a power of two.

    Raises:
        ValueError: the number of leaves is not a power of two.

    >>> total = ranks(lambda x: ringcoll.psum(x, "x", order=ringcoll.Tree(8)), out_specs=P())
    >>> print(total(jnp.arange(4.0)))  # (0 + 1) + (2 + 3)
    [6.]
    """

    leaves: int = 8

    def __post_init__(self) -> None:
        try:
            count = operator.index(self.leaves)
        except TypeError:
            count = 0
        if count < 1 or count & (count - 1):
            raise ValueError(
                f"ringcoll.Tree: leaves={self.leaves!r} is not a power of two; pass one, such as 8"
            )


def check_order(order: Any, wire: Any, axes: Sequence[Hashable], grouped: Grouped | None) -> None:
    """Refuse an order in which a call over these axes, or in groups, cannot add.

    Raises:
        TypeError: it is not a `Tree`.
        ValueError: it is combined with a wire; no axis is named; groups have several sizes; or the
            number of leaves is not divisible by the number of ranks.
    """
    if not isinstance(order, Tree):
        raise TypeError(f"order={order!r} is not an order; pass ringcoll.Tree(8), or leave it out")
    if wire is not None:
        raise ValueError(
            f"order={order} with a wire: its codes depend on ranks; leave order out, or the wire"
        )
    if any(isinstance(axis, int) for axis in axes) or not axes:
        raise ValueError(f"order={order} over {axes}; name an axis of the mesh or of a vmap")
    if grouped and len(set(map(len, grouped))) > 1:
        raise ValueError(f"order={order} needs groups of one size; pass those, or leave it out")
    ranks = len(grouped[0]) if grouped else rank_count(tuple(axes))
    if order.leaves % ranks:
        raise ValueError(
            f"order={order}: {order.leaves} leaves are not divisible by {ranks} ranks; pass as "
            "many leaves as the most ranks that are to give the same bits"
        )
