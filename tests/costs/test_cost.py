"""Seconds from counts, and the model of a machine that is nearest to measured ones."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcoll.costs import DEVICES, Model, Sample, fit, links, price
from ringcoll.costs import seconds as modelled
from ringcoll.costs.model import gather_links, scatter_links

pytestmark = pytest.mark.quick


def test_seconds_are_the_sum_of_startups_bytes_and_additions():
    paid = price("psum", "ring", (4,))  # 6 messages, 6 shards sent, 3 added
    assert modelled(paid, 100, Model(1, 0, 0)) == 6
    assert modelled(paid, 100, Model(0, 1, 0)) == 600
    assert modelled(paid, 100, Model(0, 0, 1)) == 300


def test_near_bytes_travel_during_far_hops():
    paid = price("all_gather", "direct", (4,), network=(4,))  # to 1 and 3, and half round to 2
    assert (paid.startups, paid.hops, paid.link) == (2, 2, 3)
    for hop in (10, 1000):  # a link and three shards, or two links and two shards
        taken = modelled(paid, 100, Model(7, 1, 0, hop=hop))
        assert taken == 2 * 7 + max(hop + 300, 2 * hop + 200)
    # Both phases of an all-reduce, which also adds.
    both = price("psum", "direct", (4,), network=(4,))
    assert modelled(both, 100, Model(7, 1, 1, hop=10)) == 2 * (14 + 310) + 300


# -- fit --


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_fit_is_the_least_squares_with_no_negative_coefficient(seed, count):
    random = np.random.default_rng(seed)
    rows = random.uniform(0, 1, (count, 4))
    rows[:, 3] += 0.1
    rows[:, :3] *= random.uniform(0, 1, 3) < 0.9  # now and then a column of zeros
    model, residual = fit(Sample(*row) for row in rows)
    found = np.array([model.alpha, model.beta, model.gamma])
    relative = rows[:, :3] / rows[:, 3:]
    gradient = relative.T @ (relative @ found - 1)  # Karush, Kuhn and Tucker
    assert (found >= 0).all()
    assert (gradient > -1e-4 * count).all()
    assert (abs(gradient[found > 0]) < 1e-4 * count).all()
    assert residual == pytest.approx(np.median(abs(relative @ found - 1)), abs=1e-9)


@pytest.mark.parametrize("bad", [[], [Sample(1, 2, 3, 0.0)], [Sample(1, 2, 3, float("nan"))]])
def test_fit_refuses_samples_without_time(bad):
    with pytest.raises(ValueError, match="fit needs samples of more than 0 seconds, got "):
        fit(bad)


@pytest.mark.parametrize(
    ("name", "ranks", "expected", "of_a_scatter"),
    [
        *(("v5e", 8, 2, 2), ("v5e", 16, 2, 1), ("v5e", 32, 2, 2), ("v5e", 64, 2, 1)),
        *(("v5e", 256, 4, 2), ("v6e", 8, 2, 2), ("v6e", 16, 2, 1), ("v6e", 64, 2, 1)),
        *(("v5p", 4, 2, 2), ("v5p", 8, 3, 1.5), ("v5p", 64, 6, 3), ("v6e", 2, 1, 1)),
        # Two devices share the links of a chip.
        *(("tpu7x", 2, 1, 1), ("tpu7x", 8, 2, 2), ("tpu7x", 64, 3, 3), ("tpu7x", 128, 6, 6)),
    ],
)
def test_links_of_a_slice(name, ranks, expected, of_a_scatter):
    """libtpu 0.0.52 compiles the scatter to an all-reduce on square slices, and on those of v5p."""
    assert links(ranks, DEVICES[name]) == expected
    model = replace(DEVICES[name], built_in=0.5, built_in_sum=0.25)
    share = 0.5 if of_a_scatter == expected else 0.25
    assert gather_links(ranks, model) == 0.5 * expected
    assert scatter_links(ranks, model) == share * of_a_scatter
    assert links(ranks, Model(1, 1, 1)) == 2
