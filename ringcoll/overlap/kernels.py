"""Kernels that a program brings along: what its text says of their work."""

import re
from math import prod
from typing import NamedTuple

from ringcoll.overlap.hlo import Computation, Instruction

#: The part of the peak at which attention kernels run. Profiled on a v6e-8 by others
#: (github.com/vlasenkoalexey/tpu_performance_autoresearch_wiki, Llama 3 8B, experiment 28b): splash
#: attention takes 25.5 % of a step of 4217 ms, 1075 ms. In it run 32 layers x 4 sequences, the
#: forward kernel twice (2 products each) and the fused backward one (5): 9 / 2 x 4 x 32 heads x
#: 8192^2 x 128 / 2 FLOPs, as the mask is causal. All of these take 345 ms at 918 TFLOP/s.
ATTENTION_SHARE = 0.32

#: Targets of calls that run a kernel: of Pallas, of Triton, or attention of a library.
_TARGETS = re.compile("tpu_custom_call|mosaic|triton|fmha")
#: JAX's attention kernels, by the names of their instructions or operations.
_ATTENTION = re.compile(
    r"(splash_m[hq]a|flash_mha_bwd)_(fwd|dq|dkv)(_segmented)?|jit\(flash_attention\)/pallas_call"
)
#: The products of each that are as deep as a head of the queries, and as a head of the values.
_PRODUCTS = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2)}


class KernelWork(NamedTuple):
    """A kernel's work and its source, as in `SOURCES`; bytes is 0 if only its shapes tell them."""

    source: str = "unpriced"
    flops: float = 0.0
    bytes: float = 0.0
    note: str = ""


def is_kernel(instruction: Instruction) -> bool:
    """Whether an instruction runs a kernel, or starts one."""
    if instruction.opcode.removesuffix("-start") != "custom-call":
        return False
    return _TARGETS.search(instruction.attribute("custom_call_target") or "") is not None


def work_of(computation: Computation, kernel: Instruction) -> KernelWork:
    """The work of a kernel, by its `cost_estimate` or as an attention kernel of JAX."""
    known, estimate = _attention(computation, kernel), kernel.attribute("cost_estimate")
    if estimate is None:
        return known or KernelWork()
    found = (re.search(rf"\b{key}\W+(\d+)", estimate) for key in ("flops", "bytes_accessed"))
    flops, moved = (float(number[1]) if number else 0.0 for number in found)
    return (known or KernelWork("estimated"))._replace(flops=flops, bytes=moved)


def _attention(computation: Computation, kernel: Instruction) -> KernelWork | None:
    """The work of an attention kernel that JAX ships, by its shapes; None for another kernel."""
    name = _ATTENTION.search(f"{kernel.name} {kernel.attribute('op_name')}")
    shapes = [shape for operand in computation.operands(kernel) for shape in operand.shapes]
    floats = [place for place, shape in enumerate(shapes) if re.match(r"b?f\d", shape.dtype)]
    if name is None or len(floats) < 3:
        return None
    q, k, v = (shapes[place] for place in floats[:3])
    queries, keys = max(q.dims[-2:]), max(k.dims[-2:])  # a layout may have heads' depth before them
    share, mask = 1.0, "all scores count, as the text does not have it"
    if (name[1] or "").startswith("splash") and floats[0]:
        stated = re.findall(r"\bblock_(?:q|kv)(?:_dq|_dkv)?\W+(\d+)", kernel.attributes)
        grid = prod(shapes[0].dims[-2:]) / (queries * keys) * prod(map(int, stated[:2]))
        # Beside the segments of queries and keys: a mask's parts or, if it is computed, positions.
        after = [s for s in shapes[floats[2] + 1 :] if len(s.dims) > 1 and s.dtype[0] in "sup"]
        after = after[2 * bool(name[3]) :]
        if len(stated) > 1 and grid < 1:
            share, mask = grid, "only the blocks of the kernel's grid count"
        elif after and len(after[-1].dims) == 2:
            share, mask = 0.5, "taken for causal, so half of the scores count"
        elif not after:
            mask = ""
    by_query, by_value = _PRODUCTS[name[2] or "fwd"]
    # A fused backward kernel has the queries' gradient too, a part for each block of keys.
    by_query += any(len(shape.dims) > len(q.dims) for shape in kernel.shapes)
    rows = q.elements * (by_query + by_value * v.elements / max(1, k.elements))
    note = f"the mask of {name[0]}: {mask}" if mask else ""
    return KernelWork("attention", 2.0 * keys * rows * share, note=note)
