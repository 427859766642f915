"""`tests/covering.py`: every allowed pair occurs, nothing forbidden, and the cases are few."""

from itertools import combinations, product

from covering import covering

FACTORS = {
    "n": [1, 2, 3, 5],
    "dtype": ["f32", "bf16", [8]],
    "groups": [None, "even"],
    "typed": [0, 1],
}


def forbidden(case):
    """One pair, and one triple."""
    of = case.get
    return (of("groups") and of("n") == 1) or (of("typed") and of("n") == 5 and of("dtype") == [8])


def test_every_allowed_pair_occurs_and_nothing_forbidden():
    cases = covering(FACTORS, forbidden)
    assert not any(map(forbidden, cases))
    for a, b in combinations(FACTORS, 2):
        for x, y in product(FACTORS[a], FACTORS[b]):
            pair = {a: x, b: y}
            assert forbidden(pair) or any(case[a] == x and case[b] == y for case in cases), pair
    assert 12 <= len(cases) <= 16  # the two longest factors have 12 pairs
