"""The rows: each is one way to call one drop-in, with the right result in NumPy.

A new way to call is one row. A new algorithm needs none, because every test asks `support.distinct`
for the algorithms. Most tests call the first row of a function, so it is not an easy one:
dimensions in the middle, counted from the last; a source that is not 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from support import assert_same, data, distinct, per_rank

import ringcoll.lax
from benchmarks.collectives.references import OTHERS, REFERENCES, TRANSPOSES

Axes = str | tuple[str, ...] | list[str]
Teams = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Case:
    """One way to call one drop-in.

    Attributes:
        name: the name of the function.
        shape: the shape of one rank's operand, on n ranks.
        options: the arguments after `axis_name`, on n ranks.
        canonical: the arguments with which lax (and the reference) does the same, if lax does not
            take `options` or is wrong with it.
    """

    name: str
    shape: Callable[[int], tuple[int, ...]]
    options: Callable[[int], dict[str, Any]] = lambda n: {}
    canonical: Callable[[int], dict[str, Any]] | None = None

    def ours(self, module: ModuleType, x: Any, axes: Axes, n: int, **extra: Any) -> Any:
        """The result of the call by `module` (ringcoll, or jax.lax)."""
        return getattr(module, self.name)(x, axes, **self.options(n), **extra)

    def by_lax(self, x: Any, axes: Axes, n: int, **extra: Any) -> Any:
        """The result by jax.lax, called with arguments that it takes.

        On CPU, lax cannot compile its pbroadcast. Its ppermute over several axes follows the order
        of the devices (0.10) or raises (0.12).
        """
        return getattr(lax, self.name)(x, axes, **(self.canonical or self.options)(n), **extra)

    def expected(self, x: np.ndarray, teams: Teams | None = None) -> np.ndarray:
        """The right results of all ranks, for the operands of all ranks.

        Each team of ranks calls the function by itself; None: all ranks are one team. A team lists
        its ranks in the order in which they count.
        """
        return self._of_teams(REFERENCES, x, teams)

    def gradient(self, ct: np.ndarray, teams: Teams | None = None) -> np.ndarray:
        """The right cotangents of all operands, for the cotangents of all results."""
        return self._of_teams(TRANSPOSES, ct, teams)

    def by_reciprocal(self, x: np.ndarray, teams: Teams | None = None) -> np.ndarray:
        """The results of a mean, forward or back, where XLA multiplies by a rounded 1/n."""
        return self._of_teams(OTHERS, x, teams)

    def _of_teams(
        self, references: dict[str, Callable], x: np.ndarray, teams: Teams | None
    ) -> np.ndarray:
        results = {}
        for team in [range(len(x))] if teams is None else teams:
            options = (self.canonical or self.options)(len(team))
            of_team = references[self.name](x[list(team)], **options)
            results |= zip(team, of_team, strict=True)
        return np.stack([results[rank] for rank in range(len(x))])

    def algorithms(self, *shape: int) -> list[dict[str, str]]:
        """The arguments that choose each algorithm that exists on axes of these sizes."""
        if not self.takes_algorithm:
            return [{}]
        return [{"algorithm": name} for name in distinct(self.collective, *(shape or (1,)))]

    @property
    def takes_algorithm(self) -> bool:
        return self.name not in ("ppermute", "pshuffle")

    @property
    def collective(self) -> str:
        """The name that algorithms and tables use."""
        return "all_to_all" if self.name == "pswapaxes" else self.name

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value}" for key, value in self.options(3).items())
        return f"{self.name}({shown}) of {self.shape(3)}"


def teams_of(mesh: Sequence[int], axes: Sequence[str], groups: Teams | None = None) -> Teams:
    """The ranks of the mesh that run a collective together, in the order in which they count."""
    along = ["xyz".index(axis) for axis in axes]
    others = [axis for axis in range(len(mesh)) if axis not in along]
    ranks = np.arange(prod(mesh)).reshape(mesh).transpose(*others, *along)
    teams = ranks.reshape(-1, prod(mesh[axis] for axis in along)).tolist()
    return [[team[i] for i in group] for team in teams for group in groups or [range(len(team))]]


def _ring(n: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % n) for rank in range(n)]


def _gathers() -> list[Case]:
    variants: list[dict[str, Any]] = [{"axis": axis} for axis in (-2, 2)]
    variants += [{"axis": axis, "tiled": True} for axis in (0, -1)]
    variants += [{"axis": -1, "tiled": True, "to": "invarying"}]

    def case(options: dict[str, Any]) -> Case:
        ndim = 2 if options.get("tiled") else 3
        counted = options | {"axis": options.get("axis", 0) % ndim}
        return Case("all_gather", lambda n: (3, 2), lambda n: options, lambda n: counted)

    return [*map(case, variants), Case("all_gather", lambda n: ())]


def _scatters() -> list[Case]:
    """Cases of psum_scatter. lax 0.10.2 takes a negative scatter_dimension but cannot lower it."""

    def case(dim: int, tiled: bool) -> Case:
        def shape(n: int) -> tuple[int, ...]:
            sizes = [2, 3, 2]
            sizes[dim] = 3 * n if tiled else n
            return tuple(sizes)

        options = {"scatter_dimension": dim, "tiled": tiled}
        counted = {"scatter_dimension": dim % 3, "tiled": tiled}
        return Case("psum_scatter", shape, lambda n: options, lambda n: counted)

    # The scattered dimension is removed; others of size 1 stay.
    options = {"scatter_dimension": 1, "tiled": False}
    ones = Case("psum_scatter", lambda n: (1, n, 1), lambda n: options)
    calls = [(-2, False), (-2, True), (0, True), (2, False)]
    return [*(case(dim, tiled) for dim, tiled in calls), ones]


class _Traced(Case):
    """A broadcast whose source is known only when it runs."""

    def ours(self, module: ModuleType, x: Any, axes: Axes, n: int, **extra: Any) -> Any:
        source = lax.optimization_barrier(jnp.int32(self.options(n)["source"]))
        return module.pbroadcast(x, axes, source, **extra)


def _broadcast(kind: type[Case], shape: Any, source: Callable[[int], int]) -> Case:
    return kind(
        "pbroadcast", shape, lambda n: {"source": source(n)}, lambda n: {"source": source(n) % n}
    )


TRACED = _broadcast(_Traced, lambda n: (3, 2), lambda n: 2 * n // 3 - n)


def _all_reduces() -> list[Case]:
    """Cases of reductions: a size that must be padded, a size that n divides, a scalar."""
    shapes = [lambda n: (3, 2), lambda n: (3, 2 * n), lambda n: ()]
    cases = [Case(name, s) for name in ("psum", "pmean", "pmax", "pmin") for s in shapes]
    return [
        *cases,
        _broadcast(Case, lambda n: (3, 2), lambda n: 2 * n // 3),
        _broadcast(Case, lambda n: (3, 2), lambda n: 0),
        _broadcast(Case, lambda n: (3, 2 * n), lambda n: -1),
        TRACED,
    ]


def _all_to_alls() -> list[Case]:
    """Cases of all_to_all. lax 0.10.2 is wrong for negative axes that are not tiled."""

    def case(split: int, concat: int, tiled: bool) -> Case:
        def shape(n: int) -> tuple[int, ...]:
            sizes = [2, 3, 4]
            sizes[split] = 3 * n if tiled else n
            return tuple(sizes)

        options = {"split_axis": split, "concat_axis": concat, "tiled": tiled}
        counted = options | {"split_axis": split % 3, "concat_axis": concat % 3}
        return Case("all_to_all", shape, lambda n: options, lambda n: counted)

    calls = [(-2, -1, False), (-1, 0, True), (1, 1, False), (1, 1, True), (0, 2, True)]
    swap = Case("pswapaxes", lambda n: (2, n, 2), lambda n: {"axis": -2}, lambda n: {"axis": 1})
    return [*(case(*call) for call in calls), swap]


def _permutes() -> list[Case]:
    perms: list[Callable[[int], Any]] = [
        _ring,
        lambda n: _ring(n)[: n // 2],  # some send nothing and some get zeros
        lambda n: tuple((r, n - 1 - r) for r in range(n)),  # one to itself if n is odd
        lambda n: [],
        lambda n: [(-1, 0)],  # lax counts ranks modulo n
    ]
    cases = [Case("ppermute", lambda n: (3, 2), lambda n, p=p: {"perm": p(n)}) for p in perms]
    turned = Case("pshuffle", lambda n: (3, 2), lambda n: {"perm": [(r + 1) % n for r in range(n)]})
    return [*cases, turned]


CASES = [*_gathers(), *_scatters(), *_all_reduces(), *_all_to_alls(), *_permutes()]
#: One case for each function, for tests that are not about its arguments.
MAIN = list({case.name: case for case in reversed(CASES)}.values())[::-1]


def _linear() -> dict[str, Case]:
    """The calls that have a derivative, those with other code for it too."""
    found = {case.name: case for case in MAIN if case.name not in ("pmax", "pmin")}
    tiled = [case for case in CASES if case.options(1).get("tiled") and "to" not in case.options(1)]
    found |= {f"{case.name}, tiled": case for case in reversed(tiled) if case.name != "all_gather"}
    found["all_gather to invarying"] = next(c for c in CASES if "to" in c.options(1))
    found["pbroadcast from a traced source"] = TRACED
    return found


#: The calls that have a derivative, by name: one or two of each function.
LINEAR = _linear()


def operand(case: Case, mesh: Mesh, n: int, dtype: Any = "float32") -> np.ndarray:
    """Every rank's operand, stacked. Values are shuffled, so each rank has some of the maxima."""
    values = data((mesh.size, *case.shape(n)), jnp.dtype(dtype), ranks=mesh.size)
    return np.random.default_rng(0).permutation(values.reshape(-1)).reshape(values.shape)


