"""Layers refuse bad calls before anything is sent; errors name the leaf and a cure."""

import re
from functools import partial
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import make_mesh

import ringcoll
from ringcoll import layers
from ringcoll.layers import context_parallel as cp
from ringcoll.layers import expert_parallel as ep
from ringcoll.layers import fsdp
from ringcoll.layers import tensor_parallel as tp

N = 4


class Gated(NamedTuple):
    """A gated MLP in a pytree with another layer."""

    gate: Any
    up: Any
    down: Any
    norm: Any


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


X, EVEN = ones(2, 3, 8), ones(2, 4, 8)  # one rank's; a sequence that four ranks divide
HEADS = {"query": ones(8, 2, 4), "key": ones(8, 1, 4), "value": ones(8, 1, 4), "out": ones(2, 4, 8)}


def heads(kv_heads=None, positions=None, **leaves):
    """Attention of tensor-parallel heads, with something changed."""
    return tp.attention(HEADS | leaves, X, "x", kv_heads=kv_heads, positions=positions)


def moe(axis_name="x", top_k=2, **changed):
    """A mixture of eight experts over four ranks, with something changed."""
    own = {"gate": ones(2, 6, 5), "up": ones(2, 6, 5), "down": ones(2, 5, 6)}
    experts = {name: changed.pop(name, w) for name, w in own.items()}
    experts |= {name: changed.pop(name) for name in ("bias",) if name in changed}
    x, router = changed.pop("x", ones(7, 6)), changed.pop("router", ones(6, 8))
    return ep.moe(x, router, experts, axis_name, top_k=top_k, **changed)


Q, K = ones(1, 4, 4, 2), ones(1, 4, 2, 2)


def attend(q=Q, k=K, v=K, **changed):
    """Attention over four ranks, with something changed."""
    return cp.attention(
        q, k, v, **{"axis_name": "x", "causal": True, "algorithm": "ring"} | changed
    )


#: What a layer does not use, and what it does.
UNUSED = {
    "mlp: it does not use 'gate'; pass only up, down": lambda: tp.mlp(
        dict.fromkeys(("gate", "up", "down"), ones(8, 8)), EVEN, "x"
    ),
    "gated_mlp: it does not use 'norm/scale'; pass only gate, up": lambda: tp.gated_mlp(
        Gated(*[ones(8, 8)] * 3, {"scale": ones(8)}), EVEN, "x"
    ),
    "mlp: it does not use 'scale'; pass only kernel, bias": lambda: tp.mlp(
        {"up": {"kernel": ones(8, 8), "scale": ones(8)}, "down": ones(8, 8)}, EVEN, "x"
    ),
    "column_linear: it does not use 'lora/a'": lambda: tp.column_linear(
        {"kernel": ones(8, 5), "lora": {"a": ones(8, 1)}}, X, "x"
    ),
    "row_linear: it does not use 'codes'": lambda: tp.row_linear(
        {"kernel": ones(8, 5), "codes": ones(8, 5, dtype=jnp.int8)}, EVEN, "x"
    ),
    "attention: it does not use 'query_norm'; pass only query, key, value, out": lambda: heads(
        query_norm=ones(4)
    ),
    "embed: it does not use 'bias'": lambda: tp.embed(
        SimpleNamespace(embedding=ones(2, 8), bias=ones(8)), ones(2, 4, dtype=int), "x"
    ),
    "unembed: it does not use 'bias'": lambda: tp.unembed(
        {"unembedding": ones(8, 5), "bias": ones(5)}, X, "x"
    ),
    "rms_norm: it does not use 'bias'": lambda: tp.rms_norm(
        {"scale": ones(8), "bias": ones(8)}, X, "x"
    ),
    "layer_norm: it does not use 'bais'; pass only scale, bias": lambda: tp.layer_norm(
        {"scale": ones(8), "bais": ones(8)}, X, "x"
    ),
    "fsdp.linear: it does not use 'scale'": lambda: fsdp.linear(
        {"kernel": ones(8, 5), "scale": ones(5)}, X, "x"
    ),
    "it does not use 'bias'": lambda: moe(bias=ones(2, 5)),
}
PARAMS = {"attention": {"query": np.ones((8, 6, 4))}, "up": np.ones((8, 12))}
WHOLE = {"w": ones(8)}
MESH = make_mesh(N, 2)

