"""The forms of a matmul with a collective and their prices, as `cost` prints them.

The plans are those that "auto" compares. What a price consists of is read off two more machines: on
one the wire takes no time, on the other everything but the wire.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ringcoll.choose.plan import EARLY, Plan, cheapest
from ringcoll.choose.under_work import neighbours
from ringcoll.commands import arguments
from ringcoll.commands.overlap_examples import SIZES
from ringcoll.costs.machines import DEVICES, Device
from ringcoll.costs.model import Model
from ringcoll.costs.wire import Wire
from ringcoll.io.text import aligned, seconds_in_words, wrapped
from ringcoll.matmuls import plans
from ringcoll.matmuls.labels import Gather, Product, Scatter
from ringcoll.schedules.registry import LAX

GATHER, SUM = "all_gather_matmul", "matmul_reduce_scatter"
NAMES = GATHER, SUM
#: The options that only matmuls take.
OPTIONS = "shape", "operand", "dim"

_DTYPE = jnp.dtype(jnp.bfloat16)
_LEGEND = (
    '* is what "auto" runs. hop: all messages, if nothing else took time. product: all the rest, '
    "if messages took no time. exposed: the total less the product. The limit is the longer of two "
    "times: of the whole product, and of the bytes of the collective over all links. One axis of "
    "ranks is one ring of chips; several are the axes of a slice"
)

Sizes = tuple[int, int, int]  # m, k, f


class Matmul(NamedTuple):
    """A matmul with a collective, without its sizes.

    Attributes:
        name: `GATHER` or `SUM`.
        operand, dim: what is gathered, or the dimension that is scattered.
        wire: what messages hold.
        axes: the sizes of the axes of ranks.
    """

    name: str
    operand: int
    dim: int
    wire: Wire | None
    axes: tuple[int, ...]

    def forms(self, sizes: Sizes, model: Model) -> list[Plan]:
        """The forms that "auto" compares, with their prices; the built-in is the first.

        Raises:
            ValueError: the number of ranks does not divide a size.
        """
        n, of_labels = prod(self.axes), dict(zip("mkf", sizes, strict=True))
        if any(size % n for size in sizes):
            shape = "x".join(map(str, sizes))
            raise ValueError(f"--shape {shape}: {n} ranks do not divide it; give multiples of {n}")

        def part(labels: str, cut: str) -> jax.ShapeDtypeStruct:
            """What a rank has of an operand that is cut along one label."""
            shape = [of_labels[c] // (n if c == cut else 1) for c in labels]
            return jax.ShapeDtypeStruct(shape, _DTYPE)

        if self.name == SUM:
            scatter = Scatter("mk"[self.dim], "mk", (("mf", "fk"),), _DTYPE)
            return plans.of_scatter(scatter, [(part("mf", "f"), part("fk", "f"))], self.axes, model)
        moving, other, cut = ("kf", "mk", "m") if self.operand else ("mk", "kf", "f")
        label = moving[self.dim]
        gather = Gather(label, moving, (Product(other, "mf", _DTYPE),), self.wire)
        return plans.of_gather(gather, part(moving, label), [part(other, cut)], self.axes, model)

    def is_early(self, model: Model) -> bool:
        """Whether "auto" gathers a weight by the built-in, as `under_work.hides_early` says."""
        return self.operand == 1 and model.sparse_cores

    def title(self, m: int, k: int, f: int) -> str:
        """The call with operands of these sizes, in words."""
        if self.name == SUM:
            return f"{SUM}, x: [{m}, {f}], w: [{f}, {k}], dim={self.dim}"
        wire = f", wire={self.wire.dtype!r}" if self.wire else ""
        options = f"operand={self.operand}, dim={self.dim}{wire}"
        return f"{GATHER}, x: [{m}, {k}], w: [{k}, {f}], {options}"


class FormLine(NamedTuple):
    """A line of the table. Times are in seconds; the built-in has no rounds."""

    form: str
    rounds: int | None
    hop: float
    product: float
    exposed: float
    total: float
    of_the_limit: float
    chosen: bool


def table(matmul: Matmul, sizes: Sizes, model: Model) -> list[FormLine]:
    """A line for each form that "auto" compares, the cheapest first.

    Raises:
        ValueError: as `Matmul.forms`.
    """
    free_wire = replace(model, alpha=0.0, hop=0.0, beta=0.0)
    free_compute = replace(
        model, delta=0.0, start=0.0, hbm_seconds=0.0, vmem_seconds=0.0, gamma=0.0
    )
    priced, products, hops = (matmul.forms(sizes, one) for one in (model, free_wire, free_compute))
    whole, *_ = matmul._replace(wire=None).forms(sizes, free_wire)
    # (A built-in has a start, and not the whole rate of its links; a sum may become an all-reduce.)
    bare = replace(free_compute, alpha=0.0, hop=0.0)
    all_links = replace(bare, built_in=1.0, built_in_sum=1.0, all_reduces=0)
    wire, *_ = matmul.forms(sizes, all_links)
    limit = max(whole.seconds, wire.seconds)
    chosen = LAX if matmul.is_early(model) else cheapest(priced).name
    rounds: dict[Any, int] = {name: len(s.rounds) for name, s in neighbours(matmul.axes).items()}
    lines = [
        FormLine(
            plan.name,
            rounds.get(plan.algorithm),
            hop.seconds,
            product.seconds,
            plan.seconds - product.seconds,
            plan.seconds,
            plan.seconds / limit,
            plan.name == chosen,
        )
        for plan, hop, product in zip(priced, hops, products, strict=True)
    ]
    return sorted(lines, key=lambda line: line.total)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what only matmuls take."""
    add = parser.add_argument_group(f"of {GATHER} and {SUM}").add_argument
    what = (
        "the whole matmul, in bf16; each of n ranks computes 1/n of it. "
        f"{GATHER}: x is [M, K], w is [K, F]; a rank has 1/n of the one that is gathered, and of "
        f"the other its M/n rows (x) or F/n columns (w). {SUM}: x is [M, F], w is [F, K]; a rank "
        f"has F/n of F, and gets 1/n of [M, K] (default: {'x'.join(map(str, SIZES))})"
    )
    add("--shape", type=arguments.matmul_sizes, metavar="MxKxF", help=what)
    what = "which is gathered: 0 is x; 1 is w, as with FSDP (default: 0)"
    add("--operand", type=int, choices=(0, 1), help=what)
    what = "the dimension that is gathered or scattered (default: -2)"
    add("--dim", type=int, choices=(-1, -2), help=what)


