"""The constants of the model: the rates of chips. A user can change them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from types import MappingProxyType

from ringcoll.costs.machines import DEVICES, MACHINES, Device, find
from ringcoll.costs.places import place_of
from ringcoll.costs.prediction import predict


@dataclass(frozen=True, slots=True)
class Chip:
    """One device, as JAX counts devices: rates per second, clock in hertz, times in seconds.

    For a different chip, or different constants: `dataclasses.replace(CHIPS["v5e"], hbm=700e9)`.
    """

    name: str
    clock: float  # cycles per second, for the cycles that the compiler counts
    link: float  # bytes, one way, of one link to a neighbour
    flops: float  # bf16
    hbm: float  # bytes
    hop: float = 1e-6  # seconds of latency for each link that a message passes
    matmul_share: float = 1.0  # of flops, that a large matmul reaches; for texts without cycles
    host: float = 16e9  # bytes, to or from the memory of the host
    start: float = 0.0  # seconds of a built-in collective for each link to its farthest rank
    built_in: float = 1.0  # of what its links allow, that a built-in collective reaches
    built_in_sum: float = 1.0  # the same of an all-reduce

    def __post_init__(self) -> None:
        shares = {"built_in": self.built_in, "built_in_sum": self.built_in_sum}
        for name, value in {"start": self.start, **shares}.items():
            if not isinstance(value, Real) or not 0 <= value <= 1 or (name in shares and not value):
                expected = "a share above 0, up to 1" if name in shares else "seconds, from 0 to 1"
                raise ValueError(f"Chip: {name}={value!r} is not {expected}")

    @property
    def vmem(self) -> float:
        """Bytes per second of the memory next to the core: a 4 KiB register in each cycle."""
        return 4096 * self.clock

    @property
    def best(self) -> "Chip":
        """The same chip, whose built-in collectives take the least that its links allow."""
        return replace(self, start=0.0, built_in=1.0, built_in_sum=1.0)


#: The share of its FLOP/s that a large matmul in bf16 reached on a chip, as others measured it:
#: 32768^3 in 438 ms by the clock of the host, 8192^3 in 1.329 ms, 32768^3 in 73.6 ms. (Sources:
#: AI-Hypercomputer/accelerator-microbenchmarks, jax-ml/scaling-book. Of v5p none: their mean.)
MATMUL_SHARES: Mapping[str, float] = MappingProxyType({"v5e": 0.82, "v6e": 0.90, "tpu7x": 0.83})


def _chip(name: str, clock: float) -> Chip:
    model = DEVICES[name]
    rates = (1 / model.beta, 1 / model.delta, 1 / model.memory)
    # "How to Scale Your Model" (jax-ml/scaling-book, tpus.md) has 16 GB/s for v4, about 15 for most
    # and 32 for v6e. That of tpu7x is not published.
    host = 32e9 if name == "v6e" else 16e9
    start, matmuls = model.alpha + model.hop, MATMUL_SHARES.get(name, 0.85)
    shares = model.built_in, model.built_in_sum
    return Chip(name, clock, *rates, model.latency, matmuls, host, start, *shares)


class NotMeasured(Exception):
    """Something in a program for GPUs that no measurement prices."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU on a switch. Measurements of its machine price its matmuls and its messages.

    For a different rate of the memory: `dataclasses.replace(CHIPS["h100"], hbm=3e12)`.

    Attributes:
        name: the name of the machine, as `ringcoll.costs.predict` takes it.
        hbm: bytes per second of the GPU's memory.
    """

    name: str
    hbm: float

    @property
    def vmem(self) -> float:
        """Bytes per second of the memory next to the core: that of the main memory.

        A GPU's program names no memory but that.
        """
        return self.hbm

    @property
    def device(self) -> Device:
        """The machine with its measurements."""
        return MACHINES[self.name]

    def matmul(self, flops: float, width: float) -> float:
        """The seconds of a matmul of this many FLOPs on elements of `width` bytes.

        Raises:
            NotMeasured: on this GPU no matmul of such elements was measured.
        """
        if (rate := self.device.matmuls.get(width)) is None:
            raise NotMeasured(f"a matmul of {8 * width:g} bits on {self.name}")
        return rate.start + flops * rate.delta

    def collective(self, name: str, nbytes: float, ranks: Collection[int]) -> float:
        """The seconds of a built-in collective between these ranks; 0 if there are fewer than two.

        Raises:
            NotMeasured: it was not measured.
        """
        n, local = len(ranks), self.device.ranks_a_host
        if n < 2:
            return 0.0
        hosts = len({rank // local for rank in ranks})
        seconds = None
        if n % hosts == 0:
            seconds = predict(name, nbytes, place_of(n, self.device, hosts=hosts))
        if seconds is None:
            raise NotMeasured(f"{name} of {nbytes:g} bytes on {n} ranks of {self.name}")
        return seconds

    @property
    def error(self) -> str:
        """How far modelled matmuls of the machine are off their measurements, in words."""
        return " and ".join(
            f"{rate.error:.0%} for {rate.points} of {8 * width} bits"
            for width, rate in sorted(self.device.matmuls.items())
        )


#: TPUs with the rates of `ringcoll.costs.DEVICES`. With these clocks, the compiler's cycles for a
#: matmul that keeps the matrix unit busy give the published FLOP/s. A v5p is one device with two
#: cores; a tpu7x chip is two devices. Then the GPUs whose matmuls and permutes were measured.
CHIPS: Mapping[str, Chip | Gpu] = MappingProxyType(
    {
        "v5e": _chip("v5e", 1.5e9),
        "v5p": _chip("v5p", 1.75e9),
        "v6e": _chip("v6e", 1.75e9),
        "tpu7x": _chip("tpu7x", 2.2e9),
        **{
            name: Gpu(name, 1 / device.model.memory)
            for name, device in MACHINES.items()
            if device.matmuls and device.model.wire
        },
    }
)


def chip(name: str) -> Chip | Gpu | None:
    """The chip of a name or of a `device.device_kind`; None if it is not in `CHIPS`."""
    try:
        return CHIPS.get(find(name).name)
    except ValueError:
        return None
