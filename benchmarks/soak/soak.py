"""Run thousands of random collectives in one process; check each result, and live memory.

Function, algorithm, mesh, axes, groups, dtype, shapes, dimensions, vmap and gradient are random
choices among everything that the drop-ins accept. The result of every rank is compared with
NumPy's, bit by bit, on data whose sums are exact. Call i of a seed is always the same (for one
version of ringcoll, on as many devices), so --only can replay it by itself.

A program has a few calls. If its result is wrong, each of its calls is run by itself. Between the
programs, whole training steps run (`benchmarks/soak/steps.py`): several in flight, with loops,
independent collectives and a donated state. They are compared with jax.lax. --program I replays
training step I of a seed; if the step is right, it prints only its header. The exit status is 1 if
anything is wrong, or if live memory grows.
"""

import argparse
import secrets
import time
from collections import Counter
from collections.abc import Sequence

import jax

from benchmarks.measuring import options, processes, report
from benchmarks.soak import memory, steps
from benchmarks.soak.random_calls import TOGETHER, RandomCall, draw
from benchmarks.soak.trial import faults
from ringcoll.commands.arguments import count

#: Calls between two samples of memory.
EVERY = 16 * TOGETHER
#: Calls between two training steps.
STEP_EVERY = 4 * TOGETHER
#: One of this many samples is printed.
SHOWN = 4


def numbers(text: str) -> range:
    """Read the numbers of calls, "37" or "32-47".

    Raises:
        argparse.ArgumentTypeError: it names none.
    """
    first, _, last = text.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} names no call; write 37, or 32-47")
    return range(int(first), int(last) + 1)


