"""A gather or a scatter whose gradient, the other of the two, has a wire of its own."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

from jax import Array

from ringcoll.collectives.all_gather import all_gather, psum_scatter
from ringcoll.collectives.table import Algorithm
from ringcoll.collectives.tree_order import LEAVES
from ringcoll.collectives.wires import Wire


@dataclass(frozen=True)
class Exchange:
    """How shards are gathered or sums scattered along `dim`, and what messages hold.

    `wire` is what the messages of the function hold, and `gradient_wire` those of its gradient.
    `order` and `leaves` are those of the sums.
    """

    axes: tuple[Hashable, ...]
    dim: int
    algorithm: Algorithm
    wire: Wire | None
    gradient_wire: Wire | None
    order: str | None = None
    leaves: int = LEAVES

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
            order=self.order,
            leaves=self.leaves,
        )

    def transposed(self) -> "Exchange":
        """That of the gradient."""
        return replace(self, wire=self.gradient_wire, gradient_wire=self.wire)
