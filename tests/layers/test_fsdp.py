"""Sharded parameters: their specs, gathers at use, and gradients, against one device.

In float64, within the roundings that `test_layers` counts. Values that only move are exact.
"""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import make_mesh, mostly_exhaustive
from test_layers import close

from ringcoll.layers import fsdp
from ringcoll.layers import tensor_parallel as tp

POLICIES = {
    "nothing": None,
    "products": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}


def shapes(**leaves):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in leaves.items()}


@pytest.mark.parametrize(
    ("shape", "options", "spec"),
    [
        ((8, 16), {}, P(None, "x")),  # the larger
        ((16, 16), {}, P("x", None)),  # the first of equal ones
        ((6, 9), {}, P()),  # neither divides
        ((6, 8), {}, P(None, "x")),  # the one that does
        ((4,), {}, P()),  # small
        ((4,), {"min_size": 0}, P("x")),
        ((16, 8), {"leading": 1}, P(None, "x")),  # of layers that are stacked
        ((16, 8), {"leading": 1, "min_size": 16}, P()),  # each of them small
        ((8, 16), {"base": P(None, "y")}, P("x", "y")),  # the other dimension
        ((9, 16), {"base": P(None, "y")}, P(None, "y")),
        ((8, 16), {"axis_name": ("x", "y")}, P(None, ("x", "y"))),
        ((0, 16), {"min_size": 0}, P(None, "x")),
        ((), {"min_size": 0}, P()),
        ((16, 8), {"dim": -1}, P(None, "x")),  # not the largest, but as asked for
        ((8, 16), {"dim": 0}, P("x", None)),
        ((16, 9), {"dim": -1}, P("x", None)),  # where that can be
        ((8,), {"dim": -2}, P("x")),
        ((8, 16), {"dtype": np.int32}, P()),  # `gather` is of floats
    ],
)
def test_specs(shape, options, spec):
    options = {"min_size": 8, "axis_name": "x", "mesh": make_mesh(4, 2), **options}
    dtype = options.pop("dtype", np.float32)
    if "base" in options:
        options["base"] = {"w": options["base"]}
    assert fsdp.specs({"w": jax.ShapeDtypeStruct(shape, dtype)}, **options) == {"w": spec}


def test_the_mesh_may_be_that_of_jax():
    with jax.set_mesh(make_mesh(4)):
        assert fsdp.specs(shapes(w=(4, 4)), "x", min_size=0) == {"w": P("x", None)}
        placed = fsdp.shard({"w": np.ones((4, 4))}, {"w": P("x", None)})["w"]
    assert placed.sharding == NamedSharding(make_mesh(4), P("x", None))


MESHES = {  # data, fsdp, model
    "n = 1": (1, 1, 1),
    "n = 2": (1, 2, 1),
    "n = 3": (1, 3, 1),
    "n = 5": (1, 5, 1),
    "n = 8": (1, 8, 1),
    "2 replicas": (2, 3, 1),
    "three axes": (2, 2, 2),
    "an odd one": (1, 2, 3),
}
LAYERS, S = 3, 6


def sizes(mesh):
    """The sizes of a batch, of features and of hidden features: the smallest that divide."""
    data, fsdp, model = mesh.shape.values()
    return 3 * data * fsdp, 2 * fsdp, 4 * fsdp * model


def parameters(mesh):
    """Stacked layers: by columns, by rows, and small ones."""
    rng, (_, d, f) = np.random.default_rng(0), sizes(mesh)
    normal = lambda *shape: rng.standard_normal((LAYERS, *shape)) / shape[0] ** 0.5  # noqa: E731
    return {
        "up": {"kernel": normal(d, f), "bias": normal(f)},
        "down": {"kernel": normal(f, d), "bias": normal(d)},
        "scale": normal(d),
    }


def reference(params, keys, x):
    """The layers on one device, one after the other."""
    for i in range(LAYERS):
        p = jax.tree.map(lambda leaf, i=i: leaf[i], params)
        x = x + block(p, keys[i], p["scale"] * x, lambda w, x: x @ w["kernel"] + w["bias"])
    return x


def block(p, key, x, up, down=None):
    hidden = jnp.tanh(up(p["up"], x))
    return (down or up)(p["down"], hidden) * jax.random.bernoulli(key, 0.7, x.shape[-1:])


def tensor_parallel_block(p, x):
    weights, key = p
    up = partial(tp.column_linear, axis_name="z", algorithm="ring")
    down = partial(tp.row_linear, axis_name="z", algorithm="ring")
    scaled = tp.copied(weights["scale"], "z") * x
    return x + block(weights, key, scaled, up, down)


def fused_block(p, x):
    weights, key = p
    linear = partial(fsdp.linear, axis_name="y", replicas="x", algorithm="ring")
    return x + block(weights, key, weights["scale"] * x, lambda w, x: linear(w, x))


def over(mesh, params, call, check_vma):
    """A scan over layers, from whole operands to whole results, and its gradients."""
    (_, d, f), base = sizes(mesh), tp.partition_specs(params, "z")
    specs = fsdp.specs(params, "y", mesh=mesh, base=base, leading=1, min_size=d * f)
    data = P(("x", "y"), "z")
    mapped = jax.shard_map(
        partial(call, specs),
        mesh=mesh,
        in_specs=(specs, P(), data),
        out_specs=data,
        check_vma=check_vma,
    )
    sharded = [s for s in jax.tree.leaves(specs) if "y" in s]
    assert len(sharded) == 2
    return mapped


