"""Slices of arrays: the operations that write them into their places."""

import jax
import jax.numpy as jnp
import pytest

from ringcoll.runtime.slicing import placed

WHOLE, PART = jnp.zeros((8, 8)), jnp.ones((2, 8))


def indices(dim):
    """The variables of two places at one index, and that index."""
    part = PART if dim == 0 else PART.T

    def twice(array, at):
        return placed(placed(array, part, dim, [(at, 2)]), part, dim, [(at, 2)])

    jaxpr = jax.make_jaxpr(twice)(WHOLE, jnp.int32(4)).jaxpr
    places = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dynamic_update_slice"]
    return [eqn.invars[2 + dim] for eqn in places], jaxpr.invars[1]


def test_every_place_has_an_index_of_its_own():
    """Otherwise a compiler starts permutes late: see `placed`, and README's headline."""
    (first, second), index = indices(0)
    assert len({first, second, index}) == 3


def test_along_the_last_dimension_indices_are_as_they_were_computed():
    found, index = indices(1)
    assert found == [index, index]


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_are_put_where_they_belong(dim):
    part = PART if dim == 0 else PART.T
    result = placed(WHOLE, jnp.concatenate([part, 2 * part], dim), dim, [(6, 2), (0, 2)])
    assert result.sum(1 - dim).tolist() == [16, 16, 0, 0, 0, 0, 8, 8]
