"""What layers send and keep: counted in their programs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from operations import hops
from support import make_mesh

from ringcoll.layers import tensor_parallel as tp

N, D, F, S = 4, 8, 16, 8
BUILT_IN = re.compile(r"\b(all_gather|psum|reduce_scatter|all_to_all)(_invariant)?\[")


def abstract(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


LAYERS = {
    "mlp": (tp.mlp, abstract(up=(D, F), down=(F, D))),
    "gated_mlp": (tp.gated_mlp, abstract(gate=(D, F), up=(D, F), down=(F, D))),
    "attention": (
        tp.attention,
        abstract(query=(D, 8, 4), key=(D, 4, 4), value=(D, 4, 4), out=(8, 4, D)),
    ),
}


def traced(layer, params, sequence_parallel, gradients):
    """The program of a layer on four ranks, and of its gradients."""
    mesh, specs = make_mesh(N), tp.partition_specs(params, "x")
    x = jax.ShapeDtypeStruct((2, S, D), jnp.float32)
    data = P(None, "x" if sequence_parallel else None)

    def call(params, x):
        return layer(params, x, "x", sequence_parallel=sequence_parallel, algorithm="ring")

    def both(params, x):
        y, pull_back = jax.vjp(call, params, x)
        return pull_back(y)

    function, out = (both, (specs, data)) if gradients else (call, data)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(specs, data), out_specs=out)
    return jax.make_jaxpr(mapped)(params, x)


def rounds(program):
    """How often a shard goes round, in products under the wire and in collectives by rings."""
    text = str(program)
    collectives = text.count("= ringcoll_all_gather[") + 2 * text.count("= ringcoll_psum[")
    return hops(program.jaxpr) / (N - 1) + collectives


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_layer_goes_round_twice_each_way(name, sequence_parallel):
    """Forward: a gather, then a reduce-scatter. Backward: a gather and a reduce-scatter again.

    Replicated activations leave by a reduce-scatter and a gather. Backward, the cotangent of x is
    all-reduced; that of the result is on every rank already.
    """
    for gradients, times in ((False, 2), (True, 4)):
        program = traced(*LAYERS[name], sequence_parallel, gradients)
        assert rounds(program) == times
        assert not BUILT_IN.search(str(program))


def test_gradients_are_summed_while_that_of_a_call_is_computed():
    """The sum starts after its cotangent is there, and ends before its gradient is used."""
    mesh = make_mesh(2)
    x, w = np.arange(8, dtype=np.float32), np.arange(4, dtype=np.float32)
    taken = np.array([1, 0, 3, 2])  # not a float: it has no gradient, and changes nothing

    def both(x, w):
        def loss(x, w):
            call = lambda x, taken: jnp.sin(x[taken])  # noqa: E731
            y, copied_w = tp.copied_beside(call, (x, taken), w, "x", algorithm="ring")
            return (y * copied_w).sum()

        return jax.grad(loss, (0, 1))(x, w)

    mapped = jax.shard_map(both, mesh=mesh, in_specs=(P("x"), P()), out_specs=(P("x"), P()))
    ct_x, ct_w = jax.jit(mapped)(x, w)
    rows = x.reshape(2, 4)
    # To within the roundings of a sine, a cosine and one product or sum.
    np.testing.assert_allclose(ct_w, np.sin(rows[:, taken]).sum(0), rtol=0, atol=2**-21)
    np.testing.assert_allclose(ct_x, (np.cos(rows) * w[taken]).reshape(-1), rtol=0, atol=2**-19)
    text = str(jax.make_jaxpr(mapped)(x, w))
    first, last = (find("optimization_barrier") for find in (text.index, text.rindex))
    # The gradient of the call is one product with a cosine, written back to its place.
    assert first < text.index("ringcoll_psum[") < last
    assert first < text.index("scatter-add") < last
