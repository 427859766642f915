"""The case table: each row is one way to call one drop-in.

A new collective needs one row or a few. A new algorithm needs none, because every test asks
`support.distinct` for the algorithms. Most tests call the first case of a function, so it is not
an easy one: dimensions in the middle, counted from the last; a source that is not 0.
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
from ringcoll.collectives.table import GATHERED_AS_BITS, LAX_AS_BITS, choices

Axes = str | tuple[str, ...] | list[str]


@dataclass(frozen=True)
class Case:
    """One way to call one drop-in.

    Attributes:
        name: the name of the function.
        shape: the shape of one rank's operand, on n ranks.
        options: the arguments after `axis_name`, on n ranks.
        canonical: the arguments with which lax does the same, if lax does not take `options` or is
            wrong with it.
    """

    name: str
    shape: Callable[[int], tuple[int, ...]]
    options: Callable[[int], dict[str, Any]] = lambda n: {}
    canonical: Callable[[int], dict[str, Any]] | None = None

    def ours(self, module: ModuleType, x: Any, axes: Axes, n: int, **extra: Any) -> Any:
        """The result of the call by `module` (ringcoll, or jax.lax)."""
        return getattr(module, self.name)(x, axes, **self.options(n), **extra)

    def by_lax(self, x: Any, axes: Axes, n: int, **extra: Any) -> Any:
        """The result by jax.lax, called with arguments that it takes."""
        return getattr(lax, self.name)(x, axes, **(self.canonical or self.options)(n), **extra)

    def theirs(self, x: Any, axes: Axes, n: int, **extra: Any) -> Any:
        """The result by jax.lax, or the right result if lax cannot compute it.

        lax's own pbroadcast cannot be compiled for CPU, and its ppermute over several
        axes follows the order of the devices (0.10) or raises (0.12).
        """
        of_several = self.name in ("ppermute", "pshuffle") and not isinstance(axes, str)
        if self.name == "pbroadcast" or of_several:
            return _by_gathering(self.name, x, axes, n, **self.options(n))
        return self.by_lax(x, axes, n, **extra)

    def algorithms(self, *shape: int) -> list[dict[str, str]]:
        """The arguments that choose each algorithm that exists on axes of these sizes."""
        if self.name in ("ppermute", "pshuffle"):
            return [{}]
        as_bits = [LAX_AS_BITS, "ring" + GATHERED_AS_BITS]
        builtin = [name for name in choices(self.collective) if name in as_bits]
        hand_written = distinct(self.collective, *(shape or (1,)))
        return [{"algorithm": name} for name in [*hand_written, *builtin]]

    @property
    def collective(self) -> str:
        """The name that algorithms and tables use."""
        return "all_to_all" if self.name == "pswapaxes" else self.name

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value}" for key, value in self.options(3).items())
        return f"{self.name}({shown}) of {self.shape(3)}"


def _by_gathering(
    name: str, x: Array, axes: Axes, n: int, perm: Any = (), source: int = 0
) -> Array:
    """A permutation or a broadcast: lax gathers all shards, and each rank picks one."""
    every = lax.all_gather(x[None], axes, tiled=True)  # [n, ...]
    if name == "pbroadcast":
        return every[source]
    pairs = enumerate(perm) if name == "pshuffle" else ((d, s) for s, d in perm)
    origin = {d % n: s % n for d, s in pairs}
    with_zeros = jnp.concatenate([every, jnp.zeros_like(every[:1])])
    table = jnp.array([origin.get(rank, n) for rank in range(n)])
    return with_zeros[table[lax.axis_index(axes)]]


def _ring(n: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % n) for rank in range(n)]


def _gathers() -> list[Case]:
    variants: list[dict[str, Any]] = [{"axis": axis} for axis in (-2, 0, 1, 2, -1, -3)]
    variants += [{"axis": axis, "tiled": True} for axis in (0, 1, -1)]
    variants += [{"to": "invarying"}, {"axis": -1, "tiled": True, "to": "invarying"}]

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
    return [*(case(dim, tiled) for dim in (-2, 0, 1, -1) for tiled in (False, True)), ones]


class _Traced(Case):
    """A broadcast whose source is known only when it runs."""

    def ours(self, module: ModuleType, x: Any, axes: Axes, n: int, **extra: Any) -> Any:
        source = lax.optimization_barrier(jnp.int32(self.options(n)["source"]))
        return module.pbroadcast(x, axes, source, **extra)


TRACED = _Traced("pbroadcast", lambda n: (3, 2), lambda n: {"source": 2 * n // 3 - n})


def _all_reduces() -> list[Case]:
    """Cases of reductions: a size that must be padded, a size that n divides, a scalar."""
    shapes = [lambda n: (3, 2), lambda n: (3, 2 * n), lambda n: ()]
    cases = [Case(name, s) for name in ("psum", "pmean", "pmax", "pmin") for s in shapes]
    return [
        *cases,
        Case("pbroadcast", lambda n: (3, 2), lambda n: {"source": 2 * n // 3}),
        Case("pbroadcast", lambda n: (3, 2), lambda n: {"source": 0}),
        Case("pbroadcast", lambda n: (3, 2 * n), lambda n: {"source": -1}),
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

    pairs = [(-2, -1), (0, 1), (1, 0), (1, 1), (0, 2), (-1, 0), (0, -1)]
    swaps = [
        Case("pswapaxes", lambda n: (2, n, 2), lambda n: {"axis": -2}, lambda n: {"axis": 1}),
        Case("pswapaxes", lambda n: (n, 2), lambda n: {"axis": 0}),
    ]
    return [*(case(s, c, tiled) for s, c in pairs for tiled in (False, True)), *swaps]


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


def sizes_of(mesh: Mesh, axes: Axes) -> tuple[int, ...]:
    """The sizes of some axes of a mesh."""
    named = (axes,) if isinstance(axes, str) else tuple(axes)
    return tuple(mesh.shape[axis] for axis in named)


def operand(case: Case, mesh: Mesh, n: int, dtype: Any = "float32") -> np.ndarray:
    """Every rank's operand, stacked. Values are shuffled, so each rank has some of the maxima."""
    values = data((mesh.size, *case.shape(n)), jnp.dtype(dtype), ranks=mesh.size)
    return np.random.default_rng(0).permutation(values.reshape(-1)).reshape(values.shape)


