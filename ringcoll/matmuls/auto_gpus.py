"""Choose for "auto" how a matmul with a collective runs on GPUs: the ring, or the built-in."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ringcoll.collectives.table import LAX
from ringcoll.costs import machines
from ringcoll.costs.machines import KINDS, MACHINES, Device
from ringcoll.costs.matmul import Work, hidden_seconds, piece_seconds, rounds_of
from ringcoll.costs.prediction import predict
from ringcoll.matmuls.labels import Gather, Scatter
from ringcoll.matmuls.work import are_known, fastest, nbytes, ratio, summed, works_of

#: The algorithm that hides a collective on GPUs. Their scheduler keeps only one permute in flight,
#: so a second direction would be exposed.
HIDDEN_ON_GPUS = "ring"
#: The GPU whose measurements "auto" uses if the device was not measured.
GPU = "h100"


def to_gather(
    gather: Gather, x: Any, others: Sequence[Any], ranks: int, device_kind: str | None
) -> str:
    """The algorithm that gathers x on GPUs; the built-in if the devices cannot be GPUs."""
    if _is_no_gpu(device_kind) or not are_known(x, *others):
        return LAX
    works = works_of(gather, x, others, ranks)
    sent = ratio(gather.wire, x.dtype)
    return fastest(seconds("all_gather", works, x, nbytes(x), ranks, device_kind, sent))


def to_scatter(
    scatter: Scatter, pairs: Sequence[tuple[Any, Any]], ranks: int, device_kind: str | None
) -> str:
    """The algorithm that scatters a sum of matmuls on GPUs; as `to_gather`."""
    if _is_no_gpu(device_kind) or not are_known(*(x for pair in pairs for x in pair)):
        return LAX
    if scatter.wire:
        return LAX
    work, block = summed(scatter, pairs, ranks)
    return fastest(seconds("psum_scatter", [work], pairs[0][0], block, ranks, device_kind))


def seconds(
    collective: str,
    works: Sequence[Work],
    factor: Any,
    shard_bytes: int,
    ranks: int,
    device_kind: str | None,
    sent: float = 1.0,
) -> dict[str, float]:
    """Seconds on GPUs of matmuls with a built-in collective, and of the ring under them.

    They are computed from measured collectives, permutes and matmuls of the operand's dtype
    (`ringcoll.costs.machines`). Per byte, a permute is far slower than a built-in collective, so
    the ring is faster only if a permute is shorter than the matmuls of a round. Each matmul of the
    ring is put in its place in the result: it is read and written once more. `sent` is the bytes of
    messages over the bytes of their values.
    """
    device = gpu(device_kind)
    hop = predict("ppermute", sent * shard_bytes, ranks, device)
    rate, memory = device.matmul(factor.dtype.itemsize), device.model.memory
    model = replace(
        device.model, alpha=hop, beta=0.0, start=rate.start, delta=rate.delta, far=memory
    )
    bare = predict(collective, sent * ranks * shard_bytes, ranks, device)
    placing = 2 * memory * sum(work.placed for work in works)
    return {
        LAX: bare + sum(piece_seconds(work, 1, model, False) for work in works),
        HIDDEN_ON_GPUS: placing
        + hidden_seconds(works, shard_bytes, ranks, model, rounds_of(HIDDEN_ON_GPUS, ranks)),
    }


def _is_no_gpu(device_kind: str | None) -> bool:
    return device_kind == "cpu" or device_kind in KINDS


def gpu(device_kind: str | None) -> Device:
    """The machine of a GPU; the machine `GPU` if it was not measured."""
    try:
        found = machines.find(device_kind or GPU)
    except ValueError:
        return MACHINES[GPU]
    return found if found.curves else MACHINES[found.like or GPU]