def first_algorithm(case: Case, *shape: int) -> list[dict[str, str]]:
    """For `check`: the first algorithm, for tests that are not about algorithms."""
    return case.algorithms(*shape)[:1]


def check(
    mesh: Mesh,
    cases: Sequence[Case],
    extras: Callable[[Case, int], Sequence[dict[str, Any]]],
    dtype: Any = "float32",
) -> None:
    """Compare the results of all ranks with the right ones.

    Args:
        mesh: where to run; of one axis, x.
        cases: what to call.
        extras: `(case, n) -> list of further arguments`; ours is called with each of them.
        dtype: the dtype of the operands.
    """
    n = mesh.size
    operands = {str(case): operand(case, mesh, n, dtype) for case in cases}

    def program(operands: dict[str, Array]) -> dict[str, dict[str, Any]]:
        return {
            str(case): {
                str(extra): case.ours(ringcoll.lax, operands[str(case)], "x", n, **extra)
                for extra in extras(case, n)
            }
            for case in cases
        }

    results = per_rank(mesh, program, operands)
    for case in cases:
        expected = case.expected(operands[str(case)])
        for extra, result in results[str(case)].items():
            if case.name == "pmean":  # XLA may multiply by 1/n
                other = case.by_reciprocal(operands[str(case)])
                expected = np.where(result == other, other, expected)
            assert_same({f"{case} {extra}": result}, {f"{case} {extra}": expected})
