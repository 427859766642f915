"""A training step of a decoder in plain JAX: FSDP and tensor parallelism by shardings alone.

    python -m examples.decoder_step  trains a tiny one on 8 CPU devices

It uses nothing of ringcoll. `python -m benchmarks steps` compiles it at sizes that others have run.

- Weights and Adam's moments are float32, and sharded over the axes fsdp and tensor. `jax.jit` then
  gathers the weights of a layer, in bfloat16, over fsdp, and activations over tensor.
- The layers are one `lax.scan`. `jax.checkpoint` says what is kept of a layer for its gradient:
  nothing, its products, or tensors by name, each on the chip or on the host.
- On TPUs attention is JAX's splash kernel in a `jax.shard_map`; elsewhere it is plain.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples import text

FSDP, TENSOR = AXES = ("fsdp", "tensor")
HOST = {"offload_src": "device", "offload_dst": "pinned_host"}
#: What to keep of a layer for its gradient: its products.
POLICIES = {
    "minimal": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "minimal_on_host": jax.checkpoint_policies.offload_dot_with_no_batch_dims(**HOST),
}
#: Of activations: `[b, s, d]` or `[b, s, f]`, and heads `[b, h, s, k]`; of a weight into a layer.
FEATURES, HEADS, INTO = P(FSDP, None, TENSOR), P(FSDP, TENSOR), P(None, FSDP, TENSOR)
JOINED = P(None, FSDP, None, TENSOR)

Params = dict[str, Any]
State = tuple[Params, Params, Params, Array]  # weights, Adam's two moments, and steps so far


@dataclass(frozen=True)
class Sizes:
    """A decoder, and how to train it."""

    layers: int
    width: int
    heads: int  # of queries
    key_heads: int  # of keys, and of values
    head: int  # the size of one
    features: int  # inside an MLP
    vocabulary: int
    sequence: int
    rows: int  # of a batch, for each device
    # Attention, of normed heads, and an MLP without a gate read the same; the embedding is tied.
    parallel: bool = False
    joined: bool = False  # one product for queries, keys and values, one for gate and up
    remat: str = "named"  # a policy of `POLICIES`, or that of the next two fields
    # What to keep there for the gradient, of "input", "query", "key", "value", "context" and "out";
    # everything else is computed again.
    on_chip: tuple[str, ...] = ()
    on_host: tuple[str, ...] = ()
    block: int = 512  # the queries, and the keys, that a splash kernel takes at a time
    fused: bool = False  # one kernel computes all gradients of attention
    parts: int = 1  # of a sequence: the logits of one part exist at a time
    master: str = "float32"  # the dtype of the weights that are kept
    moment: str = "float32"  # and that of Adam's first moment


def weights(sizes: Sizes, mesh: Mesh) -> Params:
    """The shape, dtype and sharding of each weight; those of layers are stacked."""
    n, d, f, v, k = sizes.layers, sizes.width, sizes.features, sizes.vocabulary, sizes.head

    def of(*shape: int, spec: P = INTO) -> Any:
        return jax.ShapeDtypeStruct(shape, sizes.master, sharding=NamedSharding(mesh, spec))

    heads = {"query": sizes.heads, "key": sizes.key_heads, "value": sizes.key_heads}
    layers = {name: of(n, d, h, k) for name, h in heads.items()}
    layers |= {"norm_1": of(n, d, spec=P()), "up": of(n, d, f)}
    layers["out"] = of(n, sizes.heads, k, d, spec=P(None, TENSOR, None, FSDP))
    layers["down"] = of(n, f, d, spec=P(None, TENSOR, FSDP))
    ends = {"embedding": of(v, d, spec=P(TENSOR, FSDP)), "norm": of(d, spec=P())}
    if sizes.parallel:
        return {**ends, "layers": layers | {f"norm_{x}": of(n, k, spec=P()) for x in heads}}
    layers |= {"norm_2": of(n, d, spec=P()), "gate": of(n, d, f)}
    if sizes.joined:
        layers = {name: layers[name] for name in ("norm_1", "norm_2", "out", "down")}
        layers["query_key_value"] = of(n, d, 3, sizes.key_heads, k, spec=JOINED)  # as many queries
        layers["gate_up"] = of(n, d, 2, f, spec=JOINED)
    return {**ends, "unembedding": of(d, v, spec=P(FSDP, TENSOR)), "layers": layers}


def init(like: State, seed: int) -> State:
    """Random weights of these shapes, those of norms one, and zeros."""
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(like[0]))))

    def random(x: Any) -> Array:
        ones = x.sharding.spec == P()
        return ones + (not ones) * 0.02 * jax.random.normal(next(keys), x.shape, x.dtype)

    return jax.tree.map(random, like[0]), *jax.tree.map(jnp.zeros_like, like[1:])


def rms_norm(x: Array, scale: Array) -> Array:
    """x over the root of the mean of its squares, times scale; in float32."""
    wide = x.astype("float32")
    wide *= lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def rotary(x: Array) -> Array:
    """Turns every pair (i, i + k/2) of `x: [b, h, s, k]` by an angle that grows with s."""
    half = x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(x.shape[2]), 5e5 ** -(jnp.arange(half) / half))
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    a, b = jnp.split(x.astype("float32"), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def attention(sizes: Sizes, mesh: Mesh, query: Array, key: Array, value: Array) -> Array:
    """Causal; `query: [b, h, s, k], key, value: [b, g, s, k] -> [b, h, s, k]`, g divides h."""
    if mesh.devices.flat[0].platform != "tpu":
        operands = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        return jnp.swapaxes(jax.nn.dot_product_attention(*operands, is_causal=True), 1, 2)

    n = min(sizes.block, sizes.sequence)
    dq = None if sizes.fused else n
    blocks = splash.BlockSizes(n, n, n, n, n, n, dq, dq, sizes.fused)
    causal = [splash.CausalMask((sizes.sequence,) * 2)] * (sizes.heads // mesh.shape[TENSOR])
    made = splash.make_splash_mha_single_device(splash.MultiHeadMask(causal), block_sizes=blocks)
    mapped = partial(jax.shard_map, mesh=mesh, in_specs=HEADS, out_specs=HEADS, check_vma=False)
    return mapped(jax.vmap(made))(query * sizes.head**-0.5, key, value)


def layer(sizes: Sizes, mesh: Mesh, x: Array, weights: Params) -> Array:
    """`x: [b, s, d]`, with attention and a gated MLP added."""
    features, heads = NamedSharding(mesh, FEATURES), NamedSharding(mesh, HEADS)
    placed = lax.with_sharding_constraint
    weights = {name: weight.astype(x.dtype) for name, weight in weights.items()}

    def products(x: Array, of: str, to: str, like: Any, *names: str) -> list[Array]:
        if sizes.joined:
            every = jnp.einsum(f"bsd,dc{of}->c{to}", x, weights["_".join(names)])
            return [placed(one, like) for one in every]
        return [placed(jnp.einsum(f"bsd,d{of}->{to}", x, weights[name]), like) for name in names]

    x = checkpoint_name(placed(x, features), "input")
    normed = rms_norm(x, weights["norm_1"])
    query, key, value = products(normed, "hk", "bhsk", heads, "query", "key", "value")
    query, key = checkpoint_name(rotary(query), "query"), checkpoint_name(rotary(key), "key")
    value = checkpoint_name(value, "value")
    if sizes.parallel:
        query, key = rms_norm(query, weights["norm_query"]), rms_norm(key, weights["norm_key"])
        value = rms_norm(value, weights["norm_value"])
    context = checkpoint_name(attention(sizes, mesh, query, key, value), "context")
    out = placed(jnp.einsum("bhsk,hkd->bsd", context, weights["out"]), features)
    x = x + checkpoint_name(out, "out")
    if sizes.parallel:
        hidden = placed(jax.nn.relu(normed @ weights["up"]), features)
    else:
        normed = rms_norm(x, weights["norm_2"])
        gate, up = products(normed, "f", "bsf", features, "gate", "up")
        hidden = jax.nn.silu(gate) * up
    return placed(x + hidden @ weights["down"], features)


def loss(sizes: Sizes, mesh: Mesh, params: Params, batch: Array) -> Array:
    """The mean of -log of the probability of each token but the first: `batch: [b, s+1]`."""
    tokens, labels = batch[:, :-1], batch[:, 1:]
    # A product, as its gradient is then: TPUs multiply faster than they gather and scatter.
    one_hot = partial(jax.nn.one_hot, num_classes=sizes.vocabulary, dtype="bfloat16")
    x = one_hot(tokens) @ params["embedding"].astype("bfloat16")
    policy = POLICIES.get(sizes.remat) or jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=sizes.on_chip, names_which_can_be_offloaded=sizes.on_host, **HOST
    )
    body = jax.checkpoint(partial(layer, sizes, mesh), policy=policy, prevent_cse=False)
    x, _ = lax.scan(lambda x, weights: (body(x, weights), None), x, params["layers"])
    unembedding = params["embedding"].T if sizes.parallel else params["unembedding"]
    x, unembedding = rms_norm(x, params["norm"]), unembedding.astype(x.dtype)

    def surprise(x: Array, labels: Array) -> Array:
        logits = lax.with_sharding_constraint(x @ unembedding, NamedSharding(mesh, FEATURES))
        logits = logits.astype("float32")
        right = jnp.sum(jnp.where(one_hot(labels) > 0, logits, 0), -1)
        return jax.nn.logsumexp(logits, -1) - right

    if sizes.parts == 1:
        return jnp.mean(surprise(x, labels))
    parts = tuple(jnp.stack(jnp.split(whole, sizes.parts, 1)) for whole in (x, labels))
    return jnp.mean(lax.map(lambda part: jax.checkpoint(surprise)(*part), parts))


def step(sizes: Sizes, mesh: Mesh, rate: float, state: State, batch: Array) -> tuple[State, Array]:
    """One step of AdamW; gradients are clipped to norm 1."""
    params, first, second, steps = state
    found, grads = jax.value_and_grad(partial(loss, sizes, mesh))(params, batch)
    squares = [jnp.sum(g.astype("float32") ** 2) for g in jax.tree.leaves(grads)]
    clip = 1 / jnp.maximum(1, sum(squares) ** 0.5)
    steps += 1

    def update(p: Array, g: Array, m: Array, v: Array) -> tuple[Array, Array, Array]:
        wide, g, new_m, new_v = (x.astype("float32") for x in (p, g * clip, m, v))
        new_m, new_v = 0.9 * new_m + 0.1 * g, 0.95 * new_v + 0.05 * g**2
        ahead = new_m / (1 - 0.9**steps) / (jnp.sqrt(new_v / (1 - 0.95**steps)) + 1e-8)
        wide -= rate * (ahead + 0.1 * wide)
        return wide.astype(p.dtype), new_m.astype(m.dtype), new_v.astype(v.dtype)

    updated = jax.tree.map(update, params, grads, first, second)
    return (*jax.tree.transpose(jax.tree.structure(params), None, updated), steps), found


def program(sizes: Sizes, mesh: Mesh, rate: float = 1e-3) -> tuple[jax.stages.Wrapped, tuple]:
    """The step, jitted for a mesh with automatic axes fsdp and tensor, and its operands' shapes."""
    alone, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(FSDP))
    params = weights(sizes, mesh)
    first = jax.tree.map(lambda x: x.update(dtype=sizes.moment), params)
    state = params, first, params, jax.ShapeDtypeStruct((), "int32", sharding=alone)
    shape = sizes.rows * mesh.size, sizes.sequence + 1
    out = jax.tree.map(lambda x: x.sharding, state), alone
    jitted = jax.jit(partial(step, sizes, mesh, rate), out_shardings=out, donate_argnums=0)
    return jitted, (state, jax.ShapeDtypeStruct(shape, "int32", sharding=rows))


def train(sizes: Sizes, mesh: Mesh, steps: int) -> list[float]:
    """The losses of some steps on `examples.text`."""
    jitted, (like, batch) = program(sizes, mesh)
    placed = jax.tree.map(lambda x: x.sharding, like)
    state = jax.jit(partial(init, like, 0), out_shardings=placed)()
    seen, losses = text.read()[0], []
    for number in range(steps):
        tokens = text.batch(seen, batch.shape[0], batch.shape[1], 0, number)
        state, found = jitted(state, jax.device_put(tokens, batch.sharding))
        losses.append(float(found))
    return losses


def main() -> int:
    """Train over 4 x 2 devices; 1 if the loss did not fall."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((4, 2), AXES, axis_types=(AxisType.Auto,) * 2)
    losses = train(Sizes(2, 64, 4, 2, 16, 128, text.VOCABULARY, 64, 2), mesh, 60)
    print(*(f"step {n}: loss {losses[n]:.3f}" for n in (0, 10, 20, 40, 59)), sep="\n")
    return int(losses[-1] > losses[0] - 1)


if __name__ == "__main__":
    sys.exit(main())
