"""Measuring: one collective at one size, by several algorithms and by lax, in turn.

Every rank's result is compared with NumPy's and with lax's. Then all programs are run
round by round, each once a round, in alternating order: what drifts on the machine
drifts for all of them, and a ratio to lax is taken within a round.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.cases import AXIS, LAX, Case
from benchmarks.data import count_wrong, exact
from ringcoll.algorithms import COLLECTIVES
from ringcoll.table import default_table

#: Rounds of timing at least, however little time there is.
FEWEST = 3


class Quartiles(NamedTuple):
    """The median, and between which values the middle half lies."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(values: np.ndarray) -> "Quartiles":
        return Quartiles(*np.percentile(values, [25, 50, 75]).tolist())

    @property
    def spread(self) -> float:
        """Half of what the middle half spans, over the median."""
        return (self.high - self.low) / 2 / self.median


@dataclass(frozen=True)
class Row:
    """What was measured of one algorithm at one size; no times where it was only checked.

    Attributes:
        resolved: what "auto" stood for; else the algorithm.
        size, count: as nccl-tests count them; see `benchmarks.cases`.
        operand_bytes: of one rank's operand.
        wrong: elements on all ranks; None if it was not checked.
        seconds: of one call.
        algbw, busbw: bytes per second, at the median.
        vs_lax: seconds over lax's, within a round.
        predicted: seconds, by the model fitted to this run.
    """

    collective: str
    redop: str
    type: str
    ranks: int
    algorithm: str
    resolved: str
    size: int
    count: int
    operand_bytes: int
    wrong: int | None = None
    rounds: int = 0
    seconds: Quartiles | None = None
    algbw: float | None = None
    busbw: float | None = None
    vs_lax: Quartiles | None = None
    predicted: float | None = None


class Point:
    """One collective of one dtype and count on one mesh: its data, truths and programs."""

    def __init__(self, case: Case, dtype: Any, count: int, mesh: Mesh) -> None:
        self.case, self.dtype, self.count, self.mesh = case, np.dtype(dtype), count, mesh
        self.ranks = mesh.size
        self.platform = mesh.devices.flat[0].platform
        self.size = case.size(count, self.dtype.itemsize, self.ranks)
        self.operand_bytes = count * case.sends(self.ranks) * self.dtype.itemsize
        self._programs: dict[str, Callable[[], Array]] = {}

    @cached_property
    def host(self) -> np.ndarray:
        """The operands: a row for a rank."""
        shape = (self.ranks, self.case.sends(self.ranks) * self.count)
        return exact(shape, self.dtype, self.ranks)

    @cached_property
    def operand(self) -> Array:
        """The same, each rank's on its device."""
        sharding = NamedSharding(self.mesh, P(AXIS))
        return jax.block_until_ready(jax.device_put(self.host.reshape(-1), sharding))

    @cached_property
    def truths(self) -> tuple[np.ndarray, ...]:
        """What NumPy and what lax say that every rank gets."""
        return self.case.reference(self.host), _of_every_rank(self.program(LAX)())

    def program(self, algorithm: str) -> Callable[[], Array]:
        """The collective on the operand in place: compiled when first called, and once."""
        if algorithm in self._programs:
            return self._programs[algorithm]

        def one_rank(x: Array) -> Any:
            return self.case.run(algorithm, x, self.platform)

        spec = P(AXIS)
        mapped = jax.shard_map(
            one_rank, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        compiled = jax.jit(mapped)
        program = self._programs[algorithm] = lambda: jax.block_until_ready(compiled(self.operand))
        return program

    def wrong(self, algorithm: str, result: Array) -> int:
        """Wrong elements on all ranks; lax's own is compared with NumPy alone."""
        by_numpy, by_lax = self.truths
        own = _of_every_rank(result)
        return count_wrong(own, by_numpy) if algorithm == LAX else count_wrong(own, by_numpy, by_lax)

    def row(self, algorithm: str, **measured: Any) -> Row:
        """A row of the table."""
        return Row(
            self.case.name,
            self.case.redop,
            self.dtype.name,
            self.ranks,
            algorithm,
            self._resolved(algorithm),
            self.size,
            self.count,
            self.operand_bytes,
            **measured,
        )

    def _resolved(self, algorithm: str) -> str:
        if algorithm != "auto" or self.case.name not in COLLECTIVES:
            return algorithm
        platform = self.platform if self.platform in ("cpu", "tpu") else "gpu"
        nbytes, dtype = self.operand_bytes, self.dtype.name
        # pmax and pmin run by the rows of psum: one all-reduce costs what another does.
        name = "psum" if self.case.name in ("pmax", "pmin") else self.case.name
        return default_table().pick(name, platform, self.ranks, nbytes, dtype)


def _of_every_rank(x: Array) -> np.ndarray:
    """A row for a rank, read from its own device."""
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.stack([np.asarray(shard.data) for shard in shards])


def check(point: Point, algorithms: Sequence[str]) -> list[Row]:
    """Compare every algorithm's result with the truths; time nothing."""
    rows = []
    for name in algorithms:
        rows.append(point.row(name, wrong=point.wrong(name, point.program(name)())))
    return rows


def measure(
    point: Point, algorithms: Sequence[str], seconds: float, rounds: int, warmup: int, checks: bool
) -> list[Row]:
    """Check and time the algorithms side by side with lax, whose row comes first.

    Args:
        point: what is measured.
        algorithms: of ringcoll; "auto" is one.
        seconds: how long it may take altogether, if `FEWEST` rounds take no longer.
        rounds: of timing, at most.
        warmup: rounds before those; at least 1, which compiles.
        checks: whether results are compared.
    """
    end = time.perf_counter() + seconds
    programs = {name: point.program(name) for name in (LAX, *algorithms)}
    wrong: dict[str, int | None] = dict.fromkeys(programs)
    for name, program in programs.items():
        result = program()
        if checks:
            wrong[name] = point.wrong(name, result)
        for _ in range(warmup - 1):
            program()
    times = interleave(programs, rounds, end)
    return [
        point.row(name, wrong=wrong[name], rounds=len(times[name]), **_rates(point, name, times))
        for name in programs
    ]


def _rates(point: Point, name: str, times: Mapping[str, np.ndarray]) -> dict[str, Any]:
    seconds = Quartiles.of(times[name])
    algbw = point.size / seconds.median
    return {
        "seconds": seconds,
        "algbw": algbw,
        "busbw": algbw * point.case.busbw(point.ranks),
        "vs_lax": Quartiles.of(times[name] / times[LAX]),
    }


def interleave(
    programs: Mapping[str, Callable[[], Any]], rounds: int, end: float
) -> dict[str, np.ndarray]:
    """The seconds of every program in every round, until `rounds` or the time `end`.

    Each runs once a round, forward in one round and backward in the next.
    """
    order = list(programs)
    times: dict[str, list[float]] = {name: [] for name in order}
    for number in range(max(rounds, 1)):
        if number >= FEWEST and time.perf_counter() > end:
            break
        for name in order[:: 1 if number % 2 == 0 else -1]:
            start = time.perf_counter()
            programs[name]()
            times[name].append(time.perf_counter() - start)
    return {name: np.array(seconds) for name, seconds in times.items()}
