"""Tensor-parallel layers, and their gradients, against the same layers on one device.

In float64. A result is a chain of sums of at most T terms. Each sum is off by at most gamma(T) of
the sum of the magnitudes of its terms (see `test_matmul_gradients`), and a layer has at most eight
sums one after the other. The data and so the magnitudes are of order one. So a result may be off by
8 gamma(T) of its largest element, times 32 for what exponentials and quotients amplify.
"""

from dataclasses import dataclass
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import layer_references as reference
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import crossed, make_mesh, mostly_exhaustive
from test_matmul_gradients import gamma

from ringcoll.layers import tensor_parallel as tp

MESHES = {  # the last axis is that of the model; the batch is over the others
    "1": (1,),
    "2": (2,),
    "3": (3,),
    "4": (4,),
    "5": (5,),
    "8": (8,),
    "2x3": (2, 3),
    "3x1": (3, 1),
    "2x1x3": (2, 1, 3),
    "1x2x4": (1, 2, 4),
}
BATCH, D, K = 6, 6, 4


def sizes(n):
    """The sizes that are sharded over n ranks: small, and all different."""
    return {"s": 2 * n, "heads": 4 * n, "groups": 2 * n, "f": 3 * n, "v": 4 * n}


def parameters(n):
    """Of every layer, in the ordinary layout."""
    of, rng = sizes(n), np.random.default_rng(0)
    f, v, heads, groups = of["f"], of["v"], of["heads"], of["groups"]

    def normal(*shape, of=D):
        return rng.standard_normal(shape) / of**0.5

    def linear(*shape, of=D, bias):
        return {"kernel": normal(*shape, of=of), "bias": normal(*bias)}

    return {
        "up": linear(D, f, bias=(f,)),
        "down": linear(f, D, of=f, bias=(D,)),
        "mlp": {"up": linear(D, f, bias=(f,)), "down": linear(f, D, of=f, bias=(D,))},
        "gated_mlp": {"gate": normal(D, f), "up": normal(D, f), "down": normal(f, D, of=f)},
        "attention": {
            "query": linear(D, heads, K, bias=(heads, K)),
            "key": linear(D, groups, K, bias=(groups, K)),
            "value": normal(D, groups, K),
            "out": linear(heads, K, D, of=heads * K, bias=(D,)),
        },
        "embed": {"embedding": normal(v, D)},
        "unembed": {"unembedding": normal(D, v)},
        "rms_norm": {"scale": normal(D)},
        "layer_norm": {"scale": normal(D), "bias": normal(D)},
    }


def by_layers(params, tokens, labels, **options):
    """The result of every layer for embedded tokens."""
    attend = reference.attend  # float64; jax.nn.dot_product_attention has float32 scores
    vocabulary = {k: v for k, v in options.items() if k in ("sequence_parallel", "algorithm")}
    vocabulary["algorithm"] = "ring"
    x = tp.embed(params["embed"], tokens, "z", **vocabulary)
    groups = 2 * jax.lax.axis_size("z")
    attention = partial(tp.attention, attend=attend, kv_heads=groups, **options)
    middle = tp.column_linear(params["up"], x, "z", **options)
    logits = tp.unembed(params["unembed"], x, "z", **options)
    return {
        "embed": x,
        "linear": tp.row_linear(params["down"], middle, "z", **options),
        "mlp": tp.mlp(params["mlp"], x, "z", **options),
        "gated_mlp": tp.gated_mlp(params["gated_mlp"], x, "z", **options),
        "attention": attention(params["attention"], x, "z"),
        "rms_norm": tp.rms_norm(params["rms_norm"], x, "z"),
        "layer_norm": tp.layer_norm(params["layer_norm"], x, "z"),
        "cross_entropy": tp.cross_entropy(logits, labels, "z", algorithm="ring"),
    }


@jax.numpy_rank_promotion("allow")
def by_reference(params, tokens, labels):
    x = reference.embed(params["embed"], tokens)
    return {
        "embed": x,
        "linear": reference.linear(params["down"], reference.linear(params["up"], x)),
        "mlp": reference.mlp(params["mlp"], x),
        "gated_mlp": reference.gated_mlp(params["gated_mlp"], x),
        "attention": reference.attention(params["attention"], x),
        "rms_norm": reference.rms_norm(params["rms_norm"], x),
        "layer_norm": reference.layer_norm(params["layer_norm"], x),
        "cross_entropy": reference.cross_entropy(reference.unembed(params["unembed"], x), labels),
    }


