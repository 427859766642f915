"""The flags of benchmarks. They have the letters of nccl-tests if it has the same flag."""

import argparse
import os
import platform
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.sharding import Mesh

from benchmarks.collectives.cases import AXIS, TREE
from ringcoll.algorithms import in_lax, listed_name
from ringcoll.commands.arguments import SIZES, File, collective, shape, size
from ringcoll.costs.wire import CODES

#: Datatypes that need no `jax_enable_x64`, and those that do.
DATATYPES = (
    *("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    *("int32", "uint32", "int16", "uint16", "int8", "uint8"),
)
WIDE_DATATYPES = ("float64", "int64", "uint64")


def listed(*choices: str):
    """A type for argparse: several of the choices with commas between, or "all"."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = choices if text == "all" else tuple(text.split(","))
        for name in chosen:
            if name not in choices:
                wanted = ", ".join(choices)
                raise argparse.ArgumentTypeError(f"no {name!r}; choose from {wanted} or all")
        return chosen

    return parse


def collectives(*names: str):
    """The same for collectives. Names may have hyphens, or be those of the literature."""
    several = listed(*names)

    def parse(text: str) -> tuple[str, ...]:
        return several(",".join(in_lax(collective(name)) for name in text.split(",")))

    return parse


def algorithms(known: Mapping[str, Sequence[str]]):
    """The same for algorithms; the result is by collective.

    The name of a gather's all-reduce also means the gather.

    Args:
        known: the algorithms of each collective, including names such as `ring@4x2`.
    """
    every = dict.fromkeys(chain(*known.values()))

    def parse(text: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {collective: [] for collective in known}
        for asked in every if text == "all" else text.split(","):
            name, at, shape = asked.partition("@")
            by = {of: listed_name(of, name) + at + shape for of in known}
            having = [of for of in known if by[of] in known[of]]
            if not having:
                wanted = ", ".join(every)
                raise argparse.ArgumentTypeError(f"no {asked!r}; choose from {wanted} or all")
            for of in having:
                found[of] = [*dict.fromkeys([*found[of], by[of]])]
        return found

    return parse


def shapes(axes: int):
    """A type for argparse: the texts of shapes with this many sizes, with commas between."""

    def parse(text: str) -> list[str]:
        for one in text.split(","):
            if len(shape(one)) != axes:
                raise argparse.ArgumentTypeError(f"{one!r} is not of {axes} sizes")
        return text.split(",")

    return parse


def add_json(parser: argparse.ArgumentParser, what: str = "everything measured") -> None:
    """Declare -J."""
    parser.add_argument("-J", "--json", type=File, metavar="PATH", help=f"write {what}")


def add_sizes(
    parser: argparse.ArgumentParser, least: str = "1K", most: str = "64M", factor: int = 4
) -> None:
    """Declare -b, -e and -f."""
    add = parser.add_argument
    what = f"the least size ({least}); {SIZES}"
    add("-b", "--minbytes", type=size, default=least, metavar="SIZE", help=what)
    what = f"the largest size ({most})"
    add("-e", "--maxbytes", type=size, default=most, metavar="SIZE", help=what)
    what = f"the factor between sizes ({factor})"
    add("-f", "--stepfactor", type=int, default=factor, metavar="N", help=what)


def sizes(args: argparse.Namespace) -> list[int]:
    """The sizes that -b, -e and -f name, from small to large."""
    if args.stepfactor < 2:
        raise SystemExit(f"-f {args.stepfactor}: sizes would not grow; give 2 or more")
    found, value = [], args.minbytes
    while value <= args.maxbytes:
        found.append(value)
        value *= args.stepfactor
    if not found:
        raise SystemExit(f"no sizes: -b {args.minbytes} is above -e {args.maxbytes}")
    return found


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Declare -g."""
    what = "the number of devices to use (all)"
    parser.add_argument("-g", "--devices", type=int, metavar="N", help=what)


def add_machine(parser: argparse.ArgumentParser, budget: int, rounds: int = 50) -> None:
    """Declare -g, -n and --budget."""
    add_devices(parser)
    add = parser.add_argument
    what = f"the most rounds ({rounds})"
    add("-n", "--iters", type=int, default=rounds, metavar="N", help=what)
    what = f"the time for everything; a short one means fewer rounds, then fewer sizes ({budget})"
    add("--budget", type=float, default=budget, metavar="SECONDS", help=what)


def add_wire_and_order(parser: argparse.ArgumentParser) -> None:
    """Declare --wire and --order."""
    add = parser.add_argument
    what = f"also run algorithms whose messages hold codes, as in ring:int8: {', '.join(CODES)}"
    add("--wire", choices=CODES, metavar="CODES", help=what)
    what = "also sums of floats by one tree, whatever the number of ranks: lax:tree"
    add("--order", choices=[TREE], help=what)


def add_datatypes(parser: argparse.ArgumentParser) -> None:
    """Declare -d."""
    parser.add_argument(
        "-d",
        "--datatype",
        type=listed(*DATATYPES, *(WIDE_DATATYPES if jax.config.read("jax_enable_x64") else ())),
        default="float32,bfloat16",
        metavar="LIST",
        help="names with commas between, or all (float32,bfloat16); dtypes of 64 bits need "
        "JAX_ENABLE_X64=1",
    )


def mesh(args: argparse.Namespace) -> Mesh:
    """A mesh of the first -g devices, with one axis."""
    devices = jax.devices()
    n = args.devices or len(devices)
    if not 1 <= n <= len(devices):
        cure = f"; set JAX_NUM_CPU_DEVICES={n}" if devices[0].platform == "cpu" and n > 0 else ""
        raise SystemExit(f"-g {n}: there are {len(devices)} devices{cure}")
    if idle := set(range(jax.process_count())) - {device.process_index for device in devices[:n]}:
        raise SystemExit(f"-g {n}: leaves processes {sorted(idle)} without a device; give more")
    if getattr(args, "order", None) and n & (n - 1):
        raise SystemExit(
            f"--order {TREE}: {n} ranks are no power of two; give -g {1 << n.bit_length() - 1}"
        )
    return Mesh(np.array(devices[:n]), (AXIS,))


def describe(mesh: Mesh) -> dict[str, Any]:
    """A description of the machine and the versions, for a measurement."""
    device = mesh.devices.flat[0]
    return {
        "devices": mesh.size,
        "processes": jax.process_count(),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
