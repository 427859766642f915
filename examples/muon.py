"""Muon's step for sharded matrices: each goes to an owner and back, while the next one travels.

Muon makes the momentum of a weight matrix nearly orthogonal, by five steps of Newton-Schulz, which
need the whole matrix. As in FSDP, each rank has some rows of all L matrices. The n matrices of a
group go to n owners by one all-to-all, and their results go back by another one.

The all-to-alls of the groups before and after travel under the Newton-Schulz steps of a group, if
the compiler starts them early. On TPUs that needs
`jax.jit(step, compiler_options=ringcoll.overlap.OPTIONS["asynchronous all-to-all"])`.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
"""

import jax.numpy as jnp
from jax import Array
from jax.lax import axis_size, optimization_barrier

from ringcoll import lax


def muon(
    weights: Array, momentum: Array, gradients: Array, axis: str, rate: float, decay: float = 0.95
) -> tuple[Array, Array]:
    """New weights and momentum of L matrices, inside `jax.shard_map`; n must divide L.

    `weights, momentum, gradients: [L, a/n, b]`. Matrices travel in the momentum's dtype.
    """
    momentum = decay * momentum + gradients
    ahead = decay * momentum + gradients  # Nesterov's
    rows, columns = ahead.shape[1:]
    groups = ahead.reshape(-1, axis_size(axis), rows, columns)
    updates, following = [], to_owner(groups[0], axis)
    for group in (*groups[1:], None):
        own = following
        if group is not None:
            following = to_owner(group, axis)
        done = orthogonal(own)
        # The next matrices arrive before their steps begin; the results leave under those steps.
        following, done = optimization_barrier((following, done))
        updates.append(lax.all_to_all(done[None], axis, 1, 0, tiled=True))
    scale = max(1, rows * axis_size(axis) / columns) ** 0.5
    return weights - rate * scale * jnp.concatenate(updates), momentum


def to_owner(group: Array, axis: str) -> Array:
    """`[n, a/n, b] -> [a, b]`: matrix r of the group, whole, on rank r."""
    return lax.all_to_all(group, axis, 0, 1, tiled=True)[0]


def orthogonal(x: Array) -> Array:
    """Nearly U V^T, where x is U S V^T: singular values of about 0.7 to 1.2."""
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T).T
    x /= jnp.linalg.norm(x.astype(jnp.float32)).astype(x.dtype) + 1e-7
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x
