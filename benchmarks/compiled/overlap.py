"""Compile collective matmuls for chips that you need not have: ringcoll against the built-in forms.

Every program is compiled for the topology (by libtpu, the extra tpu), and `ringcoll.overlap`
computes its times; `help(ringcoll.overlap)` has the model. For GPUs (--topology h200:8, the extra
gpu) a second table counts the collectives with a matmul under them.

  plain      the built-in collective, then the multiplication (or in the other order)
  compiler   jit with shardings and no shard_map: XLA's own collective matmul if it finds one
  .../tuned  with compiler options that change the program
  others     algorithms of ringcoll.all_gather_matmul and ringcoll.matmul_reduce_scatter;
             /regather gathers again for the gradient instead of keeping the gathered array
  above      how far the total is above the longer of compute (plain's) and communication
  built in   the fastest of plain and compiler, tuned or not
"""

import argparse

from benchmarks.compiled import block_halves, compiling, grid
from benchmarks.compiled.programs import BUILT_IN, DIRECTIONS, ENCODED, FORMS, OURS, algorithms_of
from benchmarks.measuring import options

TOPOLOGIES = ("v5e:4x2", "v5p:2x2x2", "v6e:4x2", "tpu7x:2x2x1")
SHAPES = ("8192x8192x28672", "4096x4096x14336", "2048x4096x4096")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which programs, and where to write the results."""
    add, listed = parser.add_argument, options.listed
    add("--topology", metavar="LIST", help="such as v5e:4x2, h200:8")
    forms = (*FORMS, *block_halves.FORMS)
    add("--form", type=listed(*forms), metavar="LIST", help=", ".join(forms))
    known = (*BUILT_IN, *OURS)
    every = (*known, *ENCODED)
    names = listed(*every)
    add("--algorithm", type=names, default=",".join(known), metavar="LIST", help=", ".join(every))
    add("--shape", type=options.shapes(3), metavar="LIST", help="m x k x f")
    add("--direction", type=listed(*DIRECTIONS), default="all", metavar="LIST")
    grid.add_arguments(parser)
    compiling.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compile every program, and print a table or write the page of a grid."""
    if args.grid:
        return grid.run(args)
    todo = [
        which
        for topology in (args.topology or ",".join(TOPOLOGIES)).split(",")
        for form in args.form or FORMS
        for which in compiling.every(
            topology=[topology],
            form=[form],
            direction=args.direction,
            shape=args.shape or SHAPES,
            algorithm=algorithms_of(form, args.algorithm),
        )
    ]
    return compiling.compile_all(args, todo, grid.program)
