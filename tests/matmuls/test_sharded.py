"""The cases of a sharded matmul on a 2 x 2 mesh, each with the collective it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import data, make_mesh, per_rank

import ringcoll


def test_sharded_matmul():
    a, b = np.arange(96.0).reshape(4, 8, 3), np.arange(24.0).reshape(4, 3, 2)  # columns, rows
    specs = P(None, "x"), P("x"), P("x")
    call = lambda a, b: ringcoll.sharded_matmul(a, b, *specs, algorithm="ring")  # noqa: E731
    y = per_rank(make_mesh(4), call, a, b)
    np.testing.assert_array_equal(y, (a @ b).sum(0).reshape(4, 2, 2))


CASES = [
    (P("x", None), P(None, "y"), P("x", "y"), 0),
    (P(None, "x"), P(None, None), P(None, None), 1),
    (P("y", "x"), P(None, None), P("y", None), 1),
    (P("x", None), P("y", None), P("x", None), 1),
    (P(None, "x"), P("x", None), P(None, None), 2),
    (P(None, "x"), P("x", None), P("x", None), 1),
    (P(None, "x"), P("x", "y"), P(None, ("y", "x")), 1),
    (P("x", None), P(None, "x"), P("x", None), 1),
    (P("x", None), P(None, "x"), P(None, "x"), 1),
    (P(("x", "y"), None), P(None, None), P(None, None), 2),
]


@pytest.mark.parametrize(("a_spec", "b_spec", "out_spec", "permutes"), CASES, ids=str)
def test_the_shards_are_those_of_the_product(a_spec, b_spec, out_spec, permutes):
    mesh = make_mesh(2, 2)
    a, b = data((8, 4)) % 5, data((4, 8)) % 7
    mapped = jax.jit(
        jax.shard_map(
            lambda a, b: ringcoll.sharded_matmul(a, b, a_spec, b_spec, out_spec, algorithm="ring"),
            mesh=mesh,
            in_specs=(a_spec, b_spec),
            out_specs=out_spec,
            check_vma=False,
        )
    )
    placed = [
        jax.device_put(jnp.asarray(x), NamedSharding(mesh, spec))
        for x, spec in ((a, a_spec), (b, b_spec))
    ]
    np.testing.assert_array_equal(mapped(*placed), a @ b)
    text = mapped.lower(*placed).as_text()
    assert text.count("stablehlo.collective_permute") == permutes
