# %% [markdown]
"""
# A Flax transformer in four strategies

A transformer in Flax NNX, trained with optax: one model, and four ways to cut its parameters.

    python -m examples.tutorials.nnx_strategies

The model gives each dimension of a parameter a name: width (of the model), heads, features,
vocabulary. A strategy says which of these names are cut over which axis of the mesh. From both,
`nnx.get_partition_spec` makes the specs. With these specs the same training step runs in two ways:
by `jit`, where the compiler chooses what to send, and by `ringcoll.layers` in `shard_map`, which
take the model's state unchanged.

It needs `flax` and `optax`: `pip install -e ".[examples]"`.
"""

# %%
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringcoll import lax
from ringcoll.layers import fsdp
from ringcoll.layers import tensor_parallel as tp
from ringcoll.learn import Sent, make_mesh, place, sent, show, start

start(8)
LAYERS, WIDTH, HEADS, FEATURES, VOCABULARY = 2, 64, 8, 256, 32
BATCH, SEQUENCE, STEPS, RATE = 8, 16, 6, 0.1
RING = "bidirectional_ring"

# %% [markdown]
"""
## The model, and a name for each dimension

`kernel_metadata` stores the names with a parameter. These names are not axes of a mesh, so Flax
must not place parameters by them yet: `use_eager_sharding(False)`.
"""

# %%


def named(*names: str | None) -> dict[str, Any]:
    """The names of the dimensions of a parameter."""
    return {"out_sharding": names}