def run(args: argparse.Namespace, device: Device) -> int:
    """Print the tables, and return the exit status.

    Raises:
        ValueError: the device is no TPU, or the arguments do not fit together.
    """
    if not device.model.axes:
        cure = f"choose from {', '.join(DEVICES)}"
        raise ValueError(f'--device {device.name}: "auto" runs the built-in there; {cure}')
    if args.collective == SUM and args.operand is not None:
        raise ValueError(f"--operand: {SUM} gathers nothing; leave it out")
    wire = arguments.wire(args.wire, "all_gather" if args.collective == GATHER else SUM)
    call = args.collective, args.operand or 0, args.dim or -2, wire
    matmuls = [Matmul(*call, axes) for axes in args.ranks]
    sizes = args.shape or SIZES
    tables = [(matmul, table(matmul, sizes, device.model)) for matmul in matmuls]
    if args.json:
        asked = {"matmul": args.collective, "operand": call[1], "dim": call[2]}
        asked |= {"shape": sizes, "device": device.name, "wire": args.wire}
        rows = [
            asked | {"ranks": matmul.axes} | line._asdict()
            for matmul, lines in tables
            for line in lines
        ]
        print(json.dumps(rows, indent=1))
        return 0
    for matmul, lines in tables:
        on = f"n = {'x'.join(map(str, matmul.axes))}, {device.name}"
        print(*wrapped([f"{matmul.title(*sizes)}; {on}"]), *_words(lines), "", sep="\n")
    early = f". Here {EARLY}" if matmuls[0].is_early(device.model) else ""
    print(*wrapped([_LEGEND + early]), sep="\n")
    return 0


def _words(lines: Sequence[FormLine]) -> Iterator[str]:
    """The table in words."""
    rows = [
        ("", "", "", "", "", "", "of the"),
        ("algorithm", "rounds", "hop", "product", "exposed", "total ", "limit"),
    ]
    least = min(line.total for line in lines)
    for line in lines:
        times = line.hop, line.product, line.exposed, line.total
        hop, product, exposed, total = (seconds_in_words(time, least) for time in times)
        total += "*" if line.chosen else " "
        rounds = "-" if line.rounds is None else str(line.rounds)
        of_the_limit = f"{line.of_the_limit:.2f}"
        rows.append((line.form, rounds, hop, product, exposed, total, of_the_limit))
    return aligned(rows)
