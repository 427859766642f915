"""Read a compiled program: `report` and `assert_overlapped`."""

from collections.abc import Iterable, Mapping
from sys import float_info
from typing import NamedTuple

from jax.stages import Lowered

from ringcoll.overlap.budget import Limit, breaches, check_reading, limits
from ringcoll.overlap.chips import CHIPS, Chip, Gpu, NotMeasured
from ringcoll.overlap.chips import chip as named_chip
from ringcoll.overlap.hlo import Module, in_words, parse
from ringcoll.overlap.instruction_costs import SOURCES, source_in_words
from ringcoll.overlap.lines import Lines
from ringcoll.overlap.program import Program, program_of
from ringcoll.overlap.report import Report
from ringcoll.overlap.rows import Row
from ringcoll.overlap.timeline import Timeline
from ringcoll.placement.network import Network


def report(
    compiled: object,
    *,
    mesh: object = None,
    chip: str | Chip | Gpu | None = None,
) -> Report:
    """Read a compiled program, and report how much of its communication is exposed.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()` or of `compile_for`, or a string
            of scheduled HLO; or the result of `lower(...)`, which is compiled first.
        mesh: the mesh that it was compiled for; needed only if its shardings do not name it. (A
            string has no shardings; without a mesh, its ranks are assumed to be a ring, in order.)
        chip: a key of `CHIPS`, or a `Chip` of your own; needed only for a string. A program that
            was compiled for no TPU is priced as if it ran on the chip, and the report says so.

    Raises:
        HloError: the text is not scheduled HLO, or does not fit the mesh.
        TypeError: `compiled` is not a program, or `mesh` is not a mesh.
        ValueError: the chip is not known, or was not given.

    >>> send = ranks(lambda x: ringcoll.ppermute(x, "x", [(0, 1)]))
    >>> found = overlap.report(send.lower(jnp.ones(4)).compile())
    >>> [(row.kind, row.matmuls) for row in found.rows], found.exposed_share  # nothing hides it
    ([('collective-permute', 0)], 1.0)
    """
    return report_of(read(compiled, mesh, chip))


class Reading(NamedTuple):
    """A compiled program, parsed, on a chip, and its run."""

    program: Program
    module: Module
    network: Network
    chip: Chip | Gpu | None
    timeline: Timeline
    lines: Lines


def read(
    compiled: object, mesh: object, chip: str | Chip | Gpu | None, *, needs_chip: bool = True
) -> Reading:
    """Parse a compiled program, or one that is only lowered, and run it in the model.

    Raises: as `report`; without `needs_chip`, not for want of a chip.
    """
    program = program_of(compiled.compile() if isinstance(compiled, Lowered) else compiled, mesh)
    with in_words():
        module = parse(program.text)
    if isinstance(chip, str):
        name, chip = chip, named_chip(chip)
        if chip is None:
            raise ValueError(
                f"overlap: no chip is named {name!r}, only {', '.join(CHIPS)}; pass one of these, "
                "or an overlap.Chip with its constants"
            )
    elif chip is None and program.kind is not None:
        found = named_chip(program.kind)  # a CPU has none: it has no times to trust
        chip = found if module.tiled or isinstance(found, Gpu) else None
    if needs_chip and module.tiled and not isinstance(chip, Chip):
        unknown = f"no chip {program.kind!r} is known" if program.kind else "nothing says of which"
        raise ValueError(
            f"overlap: {module.name} is a TPU program, but {unknown}; pass chip='v5e' (v5p, v6e or "
            "tpu7x), or the compiled program in place of its text"
        )
    network = program.network or Network.ring(module.ranks)
    with in_words():
        try:
            timeline = Timeline(module, network, chip, program.profile).run()
        except NotMeasured as what:
            chip, timeline = None, Timeline(module, network, None, program.profile).run()
            timeline.notes.add(f"nobody measured this: {what}")
        return Reading(program, module, network, chip, timeline, Lines(program.text, module))


@in_words()
def report_of(reading: Reading) -> Report:
    """The report of a run."""
    program, module, network, chip, timeline, lines = reading
    tally = timeline.tally
    named = dict.fromkeys([*timeline.transfers, *(s.label for s in timeline.segments)])
    line_of = {name: lines.of(name) for name in named}
    rows = tuple(
        Row(
            name=name,
            kind=wire.kind,
            asynchronous=asynchronous,
            count=round(tally[name, "count"]),
            bytes=wire.bytes,
            hops=wire.hops,
            wire=wire.seconds,
            compute=tally[name, "compute"],
            flops=tally[name, "flops"],
            matmuls=round(tally[name, "matmuls"]),
            bare=round(tally[name, "bare"]),
            exposed=tally[name, "exposed"],
            source=line_of[name].source,
            op_name=line_of[name].op_name,
            at=line_of[name].short,
            axes=program.axes_along(wire.members),
        )
        for name, (wire, asynchronous) in timeline.transfers.items()
    )
    sources = {source: used for source in SOURCES if (used := tally["source", source])}
    return Report(
        name=module.name,
        chip=chip,
        ranks=len(network.places),
        rows=rows,
        total=timeline.now,
        compute=tally["compute",],
        memory=tally["memory",],
        exposed=tally["exposed",],
        communication=max((v for k, v in tally.items() if k[0] == "busy"), default=0.0),
        flops=tally["flops",],
        sources=sources,
        temporaries=program.temporaries,
        program_bytes=program.program_bytes,
        assumptions=tuple(_assumptions(reading, sources)),
        segments=tuple(
            segment._replace(source=line.source, at=f"{line.place} {line.operation}".strip())
            for segment, line in ((s, line_of[s.label]) for s in timeline.segments)
        ),
        unread=tuple(sorted(timeline.unread)),
        versions=program.versions,
    )


