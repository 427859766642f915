"""Layers with a wire: what is gathered and summed is encoded; what stays exact stays exact."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import make_mesh

from ringcoll import Wire
from ringcoll.layers import fsdp
from ringcoll.layers import tensor_parallel as tp


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_fsdp_sends_bytes_and_only_where_it_is_asked_to(check_vma):
    mesh, rng = make_mesh(2, 2), np.random.default_rng(0)
    params = {"w": rng.normal(size=(64, 64)).astype(np.float32), "b": np.ones(64, np.float32)}
    specs = {"w": P(None, "x"), "b": P()}
    x = rng.normal(size=(8, 64)).astype(np.float32)

    def of(arrives, **wires):
        def loss(params, x):
            if arrives:
                y = fsdp.linear({"kernel": params["w"]}, x, "x", replicas="y", **wires)
                return (y**2).sum(keepdims=True)
            gathered = fsdp.gather(params, specs, "x", replicas="y", **wires)
            return ((x @ gathered["w"] + gathered["b"][None]) ** 2).sum(keepdims=True)

        mapped = jax.shard_map(
            loss,
            mesh=mesh,
            in_specs=(specs, P(("x", "y"))),
            out_specs=P(("x", "y"), None),
            check_vma=check_vma,
        )
        return jax.jit(jax.value_and_grad(lambda p: mapped(p, x).sum()))

    for arrives in False, True:
        exact = of(arrives)(params)[1]
        for wires in {"wire": "int8"}, {"gradient_wire": Wire("int8", 64)}:
            program = of(arrives, **wires)
            got = program(params)[1]
            off = abs(got["w"] - exact["w"]).max() / abs(exact["w"]).max()
            assert 1e-5 < off < 0.05, (arrives, wires, off)
            if "gradient_wire" in wires:  # the others' gradients are exact
                np.testing.assert_allclose(got["b"], exact["b"], rtol=1e-5)
            assert re.search(
                r"all_gather.*ui8|all_to_all.*ui8", program.lower(params).as_text(), re.S
            )


def test_tensor_parallel_layers_take_both_wires():
    mesh, rng = make_mesh(4), np.random.default_rng(0)
    up, down = (rng.normal(size=s).astype(np.float32) for s in ((16, 32), (32, 16)))
    x = rng.normal(size=(8, 16)).astype(np.float32)

    def loss(wires, up, down, x):
        y = tp.column_linear({"kernel": up}, x, "x", **wires)
        y = tp.row_linear({"kernel": down}, y, "x", **wires)
        return (y**2).sum(keepdims=True)

    def gradients(**wires):
        specs = (P(None, "x"), P("x"), P("x"))
        mapped = jax.shard_map(
            lambda *of: loss(wires, *of), mesh=mesh, in_specs=specs, out_specs=P("x", None)
        )
        return jax.jit(jax.value_and_grad(lambda *of: mapped(*of).sum(), (0, 1, 2)))(up, down, x)

    value, exact = gradients()
    forward, backward = gradients(wire="int8"), gradients(gradient_wire="int8")
    assert backward[0] == value != forward[0]
    for _, grads in forward, backward:
        for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
            assert 1e-6 < abs(got - wanted).max() / abs(wanted).max() < 0.05
    assert jnp.isfinite(value)
