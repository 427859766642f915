"""Samples text from a model, over the mesh that trained it."""

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from examples import text, transformer
from examples.training import Trainer, whole
from examples.transformer import BATCH, CONTEXT, MODEL, Config, Params
from ringcoll import lax
from ringcoll.layers import fold_rng_over_axis

PROMPT = b"def "
TEMPERATURE = 0.7


def write(config: Config, trainer: Trainer, length: int, seed: int) -> list[str]:
    """A text from every rank of BATCH."""
    rows = prod(trainer.mesh.shape[axis] for axis in BATCH)
    tokens = np.zeros((rows, length), np.int32)
    tokens[:, : len(PROMPT)] = list(PROMPT)
    written = jax.jit(
        jax.shard_map(
            partial(_write, config, trainer.specs),
            mesh=trainer.mesh,
            in_specs=(trainer.specs, P(BATCH), P()),
            out_specs=P(BATCH),
        )
    )
    key = trainer.placed(jax.random.key(seed), P())
    texts = written(trainer.state.params, trainer.placed(tokens, P(BATCH)), key)
    return [text.decode(row) for row in whole(texts)]


def _write(config: Config, specs: Params, params: Params, tokens: Array, key: Array) -> Array:
    """`tokens: [b, s] -> [b, s]`; tokens after the prompt are drawn one by one."""
    # Each rank of BATCH writes a different text. Ranks along CONTEXT and MODEL must choose the
    # same tokens.
    mine = fold_rng_over_axis(key, BATCH)

    def draw(i: Array, tokens: Array) -> Array:
        scores, _ = transformer.logits(config, specs, params, tokens)  # [b, s/c, v/n]
        last = transformer.own_positions(tokens.shape[1]) == i - 1  # on one rank of CONTEXT
        scores = lax.psum(jnp.where(last[:, None], scores, 0).sum(1), CONTEXT)
        scores = lax.all_gather(scores, MODEL, axis=-1, tiled=True, to="invarying")
        scores = scores[:, : text.BYTES].astype("float32") / TEMPERATURE
        drawn = jax.random.categorical(jax.random.fold_in(mine, i), scores)
        return tokens.at[:, i].set(drawn.astype(tokens.dtype))

    return jax.lax.fori_loop(len(PROMPT), tokens.shape[1], draw, tokens)