def with_gradients(call):
    """The results, and the gradients of the sum of all their elements, each with its own weight."""

    def both(params, *data):
        def loss(params):
            y = call(params, *data)
            weights = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), y)
            terms = jax.tree.map(lambda x, w: (x * w).sum(), y, weights)
            return sum(jax.tree.leaves(terms)), y

        return jax.value_and_grad(loss, has_aux=True)(params)

    return jax.jit(both)


def over(mesh, params, call, sequence_parallel, check_vma):
    """`call` over a mesh, from whole operands to whole results."""
    *batch, model = mesh.axis_names
    assert model == "z"
    data = P(tuple(batch) or None)
    out = P(tuple(batch) or None, "z" if sequence_parallel else None)
    outs = {"embed linear mlp gated_mlp attention rms_norm layer_norm": out, "cross_entropy": data}
    specs = tp.partition_specs(params, "z")
    return jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(specs, data, data),
        out_specs={name: spec for names, spec in outs.items() for name in names.split()},
        check_vma=check_vma,
    )


def mesh_of(name):
    shape = MESHES[name]
    return make_mesh(*shape, names="xyz"[3 - len(shape) :])


def tokens_of(n):
    rng, of = np.random.default_rng(1), sizes(n)
    return [rng.integers(0, of["v"], (BATCH, of["s"])) for _ in range(2)]


def close(ours, theirs, terms):
    """Within the roundings that the head of this file counts."""

    def one(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=256 * gamma(terms) * max(1, np.abs(b).max()))

    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    jax.tree.map(one, ours, theirs)


@cache
def on_one_device(n):
    return with_gradients(by_reference)(parameters(n), *tokens_of(n))


MODES = [(True, True), (False, False), (True, False), (False, True)]
CASES = [  # on small meshes all modes
    (name, *mode) for name in MESHES for mode in (MODES if name in ("1", "3", "2x3") else MODES[:2])
]


#: On odd numbers of ranks, and beside another axis.
USUAL = [("1", True, True), ("3", True, True), ("2x3", False, False)]


@pytest.mark.parametrize(
    ("name", "sequence_parallel", "check_vma"),
    mostly_exhaustive(CASES, lambda *case: case in USUAL),
)
def test_layers_and_gradients_equal_those_of_one_device(name, sequence_parallel, check_vma):
    mesh, n = mesh_of(name), MESHES[name][-1]
    algorithm = ("ring", "two_ended", "bidirectional_ring")[n % 3]
    call = partial(by_layers, sequence_parallel=sequence_parallel, algorithm=algorithm)
    with jax.enable_x64(True):
        params, data = parameters(n), tokens_of(n)
        ours = with_gradients(over(mesh, params, call, sequence_parallel, check_vma))
        close(ours(params, *data), on_one_device(n), terms=BATCH * sizes(n)["s"] * D * 8)


def small(n=2):
    rng = np.random.default_rng(2)
    params = reference.Weights(
        rng.standard_normal((D, 4 * n)) / 3, rng.standard_normal((4 * n, D)) / 3
    )
    return params, rng.standard_normal((3, 2 * n, D))


