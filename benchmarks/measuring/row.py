"""A row of the results, and the quartiles of timings."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Quartiles(NamedTuple):
    """The quartiles of values: the median, and the ends of the middle half."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(values: np.ndarray) -> "Quartiles":
        return Quartiles(*np.percentile(values, [25, 50, 75]).tolist())

    @property
    def spread(self) -> float:
        """Half the width of the middle half, over the median."""
        return (self.high - self.low) / 2 / self.median


@dataclass(frozen=True)
class Measurement:
    """The measurements of one algorithm at one size; without times if it was only checked.

    Attributes:
        resolved: the choice of "auto"; for others, the algorithm itself.
        asked: the size that was asked for; `size` is the nearest possible one.
        size, count: as nccl-tests counts them; see `benchmarks.collectives.cases`.
        operand_bytes: bytes of one rank's operand.
        wrong: the number of wrong elements on all ranks; None if it was not checked.
        factor: busbw over algbw.
        seconds: seconds of one call.
        vs_lax: seconds over those of lax in the same round.
        predicted: seconds by the model that is fitted to this run.
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
    def label(self) -> str:
        """The algorithm as tables show it: "auto: ring" for the choice of "auto"."""
        return self.algorithm if self.algorithm == self.resolved else f"auto: {self.resolved}"

    @property
    def option(self) -> str:
        """What follows the name in `ring:int8` or `lax:tree`; "" if nothing does."""
        return self.resolved.partition(":")[2]

    def algbw(self, seconds: float) -> float:
        """Bytes per second of a call that takes this many seconds."""
        return self.size / seconds

    def busbw(self, seconds: float) -> float:
        """`algbw`, made comparable between collectives and numbers of ranks."""
        return self.factor * self.algbw(seconds)
