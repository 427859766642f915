"""A training step over a mesh, its first state, and checkpoints for any mesh."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples import transformer
from examples.transformer import (
    AXES,
    BALANCE,
    BATCH,
    CONTEXT,
    LAYOUT,
    TOKENS,
    Config,
    Params,
)
from ringcoll import lax
from ringcoll.layers import context_parallel as cp
from ringcoll.layers import fsdp


class State(NamedTuple):
    """Parameters and the optimizer's state, which a step changes."""

    params: Params
    opt_state: optax.OptState


#: The data of a step: batch: [b, s+1], the key of its dropout, positions: [b, s].
Data = tuple[Any, Array, Any]
DATA_SPECS = P(BATCH), P(), P(BATCH)
LOSS_SPECS = P(BATCH, CONTEXT)  # of losses: [b, s] in the order of LAYOUT
#: (parameters, *data) -> gradient of the mean, losses
Gradient = Callable[..., tuple[Params, Array]]
#: (state, *data) -> state, losses, the norm of the gradient of each parameter
Step = Callable[..., tuple[State, Array, Array]]


def make_mesh(*sizes: int) -> Mesh:
    """A mesh of this machine's devices, or of virtual CPU devices if these are too few.

    Its axes are explicit, as JAX makes them: the sharding of an array is part of its type. So
    arrays that `jax.jit` computes from parameters, such as the moments of Adam, are sharded like
    them.
    """
    wanted = int(np.prod(sizes))
    alone = not jax.distributed.is_initialized()
    if alone:
        there = jax.config.values["jax_num_cpu_devices"]
        jax.config.update("jax_num_cpu_devices", max(wanted, there))
    devices = jax.devices()
    if len(devices) != wanted and not alone:
        raise SystemExit(
            f"--data, --fsdp, --context, --model: {wanted} ranks; all processes together have "
            f"{len(devices)} devices: use each "
            f"(of CPUs, JAX_NUM_CPU_DEVICES={wanted / jax.process_count():g})"
        )
    if len(devices) < wanted:
        devices = jax.devices("cpu")
        jax.config.update("jax_default_device", devices[0])
    return jax.make_mesh(sizes, AXES, devices=devices[:wanted])


def sharded_gradient(config: Config, specs: Params, mesh: Mesh) -> Gradient:
    """The gradient over the mesh, sharded like parameters, and losses sharded like its tokens."""

    def per_rank(params: Params, *data: Array) -> tuple[Params, Array]:
        def mean(params: Params) -> tuple[Array, Array]:
            losses, balance = transformer.losses(config, specs, params, *data)  # of a rank's tokens
            return lax.pmean(losses.mean() + BALANCE * balance, TOKENS), losses

        return jax.grad(mean, has_aux=True)(params)

    return jax.shard_map(
        per_rank, mesh=mesh, in_specs=(specs, *DATA_SPECS), out_specs=(specs, LOSS_SPECS)
    )


def make_step(gradient: Gradient, optimizer: optax.GradientTransformation) -> Step:
    """A step. The optimizer sees whole arrays, and knows nothing of the mesh."""

    @partial(jax.jit, donate_argnums=0)
    def step(state: State, *data: Array) -> tuple[State, Array, Array]:
        grads, losses = gradient(state.params, *data)
        grad_norms = jnp.stack([jnp.sqrt(jnp.sum(g * g)) for g in jax.tree.leaves(grads)])
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), losses, grad_norms

    return step


