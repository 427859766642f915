"""Programs as the execution plans of MSCCL++: JSON, which its executor reads.

Ranks put data into each other's memory. A receiver first signals that its memory is free; then a
sender puts chunks and signals, and the receiver waits. The chunks arrive in scratch that is used
only for this message, or directly in their place if nothing else is ever written there. A step that
waits for another thread block acquires a semaphore, which the other thread block releases.

The executor takes at most `_MOST_OPERATIONS` in a thread block. So a longer thread block continues
in another one, which has the same channels and first acquires a semaphore.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from ringcoll.formats.order import StepOrder
from ringcoll.formats.program import At, ChunkPlace, Program, Step

_COLLECTIVES = {
    "all_gather": "allgather",
    "psum_scatter": "reducescatter",
    "psum": "allreduce",
    "all_to_all": "alltoall",
}
_THREADS = 1024
#: The most operations of a thread block, and the most semaphores of an operation: the lengths of
#: the executor's arrays (MAX_OPERATION and MAX_DEVICE_SEMAPHORES in its execution_common.hpp).
_MOST_OPERATIONS, _MOST_SEMAPHORES = 64, 16
_SYNC = {"name": "nop"}  # waits until all threads of a block are here
#: A connection: the sender, the receiver and the channel.
_Connection = tuple[int, int, int]
_Operations = list[dict[str, Any]]


def to_mscclpp(program: Program, in_place: bool | None = None) -> str:
    """The text of an execution plan.

    Args:
        program: a program of any collective; prove it first. A plan can only add; there is none
            for other reductions.
        in_place: whether the plan is for calls in place; None: out of place, if the program is
            for such calls.

    Raises:
        ValueError: the program is not for such calls.

    >>> text = formats.to_mscclpp(formats.program("all_gather", "ring", (2,)))
    >>> text[:28]
    '{"name": "all_gather_ring", '
    """
    if in_place is None:
        in_place = not program.out_of_place
    if not (program.in_place if in_place else program.out_of_place):
        where = "in place" if in_place else "out of place"
        raise ValueError(f"in_place={in_place}: the program is not meant for calls {where}")
    plan = _Plan(program, in_place)
    head = {
        "name": program.name,
        "collective": _COLLECTIVES[program.collective],
        "protocol": "Simple",
        "inplace": in_place,
        "reuse_resources": False,
        "num_threads_per_block": _THREADS,
        "use_double_scratch_buffer": False,
        "buffer_alignment": 16,
        "min_message_size": 0,
        "max_message_size": 2**64 - 1,
    }
    gpus = ",\n ".join(json.dumps(plan.gpu(rank)) for rank in range(program.size))
    return json.dumps(head)[:-1] + f', "gpus": [\n {gpus}\n]}}\n'


class _Plan:
    """Channels, places of messages and semaphores, by rank."""

    def __init__(self, program: Program, in_place: bool) -> None:
        self.program, self.in_place = program, in_place
        order = StepOrder(program)
        self.channels: list[list[_Connection]] = [[] for _ in program.ranks]
        self.scratch = [rank.scratch for rank in program.ranks]
        self.slots: dict[At, ChunkPlace] = {}  # where a step that receives gets its message
        writers = self._writers()
        self.puts: dict[
            At, tuple[int, ChunkPlace]
        ] = {}  # for a step that sends: the rank and place
        for sends, receives in order.connections:
            sender, receiver = sends[0], receives[0]
            connection = sender.rank, receiver.rank, program.block(sender).channel
            for rank in (sender.rank, receiver.rank):  # both ranks number a pair's channels alike
                self.channels[rank].append(connection)
            for sent, received in zip(sends, receives, strict=True):
                step = program.step(received)
                if not self._is_direct(received.rank, step, writers):
                    self.slots[received] = ChunkPlace("s", self.scratch[received.rank])
                    self.scratch[received.rank] += step.count
                place = self.slots.get(received, step.target)
                self.puts[sent] = received.rank, place
        self.semaphores = [0] * program.size
        self.acquires: dict[At, int] = {}
        self.releases = defaultdict[At, list[int]](list)
        for at, step in program.steps():
            if step.after:
                self.acquires[at] = number = self.semaphores[at.rank]
                self.releases[At(at.rank, *step.after)].append(number)
                self.semaphores[at.rank] += 1

    def _writers(self) -> dict[tuple[int, ChunkPlace], int]:
        count = defaultdict[tuple[int, ChunkPlace], int](int)
        for at, step in self.program.steps():
            for place in step.written:
                count[at.rank, place] += 1
        return count

    def _is_direct(self, rank: int, step: Step, writers: dict[tuple[int, ChunkPlace], int]) -> bool:
        """Whether a message can be put directly in its place: nothing else is written there."""
        free = {"s"} if self.in_place and self.program.collective != "all_gather" else {"s", "o"}
        once = all(writers[rank, place] == 1 for place in step.written)
        return step.kind == "r" and step.target.buffer in free and once

    def gpu(self, rank: int) -> dict[str, Any]:
        """The plan of one rank."""
        one, n = self.program.ranks[rank], self.program.size
        remote = sorted(
            {(peer, place.buffer) for at, (peer, place) in self.puts.items() if at.rank == rank}
        )
        blocks = [
            part
            for number in range(len(one.blocks))
            for part in _Block(self, rank, number, remote).as_json()
        ]
        inputs, outputs = {"all_gather": (1, n), "psum_scatter": (n, 1)}.get(
            self.program.collective, (1, 1)
        )
        peers = [
            receiver if sender == rank else sender for sender, receiver, _ in self.channels[rank]
        ]
        return {
            "id": rank,
            # A program in place may have only one buffer, but the executor divides by both numbers.
            "input_chunks": one.inputs or one.outputs * inputs // outputs,
            "output_chunks": one.outputs or one.inputs * outputs // inputs,
            "scratch_chunks": self.scratch[rank],
            "threadblocks": [{"id": number, **block} for number, block in enumerate(blocks)],
            "channels": [{"channel_type": "memory", "connected_to": peers}] if peers else [],
            "remote_buffers": [
                {"rank": peer, "type": buffer, "access_channel_types": ["memory"]}
                for peer, buffer in remote
            ],
            "semaphores": [{"init_value": 0}] * self.semaphores[rank],
        }


class _Block:
    """The operations of a thread block."""

    def __init__(self, plan: _Plan, rank: int, number: int, remote: list[tuple[int, str]]) -> None:
        self.plan, self.rank, self.number = plan, rank, number
        self.block = plan.program.ranks[rank].blocks[number]
        self.remote = [
            i
            for i, (peer, _) in enumerate(remote)
            if peer == self.block.to and any(s.does.sends for s in self.block.steps)
        ]
        self.remote_names = [remote[i] for i in self.remote]
        #: Its channels: one to the rank that it sends to, one from the rank that it receives from.
        self.channels: list[int] = []
        self.to = self.source = -1
        steps = self.block.steps
        if any(s.does.sends for s in steps):
            self.to = self._channel((rank, self.block.to, self.block.channel))
        if any(s.does.receives for s in steps):
            self.source = self._channel((self.block.source, rank, self.block.channel))

    def _channel(self, connection: Any) -> int:
        self.channels.append(self.plan.channels[self.rank].index(connection))
        return len(self.channels) - 1

    def as_json(self) -> list[dict[str, Any]]:
        """The thread block, in parts that the executor can take; they do not have ids yet."""
        refs = {"access_channel_type": "memory", "remote_buffer_ids": self.remote}
        channels = {"channel_type": "memory", "channel_ids": self.channels}
        return [
            {
                "ops": ops,
                "channels": [channels] if self.channels else [],
                "remote_buffer_refs": [refs] if self.remote else [],
            }
            for ops in self._in_parts(self._operations())
        ]

    def _in_parts(self, ops: _Operations) -> list[_Operations]:
        """The operations of each part. All parts but the last end with a release for the next."""
        parts = []
        before: _Operations = []
        while len(before) + len(ops) > _MOST_OPERATIONS:
            number = self.plan.semaphores[self.rank]
            self.plan.semaphores[self.rank] += 1
            here = _MOST_OPERATIONS - len(before) - 2
            parts.append([*before, *ops[:here], _SYNC, _of_semaphores("sem_release", [number])])
            before, ops = [_of_semaphores("sem_acquire", [number]), _SYNC], ops[here:]
        return [*parts, [*before, *ops]]

    def _operations(self) -> _Operations:
        ops: _Operations = []
        if self.source >= 0:
            ops.append(_on("signal", self.source))
        if self.to >= 0:
            ops += [_on("wait", self.to), _SYNC]
        for i, step in enumerate(self.block.steps):
            ops += self._step(At(self.rank, self.number, i), step)
        return ops

    def _step(self, at: At, step: Step) -> Iterable[dict[str, Any]]:
        does, count = step.does, step.count
        if at in self.plan.acquires:
            yield _of_semaphores("sem_acquire", [self.plan.acquires[at]])
            yield _SYNC
        value = step.source
        if does.receives:
            yield _on("wait", self.source)
            yield _SYNC
            value = self.plan.slots.get(at, step.target)
        if does.adds or (does.receives and does.reads):
            first = step.target if does.adds else step.source
            target = step.target if does.writes else value
            yield {
                "name": "re",
                "reduce_op": "sum",
                "src_buff": [_local(first, count), _local(value, count)],
                "dst_buff": [_local(target, count)],
            }
            yield _SYNC
            value = target
        elif does.writes and value != step.target:
            yield {
                "name": "copy",
                "src_buff": [_local(value, count)],
                "dst_buff": [_local(step.target, count)],
            }
            yield _SYNC
            value = step.target
        if does.sends:
            peer, place = self.plan.puts[at]
            number = self.remote_names.index((peer, place.buffer))
            yield {
                "name": "put",
                "src_buff": [_local(value, count)],
                "dst_buff": [{"buffer_id": number, "index": place.first, "size": count}],
                "channel_ids": [self.to],
                "channel_type": "memory",
            }
            yield _SYNC
            yield _on("signal", self.to)
        if numbers := self.plan.releases[at]:
            yield _SYNC
            for i in range(0, len(numbers), _MOST_SEMAPHORES):
                yield _of_semaphores("sem_release", numbers[i : i + _MOST_SEMAPHORES])


def _of_semaphores(name: str, numbers: list[int]) -> dict[str, Any]:
    return {"name": name, "semaphore_ids": numbers}


def _on(name: str, channel: int) -> dict[str, Any]:
    return {"name": name, "channel_ids": [channel], "channel_type": "memory"}


def _local(place: ChunkPlace, count: int) -> dict[str, Any]:
    return {"type": place.buffer, "index": place.first, "size": count}
