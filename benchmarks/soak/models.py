"""Random small language models whose bits must not depend on how many ranks compute them.

Model i of a seed is always the same. It is an embedding, a block (norms, and attention, an MLP or
both) and a loss, with `order="tree"`. Its loss and gradients are computed on meshes of several
shapes, and compared to the last bit. The remaining devices hold copies, so that all processes take
part. `SHARING` models in a row differ only in parameters and tokens, and so share their programs:
to compile takes much longer than to run.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from benchmarks.soak.random_calls import pick
from benchmarks.soak.trial import QUICKLY
from ringcoll import layers
from ringcoll.layers import fsdp
from ringcoll.layers import tensor_parallel as tp

COPY, DATA, MODEL = AXES = "copy", "data", "model"
KINDS = ("tensor", "replicated", "fsdp", "both")
Params = dict[str, Any]
#: Models in a row that share their programs.
SHARING = 100
#: The factors by which the parameters of a model are larger than usual.
SCALES = 1.0, 1.0, 0.01, 30.0


@dataclass(frozen=True)
class RandomModel:
    """A model, and the meshes on which it runs.

    Attributes:
        number: the number of the model among those of the seed; the values depend on it alone.
        kind: "tensor" (activations sharded by sequence between layers), "replicated" (not sharded
            there), "fsdp", or "both" axes.
        meshes: pairs (data, model) of the sizes of two axes; the first mesh is one rank.
        leaves: the number of leaves of the tree.
        dtype: the dtype of parameters and activations.
        accumulate: the dtype of sums, or None.
        batch, sequence, width, heads, groups, head, features, vocabulary: sizes; `groups` are heads
            of keys.
        norm, halves, bias: which norm, which halves of the block, and whether there are biases.
        quickly: whether LLVM optimises nothing.
    """

    number: int = field(compare=False)
    kind: str
    meshes: tuple[tuple[int, int], ...]
    leaves: int
    dtype: str
    accumulate: str | None
    batch: int
    sequence: int
    width: int
    heads: int
    groups: int
    head: int
    features: int
    vocabulary: int
    norm: str
    halves: tuple[str, ...]
    bias: bool
    quickly: bool


def draw(seed: int, number: int, devices: int = 8) -> RandomModel:
    """Model `number` of a seed, for `devices` devices."""
    rng = np.random.default_rng((seed, number // SHARING))
    choose = partial(pick, rng)
    kind = choose(KINDS)
    leaves = choose((2, 4) if kind == "both" else (4, 8))
    sizes = [n for n in (1, 2, 4, 8) if n <= min(leaves, devices)]
    ranks = [1] if kind == "fsdp" else sizes, [1] if kind in ("tensor", "replicated") else sizes
    shapes = [(d, m) for m, d in product(*ranks) if 1 < d * m <= devices]
    if kind == "both":
        shapes = [shape for shape in shapes if min(shape) > 1] or shapes
    groups = leaves * choose((1, 2))
    dtype = choose(("float32", "bfloat16"))
    return RandomModel(
        number,
        kind,
        ((1, 1), choose(shapes)),
        leaves,
        dtype,
        choose((None, "float32")) if dtype == "bfloat16" else None,
        choose((1, 2)) * leaves if kind in ("fsdp", "both") else choose((1, 2, 3)),
        leaves * choose((1, 2, 3, 5)),
        leaves * choose((1, 2, 3, 4, 9)),
        groups * choose((1, 2)),
        groups,
        choose((2, 4, 6)),
        leaves * choose((1, 3, 4, 8, 11)),
        leaves * choose((1, 5, 8)),
        choose(("rms_norm", "layer_norm")),
        choose((("attention",), ("mlp",), ("gated_mlp",), ("attention", "mlp"))),
        choose((False, True)),
        choose((False, True)),
    )


def differing(model: RandomModel, devices: Sequence[jax.Device]) -> tuple[list[str], str]:
    """Words about what differs on which mesh, and a digest of the bits on one rank."""
    of_meshes = [_bits(model, shape, devices) for shape in model.meshes]
    words = [
        f"{name} on (data, model) = {shape}"
        for shape, of in zip(model.meshes[1:], of_meshes[1:], strict=True)
        for name in of
        if of[name] != of_meshes[0][name]
    ]
    return words, hashlib.sha256(b"".join(of_meshes[0].values())).hexdigest()[:16]


def _bits(
    model: RandomModel, shape: tuple[int, int], devices: Sequence[jax.Device]
) -> dict[str, bytes]:
    """The loss and gradients on a mesh, as bytes."""
    run, shardings = _program(model, shape, tuple(devices))
    found = run(*jax.tree.map(_placed, (_params(model), _tokens(model)), shardings))
    return {
        jax.tree_util.keystr(path): np.asarray(x.addressable_data(0)).tobytes()
        for path, x in jax.tree.leaves_with_path(found)
    }


@lru_cache(maxsize=2)  # the meshes of one model
def _program(
    model: RandomModel, shape: tuple[int, int], devices: tuple[jax.Device, ...]
) -> tuple[Callable, Any]:
    """The function of parameters and tokens on a mesh, and how these are sharded."""
    count = shape[0] * shape[1]
    used = np.array(devices)[: len(devices) // count * count].reshape(-1, *shape)
    mesh = Mesh(used, AXES, axis_types=(AxisType.Auto,) * 3)
    params = _params(model)
    specs: Any = tp.partition_specs(params, MODEL)
    if model.kind in ("fsdp", "both"):
        specs = fsdp.specs(params, DATA, mesh=mesh, base=specs, min_size=0)
    rows = P(DATA) if model.kind in ("fsdp", "both") else P()
    mapped = jax.shard_map(
        partial(_loss, model, specs), mesh=mesh, in_specs=(specs, rows), out_specs=P()
    )
    replicated = NamedSharding(mesh, P())
    options = QUICKLY if model.quickly and mesh.devices.flat[0].platform == "cpu" else None
    run = jax.jit(jax.value_and_grad(mapped), out_shardings=replicated, compiler_options=options)
    return run, jax.tree.map(partial(NamedSharding, mesh), (specs, rows))


def _placed(x: np.ndarray, sharding: NamedSharding) -> Array:
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _tokens(model: RandomModel) -> np.ndarray:
    rng = np.random.default_rng(model.number)
    shape = model.batch, model.sequence + 1
    return rng.integers(0, model.vocabulary, shape, np.int32)


def _params(model: RandomModel) -> Params:
    """Random parameters. Biases are not zero, so that wrong sums of them are noticed."""
    rng, d = np.random.default_rng(model.number), model.width
    scale = np.float32(pick(rng, SCALES))

    def normal(*shape: int) -> np.ndarray:
        x = rng.standard_normal(shape, np.float32) * max(shape[0], 1) ** -0.5 * scale
        return x.astype(jnp.dtype(model.dtype))

    def linear(*shape: int, out: int = 1) -> Params | np.ndarray:
        kernel = normal(*shape)
        return {"kernel": kernel, "bias": normal(*shape[-out:])} if model.bias else kernel

    heads, groups = (model.heads, model.head), (model.groups, model.head)
    attention = {"query": linear(d, *heads, out=2), "out": linear(*heads, d)}
    attention |= {name: linear(d, *groups, out=2) for name in ("key", "value")}
    names = ("gate", "up") if "gated_mlp" in model.halves else ("up",)
    mlp = {name: linear(d, model.features) for name in names}
    norm = ("scale", "bias") if model.norm == "layer_norm" else ("scale",)
    return {
        "embed": {"embedding": normal(model.vocabulary, d)},
        "attention": attention,
        "mlp": {**mlp, "down": linear(model.features, d)},
        "norm": {name: normal(d) for name in norm},
        **{f"norm of {half}": {name: normal(d) for name in norm} for half in model.halves},
        "unembed": {"unembedding": normal(d, model.vocabulary)},
    }


def _loss(model: RandomModel, specs: Params, params: Params, tokens: Array) -> Array:
    tree: Any = {"order": "tree", "leaves": model.leaves}
    if model.kind in ("tensor", "replicated"):
        return _of_rows(model, params, tokens) / model.batch
    gathered = fsdp.gather(params, specs, DATA, **tree)
    total = layers.by_leaves(partial(_of_rows, model), gathered, tokens, DATA, leaves=model.leaves)
    return ringcoll.psum(total, DATA, **tree) / model.batch


def _of_rows(model: RandomModel, params: Params, tokens: Array) -> Array:
    """The sum of the losses of rows; only the axis MODEL shards the computation."""
    tree: Any = {"axis_name": MODEL, "order": "tree", "leaves": model.leaves}
    parallel: Any = {**tree, "sequence_parallel": model.kind != "replicated"}
    summing: Any = {**parallel, "accumulate_dtype": model.accumulate}
    norm = getattr(tp, model.norm)
    x = tp.embed(params["embed"], tokens[:, :-1], **parallel)
    for half in model.halves:
        own = params["attention" if half == "attention" else "mlp"]
        x = x + getattr(tp, half)(own, norm(params[f"norm of {half}"], x, **tree), **summing)
    logits = tp.unembed(params["unembed"], norm(params["norm"], x, **tree), **summing)
    losses = tp.cross_entropy(logits, tokens[:, 1:], **tree)
    return layers.compiled_apart(jnp.sum, losses)
