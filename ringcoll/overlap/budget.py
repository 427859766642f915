"""The limits of an assertion: how much may be exposed, and what must be readable."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Real

from ringcoll.io.text import wrapped
from ringcoll.overlap.report import Report
from ringcoll.overlap.transfers import COLLECTIVES

#: The key of the limit on all collectives together. The other keys are kinds of collectives.
TOTAL = "total"
#: A number limits all collectives together; a mapping has limits by kind.
Limit = float | Mapping[str, float]


def breaches(
    report: Report,
    shares: Mapping[str, float],
    seconds: Mapping[str, float],
    min_collectives: int,
    allow_unread: Sequence[str],
) -> list[str]:
    """Lines that name each limit that a report breaks; for the limits see `assert_overlapped`.

    Args:
        report: the report.
        shares, seconds: as `limits` returns them.
        min_collectives, allow_unread: as for `assert_overlapped`.

    Raises:
        ValueError: seconds are limited, but the program has no times.
    """
    if seconds and not report.timed:
        raise ValueError(
            f"max_exposed_seconds: {report.name} has no times, as a TPU's or a known GPU's "
            "program has; limit its share instead: max_exposed"
        )
    missing = _missing(report, min_collectives, allow_unread)
    return list(wrapped((*missing, *_exposed(report, shares, seconds)), then=""))


def check_reading(min_collectives: object, allow_unread: Sequence[object]) -> None:
    """Refuse a number of collectives, or names, that would limit nothing.

    Raises:
        TypeError, ValueError: as `assert_overlapped`.
    """
    where = "assert_overlapped: min_collectives"
    if not isinstance(min_collectives, int) or isinstance(min_collectives, bool):
        raise TypeError(f"{where}={min_collectives!r} is not an integer; pass such as 1")
    if min_collectives < 0:
        raise ValueError(f"{where}={min_collectives} is not 0 or more; pass such as 1")
    for name in allow_unread:
        if not isinstance(name, str):
            words = f"{name!r} is no name; pass such as 'while.3', 'while*'"
            raise TypeError(f"overlap: allow_unread: {words}")


def _forbidden(names: Iterable[str], allowed: Sequence[str]) -> tuple[str, ...]:
    return tuple(n for n in sorted(names) if not any(fnmatchcase(n, p) for p in allowed))


def unread_in_words(program: str, unread: Iterable[str], allowed: Sequence[str]) -> Iterator[str]:
    """What could not be read, unless it is allowed."""
    if names := _forbidden(unread, allowed):
        yield (
            f"{', '.join(names)} of {program} could not be read, so the times may leave out "
            "communication, and counts too. Look at the notes of the report; if you know that "
            f"nothing is left out there, pass allow_unread={names!r}."
        )


def _missing(report: Report, min_collectives: int, allow_unread: Sequence[str]) -> Iterator[str]:
    """What could not be read or priced, and whether too few collectives send."""
    yield from unread_in_words(report.name, report.unread, allow_unread)
    if names := _forbidden(report.unpriced, allow_unread):
        yield (
            f"{', '.join(names)} of {report.name}: kernels without a price, so the times are too "
            "short. Pass the seconds of a run as you measured them, such as "
            f"kernels={{{names[0]!r}: 1e-3}}; if they do not matter, pass allow_unread={names!r}."
        )
    sending = sum(row.bytes > 0 for row in report.rows)
    if sending < min_collectives:
        yield (
            f"{report.name} has {sending} collectives that send anything, fewer than "
            f"min_collectives={min_collectives}. Check that its operands are sharded; if "
            f"that number is right, pass min_collectives={sending}."
        )


def _exposed(
    report: Report, shares: Mapping[str, float], seconds: Mapping[str, float]
) -> Iterator[str]:
    """What is exposed beyond a limit."""
    what = "the time" if report.timed else "the collectives"
    for kind, limit in shares.items():
        share = report.exposed_share if kind == TOTAL else report.exposed_share_of(kind)
        if share > limit:
            yield (
                f"{share:.1%} of {what} of {report.name} is exposed {_named(kind)}, more than "
                f"the {limit:.1%} allowed. {_CURE}"
            )
    for kind, limit in seconds.items():
        took = report.exposed if kind == TOTAL else report.exposed_of(kind)
        if took > limit:
            yield (
                f"{took * 1e6:.1f} us of {report.name} are exposed {_named(kind)}, more "
                f"than the {limit * 1e6:.1f} us allowed. {_CURE}"
            )


_CURE = (
    "Start a transfer before the work that can run meanwhile, and let that work not depend on it."
)


def _named(kind: str) -> str:
    return "communication" if kind == TOTAL else kind


def limits(
    name: str,
    given: Limit | None,
    most: float = 1.0,
    known: Sequence[str] = (TOTAL, *COLLECTIVES),
    what: str = "kind of collective",
) -> dict[str, float]:
    """Check limits on shares, or on seconds if `most` is above 1, and return them by kind.

    Args:
        name: what was given, for error messages.
        given: one limit on all collectives together, or a mapping from kinds.
        most: the largest limit.
        known, what: the kinds, and what they are.

    Raises:
        TypeError: a limit is not a number.
        ValueError: a limit is not between 0 and `most`, or a kind is unknown.
    """
    if given is None:
        return {}
    expected = "0 or more, and finite" if most > 1 else "between 0 and 1; pass such as 0.05"
    by_kind = given if isinstance(given, Mapping) else {TOTAL: given}
    if not by_kind:
        raise ValueError(
            f"{name}={given!r} limits nothing; name {TOTAL!r} or a kind, or pass a number"
        )
    for kind, limit in by_kind.items():
        if kind not in known:
            there = f"name one of {', '.join(known)}" if known else "there is none"
            raise ValueError(f"{name}: {kind!r} is no {what}; {there}")
        start = f"{name}{'' if by_kind is not given else f'[{kind!r}]'}={limit!r} is not"
        if not isinstance(limit, Real) or isinstance(limit, bool):
            raise TypeError(
                f"{start} a number; it must be {expected}, or a mapping from kinds to such"
            )
        if not 0 <= limit <= most:  # true for NaN too
            raise ValueError(f"{start} {expected}")
    return {kind: float(limit) for kind, limit in by_kind.items()}
