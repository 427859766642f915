"""`order="tree"`: the bits of layers and their gradients do not depend on the number of ranks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import assert_same, make_mesh, python

import ringcoll
from benchmarks.soak import models
from ringcoll import layers
from ringcoll.layers import fsdp, tensor_parallel

TREE = {"order": "tree", "leaves": 8}
RNG = np.random.default_rng(0)


#: `conftest.py` turns them off for older versions. Then attention in float32 differs.
WITH_FUSION_EMITTERS = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="XLA:CPU without its fusion emitters"
)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape, np.float32) * shape[-1] ** -0.5)


def same_on_all(program, in_specs, out, operands, sizes=(1, 2, 4, 8)):
    expected = None
    for n in sizes:
        mapped = jax.shard_map(program, mesh=make_mesh(n), in_specs=in_specs, out_specs=out)

        def run(*operands, mapped=mapped):
            y, pull_back = jax.vjp(mapped, *operands)
            return y, pull_back(jnp.cos(y))

        got = jax.jit(run)(*operands)
        expected = got if expected is None else expected
        jax.tree.map(assert_same, got, expected)


@pytest.mark.parametrize(
    ("own", "dtype"),
    [(jnp.float32, None), (jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)],
)
def test_batch_leaf_by_leaf_under_fsdp(own, dtype):
    params = {"up": normal(32, 64), "down": normal(64, 32), "bias": normal(64)}
    params = {name: p.astype(own) for name, p in params.items()}
    specs = {"up": P(None, "x"), "down": P("x"), "bias": P()}

    def loss(params, x):
        def of_leaf(whole, x):
            hidden = jnp.tanh(x.astype(whole["up"].dtype) @ whole["up"] + whole["bias"][None, None])
            return (hidden @ whole["down"]).astype(jnp.float32).sum()

        whole = fsdp.gather(params, specs, "x", dtype=dtype, order="tree")
        return ringcoll.psum(layers.by_leaves(of_leaf, whole, x, "x"), "x", order="tree")

    same_on_all(loss, (specs, P("x")), P(), (params, normal(16, 12, 32)))


@pytest.mark.parametrize("stacked", [False, True])
def test_kernels_under_fsdp(stacked):
    params = {"kernel": normal(2, 16, 16), "bias": normal(2, 16)}
    specs = {"kernel": P(None, None, "x"), "bias": P()}

    def block(layer, x):
        return x + jnp.tanh(x @ layer["kernel"] + layer["bias"][None])

    def linear(layer, x):
        y = fsdp.linear(layer, x, "x", **TREE)
        return x + layers.compiled_apart(jnp.tanh, y)

    def model(params, x):
        if stacked:
            return fsdp.scan_layers(block, params, x, specs, "x", **TREE)
        for i in range(2):
            x = linear({name: p[i] for name, p in params.items()}, x)
        return x

    same_on_all(model, (specs, P("x")), P("x"), (params, normal(8, 16)))


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        pytest.param(jnp.float32, (1, 4), marks=WITH_FUSION_EMITTERS),
        (jnp.bfloat16, (1, 8)),
        pytest.param(jnp.float32, (1, 2, 8), marks=[pytest.mark.exhaustive, WITH_FUSION_EMITTERS]),
    ],
)
def test_tensor_parallel_layers(dtype, sizes):
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
    same_on_all(block, (specs, P(None, "x")), P(None, "x"), (params, x), sizes)


def test_gradients_of_constant_cotangents():
    """XLA:CPU would add up constants as it compiles, and in another order."""
    params = {"kernel": normal(5, 24), "bias": normal(24)}
    specs = {"kernel": P(None, "x"), "bias": P("x")}
    x, cotangents = normal(3, 24, 5), normal(3, 24, 24)
    found = []
    for n in (1, 2, 8):
        mapped = jax.shard_map(
            lambda params, x: tensor_parallel.column_linear(params, x, "x", **TREE),
            mesh=make_mesh(n),
            in_specs=(specs, P(None, "x")),
            out_specs=P(None, None, "x"),
        )
        loss = lambda params, x, of=mapped: (of(params, x) * cotangents).sum()  # noqa: E731
        found.append(jax.jit(jax.grad(loss))(params, x))
    for of_ranks in found[1:]:
        jax.tree.map(assert_same, of_ranks, found[0])


def test_bias_of_no_tokens():
    params = {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}
    specs = {"kernel": P(None, "x"), "bias": P("x")}

    def linear(params, x):
        return tensor_parallel.column_linear(params, x, "x", **TREE)

    mesh, columns = make_mesh(2), P(None, None, "x")
    mapped = jax.shard_map(linear, mesh=mesh, in_specs=(specs, P(None, "x")), out_specs=columns)
    assert jax.eval_shape(mapped, params, jnp.ones((2, 0, 4))).shape == (2, 0, 8)


MODEL = models.RandomModel(
    number=0,
    kind="tensor",
    meshes=((1, 1), (1, 8)),
    leaves=8,
    dtype="float32",
    accumulate=None,
    batch=1,
    sequence=8,
    width=16,
    heads=8,
    groups=8,
    head=2,
    features=24,
    vocabulary=16,
    norm="layer_norm",
    halves=("attention", "gated_mlp"),
    bias=True,
    quickly=True,
)
SMALL = {"leaves": 2, "batch": 2, "halves": ("mlp",)}
MESHES = {
    "tensor": ((1, 1), (1, 2), (1, 4), (1, 8)),
    "replicated": ((1, 1), (1, 2), (1, 4), (1, 8)),
    "fsdp": ((1, 1), (2, 1), (4, 1), (8, 1)),
    "both": ((1, 1), (2, 2), (4, 2), (2, 4)),
}


def all_kinds():
    """Every kind of layer, with the dtypes in turn."""
    for i, (kind, meshes) in enumerate(MESHES.items()):
        leaves, dtype = 4 if kind == "both" else 8, ("float32", "bfloat16")[i % 2]
        of = {"kind": kind, "meshes": meshes, "dtype": dtype, "leaves": leaves, "batch": leaves}
        marks = [pytest.mark.exhaustive, WITH_FUSION_EMITTERS]
        yield pytest.param(of, marks=marks, id=f"{kind}-{dtype}-on-all-meshes")


@pytest.mark.parametrize(
    "of",
    [
        pytest.param({}, id="tensor", marks=WITH_FUSION_EMITTERS),
        pytest.param(
            {
                **SMALL,
                "kind": "replicated",
                "meshes": ((1, 1), (1, 4)),
                "leaves": 8,
                "dtype": "bfloat16",
                "accumulate": "float32",
            },
            id="replicated",
        ),
        pytest.param(
            {**SMALL, "kind": "both", "meshes": ((1, 1), (2, 2)), "dtype": "bfloat16"}, id="both"
        ),
        *all_kinds(),
    ],
)
def test_loss_and_gradients_of_a_language_model(of):
    wrong, _ = models.differing(replace(MODEL, **of), jax.devices())
    assert not wrong


DEFAULT_FLAGS = """
import functools, os
os.environ["XLA_FLAGS"] = ""
import jax, jax.numpy as jnp, numpy as np
from ringcoll import layers
x, *parts = np.random.default_rng(0).standard_normal((9, 2, 16, 32), np.float32)

