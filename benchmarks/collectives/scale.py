"""Model an all-reduce on rings, tori and hosts of up to 65,536 ranks. Nothing runs.

Tori have v5p chips, and are as nearly square as powers of two allow. Hosts have 8 H200, which
share one port to InfiniBand. The model, its constants and their sources are those of
`ringcoll.costs`. With `--by simgrid`, SimGrid runs every message instead; for a flat ring of 1,024
ranks it needs minutes.
"""

import argparse
from collections.abc import Callable
from math import prod
from typing import NamedTuple

from benchmarks.measuring import report
from benchmarks.measuring.options import listed
from benchmarks.referee import judge
from benchmarks.referee.judge import BY
from ringcoll.commands.arguments import PictureFile, size, writing
from ringcoll.commands.machine import MODELS, Machine, Shape, shapes
from ringcoll.commands.plot import PlotLine, plot
from ringcoll.io.text import bytes_in_words, seconds_in_words

TPU, GPU, NETWORK, LOCAL = "v5p", "h200", "infiniband400", 8


class Column(NamedTuple):
    """A column: an algorithm, and the machine of n ranks on which it runs."""

    name: str
    algorithm: str
    machine: Callable[[int], Machine]


def torus(n: int, axes: int) -> Machine:
    """A torus of n = 2^k chips, as nearly square as possible."""
    powers = [(n.bit_length() - 1 + axis) // axes for axis in range(axes)]
    shape = tuple(2**power for power in powers)
    return Machine(shape, MODELS[TPU], network=shape)


def hosts(shape: Shape) -> Machine:
    """Hosts of `LOCAL` ranks."""
    return Machine(shape, MODELS[GPU], outer=MODELS[NETWORK], local=LOCAL)


FORMS = (
    Column("ring", "ring", lambda n: torus(n, 1)),
    Column("bidirectional_ring", "bidirectional_ring", lambda n: torus(n, 1)),
    Column("ring/2-D", "ring", lambda n: torus(n, 2)),
    Column("torus/2-D", "torus", lambda n: torus(n, 2)),
    Column("torus/3-D", "torus", lambda n: torus(n, 3)),
    Column("hosts/ring", "ring", lambda n: hosts((n,))),
    Column("hosts/rings", "ring", lambda n: hosts((n // LOCAL, LOCAL))),
    Column("hosts/doubling", "halving_doubling", lambda n: hosts((n,))),
)
NAMES = tuple(form.name for form in FORMS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sizes, and the file of the picture."""
    add = parser.add_argument
    add("--bytes", type=size, default="64M", metavar="SIZE", help="bytes of the full vector (64M)")
    what = "numbers of ranks (16..65536)"
    add("--ranks", type=_ranks, default="16..65536", metavar="LIST", help=what)
    add("--form", type=listed(*NAMES), default="all", metavar="LIST", help=", ".join(NAMES))
    add("--by", choices=BY, default=BY[0], help="where the seconds come from (price)")
    add("--plot", type=PictureFile, metavar="FILE", help="plot the table, as svg or png")


def _ranks(text: str) -> list[int]:
    """Read numbers of ranks, such as "16..64" or "8,32".

    Raises:
        argparse.ArgumentTypeError: one has several axes, or no tori and hosts of this model have
            this many ranks.
    """
    found = [prod(shape) for shape in shapes(text) if len(shape) == 1]
    if len(found) < len(shapes(text)) or any(n & (n - 1) or n < LOCAL for n in found):
        raise argparse.ArgumentTypeError(f"{text!r}: give powers of two from {LOCAL}")
    return found


def run(args: argparse.Namespace) -> int:
    """Print the table, draw the picture, and return the exit status."""
    ranks, forms = args.ranks, [form for form in FORMS if form.name in args.form]
    source = "modelled" if args.by == BY[0] else "simulated"
    title = f"all_reduce of {bytes_in_words(args.bytes)}, {source}"
    try:
        lines = [
            PlotLine(form.name, ranks, [_seconds(form, n, args.bytes, args.by) for n in ranks])
            for form in forms
        ]
    except judge.NoSimGrid as error:
        args.error(str(error))
    table = report.table("ranks", *(form.name for form in forms))
    for i, n in enumerate(ranks):
        table.add_row(str(n), *(seconds_in_words(line.seconds[i]) for line in lines))
    report.show(title, table)
    if args.plot:
        where = f"tori of {TPU}; hosts of {LOCAL} x {GPU} on {NETWORK}"
        with writing(args, "plot"):
            plot(args.plot, f"{title}: {where}", "ranks", lines, lambda n: f"{n:g}")
    return 0


def seconds_of(bytes: str, ranks: str, form: str, by: str = BY[0]) -> float:
    """The seconds that the command prints in the cell that these flags name."""
    (chosen,) = (one for one in FORMS if one.name == form)
    return _seconds(chosen, int(ranks), size(bytes), by)


def _seconds(form: Column, n: int, nbytes: int, by: str) -> float:
    machine = form.machine(n)
    if by == "simgrid":
        return judge.seconds("psum", form.algorithm, machine, nbytes)
    return machine.seconds(machine.price("psum", form.algorithm))(nbytes)
