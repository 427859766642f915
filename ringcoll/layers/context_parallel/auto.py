"""Plans of attention over ranks, with the seconds of its tiles and its messages, forward.

The ranks wait for each other in every round of a gather, so a round takes as long as the rank with
the most tiles. Built-in collectives run before and after all compute.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ringcoll.choose.plan import NOTHING_HIDES, Heads, Plan, cheapest
from ringcoll.choose.under_work import hides, machine, visited_seconds
from ringcoll.costs.model import Model
from ringcoll.costs.under_work import all_to_all_seconds, built_in_seconds
from ringcoll.layers.context_parallel.tiles import Mask, TilePlan, plan
from ringcoll.schedules.registry import LAX

#: The algorithm that exchanges positions for heads.
ULYSSES = "ulysses"
#: The gathers that hide under the scores. One direction is the first: its products are larger.
GATHERS = ("ring", "bidirectional_ring")
#: Seconds for each score of a head: exponentials and sums take longer than the matmuls. As compiled
#: for v5e and v6e (5.4e-12 and 4.6e-12; jax 0.12.0.1, libtpu 0.0.52, `benchmarks context`).
OF_SCORE = 5e-12


@dataclass(frozen=True)
class Attention:
    """Attention over axes of these `sizes`: which keys a query sees, and a rank's operands.

    `layout` is one of `LAYOUTS`. `groups` are the heads of keys. `widths` are those of a head of
    keys and of a head of values. Numbers have `itemsize` bytes.
    """

    sizes: tuple[int, ...]
    layout: str
    mask: Mask
    batch: int
    length: int
    heads: int
    groups: int
    widths: tuple[int, int]
    itemsize: int


def fastest(attention: Attention, device_kind: str | None, of: int = 1) -> Plan:
    """The cheapest plan. The built-in gather is not preferred: it holds the keys of all ranks.

    Where nothing hides, heads are exchanged if each rank gets whole ones; else keys are gathered.
    `of` is the number of devices in the mesh.
    """
    if not hides(device_kind):
        n = prod(attention.sizes)
        if attention.heads % n or attention.groups % n:
            return Plan(LAX, why=NOTHING_HIDES)
        every = tuple(range(len(attention.sizes)))
        return Plan(ULYSSES, why=NOTHING_HIDES, form=Heads(every))
    return cheapest(plans(attention, device_kind, of), error=0.0)


def plans(attention: Attention, device_kind: str | None, of: int = 1) -> list[Plan]:
    """A plan for each gather, and for the axes over which positions are exchanged for heads."""
    sizes, heads, groups = attention.sizes, attention.heads, attention.groups
    axes, model, priced = tuple(range(len(sizes))), machine(device_kind, prod(sizes), of), []
    width = attention.batch * sum(attention.widths)  # of queries and results, or keys and values
    of_head = width * attention.length * attention.itemsize
    for exchanged in dict.fromkeys([(), *((axis,) for axis in axes), axes]):
        together = prod(sizes[axis] for axis in exchanged)
        if heads % together or groups % together:
            continue
        others = tuple(n for axis, n in enumerate(sizes) if axis not in exchanged) or (1,)
        where = attention.layout, attention.length, sizes, exchanged
        tiles = plan(attention.mask, *where, heads // groups, others)
        scores = heads // together * tiles.tile**2
        of_tile = scores * max(attention.batch * OF_SCORE, 2 * width * model.delta)
        swapped = all_to_all_seconds((heads + groups) * of_head, together, model)
        for name in (ULYSSES,) if exchanged == axes else (*GATHERS, LAX):
            gathered = _seconds(name, others, tiles, of_tile, groups * of_head, model)
            form = Heads(exchanged) if exchanged else None
            priced.append(Plan(name, swapped + gathered, form=form))
    return priced


def _seconds(
    name: str, sizes: tuple[int, ...], tiles: TilePlan, of_tile: float, keys: int, model: Model
) -> float:
    """Seconds of the tiles, and of a gather of keys: `keys` bytes of each rank."""

    def busiest(offsets: Sequence[int]) -> float:  # seconds of the rank with the most tiles
        of_ranks = zip(*map(tiles.counted, offsets), strict=True)
        return of_tile * int(max(map(sum, of_ranks)))

    if name in (LAX, ULYSSES):
        wire = built_in_seconds([], keys, prod(sizes), model, gathers=True)
        return wire + busiest([0, *tiles.needed])
    return visited_seconds(name, sizes, tiles.needed, busiest, keys, model)
