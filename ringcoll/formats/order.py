"""Which steps of a program wait for which: an order in which all can run, or a deadlock.

A step waits for the step before it in its thread block, for the step that it names, and for the
message that it receives. The n-th message of a connection is sent by the n-th step that sends on
it, and received by the n-th step that receives on it.
"""

from collections import defaultdict
from itertools import count
from typing import Any

from ringcoll.formats.program import At, Program, Step
from ringcoll.schedules.schedule import ScheduleError


class StepOrder:
    """An order of the steps of a program in which all can run, and the rounds of its messages.

    Attributes:
        steps: the steps by place.
        source: for each step that receives, the step that sends.
        order: all steps in an order in which they can run.
        round: for each step that sends, the round of its message: one more than the rounds that it
            has received.
        rounds: for each step, how many rounds have been received when it is done.

    Raises:
        ScheduleError: steps wait for each other, or for a message that nobody sends.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.steps = dict(program.steps())
        self.connections = self._connections()
        self.source: dict[At, At] = {}  # for each step that receives, the step that sends
        for sends, receives in self.connections:
            self.source |= zip(receives, sends, strict=True)
        self.waits = {at: self._waits(at, step) for at, step in self.steps.items()}
        self.order = self._sorted(self.waits)
        if len(self.order) < len(self.steps):
            raise self._stuck()
        self.place = {at: i for i, at in enumerate(self.order)}
        self.round: dict[At, int] = {}  # for each step that sends, the round of its message
        self.rounds: dict[At, int] = {}  # for each step, the rounds received when it is done
        for at in self.order:
            before = (self.rounds[other] for other in self.waits[at] if other.rank == at.rank)
            sent = [self.round[self.source[at]]] if at in self.source else []
            self.rounds[at] = max([*before, *sent], default=0)
            if self.steps[at].does.sends:
                self.round[at] = self.rounds[at] + 1
        #: For each step and each thread block of its rank: the last step that is done before it.
        self.done: dict[At, dict[int, int]] = {}
        for at in self.order:
            done = self.done[at] = {}
            for other in self.waits[at]:
                if other.rank == at.rank:
                    for block, last in (*self.done[other].items(), (other.block, other.step)):
                        done[block] = max(done.get(block, -1), last)

    def _connections(self) -> list[tuple[list[At], list[At]]]:
        """The steps that send and the steps that receive on every connection."""
        sends, receives = defaultdict[Any, list[At]](list), defaultdict[Any, list[At]](list)
        for at, step in self.steps.items():
            block = self.program.block(at)
            if step.does.sends:
                sends[at.rank, block.to, block.channel].append(at)
            if step.does.receives:
                receives[block.source, at.rank, block.channel].append(at)
        found = []
        for key in sorted(sends.keys() | receives.keys()):
            sent, received = sends[key], receives[key]
            for sender, receiver in zip(sent, received, strict=False):
                self._check_counts(sender, receiver)
            if len(sent) != len(received):
                raise self._unmatched(key, sent, received)
            found.append((sent, received))
        return found

    def _unmatched(
        self, key: tuple[int, int, int], sent: list[At], received: list[At]
    ) -> ScheduleError:
        """The error of the first step whose message no step receives or sends."""
        few = min(len(sent), len(received))
        sender, receiver, channel = key
        if len(sent) > few:
            why = f"rank {receiver}, to which it sends, receives {few} of {len(sent)} messages"
            return self.program.wrong(sent[few], f"{why} on channel {channel}")
        why = f"rank {sender}, from which it receives, sends {few} of {len(received)} messages"
        return self.program.wrong(received[few], f"{why} on channel {channel}")

    def _check_counts(self, sender: At, receiver: At) -> None:
        sent, received = self.steps[sender].count, self.steps[receiver].count
        if sent != received:
            why = f"it receives {received} chunks, but {sender}, which sends them, sends {sent}"
            raise self.program.wrong(receiver, why)

    def _waits(self, at: At, step: Step) -> list[At]:
        waits = [at._replace(step=at.step - 1)] if at.step else []
        if step.after is not None:
            waits.append(At(at.rank, *step.after))
        return waits + ([self.source[at]] if at in self.source else [])

    def _sorted(self, waits: dict[At, list[At]]) -> list[At]:
        """Steps, each after the steps that it waits for; without steps that wait for ever."""
        open_, followers = {}, defaultdict[At, list[At]](list)
        for at, before in waits.items():
            open_[at] = len(before)
            for other in before:
                followers[other].append(at)
        ready = [at for at, missing in open_.items() if not missing]
        for at in ready:  # it grows
            for follower in followers[at]:
                open_[follower] -= 1
                if not open_[follower]:
                    ready.append(follower)
        return ready

    def _stuck(self) -> ScheduleError:
        """The error of steps that wait for each other."""
        done = set(self.order)
        at = next(at for at in self.steps if at not in done)
        walk: list[At] = []
        while at not in walk:
            walk.append(at)
            at = next(other for other in self.waits[at] if other not in done)
        circle = [*walk[walk.index(at) :], at]
        chain = ", which waits for ".join(map(str, circle[1:4] + circle[4:][-1:]))
        return self.program.wrong(at, f"it waits for ever: for {chain}")

    def buffered(self) -> int:
        """The fewest messages that a connection must be able to hold so that nothing deadlocks."""
        for size in count(1):
            waits = {at: list(before) for at, before in self.waits.items()}
            for sends, receives in self.connections:
                for sender, taken in zip(sends[size:], receives, strict=False):
                    waits[sender].append(taken)
            if len(self._sorted(waits)) == len(waits):
                return size
        raise AssertionError("a connection that holds all messages never waits")

    def before(self, first: At, second: At) -> bool:
        """Whether a step is always done before another step of its rank starts."""
        if self.done[second].get(first.block, -1) >= first.step:
            return True
        # Messages through other ranks may also order the two.
        waiting, seen = [second], {second}
        for at in waiting:  # it grows
            for other in self.waits[at]:
                if other == first:
                    return True
                if other not in seen and self.place[other] > self.place[first]:
                    seen.add(other)
                    waiting.append(other)
        return False
