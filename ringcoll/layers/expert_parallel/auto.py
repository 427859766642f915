"""Plans of a mixture of experts on TPUs: a plan for each algorithm that brings tokens to experts.

The price is that of the forward pass without routing, if all experts get equally many tokens.
"""

from dataclasses import dataclass, replace

from ringcoll.choose.plan import Plan, cheapest
from ringcoll.choose.under_work import hides, machine, tour_plans
from ringcoll.costs.model import Model
from ringcoll.costs.under_work import Work, all_to_all_seconds, built_in_seconds

#: The names of algorithms in `ringcoll.layers.expert_parallel.moe`.
GATHER, RAGGED, RINGS = "gather", "ragged_all_to_all", ("ring", "bidirectional_ring")


@dataclass(frozen=True)
class Mixture:
    """The sizes of a mixture: each of `ranks` ranks has `tokens` tokens and `experts` experts.

    An expert is a gated MLP with sizes d and f. Each token goes to `top_k` experts. Numbers have
    `itemsize` bytes.
    """

    ranks: int
    tokens: int
    experts: int
    top_k: int
    d: int
    f: int
    itemsize: int


def fastest(mixture: Mixture, device_kind: str | None, of: int = 1) -> Plan:
    """The cheapest plan on TPUs; elsewhere, and for symbolic sizes, "gather".

    `of` is the number of devices in the mesh.

    >>> from ringcoll.layers.expert_parallel.auto import Mixture, fastest
    >>> many = Mixture(ranks=8, tokens=8192, experts=8, top_k=8, d=4096, f=4096, itemsize=2)
    >>> print(fastest(many, "TPU v6 lite"))
    bidirectional_ring: 7.48 ms; ring 10.8 ms
    """
    are_known = all(isinstance(x, int) for x in (mixture.tokens, mixture.d, mixture.f))
    if mixture.ranks > 1 and are_known and hides(device_kind):
        return cheapest(_plans(mixture, machine(device_kind, mixture.ranks, of)))
    return Plan(GATHER, why="no price: one rank, symbolic sizes, or no TPUs")


def _plans(mixture: Mixture, model: Model) -> list[Plan]:
    """A plan for each algorithm. Rings use one link in each direction, built-ins all links."""
    n, block = mixture.ranks, mixture.tokens * mixture.d * mixture.itemsize
    expert = 3 * mixture.d * mixture.f
    read = mixture.experts * expert * mixture.itemsize  # by every piece: a row may go to any expert
    work = Work(2 * mixture.tokens * mixture.top_k * expert, reread=read)
    gather, *tours = tour_plans(work, block, block, (n,), model)
    products = built_in_seconds([work], 0, n, model, gathers=False)
    exchanges = 2 * all_to_all_seconds(mixture.top_k * block, n, model)
    by_price = [replace(gather, algorithm=GATHER), Plan(RAGGED, exchanges + products)]
    return by_price + [plan for plan in tours if plan.algorithm in RINGS]