#: For each error: a part of its message, and a call that raises it.
CALLS = {
    ValueError: {
        "x is (2, 3, 8), kernel is (6, 5); the": lambda: tp.column_linear(ones(6, 5), X, "x"),
        "column_linear: x is (8,); give": lambda: tp.column_linear(ones(8, 4), ones(8), "x"),
        "kernel is (8,)": lambda: tp.column_linear(ones(8), X, "x"),
        "row_linear: x is (2, 3, 8), kernel": lambda: tp.row_linear(ones(6, 5), X, "x"),
        "row_linear: x is (8,), kernel is (8, 5)": lambda: tp.row_linear(ones(8, 5), ones(8), "x"),
        "3 is not divisible by the 4 ranks of 'x'": lambda: tp.row_linear(ones(8, 5), X, "x"),
        "the bias is (1,), the result without it (2, 12, 5)": lambda: tp.column_linear(
            {"kernel": ones(8, 5), "bias": ones(1)}, X, "x"
        ),
        "query (8, 3, 4), key (8, 2, 4), value (8, 1, 4)": lambda: heads(
            query=ones(8, 3, 4), key=ones(8, 2, 4)
        ),
        "and heads of one width": lambda: heads(query=ones(8, 2, 6)),
        "kv_heads=2, and each of 4 ranks has 2 heads": lambda: heads(kv_heads=2),
        "pass kv_heads= of the whole model; a rank has all": lambda: heads(
            key=ones(8, 2, 4), value=ones(8, 2, 4), kv_heads=3
        ),
        "pass x: [b, s, d] and kernels [d, heads, head_dim]": lambda: heads(
            **dict.fromkeys(HEADS, ones(8, 8))
        ),
        "positions are (3,), and the whole": lambda: heads(positions=jnp.arange(3)),
        "heads of 5 dimensions": lambda: tp.rotary(ones(3, 2, 5), jnp.arange(3)),
        "(3, 2), the logits (2, 3, 8)": lambda: tp.cross_entropy(X, ones(3, 2, dtype=int), "x"),
        "scale is (7,), x is (2, 3, 8)": lambda: tp.rms_norm({"scale": ones(7)}, X, "x"),
        "layer_norm: bias is (1,)": lambda: tp.layer_norm(
            {"scale": ones(8), "bias": ones(1)}, X, "x"
        ),
        "its spec P('modle',) names": lambda: fsdp.gather({"w": X}, {"w": P("modle")}, "x"),
        "and the gather is over ('x',)": lambda: fsdp.gather({"w": X}, {"w": P(("x", "y"))}, "x"),
        "specs do not match the": lambda: fsdp.gather({"w": X}, {"v": P("x")}, "x"),
        "w/kernel has 3 dimensions, its spec ": lambda: fsdp.gather(
            {"w": {"kernel": X}}, {"w": {"kernel": P(None, None, None, "x")}}, "x"
        ),
        "but it is the same on all ranks here": lambda: fsdp.gather({"w": X}, {"w": P("x")}, "x"),
        "the kernel (3, 5) on each of 4": lambda: fsdp.linear(ones(3, 5), X, "x"),
        "x is [7, 6], the router [5, 8]; pass x: [..., t, d]": lambda: moe(router=ones(5, 8)),
        "x is [6]": lambda: moe(x=ones(6)),
        "7 experts are not divisible by the 4 ranks": lambda: moe(router=ones(6, 7)),
        "top_k=9 of 8 experts; pass 1 to 8": lambda: moe(top_k=9),
        "top_k=0": lambda: moe(top_k=0),
        "max_send=0; pass 1 or more, or None": lambda: moe(max_send=0),
        "algorithm='rings'; choose from auto, gather": lambda: moe(algorithm="rings"),
        "gate [8, 6, 5]": lambda: moe(gate=ones(8, 6, 5)),
        "a rank has 8 experts, not 2 (8 over 4 ranks)": lambda: moe(
            gate=ones(8, 6, 5), up=ones(8, 6, 5), down=ones(8, 5, 6)
        ),
        "down: [experts, f, d]": lambda: moe(down=ones(2, 6, 5)),
        "x has 6 features, and the experts take 3": lambda: moe(
            gate=ones(2, 3, 5), up=ones(2, 3, 5), down=ones(2, 5, 3)
        ),
        "name each axis once": lambda: moe(axis_name=("x", "x")),
        "pass [batch, sequence, heads, width]": lambda: attend(Q[0]),
        "batch and sequence must be the same on a rank": lambda: attend(k=K[:, :3]),
        "multiple of those of keys": lambda: attend(Q[:, :, :3]),
        "of one width": lambda: attend(k=K[..., :1]),
        "layout='spiral'; choose from contiguous, zigzag": lambda: attend(layout="spiral"),
        "layout=['zigzag']; choose from": lambda: attend(layout=["zigzag"]),
        "to a multiple of 8": lambda: attend(Q[:, :3], K[:, :3], K[:, :3], layout="zigzag"),
        "pass 1 or more, or None": lambda: attend(window=0),
        "the kernel returned [2, 4, 2, 1], [2, 4, 2]; of [2, 4, 2, 2], return": lambda: attend(
            kernel=lambda q, k, v, causal: (v[..., :1] + q[..., :1], q[..., 0])
        ),
        "segment_ids are [1, 3]; pass [1, 4]": lambda: attend(segment_ids=ones(1, 3, dtype=int)),
        "'rings'": lambda: attend(algorithm="rings"),
        "for 1 axes; pass one for each axis": lambda: attend(algorithm=("ring", "lax")),
        "name one gather, and 'ulysses'": lambda: attend(
            axis_name=("x", "y"), algorithm=("ring", "lax")
        ),
        "a Table is only for collectives": lambda: attend(algorithm=ringcoll.Table(())),
        "4 heads of queries and 2 of keys over 4 ranks": lambda: attend(algorithm="ulysses"),
        "position_ids(axis_name='x', length=3": lambda: cp.position_ids("x", 3, "zigzag"),
        "choose from contiguous": lambda: cp.arrange(ones(2, 8), 4, "spiral"),
        "to a multiple of 4": lambda: cp.restore(ones(2, 6), 4, "contiguous"),
        "4 positions over n=4 ranks": lambda: cp.arrange(ones(2, 4), 4, "zigzag"),
        "dim=2 of 2 dimensions": lambda: cp.restore(ones(2, 8), 4, "zigzag", 2),
        "n=0": lambda: cp.arrange(ones(2, 8), 0, "zigzag"),
        "attention/query: dimension 1 of its shape (8, 6, 4) is not": lambda: fsdp.shard(
            PARAMS, tp.partition_specs(PARAMS, "x"), MESH
        ),
        "names 'model', no axis of the mesh; choose from 'x', 'y'": lambda: fsdp.shard(
            PARAMS, tp.partition_specs(PARAMS, "model"), MESH
        ),
        "names an axis twice": lambda: fsdp.shard(PARAMS["up"], P("x", "x"), MESH),
        "shard: the specs do not match the": lambda: fsdp.shard(PARAMS, {"up": P()}, MESH),
        "axis_name is 'model', no axis of the mesh": lambda: fsdp.specs(PARAMS, "model", mesh=MESH),
        "base has it sharded over 'x' already": lambda: fsdp.specs(
            PARAMS["up"], "x", mesh=MESH, base=P(None, "x")
        ),
        "up has 2 dimensions, and dim": lambda: ep.partition_specs({"up": np.ones((6, 5))}, "x"),
        **UNUSED,
        "and dimension -2 is to be sharded": lambda: tp.partition_specs({"query": np.ones(8)}, "x"),
    },
    KeyError: {
        "parameters (weight)": lambda: tp.column_linear({"weight": ones(8, 5)}, X, "x"),
        "no 'scale' in the parameters (bias)": lambda: tp.rms_norm({"bias": ones(8)}, X, "x"),
    },
    TypeError: {
        "mlp: x is float32, up is bfloat16; cast them to one dtype": lambda: tp.mlp(
            {"up": ones(8, 6, dtype=jnp.bfloat16), "down": ones(6, 8)}, X, "x"
        ),
        "the tokens are of float32": lambda: tp.embed({"embedding": ones(5, 8)}, ones(2, 4), "x"),
        "the spec of w is ('x',); pass": lambda: fsdp.gather({"w": X}, {"w": ("x",)}, "x"),
        "it is int32; leave this": lambda: fsdp.gather({"w": jnp.arange(4)}, {"w": P("x")}, "x"),
        "top_k=1.5 is not an integer": lambda: moe(top_k=1.5),
        "gate is float32": lambda: moe(x=ones(7, 6, dtype=jnp.bfloat16)),
        "x is int32; pass real floats": lambda: moe(x=ones(7, 6, dtype=int)),
        "router is float8_e5m2": lambda: moe(router=ones(6, 8, dtype=jnp.float8_e5m2)),
        "k is bfloat16, v is float32; pass": lambda: attend(k=K.astype(jnp.bfloat16)),
        "attention(q, k, v, axis_name='x'": lambda: attend("q"),
        "not an integer": lambda: attend(window=1.5),
        "scale='half' is not a number": lambda: attend(scale="half"),
        "router=None is not an array; pass an array": lambda: moe(router=None),
        "x is a float, no array; pass an array": lambda: tp.column_linear(PARAMS["up"], 1.0, "x"),
        "n=2.0 is not an integer; pass a Python int": lambda: cp.arrange(ones(2, 8), 2.0, "zigzag"),
        "causal is traced; pass True or False": lambda: attend(causal=jax.lax.axis_index("x") > 0),
        "pass a Python float, or": lambda: attend(scale=1.0 * jax.lax.axis_index("x")),
        "segment_ids are float32; pass integers": lambda: attend(segment_ids=ones(1, 4)),
        "is 'x'; pass a jax.sharding": lambda: fsdp.shard(PARAMS["up"], "x", MESH),
    },
    NameError: {
        "linear: replicas='nope'": lambda: fsdp.linear(ones(8, 5), X, "x", replicas="nope"),
        "gather: replicas='nope': unbound axis name: nope": lambda: fsdp.gather(
            WHOLE, {"w": P()}, "x", replicas="nope"
        ),
        "layers.expert_parallel.moe(x, router, experts, a": lambda: moe(axis_name="z"),
        "z": lambda: attend(axis_name="z"),
    },
}


