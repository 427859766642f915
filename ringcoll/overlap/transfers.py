"""Transfers: what each sends, over which links, how long; what each instruction does to one."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache
from math import inf
from typing import NamedTuple

import numpy as np

from ringcoll.overlap.chips import Chip, Gpu
from ringcoll.overlap.hlo import Computation, HloError, Instruction, Module, Shape
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
#: Where a send and a recv have the pairs of the permute of which they are halves.
SEND_RECV_PAIRS = "_xla_send_recv_source_target_pairs"
#: A permute's (sender, receiver) pairs, or the groups of ranks of another collective.
Members = tuple[tuple[int, ...], ...]
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
    given.
    """

    kind: str
    bytes: float
    hops: int
    seconds: float
    links: frozenset[Link]
    members: Members


def transfer(
    computation: Computation, instruction: Instruction, network: Network, chip: Chip | Gpu | None
) -> Transfer:
    """Price a collective. On a GPU it takes the measured time. On a TPU:

    A permute takes hops x bytes / one-way rate of a link, plus a latency for each hop. If more
    messages than hops share a link, the bytes count once for each message. A built-in collective
    takes at least as long as the best algorithm: each rank receives over all its links to the
    group, without latency, and all links together carry what all ranks receive. It is expected to
    take that over the chip's share of the rate, after a start for each link to the farthest rank.
    It occupies the links between the members of each group, so collectives over two axes of a mesh
    can run at the same time.

    Raises:
        HloError: it names a rank that is not in the network.
        NotMeasured: nobody measured it on this GPU.
    """
    kind = instruction.opcode.removesuffix("-start")
    sent = sum(shape.bytes for shape in _operands(computation, instruction))
    pairs = instruction.attribute("source_target_pairs") or instruction.attribute(SEND_RECV_PAIRS)
    numbers = _numbers(pairs)
    members: Members = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    if kind != PERMUTE:
        members = tuple(map(tuple, groups(instruction, len(network.places))))
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
    seconds = least / rate
    if chip:
        share = chip.built_in_sum if kind == "all-reduce" else chip.built_in
        seconds = seconds / share + max(map(network.reach, members), default=0) * chip.start
    return Transfer(kind, max(leaving, default=0.0), 0, seconds, links, members)


def _operands(computation: Computation, instruction: Instruction) -> Iterable[Shape]:
    """The arrays that a rank gives to a collective."""
    operands = computation.operands(instruction)
    if slices := re.findall(r"\{([\d,]*)\}", instruction.attribute("slice_sizes") or ""):
        # Slices of the first operand. The others are what it writes into, and offsets.
        shapes = operands[0].shapes
        types = (shapes[i * len(shapes) // len(slices)].dtype for i in range(len(slices)))
        return map(Shape, types, (tuple(_numbers(sizes)) for sizes in slices))
    if instruction.opcode.startswith(RAGGED):  # the others are as above, and sizes
        operands = operands[:1]
    return [shape for operand in operands for shape in operand.shapes]


def _price_on_gpus(kind: str, sent: float, members: Members, gpu: Gpu) -> Transfer:
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


@cache
def rings(members: Members) -> list[frozenset[int]]:
    """The sets of ranks that messages join; who sends to nobody else is in none."""
    joined: list[frozenset[int]] = []
    for group in members:
        met = [ranks for ranks in joined if ranks.intersection(group)]
        joined = [ranks for ranks in joined if ranks not in met] + [frozenset(group).union(*met)]
    return [ranks for ranks in joined if len(ranks) > 1]


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


class Action(Enum):
    """What an instruction does to a transfer; COMPUTE if it does nothing to one."""

    COMPUTE = auto()
    START = auto()
    UPDATE = auto()
    DONE = auto()
    BLOCKING = auto()  # a collective that starts and ends
    SPREAD = auto()  # a fusion with a collective in it: a part of one under way, or a whole one


class Role(NamedTuple):
    """An action, its computation, and its collective, if any.

    `unread` says what communicates in a way that cannot be priced; "" if nothing does. `group` has
    the collectives of a start that has several, with their computations.
    """

    phase: Action
    where: Computation
    what: Instruction | None = None
    unread: str = ""
    group: tuple[tuple[Computation, Instruction], ...] = ()

    @property
    def sends(self) -> bool:
        """Whether it communicates, in a known or unknown way."""
        return bool(self.what or self.unread)


_MARKERS = {"AsyncCollectiveStart": Action.START, "AsyncCollectiveDone": Action.DONE}
_PHASES = {"start": Action.START, "update": Action.UPDATE, "done": Action.DONE}
#: The beginnings of the names of collectives.
_NAMED = re.compile("all-|collective-|reduce-scatter|ragged-all-")


def role_of(module: Module, computation: Computation, instruction: Instruction) -> Role:
    """The role of an instruction that is not a loop, call or conditional."""
    opcode = instruction.opcode
    base, _, last = opcode.rpartition("-")
    if opcode in COLLECTIVES:
        return Role(Action.BLOCKING, computation, instruction)
    if opcode == "send" and instruction.attribute(SEND_RECV_PAIRS):  # it starts a permute
        return Role(Action.START, computation, replace(instruction, opcode=PERMUTE))
    if opcode == "recv" and instruction.attribute(SEND_RECV_PAIRS):
        return Role(Action.UPDATE, computation)
    phase = _PHASES.get(last, Action.COMPUTE)
    if base in COLLECTIVES and phase is Action.START:
        return Role(phase, computation, instruction)
    if phase in (Action.UPDATE, Action.DONE):
        return Role(phase, computation)
    inside = list(module.within(instruction))
    unread = next(filter(None, map(_unknown, (instruction, *(i for _, i in inside)))), "")
    collectives = [(c, i) for c, i in inside if is_collective(i)]
    if not collectives:
        return Role(phase, computation, None, unread)
    where, what = collectives[0]
    if what.opcode == "all-reduce" and where.name.startswith("all-reduce-scatter"):
        what = replace(what, opcode="reduce-scatter")  # each rank keeps only its slice
    several = len(collectives) > 1 or any(i.opcode in ("while", "conditional") for _, i in inside)
    direct = all(c.name in instruction.called for c, _ in collectives)
    if several and direct and phase is Action.START:
        return Role(phase, where, what, unread, tuple(collectives))
    if several:
        unread = unread or "collectives in one, and only the first is priced, and once"
    if phase is Action.START:
        return Role(phase, where, what, unread)
    if opcode != "fusion":
        return Role(phase, computation, None, unread or f"{opcode} with {what.opcode} in it")
    for _, inner in inside:  # a fusion may start, continue or end a collective
        if marked := _MARKERS.get(inner.attribute("custom_call_target") or ""):
            return Role(marked, where, what, unread)
    return Role(Action.SPREAD, where, what, unread)


def _unknown(instruction: Instruction) -> str:
    """What an instruction sends or waits for, if nothing here can price it; "" if there is none."""
    opcode = instruction.opcode
    base, _, last = opcode.rpartition("-")
    if opcode in ("custom-call", "custom-call-start"):
        if instruction.attribute("has_communication") == "true":
            return "a kernel that sends by remote copies of its own"
        if instruction.number("collective_id") is not None:
            return "a kernel that waits for other devices"
    if opcode in ("send", "recv", "infeed", "outfeed"):
        return f"{opcode}, which waits for the host or for another device"
    known = opcode in COLLECTIVES or (base in COLLECTIVES and last in _PHASES)
    return f"{opcode}, an unknown collective" if _NAMED.match(opcode) and not known else ""
