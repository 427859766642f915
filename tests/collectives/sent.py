"""What a lowered program sends, and what its price says that it sends."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from support import make_mesh

from ringcoll import algorithms, costs
from ringcoll.schedules.registry import LAX

PERMUTE = "collective_permute"
BUILT_IN = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_broadcast")
_OPERATION = re.compile(rf'"?stablehlo\.({"|".join((PERMUTE, *BUILT_IN))})\b')
_RESULT = re.compile(r"-> tensor<((?:\d+x)*)([^>]+>?)>(?: loc\((#loc\d+)\))?$", re.M)
_BITS = {"i1": 8, "f8E5M2": 8, "f8E4M3FN": 8, "complex<f32>": 64, "complex<f64>": 128}


class Message(NamedTuple):
    """One operation that sends.

    Attributes:
        kind: `PERMUTE`, or one of `BUILT_IN`.
        name: the scopes around it, if the text was made with `debug_info=True`.
        dtype, shape: of its result.
        pairs: who sends to whom in a permute.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]

    @property
    def bytes(self) -> int:
        bits = _BITS.get(self.dtype) or int(re.sub(r"\D", "", self.dtype))
        return prod(self.shape) * bits // 8


def messages(text: str) -> list[Message]:
    """Every operation of a StableHLO text that sends, in order."""
    names = dict(re.findall(r'^(#loc\d+) = loc\("(.*?)"', text, re.M))
    found = []
    for operation in _OPERATION.finditer(text):
        line = text[operation.end() : text.index("\n", operation.end())]
        pairs = line.partition("source_target_pairs = dense<")[2].partition("> :")[0]
        ends = [int(i) for i in re.findall(r"\d+", pairs)]
        ends = ends * 2 if len(ends) == 1 else ends  # equal numbers are written once
        result = _RESULT.search(text, operation.end())  # after a region, if there is one
        assert result is not None
        shape = tuple(map(int, result[1].split("x")[:-1]))
        ends = tuple(zip(ends[::2], ends[1::2], strict=True))
        found.append(Message(operation[1], names.get(result[3], ""), result[2], shape, ends))
    return found


def permutes(call: Callable[[jax.Array], jax.Array]) -> int:
    """How many messages the program of a call has on three ranks."""
    spec = P("x")
    mapped = jax.shard_map(call, mesh=make_mesh(3), in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(jnp.ones((9, 2))).as_text().count(f"stablehlo.{PERMUTE}")


def total(sent: Sequence[Message]) -> Counter[str]:
    """The number of messages and their bytes."""
    return Counter(messages=len(sent), bytes=sum(message.bytes for message in sent))


def price(
    collective: str,
    algorithm: Any,
    shape: Sequence[int],
    elements: int,
    itemsize: int,
    wide: int | None = None,
) -> Counter[str]:
    """The collective-permutes of one rank and their bytes, for an operand of so many elements.

    The operand of an all_gather is a shard. Any other is cut into shards, one for each rank; for
    this, an all-reduce pads it.

    Args:
        collective, algorithm, shape: as for `costs.price`; the algorithm may be the built-in.
        elements, itemsize: of the operand.
        wide: bytes of an element of a partial sum, if they are others.
    """
    if algorithm == LAX or not elements:
        return Counter(messages=0, bytes=0)
    cut = 1 if collective == "all_gather" else prod(shape)
    is_staged = isinstance(algorithms.build(collective, algorithm, tuple(shape)), tuple)
    shard = elements / cut if is_staged else ceil(elements / cut)
    paid = costs.price(collective, algorithm, shape)
    size = costs.wire_bytes(collective, algorithm, shape, shard, itemsize, wide)
    return Counter(messages=paid.messages, bytes=round(size))
