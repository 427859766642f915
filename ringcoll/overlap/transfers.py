"""The bytes that a collective sends, the links it occupies, and its time."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from ringcoll.overlap.chips import Chip, Gpu
from ringcoll.overlap.hlo import Computation, HloError, Instruction
from ringcoll.placement.network import Link, Network

RAGGED, PERMUTE = "ragged-all-to-all", "collective-permute"
#: The compiler's collectives, which also exist as -start and -done, and their names in
#: `ringcoll.costs.predict`.
COLLECTIVES: Mapping[str, str] = {
    "all-gather": "all_gather",
    "reduce-scatter": "psum_scatter",
    "all-reduce": "psum",
    "all-to-all": "all_to_all",
    RAGGED: "all_to_all",
    "collective-broadcast": "pbroadcast",
    PERMUTE: "ppermute",
}
#: A GPU's port to the switch. All its messages share it, one after the other.
PORT: Link = ((0,), (0,))


def is_collective(instruction: Instruction) -> bool:
    """Whether an instruction is a collective, or starts one."""
    return instruction.opcode.removesuffix("-start") in COLLECTIVES


@dataclass(frozen=True, slots=True)
class Transfer:
    """One run of a collective.

    bytes are what a rank sends. hops are those of the longest route; 0 for a built-in collective,
    which chooses its own routes. links are those that it occupies. seconds is 0 if no chip is
    given. members are the groups of ranks; of a permute, the (sender, receiver) pairs.
    """

    kind: str
    bytes: float
    hops: int
    seconds: float
    links: frozenset[Link]
    members: Sequence[Sequence[int]]


def transfer(
    computation: Computation, instruction: Instruction, network: Network, chip: Chip | Gpu | None
) -> Transfer:
    """Price a collective. On a GPU it takes the measured time. On a TPU:

    A permute takes hops x bytes / one-way rate of a link, plus a latency for each hop. If more
    messages than hops share a link, the bytes count once for each message. A built-in collective
    gets the least time that any algorithm could take: each rank receives over all its links to the
    group, without latency, and all links together carry what all ranks receive. It occupies the
    links between the members of each group, so collectives over two axes of a mesh can run at the
    same time.

    Raises:
        HloError: it names a rank that is not in the network.
        NotMeasured: nobody measured it on this GPU.
    """
    kind = instruction.opcode.removesuffix("-start")
    operands = computation.operands(instruction)
    if kind == RAGGED:  # the other operands are the array it writes into, and sizes and offsets
        operands = operands[:1]
    sent = sum(operand.bytes for operand in operands)
    members = _pairs(instruction) if kind == PERMUTE else groups(instruction, len(network.places))
    if max((rank for some in members for rank in some), default=0) >= len(network.places):
        raise HloError(
            f"{instruction.name} sends between more than the {len(network.places)} ranks "
            "of the network; pass mesh= the mesh that the program was compiled for"
        )
    if isinstance(chip, Gpu):
        return _price_on_gpus(kind, sent, members, chip)
    rate, latency = (chip.link, chip.hop) if chip else (inf, 0.0)
    if kind == PERMUTE:
        load = network.load(members)
        hops = max((network.hops(*pair) for pair in members), default=0)
        seconds = max(hops, *load.values(), 0) * sent / rate + hops * latency
        return Transfer(kind, sent, hops, seconds, frozenset(load), members)
    links = frozenset[Link]().union(*(network.group_links(group) for group in members))
    leaving = [_sent(kind, sent, len(group)) for group in members]
    least = max(
        (b / network.ports(group) for b, group in zip(leaving, members, strict=True)), default=0.0
    )
    # Groups share links if their members are far apart.
    crossings = sum(network.crossings(group) for group in members)
    shard = max(leaving, default=0.0) / max(1, max(map(len, members), default=1) - 1)
    least = max(least, crossings * shard / max(1, network.link_count))
    if kind.endswith("all-to-all"):  # each block is for one rank, and takes its own route
        ways = sum(network.hops(a, b) / len(g) for g in members for a in g for b in g)
        least = max(least, ways * sent / max(1, len(links)))
    return Transfer(kind, max(leaving, default=0.0), 0, least / rate, links, members)


def _price_on_gpus(kind: str, sent: float, members: Sequence[Sequence[int]], gpu: Gpu) -> Transfer:
    """Price a collective on GPUs by measurements; if it has several groups, the slowest counts."""
    if kind == PERMUTE:
        ranks = {rank for pair in members for rank in pair if pair[0] != pair[1]}
        seconds = gpu.collective(COLLECTIVES[kind], sent, ranks)
        return Transfer(kind, sent, int(bool(ranks)), seconds, frozenset({PORT}), members)
    leaving = max((_sent(kind, sent, len(group)) for group in members), default=0.0)
    seconds = 0.0
    for group in members:
        whole = sent * len(group) if kind == "all-gather" else sent
        seconds = max(seconds, gpu.collective(COLLECTIVES[kind], whole, group))
    return Transfer(kind, leaving, 0, seconds, frozenset({PORT}), members)


def _pairs(instruction: Instruction) -> list[list[int]]:
    """The (sender, receiver) pairs of a permute."""
    numbers = _numbers(instruction.attribute("source_target_pairs"))
    return [[a, b] for a, b in zip(numbers[::2], numbers[1::2], strict=True)]


def _sent(kind: str, operand: float, n: int) -> float:
    """The bytes that each of n ranks sends by a bandwidth-optimal algorithm."""
    if n == 1:
        return 0.0
    if kind == "all-gather":
        return operand * (n - 1)
    if kind == "all-reduce":
        return 2 * operand * (n - 1) / n
    if kind == "collective-broadcast":
        return operand
    return operand * (n - 1) / n  # reduce-scatter, all-to-all


def groups(instruction: Instruction, ranks: int) -> list[list[int]]:
    """The groups of ranks of a built-in collective.

    The text writes them as lists `{{0,1},{2,3}}`; as an iota `[2,2]<=[4]`, perhaps with a
    transposition `T(1,0)`; or as axes of a mesh `mesh['a'=2,'b'=2] {'b'}`, perhaps with an iota
    between them that orders the ranks of the mesh: `, device_ids=([2,2]T(1,0))`.

    Raises:
        HloError: they have another form.
    """
    text = instruction.attribute("replica_groups") or ""
    if iota := re.match(rf"\[([\d,]+)\]<={_IOTA}", text):
        shape, dims, axes = iota.groups()
        return _iota(dims, axes).reshape(_numbers(shape)).tolist()
    if mesh := re.match(rf"mesh\[(.*?)\](?:, device_ids=\({_IOTA}\))?\s*\{{(.*)\}}$", text):
        axes_and_sizes, dims, axes, meant = mesh.groups()
        sizes = {name: int(n) for name, n in re.findall(r"'([^']*)'=(\d+)", axes_and_sizes)}
        # A part of an axis is written 'a':(2)4: its digit of size 4 after one of size 2.
        used = {
            (name, int(before or 1)): int(size or sizes.get(name, 0))
            for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", meant)
        }
        if {name for name, _ in used} <= sizes.keys():
            shape, at = list[int](), dict[tuple[str, int], int]()
            for axis, length in sizes.items():
                left = 1
                for before, size in sorted((b, n) for (name, b), n in used.items() if name == axis):
                    shape += [before // left, size]
                    at[axis, before] = len(shape) - 1
                    left = before * size
                shape.append(length // left)
            order = _iota(dims, axes) if dims else np.arange(np.prod(shape))
            rest = [i for i in range(len(shape)) if i not in at.values()]
            grid = order.reshape(shape).transpose(rest + [at[part] for part in used])
            return grid.reshape(-1, int(np.prod([*used.values()]))).tolist()
    if re.fullmatch(r"[{}\d,\s]*", text):
        lists = filter(None, map(_numbers, re.findall(r"[^{}]+", text)))
        return list(lists) or [list(range(ranks))]
    raise HloError(
        f"{instruction.name}: replica_groups={text} is written in a way that overlap does not "
        "know; please report it with the text of the program"
    )


_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def _iota(dims: str, axes: str | None) -> np.ndarray:
    """The ranks in order, as an array of these dimensions, transposed."""
    shape = _numbers(dims)
    return np.arange(np.prod(shape)).reshape(shape).transpose(_numbers(axes) or range(len(shape)))


def _numbers(text: str | None) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text or "")]
