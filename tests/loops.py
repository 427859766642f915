"""Reads from the scheduled text of a program which collectives may start too early on a CPU."""

import re

_SENDS = re.compile(
    r" (collective-permute|all-gather|reduce-scatter|all-reduce|all-to-all|collective-broadcast)\("
)
_RUNS = re.compile(r" (while|conditional|call)\(")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%([\w.\-]+)"
)


def too_early(text: str) -> list[tuple[str, str]]:
    """Pairs of a loop that sends and what sends after it, and needs nothing of the loop."""
    computations = {
        name: [line for line in body.splitlines() if " = " in line]
        for name, body in re.findall(r"^(?:ENTRY )?%(\S+) \(.*?\{$(.*?)^\}", text, re.M | re.S)
    }
    sends = {}

    def does_send(name: str) -> bool:
        if name not in sends:
            lines = computations.get(name, ())
            sends[name] = any(
                _SENDS.search(line) or any(map(does_send, _called(line))) for line in lines
            )
        return sends[name]

    found = []
    for lines in computations.values():
        needs: dict[str, set[str]] = {}  # the loops that a value needs
        loops: list[str] = []
        for line in lines:
            name, rest = re.match(r"\s*(?:ROOT )?%([\w.\-]+) = (.*)", line).groups()
            operands = re.findall(r"%([\w.\-]+)", rest)
            needs[name] = set().union(*(needs.get(operand, ()) for operand in operands))
            is_loop = bool(_RUNS.search(line)) and any(map(does_send, _called(line)))
            if is_loop or _SENDS.search(line):
                found += [(loop, name) for loop in loops if loop not in needs[name]]
            if is_loop:
                loops.append(name)
                needs[name].add(name)
    return found


def _called(line: str) -> list[str]:
    branches = ",".join(re.findall(r"branch_computations=\{([^}]*)\}", line))
    return _CALLED.findall(line) + re.findall(r"%([\w.\-]+)", branches)
