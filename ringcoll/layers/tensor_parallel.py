"""Tensor-parallel layers: an axis shards the weights, and the activations by sequence.

Call these functions inside `jax.shard_map`, on a rank's own shards. `params` is a mapping or an
object with the names below as keys or attributes (a dictionary, an Equinox module, the state of a
Flax module), and no other weights. For a linear layer it is the kernel, or `kernel` and `bias`:

| function | parameters |
|---|---|
| `column_linear`, `row_linear` | a linear layer |
| `mlp`, `gated_mlp` | `up` and `down`, and `gate` |
| `attention` | `query`, `key`, `value`, `out` |
| `embed`, `unembed` | `embedding`, `unembedding` |
| `rms_norm`, `layer_norm` | `scale`, and `bias` |

Weights have the ordinary layout, and a checkpoint does not depend on the number of ranks;
`partition_specs` says how weights are cut. Between layers, activations are sharded along the
sequence, which is their last dimension but one, and the matmuls hide the collectives. With
`sequence_parallel=False` activations are the same on every rank of the axis.

Layers with matmuls take the options of `LayerOptions`.

Gradients are those of the same layer on one device. Take them outside `shard_map`, or inside
under `check_vma=True`. Inside under `check_vma=False`, JAX's rule applies here too: a rank gets the
gradient of the *sum* of all ranks' losses, so let only one rank's loss count, or divide it by the
number of ranks. The gradients of replicated parameters are then each rank's own share: sum them.

JAX refuses forward mode (`jvp`, `jacfwd`, `hessian`) for these layers.
`cross_entropy`, `embed` and the norms have it in the cases that their docstrings name.
"""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import keystr

from ringcoll.collectives.axes import AxisName
from ringcoll.collectives.front_door import Pytree
from ringcoll.collectives.public import public
from ringcoll.layers.linear import column_linear, row_linear
from ringcoll.layers.norms import layer_norm, rms_norm
from ringcoll.layers.parameters import shard
from ringcoll.layers.replicas import copied, copied_beside
from ringcoll.layers.transformer import attention, gated_mlp, mlp, rotary
from ringcoll.layers.vocabulary import cross_entropy, embed, unembed
from ringcoll.matmuls.options import LayerOptions

__all__ = [
    "COLUMNS",
    "ROWS",
    "LayerOptions",
    "attention",
    "column_linear",
    "copied",
    "copied_beside",
    "cross_entropy",
    "embed",
    "gated_mlp",
    "layer_norm",
    "mlp",
    "partition_specs",
    "rms_norm",
    "rotary",
    "row_linear",
    "shard",
    "unembed",
]

#: Which dimension of a layer is sharded, counted from the last, so that blocks may be stacked.
COLUMNS: Mapping[str, int] = MappingProxyType(
    {"query": -2, "key": -2, "value": -2, "gate": -1, "up": -1, "unembedding": -1}
)
#: The same for layers that are sharded by rows; their biases are whole.
ROWS: Mapping[str, int] = MappingProxyType({"out": -3, "down": -2, "embedding": -2})


@public("layers.tensor_parallel.", arguments=False)
def partition_specs(
    params: Pytree,
    axis_name: AxisName,
    *,
    columns: Mapping[str, int] = COLUMNS,
    rows: Mapping[str, int] = ROWS,
) -> Pytree:
    """How parameters are sharded over an axis, by their names: a tree of `PartitionSpec`s.

    Use it for `jax.device_put`, `jax.jit`, `jax.shard_map` and Orbax. The last known name on the
    path of a leaf decides. A leaf without a known name (such as a norm) is whole on every rank.
    Dimensions are counted from the last, so that blocks may be stacked.

    Args:
        params: a pytree of arrays, or of `jax.ShapeDtypeStruct`s.
        axis_name: the axis.
        columns: by name, the dimension along which a kernel and its bias are sharded.
        rows: the same for kernels whose bias is whole.

    Raises:
        ValueError: a leaf has too few dimensions.

    >>> params = {"mlp": {"up": jnp.ones((2, 8)), "down": jnp.ones((8, 2))}, "scale": jnp.ones(2)}
    >>> tp.partition_specs(params, "x")
    {'mlp': {'down': P('x', None), 'up': P(None, 'x')}, 'scale': P()}
    """
    dims = {**columns, **rows}
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    leaves_under = Counter(path[:i] for path in paths for i in range(len(path)))

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        names = [keystr((key,), simple=True) for key in path]
        if len(names) > 1 and names[-1] == "value" and leaves_under[path[:-1]] == 1:
            # Flax puts the array of a variable under "value". With other names, "value" is a layer.
            names.pop()
        known = next((name for name in reversed(names) if name in dims), None)
        of_rows = known in rows and names[-1] == "bias"
        if known is None or of_rows or not hasattr(leaf, "dtype"):
            return PartitionSpec()
        dim, ndim = dims[known], len(leaf.shape)
        if ndim < -dim:
            raise ValueError(
                f"{'/'.join(names)} has {ndim} dimensions, and dimension {dim} is to be sharded; "
                "heads and experts need a dimension: pass [d, heads, head_dim], [experts, d, f]"
            )
        return PartitionSpec(*[axis_name if d == ndim + dim else None for d in range(ndim)])

    return jax.tree_util.tree_map_with_path(spec, params)
