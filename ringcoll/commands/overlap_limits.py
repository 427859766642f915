"""The options of `python -m ringcoll overlap` that set limits. They make a `Budget`."""

import argparse
from functools import partial
from sys import float_info

from ringcoll.overlap.budget import TOTAL, Budget, limits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the limits. Each is also an argument of `assert_overlapped`."""
    group = parser.add_argument_group("limits", "the exit status is 1 if one is broken")
    group.add_argument(
        "--max-exposed",
        type=partial(_limit, option="--max-exposed", most=1.0, unit=1.0),
        action="append",
        metavar="[KIND=]SHARE",
        help="the share of the time that may be exposed, such as 0.05; all-gather=0.01 limits one "
        "kind; may be repeated",
    )
    group.add_argument(
        "--max-exposed-us",
        type=partial(_limit, option="--max-exposed-us", most=float_info.max, unit=1e-6),
        action="append",
        metavar="[KIND=]US",
        help="the same in microseconds; may be repeated",
    )
    group.add_argument(
        "--min-collectives",
        type=_number,
        metavar="N",
        help="the least number of collectives that must send something (default: 1, if there is "
        "another limit)",
    )
    group.add_argument(
        "--allow-unread",
        action="append",
        default=[],
        metavar="NAME",
        help="an instruction that the report need not be able to read, such as 'while*'; may be "
        "repeated",
    )


def budget(args: argparse.Namespace) -> Budget | None:
    """The budget that the options make; None if nothing is limited."""
    if (args.max_exposed, args.max_exposed_us, args.min_collectives) == (None, None, None):
        if args.allow_unread:
            args.error("--allow-unread: nothing is limited; give --max-exposed, too")
        return None
    least = 1 if args.min_collectives is None else args.min_collectives
    shares, seconds = dict(args.max_exposed or ()), dict(args.max_exposed_us or ())
    return Budget(shares, seconds, least, tuple(args.allow_unread))


def _limit(text: str, option: str, most: float, unit: float) -> tuple[str, float]:
    """Read KIND=NUMBER, or one number, which limits all kinds together.

    Raises:
        argparse.ArgumentTypeError: there is no such kind, or the number is not a limit.
    """
    kind, _, value = text.rpartition("=")
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    try:
        limits(option, {kind: number} if kind else number, most)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    return kind or TOTAL, number * unit


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number; write 1, or 0 if no collective need send"
        )
    return int(text)
