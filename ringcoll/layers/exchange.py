"""A gather or a scatter whose gradient may have another wire."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

from jax import Array

from ringcoll.collectives.all_gather import all_gather, psum_scatter
from ringcoll.collectives.table import Algorithm
from ringcoll.collectives.wires import Wire


@dataclass(frozen=True)
class Exchange:
    """How shards are gathered or sums scattered along `dim`, and what messages hold.

    `wire` is what the function's messages hold; `gradient_wire` is what its gradient's messages
    hold.
    """

    axes: tuple[Hashable, ...]
    dim: int
    algorithm: Algorithm
    wire: Wire | None
    gradient_wire: Wire | None

    def gathered(self, x: Array) -> Array:
        """The shards of all ranks."""
        return all_gather(
            x, self.axes, axis=self.dim, tiled=True, algorithm=self.algorithm, wire=self.wire
        )

    def scattered(self, x: Array) -> Array:
        """This rank's part of the sum."""
        return psum_scatter(
            x,
            self.axes,
            scatter_dimension=self.dim,
            tiled=True,
            algorithm=self.algorithm,
            wire=self.wire,
        )

    def transposed(self) -> "Exchange":
        """The exchange of the gradient: its wires are swapped."""
        return replace(self, wire=self.gradient_wire, gradient_wire=self.wire)
