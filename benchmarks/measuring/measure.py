"""Measuring: one collective at one size, by several algorithms and by lax, in turn.

Every rank's result is compared with NumPy's and with lax's (of several processes, each compares
those of its own ranks, and with NumPy's alone). Then all programs are run
round by round, each once a round, in an order that changes: what drifts on the machine
drifts for all of them, and a ratio to lax is taken within a round.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives.cases import AXIS, Case
from benchmarks.measuring import processes
from benchmarks.measuring.data import count_wrong, exact
from benchmarks.measuring.row import Measurement, Quartiles
from ringcoll.algorithms import COLLECTIVES
from ringcoll.collectives.table import LAX, default_table
from ringcoll.runtime.hosts import on_hosts

T = TypeVar("T")

#: Rounds of timing at least, however little time there is.
FEWEST = 3


class Point:
    """One collective of one dtype and size on one mesh: its data, truths and programs."""

    def __init__(self, case: Case, dtype: Any, size: int, mesh: Mesh) -> None:
        self.case, self.dtype, self.asked, self.mesh = case, np.dtype(dtype), size, mesh
        self.ranks = mesh.size
        self.platform = platform_of(mesh)
        self.count = case.count(size, self.dtype.itemsize, self.ranks)
        self.size = case.size(self.count, self.dtype.itemsize, self.ranks)
        self.operand_bytes = self.count * case.sends(self.ranks) * self.dtype.itemsize
        self._programs: dict[str, Callable[[], Array]] = {}

    @cached_property
    def host(self) -> np.ndarray:
        """The operands: a row for a rank."""
        shape = (self.ranks, self.case.sends(self.ranks) * self.count)
        return exact(shape, self.dtype, self.ranks)

    @cached_property
    def operand(self) -> Array:
        """The same, each rank's on its device."""
        flat, sharding = self.host.reshape(-1), NamedSharding(self.mesh, P(AXIS))
        placed = jax.make_array_from_callback(flat.shape, sharding, lambda index: flat[index])
        return jax.block_until_ready(placed)

    @cached_property
    def truths(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """What NumPy and what lax say that every rank of this process gets."""
        of_all = self.case.reference(self.host)
        here = jax.process_index()
        ranks = [r for r, d in enumerate(self.mesh.devices.flat) if d.process_index == here]
        return [of_all[rank] for rank in ranks], _of_own_ranks(self.program(LAX)())

    def jitted(self, algorithm: str) -> Any:
        """The collective as a jitted function of the operand."""

        def one_rank(x: Array) -> Any:
            return self.case.run(algorithm, x, self.platform)

        spec = P(AXIS)
        return jax.jit(
            jax.shard_map(one_rank, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        )

    def program(self, algorithm: str) -> Callable[[], Array]:
        """The collective on the operand in place, until it is done; compiled once."""
        if algorithm not in self._programs:
            jitted = self.jitted(algorithm)
            self._programs[algorithm] = lambda: jax.block_until_ready(jitted(self.operand))
        return self._programs[algorithm]

    def wrong(self, algorithm: str, result: Array) -> int:
        """Wrong elements on all ranks; lax's own is compared with NumPy alone.

        (So is all of several processes, over which lax's own may be wrong: on jax 0.10.2 its
        psum_scatter sometimes is, github.com/jax-ml/jax/issues/40830.)
        """
        alone = algorithm == LAX or jax.process_count() > 1
        truths = self.truths[:1] if alone else self.truths
        ranks = zip(_of_own_ranks(result), *truths, strict=True)
        return processes.total(sum(count_wrong(mine, *true) for mine, *true in ranks))

    def row(self, algorithm: str, **measured: Any) -> Measurement:
        """A row of the table."""
        return Measurement(
            self.case.name,
            self.case.redop,
            self.dtype.name,
            self.ranks,
            algorithm,
            self._resolved(algorithm),
            self.asked,
            self.size,
            self.count,
            self.operand_bytes,
            self.case.busbw(self.ranks),
            **measured,
        )

    def _resolved(self, algorithm: str) -> str:
        if algorithm != "auto" or self.case.name not in COLLECTIVES:
            return algorithm
        # pmax and pmin run by the rows of psum: one all-reduce costs what another does.
        name = "psum" if self.case.name in ("pmax", "pmin") else self.case.name
        call = name, self.platform, self.ranks, self.operand_bytes, self.dtype.name
        lie = on_hosts(self.mesh, (AXIS,))
        return default_table().pick(*call, jax.__version__, **lie._asdict())


def platform_of(mesh: Mesh) -> str:
    """One of `ringcoll.collectives.table.PLATFORMS`."""
    name = mesh.devices.flat[0].platform
    return name if name in ("cpu", "tpu") else "gpu"


def _of_own_ranks(x: Array) -> list[np.ndarray]:
    """The part of each rank of this process, read from its own device."""
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return [np.asarray(shard.data) for shard in shards]


def check(point: Point, algorithms: Sequence[str]) -> list[Measurement]:
    """Compare every algorithm's result with the truths; time nothing."""
    rows = []
    for name in algorithms:
        rows.append(point.row(name, wrong=point.wrong(name, point.program(name)())))
    return rows


def measure(
    point: Point, algorithms: Sequence[str], seconds: float, rounds: int, warmup: int, checks: bool
) -> list[Measurement]:
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
        point.row(
            name,
            wrong=wrong[name],
            rounds=len(times[name]),
            seconds=Quartiles.of(times[name]),
            vs_lax=Quartiles.of(times[name] / times[LAX]),
        )
        for name in programs
    ]


@dataclass(frozen=True)
class Ready:
    """A program that is compiled, with its operands in place.

    Attributes:
        program: runs it until it is done.
        compiled: the same.
        temporaries: bytes that one rank holds beside operands and results; None where the
            compiler does not say.
    """

    program: Callable[[], Any]
    operands: tuple[Any, ...]
    compiled: jax.stages.Compiled
    temporaries: int | None

    @staticmethod
    def of(function: Callable, operands: tuple[Any, ...]) -> "Ready":
        compiled = jax.jit(function).lower(*operands).compile()
        memory = compiled.memory_analysis()
        return Ready(
            lambda: jax.block_until_ready(compiled(*operands)),
            operands,
            compiled,
            None if memory is None else memory.temp_size_in_bytes,
        )


def interleave(
    programs: Mapping[str, Callable[[], Any]], rounds: int, end: float
) -> dict[str, np.ndarray]:
    """The seconds of every program in every round, until `rounds` or the time `end`.

    (Of several processes, those of the first, so that all choose alike.)
    Each runs once a round: forward, then backward, then both again from the next one on.
    """
    order = list(programs)
    times: dict[str, list[float]] = {name: [] for name in order}
    for number in range(max(rounds, 1)):
        if number >= FEWEST and processes.first_says(time.perf_counter() > end):
            break
        for name in order if number % 2 == 0 else reversed(order):
            processes.meet()
            start = time.perf_counter()
            programs[name]()
            times[name].append(time.perf_counter() - start)
        if number % 2:
            order = [*order[1:], order[0]]
    return {name: processes.first_say(np.array(seconds)) for name, seconds in times.items()}


def sharing(items: Sequence[T], seconds: float, weigh: Callable[[T], float]) -> Iterator[tuple]:
    """Each item with its share of the seconds left, by weight; 0 if there are none left."""
    end = time.perf_counter() + seconds
    weights = [weigh(item) for item in items]
    for i, item in enumerate(items):
        left = processes.first_says(max(end - time.perf_counter(), 0))
        yield item, left * weights[i] / sum(weights[i:])
