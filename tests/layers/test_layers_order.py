"""`order="tree"`: the bits of layers and their gradients do not depend on the number of ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import assert_same, make_mesh

import ringcoll
from ringcoll import layers
from ringcoll.layers import fsdp, tensor_parallel

TREE = {"order": "tree", "leaves": 8}
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape, np.float32) * shape[-1] ** -0.5)


def same_on_all(program, in_specs, out, operands, sizes):
    expected = None
    for n in sizes:
        mapped = jax.shard_map(program, mesh=make_mesh(n), in_specs=in_specs, out_specs=out)

        def run(*operands, mapped=mapped):
            y, pull_back = jax.vjp(mapped, *operands)
            return y, pull_back(jnp.cos(y))

        got = jax.jit(run)(*operands)
        expected = got if expected is None else expected
        jax.tree.map(assert_same, got, expected)


def test_batch_leaf_by_leaf_under_fsdp():
    params = {"up": normal(32, 64), "down": normal(64, 32), "bias": normal(64)}
    params = {name: p.astype(jnp.bfloat16) for name, p in params.items()}
    specs = {"up": P(None, "x"), "down": P("x"), "bias": P()}

    def loss(params, x):
        def of_leaf(whole, x):
            hidden = jnp.tanh(x.astype(whole["up"].dtype) @ whole["up"] + whole["bias"][None, None])
            return (hidden @ whole["down"]).astype(jnp.float32).sum()

        whole = fsdp.gather(params, specs, "x", dtype=jnp.float32, order="tree")
        return ringcoll.psum(layers.by_leaves(of_leaf, whole, x, "x"), "x", order="tree")

    same_on_all(loss, (specs, P("x")), P(), (params, normal(16, 12, 32)), (1, 8))


def test_tensor_parallel_layers():
    dtype = jnp.bfloat16
    shapes = {"query": (32, 8, 4), "key": (32, 8, 4), "value": (32, 8, 4), "out": (8, 4, 32)}
    shapes |= {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}
    params = {name: normal(*shape).astype(dtype) for name, shape in shapes.items()}
    params = {"layer": params, "norm": {"scale": 1 + normal(32)}}

    def block(params, x):
        own, options = params["layer"], {"axis_name": "x", **TREE}
        x = x + tensor_parallel.attention(
            own, tensor_parallel.rms_norm(params["norm"], x, **options), **options
        )
        return x + tensor_parallel.gated_mlp(own, x, **options)

    specs = tensor_parallel.partition_specs(params, "x")
    x = normal(2, 16, 32).astype(dtype)
    same_on_all(block, (specs, P(None, "x")), P(None, "x"), (params, x), (1, 4))


def test_gradients_of_what_a_formula_closes_over():
    x, w, numbers = normal(8), normal(8), jnp.arange(8)

    def loss(x, w):
        return layers.compiled_apart(lambda x, i: jnp.sum(x[i] * w), x, numbers[::-1])

    got = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    assert_same(got, (w[::-1], x[::-1]))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda x: fsdp.gather({"w": x}, {"w": P("x")}, "x", replicas="x", order="tree"),
            "order='tree' with replicas='x'.*; leave these out",
        ),
        (
            lambda x: layers.by_leaves(jnp.add, x, x, "x", leaves=6),
            "leaves=6 is not a power of two",
        ),
        (
            lambda x: fsdp.linear(jnp.ones((4, 2)), x, "x", replicas="x", order="tree"),
            "order='tree' with replicas='x'; shard the batch",
        ),
        (lambda x: layers.by_leaves(jnp.add, x, x, "x"), r"is \(3, 4\), and it has 4 leaves"),
        (
            lambda x: tensor_parallel.rms_norm({"scale": jnp.ones(4)}, x, "x", order="tree"),
            "3 tokens of the sequence on each rank are not divisible by 4 leaves",
        ),
    ],
)
def test_refused(call, words):
    mapped = jax.shard_map(call, mesh=make_mesh(2), in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(ValueError, match=words):
        mapped(jnp.ones((6, 4)))
