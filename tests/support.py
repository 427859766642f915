"""Helpers that many tests share: meshes, data whose sums are exact, and every rank's result."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.measuring.data import exact
from ringcoll import algorithms
from ringcoll.schedules.registry import algorithms_of
from ringcoll.schedules.schedule import SizeError

#: Some libraries are wrong for odd numbers, or for numbers that are no power of two.
SIZES = (1, 2, 3, 4, 5, 8)

HERE = Path(__file__).parent.parent


@contextmanager
def flags_of_cpu() -> Iterator[None]:
    """Within it, JAX and processes that start do not use MLIR's emitters, which take longer.

    From JAX 0.11 on there is nothing else. libtpu does not know the flag, and ends the process.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.__version_info__ < (0, 11):
        flags += " --xla_cpu_use_fusion_emitters=false"
    with mock.patch.dict(os.environ, XLA_FLAGS=flags):
        yield


def python(*arguments: str, path: Path = HERE) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process, at the root of the repository."""
    found = os.pathsep.join(map(str, (HERE, path, os.environ.get("PYTHONPATH", HERE))))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": found},
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=900,
    )


def mostly_exhaustive(cases: Iterable[Any], usual: Callable[..., bool]) -> list[Any]:
    """All cases, for `parametrize`; without `-m exhaustive` only those that are `usual` run."""

    def one(case: Any) -> Any:
        values = case if isinstance(case, tuple) else (case,)
        marks = () if usual(*values) else pytest.mark.exhaustive
        return pytest.param(*values, marks=marks)

    return [one(case) for case in cases]


def crossed(*options: Sequence[Any]) -> list[Any]:
    """Every combination of options that are expected to fail independently, for `parametrize`.

    The usual combinations are few: each value of each option is in at least one. The others are
    marked exhaustive.
    """
    longest = max(map(len, options))
    usual = {tuple(turn % len(values) for values in options) for turn in range(longest)}
    indices = product(*(range(len(values)) for values in options))
    return [
        pytest.param(
            *(values[i] for values, i in zip(options, chosen, strict=True)),
            marks=() if chosen in usual else pytest.mark.exhaustive,
        )
        for chosen in indices
    ]


def make_mesh(*shape: int, names: str = "xyz", axis_type: AxisType = AxisType.Auto) -> Mesh:
    """A mesh of the first devices, its axes named x, y, z."""
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, tuple(names[: len(shape)]), axis_types=(axis_type,) * len(shape))


def data(shape: Sequence[int], dtype: Any = jnp.float32, ranks: int = 8) -> np.ndarray:
    """Small integers whose sum over `ranks` is exact in any order.

    They differ between ranks and between places, as far as the dtype allows. Sums of integers may
    wrap, which is exact too.
    """
    kind = jnp.dtype(dtype)
    if kind.kind == "b":
        return exact(shape, jnp.int8, 64).astype(bool)  # 0 or 1
    if jnp.issubdtype(kind, jnp.complexfloating):
        return data(shape, jnp.finfo(kind).dtype, 3 * ranks).astype(kind) * kind.type(1 + 2j)
    if jnp.issubdtype(kind, jnp.integer):
        largest = int(jnp.iinfo(kind).max)
    else:
        largest = 2 ** (int(jnp.finfo(kind).nmant) + 1)
    # No greater than 64, so that squares and their sums are exact as well.
    return exact(shape, kind, min(max(ranks, largest // 64), largest))


def per_rank(
    mesh: Mesh, function: Callable, *operands: Any, check_vma: bool = True, jit: bool = True
) -> Any:
    """Run a function on every rank, give operand[r] to rank r, and stack the ranks' results.

    The first dimension of the operands and of the result is the ranks of the mesh, row-major. So
    the result shows what *every* rank holds. It consists of NumPy arrays, so a test that looks at
    it compiles nothing.
    """
    mapped = every_rank(mesh, function, check_vma)
    return jax.device_get((jax.jit(mapped) if jit else mapped)(*operands))


def every_rank(mesh: Mesh, function: Callable, check_vma: bool) -> Callable:
    """The function under `shard_map` that `per_rank` runs."""
    spec = P(mesh.axis_names)

    def one_rank(*shards: Any) -> Any:
        result = function(*jax.tree.map(lambda x: x[0], shards))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], result)

    return jax.shard_map(one_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)


def trace(program: Callable[[], Any], mesh: Mesh, check_vma: bool = True) -> None:
    """Trace a function without operands or results as every rank runs it."""

    def nothing_out() -> tuple[()]:
        program()
        return ()

    mapped = jax.shard_map(nothing_out, mesh=mesh, in_specs=(), out_specs=(), check_vma=check_vma)
    jax.make_jaxpr(mapped)()


def assert_same(ours: Any, theirs: Any) -> None:
    """Assert that pytrees are equal: structure, shapes, dtypes and every bit of every value.

    So -0.0 differs from 0.0, and NaNs with different bits differ.
    """
    ours, theirs = jax.device_get((ours, theirs))  # or chex compiles the widening of bfloat16
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    chex.assert_trees_all_equal(ours, theirs, strict=True)
    pairs = zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
    for (path, mine), other in pairs:
        differ = (bits(mine) != bits(other)).any(-1).sum()
        assert not differ, f"{jax.tree_util.keystr(path)}: {differ} equal numbers differ in bits"


def assert_rounded_once(found: Any, exact: Any) -> None:
    """The error, as a norm, is at most 1.2 times that of rounding what is exact."""
    exact = np.asarray(exact, np.float32)
    error, one = (np.asarray(x, np.float32) - exact for x in (found, exact.astype(found.dtype)))
    assert np.linalg.norm(error) < 1.2 * np.linalg.norm(one)


def with_gradients(call: Callable) -> Callable:
    """The result and the gradients of all operands; the cotangent is the result itself."""

    def both(*operands: Any) -> Any:
        y, pull_back = jax.vjp(call, *operands)
        return y, pull_back(y)

    return both


def gamma(terms: float) -> float:
    """The relative error of a sum of so many terms in float64 (Higham, section 3.1)."""
    return terms * 2.0**-53 / (1 - terms * 2.0**-53)


def bits(x: Any) -> np.ndarray:
    """The bytes of each element of an array: `[..., bytes]`."""
    x = np.ascontiguousarray(x)
    return np.frombuffer(x.tobytes(), np.uint8).reshape(*x.shape, x.itemsize)


def doubling_times(programs: Any, rounds: int, end: float) -> dict[str, np.ndarray]:
    """A stand-in for `measure.interleave`: the first program takes 1 ms, the next 2, 4, 8."""
    return {name: np.full(3, 1e-3 * 2**i) for i, name in enumerate(programs)}


def check_doubling(rows: Sequence[Any], printed: str) -> None:
    """Assert that each row, of JSON and of the printed table, has its own time of `doubling`."""
    lines, number = printed.splitlines(), 0
    for row in rows:
        number = 0 if row["algorithm"] == "plain" else number + 1
        assert row["seconds"][1] == 1e-3 * 2**number
        assert row["over_plain"][1] == 2**number
        cells = [row["form"], row["direction"]]
        cells += [row["algorithm"], f"{1e3 * 2**number:.1f}", "0%"]
        cells += [f"{2**number:.2f}"] if number else []
        assert any(is_part(cells, line.split()) for line in lines), cells


def is_part(cells: Sequence[str], of: Sequence[str]) -> bool:
    """Whether a line has these cells in this order; there may be other cells between them."""
    rest = iter(of)
    return all(cell in rest for cell in cells)


def exists(collective: str, name: str, shape: Sequence[int]) -> bool:
    """Whether a collective has an algorithm on axes of these sizes.

    Only algorithms whose docstrings say `SizeError` may refuse. If another begins to refuse sizes,
    its tests fail; they are not skipped. `tests/schedules/test_algorithms.py` prints the sizes
    that each algorithm runs on.
    """
    algorithm = algorithms_of(collective)[name]
    if "SizeError:" in (algorithm.__doc__ or ""):
        try:
            algorithm(*shape)
        except SizeError:
            return False
    return True


def runnable(collective: str, *shape: int) -> list[str]:
    """The algorithms that can run a collective on axes of these sizes."""
    return [name for name in algorithms.names(collective) if exists(collective, name, shape)]


def distinct(collective: str, *shape: int) -> list[str]:
    """The algorithms of `runnable`, but only the first of several that have the same schedule.

    A torus of one axis has the schedule of a bidirectional ring; on two ranks, all have the
    schedule of a ring.
    """
    first: dict[Any, str] = {}
    for name in runnable(collective, *shape):
        is_gather = name in (*algorithms.GATHERS, *algorithms.ALL_TO_ALLS)
        schedule = algorithms.build(collective, name, shape)
        first.setdefault((schedule, None if is_gather else name), name)
    return list(first.values())
