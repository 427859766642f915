"""Read a compiled program: its report, its collectives, and what tests assert of them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import filter as matching
from math import isclose, prod
from numbers import Real
from sys import float_info
from typing import NamedTuple

from ringcoll.io.text import bytes_in_words, choose
from ringcoll.overlap.budget import Limit, breaches, check_reading, limits, unread_in_words
from ringcoll.overlap.chips import CHIPS, Chip, Gpu, NotMeasured
from ringcoll.overlap.chips import chip as named_chip
from ringcoll.overlap.hlo import Module, as_hlo_error, parse
from ringcoll.overlap.instruction_costs import SOURCES, source_in_words
from ringcoll.overlap.kernels import is_kernel
from ringcoll.overlap.lines import Lines
from ringcoll.overlap.program import Program, axes_along, program_of
from ringcoll.overlap.report import Report
from ringcoll.overlap.rows import NO_LINE, LineWork, Row, table_lines
from ringcoll.overlap.timeline import Timeline
from ringcoll.overlap.transfers import COLLECTIVES, rings
from ringcoll.placement.network import Link, Network


def report(
    compiled: object,
    *,
    mesh: object = None,
    chip: str | Chip | Gpu | None = None,
    kernels: Mapping[str, float] | None = None,
) -> Report:
    """Read a compiled program, and report how much of its communication is exposed.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()` or of `compile_for`, or a string
            of scheduled HLO; or the result of `lower(...)`, which is compiled first; or the path of
            a text, or of the folder that `--xla_dump_to` names: its program with the most FLOPs.
        mesh: the mesh that it was compiled for; needed only if its shardings do not name it. (The
            ranks of a string are assumed to be a ring, in order; or rings along the axes that it
            names, as those of JAX 0.12 do. Other groups of ranks need the mesh.)
        chip: a key of `CHIPS`, or a `Chip` of your own; needed only for a string. A program that
            was compiled for no TPU is priced as if it ran on the chip, and the report says so.
        kernels: the seconds that you measured of one run of a kernel, such as {"splash*": 2e-3}, by
            its name or a pattern (*, ?); the first that fits counts. Other kernels take their
            `cost_estimate`, or JAX's attention kernels their FLOPs; else see `Report.unpriced`.

    Raises:
        HloError: the text is not scheduled HLO, or does not fit the mesh; or a folder has none.
        TypeError: `compiled` is not a program, `mesh` not a mesh, or `kernels` not such a mapping.
        ValueError: the chip is not known, or was not given; groups of ranks need the mesh; or
            `kernels` names no kernel of the program, or what has no times.

    >>> send = ranks(lambda x: ringcoll.ppermute(x, "x", [(0, 1)]))
    >>> found = overlap.report(send.lower(jnp.ones(4)).compile())
    >>> [(row.kind, row.matmuls) for row in found.rows], found.exposed_share  # nothing hides it
    ([('collective-permute', 0)], 1.0)
    """
    return report_of(read(compiled, mesh, chip, kernels=kernels))


class Reading(NamedTuple):
    """A compiled program, parsed, on a chip, and its run."""

    program: Program
    module: Module
    network: Network
    chip: Chip | Gpu | None
    timeline: Timeline
    lines: Lines


def read(
    compiled: object,
    mesh: object,
    chip: str | Chip | Gpu | None,
    allow_unread: str | Iterable[str] | None = None,
    kernels: Mapping[str, float] | None = None,
) -> Reading:
    """Parse a compiled program, or one that is only lowered, and run it in the model.

    Raises: as `report`. With `allow_unread`, for counts: not for want of a chip, but an
        AssertionError if something else could not be read.
    """
    needs_chip = allow_unread is None
    allowed = (allow_unread,) if isinstance(allow_unread, str) else tuple(allow_unread or ())
    check_reading(0, allowed)
    program = program_of(compiled, mesh)
    with as_hlo_error():
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
    known = [m for m in (*program.meshes, *module.meshes) if prod(m.values()) == module.ranks]
    known.sort(key=lambda mesh: -sum(n > 1 for n in mesh.values()))  # the finest first
    program = replace(program, meshes=(*known, {"": module.ranks}))
    network = program.network or Network.ring(*program.meshes[0].values())
    given = _seconds_of_kernels(kernels, module)
    with as_hlo_error():
        try:
            timeline = Timeline(module, network, chip, program.profile)
            timeline.costs.given = given
            timeline.run()
        except NotMeasured as what:
            chip, timeline = None, Timeline(module, network, None, program.profile).run()
            timeline.notes.add(f"nobody measured this: {what}")
        reading = Reading(program, module, network, chip, timeline, Lines(program.text, module))
    if given and chip is None:
        raise ValueError(
            f"overlap: kernels: {module.name} has no times; pass a chip, as chip='v5e'"
        )
    unread = unread_in_words(module.name, timeline.unread, allowed)
    if not needs_chip and (words := [*unread]):
        raise AssertionError("\n".join([*words, *sorted(timeline.notes)]))
    if mesh is None and isinstance(chip, Chip) and not network.stated:
        _check_groups(module, timeline, program.meshes[0])
    return reading


def _seconds_of_kernels(given: Mapping[str, float] | None, module: Module) -> dict[str, float]:
    """Check the seconds that are given for kernels, by patterns of their names."""
    every = (i for computation in module.computations.values() for i in computation.instructions)
    there = sorted(i.name for i in every if is_kernel(i))
    fits = [n for n in given if matching(there, str(n))] if isinstance(given, Mapping) else []
    given = None if given == {} else given
    return limits("overlap: kernels", given, float_info.max, [*there, *fits], "kernel")


def _check_groups(module: Module, timeline: Timeline, mesh: Mapping[str, int]) -> None:
    """Refuse groups of ranks that may be along axes which the assumed mesh does not have."""
    ranks, wires = module.ranks, {name: wire for name, (wire, _) in timeline.transfers.items()}
    turns = {
        n for n, w in wires.items() if w.hops and len({(b - a) % ranks for a, b in w.members}) == 1
    }
    one_ring = any(len(rings(wires[name].members)[0]) == ranks for name in turns)
    for name, wire in wires.items():
        groups, along = rings(wire.members), prod(axes_along(mesh, wire.members).values())
        if one_ring and name in turns:
            continue
        if len(groups) * along > ranks and len({*map(len, groups)}) == 1:  # else they are no axis
            raise ValueError(
                f"overlap: {name} of {module.name} sends within {len(groups)} groups of ranks, and "
                "the text does not say where they are; pass mesh=, the mesh of the program"
            )


@as_hlo_error()
def report_of(reading: Reading) -> Report:
    """The report of a run."""
    program, module, network, chip, timeline, lines = reading
    best = timeline.alike(chip.best).run() if isinstance(chip, Chip) else timeline
    whole, sums = timeline.whole, timeline.sums
    named = {*timeline.transfers, *(s.label for s in timeline.segments), *timeline.sources}
    line_of = {name: lines.of(name) for name in named}
    rows = tuple(
        Row(
            name=name,
            kind=wire.kind,
            asynchronous=asynchronous,
            count=round(sums[name].runs),
            bytes=wire.bytes,
            hops=wire.hops,
            wire=wire.seconds,
            compute=sums[name].compute,
            flops=sums[name].flops,
            matmuls=round(sums[name].matmuls),
            without_matmul=round(sums[name].without_matmul),
            exposed=sums[name].exposed,
            source=line_of[name].source,
            op_name=line_of[name].op_name,
            at=line_of[name].short,
            axes=program.axes_along(wire.members),
            crossed=name in timeline.crossed,
        )
        for name, (wire, asynchronous) in timeline.transfers.items()
    )
    used, busy = defaultdict[str, float](float), defaultdict[Link, float](float)
    works = defaultdict[tuple[str, str], float](float)
    for name, source in timeline.sources.items():
        used[source] += sums[name].compute
        works[line_of[name].source, line_of[name].short] += sums[name].compute
    for name, (wire, _) in timeline.transfers.items():
        for link in wire.links:
            busy[link] += sums[name].runs * wire.seconds
    sources = {source: used[source] for source in SOURCES if used[source]}
    return Report(
        name=module.name,
        chip=chip,
        ranks=len(network.places),
        rows=rows,
        works=tuple(LineWork(works[k], *k) for k in sorted(works, key=lambda k: -works[k])),
        total=timeline.now,
        compute=whole.compute,
        memory=whole.memory,
        host=whole.host,
        exposed=whole.exposed,
        least={"total": best.now, "exposed": best.whole.exposed},
        communication=max(busy.values(), default=0.0),
        flops=whole.flops,
        sources=sources,
        temporaries=program.temporaries,
        program_bytes=program.program_bytes,
        assumptions=tuple(_assumptions(reading, sources)),
        segments=tuple(
            segment._replace(source=line.source, at=f"{line.place} {line.operation}".strip())
            for segment, line in ((s, line_of[s.label]) for s in timeline.segments)
        ),
        unread=tuple(sorted(timeline.unread)),
        unpriced=tuple(sorted(timeline.costs.unpriced)),
        versions=program.versions,
        notes=program.notes,
    )


def _assumptions(reading: Reading, sources: Mapping[str, float]) -> Iterable[str]:
    _, module, network, chip, timeline, _ = reading
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
            "bytes / rate"
        )
        yield (
            f"a built-in collective waits {chip.start * 1e6:.2g} us for each link to the farthest "
            f"rank, then runs at {chip.built_in:.0%} of its links' rate, an all-reduce at "
            f"{chip.built_in_sum:.0%} (100%: nobody measured less); at least: no wait, 100%"
        )
        yield from _source_shares(sources, chip)
        if network.stated:
            axes = "x".join(map(str, network.size))
            rings = [i for i, w in enumerate(network.wrap) if w and network.size[i] > 2]
            yield f"{axes} devices, {f'rings along axes {rings}' if rings else 'no axis a ring'}"
    if not network.stated and not isinstance(chip, Gpu):
        axes = "x".join(str(n) for n in network.size if n > 1)
        ring = f"{axes} rings" if "x" in axes else "a ring"
        yield f"no devices known: {len(network.places)} ranks taken for {ring}, in their order"
    if not (module.tiled or isinstance(chip, Gpu)):
        yield "XLA:CPU widens what it sends: in a CPU program, bf16 has four bytes, and float8 two"
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
    kernels: Mapping[str, float] | None = None,
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
        allow_unread: names that `Report.unread` and `Report.unpriced` may contain. Compilers add
            numbers to names, so * stands for any characters and ? for one, as in "while*".
        mesh, chip, kernels: as for `report`.

    Returns:
        The report.

    Raises:
        AssertionError: more is exposed; or fewer collectives send something; or something could
            not be read or priced, and `allow_unread` does not name it. The message ends with the
            report.
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
    overlap_report = report(compiled, mesh=mesh, chip=chip, kernels=kernels)
    if found := breaches(overlap_report, shares, seconds, min_collectives, allowed):
        raise AssertionError("\n".join([*found, "The report:", str(overlap_report)]))
    return overlap_report


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
    sizes = bytes or {}
    for name, given in (("counts", counts), ("bytes", sizes)):
        if not isinstance(given, Mapping) or not all(isinstance(n, Real) for n in given.values()):
            words = "is not a mapping from kinds to numbers; pass such as {'all-reduce': 1}"
            raise TypeError(f"assert_collectives: {name}={given!r} {words}")
    for kind in (*counts, *sizes):
        if kind not in COLLECTIVES:
            raise ValueError(f"assert_collectives: kind {kind!r}: {choose(kind, COLLECTIVES)}")
    rows, wrong = collectives(compiled, allow_unread=allow_unread, mesh=mesh), []
    for kind in COLLECTIVES:
        of_kind = [row for row in rows if row.kind == kind]
        count, wanted = sum(row.count for row in of_kind), counts.get(kind, 0)
        if count != wanted:
            wrong.append(f"{kind} runs {count} times, not {wanted}")
        sent = sum(row.count * row.bytes for row in of_kind)
        if not isclose(sent, sizes.get(kind, sent)):
            wrong.append(f"{kind} sends {sent:.0f} bytes, not {sizes[kind]:.0f}")
    if not wrong:
        return
    lines = [("times", "bytes", "along", "asked by", "collective", "line")]
    for row in rows:
        along, size = ", ".join(row.axes) or "-", bytes_in_words(row.bytes)
        lines.append((str(row.count), size, along, row.asked, row.kind, row.at or NO_LINE))
    there = table_lines(lines) if rows else ["the program has no collective"]
    raise AssertionError("\n".join([*wrong, "", *there]))
