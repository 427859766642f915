"""Prices: counted on schedules. `test_slices` walks links hop by hop."""

from fractions import Fraction as F
from math import prod

import pytest

from ringcoll.algorithms import GATHERS, names, ring
from ringcoll.costs import place_of, predict, price, wire_bytes
from ringcoll.schedules.schedule import Move, Schedule, ScheduleError

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("shape", [(4, 4), (5, 5), (3, 3, 3)])
def test_no_link_of_a_square_torus_is_idle(shape):
    paid = price("all_gather", "torus", shape, network=shape)
    assert paid.link == F(prod(shape) - 1, 2 * len(shape))  # all links, both directions
    assert paid.rounds == paid.startups == sum(n - 1 for n in shape)  # of a port for each lane
    assert paid.messages == 2 * len(shape) * paid.rounds
    assert price("all_gather", "ring", shape, network=shape).link == prod(shape) - 1
    one_a_round = price("all_gather", "hamiltonian", shape, network=shape)
    assert (one_a_round.link, one_a_round.rounds) == (paid.link, prod(shape) - 1)


# -- stages, and what is not in the library --


def test_stages_on_a_physical_ring():
    # Partners 4, 2 and 1 away; from 4 away, all go ahead: 4, 2 and 1 vectors a link.
    paid = price("psum", "recursive_doubling", (8,), network=(8,))
    assert (paid.startups, paid.hops) == (3, 4 + 2 + 1)
    assert (paid.sent, paid.link) == (3 * 8, 7 * 8)
    # On their own axes of a torus, partners are nearer: 2 and 1, and 1 on an axis of 2.
    assert price("psum", "recursive_doubling", (4, 2), network=(4, 2)).link == 4 * 8
    with pytest.raises(ScheduleError, match=r"network \(4,\) is not of 8 ranks"):
        price("psum", "recursive_doubling", (8,), network=(4,))


def test_stages_of_several_lanes_are_priced():
    stages = (ring(2), GATHERS["bidirectional_ring"](3))
    paid = price("psum", stages, (6,))
    assert (paid.rounds, paid.messages, paid.sent, paid.additions) == (3, 5, 18, 18)
    assert paid.raw == 6  # the first stage; the second sends sums


def test_every_all_reduce_is_priced_like_psum():
    for algorithm in names("psum"):
        paid = {price(name, algorithm, (4, 2)) for name in ("pmean", "pmax", "pbroadcast", "psum")}
        assert len(paid) == 1
        alone = price("psum", algorithm, (1, 1))
        assert (alone.rounds, alone.sent, alone.link, alone.additions) == (0, 0, 0, 0)


def my_star(n):
    """Not in the library: direct, but in as many rounds as messages."""
    return Schedule((n,), tuple((Move(s, (0,)),) for s in range(1, n)))


def test_a_users_algorithm_is_priced():
    assert price("psum", my_star, (5,)).rounds == 8
    assert price("psum_scatter", my_star, (5,)) == price("psum_scatter", my_star(5), [5])


def test_a_tour_pays_for_shards_and_for_the_sums_that_follow_them():
    full = price("tour", "bidirectional_ring", (8,), (8,))
    assert (full.rounds, full.link) == (9, 7)
    assert (full.sent, full.raw, full.additions) == (14, 7, 7)
    for rank_count in (1, 2, 3, 5):
        alone = price("tour", "ring", (rank_count,))
        assert alone.raw == alone.sent - alone.raw == rank_count - 1
    with pytest.raises(ValueError, match="name an algorithm"):
        predict("tour", 8e6, place_of(8, "v5e"))


# -- bytes --


@pytest.mark.parametrize("n", [2, 3, 8])
def test_wire_bytes_of_a_narrow_operand_with_wide_sums(n):
    def elements(collective, algorithm, narrow, wide):
        sent = wire_bytes(collective, algorithm, (n,), 10, 2, 4)
        assert sent == 10 * (2 * narrow + 4 * wide)
        assert wire_bytes(collective, algorithm, (n,), 10, 2) == 10 * 2 * (narrow + wide)

    elements("psum_scatter", "ring", 1, n - 2)
    elements("psum_scatter", "direct", n - 1, 0)
    elements("psum", "ring", 1 + (n - 1), n - 2)
    elements("psum", "direct", 2 * (n - 1), 0)
    elements("all_gather", "ring", n - 1, 0)
    elements("all_to_all", "pairwise", n - 1, 0)


def test_a_message_with_a_partial_sum_in_it_is_wide():
    # 4, 5 and 6 go raw to 0, 1 and 2; then 2, a sum, and 3, raw, in one message; then 1.
    assert price("psum_scatter", "bruck", (7,)).raw == 3


def test_only_the_first_stage_is_narrow():
    assert wire_bytes("psum", "recursive_doubling", (8,), 10, 2, 4) == 80 * (2 + 4 + 4)
    assert wire_bytes("psum", (ring(1), ring(2)), (2,), 10, 2, 4) == 20 * 4
    assert wire_bytes("psum", "torus", (2, 3, 4), 6, 4) == 6 * 4 * 2 * 23  # sixths are exact
