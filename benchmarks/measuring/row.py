"""A row of the results, and what is kept of many timings."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


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
class Measurement:
    """What was measured of one algorithm at one size; no times where it was only checked.

    Attributes:
        resolved: what "auto" stood for; else the algorithm.
        asked: the size that was asked for, of which `size` is the nearest there is.
        size, count: as nccl-tests count them; see `benchmarks.collectives.cases`.
        operand_bytes: of one rank's operand.
        wrong: elements on all ranks; None if it was not checked.
        factor: busbw over algbw.
        seconds: of one call.
        vs_lax: seconds over lax's, within a round.
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

    def algbw(self, seconds: float) -> float:
        """Bytes per second, of a call of so many seconds."""
        return self.size / seconds

    def busbw(self, seconds: float) -> float:
        """The same, made comparable over n and over collectives."""
        return self.factor * self.algbw(seconds)
