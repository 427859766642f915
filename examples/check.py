"""Whether a run over a mesh is the run of one device, token by token and step by step.

Beside it go two runs of `examples.plain`, of the same weights, batches and masks: one in the dtype
of the run, which shows what rounding does on one device, and one in float64, which is exact
beside it. The run over the mesh may be further from the exact one, in the mean over tokens, than
that of one device has been:

- by sqrt(n), for what n ranks add up is rounded n times where one device rounds it once, and the
  errors of n roundings grow as a random walk (Higham and Mary, "A new approach to probabilistic
  rounding error analysis", 2019);
- and by 2, for both are chance. Measured, they are the same to within a third.

What is wrong, be it a sum over the wrong axis or one other mask, is off by thousands of that.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from benchmarks import report
from examples import plain
from examples.training import Gradient, State, make_step
from examples.transformer import Config, Params


class Check:
    """Two runs on one device, from the state of a third."""

    def __init__(
        self, config: Config, state: State, optimizer: optax.GradientTransformation, ranks: int
    ) -> None:
        """`ranks` is over how many at most the run that is checked adds up."""
        self.dtypes = {config.dtype: "float32", "float64": "float64"}  # and of the parameters
        self.states: dict[str, State] = {}
        self.steps: dict[str, Any] = {}
        self.factor = 2 * ranks**0.5
        self.off = 0.0  # how far that of one device has been from the exact one
        self.rows: list[dict[str, float]] = []
        host = jax.device_get(state)
        for dtype, kept in self.dtypes.items():
            with jax.enable_x64(kept == "float64"):
                self.states[dtype] = jax.tree.map(partial(_as, kept), host)
            self.steps[dtype] = make_step(_gradient(replace(config, dtype=dtype)), optimizer)

    def __call__(self, step: int, losses: np.ndarray, *data: Any) -> None:
        """Take the same step, and compare: `losses: [b, s]` are those of the run."""
        made = {}
        for dtype, kept in self.dtypes.items():
            with jax.enable_x64(kept == "float64"):
                self.states[dtype], made[dtype] = self.steps[dtype](self.states[dtype], *data)
        one, exact = (np.asarray(x, np.float64) for x in made.values())
        self.off = max(self.off, _distance(one, exact))
        off = _distance(losses, exact)
        row = {"step": step, "exact": exact.mean(), "off": off, "allowed": self.factor * self.off}
        self.rows.append(row)

    def verdict(self) -> int:
        """What was found, in words; the exit status."""
        made = report.table("step", "loss, exact", "off", "allowed", left=0)
        bad = [row for row in self.rows if not row["off"] <= row["allowed"]]
        every = max(1, len(self.rows) // 10)
        for row in bad[:10] or [*self.rows[::every], self.rows[-1]]:
            cells = (f"{row[name]:.2e}" for name in ("off", "allowed"))
            made.add_row(str(row["step"]), f"{row['exact']:.6f}", *cells)
        report.show("The run against the same in float64 on one device", made)
        ratio = max(row["off"] / row["allowed"] for row in self.rows)
        words = f"{len(bad)} of {len(self.rows)} steps are further off than rounding allows"
        report.console().print(f"{words}; at most {ratio:.2f} of what it allows")
        return 1 if bad else 0


def _gradient(config: Config) -> Gradient:
    """As `training.sharded_gradient`, on one device."""

    def gradient(params: Params, *data: Array) -> tuple[Params, Array]:
        def mean(params: Params) -> tuple[Array, Array]:
            losses = plain.losses(config, params, *data)
            return losses.mean(), losses

        return jax.grad(mean, has_aux=True)(params)

    return gradient


def _as(dtype: str, x: np.ndarray) -> Array:
    return jnp.asarray(x, dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The root of the mean square, over all tokens."""
    return float(np.sqrt(np.mean((a - b) ** 2)))
