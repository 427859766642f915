"""Random calls of the drop-ins. Call i of a seed is always the same.

Successive calls share a `Setting`, so that they can be one program. jax.lax accepts all of these
calls, and their results are exact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, product
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.random import Generator

from benchmarks.collectives import ragged
from benchmarks.collectives.cases import exists
from benchmarks.collectives.references import REFERENCES, TRANSPOSES
from benchmarks.measuring.data import largest
from benchmarks.measuring.options import DATATYPES, WIDE_DATATYPES
from ringcoll.algorithms import COLLECTIVES
from ringcoll.choose.table import choices
from ringcoll.schedules.registry import LAX

T = TypeVar("T")
Groups = Sequence[Sequence[int]]

#: How many calls share a setting. One program for each call would take several times as long to
#: compile.
TOGETHER = 16
#: Sizes of a rank's dimensions, and how often a size is 0.
SIZES = (1, 2, 3, 4, 5)
EMPTY = 0.02

_SUMS = ("psum", "psum_scatter", "pmean")
_UNGROUPED = ("pbroadcast", "ppermute", "pshuffle")  # no groups in lax
_UNGROUPED_IF_TYPED = ("psum", "pmean")  # no groups in lax under check_vma=True
_WIDENED = (*_SUMS, "all_gather")  # all_gather sums in its gradient
#: The argument with the dimension that is cut into a block for each rank.
_CUTS = {"psum_scatter": "scatter_dimension", "all_to_all": "split_axis", "pswapaxes": "axis"}
_RAGGED = "ragged_all_to_all"  # its operand holds the rows of all slices
_IS_AS = {"pswapaxes": "all_to_all"}


@dataclass(frozen=True)
class Setting:
    """Where calls run.

    Attributes:
        shape: the shape of the mesh, whose axes are x, y and z.
        devices: the numbers of its devices, row-major, in any order.
        check_vma: the argument of `shard_map`.
        x64: whether numbers of 64 bits are enabled.
    """

    shape: tuple[int, ...]
    devices: tuple[int, ...]
    check_vma: bool
    x64: bool

    def mesh(self) -> Mesh:
        """The mesh of these devices."""
        devices = np.array(jax.devices())[list(self.devices)].reshape(self.shape)
        return Mesh(devices, tuple("xyz"[: len(self.shape)]))


@dataclass(frozen=True)
class RandomCall:
    """One call of a drop-in on every rank.

    Attributes:
        number: the number of the call among those of the seed.
        name: the name of the function.
        axes: its axes in order; a string if a single axis is given as a name.
        groups: its `axis_index_groups`.
        dtype, shapes: the dtype and the shapes of the leaves of a rank's operand.
        what: the arguments that determine the result.
        options: the other arguments: `algorithm`, `accumulate_dtype`, `max_send`.
        batch: the dimension of a `vmap` around the call; None without a `vmap`.
        pulls_back: whether it is also differentiated.
    """

    seed: int
    number: int
    setting: Setting
    name: str
    axes: str | tuple[str, ...]
    groups: Groups | None
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    what: Mapping[str, Any]
    options: Mapping[str, Any]
    batch: int | None
    pulls_back: bool

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments after the axes."""
        groups = {} if self.groups is None else {"axis_index_groups": self.groups}
        return {**self.what, **groups, **self.options}

    def teams(self) -> np.ndarray:
        """The ranks that communicate with each other, in order: a row for each team."""
        names = "xyz"[: len(self.setting.shape)]
        order = [name for name in names if name not in self.axes] + list(self.axes)
        ranks = np.arange(prod(self.setting.shape)).reshape(self.setting.shape)
        n = prod(self.setting.shape[names.index(axis)] for axis in self.axes)
        teams = ranks.transpose([names.index(name) for name in order]).reshape(-1, n)
        return teams if self.groups is None else np.concatenate(teams[:, np.array(self.groups)])

    def __str__(self) -> str:
        operand = ", ".join(f"{self.dtype}{list(shape)}" for shape in self.shapes)
        words = [operand, repr(self.axes)]
        words += [f"{name}={value!r}" for name, value in self.arguments.items()]
        ranks = "x".join(map(str, self.setting.shape))
        around = [f"check_vma={self.setting.check_vma}"] + ["x64"] * self.setting.x64
        around += [] if self.batch is None else [f"vmap of dimension {self.batch}"]
        around += ["vjp"] * self.pulls_back
        return f"{self.name}({', '.join(words)}) on {ranks} ranks, {', '.join(around)}"


