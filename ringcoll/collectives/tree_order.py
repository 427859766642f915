"""Check a call with `order="tree"`. Collectives, matmuls and layers all use this check."""

from typing import Any


def leaves_of_tree(order: Any, leaves: Any, ranks: int, *wires: Any) -> int | None:
    """The leaves of the tree by which floats are added; None if they are added in any order.

    Args:
        order, leaves: as the caller gave them.
        ranks: the number of ranks that share the leaves.
        wires: what messages hold; None for floats.

    Raises:
        ValueError: there is no such order; it is combined with a wire; or the number of leaves is
            not a power of two, or not divisible by the number of ranks.
    """
    if order is None:
        return None
    if order != "tree":
        raise ValueError(f"order={order!r}; choose from None, 'tree'")
    if any(wire is not None for wire in wires):
        raise ValueError(
            "order='tree' with a wire: ranks round codes, so bits would depend on how many ranks "
            "there are; leave order out, or the wire"
        )
    if not isinstance(leaves, int) or leaves < 1 or leaves & (leaves - 1):
        raise ValueError(f"leaves={leaves!r} is not a power of two; pass one, such as 8")
    if leaves % ranks:
        raise ValueError(
            f"leaves={leaves} do not divide by {ranks} ranks; pass as many leaves as the most "
            "ranks that are to give the same bits"
        )
    return leaves