@pytest.mark.parametrize(
    ("kind", "words"), [(kind, words) for kind, calls in CALLS.items() for words in calls]
)
def test_refused_in_words(kind, words):
    def program():
        CALLS[kind][words]()
        raise AssertionError("it was accepted")

    message = message_of(program, kind)
    assert words in message, message
    resolve_name(re.split(r"[:(]", message.strip('"'))[0])  # a path that exists


def message_of(program, kind):
    mapped = jax.shard_map(program, mesh=MESH, in_specs=(), out_specs=P("x"))
    with pytest.raises(kind) as caught:
        jax.eval_shape(mapped)
    return str(caught.value)


#: Layers that take the options of a matmul, and those that only need their axes.
LINEAR = {
    "column_linear": partial(tp.column_linear, ones(8, 5), EVEN),
    "row_linear": partial(tp.row_linear, ones(8, 5), EVEN),
    "row_linear, replicated": partial(tp.row_linear, ones(8, 5), EVEN, sequence_parallel=False),
    "mlp": partial(tp.mlp, {"up": ones(8, 6), "down": ones(6, 8)}, EVEN),
    "gated_mlp": partial(tp.gated_mlp, dict.fromkeys(("gate", "up", "down"), ones(8, 8)), EVEN),
    "attention": partial(tp.attention, HEADS, EVEN),
    "unembed": partial(tp.unembed, {"unembedding": ones(8, 5)}, EVEN),
}
OF_AXES = {f"tensor_parallel.{name}": call for name, call in LINEAR.items()} | {
    "tensor_parallel.embed": partial(tp.embed, {"embedding": ones(2, 8)}, ones(2, 4, dtype=int)),
    "tensor_parallel.cross_entropy": partial(tp.cross_entropy, X, ones(2, 3, dtype=int)),
    "copied": partial(layers.copied, WHOLE),
    "fold_rng_over_axis": partial(layers.fold_rng_over_axis, jax.random.key(0)),
    "fsdp.gather": partial(fsdp.gather, WHOLE, {"w": P("x")}),
    "fsdp.linear": partial(fsdp.linear, ones(8, 5), X),
}


