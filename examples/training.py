"""A training step over a mesh, what it starts from, and checkpoints that fit any mesh."""

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
from examples.transformer import AXES, BATCH, MODEL, Config, Params
from ringcoll import lax
from ringcoll.layers import fsdp


class State(NamedTuple):
    """What a step changes."""

    params: Params
    opt_state: optax.OptState


#: What a step is fed with: batch: [b, s+1], the key of its dropout, the positions: [b, s].
Data = tuple[Any, Array, Any]
DATA_SPECS = P(BATCH), P(), P(BATCH, MODEL)
#: (parameters, *data) -> gradient of the mean, losses: [b, s]
Gradient = Callable[..., tuple[Params, Array]]
#: (state, *data) -> state, losses: [b, s], the norm of the gradient of each parameter
Step = Callable[..., tuple[State, Array, Array]]


def make_mesh(*sizes: int) -> Mesh:
    """Of devices that are there; of virtual CPU devices, if more are wanted.

    Its axes are explicit, as JAX makes them: how an array is sharded is part of its type, so
    that what is made of parameters under `jax.jit`, as the moments of Adam, is sharded as they.
    """
    wanted = int(np.prod(sizes))
    alone = not jax.distributed.is_initialized()
    if alone:
        there = jax.config.values["jax_num_cpu_devices"]
        jax.config.update("jax_num_cpu_devices", max(wanted, there))
    devices = jax.devices()
    if len(devices) != wanted and not alone:
        raise SystemExit(
            f"--data, --fsdp, --model: {wanted} ranks; all processes together have {len(devices)} "
            f"devices: use each (of CPUs, JAX_NUM_CPU_DEVICES={wanted / jax.process_count():g})"
        )
    if len(devices) < wanted:
        devices = jax.devices("cpu")
        jax.config.update("jax_default_device", devices[0])
    return jax.make_mesh(sizes, AXES, devices=devices[:wanted])


def sharded_gradient(config: Config, specs: Params, mesh: Mesh) -> Gradient:
    """The gradient over the mesh, sharded as the parameters are, and the losses as the batch."""

    def per_rank(params: Params, *data: Array) -> tuple[Params, Array]:
        def mean(params: Params) -> tuple[Array, Array]:
            losses = transformer.losses(config, specs, params, *data)  # of a rank's rows
            return lax.pmean(losses.mean(), BATCH), losses

        return jax.grad(mean, has_aux=True)(params)

    return jax.shard_map(
        per_rank, mesh=mesh, in_specs=(specs, *DATA_SPECS), out_specs=(specs, P(BATCH))
    )


def make_step(gradient: Gradient, optimizer: optax.GradientTransformation) -> Step:
    """The optimizer sees whole arrays, wherever their parts are: it knows of no mesh."""

    @partial(jax.jit, donate_argnums=0)
    def step(state: State, *data: Array) -> tuple[State, Array, Array]:
        grads, losses = gradient(state.params, *data)
        grad_norms = jnp.stack([jnp.sqrt(jnp.sum(g * g)) for g in jax.tree.leaves(grads)])
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), losses, grad_norms

    return step