def with_gradients(call):
    def loss(params, keys, x):
        y = call(params, keys, x)
        return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum(), y

    return jax.jit(jax.value_and_grad(loss, (0, 2), has_aux=True))


def check(mesh, call, check_vma):
    batch, d, f = sizes(mesh)
    with jax.enable_x64(True):
        params, keys = parameters(mesh), jax.random.split(jax.random.key(0), LAYERS)
        x = np.random.default_rng(1).standard_normal((batch, S, d))
        ours = with_gradients(over(mesh, params, call, check_vma))(params, keys, x)
        with jax.numpy_rank_promotion("allow"):
            theirs = with_gradients(reference)(params, keys, x)
        close(ours, theirs, terms=LAYERS * batch * S * d * f)


def with_rank_promotion(call):
    def allowed(*args):
        with jax.numpy_rank_promotion("allow"):
            return call(*args)

    return allowed


def scanned(of_layer, **options):
    @with_rank_promotion
    def call(specs, params, keys, x):
        all_options = {"replicas": "x", "algorithm": "ring", **options}
        return fsdp.scan_layers(of_layer, (params, keys), x, (specs, P()), "y", **all_options)

    return call


def gathered_each(specs, params, keys, x):
    """Each layer is gathered where it is used, in a Python loop."""
    specs = jax.tree.map(lambda spec: P(*spec[1:]), specs)
    for i in range(LAYERS):
        p = jax.tree.map(lambda leaf, i=i: leaf[i], params)
        gathered = fsdp.gather(p, specs, "y", replicas="x", algorithm="two_ended")
        x = tensor_parallel_block((gathered, keys[i]), x)
    return x


@pytest.mark.parametrize(
    ("name", "check_vma"),
    mostly_exhaustive(
        [(name, i % 2 == 0) for i, name in enumerate(MESHES)],
        lambda name, _: name == "an odd one",
    ),
)
def test_parameters_gathered_at_use(name, check_vma):
    check(make_mesh(*MESHES[name]), with_rank_promotion(gathered_each), check_vma)


@pytest.mark.parametrize(
    ("name", "check_vma", "policy"),
    mostly_exhaustive(
        [
            *((name, i % 2 == 0, "nothing") for i, name in enumerate(MESHES)),
            ("three axes", True, "products"),
            ("three axes", False, "everything"),
        ],
        lambda name, _, policy: (
            (name, policy) in (("n = 1", "nothing"), ("three axes", "products"))
        ),
    ),
)
def test_a_scan_over_layers(name, check_vma, policy):
    call = scanned(tensor_parallel_block, policy=POLICIES[policy])
    check(make_mesh(*MESHES[name]), call, check_vma)


@pytest.mark.parametrize(
    ("name", "check_vma", "policy"),
    mostly_exhaustive(
        [
            ("n = 1", True, "nothing"),
            ("n = 3", False, "nothing"),
            ("n = 5", True, "products"),
            ("2 replicas", True, "everything"),
            ("2 replicas", False, "nothing"),
        ],
        lambda name, check_vma, policy: policy == "everything",
    ),
)
def test_gradients_reduced_under_their_products(name, check_vma, policy):
    check(
        make_mesh(*MESHES[name]),
        scanned(fused_block, fused=True, policy=POLICIES[policy]),
        check_vma,
    )


@pytest.mark.parametrize(
    ("policy", "check_vma"),
    mostly_exhaustive(product(POLICIES, [True, False]), lambda *case: case == ("products", True)),
)
def test_a_scanned_block_may_close_over_traced_values(check_vma, policy):
    """Over values with gradients and values that are not floats; also under `jit` and `remat`."""
    rng, order, key = np.random.default_rng(0), np.arange(8)[::-1], jax.random.key(0)
    params, x = {"w": rng.standard_normal((3, 8, 8))}, rng.standard_normal((8, 8))
    spec = {"w": P(None, "x", None)}

    def layer(p, x, scale, order, key):
        return x + jnp.tanh(x @ p["w"] * scale)[:, order] * jax.random.bernoulli(key, 0.7, (1, 8))

    def scan(params, x, scale, order, key):
        def block(p, x):
            return layer(p, x, scale, order, key)

        options = {"algorithm": "ring", "policy": POLICIES[policy]}
        return fsdp.scan_layers(block, params, x, spec, "x", **options)

    def each(params, x, *given):
        for i in range(3):
            x = layer({"w": params["w"][i]}, x, *given)
        return x

    with jax.enable_x64(True):
        ours = jax.shard_map(
            jax.checkpoint(scan),
            mesh=make_mesh(4),
            in_specs=(spec, P("x"), P(), P(), P()),
            out_specs=P("x"),
            check_vma=check_vma,
        )
        gradients = [
            jax.jit(jax.grad(lambda *of, f=f: (f(*of, order, key) ** 2).sum(), (0, 1, 2)))
            for f in (jax.jit(ours), each)
        ]
        close(*(gradient(params, x, 1.5) for gradient in gradients), terms=10_000)