@pytest.mark.parametrize(
    ("names", "kind", "words"),
    [
        (("x", "nope"), NameError, "unbound axis name: nope; the axes here are 'x', 'y'"),
        ({"x"}, TypeError, "unhashable type: 'set'; the axes here are 'x', 'y'"),
    ],
    ids=["two", "set"],
)
@pytest.mark.parametrize("name", OF_AXES)
def test_an_axis_that_is_not_bound_is_named_with_the_layer_and_the_cure(name, names, kind, words):
    message = message_of(lambda: OF_AXES[name](names), kind)
    layer = name.partition(",")[0]
    assert message == f"ringcoll.layers.{layer}: axis_name={names!r}: {words}"


#: option: a value that is refused, and with what words.
BAD = {
    "algorithm": ("rign", ValueError, "no algorithm 'rign'"),
    "residuals": ("keep", ValueError, "residuals='keep'"),
    "precision": ("wide", ValueError, "Precision argument must be one of"),
    "preferred_element_type": ("broad", TypeError, "broad"),
    "accumulate_dtype": ("longer", TypeError, "accumulate_dtype='longer'"),
}
ARRIVING = [  # a row_linear keeps its operands
    (name, option)
    for name in LINEAR
    for option in BAD
    if not (option == "residuals" and name.startswith("row"))
]


