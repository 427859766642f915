"""Covering arrays: few cases of a table of options in which every pair of values occurs.

Most mistakes need one or two options together to show (Kuhn, Wallace and Gallo, "Software Fault
Interactions and Implications for Software Testing", 2004), so pairs find them at a small part of
the price of every combination.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

import pytest

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

    rng = Random(seed)

    def pairs(case: Case) -> Iterator[tuple]:
        return combinations(sorted(case.items()), 2)

    def complete(part: Case, names: list[str]) -> Case | None:
        """A case with this part, in which many pairs are new; None if there is none."""
        if not names:
            return part
        at = indices[names[0]]
        new = {i: sum(tuple(sorted([(names[0], i), each])) in missing for each in part.items())
               for i in at}  # fmt: skip
        for i in sorted(rng.sample(at, len(at)), key=new.get, reverse=True):
            longer = part | {names[0]: i}
            if not forbidden(named(longer)) and (case := complete(longer, names[1:])):
                return case
        return None

    def named(chosen: Case) -> Case:
        return {name: factors[name][i] for name, i in chosen.items()}

    indices = {name: range(len(values)) for name, values in factors.items()}
    every = [
        tuple(sorted([(a, i), (b, j)]))
        for a, b in combinations(factors, 2)
        for i, j in product(indices[a], indices[b])
    ]
    rng.shuffle(every)
    missing = {pair: None for pair in every if not forbidden(named(dict(pair)))}
    cases = []
    while missing:
        pair = dict(next(iter(missing)))
        rest = [name for name in factors if name not in pair]
        case = complete(pair, rng.sample(rest, len(rest)))
        if case is None:
            raise ValueError(f"no case has {named(pair)}")
        for covered in pairs(case):
            missing.pop(covered, None)
        cases.append(named(case))
    return [{name: case[name] for name in factors} for case in cases]