def pulled_back(x, ct):
    norm = lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return jax.vjp(norm, x)[1](ct)[0]

def after_additions(call):
    return jax.jit(lambda x, parts: call(pulled_back, x, functools.reduce(jnp.add, parts)))

alone = jax.jit(pulled_back)(x, functools.reduce(jnp.add, parts))
fused = after_additions(lambda f, *operands: f(*operands))(x, parts)
apart = after_additions(layers.compiled_apart)(x, parts)
for name, found in (("fused", fused), ("apart", apart)):
    print(name, "differs:", bool((found != alone).any()))
"""


def test_a_formula_compiled_apart_is_as_in_any_program():
    """If this formula is fused with the additions before it, it adds features in another order."""
    run = python("-c", DEFAULT_FLAGS)
    printed = "fused differs: True\napart differs: False\n"
    assert printed in run.stdout, run.stdout + run.stderr[-2000:]


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
            lambda x: fsdp.gather({"w": x}, {"w": P("x")}, "x", fused=True, order="tree"),
            "order='tree' with fused=True.*; leave these out",
        ),
        (
            lambda x: layers.by_leaves(jnp.add, x, x, "x", leaves=6),
            "leaves=6 is not a power of two",
        ),
        (
            lambda x: fsdp.linear(jnp.ones((4, 2)), x, "x", replicas="x", order="tree"),
            "order='tree' with replicas='x', or a gathered kernel; shard the batch",
        ),
        (
            lambda x: fsdp.scan_layers(jnp.multiply, x, x, P(None, "x"), "x", order="tree"),
            r"scan_layers: a rank's batch is \(3, 4\), and it has 4 leaves",
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
