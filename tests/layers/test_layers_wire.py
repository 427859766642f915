"""FSDP with a wire: what is gathered and summed is encoded; what stays exact stays exact."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import make_mesh

from ringcoll import Wire
from ringcoll.layers import fsdp


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_fsdp_sends_bytes_and_only_where_it_is_asked_to(check_vma):
    mesh, rng = make_mesh(2, 2), np.random.default_rng(0)
    params = {"w": rng.normal(size=(64, 64)).astype(np.float32), "b": np.ones(64, np.float32)}
    specs = {"w": P(None, "x"), "b": P()}
    x = rng.normal(size=(8, 64)).astype(np.float32)

    def of(**wires):
        def loss(params, x):
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

    exact = of()(params)[1]
    for wires in {"wire": "int8"}, {"gradient_wire": Wire("int8", 64)}:
        program = of(**wires)
        got = program(params)[1]
        off = abs(got["w"] - exact["w"]).max() / abs(exact["w"]).max()
        assert 1e-5 < off < 0.05, (wires, off)
        if "gradient_wire" in wires:  # the others' gradients are exact
            np.testing.assert_allclose(got["b"], exact["b"], rtol=1e-5)
        text = program.lower(params).as_text()
        assert re.search(r"all_gather.*ui8|all_to_all.*ui8", text, re.S)
