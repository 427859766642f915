"""Specs of tensor-parallel parameters, which go by the names on their paths."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from layer_references import Weights

from ringcoll.layers import tensor_parallel as tp


def test_specs_go_by_the_last_name_that_is_known():
    block = {
        "attention": {
            "query": {"kernel": np.ones((8, 4, 2)), "bias": np.ones((4, 2))},
            "out": {"kernel": np.ones((4, 2, 8)), "bias": np.ones(8)},
        },
        "mlp": Weights(np.ones((8, 6)), np.ones((6, 8))),
        "norm": {"scale": np.ones(8)},
    }
    specs = {
        "attention": {
            "query": {"kernel": P(None, "z", None), "bias": P("z", None)},
            "out": {"kernel": P("z", None, None), "bias": P()},
        },
        "mlp": Weights(P(None, "z"), P("z", None)),
        "norm": {"scale": P()},
    }
    assert tp.partition_specs(block, "z") == specs
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
    """A leaf as in Flax: one level further down, under a name that is also a layer's."""

    value: Any


def test_the_specs_of_a_variable_are_those_of_its_array():
    heads = np.ones((8, 4, 2))
    params = {"attention": {"key": heads, "value": heads}, "norm": {"scale": np.ones(8)}}
    specs = tp.partition_specs(params, "z")
    assert specs["attention"]["value"] == P(None, "z", None)
    assert tp.partition_specs(jax.tree.map(Variable, params), "z") == jax.tree.map(Variable, specs)
