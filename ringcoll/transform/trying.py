"""`tried`: a step is compiled in one form after the other, and what lowers its total is kept."""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import jax

from ringcoll.runtime.scopes import users_line
from ringcoll.transform.overlapping import overlapped
from ringcoll.transform.programs import transformed
from ringcoll.transform.sites import Uses, sites

#: The algorithms by which each site is tried.
ALGORITHMS = ("lax", "ring", "bidirectional_ring", "two_ended")
#: Why forms were not compiled.
SPENT = "not tried, as the budget is spent"
NO_SITE = "only options are tried, as no gather or sum that it calls meets a product"


@dataclass(frozen=True)
class Trial:
    """A form of a step.

    Attributes:
        name: the form in words: "as it is", "overlapped, sparse cores", or "site 2: ring", which is
            the quickest form until then with another algorithm at one site.
        options: the name of a set of compiler options; "" for none.
        choices: those of `overlapped`; None: the step is as it is.
        report: what `report_of` returned; None if the form was not compiled.
        why: why it was not compiled; "" if it was.
        site: the line and the key of the site that the name has the number of.
    """

    name: str
    options: str = ""
    choices: Mapping[str, str] | None = None
    report: Any = None
    why: str = ""
    site: str = ""


def quickest(trials: Sequence[Trial]) -> Trial:
    """The trial with the least total; of equals the first."""
    return min((one for one in trials if one.report), key=lambda one: one.report.total)


def tried(
    f: Callable[..., Any],
    operands: Sequence[Any],
    report_of: Callable[[jax.stages.Wrapped, Mapping[str, Any]], Any],
    sets: Mapping[str, Mapping[str, Any]],
    budget: float = 600.0,
) -> Iterator[Trial]:
    """Compile a step in many forms, and yield each as soon as its report is there.

    The first is f as it is, then with each set of options, then `overlapped(f)`, without options
    and with those of the quickest form. Then each site is tried by "lax", "ring",
    "bidirectional_ring" and "two_ended", the most exposed first. Sites of equal key are one. A form
    whose program was compiled before is not compiled again.

    Args:
        f: a function, as for `overlapped`.
        operands: its operands, or their `jax.ShapeDtypeStruct`s.
        report_of: compiles a function with options, and returns an `overlap.Report`; or something
            else with a `total`, such as what you measured.
        sets: the options by name, such as `overlap.OPTIONS`.
        budget: seconds after which nothing more is compiled. The first form always is.

    Raises:
        Exception: f as it is cannot be compiled. If another form cannot be, its `why` says so.

    >>> chips = ringcoll.mesh("v5e:2x2")
    >>> x = jax.ShapeDtypeStruct((4, 128), "float32", sharding=jax.NamedSharding(chips, P("x")))
    >>> def report_of(form, options):
    ...     program = overlap.compile_for("v5e:2x2", form, x, compiler_options=options)
    ...     return overlap.report(program)
    >>> for trial in ringcoll.transform.tried(lambda x: x.sum(0), [x], report_of, sets={}):
    ...     print(f"{trial.name}: {trial.why or trial.report.rows[0].kind}")
    as it is: all-reduce
    overlapped: only options are tried, as no gather or sum that it calls meets a product
    """
    deadline, trials, names = monotonic() + budget, list[Trial](), dict[int, str]()

    def trial(name: str, options: str = "", choices: Any = None, site: str = "") -> Trial:
        found = Trial(name, options, choices, site=site)
        if trials and monotonic() > deadline:
            return replace(found, why=SPENT)
        try:
            form = jax.jit(f if choices is None else overlapped(f, choices=choices))
            program = hash((form.lower(*operands).as_text(), options))
            if program in names:
                return replace(found, why=f"the same program as {names[program]!r}")
            found = replace(found, report=report_of(form, sets.get(options, {})))
        except Exception as error:  # from JAX or the compiler
            if not trials:
                raise
            return replace(found, why=" ".join(f"{type(error).__name__}: {error}".split()))
        names[program] = name
        trials.append(found)
        return found

    yield trial("as it is")
    for name in sets:
        yield trial(f"as it is, {name}", name)
    if not (lines := _lines_by_key(f, operands)):
        yield Trial("overlapped", choices={}, why=NO_SITE)
        return
    for options in dict.fromkeys(("", quickest(trials).options)):
        yield trial("overlapped" + f", {options}" * bool(options), options, {})

    def exposed(key: str) -> float:
        rows = getattr(trials[0].report, "rows", ())
        return sum(row.exposed for row in rows if row.source in lines[key])

    as_it_is = dict.fromkeys(lines, "lax")
    for number, key in enumerate(sorted(lines, key=exposed, reverse=True), 1):
        site = f"{lines[key][0].rpartition('/')[2]} {key}".lstrip()
        for algorithm in ALGORITHMS:
            best = quickest(trials)
            choices = as_it_is if best.choices is None else best.choices
            choices = {**choices, key: algorithm}
            yield trial(f"site {number}: {algorithm}", best.options, choices, site)


def _lines_by_key(f: Callable[..., Any], operands: Sequence[Any]) -> dict[str, list[str]]:
    """The keys of the sites that can be taken, and their lines, "/home/me/train.py:41"."""
    found: dict[str, list[str]] = {}

    def collect(jaxpr: Any, stored: set[Any]) -> dict[int, Any]:
        for site in sites(jaxpr, Uses(jaxpr), stored):
            if not site.why:
                stack = site.eqn.source_info.traceback
                frames = traceback.extract_tb(stack.as_python_traceback() if stack else None)
                file, line = users_line(frames)
                found.setdefault(site.key, []).append(f"{file}:{line}" if file else "")
        return {}

    jax.eval_shape(transformed(f, collect), *operands)
    return found
