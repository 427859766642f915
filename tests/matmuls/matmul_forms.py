"""The ways to call a matmul with a collective, and the right results, computed by NumPy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

import ringcoll

Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class Form:
    """One way to call a matmul, and what it computes.

    Attributes:
        function: of x, w, the axes and options.
        spec: the einsum of whole operands.
        travels: what has shards: "x" or "w" is gathered, "y" is scattered; "sum" is on every rank.
        label: the label along which it is gathered or scattered; rows of a sum.
    """

    function: Callable[..., Any]
    spec: str
    travels: str
    label: str

    def ours(self, x: Any, w: Any, **options: Any) -> Any:
        """The result over the axis x."""
        return self.function(x, w, "x", **options)

    @property
    def labels(self) -> tuple[str, str, str]:
        """The labels of the first factor (which may be gathered), the other, and the result."""
        factors, out = self.spec.split("->")
        x, w = factors.split(",")
        return (w, x, out) if self.travels == "w" else (x, w, out)

    def lengths(self, n: int, length: int = 3) -> list[tuple[int, ...]]:
        """The shapes of a rank's first factor, other factor and result, on n ranks.

        `length` is that of a shard; of a sum, the rows of all.
        """
        sizes = {"a": 3, "b": 2, "e": 2, "k": 4, "f": 2}
        whole = sizes | {self.label: length if self.travels == "sum" else n * length}
        parts = (self.travels in "xw", False, self.travels == "y")
        return [
            tuple(length if part and c == self.label else whole[c] for c in labels)
            for labels, part in zip(self.labels, parts, strict=True)
        ]

    def shapes(self, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of x and w on each of n ranks."""
        first, other, _ = self.lengths(n)
        return (other, first) if self.travels == "w" else (first, other)

    def expected(self, factors: Arrays, cts: Arrays) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The results and the gradients of all factors, of every rank: `[n, ...]` each.

        There is a result, and a cotangent, for every factor after the first one.
        """
        first, *others = factors
        a, b, out = self.labels
        forward, to_a, to_b = (
            partial(np.einsum, spec)
            for spec in (f"{a},{b}->{out}", f"{out},{b}->{a}", f"{a},{out}->{b}")
        )
        if self.travels in "xw":
            dim = a.index(self.label)
            whole = np.concatenate(first, dim)
            results = [np.stack([forward(whole, w) for w in other]) for other in others]
            pairs = zip(cts, others, strict=True)
            sums = sum(to_a(ct[r], w[r]) for ct, w in pairs for r in range(len(first)))
            back = [np.stack([to_b(whole, one) for one in ct]) for ct in cts]
            return results, [np.stack(np.split(sums, len(first), dim)), *back]
        (other,), (ct,) = others, cts
        dim, n = out.index(self.label), len(first)
        total = sum(forward(x, w) for x, w in zip(first, other, strict=True))
        is_sum = self.travels == "sum"
        result = [total] * n if is_sum else np.split(total, n, dim)
        whole = ct.sum(0) if is_sum else np.concatenate(ct, dim)
        gradients = [[to_a(whole, w) for w in other], [to_b(x, whole) for x in first]]
        return [np.stack(result)], [np.stack(gradient) for gradient in gradients]


def of_einsum(function: Callable[..., Any], spec: str, **of: Any) -> Callable[..., Any]:
    return lambda x, w, axes, **options: function(spec, x, w, axes, **of, **options)


def of_sharded(*specs: str, **of: Any) -> Callable[..., Any]:
    """A call in which the dimensions written as X are sharded over the axes."""

    def call(x: Any, w: Any, axes: Any, **options: Any) -> Any:
        a, b, out = (P(*(axes if side == "X" else None for side in spec)) for spec in specs)
        return ringcoll.sharded_matmul(x, w, a, b, out, **of, **options)

    return call


_gather, _scatter, _sum = (
    ringcoll.all_gather_matmul,
    ringcoll.matmul_reduce_scatter,
    ringcoll.matmul_all_reduce,
)
_gathering = partial(of_einsum, ringcoll.all_gather_einsum)
_scattering = partial(of_einsum, ringcoll.einsum_reduce_scatter)
FORMS = {
    "rows gathered": Form(_gather, "ak,kf->af", "x", "a"),
    "leading dimensions": Form(_gather, "bak,kf->baf", "x", "a"),
    "contraction gathered": Form(partial(_gather, dim=-1), "ak,kf->af", "x", "k"),
    "weight gathered": Form(partial(_gather, operand=1), "ak,kf->af", "w", "k"),
    "columns of the weight gathered": Form(
        partial(_gather, operand=1, dim=-1), "bak,kf->baf", "w", "f"
    ),
    "a batch gathered": Form(_gathering("ebk,ekf->ebf", gather="e"), "ebk,ekf->ebf", "x", "e"),
    "a batch of weights gathered": Form(
        _gathering("ebk,ekf->bfe", gather="e", operand=1), "ebk,ekf->bfe", "w", "e"
    ),
    "rows scattered": Form(_scatter, "ak,kf->af", "y", "a"),
    "columns scattered": Form(partial(_scatter, dim=-1), "bak,kf->baf", "y", "f"),
    "a batch scattered": Form(_scattering("ebk,ekf->bfe", scatter="e"), "ebk,ekf->bfe", "y", "e"),
    "sum on every rank": Form(_sum, "bak,kf->baf", "sum", "a"),
}
SHARDED = {
    "sharded rows gathered": Form(of_sharded("X.", "..", ".."), "ak,kf->af", "x", "a"),
    "sharded weight gathered": Form(of_sharded("..", "X.", ".."), "ak,kf->af", "w", "k"),
    "sharded columns scattered": Form(of_sharded(".X", "X.", ".X"), "ak,kf->af", "y", "f"),
    "sharded sum": Form(of_sharded(".X", "X.", ".."), "ak,kf->af", "sum", "a"),
}
