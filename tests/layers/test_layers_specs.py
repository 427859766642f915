"""Tensor-parallel parameters: specs, which go by the names on their paths; variables of Flax."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from layer_references import Weights
from support import make_mesh

from ringcoll.layers import tensor_parallel as tp


def test_specs_go_by_the_last_name_that_is_known():
    block = {
        "attention": {
            "query": {"kernel": np.ones((8, 4, 2)), "bias": np.ones((4, 2))},
            "out": {"kernel": np.ones((4, 2, 8)), "bias": np.ones(8)},
        },
        "mlp": Weights(np.ones((8, 6)), np.ones((6, 8))),
        "others": {"gate": np.ones((8, 6)), "key": np.ones((8, 4, 2)), "value": np.ones((4, 2))},
        "vocabulary": {"embedding": np.ones((6, 8)), "unembedding": np.ones((8, 6))},
        "norm": {"scale": np.ones(8)},
        "gate": {"activation": jax.nn.silu, "slope": 0.5},
    }
    specs = {
        "attention": {
            "query": {"kernel": P(None, "z", None), "bias": P("z", None)},
            "out": {"kernel": P("z", None, None), "bias": P()},
        },
        "mlp": Weights(P(None, "z"), P("z", None)),
        "others": {"gate": P(None, "z"), "key": P(None, "z", None), "value": P("z", None)},
        "vocabulary": {"embedding": P("z", None), "unembedding": P(None, "z")},
        "norm": {"scale": P()},
        "gate": {"activation": P(), "slope": P()},
    }
    assert tp.partition_specs(block, "z") == specs
    del block["gate"], specs["gate"]  # no arrays
    stacked = jax.tree.map(lambda leaf: np.ones((3, *leaf.shape)), block)
    unsharded = (P(), P(None))
    after = jax.tree.map(lambda spec: P(None, *spec) if spec not in unsharded else P(), specs)
    assert tp.partition_specs(stacked, "z") == after
    own = {"in_projection": np.ones((4, 8)), "out_projection": {"bias": np.ones(4)}}
    options = {"columns": {"in_projection": -1}, "rows": {"out_projection": -2}}
    assert tp.partition_specs(own, ("y", "z"), **options) == {
        "in_projection": P(None, ("y", "z")),
        "out_projection": {"bias": P()},
    }


@jax.tree_util.register_dataclass
@dataclass
class Variable:
    """A leaf as in Flax: one level further down, under a name that is also a layer's.

    It has the attributes of its array, and can be made one.
    """

    value: Any

    def __getattr__(self, name):
        return getattr(self.value, name)

    def __jax_array__(self):
        return jnp.asarray(self.value)


def test_the_specs_of_a_variable_are_those_of_its_array():
    heads = np.ones((8, 4, 2))
    params = {"attention": {"key": heads, "value": heads}, "norm": {"scale": np.ones(8)}}
    specs = tp.partition_specs(params, "z")
    assert specs["attention"]["value"] == P(None, "z", None)
    assert tp.partition_specs(jax.tree.map(Variable, params), "z") == jax.tree.map(Variable, specs)


class Turned(NamedTuple):
    """An object that computes its parameters."""

    up_rows: Any
    down_rows: Any
    up = property(lambda self: self.up_rows.T)
    down = property(lambda self: self.down_rows.T)


def test_beside_the_parameters_there_may_be_what_is_none():
    x, *weights = np.ones((3, 4, 4), np.float32)
    arrays = Weights(*weights)._asdict()
    beside = {"gate": None, "activation": jnp.sin, "epsilon": 1e-6, "name": "mlp"}
    beside |= {"step": jnp.arange(3), "key": jax.random.key(0), "mask": np.ones((4, 4), bool)}

    def of(params):
        mlp = lambda x: tp.mlp(params, x, "x")  # noqa: E731
        return jax.shard_map(mlp, mesh=make_mesh(2), in_specs=P("x"), out_specs=P("x"))(x)

    for params in arrays | beside, SimpleNamespace(**arrays, **beside), Turned(*weights):
        np.testing.assert_array_equal(of(params), of(arrays))


def test_parameters_may_be_attributes_and_variables():
    """Results and gradients are those of a dict of arrays."""
    x, *weights = np.random.default_rng(2).standard_normal((3, 4, 4)).astype(np.float32)
    arrays = Weights(*weights)

    def gradients(params):
        mlp = jax.shard_map(
            partial(tp.mlp, axis_name="x"),
            mesh=make_mesh(2),
            in_specs=(tp.partition_specs(params, "x"), P("x")),
            out_specs=P("x"),
        )
        return jax.value_and_grad(lambda params: mlp(params, x).sum())(params)

    y, found = jax.jit(gradients)(jax.tree.map(Variable, arrays))
    right, expected = jax.jit(gradients)(arrays._asdict())
    assert y == right
    for name, gradient in expected.items():
        np.testing.assert_array_equal(getattr(found, name).value, gradient)
