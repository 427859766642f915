"""Layers whose collectives hide under their matmuls: functions on pytrees of parameters."""

from ringcoll.layers import fsdp as fsdp
from ringcoll.layers import tensor_parallel as tensor_parallel
from ringcoll.layers.randomness import fold_rng_over_axis as fold_rng_over_axis
from ringcoll.layers.replicas import copied as copied
from ringcoll.layers.replicas import copied_beside as copied_beside
