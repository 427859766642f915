"""Matmuls that hide their communication: each shard is multiplied while the next one travels."""

from ringcoll.matmuls.all_reduce import matmul_all_reduce
from ringcoll.matmuls.functions import (
    all_gather_einsum,
    all_gather_matmul,
    einsum_reduce_scatter,
    matmul_reduce_scatter,
)
from ringcoll.matmuls.options import GatherOptions, MatmulOptions
from ringcoll.matmuls.sharded import sharded_matmul

__all__ = [
    "GatherOptions",
    "MatmulOptions",
    "all_gather_einsum",
    "all_gather_matmul",
    "einsum_reduce_scatter",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "sharded_matmul",
]
