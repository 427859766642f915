"""Count the collectives of a compiled program: `collectives` and `assert_collectives`."""

from collections.abc import Iterable, Mapping
from math import isclose
from numbers import Real

from ringcoll.io.text import bytes_in_words, choose
from ringcoll.overlap.reading import read, report_of
from ringcoll.overlap.rows import NO_LINE, Row, table_lines
from ringcoll.overlap.transfers import COLLECTIVES


def collectives(
    compiled: object, *, allow_unread: str | Iterable[str] = (), mesh: object = None
) -> tuple[Row, ...]:
    """The collectives of a compiled program, in the order in which they start.

    Collectives that the compiler joined into one are one. A loop whose number of turns is not known
    counts once, if it is allowed. Of a conditional, only the branch counts that `report` takes for
    the worst.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()`, on any platform, or its text; or
            the result of `lower(...)`, which is compiled first.
        allow_unread, mesh: as for `assert_overlapped`.

    Raises:
        AssertionError: something could not be read, and is not allowed.
        HloError: the text is not scheduled HLO, or does not fit the mesh.
        TypeError: `compiled` is not a program, or `mesh` is not a mesh.

    >>> total = ranks(lambda x: jax.lax.psum(x, "x"), out_specs=P())
    >>> for row in overlap.collectives(total.lower(jnp.ones(4))):
    ...     print(row.kind, row.count, row.bytes, row.axes, row.asked)
    all-reduce 1 6.0 ('x',) the program
    """
    return report_of(read(compiled, mesh, None, allow_unread)).rows


def assert_collectives(
    compiled: object,
    counts: Mapping[str, int],
    bytes: Mapping[str, float] | None = None,
    *,
    allow_unread: str | Iterable[str] = (),
    mesh: object = None,
) -> None:
    """Assert how many collectives of each kind a compiled program runs, and what they send.

    A test with it notices when a change of shardings adds a gather, or a sum to each layer:

        overlap.assert_collectives(step.lower(*operands), {"all-gather": 2, "all-reduce": 1})

    Args:
        compiled, allow_unread, mesh: as for `collectives`.
        counts: how often collectives of each kind run. A kind that is not named must not run.
        bytes: the bytes that a rank sends by all collectives of a kind together; kinds that are not
            named may send any number.

    Raises:
        AssertionError: a number is a different one. The message lists all collectives: how often
            they run, kind, axes, bytes, who asked, and line. Or as `collectives`.
        TypeError: what is given is not a mapping from kinds to numbers; or as `collectives`.
        ValueError: there is no such kind.
        HloError: as `collectives`.

    >>> total = ranks(lambda x: jax.lax.psum(x, "x"), out_specs=P())
    >>> overlap.assert_collectives(total.lower(jnp.ones(4)), {"all-reduce": 1}, {"all-reduce": 6})
    """
    limits = bytes or {}
    for name, given in (("counts", counts), ("bytes", limits)):
        if not isinstance(given, Mapping) or not all(isinstance(n, Real) for n in given.values()):
            words = "is not a mapping from kinds to numbers; pass such as {'all-reduce': 1}"
            raise TypeError(f"assert_collectives: {name}={given!r} {words}")
    for kind in (*counts, *limits):
        if kind not in COLLECTIVES:
            raise ValueError(f"assert_collectives: kind {kind!r}: {choose(kind, COLLECTIVES)}")
    rows, wrong = collectives(compiled, allow_unread=allow_unread, mesh=mesh), []
    for kind in COLLECTIVES:
        of_kind = [row for row in rows if row.kind == kind]
        count, wanted = sum(row.count for row in of_kind), counts.get(kind, 0)
        if count != wanted:
            wrong.append(f"{kind} runs {count} times, not {wanted}")
        sent = sum(row.count * row.bytes for row in of_kind)
        if not isclose(sent, limits.get(kind, sent)):
            wrong.append(f"{kind} sends {sent:.0f} bytes, not {limits[kind]:.0f}")
    if not wrong:
        return
    lines = [("times", "bytes", "along", "asked by", "collective", "line")]
    for row in rows:
        along, size = ", ".join(row.axes) or "-", bytes_in_words(row.bytes)
        lines.append((str(row.count), size, along, row.asked, row.kind, row.at or NO_LINE))
    there = table_lines(lines) if rows else ["the program has no collective"]
    raise AssertionError("\n".join([*wrong, "", *there]))
