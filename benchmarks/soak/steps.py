"""Random training steps: collectives as in a real program, on exact data.

Layers run in a loop (or are unrolled, rematerialised, or jitted functions) and send over one
axis. Gradients are summed leaf by leaf over both axes. Metrics are summed before, during and after
the layers. The state is donated, and several steps are in flight. Step i of a seed is always the
same. `jax.lax` gives the same bits, because every value is a small multiple of a power of two.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax as jax_lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.collectives.cases import exists
from ringcoll import lax as our_lax
from ringcoll.algorithms import names
from ringcoll.schedules.registry import LAX

#: Sizes of the axes data and model.
SHAPES = ((2, 4), (4, 2), (1, 8), (8, 1), (2, 2), (1, 3), (1, 5))
#: The shape of activations; every size of an axis divides the width.
ROWS, WIDTH = 4, 120
BOTH = ("data", "model")
#: How many times a step runs; each run starts from the state of the one before.
TURNS = 3
#: Whether a step begins before the one before is done. With JAX 0.10, XLA:CPU itself may then hang.
IN_FLIGHT = jax.__version_info__ >= (0, 11)

State = dict[str, Any]
#: Takes a state, which is donated, and a batch; returns the next state.
Program = Callable[[State, np.ndarray], State]


@dataclass(frozen=True)
class Step:
    """One training step.

    Attributes:
        shape: the shape of the mesh.
        layers: the number of layers.
        loop: "scan", "repeat" (a scan of the first layer) or "unrolled".
        around: what wraps each layer: "checkpoint", "jit", "cond" or "".
        inside: the collectives of each layer: "gather", "mean", "exchange" or "shift".
        metrics: how many are summed before, during and after the layers.
        algorithms: for each collective, the algorithms that its calls take in turn.
    """

    shape: tuple[int, int]
    layers: int
    loop: str
    around: str
    inside: str
    metrics: tuple[int, int, int]
    algorithms: Mapping[str, tuple[str, ...]]

    def mesh(self) -> Mesh:
        """A mesh of the first devices."""
        devices = np.array(jax.devices()[: self.shape[0] * self.shape[1]])
        return Mesh(devices.reshape(self.shape), BOTH)

    def program(self, *, by_lax: bool = False) -> Program:
        """The step, jitted, with its state donated: by ringcoll, or only by jax.lax."""
        calls = _Calls({} if by_lax else self.algorithms)
        state = {"layers": P(), "seen": P()}
        mapped = jax.shard_map(
            partial(_step, self, calls),
            mesh=self.mesh(),
            in_specs=(state, P("data")),
            out_specs=state,
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=0)

    def state(self) -> State:
        """The state before the first step."""
        weights = np.arange(self.layers * WIDTH, dtype=np.float32).reshape(self.layers, WIDTH) % 2
        seen = np.zeros((sum(self.metrics), 7), np.float32)
        return {"layers": {"scale": weights, "shift": weights[:, ::-1].copy()}, "seen": seen}

    def batch(self, number: int) -> np.ndarray:
        """Rows of small numbers, sharded along "data"."""
        rows = self.shape[0] * ROWS
        return np.random.default_rng(number).integers(0, 8, (rows, WIDTH)).astype(np.float32)


def draw(seed: int, number: int, devices: int = 8) -> Step:
    """Step `number` of a seed, on at most `devices` devices."""
    rng = np.random.default_rng((seed, number))

    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    shape = one_of(*(s for s in SHAPES if s[0] * s[1] <= devices))
    algorithms = {}
    for collective, ranks in (
        ("all_gather", shape[1:]),
        ("psum_scatter", shape[1:]),
        ("all_to_all", shape[1:]),
        ("pmean", shape[1:]),
        ("psum", shape),
    ):
        known = ["auto", LAX]
        known += [name for name in names(collective) if exists(collective, name, *ranks)]
        algorithms[collective] = tuple(one_of(*known) for _ in range(8))
    return Step(
        shape,
        layers=one_of(2, 3),
        loop=one_of("scan", "scan", "repeat", "unrolled"),
        around=one_of("", "", "checkpoint", "jit", "cond"),
        inside=one_of("gather", "mean", "exchange", "shift"),
        metrics=(one_of(0, 1, 2), one_of(0, 1, 2), one_of(0, 1)),
        algorithms=algorithms,
    )


def differing(step: Step, ours: Program | None = None) -> list[str]:
    """The leaves of the state that differ from those by jax.lax after `TURNS` runs.

    Args:
        step: the step.
        ours: its program; None compiles it.
    """
    ends = []
    by_lax = step.program(by_lax=True)
    for program, waits in ((ours or step.program(), not IN_FLIGHT), (by_lax, True)):
        state = step.state()
        for turn in range(TURNS):
            state = program(state, step.batch(turn))
            if waits:
                jax.block_until_ready(state)
        ends.append(jax.tree.map(np.asarray, state))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(ends[0])]
    pairs = zip(names, *map(jax.tree.leaves, ends), strict=True)
    return [name for name, x, y in pairs if x.tobytes() != y.tobytes()]


class _Calls:
    """Collectives; each call takes the next algorithm. Without algorithms, they are jax.lax's."""

    def __init__(self, algorithms: Mapping[str, tuple[str, ...]]) -> None:
        self.algorithms = algorithms
        self.made = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not self.algorithms:
            return getattr(jax_lax, name)
        self.made += 1
        if name not in self.algorithms:
            return getattr(our_lax, name)
        turns = self.algorithms[name]
        return partial(getattr(our_lax, name), algorithm=turns[self.made % len(turns)])


