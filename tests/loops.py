"""Reads from the scheduled text of a program which collectives may start too early on a CPU."""

import re
from typing import NamedTuple

_SENDS = re.compile(
    r" (collective-permute|all-gather|reduce-scatter|all-reduce|all-to-all|collective-broadcast)\("
)
_RUNS = re.compile(r" (while|conditional|call)\(")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%([\w.\-]+)"
)


class _Line(NamedTuple):
    text: str
    operands: list[str]

    @property
    def index(self) -> int | None:
        """The index of the element that a get-tuple-element gets."""
        found = re.search(r" get-tuple-element\(.*\), index=(\d+)", self.text)
        return int(found[1]) if found else None


_Lines = dict[str, _Line]


def too_early(text: str) -> list[tuple[str, str]]:
    """Pairs: a loop that sends, and a later operation that sends and does not need the loop."""
    return _unordered(text)[0]


def too_late(text: str) -> list[tuple[str, str]]:
    """Pairs: an operation that sends, and a later loop that sends and does not need it."""
    return _unordered(text)[1]


def _unordered(text: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The pairs of `too_early` and of `too_late`."""
    computations = {
        name: dict(map(_parsed, (line for line in body.splitlines() if " = " in line)))
        for name, body in re.findall(r"^(?:ENTRY )?%(\S+) \(.*?\{$(.*?)^\}", text, re.M | re.S)
    }
    sends = {}

    def does_send(name: str) -> bool:
        if name not in sends:
            lines = computations.get(name, {}).values()
            sends[name] = any(
                _SENDS.search(line.text) or any(map(does_send, _called(line.text)))
                for line in lines
            )
        return sends[name]

    early: list[tuple[str, str]] = []
    late: list[tuple[str, str]] = []
    for lines in computations.values():
        needs: dict[str, set[str]] = {}  # the loops that a value needs, and what else sends
        loops: list[str] = []
        sent: list[str] = []
        for name, line in lines.items():
            passed = _passed_by(line, lines, computations)
            operands = line.operands if passed is None else [passed]
            if " while(" in line.text:  # it does not wait for values that it only passes on
                operands = _used(line, lines, computations)
            needs[name] = set().union(*(needs.get(operand, ()) for operand in operands))
            is_loop = bool(_RUNS.search(line.text)) and any(map(does_send, _called(line.text)))
            if not is_loop and not _SENDS.search(line.text):
                continue
            early += [(loop, name) for loop in loops if loop not in needs[name]]
            if is_loop:
                late += [(other, name) for other in sent if other not in needs[name]]
            (loops if is_loop else sent).append(name)
            needs[name].add(name)
    return early, late


def _parsed(line: str) -> tuple[str, _Line]:
    name, rest = re.match(r"\s*(?:ROOT )?%([\w.\-]+) = (.*)", line).groups()
    return name, _Line(line, re.findall(r"%([\w.\-]+)", rest))


def _called(line: str) -> list[str]:
    branches = ",".join(re.findall(r"branch_computations=\{([^}]*)\}", line))
    return _CALLED.findall(line) + re.findall(r"%([\w.\-]+)", branches)


def _passed_by(line: _Line, lines: _Lines, computations: dict[str, _Lines]) -> str | None:
    """The operand behind a result that a loop only passes on. It is there before the loop."""
    if line.index is None:
        return None
    (source,) = line.operands
    if " tuple(" in lines[source].text:
        return lines[source].operands[line.index]
    is_loop = " while(" in lines[source].text
    if not is_loop or not _hands_on(lines[source], line.index, computations):
        return None
    before = lines[lines[source].operands[0]]
    return before.operands[line.index] if " tuple(" in before.text else lines[source].operands[0]


def _hands_on(loop: _Line, index: int, computations: dict[str, _Lines]) -> bool:
    """Whether the body of a loop returns this element of its operand unchanged."""
    lines = computations[re.search(r"body=%([\w.\-]+)", loop.text)[1]]
    *_, root = lines.values()
    if " tuple(" not in root.text:
        return False
    name = root.operands[index]
    while (passed := _passed_by(lines[name], lines, computations)) is not None:
        name = passed
    (given,) = (name for name, line in lines.items() if " parameter(0)" in line.text)
    return lines[name].index == index and lines[name].operands == [given]


def _used(loop: _Line, lines: _Lines, computations: dict[str, _Lines]) -> list[str]:
    """The operands of a loop, without those that it only passes on."""
    before = lines[loop.operands[0]]
    if " tuple(" not in before.text:
        return loop.operands
    body = computations[re.search(r"body=%([\w.\-]+)", loop.text)[1]]
    asks = computations[re.search(r"condition=%([\w.\-]+)", loop.text)[1]]
    *inside, _ = body.values()
    read = set()
    for within, reading in ((body, inside), (asks, asks.values())):
        names = {operand for line in reading for operand in line.operands}
        read |= {line.index for name, line in within.items() if name in names}
    return [
        operand
        for index, operand in enumerate(before.operands)
        if index in read or not _hands_on(loop, index, computations)
    ]
