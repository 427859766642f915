"""The rates of chips: the constants of the model, which you may change."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ringcoll.costs.machines import DEVICES, KINDS


@dataclass(frozen=True, slots=True)
class Chip:
    """One device as JAX counts devices: rates per second, clock in hertz, times in seconds.

    For another chip, or other constants: `dataclasses.replace(CHIPS["v5e"], hbm=700e9)`.
    """

    name: str
    clock: float  # of the cycles that the compiler counts
    link: float  # bytes, one way, of one link to a neighbour
    flops: float  # bf16
    hbm: float  # bytes
    hop: float = 1e-6  # seconds for each link that a message passes, once it has started

    @property
    def vmem(self) -> float:
        """Bytes per second of the memory beside the core: a 4 KiB register in each cycle."""
        return 4096 * self.clock


def _chip(name: str, clock: float) -> Chip:
    model = DEVICES[name]
    rates = (1 / model.beta, 1 / model.delta, 1 / model.memory)
    return Chip(name, clock, *rates, model.latency)


#: The rates of `ringcoll.cost.DEVICES`. With these clocks, the compiler's cycles for a matmul that
#: keeps the matrix unit busy give the published FLOP/s. A v5p is one device with two cores; a
#: tpu7x chip is two devices.
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "v5e": _chip("v5e", 1.5e9),
        "v5p": _chip("v5p", 1.75e9),
        "v6e": _chip("v6e", 1.75e9),
        "tpu7x": _chip("tpu7x", 2.2e9),
    }
)


def chip(name: str) -> Chip:
    """The constants of a chip.

    Args:
        name: a key of `CHIPS`, or a `device.device_kind`.

    Raises:
        ValueError: the chip is unknown.
    """
    known = KINDS.get(name, name)
    if known in CHIPS:
        return CHIPS[known]
    raise ValueError(
        f"overlap knows no chip named {name!r}, only {', '.join(CHIPS)}; pass chip= the name of "
        "one of these, or an overlap.Chip with its constants"
    )
