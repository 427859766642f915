# %% [markdown]
"""
# Lesson 11: experts

A mixture of experts has many MLPs, and a router that chooses a few of them for each token. The
experts are sharded: each of n ranks has E/n of the E experts. Tokens are sharded too, so a token
and its experts are seldom on the same rank.

Here the tokens travel. Each rank's tokens travel around the ring as one block. The sum of the
block's results so far travels behind it. On each rank, the experts of that rank add their share:

    round        1              2              3         ...
    block r      at rank r+1    at rank r+2    at rank r+3
    its sum      starts here    arrives, +=    arrives, +=    ... one more hop: home

No token is dropped, however uneven the choice is. While a rank multiplies one block, the next block
arrives.
"""

# %%
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from ringcoll.layers import expert_parallel as ep
from ringcoll.learn import claim, messages, sent, start

start(8)
N, E, K, T, D, F = 8, 16, 2, 32, 16, 24  # ranks, experts, experts per token, tokens per rank
rng = np.random.default_rng(0)
shapes = {"gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}
experts = {
    name: jnp.asarray(rng.standard_normal(s, np.float32) / s[1] ** 0.5)
    for name, s in shapes.items()
}
router = jnp.asarray(rng.standard_normal((D, E), np.float32))
x = jnp.asarray(rng.standard_normal((N * T, D), np.float32))


def chosen_weights(x: Array, router: Array) -> Array:
    """The weight of each expert for each token, 0 if the token did not choose it: [t, E]."""
    likely = jax.nn.softmax(x @ router)
    least = lax.top_k(likely, K)[0][:, -1:]
    weights = jnp.where(likely >= least, likely, 0)
    return weights / weights.sum(-1, keepdims=True)


def mixed(x: Array, weights: Array, experts: dict[str, Array]) -> Array:
    """The weighted sum of the results of every expert on every token, which is wasteful."""
    gate, up = (jnp.einsum("td,edf->tef", x, experts[name]) for name in ("gate", "up"))
    results = jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * up, experts["down"])
    return jnp.einsum("te,ted->td", weights, results)


expected = mixed(x, chosen_weights(x, router), experts)
jax.set_mesh(jax.make_mesh((N,), ("x",)))
specs = ep.partition_specs(experts, "x")
parts, everywhere = ep.shard(experts, specs), jax.device_put(router, P())
tokens = jax.device_put(x, P("x"))
print(f"{E} experts on {N} ranks: up is {specs['up']}")

# %% [markdown]
"""
## Blocks go around
"""

# %%


@jax.jit
@jax.shard_map(in_specs=(P("x"), P(), specs), out_specs=P("x"))
def by_hand(x: Array, router: Array, experts: dict[str, Array]) -> Array:
    first = lax.axis_index("x") * (E // N)  # the first expert of this rank

    def share(block: Array, weights: Array) -> Array:
        return mixed(block, lax.dynamic_slice_in_dim(weights, first, E // N, 1), experts)

    def on(value: Array) -> Array:
        return lax.ppermute(value, "x", [(r, (r + 1) % N) for r in range(N)])

    weights = chosen_weights(x, router)
    total = share(x, weights)
    for _ in range(N - 1):
        x, weights, total = on(x), on(weights), on(total)
        total = total + share(x, weights)
    return on(total)


y = by_hand(tokens, everywhere, parts)
claim("a ring of blocks is the mixture", np.allclose(y, expected, atol=1e-5))


# %% [markdown]
"""
## The layer
"""

# %%


def layer(algorithm: str):
    @jax.jit
    @jax.shard_map(in_specs=(P("x"), P(), specs), out_specs=(P("x"), P()))
    def run(x: Array, router: Array, experts: dict[str, Array]) -> tuple[Array, Array]:
        y, loss = ep.moe(x, router, experts, "x", top_k=K, algorithm=algorithm)
        return y, loss

    return run


for algorithm in ("ring", "gather", "ragged_all_to_all"):
    y, loss = layer(algorithm)(tokens, everywhere, parts)
    claim(f"the layer by {algorithm!r} is the mixture too", np.allclose(y, expected, atol=1e-5))
count = messages(layer("ring").lower(tokens, everywhere, parts).compile())
print(f"by the ring, each rank sends {count} messages, and gathers the choices")
claim("7 for the blocks, 7 for their sums", count == 2 * (N - 1))

# %% [markdown]
"""
## A router that learns

If all tokens choose one expert, nothing is dropped, but one rank does all the work. The
load-balancing loss measures that: it is 1 if all experts are chosen equally often, and more if not.
Its gradient teaches the router.
"""

# %%
mean = x.mean(0)
uneven = jax.device_put(router.at[:, 0].add(8 * mean / jnp.linalg.norm(mean)), P())
run = layer("gather")
before = run(tokens, uneven, parts)[1]
teach = jax.jit(jax.grad(lambda router: run(tokens, router, parts)[1]))
for _ in range(20):
    uneven = uneven - 2.0 * teach(uneven)
after = run(tokens, uneven, parts)[1]
print(f"the load-balancing loss: {before:.3f}, after 20 steps {after:.3f}")
claim("the router has learnt to spread tokens", 1 < after < before)

# %% [markdown]
"""
## Exercise 1: the bytes of a ring

Compute from the shapes how many bytes a rank sends in `by_hand`. Each of the first N - 1 hops
carries tokens, weights and sums. The last hop carries only sums. Then compare with the compiled
program: `sent(program).permuted`.
"""

# %% tags=["solution"]
hops = (N - 1) * (T * D + T * E + T * D) + T * D
counted = sent(by_hand.lower(tokens, everywhere, parts).compile())
claim(f"{4 * hops} bytes of float32, as counted", counted.permuted == 4 * hops)

# %% [markdown]
"""
## Exercise 2: what others drop

Many mixtures bound the work: an expert takes at most 1.25 times its equal share of tokens, and
drops the rest. How many of the choices of all tokens would be dropped with the first router of this
lesson? How many with the router that sends too much to expert 0 (`router.at[:, 0].add(...)`)?
"""


# %% tags=["solution"]
def dropped(router: Array) -> int:
    chosen = (chosen_weights(x, router) > 0).sum(0)  # how many tokens chose each expert
    return int(jnp.maximum(chosen - 1.25 * N * T * K / E, 0).sum())


biased = router.at[:, 0].add(8 * mean / jnp.linalg.norm(mean))
lost = dropped(router), dropped(biased)
print(f"of {N * T * K} choices, {lost[0]} with the first router, {lost[1]} with the other")
claim("an uneven router loses more", 0 < lost[0] < lost[1])
