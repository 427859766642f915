"""Linear layers whose kernels arrive under their products, or have arrived; exact."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import assert_same, crossed, make_mesh

from ringcoll.layers import fsdp


@pytest.mark.parametrize(("check_vma", "dim", "n"), crossed([True, False], [0, 1], [1, 2, 3, 5, 8]))
def test_a_linear_layer_multiplies_while_its_kernel_arrives(n, dim, check_vma):
    params = {"kernel": np.arange(6 * n * 2 * n) % 7 - 3.0, "bias": np.arange(2 * n) + 1.0}
    params["kernel"] = params["kernel"].reshape(6 * n, 2 * n).astype(np.float32)
    params["bias"] = params["bias"].astype(np.float32)
    x = (np.arange(2 * n * 6 * n) % 5 - 2.0).reshape(2 * n, 6 * n).astype(np.float32)
    spec = {"kernel": P(*["x" if d == dim else None for d in range(2)]), "bias": P()}

    def ours(params, x):
        return fsdp.linear(params, x, "x", algorithm="ring")

    def with_grad(call):
        return jax.jit(jax.value_and_grad(lambda *a: (call(*a) ** 2).sum(), (0, 1)))

    mapped = jax.shard_map(
        ours, mesh=make_mesh(n), in_specs=(spec, P("x")), out_specs=P("x"), check_vma=check_vma
    )
    plain = lambda params, x: x @ params["kernel"] + params["bias"][None]  # noqa: E731
    assert_same(
        jax.tree.map(np.asarray, with_grad(mapped)(params, x)),
        jax.tree.map(np.asarray, with_grad(plain)(params, x)),
    )


def test_a_kernel_that_has_arrived_is_multiplied_as_one_that_arrives():
    """Also with a replicated x, and at the precision that is asked for."""
    mesh, spec = make_mesh(2), {"kernel": P(None, "x")}
    params = {"kernel": np.arange(12, dtype=np.float32).reshape(2, 6)}
    x = np.arange(4, dtype=np.float32).reshape(2, 2)

    def ours(params, x, fused):
        params = fsdp.gather(params, spec, "x", fused=True) if fused else params
        y = fsdp.linear(params, x, "x", precision="highest")
        return (y * (1 + jax.lax.axis_index("x"))).sum(keepdims=True)

    def program(fused):
        call = partial(ours, fused=fused)
        mapped = jax.shard_map(call, mesh=mesh, in_specs=(spec, P()), out_specs=P("x"))
        return jax.jit(jax.value_and_grad(lambda *of: mapped(*of).sum(), (0, 1)))

    assert_same(program(True)(params, x), program(False)(params, x))
    products = str(jax.make_jaxpr(program(True))(params, x)).split("= dot_general")[1:]
    assert len(products) == 3
    assert all("HIGHEST" in words[:400] for words in products)


@pytest.mark.parametrize(
    ("spec", "check_vma"),
    crossed([P(), P("y", None), P(None, "y"), P("y", "z")], [True, False]),
)
def test_a_gathered_kernel_may_be_unsharded_or_sharded_further(spec, check_vma):
    """Small kernels are not sharded at all. Others are also sharded for tensor parallelism."""
    w, x = (np.arange(64, dtype=np.float32).reshape(8, 8) % k - 3 for k in (7, 5))
    columns = P("y", "z" if "z" in spec else None)

    def ours(w, x, fused):
        gathered = fsdp.gather({"w": w}, {"w": spec}, "y", fused=fused)["w"]
        return fsdp.linear(gathered, x, "y", algorithm="ring") if fused else x @ gathered

    def program(fused):
        mapped = jax.shard_map(
            partial(ours, fused=fused),
            mesh=make_mesh(2, 2, names="yz"),
            in_specs=(spec, P("y")),
            out_specs=columns,
            check_vma=check_vma,
        )
        return jax.jit(jax.value_and_grad(lambda *of: (mapped(*of) ** 2).sum(), (0, 1)))

    assert_same(program(True)(w, x), program(False)(w, x))
