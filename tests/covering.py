"""Covering arrays: few cases of a table of options in which every pair of values occurs.

Most mistakes need one or two options together to show (Kuhn, Wallace and Gallo, "Software Fault
Interactions and Implications for Software Testing", 2004), so pairs find them at a small part of
the price of every combination.

Existing tools do not fit: allpairspy 2.5 loses pairs where others are forbidden, and covertable 3
takes twenty seconds for a table of ours whose forbidden cases are said by a function.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from itertools import combinations, product
from typing import Any

import pytest

Case = dict[str, Any]

#: How often a case is begun again, in a different order, if a factor has no value that is allowed.
TRIES = 50

#: The cases of seed 0 run by default. The exhaustive ones are other cases of the same tables.
SEEDS = [0, pytest.param(1, marks=pytest.mark.exhaustive)]


def any_of(rules: Sequence[Callable[..., Any]]) -> Callable[[Case], bool]:
    """Whether a case breaks a rule; each rule takes factors by the names of its parameters.

    A rule does not apply to a part of a case that lacks one of these factors.
    """
    named = [(tuple(signature(rule).parameters), rule) for rule in rules]

    def forbidden(case: Case) -> bool:
        return any(
            rule(*(case[name] for name in names))
            for names, rule in named
            if all(name in case for name in names)
        )

    return forbidden


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

    rng = random.Random(seed)
    wanted = {  # pairs that no case has yet
        frozenset({(a, i), (b, j)})
        for a, b in combinations(factors, 2)
        for i, j in product(range(len(factors[a])), range(len(factors[b])))
        if not forbidden({a: factors[a][i], b: factors[b][j]})
    }
    cases = []
    for pair in sorted(wanted, key=sorted):
        if pair not in wanted:
            continue  # a case that was made for another pair has it
        attempts = (_filled(factors, forbidden, dict(pair), wanted, rng) for _ in range(TRIES))
        chosen = next(filter(None, attempts), None)
        if chosen is None:
            raise ValueError(f"no case has { ({a: factors[a][i] for a, i in sorted(pair)}) }")
        wanted -= set(map(frozenset, combinations(chosen.items(), 2)))
        cases.append({name: factors[name][chosen[name]] for name in factors})
    return cases


def _filled(
    factors: Mapping[str, Sequence[Any]],
    forbidden: Callable[[Case], bool],
    chosen: dict[str, int],
    wanted: set[frozenset[tuple[str, int]]],
    rng: random.Random,
) -> dict[str, int] | None:
    """The indices of a case's values: those that were chosen, and others with most wanted pairs.

    It is None if a factor has no value that is not forbidden beside those chosen before.
    """
    values = {name: factors[name][i] for name, i in chosen.items()}
    for name in rng.sample(rest := [name for name in factors if name not in chosen], len(rest)):
        order = rng.sample(range(len(factors[name])), len(factors[name]))
        allowed = [i for i in order if not forbidden(values | {name: factors[name][i]})]
        if not allowed:
            return None
        best = max(
            allowed, key=lambda i: sum(frozenset({(name, i), o}) in wanted for o in chosen.items())
        )
        chosen, values = chosen | {name: best}, values | {name: factors[name][best]}
    return chosen
