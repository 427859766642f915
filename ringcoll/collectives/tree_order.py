"""Check a call with `order="tree"`."""

from operator import index
from typing import Any

from ringcoll.collectives.call import Call

#: The number of leaves of the tree, if the caller gives none.
LEAVES = 8


def leaves_of_tree(order: Any, leaves: Any, ranks: int, wire: Any) -> int:
    """The leaves of the tree by which floats are added.

    Args:
        order, leaves: as the caller gave them.
        ranks: the number of ranks that share the leaves.
        wire: what messages hold; None for floats.

    Raises:
        ValueError: there is no such order; it is combined with a wire; or the number of leaves is
            not a power of two, or not divisible by the number of ranks.
    """
    if order != "tree":
        raise ValueError(f"order={order!r}; choose from None, 'tree'")
    if wire is not None:
        raise ValueError(
            "order='tree' with a wire: ranks round codes, so bits would depend on how many ranks "
            "there are; leave order out, or the wire"
        )
    try:
        count = index(leaves)
    except TypeError:
        count = 0
    if count < 1 or count & (count - 1):
        raise ValueError(f"leaves={leaves!r} is not a power of two; pass one, such as 8")
    if count % ranks:
        raise ValueError(
            f"leaves={leaves} are not divisible by {ranks} ranks; pass as many leaves as the most "
            "ranks that are to give the same bits"
        )
    return count


def leaves_of_call(call: Call, wire: Any) -> int:
    """`leaves_of_tree` for a call with `order` and `leaves`; refusals are those of the call."""
    order, leaves = call.arguments["order"], call.arguments["leaves"]
    if any(isinstance(axis, int) for axis in call.axes) or not call.axes:
        words = f"order='tree' over {call.axis_name!r}"
        raise call.refusal(ValueError, words, "name an axis of the mesh or of a vmap")
    if call.grouped and len(set(map(len, call.grouped))) > 1:
        words = "order='tree' needs axis_index_groups of one size"
        raise call.refusal(ValueError, words, "pass groups of one size")
    n = len(call.grouped[0]) if call.grouped else call.ask(call.rank_count)
    return call.ask(leaves_of_tree, order, leaves, n, wire)