def draw(seed: int, number: int, devices: int, alone: bool = True) -> RandomCall:
    """Call `number` of a seed.

    Args:
        seed: 0 or more.
        number: the number of the call, from 0.
        devices: the number of devices.
        alone: whether a mesh may leave out devices; over several processes it may not.
    """
    setting = _setting(np.random.default_rng([seed, 1, number // TOGETHER]), devices, alone)
    rng = np.random.default_rng([seed, 2, number])
    name = pick(rng, list(REFERENCES))
    sizes = dict(zip("xyz", setting.shape, strict=False))
    axes = tuple(map(str, rng.permutation(list(sizes))[: rng.integers(1, len(sizes) + 1)]))
    shape = tuple(sizes[axis] for axis in axes)
    typed = setting.check_vma and name in _UNGROUPED_IF_TYPED
    groups = None if typed or name in _UNGROUPED else _maybe(rng, 0.3, _groups(rng, prod(shape)))
    shape = shape if groups is None else (len(groups[0]),)
    n = prod(shape)
    dtype = np.dtype(pick(rng, _dtypes(name, n, setting.x64)))
    least = 1 if name in (*_CUTS, _RAGGED) else 0
    ndim = int(rng.integers(least, 4))
    what = _what(rng, name, ndim, n)
    options = _options(rng, name, shape, dtype, setting.x64)
    if name == _RAGGED and rng.integers(2):
        options["max_send"] = max(ragged.rows(what["sizes"])[2], 1)
    if groups is None and name == "all_gather":
        what |= {"to": pick(rng, ["varying", "invarying"])}
    return RandomCall(
        seed,
        number,
        setting,
        name,
        axes[0] if len(axes) == 1 and rng.integers(2) else axes,
        groups,
        dtype.name,
        tuple(_shape(rng, name, of, n, what) for of in _ndims(rng, ndim)),
        what,
        options,
        _maybe(rng, 0.1, int(rng.integers(ndim + 1))),
        rng.random() < 0.25 and _has_exact_gradient(name, dtype, n),
    )


def _setting(rng: Generator, devices: int, alone: bool) -> Setting:
    shape = pick(rng, pick(rng, _meshes(devices, alone)))
    order = map(int, rng.permutation(devices)[: prod(shape)])
    return Setting(shape, tuple(order), bool(rng.integers(2)), rng.random() < 1 / 8)


@lru_cache
def _meshes(devices: int, alone: bool) -> list[list[tuple[int, ...]]]:
    """Shapes of one, two and three axes; at most one axis has a single rank."""
    sizes = range(1, devices + 1)
    fits = devices.__ge__ if alone else devices.__eq__
    shapes = [shape for axes in (1, 2, 3) for shape in product(sizes, repeat=axes)]
    fit = [shape for shape in shapes if fits(prod(shape)) and shape.count(1) < 2]
    return [list(some) for _, some in groupby(fit, len)]


def _groups(rng: Generator, n: int) -> Groups:
    """A random order of all ranks, cut into groups of equal size."""
    size = pick(rng, [d for d in range(1, n + 1) if n % d == 0])
    return rng.permutation(n).reshape(-1, size).tolist()


def _dtypes(name: str, n: int, x64: bool) -> list[str]:
    """The dtypes that lax takes (on CPU), and that can hold an exact result."""
    known = [*DATATYPES, *(WIDE_DATATYPES if x64 else ())]
    digits = {"pmean": n * n}.get(name, n if name in _SUMS else 1)
    fit = [dtype for dtype in known if largest(dtype) >= digits]
    # In lax, psum_scatter does not take booleans, and pmean adds them as integers.
    fit += [] if name in ("psum_scatter", "pmean") else ["bool"]
    # Complex numbers have no order.
    return fit + ([] if name in ("pmax", "pmin") else ["complex64"])


def _what(rng: Generator, name: str, ndim: int, n: int) -> dict[str, Any]:
    """The arguments that determine the result."""
    tiled = bool(rng.integers(2)) and ndim > 0
    count = ndim + (name == "all_gather" and not tiled)
    dim, other = (int(rng.integers(-count, count)) if count else 0 for _ in range(2))
    sources, targets = rng.permutation(n).tolist(), rng.permutation(n).tolist()
    some = int(rng.integers(n + 1))
    return {
        "all_gather": {"axis": dim, "tiled": tiled},
        "psum_scatter": {"scatter_dimension": dim, "tiled": tiled},
        "all_to_all": {"split_axis": dim, "concat_axis": other, "tiled": tiled},
        "pswapaxes": {"axis": dim},
        "pbroadcast": {"source": sources[0]},
        "ppermute": {"perm": list(zip(sources, targets, strict=True))[:some]},
        "pshuffle": {"perm": sources},
        _RAGGED: {"sizes": rng.integers(0, 4, (n, int(rng.integers(1, 3)) * n)).tolist()},
    }.get(name, {})


def _ndims(rng: Generator, ndim: int) -> list[int]:
    """The numbers of dimensions of one leaf or a few; some leaves have one more than others."""
    further = pick(rng, [0, 0, 0, 0, 1, 2])
    return [ndim, *(ndim + int(rng.integers(2)) for _ in range(further))]


def _shape(
    rng: Generator, name: str, ndim: int, n: int, what: Mapping[str, Any]
) -> tuple[int, ...]:
    """The shape of one leaf."""
    sizes = [0 if rng.random() < EMPTY else pick(rng, SIZES) for _ in range(ndim)]
    if name in _CUTS:
        cut = what[_CUTS[name]]
        sizes[cut] = n * sizes[cut] if what.get("tiled") else n
    if name == _RAGGED:
        sizes[0] = ragged.rows(what["sizes"])[0]
    return tuple(sizes)


def _options(
    rng: Generator, name: str, shape: tuple[int, ...], dtype: np.dtype, x64: bool
) -> dict[str, Any]:
    """An algorithm that can run on these ranks, and perhaps a wider dtype for sums."""
    collective = _IS_AS.get(name, name)
    options: dict[str, Any] = {}
    if collective in COLLECTIVES:
        known = [
            algorithm
            for algorithm in choices(collective)
            if algorithm == LAX or exists(collective, algorithm, *shape)
        ]
        options["algorithm"] = pick(rng, ["auto", *known])
    if name in _WIDENED and jnp.issubdtype(dtype, jnp.floating) and rng.random() < 0.3:
        single = dtype.itemsize < 4 or (dtype == np.float32 and not x64)
        options["accumulate_dtype"] = "float32" if single else "float64"
    return options


def _has_exact_gradient(name: str, dtype: np.dtype, n: int) -> bool:
    """Whether a gradient is exact; some platforms compute a mean by 1/n, so n * (1/n) must be 1."""
    if name not in TRANSPOSES or not jnp.issubdtype(dtype, jnp.inexact) or largest(dtype) < n:
        return False
    return bool(name != "pmean" or dtype.type(n) * (1 / dtype.type(n)) == 1)


def pick(rng: Generator, of: Sequence[T]) -> T:
    return of[int(rng.integers(len(of)))]


def _maybe(rng: Generator, share: float, value: T) -> T | None:
    return value if rng.random() < share else None
