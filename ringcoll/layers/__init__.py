"""Layers whose matmuls hide their collectives: functions on pytrees of parameters."""

from ringcoll.layers import context_parallel, expert_parallel, fsdp, tensor_parallel
from ringcoll.layers.randomness import fold_rng_over_axis
from ringcoll.layers.replicas import SumOptions, copied, copied_beside

__all__ = [
    "SumOptions",
    "context_parallel",
    "copied",
    "copied_beside",
    "expert_parallel",
    "fold_rng_over_axis",
    "fsdp",
    "tensor_parallel",
]