@pytest.mark.parametrize(("name", "option"), ARRIVING)
def test_an_option_arrives_where_it_is_used(name, option):
    value, kind, words = BAD[option]
    message = message_of(lambda: LINEAR[name]("x", **{option: value}), kind)
    assert words in message
    assert message.startswith(f"ringcoll.layers.tensor_parallel.{name.partition(',')[0]}: ")


def theirs(*_, **__):
    raise ValueError("theirs")


#: Calls of a function of the user that raises.
OF_USERS = {
    "kernel of attention": partial(attend, kernel=theirs),
    "activation of moe": partial(moe, activation=theirs),
    "kernel of moe": partial(moe, kernel=theirs, algorithm="ring"),
    "attend of heads": partial(tp.attention, HEADS, EVEN, "x", attend=theirs),
}


@pytest.mark.parametrize("name", OF_USERS)
def test_what_a_function_of_the_user_raises_is_not_changed(name):
    assert message_of(OF_USERS[name], ValueError) == "theirs"


@pytest.mark.parametrize("kernel", [None, lambda rows, weights, sizes: rows @ weights[0]])
def test_experts_are_refused_beside_an_explicit_axis(kernel):
    """With JAX's ragged_dot, or with tokens that are sharded over it."""
    mesh = make_mesh(N, 2, axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh):
        call = partial(jax.shard_map, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
        x = jax.device_put(ones(8 * N, 6), P(("x", "y")) if kernel else P("x"))
        with pytest.raises(NotImplementedError, match=r"moe\(x.*give jax.shard_map\(axis_names=\)"):
            jax.eval_shape(call(lambda x: moe(x=x, kernel=kernel).output), x)


def test_there_must_be_a_mesh():
    with pytest.raises(ValueError, match=r"shard: there is no mesh; pass mesh=, or"):
        fsdp.shard(PARAMS["up"], P("x"))
