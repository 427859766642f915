"""Say what to change first: the most exposed collective, and the form that would hide it."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ringcoll.costs.matmul import APART, Work, bare_seconds, hidden_seconds, rounds_of
from ringcoll.costs.model import Model
from ringcoll.overlap.chips import Chip, Gpu
from ringcoll.overlap.hlo import Computation, Instruction, Module
from ringcoll.overlap.instruction_costs import Costs
from ringcoll.overlap.lines import Lines
from ringcoll.overlap.network import Network
from ringcoll.overlap.rows import Row, by_line
from ringcoll.overlap.transfers import COLLECTIVES, groups, is_collective
from ringcoll.overlap.work import flops

#: Opcodes that pass on a value unchanged, or with padding.
_PASSING = ("bitcast", "copy", "convert", "reshape", "opt-barrier", "pad")
_MATMULS = ("convolution", "dot", "custom-call")  # a custom-call may call a library's matmul


class _At(NamedTuple):
    """An instruction, and the computation that contains it."""

    computation: Computation
    instruction: Instruction


_Path = list[_At]


class _Pair(NamedTuple):
    """A collective with its matmuls: a title, the form that would hide it, and the work.

    `products` are the paths of the matmuls.
    """

    title: str
    form: str
    products: list[_Path]
    work: Work
    block: float  # bytes that the form sends in a round
    members: list[list[int]]  # its groups of ranks


def advice(
    rows: Sequence[Row],
    module: Module,
    lines: Lines,
    network: Network,
    costs: Costs,
    chip: Chip | Gpu | None,
) -> str:
    """A sentence about the most exposed line of source; "" if none is exposed.

    If a gather feeds matmuls, or a sum adds results of a matmul, the line names the form that runs
    both at once, and its time by the model of `ringcoll.costs.matmul`. The model assumes a
    bidirectional ring (on GPUs a ring in one direction) and a piece of the matmul in each round.
    It takes the matmul's time from the program.
    """
    line = next(iter(by_line(rows)), None)
    exposed = line.sum_of("exposed" if chip else "bare") if line else 0
    if not line or exposed < 0.5e-6:  # it would be printed as 0 us
        return ""
    worst = line.rows[0]
    flow = _Flow(module)
    # ringcoll's einsum has already compared the forms, and has chosen the built-in.
    weighed = re.search(r"ringcoll\.\w*einsum", worst.op_name)
    pair = None if weighed else flow.pair(worst, len(network.places))
    subject = f"{worst.at or worst.name} ({worst.kind})"
    if pair:
        # A compiler that rewrites a collective may drop its source line, but keep the matmul's.
        named = (worst.name, *(at.instruction.name for at in pair.products[0]))
        known = (lines.of(name) for name in named)
        at = next(
            (line._replace(op_name="", function="").short for line in known if line.file),
            worst.name,
        )
        subject = f"{pair.title} at {at}"
    if chip is None:
        form = f"; try `{pair.form}`" if pair else ""
        return f"to change first: {subject}: no matmul runs under it{form}"
    found = f"to change first: {subject}: {exposed * 1e6:.0f} us exposed"
    if pair is None:
        return found
    products = sum(costs.of(*product[0]).seconds for product in pair.products)
    now = worst.exposed + worst.count * products
    then = worst.count * _hidden(pair, products, network, chip)
    gain = f"`{pair.form}` would take at best {then * 1e6:.0f} us (modelled)"
    if then >= now:
        gain = f"no form of ringcoll is quicker by its model ({then * 1e6:.0f} us)"
    return f"{found}, {now * 1e6:.0f} us with the matmul; {gain}"


def _hidden(pair: _Pair, products: float, network: Network, chip: Chip | Gpu) -> float:
    """The seconds of a pair in its form, if each group is a ring in the order of its ranks.

    Args:
        pair: a collective with its matmuls.
        products: the seconds of the matmuls in the program.
        network: the places of the ranks.
        chip: where the program runs.
    """
    if isinstance(chip, Gpu):
        hop = max(chip.collective("ppermute", pair.block, group) for group in pair.members)
        model = Model(hop, 0.0, 3 / chip.hbm, products / pair.work.flops)
        return _in_rounds(pair, model, "ring")
    rings = [list(zip(group, [*group[1:], group[0]], strict=True)) for group in pair.members]
    hops = max(network.hops(*step) for ring in rings for step in ring)
    # If ranks have one link, both directions of the ring share it.
    ways = min(2, *(network.ports(group) for group in pair.members))
    wire = hops * 2 / ways / chip.link
    model = Model(hops * chip.hop, wire, 3 / chip.hbm, products / pair.work.flops)
    return _in_rounds(pair, model, "bidirectional_ring")


def _in_rounds(pair: _Pair, model: Model, algorithm: str) -> float:
    """The seconds of a pair in its form, by the rounds of an algorithm."""
    n = len(pair.members[0])
    made = rounds_of(algorithm, n)
    joining = APART if pair.form == "all_gather_matmul" else None
    seconds = hidden_seconds([pair.work], pair.block, n, model, made, joining)
    if pair.form == "matmul_all_reduce":  # no matmul runs under the gather of the sums
        seconds += bare_seconds([Work(0)], pair.block, n, model)
    return seconds


def _added(gather: Instruction, at: _At, number: int) -> float:
    """The bytes that additions move in a round: none, unless a matmul sums over the gathered axis.

    `number` says which operand of the matmul is gathered. In `dim_labels`, such as bf_io->bf, f
    and i are the dimensions that the matmul sums over.
    """
    labels = re.split("_|->", at.instruction.attribute("dim_labels") or "bf_io->bf")
    dimension = int((gather.attribute("dimensions") or "{0}").strip("{}"))
    summed = labels[number][dimension : dimension + 1] == "fi"[number]
    return 4 * at.instruction.bytes if summed else 0.0  # a product and a sum, each read and written


class _Flow:
    """Traces the values of a program back to the instructions that make them.

    A path is an instruction with the fusions around it, the outermost first.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        fused = {
            body.name
            for computation in module.computations.values()
            for instruction in computation.instructions
            for body in self._bodies(instruction)
        }
        self._paths = [
            path
            for computation in module.computations.values()
            if computation.name not in fused
            for instruction in computation.instructions
            for path in self._inside([_At(computation, instruction)])
        ]

    def _inside(self, path: _Path) -> Iterator[_Path]:
        """A path, and the paths of all instructions in its fusion."""
        yield path
        for body in self._bodies(path[-1].instruction):
            for inner in body.instructions:
                yield from self._inside([*path, _At(body, inner)])

    def _bodies(self, instruction: Instruction) -> list[Computation]:
        """The computations of a fusion or an asynchronous start; none for other instructions."""
        base, _, phase = instruction.opcode.rpartition("-")
        if instruction.opcode == "fusion" or (phase == "start" and base not in COLLECTIVES):
            return list(self._module.called(instruction))
        return []

    def collective(self, name: str) -> _Path | None:
        """The path of a row's collective. The row has the name of the collective or its fusion."""
        for path in self._paths:
            if is_collective(path[-1].instruction) and name in (at.instruction.name for at in path):
                return path
        return None

    def pair(self, row: Row, ranks: int) -> _Pair | None:
        """A collective with the matmuls that it feeds or whose results it sums; None if none."""
        path = self.collective(row.name)
        if path is None:
            return None
        where, collective = path[-1]
        operands = where.operands(collective)
        sent = sum(operand.bytes for operand in operands)
        members = groups(collective, ranks)
        if row.kind == "all-gather":
            fed = list(self._fed_by(collective))
            products = [product for product, _ in fed]
            added = sum(_added(collective, product[-1], number) for product, number in fed)
            title, form, block = "gather, then multiply", "all_gather_matmul", sent
        elif row.kind in ("reduce-scatter", "all-reduce"):
            sources = (self._origin([*path[:-1], _At(where, operand)]) for operand in operands)
            products = [source for source in sources if self._flops(source)]
            block = sent / len(members[0])
            title, form = "multiply, then scatter", "matmul_reduce_scatter"
            added = 3 * block  # read the received sum and the product, write their sum
            # Some compilers write a reduce-scatter as an all-reduce and a slice of its result.
            if row.kind == "all-reduce" and not row.op_name.endswith("reduce_scatter"):
                title, form = "multiply, then reduce", "matmul_all_reduce"
        else:
            return None
        work = Work(sum(map(self._flops, products)), added)
        return _Pair(title, form, products, work, block, members) if products else None

    def _flops(self, path: _Path) -> float:
        """The FLOPs of the matmul at the end of a path; 0 for any other instruction."""
        of = path[-1].instruction.opcode
        return flops(self._module, *path[-1]) if of in _MATMULS else 0.0

    def _fed_by(self, source: Instruction) -> Iterator[tuple[_Path, int]]:
        """The matmuls with an operand that `source` makes, and the number of that operand."""
        for path in self._paths:
            if self._flops(path):
                where, matmul = path[-1]
                for number, operand in enumerate(where.operands(matmul)[:2]):
                    origin = self._origin([*path[:-1], _At(where, operand)])
                    if origin[-1].instruction is source:
                        yield path, number

    def _origin(self, path: _Path) -> _Path:
        """The path of the instruction that makes a value."""
        while True:
            *outside, (where, instruction) = path
            handed = _handed_on(where, instruction)
            if bodies := self._bodies(instruction):
                path = [*path, _At(bodies[0], bodies[0].root)]
            elif instruction.opcode == "parameter" and outside:
                *further, (around, caller) = outside
                given = _inputs(around, caller)
                number = int(instruction.operands[0])
                if number >= len(given):
                    return path
                path = [*further, _At(around, given[number])]
            elif handed:
                path = [*outside, _At(where, handed)]
            else:
                return path


def _handed_on(where: Computation, instruction: Instruction) -> Instruction | None:
    """The value that an instruction passes on; None if it makes a new one."""
    operands = where.operands(instruction)
    if not operands:
        return None
    source = operands[0]
    if instruction.opcode == "get-tuple-element":
        while source.opcode == "opt-barrier" and where.operands(source):
            source = where.operands(source)[0]
        held = where.operands(source) if source.opcode == "tuple" else []
        return dict(enumerate(held)).get(instruction.number("index") or 0, source)
    ends = instruction.opcode.endswith(("-update", "-done"))
    return source if ends or instruction.opcode in _PASSING else None


def _inputs(where: Computation, caller: Instruction) -> list[Instruction]:
    """The operands of a call; if it has none, those that its updates bring."""
    if caller.operands:
        return where.operands(caller)
    updates = (user for user in where.users[caller.name] if user.opcode.endswith("-update"))
    return [given for update in updates for given in where.operands(update)[1:]]
