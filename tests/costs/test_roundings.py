"""Roundings and error bounds; `test_precision` holds the results of the collectives to them."""

import numpy as np
import pytest

from ringcoll.costs import encodings, error_bound, roundings
from ringcoll.costs.wire import Wire

ANY = range(2, 65)
TWOS = [2, 4, 8, 16, 32, 64]


def lg(p):
    """log2 p, rounded up."""
    return (p - 1).bit_length()


# The additions on the longest way into a sum.
CHAINS = [
    ("ring", ANY, lambda p: p - 1),
    ("bidirectional_ring", ANY, lambda p: p - 1),
    ("two_ended", range(3, 65), lambda p: p // 2 + 1),
    ("direct", ANY, lambda p: p - 1),
    ("halving_doubling", TWOS, lg),
    ("bruck", ANY, lg),
    ("recursive_doubling", TWOS, lg),
    ("recursive_doubling", [6, 12, 7], lambda p: {6: 1 + 2, 12: 2 + 2, 7: 6}[p]),
    ("one_shot", ANY, lambda p: p - 1),
]


@pytest.mark.parametrize(("algorithm", "sizes", "form"), CHAINS)
def test_roundings_are_the_longest_chain(algorithm, sizes, form):
    for p in sizes:
        assert roundings("psum", algorithm, (p,)) == form(p)
        assert roundings("pmean", algorithm, (p,)) == form(p) + 1


def test_only_sums_are_rounded():
    for collective in ("all_gather", "pmax", "pmin", "pbroadcast"):
        assert error_bound(collective, "ring", (8,), 2**-7) == 0
    assert error_bound("all_to_all", "bruck", (8,), 2**-7) == 0
    assert error_bound("psum", "ring", (1,), 2**-7, 2**-23) == 0
    with pytest.raises(ValueError, match="no collective 'allgather'"):
        error_bound("allgather", "ring", (8,), 2**-7)


def test_the_built_in_has_the_bound_of_any_order():
    for sizes in ((8,), (2, 4)):
        assert roundings("psum", "lax", sizes) == 7
        assert encodings("psum", "lax", sizes) == 2  # its contributions, and its sum
        assert encodings("all_to_all", "lax", sizes) == encodings("all_gather", "lax", sizes) == 1
    bounds = {error_bound("psum", "lax", (8,), 2**-7, wire=of) for of in ("int8", Wire("int8"))}
    assert bounds == {error_bound("psum", "direct", (8,), 2**-7, wire=Wire("int8"))}


@pytest.mark.parametrize(
    ("collective", "encoded", "added", "rounded"),
    [
        ("all_gather", 1, 0, 2),
        ("psum_scatter", 1, 7, 2),
        ("psum", 2, 7, 3),
        ("pmean", 2, 8, 4),
    ],
)
def test_the_bound_of_a_wire(collective, encoded, added, rounded):
    """Codes, additions in float32, and roundings to bfloat16."""
    sums = added * 2**-24 / (1 - added * 2**-24)
    codes = 1 + Wire("int8").error
    expected = codes**encoded * (1 + sums) * (1 + 2**-8) ** rounded - 1
    assert error_bound(collective, "direct", (8,), 2**-7, wire="int8") == pytest.approx(expected)
    assert error_bound(collective, "direct", (1,), 2**-7, wire="int8") == 0


def test_wide_sums_are_rounded_once():
    narrow, wide = 2**-7, 2**-23
    bound = error_bound("psum", "ring", (256,), np.float32(narrow), np.float32(wide))
    assert type(bound) is float  # not computed in a narrow dtype, as an eps has
    assert bound == pytest.approx(narrow / 2 + 255 * wide / 2, rel=1e-2)
    assert error_bound("psum", "ring", (100,), narrow) == pytest.approx(99 / 256 / (1 - 99 / 256))
    with pytest.raises(ValueError, match=r"^psum: no bound after 256 roundings of 0\.0039"):
        error_bound("psum", "ring", (257,), narrow)
