"""The phases of collectives, by hand: names, what messages carry, and moves round by round."""

import pytest

from ringcoll.algorithms import build
from ringcoll.schedules.phases import Carries, phases

pytestmark = pytest.mark.quick

SHARDS, SUMS, BLOCKS, VECTORS = Carries
#: The rounds of a ring of three: forward, and backward.
AHEAD, BACK = [[(1, (0,))], [(1, (1,))]], [[(-1, (2,))], [(-1, (1,))]]
#: The call; and of each phase its name, what messages carry, how many
#: shards of the vector one shard of its schedule is, and its moves.
PHASES = {
    ("all_gather", "ring", (3,)): [("all-gather", SHARDS, 1, AHEAD)],
    ("psum_scatter", "ring", (3,)): [("reduce-scatter", SUMS, 1, BACK)],
    ("pmax", "ring", (3,)): [("reduce-scatter", SUMS, 1, BACK), ("all-gather", SHARDS, 1, AHEAD)],
    ("psum", "recursive_doubling", (6,)): [
        ("stage 1 of 2", VECTORS, 6, [[(1, (0,))]]),
        ("stage 2 of 2", VECTORS, 6, [[(1, (0,))], [(2, (0,))]]),
    ],
    ("ragged_all_to_all", "pairwise", (3,)): [
        ("all-to-all", BLOCKS, 1, [[(1, (1,))], [(2, (2,))]])
    ],
    # The way home is the ring of the other direction, run backward, and one more hop.
    ("tour", "ring", (3,)): [
        ("out", SHARDS, 1, AHEAD),
        ("home", SUMS, 1, [[(1, (1,))], [(1, (2,))]]),
    ],
}


@pytest.mark.parametrize("call", PHASES)
def test_phases(call):
    collective, algorithm, shape = call
    found = [
        (p.name, p.carries, p.shards, [[(m.shift, m.offsets) for m in r] for r in p.rounds])
        for p in phases(collective, build(collective, algorithm, shape))
    ]
    assert found == PHASES[call]