def seed(text: str) -> int:
    """Read a number from 0.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no seed; write a number from 0")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how many calls run, which ones, and on which devices."""
    add = parser.add_argument
    add("--count", type=count, default=10_000, metavar="N", help="the number of calls (10000)")
    add("--seed", type=seed, metavar="S", help="the seed of the calls (default: random, printed)")
    add(
        "--only",
        type=numbers,
        metavar="I",
        help="run only call I of the seed; I-J: these calls together",
    )
    add("--program", type=seed, metavar="I", help="run only training step I of the seed")
    what = "stop after this many seconds (default: never)"
    add("--budget", type=float, metavar="SECONDS", help=what)
    options.add_devices(parser)
    processes.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Draw, compare, report; return 1 if anything was wrong, or if live memory grew."""
    for name in ("only", "program"):
        if getattr(args, name) is not None and args.seed is None:
            args.error(f"--{name}: of which seed? Give --seed too")
    processes.start(args)
    mesh = options.mesh(args)
    if args.program is not None:
        report.print_header(options.describe(mesh))
        wrong = _try_step(args.seed, args.program, mesh.size)
        if not wrong:
            _print(f"right: {steps.draw(args.seed, args.program, mesh.size)}")
        return wrong
    if args.seed is None:
        args.seed = int(processes.first_value(secrets.randbits(24)))
    which = args.only or range(args.count)
    report.print_header(options.describe(mesh))
    _print(f"{len(which)} calls of seed {args.seed}")
    start = time.perf_counter()
    tally: Counter[str] = Counter()
    samples: list[memory.MemorySample] = []
    parts = _of_one_place(which)
    bar = report.progress(parts, len(parts), "soaking", lambda part: f"call {part[0]}")
    with report.until_interrupted(args, tally):
        for numbers in bar:
            if args.budget and processes.first_value(time.perf_counter() - start) > args.budget:
                break
            calls = [draw(args.seed, i, mesh.size, jax.process_count() == 1) for i in numbers]
            if args.only:
                _print("\n".join(f"{call.number}: {call}" for call in calls))
            for fault in faults(calls):
                tally["wrong"] += 1
                _print(f"wrong: {fault}\n  again: {_again(args.seed, mesh.size, fault.shown_by)}")
            tally.update(label for call in calls for label in _labels(call))
            if not args.only and numbers[0] % STEP_EVERY == 0 and jax.process_count() == 1:
                tally["steps"] += 1
                tally["wrong"] += _try_step(args.seed, numbers[0] // STEP_EVERY, mesh.size)
            if tally["calls"] % EVERY == 0:
                jax.clear_caches()  # JAX would keep all programs, but none runs twice
                if memory.is_known():
                    _watch(samples, tally["calls"])
    _print(_summary(tally, time.perf_counter() - start))
    grows = _judge(samples)
    return int(tally["wrong"] > 0 or processes.total(grows) > 0)


def _try_step(seed: int, number: int, devices: int) -> int:
    """Run a training step; return 1 if it is wrong."""
    step = steps.draw(seed, number, devices)
    if leaves := steps.differing(step):
        again = f"python -m benchmarks soak --seed {seed} -g {devices} --program {number}"
        _print(f"wrong: {', '.join(leaves)} of {step}\n  again: {again}")
    return int(bool(leaves))


def _print(text: str) -> None:
    report.console().print(text, markup=False, soft_wrap=True)


def _of_one_place(which: range) -> list[range]:
    """Cut calls into parts that share a place, so that each part can be one program."""
    starts = range(which.start // TOGETHER * TOGETHER, which.stop, TOGETHER)
    return [range(max(i, which.start), min(i + TOGETHER, which.stop)) for i in starts]


def _again(seed: int, devices: int, numbers: Sequence[int]) -> str:
    """The command that runs these calls in one program."""
    only = "-".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))
    return f"python -m benchmarks soak --seed {seed} -g {devices} --only {only}"


def _labels(call: RandomCall) -> list[str]:
    """The labels under which a call is counted."""
    also = {
        "vmap": call.batch is not None,
        "vjp": call.pulls_back,
        "groups": call.groups is not None,
        "several axes": len(call.axes) > 1,
        "check_vma": call.setting.check_vma,
        "x64": call.setting.x64,
    }
    return ["calls", call.name, *(label for label, is_so in also.items() if is_so)]


def _summary(tally: Counter[str], seconds: float) -> str:
    """A line of counts."""
    kinds = sorted(set(tally) - {"calls", "wrong"})
    counts = ", ".join(f"{tally[label]} {label}" for label in kinds)
    return f"#wrong {tally['wrong']} of {tally['calls']} calls in {seconds:.0f} s: {counts}"


def _watch(samples: list[memory.MemorySample], calls: int) -> None:
    """Take a sample of memory. Some are printed, for readers of the log of an unfinished run."""
    samples.append(memory.sample(calls))
    if len(samples) == 1:
        _print("     calls  live MiB  bytes a call  Python's blocks  arrays")
    if len(samples) % SHOWN == 1:
        before, now = samples[-SHOWN - 1 :][0], samples[-1]
        growth = f"{memory.growth([before, now], 'live'):.0f}" if now is not before else ""
        _print(f"{now.calls:10} {_mebi(now.live):>9} {growth:>13} {now.blocks:16} {now.arrays:7}")


def _judge(samples: Sequence[memory.MemorySample]) -> bool:
    """Print how memory developed; return whether live memory grows."""
    if not memory.is_judged(samples):
        why = "too few calls" if memory.is_known() else "no mallinfo2"
        _print(f"memory: {why} to say whether it is flat")
        return False
    flat, late = memory.is_flat(samples), memory.last_half(samples)
    _print(
        f"live {_mebi(samples[0].live)} MiB after {samples[0].calls} calls, "
        f"{_mebi(samples[-1].live)} at the end, {_mebi(max(s.live for s in samples))} at most\n"
        f"over the last half {memory.growth(late, 'live'):.0f} live bytes and "
        f"{memory.growth(late, 'blocks'):.1f} of Python's blocks a call: "
        f"{'flat' if flat else 'not flat'} "
        f"(below {memory.LIMIT} and {memory.BLOCKS}, and no more arrays)"
    )
    return not flat


def _mebi(size: int) -> str:
    return f"{size / 2**20:.1f}"
