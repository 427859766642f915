"""Covering arrays: few cases of a table of options in which every pair of values occurs.

Most mistakes need one or two options together to show (Kuhn, Wallace and Gallo, "Software Fault
Interactions and Implications for Software Testing", 2004), so pairs find them at a small part of
the price of every combination.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from covertable import make

Case = dict[str, Any]

#: The cases of seed 0 run by default. The exhaustive ones are other cases of the same tables.
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2, 3))]


def covering(
    factors: Mapping[str, Sequence[Any]],
    forbidden: Callable[[Case], bool] = lambda case: False,
    seed: int = 0,
) -> list[Case]:
    """Cases in which every pair of values of two factors occurs, unless it is forbidden.

    Args:
        factors: the values of each factor, by name. They need not be hashable.
        forbidden: whether a case cannot be. It is also asked about parts of a case, such as pairs.
        seed: a different one gives different cases.

    Raises:
        ValueError: a pair that is not forbidden occurs in no case. Forbid it, or give some factor a
            value with which it can be.
    """

    def named(chosen: Mapping[str, int]) -> Case:
        return {name: factors[name][i] for name, i in chosen.items()}

    indices = {name: list(range(len(values))) for name, values in factors.items()}
    rows = make(indices, constraints=_constraints(factors, forbidden), salt=str(seed))
    if wrong := [case for case in map(named, rows) if forbidden(case)]:
        raise ValueError(f"it is forbidden, but no three values of it are: {wrong[0]}")
    for a, b in combinations(factors, 2):
        found = {(row[a], row[b]) for row in rows}
        for i, j in product(indices[a], indices[b]):
            pair = named({a: i, b: j})
            if (i, j) not in found and not forbidden(pair):
                raise ValueError(f"no case has {pair}")
    return [named(row) for row in rows]


def _constraints(
    factors: Mapping[str, Sequence[Any]], forbidden: Callable[[Case], bool]
) -> list[dict[str, Any]]:
    """The forbidden pairs, and the forbidden triples without such a pair, as covertable takes them.

    They are computed once, because covertable asks about them many times.
    """
    found = []
    for names in (*combinations(factors, 2), *combinations(factors, 3)):
        indices = product(*(range(len(factors[name])) for name in names))
        values = {at: {n: factors[n][i] for n, i in zip(names, at, strict=True)} for at in indices}
        wrong = {at for at, case in values.items() if forbidden(case)}
        if len(names) == 3:
            pairs = {at: map(dict, combinations(values[at].items(), 2)) for at in wrong}
            wrong = {at for at, some in pairs.items() if not any(map(forbidden, some))}
        if wrong:
            found.append(
                {
                    "operator": "fn",
                    "requires": list(names),
                    "evaluate": lambda row, names=names, wrong=wrong: (
                        tuple(row[name] for name in names) not in wrong
                    ),
                }
            )
    return found
