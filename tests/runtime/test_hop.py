"""Messages and indices. For routes see `test_calls`, for wires `test_wire`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import assert_same

from ringcoll.collectives.sums import ByTree, Tree
from ringcoll.runtime.hop import multiply_add
from ringcoll.runtime.parts import message


def test_what_is_rounded_for_sums_by_a_tree():
    x, rounded = jnp.arange(3.0), ByTree(order=Tree()).prepare
    text = jax.jit(lambda x: rounded(x, "tpu")).lower(x).as_text()
    assert "select" not in text
    assert "select" in jax.jit(lambda x: rounded(x, "cpu")).lower(x).as_text()


def test_a_message_has_the_widest_dtype_of_its_shards():
    narrow, wide = jnp.full(2, 1.5, jnp.bfloat16), jnp.full(2, 1 / 3, jnp.float32)
    keys = (0, 0), (0, 1), (0, 2)
    held = dict(zip(keys, (narrow, wide, narrow), strict=True))
    for some in (keys[:2], keys[1:]):
        of_some = np.stack([np.float32(held[key]) for key in some])
        assert_same(np.asarray(message(held, some)), of_some)


@pytest.mark.parametrize(
    ("factor", "addend", "operations"), [(1, 0, 0), (3, 0, 1), (1, 2, 1), (3, 2, 2)]
)
def test_indices_take_no_operation_that_changes_nothing(factor, addend, operations):
    """Every shard has such an index: these operations are half of a program."""
    traced = jax.make_jaxpr(lambda index: multiply_add(index, factor, addend))(np.int32(5))
    assert len(traced.jaxpr.eqns) == operations
    assert int(multiply_add(jnp.int32(5), factor, addend)) == 5 * factor + addend
