"""`costs.predict` for any ranks and bytes, where it models: rules that every prediction keeps."""

from itertools import pairwise
from math import isfinite, prod

import pytest

from ringcoll.costs import place_of, predict
from ringcoll.costs.machines import MACHINES

SIZES = sorted([0, 1, 300, 3 * 2**20, 5 * 2**26, *(2**k for k in range(10, 35, 3))])
#: Few ranks by default; a schedule of many takes seconds to price.
FEW = [2, 3, 7, 8, 9, 16, 31, 36, 64, 73, (2, 8), (4, 4), (1, 8)]
MANY = [72, 100, 256, 777, 1024]
RANKS = [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.exhaustive)]
CUBES = [(4, 4, 4), (2, 3, 4)]
MODELLED = [name for name, one in MACHINES.items() if one.model.axes or one.ranks_a_host == 1]
COLLECTIVES = ["all_gather", "psum_scatter", "psum", "all_to_all", "pbroadcast", "ppermute"]


def _reasonable(times, of):
    """Assert: above 0, finite, never falling, and never growing much faster than the bytes."""
    assert all(isfinite(taken) and taken > 0 for taken in times), of
    for (size, taken), (larger, longer) in pairwise(zip(SIZES, times, strict=True)):
        most = taken if size < 1 else taken * larger / size
        assert taken <= longer * (1 + 1e-9), (of, size, larger)
        assert size < 1 or longer <= 1.6 * most, (of, size, larger)


@pytest.mark.parametrize("some", RANKS)
@pytest.mark.parametrize("name", MODELLED)
def test_the_built_in_is_priced_for_any_ranks_and_bytes(name, some):
    """Long messages are no faster than the links; short ones take half the start of a permute."""
    model = MACHINES[name].model
    ports = 2 * model.axes or 1  # a chip of a torus has two for each axis
    for collective in COLLECTIVES:
        for ranks in some + (CUBES if model.axes != 2 else []):
            times = [predict(collective, size, place_of(ranks, name)) for size in SIZES]
            _reasonable(times, (collective, ranks))
            n = prod(ranks) if isinstance(ranks, tuple) else ranks
            least = SIZES[-1] * (n - 1) / n * model.beta / ports
            assert collective not in COLLECTIVES[:4] or times[-1] >= least, (collective, ranks)
            assert times[1] >= 0.5 * model.alpha, (collective, ranks)
