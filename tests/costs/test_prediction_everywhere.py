"""`cost.predict` on every machine, for any ranks and bytes: rules that every prediction keeps."""

from itertools import pairwise
from math import isfinite, prod

import pytest

from ringcoll import algorithms
from ringcoll.cost import predict
from ringcoll.costs.machines import MACHINES

SIZES = sorted([0, 1, 300, 3 * 2**20, 5 * 2**26, *(2**k for k in range(10, 35, 3))])
RANKS = [2, 3, 7, 8, 9, 16, 31, 36, 64, 72, 73, 100, 256, 777, 1024, (2, 8), (4, 4), (1, 8)]
CUBES = [(4, 4, 4), (2, 3, 4)]
COLLECTIVES = ["all_gather", "psum_scatter", "psum", "all_to_all", "pbroadcast", "ppermute"]
OURS = [(c, a) for c in COLLECTIVES[:4] for a in algorithms.names(c)]


def _ranks(machine):
    return RANKS if machine.model.axes == 2 else RANKS + CUBES


def _reasonable(times, of):
    """Assert: above 0, finite, never falling, and never growing much faster than the bytes."""
    assert all(isfinite(taken) and taken > 0 for taken in times), of
    for (size, taken), (larger, longer) in pairwise(zip(SIZES, times, strict=True)):
        most = taken if size < 1 else taken * larger / size
        assert taken <= longer * (1 + 1e-9), (of, size, larger)
        assert size < 1 or longer <= 1.6 * most, (of, size, larger)


@pytest.mark.parametrize("name", MACHINES)
def test_the_built_in_is_priced_for_any_ranks_and_bytes(name):
    for collective in COLLECTIVES:
        for ranks in _ranks(MACHINES[name]):
            times = [predict(collective, size, ranks, name) for size in SIZES]
            _reasonable(times, (collective, ranks))


@pytest.mark.parametrize("name", MACHINES)
def test_long_messages_are_no_faster_than_links(name):
    """A port carries at least (n-1)/n of the bytes; a chip of a torus has two for each axis."""
    model = MACHINES[name].model
    ports = 2 * model.axes or 1
    for collective in COLLECTIVES[:4]:
        for ranks in _ranks(MACHINES[name]):
            n = prod(ranks) if isinstance(ranks, tuple) else ranks
            least = 2**34 * (n - 1) / n * model.beta / ports
            assert predict(collective, 2**34, ranks, name) >= least, (collective, ranks)


@pytest.mark.parametrize("name", MACHINES)
def test_short_messages_take_a_start(name):
    """At least half the start of a permute: GH200's shortest all-reduces took two thirds of one."""
    alpha = MACHINES[name].model.alpha
    for collective in COLLECTIVES:
        for ranks in _ranks(MACHINES[name]):
            assert predict(collective, 1, ranks, name) >= 0.5 * alpha, (collective, ranks)


@pytest.mark.parametrize("name", ["h100", "a100", "v5p", "ethernet100"])
@pytest.mark.parametrize(("collective", "algorithm"), OURS)
def test_ours_are_priced_for_any_ranks_that_they_are_for(name, collective, algorithm):
    for ranks in (2, 3, 8, 9, 16, 31, (4, 4), 64):
        try:
            algorithms.build(collective, algorithm, ranks if isinstance(ranks, tuple) else (ranks,))
        except ValueError:
            continue
        times = [predict(collective, size, ranks, name, algorithm) for size in SIZES[1:]]
        assert all(isfinite(taken) and taken > 0 for taken in times), ranks
        assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times)), ranks