def _step(step: Step, calls: _Calls, state: State, x: Array) -> State:
    """The step on one rank, which has its rows of x and all weights."""
    before, beside, behind = step.metrics
    seen = [calls.psum(jnp.sum(x) + jnp.arange(7.0) + i, BOTH) for i in range(before)]

    def loss(layers: Any) -> Array:
        y = _layers(step, calls, layers, x)
        return jnp.sum(y * (1 + jnp.arange(WIDTH) % 3)[None])

    value, gradients = jax.value_and_grad(loss)(state["layers"])
    seen += [calls.psum(x[0, :7] * (i + 2), BOTH) for i in range(beside)]
    gradients = jax.tree.map(lambda g: calls.psum(g, BOTH), gradients)
    seen += [calls.psum(value + jnp.arange(7.0) * i, BOTH) for i in range(behind)]
    layers = jax.tree.map(lambda w, g: _below(2, w + _ones(g)), state["layers"], gradients)
    return {
        "layers": layers,
        "seen": _below(64, state["seen"] + jnp.reshape(jnp.asarray(seen), state["seen"].shape)),
    }


def _ones(x: Array) -> Array:
    """A number with the parity of the one bits of x. (On 2^k ranks most gradients are even.)"""
    return sum((jnp.floor(x / 2.0**i) for i in range(1, 24)), start=x)


def _below(bound: int, x: Array) -> Array:
    """x modulo the bound; its derivative is 1."""
    return x - bound * jax_lax.stop_gradient(jnp.floor(x / bound))


def _layers(step: Step, calls: _Calls, weights: Any, x: Array) -> Array:
    def layer(h: Array, weights: Any) -> Array:
        scale, shift = weights["scale"][None], weights["shift"][None]
        return _below(8, _sent(step, calls, h * scale) + shift)

    def in_branch(h: Array, weights: Any) -> Array:
        return jax_lax.cond(jnp.sum(weights["scale"]) >= 0, layer, lambda h, _: h, h, weights)

    turns: dict[str, Callable[[Array, Any], Array]] = {
        "": layer,
        "checkpoint": jax.checkpoint(layer),
        "jit": jax.jit(layer),
        "cond": in_branch,
    }
    turn = turns[step.around]
    if step.loop == "scan":
        return jax_lax.scan(lambda h, w: (turn(h, w), None), x, weights)[0]
    first, *_ = each = [jax.tree.map(operator.itemgetter(i), weights) for i in range(step.layers)]
    if step.loop == "repeat":
        return jax_lax.scan(lambda h, _: (turn(h, first), None), x, length=step.layers)[0]
    for of_layer in each:
        x = turn(x, of_layer)
    return x


def _sent(step: Step, calls: _Calls, h: Array) -> Array:
    """[rows, width] -> [rows, width], over the axis "model"."""
    n = step.shape[1]
    if step.inside == "mean":
        return calls.pmean(_below(8, h), "model") * n
    if step.inside == "shift":
        return calls.ppermute(h, "model", [(i, (i + 1) % n) for i in range(n)])
    if step.inside == "exchange":
        there = calls.all_to_all(h, "model", 1, 0, tiled=True)
        return calls.all_to_all(_below(8, there * 3), "model", 0, 1, tiled=True)
    mine = calls.psum_scatter(h, "model", scatter_dimension=1, tiled=True)
    return calls.all_gather(_below(8, mine), "model", axis=1, tiled=True)