class MLP(nnx.Module):
    """Two linear layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        same: Any = {"use_bias": False, "rngs": rngs}
        self.up = nnx.Linear(WIDTH, FEATURES, kernel_metadata=named("width", "features"), **same)
        self.down = nnx.Linear(FEATURES, WIDTH, kernel_metadata=named("features", "width"), **same)

    def __call__(self, x: Array) -> Array:
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    """Attention and an MLP."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm_1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS,
            WIDTH,
            use_bias=False,
            decode=False,
            kernel_metadata=named("width", "heads", None),
            out_kernel_metadata=named("heads", None, "width"),
            rngs=rngs,
        )
        self.norm_2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mlp = MLP(rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.attention(self.norm_1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.mlp(self.norm_2(x))


class Transformer(nnx.Module):
    """Logits of the next token; the embedding also makes the logits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        names = named("vocabulary", "width")
        self.embed = nnx.Embed(VOCABULARY, WIDTH, embedding_metadata=names, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


with nnx.use_eager_sharding(False):
    definition, state = nnx.split(Transformer(nnx.Rngs(0)))
total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
print(f"{total} B of parameters")

# %% [markdown]
"""
## Four strategies

| strategy | mesh (data x model) | what is cut |
|---|---|---|
| data | 8 x 1 | nothing but the batch |
| tensor | 1 x 8 | heads, features, vocabulary |
| 2-D | 2 x 4 | the same over 4, and the batch over 2 |
| FSDP | 8 x 1 | the batch, and the width of every parameter |
"""

# %%


@dataclass(frozen=True)
class Strategy:
    """The sizes of the mesh, and `rules`: which axis cuts the dimensions of a name."""

    data: int
    model: int
    rules: dict[str, str]

    def specs(self) -> Any:
        """The specs of the state, by the names of its dimensions."""
        names = ("width", "heads", "features", "vocabulary")
        with nnx.logical_axis_rules([(name, self.rules.get(name)) for name in names]):
            return nnx.get_partition_spec(state)


TENSOR = dict.fromkeys(("heads", "features", "vocabulary"), "model")
STRATEGIES = {
    "data": Strategy(8, 1, {}),
    "tensor": Strategy(1, 8, TENSOR),
    "2-D": Strategy(2, 4, TENSOR),
    "FSDP": Strategy(8, 1, {"width": "data"}),
}
for name, of in STRATEGIES.items():
    up = of.specs()["blocks"][0]["mlp"]["up"]["kernel"].get_value()
    print(f"{name:7} spec of [width, features]: {up}")

# %% [markdown]
"""
## The loss, by the compiler and by ringcoll

The first loss is that of one device. `nnx.merge` makes the model from its state, and `jit` cuts the
work by the shardings of the operands. The second loss runs on a rank's shards. `fsdp.gather`
gathers the parameters that are cut over `data`, and its gradient sums over `data`. The layers of
`tensor_parallel` find their parameters in the state by name, multiply while activations travel
along `model`, and never hold all logits.
"""

# %%


def loss_whole(state: Any, tokens: Array) -> Array:
    """The mean of -log(probability) of every next token, `tokens: [b, s+1]`."""
    logits = nnx.merge(definition, state)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def loss_over(mesh: jax.sharding.Mesh, specs: Any) -> Callable[[Any, Array], Array]:
    """The same over a mesh."""
    ring: Any = {"algorithm": RING}

    def of_rank(state: Any, tokens: Array) -> Array:
        weights = fsdp.gather(state, specs, "data", **ring)
        x = tp.embed(weights["embed"], tokens[:, :-1], "model", **ring)  # [b/data, s/model, d]
        for block in weights["blocks"].values():
            normed = tp.rms_norm(block["norm_1"], x, "model")
            x = x + tp.attention(block["attention"], normed, "model", rotary_base=None, **ring)
            x = x + tp.mlp(block["mlp"], tp.rms_norm(block["norm_2"], x, "model"), "model", **ring)
        x = tp.rms_norm(weights["norm"], x, "model")
        table = {"unembedding": weights["embed"]["embedding"].T}
        logits = tp.unembed(table, x, "model", **ring)  # [b/data, s, v/model]
        loss = tp.cross_entropy(logits, tokens[:, 1:], "model", **ring)
        return lax.pmean(loss.mean(), "data", **ring)

    return jax.shard_map(of_rank, mesh=mesh, in_specs=(specs, P("data")), out_specs=P())


# %% [markdown]
"""
## Training

The text is easy: every token is the token before it plus a constant of its row. The step of
training is the same for both ways, and for one device: the loss, its gradient, and optax. An update
works element by element, so it sends nothing. The optimizer's state is sharded as the parameters
are.
"""

# %%
row = np.arange(BATCH)[:, None]
text = (5 * row + (1 + row % 3) * np.arange(SEQUENCE + 1)) % VOCABULARY
optimizer = optax.sgd(RATE, momentum=0.9)


def trained(
    loss: Callable[[Any, Array], Array], state: Any, tokens: Array
) -> tuple[np.ndarray, Any]:
    """The loss before each step, and the compiled step."""

    def step(state: Any, kept: Any, tokens: Array) -> tuple[Any, Any, Array]:
        value, gradient = jax.value_and_grad(loss)(state, tokens)
        updates, kept = optimizer.update(gradient, kept, state)
        return optax.apply_updates(state, updates), kept, value

    kept = optimizer.init(state)
    # The results keep the shardings of the operands; the compiler could choose others.
    places = jax.tree.map(lambda leaf: leaf.sharding, (state, kept))
    program = jax.jit(step, out_shardings=(*places, None)).lower(state, kept, tokens).compile()
    losses = []
    for _ in range(STEPS):
        state, kept, value = program(state, kept, tokens)
        losses.append(float(value))
    return np.array(losses), program


alone, _ = trained(loss_whole, state, jax.numpy.asarray(text))
print("one device:", *(f"{loss:.4f}" for loss in alone))

# %% [markdown]
"""
## Side by side

In float32 every way adds in its own order, so losses are equal except for rounding.
"""

# %%
ALLOWED = 1e-5


def placed(name: str) -> tuple[jax.sharding.Mesh, Any, tuple[Any, Array]]:
    """The mesh of a strategy, its specs, and the operands on the mesh."""
    of = STRATEGIES[name]
    mesh, specs = make_mesh(data=of.data, model=of.model), of.specs()
    return mesh, specs, (fsdp.shard(state, specs, mesh), place(mesh, text, P("data")))


def measured(
    name: str, way: str, loss: Callable[[Any, Array], Array], *operands: Any
) -> tuple[int, Sent]:
    """Train in one way; returns a device's bytes of temporaries, and what it sends in a step.

    Raises:
        AssertionError: the losses differ from those of one device.
    """
    losses, program = trained(loss, *operands)
    off = np.max(np.abs(losses - alone))
    print(f"{name:6} {way:8}", *(f"{loss:.4f}" for loss in losses), f" off by {off:.0e}")
    if not off < ALLOWED:
        raise AssertionError(f"{name}, {way}: the losses are {losses}, not {alone}")
    memory: Any = program.memory_analysis()
    return memory.temp_size_in_bytes, sent(program)


kinds, rows = {}, []
for name, of in STRATEGIES.items():
    mesh, specs, operands = placed(name)
    leaves = jax.tree.leaves(operands[0])
    kept = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    ways = {"jit": loss_whole, "ringcoll": loss_over(mesh, specs)}
    found = {way: measured(name, way, loss, *operands) for way, loss in ways.items()}
    temporaries = [memory for memory, _ in found.values()]
    bytes_sent = [f"{kind.bytes:.0f}" for _, kind in found.values()]
    rows.append([name, f"{of.data} x {of.model}", kept, *temporaries, *bytes_sent])
    kinds[name] = {way: kind for way, (_, kind) in found.items()}
heads = ["", "data\nx model", "\nparameters", "temporaries\nby jit", "\nringcoll"]
show("Compiled: bytes of a device", [*heads, "sent in a step\nby jit", "\nringcoll"], rows)
for name, sends in kinds.items():
    print(f"{name}:", *(f"{way} sends {kind}" for way, kind in sends.items()), sep="\n  ")

# %% [markdown]
"""
Under tensor parallelism and FSDP a device keeps an eighth of the parameters, and an eighth of the
optimizer's state. Data parallelism sends each gradient about twice. FSDP sends each parameter once
and each gradient once, which is as much. The bytes that tensor parallelism sends grow with the
batch and the sequence, not with the parameters.

The all-reduces in ringcoll's programs are JAX's own. They sum the gradients of norms, whose
parameters are whole on every rank.

By `jit`, FSDP sends far more. The compiler does not know that it should gather the parameters
before it uses them. So it also cuts the work along the width, and sends activations.

## Exercise 1: tell the compiler

Write the loss for `jit` so that FSDP gathers parameters before it uses them. One constraint is
enough. What does the program send then?
"""

# %% tags=["solution"]
mesh, _, operands = placed("FSDP")


def loss_gathered(state: Any, tokens: Array) -> Array:
    return loss_whole(jax.lax.with_sharding_constraint(state, NamedSharding(mesh, P())), tokens)


_, told = measured("FSDP", "jit told", loss_gathered, *operands)
print(f"{told.bytes:.0f} B: {told}")
assert told.bytes < 0.5 * kinds["FSDP"]["jit"].bytes

# %% [markdown]
"""
## Exercise 2: specs without names of dimensions

A model that you did not write may have no names of dimensions. But its parameters have names
(`query`, `up`), and shapes. Make the specs of the strategies "tensor" and "FSDP" from these alone,
with `tp.partition_specs` and `fsdp.specs`. Are they equal to those of `nnx.get_partition_spec`? If
not, how many bytes does a device keep?
"""


# %% tags=["solution"]
def bytes_kept(specs: Any, data: int, model: int) -> int:
    mesh = make_mesh(data=data, model=model)
    leaves = jax.tree.leaves(fsdp.shard(state, specs, mesh))
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


by_name = tp.partition_specs(state, "model")
assert jax.tree.leaves(by_name) == jax.tree.leaves(STRATEGIES["tensor"].specs())
by_size = fsdp.specs(state, "data", mesh=make_mesh(data=8))
up = by_size["blocks"][0]["mlp"]["up"]["kernel"].get_value()
print(f"tensor: the same; FSDP: [width, features] has {up}, which cuts the largest dimension")
assert bytes_kept(by_size, 8, 1) != bytes_kept(STRATEGIES["FSDP"].specs(), 8, 1)