def adamw(rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW with a warm-up, down to a tenth of its rate; gradients no longer than 1."""
    schedule = optax.warmup_cosine_decay_schedule(0, rate, steps // 20 + 1, steps + 1, rate / 10)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    )


def start(params: Params, optimizer: optax.GradientTransformation, mesh: Mesh) -> State:
    """The first state, each moment where its parameter is.

    Raises:
        RuntimeError: one is somewhere else.
    """
    # The zeros that moments start from have no operand: without a mesh set they would not be
    # placed on it.
    with jax.set_mesh(mesh):
        opt_state = jax.jit(optimizer.init)(params)

    def check(moment: Array, param: Array) -> None:
        if not moment.sharding.is_equivalent_to(param.sharding, param.ndim):
            raise RuntimeError(f"a moment is {moment.sharding}, its parameter {param.sharding}")

    optax.tree.map_params(optimizer, check, opt_state, params)
    return State(params, opt_state)


def whole(x: Array) -> np.ndarray:
    """All of it, in every process."""
    return np.asarray(
        x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)
    )


class Trainer:
    """A model over a mesh, which learns."""

    def __init__(
        self, config: Config, mesh: Mesh, optimizer: optax.GradientTransformation, seed: int
    ) -> None:
        weights, self.masks = jax.random.split(jax.random.key(seed))
        params = jax.jit(transformer.init, static_argnums=0)(config, weights)
        self.mesh, self.specs = mesh, transformer.specs(params, mesh)
        self.state = start(fsdp.shard(params, self.specs, mesh), optimizer, mesh)
        self._step = make_step(sharded_gradient(config, self.specs, mesh), optimizer)
        losses = partial(transformer.losses, config, self.specs)
        self._losses = jax.jit(
            jax.shard_map(losses, mesh=mesh, in_specs=(self.specs, P(BATCH)), out_specs=P(BATCH))
        )

    def data(self, number: int, batch: np.ndarray) -> Data:
        """Of a step: all that it depends on, and nothing of it on the mesh."""
        rows, length = batch.shape[0], batch.shape[1] - 1
        positions = np.arange(rows * length, dtype=np.int32).reshape(rows, length)
        return batch, jax.random.fold_in(self.masks, number), positions

    def step(self, *data: Any) -> tuple[np.ndarray, np.ndarray]:
        """Learn from a batch: the loss of each of its tokens, the norm of each gradient."""
        self.state, *made = self._step(self.state, *map(self.placed, data, DATA_SPECS))
        losses, grad_norms = (whole(x).astype(np.float64) for x in made)
        return losses, grad_norms

    def losses(self, batch: np.ndarray) -> np.ndarray:
        """Of each token, without dropout."""
        losses = self._losses(self.state.params, self.placed(batch, P(BATCH)))
        return whole(losses).astype(np.float64)

    def placed(self, x: Any, spec: P) -> Array:
        """On the mesh."""
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # over processes as its numbers only
            numbers = self.placed(jax.random.key_data(x), spec)
            return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
        return jax.device_put(x, NamedSharding(self.mesh, spec))


class Checkpoints:
    """States in a folder, by the number of their step: the last three of those asked for.

    Nothing in one depends on the mesh that wrote it: weights are in the ordinary layout, and a
    moment is as its weight.

    A run that goes on from an earlier state replaces the later ones, which are of another run:
    they are put aside when it first saves, and deleted once it has. What a run that was ended in
    between had put aside is put back.
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
        """Those of which there are states."""
        return sorted(self._manager.all_steps())

    def save(self, number: int, state: State, is_last: bool) -> None:
        """If it is time to."""
        if self._later and (is_last or number % self._every == 0):
            self._move(self._folder, self._replaced, self._later)
            self._manager.reload()
            self._later = []
        if self._manager.save(number, args=ocp.args.StandardSave(state), force=is_last):
            self._manager.wait_until_finished()  # the next step overwrites the state
            self._delete_replaced()

    def restore(self, number: int, like: State) -> tuple[int, State]:
        """The state after so many steps, or, of a negative number, the last.

        Each device reads its part of `like`. What was saved later is deleted when this run saves:
        from here on it is another one.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is of another model, or damaged.
        """
        known = self.steps()
        number = max(known, default=0) if number < 0 else number
        if number not in known:
            raise FileNotFoundError(f"no state of step {number} in {self._folder}; {self._have()}")
        try:
            found = _shapes(self._manager.item_metadata(number).tree)
            if wrong := _mismatch(found, _shapes(like)):
                raise ValueError(f"of another model: {wrong}")
            state = self._manager.restore(number, args=ocp.args.StandardRestore(like))
        except Exception as error:  # of many kinds, where a file is damaged
            why = " ".join(str(error).split())
            why = why if why.startswith("of another") else f"damaged: {why[:200]}"
            raise ValueError(
                f"the state of step {number} in {self._folder} is {why}; {self._have()}"
            ) from error
        self._later = [later for later in known if later > number]
        return number, state

    def _have(self) -> str:
        return f"nothing was deleted, there are {self.steps()}"

    def _move(self, here: Path, there: Path, steps: Sequence[int] | None = None) -> None:
        """The states of some steps, or all, from one folder to another: by one process for all."""
        if jax.process_index() == 0 and here.is_dir():
            there.mkdir(parents=True, exist_ok=True)
            for state in list(here.iterdir()):
                if steps is None or state.name in map(str, steps):
                    state.rename(there / state.name)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("states are moved")

    def _delete_replaced(self) -> None:
        """At once, so that nothing half deleted is ever put back."""
        if jax.process_index() == 0:
            gone = self._folder / "deleted"
            shutil.rmtree(gone, ignore_errors=True)
            if self._replaced.is_dir():
                self._replaced.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Of each array, by its name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(at, simple=True, separator="."): x.shape for at, x in leaves}


def _mismatch(saved: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]]) -> str:
    """The first array that is not alike; empty if all are."""
    for name in [*own, *saved]:
        if saved.get(name) != own.get(name):
            there, here = (f"{of[name]}" if name in of else "not there" for of in (saved, own))
            return f"{name} is {there}, in this run {here}"
    return ""
