"""A row of the results, and the quartiles of timings."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Quartiles(NamedTuple):
    """The median and the ends of the middle half of values."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(values: np.ndarray) -> "Quartiles":
        return Quartiles(*np.percentile(values, [25, 50, 75]).tolist())

    @property
    def spread(self) -> float:
        """Half of the width of the middle half, over the median."""
        return (self.high - self.low) / 2 / self.median


@dataclass(frozen=True)
class Measurement:
    """The measurements of one algorithm at one size; without times if it was only checked.

    Attributes:
        resolved: the choice of "auto"; else the algorithm.
        asked: the size asked for; `size` is the nearest possible one.
        size, count: as nccl-tests count them; see `benchmarks.collectives.cases`.
        operand_bytes: of one rank's operand.
        wrong: elements on all ranks; None if it was not checked.
        factor: busbw over algbw.
        seconds: of one call.
        vs_lax: seconds over lax's in the same round.
        predicted: seconds, by the model fitted to this run.
    """

    collective: str
    redop: str
    type: str
    ranks: int
    algorithm: str
    resolved: str
    asked: int
    size: int
    count: int
    operand_bytes: int
    factor: float
    wrong: int | None = None
    rounds: int = 0
    seconds: Quartiles | None = None
    vs_lax: Quartiles | None = None
    predicted: float | None = None

    @property
    def option(self) -> str:
        """What follows the name in `ring:int8` or `lax:tree`; "" if nothing does."""
        return self.resolved.partition(":")[2]

    def algbw(self, seconds: float) -> float:
        """Bytes per second of a call that takes so many seconds."""
        return self.size / seconds

    def busbw(self, seconds: float) -> float:
        """`algbw`, made comparable between collectives and numbers of ranks."""
        return self.factor * self.algbw(seconds)
