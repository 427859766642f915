"""Layers refuse bad calls before anything is sent; errors name the leaf and a cure."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import make_mesh

from ringcoll import layers
from ringcoll.layers import fsdp
from ringcoll.layers import tensor_parallel as tp

N = 4


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


X = ones(2, 3, 8)  # one rank's
HEADS = {"query": ones(8, 2, 4), "key": ones(8, 1, 4), "value": ones(8, 1, 4), "out": ones(2, 4, 8)}


def with_leaf(params, **leaves):
    return {**params, **leaves}


CALLS = {
    "features": (
        lambda: tp.column_linear(ones(6, 5), X, "x"),
        ValueError,
        "column_linear: x is (2, 3, 8), kernel is (6, 5); the last dimension of x and the first",
    ),
    "x of one dimension": (
        lambda: tp.column_linear(ones(8, 4), ones(8), "x"),
        ValueError,
        "column_linear: x is (8,)",
    ),
    "a vector": (lambda: tp.column_linear(ones(8), X, "x"), ValueError, "kernel is (8,)"),
    "a layer of other names": (
        lambda: tp.column_linear({"weight": ones(8, 5)}, X, "x"),
        KeyError,
        "no 'kernel' in the parameters (weight)",
    ),
    "an option that is none": (
        lambda: tp.column_linear(ones(8, 5), X, "x", sequence_parallel=False, algoritm="ring"),
        TypeError,
        "algoritm",
    ),
    "dtypes": (
        lambda: tp.mlp({"up": ones(8, 6, dtype=jnp.bfloat16), "down": ones(6, 8)}, X, "x"),
        TypeError,
        "mlp: x is float32, up is bfloat16; cast them to one dtype (fsdp.gather(..., dtype=)",
    ),
    "an order that is none": (
        lambda: tp.rms_norm({"scale": ones(8)}, X, "x", order="bogus"),
        ValueError,
        "rms_norm: order='bogus'; choose from None, 'tree'",
    ),
    "leaves that ranks do not divide": (
        lambda: fsdp.gather({"w": ones(8)}, {"w": P("x")}, "x", order="tree", leaves=2),
        ValueError,
        "fsdp.gather: leaves=2 are not divisible by 4 ranks; pass as many leaves as the most ranks",
    ),
    "an order of gradients with their wire": (
        lambda: fsdp.gather({"w": ones(8)}, {"w": P("x")}, "x", order="tree", gradient_wire="int8"),
        ValueError,
        "fsdp.gather: order='tree' with a wire: ranks round codes",
    ),
    "an order and a wire where nothing is gathered": (
        lambda: tp.column_linear(
            ones(8, 5), X, "x", sequence_parallel=False, order="tree", wire="int8"
        ),
        ValueError,
        "column_linear: order='tree' with a wire",
    ),
    "an order and a wire of an embedding": (
        lambda: tp.embed(
            {"embedding": ones(2, 8)},
            ones(2, 4, dtype=int),
            "x",
            order="tree",
            gradient_wire="int8",
        ),
        ValueError,
        "embed: order='tree' with a wire",
    ),
    "rows": (
        lambda: tp.row_linear(ones(6, 5), X, "x"),
        ValueError,
        "row_linear: x is (2, 3, 8), kernel is (6, 5)",
    ),
    "the sequence": (
        lambda: tp.row_linear(ones(8, 5), X, "x"),
        ValueError,
        "the sequence of 3 is not divisible by the 4 ranks of 'x'; pad it, or pass sequence_par",
    ),
    "grouped heads": (
        lambda: tp.attention(with_leaf(HEADS, query=ones(8, 3, 4), key=ones(8, 2, 4)), X, "x"),
        ValueError,
        "on a rank: query (8, 3, 4), key (8, 2, 4), value (8, 1, 4); keys must have as many heads",
    ),
    "heads of other sizes": (
        lambda: tp.attention(with_leaf(HEADS, query=ones(8, 2, 6)), X, "x"),
        ValueError,
        "keys must have as many heads as values, and heads of one width",
    ),
    "heads of keys that are not those of the model": (
        lambda: tp.attention(HEADS, X, "x", kv_heads=2),
        ValueError,
        "attention: kv_heads=2, and each of 4 ranks has 2 heads of queries and 1 of keys; pass",
    ),
    "heads of keys that ranks share, in an order": (
        lambda: tp.attention(HEADS, X, "x", order="tree", leaves=4),
        ValueError,
        "attention: order='tree', and several ranks share heads of keys; cut",
    ),
    "flat heads": (
        lambda: tp.attention(dict.fromkeys(HEADS, ones(8, 8)), X, "x"),
        ValueError,
        "pass x: [b, s, d] and kernels [d, heads, head_dim]",
    ),
    "odd heads": (
        lambda: tp.rotary(ones(3, 2, 5), jnp.arange(3)),
        ValueError,
        "heads of 5 dimensions have no pairs; use an even head_dim, or rotary_base=None",
    ),
    "tokens that are floats": (
        lambda: tp.embed({"embedding": ones(5, 8)}, ones(2, 4), "x"),
        TypeError,
        "embed: the tokens are of float32; pass integers",
    ),
    "labels of another shape": (
        lambda: tp.cross_entropy(X, jnp.zeros((3, 2), int), "x"),
        ValueError,
        "the labels are (3, 2), the logits (2, 3, 8); pass a label for each row",
    ),
    "a scale": (
        lambda: tp.rms_norm({"scale": ones(7)}, X, "x"),
        ValueError,
        "rms_norm: scale is (7,), x is (2, 3, 8)",
    ),
    "a bias": (
        lambda: tp.layer_norm({"scale": ones(8), "bias": ones(1)}, X, "x"),
        ValueError,
        "layer_norm: bias is (1,), x is",
    ),
    "an axis that is not there": (
        lambda: tp.column_linear(ones(8, 5), X, "model"),
        NameError,
        "unbound axis name: model; the axes here are 'x', 'y'",
    ),
    "to gather by a spec of another axis": (
        lambda: fsdp.gather({"w": X}, {"w": P("modle")}, "x"),
        ValueError,
        "names 'modle', no axis of the mesh; choose from 'x', 'y'",
    ),
    "to gather one of two axes": (
        lambda: fsdp.gather({"w": X}, {"w": P(("x", "y"))}, "x"),
        ValueError,
        "and the gather is over ('x',); pass axis_name as the spec has it",
    ),
    "to gather by no spec": (
        lambda: fsdp.gather({"w": X}, {"w": ("x",)}, "x"),
        TypeError,
        "fsdp.gather: the spec of w is ('x',); pass a jax.sharding.PartitionSpec",
    ),
    "to gather by another tree": (
        lambda: fsdp.gather({"w": X}, {"v": P("x")}, "x"),
        ValueError,
        "fsdp.gather: the specs do not match the parameters",
    ),
    "to gather by too long a spec": (
        lambda: fsdp.gather({"w": {"kernel": X}}, {"w": {"kernel": P(None, None, None, "x")}}, "x"),
        ValueError,
        "w/kernel has 3 dimensions, its spec ",
    ),
    "replicas over an axis that is not there": (
        lambda: fsdp.gather({"w": X}, {"w": P()}, "x", replicas="nope"),
        NameError,
        "unbound axis name: nope",
    ),
    "to gather integers": (
        lambda: fsdp.gather({"w": jnp.arange(4)}, {"w": P("x")}, "x"),
        TypeError,
        "shards it, and it is int32; leave this leaf whole",
    ),
    "to gather what is whole": (
        lambda: fsdp.gather({"w": X}, {"w": P("x")}, "x"),
        ValueError,
        "shards it, but it is the same on all ranks here; pass the specs that jax.shard_map has",
    ),
    "what has arrived, for another layer": (
        lambda: tp.column_linear(fsdp.Gathered(ones(8, 8), ones(8, 2)), X, "x"),
        TypeError,
        "kernel is a Gathered, no array; only fsdp.linear takes the results of fsdp.gather(",
    ),
    "a bias of another size": (
        lambda: tp.column_linear({"kernel": ones(8, 5), "bias": ones(1)}, X, "x"),
        ValueError,
        "column_linear: the bias is (1,), the result without it (2, 12, 5)",
    ),
    "no tokens": (
        lambda: tp.row_linear(ones(8, 5), ones(8), "x"),
        ValueError,
        "row_linear: x is (8,), kernel is (8, 5); the last dimensions of x must be those of the",
    ),
    "positions of a part": (
        lambda: tp.attention(HEADS, X, "x", positions=jnp.arange(3)),
        ValueError,
        "attention: positions are (3,), and the whole sequence has 12; pass [s] or [b, s]",
    ),
    "a kernel that is not sharded so": (
        lambda: fsdp.linear(ones(3, 5), X, "x"),
        ValueError,
        "fsdp.linear: x is (2, 3, 8), the kernel (3, 5) on each of 4 ranks; pass a kernel of",
    ),
    "layers of several lengths": (
        lambda: fsdp.scan_layers(
            min, {"a": ones(2, 3), "b": ones(3)}, X, {"a": P(), "b": P()}, "x"
        ),
        ValueError,
        "scan_layers: the leading dimensions of the leaves are [(2,), (3,)]; stack",
    ),
    "sharded layers": (
        lambda: fsdp.scan_layers(min, {"a": ones(2, 3)}, X, {"a": P("x")}, "x"),
        ValueError,
        "shards the dimension of layers; make specs with leading=1",
    ),
    "an axis of random numbers": (
        lambda: layers.fold_rng_over_axis(jax.random.key(0), "model"),
        NameError,
        "unbound axis name: model",
    ),
}


WHOLE, PART = {"w": ones(8)}, {"w": P("x")}
#: Every layer that needs its axes; `names` are the axes that it is given.
OF_AXES = {
    "column_linear": lambda names: tp.column_linear(ones(8, 5), X, names),
    "row_linear": lambda names: tp.row_linear(ones(8, 5), X, names, sequence_parallel=False),
    "mlp": lambda names: tp.mlp({"up": ones(8, 6), "down": ones(6, 8)}, X, names),
    "attention": lambda names: tp.attention(HEADS, X, names),
    "embed": lambda names: tp.embed({"embedding": ones(2, 8)}, ones(2, 4, dtype=int), names),
    "unembed": lambda names: tp.unembed({"unembedding": ones(8, 5)}, X, names),
    "cross_entropy": lambda names: tp.cross_entropy(X, ones(2, 3, dtype=int), names),
    "copied": lambda names: layers.copied(WHOLE, names),
    "by_leaves": lambda names: layers.by_leaves(max, WHOLE, X, names),
    "fold_rng_over_axis": lambda names: layers.fold_rng_over_axis(jax.random.key(0), names),
    "fsdp.gather": lambda names: fsdp.gather(WHOLE, PART, names),
    "fsdp.linear": lambda names: fsdp.linear(ones(8, 5), X, names),
    "scan_layers": lambda names: fsdp.scan_layers(min, WHOLE, X, {"w": P()}, names),
}


UNBOUND = NameError, "unbound axis name: nope; the axes here are 'x', 'y'"
UNHASHABLE = TypeError, "unhashable type: 'set'; pass a name, or a tuple of names"


@pytest.mark.parametrize(
    ("names", "kind", "words"),
    [("nope", *UNBOUND), (("x", "nope"), *UNBOUND), ({"x"}, *UNHASHABLE)],
    ids=["one", "two", "set"],
)
@pytest.mark.parametrize("name", OF_AXES)
def test_an_axis_that_is_not_bound_is_named_with_the_layer_and_the_cure(name, names, kind, words):
    def program():
        OF_AXES[name](names)

    mapped = jax.shard_map(program, mesh=make_mesh(N, 2), in_specs=(), out_specs=None)
    message = message_of(lambda: jax.eval_shape(mapped), kind)
    assert message == f"ringcoll.layers.{name}: axis_name={names!r}: {words}"


@pytest.mark.parametrize("name", ["fsdp.gather", "fsdp.linear", "scan_layers"])
def test_replicas_that_are_not_bound_are_named(name):
    def program():
        if name == "fsdp.gather":
            fsdp.gather(WHOLE, PART, "x", replicas="nope")
        elif name == "fsdp.linear":
            fsdp.linear(ones(8, 5), X, "x", replicas="nope")
        else:
            fsdp.scan_layers(min, WHOLE, X, {"w": P()}, "x", replicas="nope")

    mapped = jax.shard_map(program, mesh=make_mesh(N, 2), in_specs=(), out_specs=None)
    message = message_of(lambda: jax.eval_shape(mapped), NameError)
    assert message.startswith(f"ringcoll.layers.{name}: replicas='nope': unbound axis name: nope;")


def message_of(call, kind):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("name", CALLS)
def test_refused_in_words(name):
    call, kind, words = CALLS[name]

    def program():
        call()
        raise AssertionError("it was accepted")

    mesh = make_mesh(N, 2)
    mapped = jax.shard_map(program, mesh=mesh, in_specs=(), out_specs=P())
    message = message_of(lambda: jax.eval_shape(mapped), kind)
    assert words in message, message


LAYERS = {
    "column_linear": partial(tp.column_linear, ones(8, 5)),
    "row_linear": partial(tp.row_linear, ones(8, 5)),
    "row_linear, replicated": partial(tp.row_linear, ones(8, 5), sequence_parallel=False),
    "mlp": partial(tp.mlp, {"up": ones(8, 6), "down": ones(6, 8)}),
    "gated_mlp": partial(tp.gated_mlp, {"gate": ones(8, 6), "up": ones(8, 6), "down": ones(6, 8)}),
    "attention": partial(tp.attention, HEADS),
    "unembed": partial(tp.unembed, {"unembedding": ones(8, 5)}),
}
#: option: a value that is refused, and with what words.
BAD = {
    "algorithm": ("rign", ValueError, "no algorithm 'rign'"),
    "residuals": ("keep", ValueError, "residuals='keep'"),
    "precision": ("wide", ValueError, "Precision argument must be one of"),
    "preferred_element_type": ("broad", TypeError, "broad"),
    "accumulate_dtype": ("longer", TypeError, "accumulate_dtype='longer'"),
    "algoritm": ("ring", TypeError, "unexpected keyword argument 'algoritm'"),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("option", BAD)
def test_an_option_arrives_where_it_is_used(name, option):
    value, kind, words = BAD[option]
    mapped = jax.shard_map(
        lambda: LAYERS[name](jnp.ones((2, 4, 8)), "x", **{option: value}),
        mesh=make_mesh(N, 2),
        in_specs=(),
        out_specs=P("x"),
    )
    if option == "residuals" and name.startswith("row"):
        jax.eval_shape(mapped)  # a row_linear keeps its operands
        return
    message = message_of(lambda: jax.eval_shape(mapped), kind)
    assert words in message
    layer = name.partition(",")[0]
    assert message.startswith((f"ringcoll.layers.{layer}: ", f"{layer}() got an unexpected"))


PARAMS = {"attention": {"query": np.ones((8, 6, 4))}, "up": np.ones((8, 12))}


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            lambda mesh: fsdp.shard(PARAMS, tp.partition_specs(PARAMS, "x"), mesh),
            ValueError,
            "shard: attention/query: dimension 1 of its shape (8, 6, 4) is not divisible by the 4 "
            "ranks of 'x'; use a size that divides, fewer ranks, or",
        ),
        (
            lambda mesh: fsdp.shard(PARAMS, tp.partition_specs(PARAMS, "model"), mesh),
            ValueError,
            "names 'model', no axis of the mesh; choose from 'x', 'y'",
        ),
        (
            lambda mesh: fsdp.shard(PARAMS["up"], P("x", "x"), mesh),
            ValueError,
            "names an axis twice; name each axis once",
        ),
        (
            lambda mesh: fsdp.shard(PARAMS, {"up": P()}, mesh),
            ValueError,
            "shard: the specs do not match the parameters",
        ),
        (
            lambda mesh: fsdp.shard(PARAMS["up"], "x", mesh),
            TypeError,
            "is 'x'; pass a jax.sharding.PartitionSpec",
        ),
        (
            lambda mesh: fsdp.shard(PARAMS["up"], P("x")),
            ValueError,
            "shard: there is no mesh; pass mesh=, or jax.set_mesh",
        ),
        (
            lambda mesh: fsdp.specs(PARAMS, "model", mesh=mesh),
            ValueError,
            "fsdp.specs: axis_name is 'model', no axis of the mesh; choose from 'x', 'y'",
        ),
        (
            lambda mesh: fsdp.specs(PARAMS["up"], "x", mesh=mesh, base=P(None, "x")),
            ValueError,
            "base has it sharded over 'x' already",
        ),
        (
            lambda mesh: tp.partition_specs({"query": np.ones(8)}, "x"),
            ValueError,
            "query has 1 dimensions, and dimension -2 is to be sharded; heads need their own",
        ),
    ],
)
def test_specs_refused_in_words(call, kind, words):
    message = message_of(lambda: call(make_mesh(N, 2)), kind)
    assert words in message, message