def adamw(rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW with a warm-up and a decay to a tenth of the rate; gradients are clipped to norm 1."""
    schedule = optax.warmup_cosine_decay_schedule(0, rate, steps // 20 + 1, steps + 1, rate / 10)
    clip = optax.clip_by_global_norm(1.0)
    return optax.chain(clip, optax.adamw(schedule, b2=0.95, weight_decay=0.1))


def start(params: Params, optimizer: optax.GradientTransformation, mesh: Mesh) -> State:
    """The first state; each moment is placed like its parameter.

    Raises:
        RuntimeError: a moment is placed differently.
    """
    # The zeros that moments start with have no operand. Without a mesh set, JAX would not place
    # them on it.
    with jax.set_mesh(mesh):
        opt_state = jax.jit(optimizer.init)(params)

    def check(moment: Array, param: Array) -> None:
        if not moment.sharding.is_equivalent_to(param.sharding, param.ndim):
            raise RuntimeError(f"a moment is {moment.sharding}, its parameter {param.sharding}")

    optax.tree.map_params(optimizer, check, opt_state, params)
    return State(params, opt_state)


def whole(x: Array) -> np.ndarray:
    """The whole array, in every process."""
    return np.asarray(
        x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)
    )


class Trainer:
    """Trains a model over a mesh."""

    def __init__(
        self, config: Config, mesh: Mesh, optimizer: optax.GradientTransformation, seed: int
    ) -> None:
        weights, self.masks = jax.random.split(jax.random.key(seed))
        params = jax.jit(transformer.init, static_argnums=0)(config, weights)
        self.mesh, self.specs = mesh, transformer.specs(params, mesh)
        self.state = start(fsdp.shard(params, self.specs, mesh), optimizer, mesh)
        self._step = make_step(sharded_gradient(config, self.specs, mesh), optimizer)

        def losses(params: Params, batch: Array) -> Array:
            return transformer.losses(config, self.specs, params, batch)[0]

        self._losses = jax.jit(
            jax.shard_map(losses, mesh=mesh, in_specs=(self.specs, P(BATCH)), out_specs=LOSS_SPECS)
        )

    def data(self, number: int, batch: np.ndarray) -> Data:
        """The data of a step, not yet on the mesh."""
        rows, length = batch.shape[0], batch.shape[1] - 1
        positions = np.arange(rows * length, dtype=np.int32).reshape(rows, length)
        return batch, jax.random.fold_in(self.masks, number), positions

    def step(self, *data: Any) -> tuple[np.ndarray, np.ndarray]:
        """Train on a batch; returns the loss of each token and the norm of each gradient."""
        self.state, *results = self._step(self.state, *map(self.placed, data, DATA_SPECS))
        losses, grad_norms = map(whole, results)
        return self._in_order(losses), grad_norms.astype(np.float64)

    def losses(self, batch: np.ndarray) -> np.ndarray:
        """The loss of each token, without dropout."""
        losses = self._losses(self.state.params, self.placed(batch, P(BATCH)))
        return self._in_order(whole(losses))

    def _in_order(self, losses: np.ndarray) -> np.ndarray:
        """Losses in the order of the text."""
        ordered = cp.restore(jnp.asarray(losses), self.mesh.shape[CONTEXT], LAYOUT)
        return np.asarray(ordered).astype(np.float64)

    def placed(self, x: Any, spec: P) -> Array:
        """Put an array on the mesh."""
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # processes can only share its numbers
            numbers = self.placed(jax.random.key_data(x), spec)
            return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
        return jax.device_put(x, NamedSharding(self.mesh, spec))


class Checkpoints:
    """States in a folder, by the number of their step; the last three are kept.

    A state does not depend on the mesh that wrote it: weights have the ordinary layout, and moments
    have the layout of their weights.

    A run that resumes from an earlier state replaces the later ones, which are stale. It
    moves them aside before it saves for the first time, and deletes them after that. If it ends in
    between, the next run moves them back.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self._folder, self._every = folder.absolute(), every
        self._replaced = self._folder / "replaced"
        self._later: list[int] = []
        self._move(self._replaced, self._folder)
        options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=3)
        self._manager = ocp.CheckpointManager(
            self._folder, options=options, item_handlers=ocp.StandardCheckpointHandler()
        )

    def steps(self) -> list[int]:
        """The steps of the saved states."""
        return sorted(self._manager.all_steps())

    def save(self, number: int, state: State, is_last: bool) -> None:
        """Save a state, if it is time to."""
        if self._later and (is_last or number % self._every == 0):
            self._move(self._folder, self._replaced, self._later)
            self._manager.reload()
            self._later = []
        if self._manager.save(number, args=ocp.args.StandardSave(state), force=is_last):
            self._manager.wait_until_finished()  # the next step overwrites the state
            self._delete_replaced()

    def restore(self, number: int, like: State) -> tuple[int, State]:
        """The state after so many steps; for a negative number, the last state.

        Each device reads its part of `like`. Later states are deleted when this run saves, because
        this is a different run from here on.

        Raises:
            FileNotFoundError: there is no such state.
            ValueError: the state is of a different model, or damaged.
        """
        known = self.steps()
        number = max(known, default=0) if number < 0 else number
        if number not in known:
            raise FileNotFoundError(f"no state of step {number} in {self._folder}; {self._have()}")
        try:
            found = _shapes(self._manager.item_metadata(number).tree)
            if wrong := _mismatch(found, _shapes(like)):
                raise ValueError(f"of a different model: {wrong}")
            state = self._manager.restore(number, args=ocp.args.StandardRestore(like))
        except Exception as error:  # a damaged file raises errors of many types
            why = " ".join(str(error).split())
            why = why if why.startswith("of a different") else f"damaged: {why[:200]}"
            raise ValueError(
                f"the state of step {number} in {self._folder} is {why}; {self._have()}"
            ) from error
        self._later = [later for later in known if later > number]
        return number, state

    def _have(self) -> str:
        return f"nothing was deleted, there are {self.steps()}"

    def _move(self, here: Path, there: Path, steps: Sequence[int] | None = None) -> None:
        """Move the states of some steps, or all, between folders; one process moves for all."""
        if jax.process_index() == 0 and here.is_dir():
            there.mkdir(parents=True, exist_ok=True)
            for state in list(here.iterdir()):
                if steps is None or state.name in map(str, steps):
                    state.rename(there / state.name)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("states are moved")

    def _delete_replaced(self) -> None:
        """Delete states moved aside; a rename first, so that none comes back half deleted."""
        if jax.process_index() == 0:
            gone = self._folder / "deleted"
            shutil.rmtree(gone, ignore_errors=True)
            if self._replaced.is_dir():
                self._replaced.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each array, by its name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(at, simple=True, separator="."): x.shape for at, x in leaves}


def _mismatch(saved: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]]) -> str:
    """The first array whose shapes differ, in words; "" if none does."""
    for name in [*own, *saved]:
        if saved.get(name) != own.get(name):
            there, here = (f"{of[name]}" if name in of else "not there" for of in (saved, own))
            return f"{name} is {there}, in this run {here}"
    return ""
