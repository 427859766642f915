"""Checks a run over a mesh against one device, token by token and step by step.

Two runs of `examples.plain` have the same weights, batches and masks. One is in the dtype of the
run, and shows the rounding on one device. The other is in float64, and counts as exact. The error
of the run over the mesh, in the mean over tokens, is compared with the largest error on one device
so far. It may be larger by two factors:

- sqrt(n), because n ranks round n times where one device rounds once, and the errors of n
  roundings grow as a random walk (Higham and Mary, "A new approach to probabilistic rounding error
  analysis", 2019);
- 2, because both errors are random. As measured, losses are as far off as on one device to within a
  third, and gradients to within a factor of 2.2.

In float32, a fault such as a sum over the wrong axis, or one wrong mask, is off by thousands of
times as much. In bfloat16, whose roundings are large, an error of 1 % in some gradients does not
show. Norms of gradients have the same limits, because losses cannot show a gradient that is a
multiple of the right one: Adam takes the same step.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from benchmarks.measuring import report
from examples import plain
from examples.training import Gradient, State, make_step, whole
from examples.transformer import BALANCE, Config, Params


class Check:
    """Two runs on one device, from the state of a third."""

    def __init__(
        self,
        config: Config,
        state: State,
        optimizer: optax.GradientTransformation,
        ranks: int,
        cut: tuple[int, int],
    ) -> None:
        """`ranks` is the largest number of ranks in a sum of the run; `cut` as in `plain`."""
        #: The dtypes of computation and of parameters: of the run, and exact.
        self.dtypes = {config.dtype: "float32", "float64": "float64"}
        self.states: dict[str, State] = {}
        self.steps: dict[str, Any] = {}
        self.factor = 2 * ranks**0.5
        #: The largest errors of losses and gradients on one device so far.
        self.off = {"losses": 0.0, "gradients": 0.0}
        self.rows: list[dict[str, Any]] = []
        host = jax.tree.map(whole, state)
        for dtype, kept in self.dtypes.items():
            with jax.enable_x64(kept == "float64"):
                self.states[dtype] = jax.tree.map(partial(_as, kept), host)
            gradient = _gradient(replace(config, dtype=dtype), cut)
            self.steps[dtype] = make_step(gradient, optimizer)

    def __call__(self, step: int, losses: np.ndarray, grad_norms: np.ndarray, *data: Any) -> None:
        """Take the same step, and compare it with the run's `losses: [b, s]`."""
        results = {}
        for dtype, kept in self.dtypes.items():
            with jax.enable_x64(kept == "float64"):
                self.states[dtype], *new = self.steps[dtype](self.states[dtype], *data)
            results[dtype] = [np.asarray(x, np.float64) for x in new]
        (losses_of_one, norms_of_one), (exact, exact_norms) = results.values()
        row: dict[str, Any] = {"step": step, "exact": exact.mean()}
        for name, ours, one, right in (
            ("losses", losses, losses_of_one, exact),
            ("gradients", grad_norms / exact_norms, norms_of_one / exact_norms, 1.0),
        ):
            self.off[name] = max(self.off[name], _distance(one, right))
            row[name] = _distance(ours, right)
            row[f"{name}_allowed"] = self.factor * self.off[name]
        self.rows.append(row)

    def verdict(self) -> int:
        """Print the result; returns the exit status."""
        columns = [column for name in self.off for column in (name, f"{name}_allowed")]
        heads = ["losses\noff", "\nallowed", "gradients\noff", "\nallowed"]
        table = report.table("step\n", "loss\nexact", *heads, left=0)
        # `np.max`, because NaN is over the limit too, and `max` may skip it.
        ratios = [
            np.max([row[name] / row[f"{name}_allowed"] for name in self.off]) for row in self.rows
        ]
        bad = [row for row, ratio in zip(self.rows, ratios, strict=True) if not ratio <= 1]
        every = max(1, len(self.rows) // 10)
        for row in bad[:10] or self.rows[::every]:
            cells = (f"{row[column]:.2e}" for column in columns)
            table.add_row(str(row["step"]), f"{row['exact']:.6f}", *cells)
        report.show("The run, and the same in float64 on one device", table)
        words = f"{len(bad)} of {len(self.rows)} steps are further off than rounding allows"
        report.console().print(f"{words}; at most {np.max(ratios):.2f} of what it allows")
        return 1 if bad else 0


def _gradient(config: Config, cut: tuple[int, int]) -> Gradient:
    """Like `training.sharded_gradient`, on one device."""

    def gradient(params: Params, *data: Array) -> tuple[Params, Array]:
        def mean(params: Params) -> tuple[Array, Array]:
            losses, balance = plain.losses(config, params, *data, cut=cut)
            return losses.mean() + BALANCE * balance, losses

        return jax.grad(mean, has_aux=True)(params)

    return gradient


def _as(dtype: str, x: np.ndarray) -> Array:
    return jnp.asarray(x, dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)


def _distance(a: np.ndarray, b: np.ndarray | float) -> float:
    """The root of the mean square of the difference."""
    return float(np.sqrt(np.mean((a - b) ** 2)))
