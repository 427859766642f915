"""A decoder-only transformer of `ringcoll.layers`, on a rank's shards.

The mesh has four axes. Along DATA, ranks have the same parameters. Along FSDP, each rank keeps a
part of them, and gathers them where they are used. Along MODEL, each rank computes with its part of
them. The batch is sharded over the first two axes. Along CONTEXT, ranks have the same parameters
and rows, and different positions of the sequence, also inside attention: one early and one late
part each. Between layers, these positions are sharded over MODEL.

With experts, the MLP of a block is a mixture: the experts are sharded over MODEL, as the tokens
are, and each token goes to `TOP_K` of them, on any rank.
"""

from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ringcoll.layers import context_parallel as cp
from ringcoll.layers import expert_parallel as ep
from ringcoll.layers import fsdp
from ringcoll.layers import tensor_parallel as tp

DATA, FSDP, CONTEXT, MODEL = AXES = "data", "fsdp", "context", "model"
BATCH = DATA, FSDP  # the axes that shard the batch
TOKENS = *BATCH, CONTEXT  # and all that shard its tokens
LAYOUT = "zigzag"  # of the sequence along CONTEXT
TOP_K = 2  # experts of a token
BALANCE = 0.01  # times the load-balancing loss of the experts is added to the loss
Params = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """The sizes of a model, and options of its computation.

    `features` are those of the MLP, or of each expert.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    features: int
    dropout: float
    dtype: str
    algorithm: str = "auto"
    wire: str | None = None  # of FSDP's gathers
    gradient_wire: str | None = None  # of the sums of their gradients
    experts: int = 0


def init(config: Config, key: Array) -> Params:
    """Parameters in float32; those of the blocks are stacked along the first dimension."""
    n, d, h, f = config.layers, config.width, config.heads, config.features
    keys = (jax.random.fold_in(key, i) for i in count())

    def normal(*shape: int, of: int) -> Array:
        return jax.random.normal(next(keys), shape) * of**-0.5

    attention = {name: normal(n, d, h, d // h, of=d) for name in ("query", "key", "value")}
    # Smaller, because 2n parts are added to the residual stream.
    attention["out"] = normal(n, h, d // h, d, of=2 * n * d)
    each = (n, config.experts) if config.experts else (n,)
    mlp = {name: normal(*each, d, f, of=d) for name in ("gate", "up")}
    mlp["down"] = normal(*each, f, d, of=2 * n * f)
    if config.experts:
        mlp["router"] = normal(n, d, config.experts, of=d)
    norms = {name: {"scale": jnp.ones((n, d))} for name in ("norm_1", "norm_2")}
    return {
        "embed": {"embedding": normal(config.vocabulary, d, of=1)},
        "blocks": {"attention": attention, "mlp": mlp, **norms},
        "norm": {"scale": jnp.ones(d)},
        # Small, so that the first loss is about log(vocabulary).
        "unembed": {"unembedding": normal(d, config.vocabulary, of=d * d)},
    }


def specs(params: Params, mesh: Mesh) -> Params:
    """The specs of parameters: by name over MODEL, and remaining dimensions over FSDP."""
    base = tp.partition_specs(params, MODEL)
    mlp = params["blocks"]["mlp"]
    if "router" in mlp:
        base["blocks"]["mlp"] = ep.partition_specs(mlp, MODEL)
    return {
        name: fsdp.specs(part, FSDP, mesh=mesh, base=base[name], leading=int(name == "blocks"))
        for name, part in params.items()
    }


def dropout(x: Array, key: Array | None, positions: Array | None, site: int, rate: float) -> Array:
    """x: [b, s, d] with some zeros, and the rest scaled up; without a key x itself.

    The mask depends on the key and on the position of each token in the whole batch; `positions:
    [b, s]` is sharded like x. So masks are equal on every mesh and on one device, and a run can be
    checked, and resumed on any mesh. (A different key for each rank, by `fold_rng_over_axis`,
    is as random, but gives different masks on every mesh.)
    """
    if key is None or positions is None or not rate:
        return x

    def kept(position: Array) -> Array:
        mine = jax.random.fold_in(jax.random.fold_in(key, site), position)
        return jax.random.bernoulli(mine, jnp.float32(1 - rate), x.shape[-1:])

    return jnp.where(jax.vmap(jax.vmap(kept))(positions), x / (1 - rate), 0)


def own_positions(length: int) -> Array:
    """Which positions of a sequence a rank has along CONTEXT: `[s/n]`."""
    return cp.position_ids(CONTEXT, length // lax.axis_size(CONTEXT), LAYOUT)


def logits(
    config: Config,
    specs: Params,
    params: Params,
    tokens: Array,
    key: Array | None = None,
    positions: Array | None = None,
) -> tuple[Array, Array]:
    """`tokens: [b, s] -> [b, s/c, v/n]`, for a rank's rows and its part of the vocabulary.

    And the load-balancing loss of all layers; 0 without experts. `s/c` are `own_positions(s)`. With
    a key and the positions of all tokens, `[b, s]`, there is dropout.
    """
    options: Any = {"algorithm": config.algorithm}
    replicas = DATA, CONTEXT
    gathering: Any = {
        "dtype": config.dtype,
        "reduce_dtype": "float32",
        "replicas": replicas,
        "wire": config.wire,
        "gradient_wire": config.gradient_wire,
        **options,
    }
    own = own_positions(tokens.shape[1])
    if positions is not None:  # of the tokens between layers
        parts = own.reshape(lax.axis_size(MODEL), -1)
        positions = positions[:, parts[lax.axis_index(MODEL)]]
    attend: Any = partial(cp.attention, axis_name=CONTEXT, causal=True, layout=LAYOUT, **options)
    where: Any = {"positions": own, "attend": attend if lax.axis_size(CONTEXT) > 1 else None}

    by_name = config.algorithm if config.algorithm in ep.ALGORITHMS else "auto"

    def mixed(params: Params, x: Array) -> tuple[Array, Array]:
        if not config.experts:
            return tp.gated_mlp(params, x, MODEL, **options), jnp.zeros(())
        return ep.moe(x, params["router"], params, MODEL, top_k=TOP_K, algorithm=by_name)

    def block(state: tuple[Array, Array], shards: Params) -> tuple[tuple[Array, Array], None]:
        params = fsdp.gather(shards, of_block, FSDP, **gathering)
        x, balance = state
        drop = partial(dropout, key=params["key"], positions=positions, rate=config.dropout)
        normed = tp.rms_norm(params["norm_1"], x, MODEL)
        mixed_heads = tp.attention(params["attention"], normed, MODEL, **where, **options)
        x = x + drop(mixed_heads, site=1)
        normed = tp.rms_norm(params["norm_2"], x, MODEL)
        y, loss = mixed(params["mlp"], normed)
        return (x + drop(y, site=2), balance + loss), None

    ends = {name: part for name, part in params.items() if name != "blocks"}
    ends = fsdp.gather(ends, {name: specs[name] for name in ends}, FSDP, **gathering)
    # A key for each layer travels with its parameters; without dropout it is None.
    keys = None if key is None else jax.random.split(key, config.layers)
    blocks = {**params["blocks"], "key": keys}
    block_specs = {**specs["blocks"], "key": None if keys is None else P()}
    of_block = jax.tree.map(lambda spec: P(*spec[1:]), block_specs)  # without that of layers

    x = tp.embed(ends["embed"], tokens[:, own], MODEL, **options)  # [b, s/c/n, d]
    x = dropout(x, key, positions, 0, config.dropout)
    state = x, lax.pcast(jnp.zeros(()), TOKENS, to="varying")
    # A block keeps only its operands for the gradient, and gathers its parameters again.
    (x, balance), _ = lax.scan(jax.checkpoint(block), state, blocks)
    x = tp.rms_norm(ends["norm"], x, MODEL)
    return tp.unembed(ends["unembed"], x, MODEL, **options), balance


def losses(
    config: Config, specs: Params, params: Params, batch: Array, *drop: Array
) -> tuple[Array, Array]:
    """-log of the probability of the token after each of `own_positions`; and `logits`' balance.

    `batch: [b, s+1] -> [b, s/c]`
    """
    scores, balance = logits(config, specs, params, batch[:, :-1], *drop)
    labels = batch[:, 1:][:, own_positions(batch.shape[1] - 1)]
    return tp.cross_entropy(scores, labels, MODEL, algorithm=config.algorithm), balance
