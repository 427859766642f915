"""Measure one collective at one size, by several algorithms and by lax, in turn.

Every rank's result is compared with NumPy's and lax's. (With several processes, each compares the
results of its own ranks, only with NumPy's.) Then all programs run once in each round, in a
changing order. So a drift of the machine affects all of them, and a ratio to lax compares times of
the same round.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives.cases import AXIS, Case, name_and_options, on_shape
from benchmarks.measuring import processes
from benchmarks.measuring.data import count_outside, count_wrong, exact
from benchmarks.measuring.row import Measurement, Quartiles
from ringcoll.algorithms import COLLECTIVES
from ringcoll.choose.table import default_table
from ringcoll.costs import error_bound
from ringcoll.costs.wire import Wire
from ringcoll.runtime.hosts import on_hosts
from ringcoll.schedules.registry import LAX

T = TypeVar("T")

#: The fewest rounds of timing, and the seconds for which rounds go on, even if no time is left.
FEWEST, LEAST_SECONDS = 3, 0.2


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
        """The operands, each on its rank's device."""
        flat, sharding = self.host.reshape(-1), NamedSharding(self.mesh, P(AXIS))
        placed = jax.make_array_from_callback(flat.shape, sharding, lambda index: flat[index])
        return jax.block_until_ready(placed)

    @cached_property
    def truths(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The results of NumPy and of lax for the ranks of this process."""
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
        """A function that runs the collective until it is done; compiled once."""
        if algorithm not in self._programs:
            jitted = self.jitted(algorithm)
            self._programs[algorithm] = lambda: jax.block_until_ready(jitted(self.operand))
        return self._programs[algorithm]

    def wrong(self, algorithm: str, result: Array) -> int:
        """The number of wrong elements on all ranks.

        lax's own result is compared only with NumPy's. So are all results over several processes,
        because lax itself may be wrong there: on jax 0.10.2 its psum_scatter sometimes is
        (github.com/jax-ml/jax/issues/40830). With a wire, an element is wrong if its error is above
        the bound, or if it should be the same on all ranks but is not.
        """
        if allowed := self.allowed(algorithm):
            results = _of_own_ranks(result)
            pairs = zip(results, self.truths[0], strict=True)
            outside = sum(count_outside(mine, true, allowed) for mine, true in pairs)
            if self.case.redop and self.case.sends(self.ranks) == self.case.gets(self.ranks):
                outside += sum(count_wrong(mine, results[0]) for mine in results)
            return processes.total(outside)
        alone = algorithm == LAX or jax.process_count() > 1
        truths = self.truths[:1] if alone else self.truths
        ranks = zip(_of_own_ranks(result), *truths, strict=True)
        return processes.total(sum(count_wrong(mine, *true) for mine, *true in ranks))

    def allowed(self, algorithm: str) -> float:
        """How far off a result with a wire may be; 0 without a wire."""
        name, options = name_and_options(algorithm)
        if "wire" not in options:
            return 0.0
        name, shape = on_shape(name)
        exchanges = self.case.name.endswith("all_to_all")
        if name in ("auto", LAX):  # contributions are encoded once
            name = "pairwise" if exchanges else "direct"
        collective = "all_to_all" if exchanges else self.case.name
        eps = float(jnp.finfo(self.dtype).eps)
        bound = error_bound(
            collective, name, shape or (self.ranks,), eps, wire=Wire(options["wire"])
        )
        largest = np.abs(self.host.astype(np.float64)).max(axis=1)
        return bound * float(largest.sum() if self.case.redop else largest.max())

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
        # pmax and pmin use the rows of psum, because all of these all-reduces cost the same.
        name = "psum" if self.case.name in ("pmax", "pmin") else self.case.name
        call = name, self.platform, self.ranks, self.operand_bytes, self.dtype.name
        lie = on_hosts(self.mesh, (AXIS,))
        return default_table().pick(*call, jax.__version__, **lie._asdict())


def platform_of(mesh: Mesh) -> str:
    """One of `ringcoll.choose.table.PLATFORMS`."""
    name = mesh.devices.flat[0].platform
    return name if name in ("cpu", "tpu") else "gpu"


def _of_own_ranks(x: Array) -> list[np.ndarray]:
    """The parts of the ranks of this process, each read from its own device."""
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return [np.asarray(shard.data) for shard in shards]


def check(point: Point, algorithm: str) -> Measurement:
    """Compare an algorithm's result with the truths, without timing."""
    return point.row(algorithm, wrong=point.wrong(algorithm, point.program(algorithm)()))


def measure(
    point: Point, algorithms: Sequence[str], seconds: float, rounds: int, *, checks: bool
) -> list[Measurement]:
    """Check and time the algorithms side by side with lax, whose row comes first.

    Args:
        point: what is measured.
        algorithms: algorithms of ringcoll; "auto" is one.
        seconds: the time for everything; `FEWEST` rounds, or `LEAST_SECONDS`, may take longer.
        rounds: the most rounds of timing.
        checks: whether results are compared.
    """
    end = time.perf_counter() + seconds
    programs = {name: point.program(name) for name in (LAX, *algorithms)}
    wrong: dict[str, int | None] = dict.fromkeys(programs)
    for name, program in programs.items():
        result = program()  # the first call compiles
        if checks:
            wrong[name] = point.wrong(name, result)
    times = interleave(programs, rounds, max(end, time.perf_counter() + LEAST_SECONDS))
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
    """A compiled program with its operands.

    Attributes:
        program: runs it until it is done.
        temporaries: bytes that one rank holds besides operands and results; None if the compiler
            does not say.
    """

    program: Callable[[], Any]
    operands: tuple[Any, ...]
    temporaries: int | None

    @staticmethod
    def of(function: Callable, operands: tuple[Any, ...]) -> "Ready":
        compiled = jax.jit(function).lower(*operands).compile()
        memory = compiled.memory_analysis()
        return Ready(
            lambda: jax.block_until_ready(compiled(*operands)),
            operands,
            None if memory is None else memory.temp_size_in_bytes,
        )


def interleave(
    programs: Mapping[str, Callable[[], Any]], rounds: int, end: float
) -> dict[str, np.ndarray]:
    """The seconds of every program in every round, until `rounds` or the time `end`.

    Over several processes these are the seconds of the first, so that all processes choose the
    same. Each program runs once in a round. The order of programs alternates between forward and
    backward; after two rounds, it starts at the next program.
    """
    order = list(programs)
    times: dict[str, list[float]] = {name: [] for name in order}
    for number in range(max(rounds, 1)):
        if number >= FEWEST and processes.first_value(time.perf_counter() > end):
            break
        for name in order if number % 2 == 0 else reversed(order):
            processes.meet()
            start = time.perf_counter()
            programs[name]()
            times[name].append(time.perf_counter() - start)
        if number % 2:
            order = [*order[1:], order[0]]
    return {name: processes.first_values(np.array(seconds)) for name, seconds in times.items()}


def sharing(items: Sequence[T], seconds: float, weigh: Callable[[T], float]) -> Iterator[tuple]:
    """Each item with its share of the remaining seconds, by weight.

    The share is 0 if the item would not end in the remaining seconds, even at the fastest pace so
    far.
    """
    end = time.perf_counter() + seconds
    weights = [weigh(item) for item in items]
    paces: list[float] = []  # the seconds that items took, over their weights
    for i, item in enumerate(items):
        start = time.perf_counter()
        fits = end - start > weights[i] * min(paces, default=0)
        share = (end - start) * weights[i] / sum(weights[i:]) if fits else 0
        share = processes.first_value(share)
        yield item, share
        if share:
            paces.append((time.perf_counter() - start) / weights[i])