def _assumptions(reading: Reading, sources: Mapping[str, float]) -> Iterable[str]:
    program, module, network, chip, timeline, _ = reading
    if chip is None:
        yield (
            "no times: the text of a CPU program has none to trust; of a GPU's nothing says of "
            "which (chip=), or a collective was not measured; the report only counts what stands "
            "between start and done"
        )
    elif isinstance(chip, Gpu):
        yield (
            f"{chip.name}: memory {chip.hbm / 1e9:g} GB/s; collectives as measured there (median "
            f"error of the curves {chip.device.error:.0%}), one after the other"
        )
        yield (
            "matmuls do not slow down under a transfer; kernels start without delay; nobody has "
            "measured these programs"
        )
        yield from _source_shares(sources, chip)
        hosts = -(-len(network.places) // chip.device.ranks_a_host)
        yield f"{len(network.places)} GPUs in their order, on {hosts} host{'s' * (hosts > 1)}"
    else:
        yield (
            f"{chip.name}: {chip.clock / 1e9:g} GHz, {chip.flops / 1e12:g} TFLOP/s bf16, memory "
            f"{chip.hbm / 1e9:g} GB/s, a link {chip.link / 1e9:g} GB/s each way and "
            f"{chip.hop * 1e6:g} us a hop"
        )
        if not module.tiled:
            yield (
                f"not a TPU's program (its layouts have no tiles): {chip.name}'s rates, but the "
                "instructions and the order of another compiler"
            )
        yield (
            "one stream of instructions; each direction of a link a queue; a permute takes hops x "
            "bytes / rate; a built-in collective the least that its links allow"
        )
        yield from _source_shares(sources, chip)
        if network.stated:
            axes = "x".join(map(str, network.size))
            rings = [i for i, w in enumerate(network.wrap) if w and network.size[i] > 2]
            yield f"{axes} devices, {f'rings along axes {rings}' if rings else 'no axis a ring'}"
    if not network.stated and not isinstance(chip, Gpu):
        yield f"no devices known: {len(network.places)} ranks taken for a ring, in their order"
    yield from program.notes
    yield from sorted(timeline.notes)


def _source_shares(sources: Mapping[str, float], chip: Chip | Gpu) -> Iterable[str]:
    used = sum(sources.values())
    for source, seconds in sources.items():
        yield f"{seconds / used:.0%} of the compute time from {source_in_words(source, chip)}"


def assert_overlapped(
    compiled: object,
    max_exposed: Limit | None = None,
    *,
    max_exposed_seconds: Limit | None = None,
    min_collectives: int = 1,
    allow_unread: str | Iterable[str] = (),
    mesh: object = None,
    chip: str | Chip | Gpu | None = None,
) -> Report:
    """Assert that a compiled program hides its communication: one line in a test suite.

    Args:
        compiled: as for `report`.
        max_exposed: the largest share of the time that may be exposed; for a program without
            times, the largest share of its collectives that may have no matmul under them. A
            mapping limits kinds of collectives, such as {"total": 0.05, "all-gather": 0.01}:
            "total" is all kinds together, and the share of a kind is what it adds to the total.
            Default: 0.05, or no limit if `max_exposed_seconds` is given.
        max_exposed_seconds: the same in seconds of the whole program; only for programs with
            times.
        min_collectives: the least number of collectives that must send something; each counts
            once, however often it runs.
        allow_unread: names that `Report.unread` may contain. Compilers add numbers to names, so *
            stands for any characters and ? for one character, as in "while*".
        mesh, chip: as for `report`.

    Returns:
        The report.

    Raises:
        AssertionError: more is exposed; or fewer collectives send something; or something could
            not be read and `allow_unread` does not name it. The message ends with the report.
        TypeError: a limit is not a number, or a name is not a string.
        ValueError: a share is not between 0 and 1; seconds are negative, infinite or not a
            number; there is no such kind of collective; or seconds are limited, but the program
            has no times.
        HloError, TypeError, ValueError: as `report`.

    >>> send = ranks(lambda x: ringcoll.ppermute(x, "x", [(0, 1)]))
    >>> overlap.assert_overlapped(send.lower(jnp.ones(4)).compile())  # no matmul hides it
    Traceback (most recent call last):
        ...
    AssertionError: 100.0% of the collectives of jit__lambda is exposed communication, ...
    """
    if max_exposed is None and max_exposed_seconds is None:
        max_exposed = 0.05
    name = "assert_overlapped: max_exposed"
    shares = limits(name, max_exposed)
    seconds = limits(f"{name}_seconds", max_exposed_seconds, float_info.max)
    allowed = (allow_unread,) if isinstance(allow_unread, str) else tuple(allow_unread)
    check_reading(min_collectives, allowed)
    overlap_report = report(compiled, mesh=mesh, chip=chip)
    if found := breaches(overlap_report, shares, seconds, min_collectives, allowed):
        raise AssertionError("\n".join([*found, "The report:", str(overlap_report)]))
    return overlap_report
