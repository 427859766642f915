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
    rows = make(indices, pre_filter=lambda row: not forbidden(named(row)), salt=str(seed))
    for a, b in combinations(factors, 2):
        found = {(row[a], row[b]) for row in rows}
        for i, j in product(indices[a], indices[b]):
            pair = named({a: i, b: j})
            if (i, j) not in found and not forbidden(pair):
                raise ValueError(f"no case has {pair}")
    return [named(row) for row in rows]