@pytest.mark.parametrize(
    "sequence_parallel",
    mostly_exhaustive([True, False], lambda sequence_parallel: sequence_parallel),
)
def test_layers_under_transformations(sequence_parallel):
    """`vmap`, `remat`, `scan` and second derivatives, with parameters that are attributes."""
    mesh, spec = make_mesh(2, names="z"), P(None, "z" if sequence_parallel else None)
    options = {"sequence_parallel": sequence_parallel, "algorithm": "ring"}
    layer = partial(tp.mlp, axis_name="z", activation=jnp.sin, **options)

    def mapped(call, params):
        specs = tp.partition_specs(params, "z")
        return jax.shard_map(call, mesh=mesh, in_specs=(specs, spec), out_specs=spec)

    def plain(params, x):
        return reference.mlp(params._asdict(), x, jnp.sin)

    ways = {
        "vmap": lambda f: lambda params, x: jax.vmap(f, (None, 0))(params, x),
        "remat": jax.checkpoint,
        "scan": lambda f: (
            lambda params, x: jax.lax.scan(lambda x, _: (f(params, x), None), x, length=3)[0]
        ),
    }
    with jax.enable_x64(True):
        params, x = small()
        for way in ways.values():
            ours = with_gradients(mapped(way(layer), params))
            close(ours(params, x), with_gradients(way(plain))(params, x), terms=10_000)

        def curvature(call):
            """The derivative of a gradient along its own direction."""

            def loss(params):
                return (call(params, x) ** 2).sum()

            def along(params):
                gradient = jax.grad(loss)(params)
                return sum((leaf**2).sum() for leaf in jax.tree.leaves(gradient))

            return jax.jit(jax.grad(along))

        close(curvature(mapped(layer, params))(params), curvature(plain)(params), terms=10_000)


@pytest.mark.parametrize("shift", [200.0, -200.0])
def test_large_logits_have_a_loss_and_a_gradient(shift):
    """exp(200) overflows float32, and exp(-200) is 0."""
    logits = np.random.default_rng(4).standard_normal((3, 8)).astype(np.float32) + shift
    labels = np.array([0, 5, 7])
    ours = jax.shard_map(
        partial(tp.cross_entropy, axis_name="z", algorithm="ring"),
        mesh=make_mesh(4, names="z"),
        in_specs=(P(None, "z"), P()),
        out_specs=P(),
    )

    def with_slope(call):
        return jax.jit(jax.value_and_grad(lambda logits: call(logits, labels).sum()))(logits)

    for got, wanted in zip(with_slope(ours), with_slope(reference.cross_entropy), strict=True):
        # float32: a logit of 200 has roundings of 2**-16, which a loss of order one keeps
        np.testing.assert_allclose(got, wanted, rtol=0, atol=50 * 2.0**-16)


@jax.tree_util.register_dataclass
@dataclass
class Parameter:
    """A parameter as Flax has it: it holds an array, has its attributes, and can be made one."""

    value: jax.Array

    def __getattr__(self, name):
        return getattr(self.value, name)

    def __jax_array__(self):
        return jnp.asarray(self.value)


def test_attention_is_that_of_jax_and_takes_positions():
    """Against `jax.nn.dot_product_attention`, in float32, because its scores are float32."""
    mesh = make_mesh(2, names="z")
    params = jax.tree.map(lambda leaf: leaf.astype(np.float32), parameters(2)["attention"])
    x = np.random.default_rng(3).standard_normal((2, 4, D)).astype(np.float32)

    def program(params=params, **options):
        specs = tp.partition_specs(params, "z")
        call = partial(tp.attention, axis_name="z", **options)
        into = (specs, P(None, "z"))
        mapped = jax.shard_map(call, mesh=mesh, in_specs=into, out_specs=P(None, "z"))
        return jax.jit(mapped)(params, x)

    with jax.numpy_rank_promotion("allow"):
        for causal in (True, False):
            expected = jax.jit(partial(reference.attention, causal=causal))(params, x)
            # float32, scores of order one: a few hundred roundings of 2**-24
            np.testing.assert_allclose(program(causal=causal), expected, atol=500 * 2.0**-24)
    usual = program()
    assert np.array_equal(program(jax.tree.map(Parameter, params)), usual)
    assert np.array_equal(program(positions=np.arange(4)), usual)
    # Only differences of positions count: a shift rotates queries and keys alike.
    shifted = program(positions=np.arange(4)[None] + np.array([[7], [9]]))
    np.testing.assert_allclose(shifted, usual, atol=500 * 2.0**-24)
    assert not np.allclose(program(positions=np.arange(4)[::-1]), usual)
    assert not np.allclose(program(rotary_base=None), usual)


#: Heads of queries, heads of keys, the mesh, and the axis over which the heads of keys are cut.
SHARED = [
    (8, 2, (4,), None),
    (8, 2, (8,), None),
    (6, 3, (2,), None),
    (8, 1, (4,), None),
    (8, 4, (2, 2), "y"),
    (8, 4, (2, 2), None),
]


