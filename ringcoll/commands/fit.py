"""Fit a machine to measurements: print the fit and its error, and write the machine's file.

    python -m ringcoll machine --fit nccl.txt
    python -m ringcoll machine --fit nccl.txt --output mine.json
    python -m ringcoll cost all_gather --ranks 8 --device mine.json

The measurements are the output of nccl-tests. Without --fit, the command lists the known machines.
"""

import argparse
from pathlib import Path

from ringcoll.commands import arguments
from ringcoll.costs import machines
from ringcoll.costs.fitting import fit_machine, read_timings
from ringcoll.io.text import bytes_in_words, wrapped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add = parser.add_argument
    add("--fit", metavar="FILE", help="measurements: nccl-tests' output")
    add("--output", type=arguments.File, metavar="FILE", help="the .json file to write")
    add("--show", metavar="NAME", help="print a known machine: its figures and their sources")


def run(args: argparse.Namespace) -> int:
    """Fit, list or show machines, and return the exit status."""
    if args.show:
        try:
            name = machines.find(args.show).name
        except ValueError as error:
            args.error(str(error))
        data = machines.contents(machines.path_of(args.show))
        lines = [f"{name}: {data['what']}; also {', '.join(data['aliases'])}"]
        lines += [
            f"{rate} {value:.6g}: {source}" for rate, (value, source) in data["rates"].items()
        ]
        for one in data.get("matmuls", ()):
            rates = f"{one['start_seconds']:.6g} s and {one['flops_per_second']:.6g} FLOP/s"
            off = f"off by {one['error']:.1%}: {one['source']}"
            lines.append(f"matmuls in {one['dtype']} {rates}, {off}")
        for curve in data.get("curves", ()):
            on = f"{curve['ranks']} ranks, {curve['hosts']} host{'s' * (curve['hosts'] > 1)}"
            sizes = " to ".join(bytes_in_words(curve["knots"][i][0]) for i in (0, -1))
            lines.append(f"{curve['collective']} on {on}, {sizes}: {curve['source']}")
        print(*wrapped(lines), sep="\n")
        return 0
    if not args.fit:
        for device in machines.MACHINES.values():
            print(f"{device.name}: {device.what}")
        return 0
    name = Path(args.output or args.fit).stem
    try:
        text = Path(args.fit).read_text(encoding="utf-8")
        data, lines = fit_machine(name, read_timings(text))
    except OSError as error:
        args.error(f"--fit {args.fit}: {error.strerror}")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        args.error(f"--fit {args.fit}: line {line}: this is not text in UTF-8; save it as such")
    except ValueError as error:
        args.error(f"--fit {args.fit}: {error}")
    print(*lines, sep="\n")
    if args.output:
        arguments.write(args.output, machines.text_of(data))
    return 0