def first_algorithm(case: Case, *shape: int) -> list[dict[str, str]]:
    """For `check`: the first algorithm, for tests that are not about algorithms."""
    return case.algorithms(*shape)[:1]


def each_algorithm(case: Case, *shape: int) -> list[dict[str, str]]:
    """For `check`: the default, and all algorithms.

    pmean, pmax and pmin differ from psum by one operation, whatever the algorithm. So each of them
    runs a third of the algorithms: another third for each function and each number of ranks.
    """
    every = case.algorithms(*shape)
    others = ("pmean", "pmax", "pmin")
    if case.name in others:
        every = every[(others.index(case.name) + prod(shape)) % 3 :: 3]
    return [{}, *every]


def check(
    mesh: Mesh,
    axes: Axes,
    cases: Sequence[Case],
    extras: Callable[..., Sequence[dict[str, Any]]] = lambda case, *shape: [{}],
    groups: Sequence[Sequence[int]] | None = None,
    dtype: Any = "float32",
    **mode: bool,
) -> None:
    """Compare ours with lax's, on every rank.

    Args:
        mesh, axes: where to run.
        cases: what to call.
        extras: `(case, *shape) -> list of further arguments`; ours is called with each of them.
        groups: the `axis_index_groups` for both.
        dtype: the dtype of the operands.
        mode: `jit` and `check_vma`, for `per_rank`.
    """
    shape = (len(groups[0]),) if groups else sizes_of(mesh, axes)
    n = prod(shape)
    both = {"axis_index_groups": groups} if groups else {}
    operands = {str(case): operand(case, mesh, n, dtype) for case in cases}

    def ours(operands: dict[str, Array]) -> dict[str, Any]:
        return {
            f"{case} {extra}": case.ours(
                ringcoll.lax, operands[str(case)], axes, n, **both, **extra
            )
            for case in cases
            for extra in extras(case, *shape)
        }

    def theirs(operands: dict[str, Array]) -> dict[str, Any]:
        return {str(case): case.theirs(operands[str(case)], axes, n, **both) for case in cases}

    expected = per_rank(mesh, theirs, operands, check_vma=not groups)
    for name, result in per_rank(mesh, ours, operands, **mode).items():
        (case,) = (case for case in expected if name.startswith(case))
        assert_same({name: result}, {name: expected[case]})