@pytest.mark.parametrize(("case", "mode"), crossed(SHARED, MODES))
def test_ranks_that_share_heads_of_keys_use_those_of_their_queries(case, mode):
    (heads, groups, shape, cut), (sequence_parallel, check_vma) = case, mode
    mesh, rng = make_mesh(*shape, names="yz"[-len(shape) :]), np.random.default_rng(5)
    axes = mesh.axis_names
    shapes = {"query": (D, heads, K), "key": (D, groups, K), "value": (D, groups, K)}
    with jax.enable_x64(True):
        params = {name: rng.standard_normal(shape) / 3 for name, shape in shapes.items()}
        params["key"] = {"kernel": params["key"], "bias": rng.standard_normal((groups, K))}
        params["out"] = rng.standard_normal((heads, K, D)) / 3
        x = rng.standard_normal((2, 2 * mesh.size, D))
        specs = tp.partition_specs(params, axes, columns={"query": -2})
        keys = tp.partition_specs(params, cut, columns={"key": -2, "value": -2}, rows={})
        specs |= {name: keys[name] for name in ("key", "value")}
        data = P(None, axes if sequence_parallel else None)

        def ours(params, x):
            options = {"sequence_parallel": sequence_parallel, "attend": reference.attend}
            known = groups
            if check_vma and sequence_parallel:
                known = None  # types say it
            else:
                params = tp.copied(params, axes)  # and now they do not
            return tp.attention(params, x, axes, kv_heads=known, algorithm="lax", **options)

        mapped = jax.shard_map(
            ours, mesh=mesh, in_specs=(specs, data), out_specs=data, check_vma=check_vma
        )
        expected = with_gradients(jax.numpy_rank_promotion("allow")(reference.attention))
        close(with_gradients(mapped)(params, x), expected(params, x), terms=x.size * D * 8)


def test_heads_of_keys_that_may_be_all_or_a_part_are_refused():
    params = {"query": np.ones((D, 8, K)), "key": np.ones((D, 2, K)), "value": np.ones((D, 2, K))}
    params["out"] = np.ones((8, K, D))
    specs = tp.partition_specs(params, "z", columns={"query": -2})

    def call(params, x):
        return tp.attention(params, x, "z", sequence_parallel=False)

    mapped = jax.shard_map(
        call, mesh=make_mesh(4, names="z"), in_specs=(specs, P()), out_specs=P(), check_vma=False
    )
    with pytest.raises(ValueError, match=r"kv_heads=.*; pass kv_heads= of the whole"):
        jax.eval_shape(mapped, params, np.ones((2, 4, D)))


def test_rows_of_a_table_have_a_forward_derivative():
    tokens = jnp.arange(8).reshape(1, 8)
    embed = jax.shard_map(
        lambda table, tokens: tp.embed({"embedding": table}, tokens, "x"),
        mesh=make_mesh(4),
        in_specs=(P("x"), P()),
        out_specs=P(None, "x"),
    )
    table = jnp.arange(16.0).reshape(8, 2)
    _, found = jax.jvp(lambda table: jax.jit(embed)(table, tokens), (table,), (2 * table,))
    np.testing.assert_array_equal(found[0], 2 * table)


@pytest.mark.parametrize("jit", [jax.jit, lambda function: function], ids=["jit", "eager"])
def test_losses_have_a_product_with_their_hessian(jit):
    rng = np.random.default_rng(6)
    logits, along = (rng.standard_normal((3, 8)).astype(np.float32) for _ in range(2))
    labels = np.array([0, 5, 7])
    losses = jax.shard_map(
        partial(tp.cross_entropy, axis_name="z", algorithm="ring"),
        mesh=make_mesh(4, names="z"),
        in_specs=(P(None, "z"), P()),
        out_specs=P(),
    )

    def product(losses):
        gradient = jax.grad(lambda logits: (losses(logits, labels) ** 2).sum())
        return jit(lambda x, v: jax.jvp(gradient, (x,), (v,))[1])(logits, along)

    # float32, and sums of a few terms of order one
    np.testing.assert_allclose(product(losses), product(reference.cross_entropy), atol=2.0**-18)
