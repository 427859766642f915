"""Sets of compiler options that others published, by name; `options.json` has them.

There a set has its options, what it does, the chips that it is for, those that have it by default,
what it clashes with, and its source. Values are text, as in LIBTPU_INIT_ARGS.
"""

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from ringcoll.io.text import guess
from ringcoll.overlap.chips import chip
from ringcoll.overlap.program import versions

SETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    json.loads(files("ringcoll.overlap").joinpath("options.json").read_text(encoding="utf-8"))
)
#: The options of each set, for `jax.jit(step, compiler_options=OPTIONS["sparse cores"])`.
OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {name: MappingProxyType(one["options"]) for name, one in SETS.items()}
)


def for_chip(name: str) -> list[str]:
    """The sets for a chip, such as "v6e", without those that it has by default."""
    fits = {of: one for of, one in SETS.items() if name in one["chips"]}
    return [of for of, one in fits.items() if name not in one.get("default", ())]


def in_words(options: Mapping[str, Any], kind: str) -> Iterator[str]:
    """Each set that options hold, then the options of no set; `kind` is the `device_kind`."""
    left, here = dict(options), chip(kind)
    for name in _held(options):
        if OPTIONS[name].keys() & left.keys():  # else a larger set has them
            left = {option: value for option, value in left.items() if option not in OPTIONS[name]}
            chips, clashes = SETS[name]["chips"], SETS[name].get("clashes", "")
            # Said, not refused: a report runs nothing, and another compiler may gain by it.
            other = f" (for {', '.join(chips)}{'; not with ' * bool(clashes)}{clashes})"
            yield name + other * bool(here and here.name not in chips)
    yield from (f"{option}={value}" for option, value in left.items())


def refused(options: Mapping[str, Any], message: str, platform: str) -> str:
    """The option that a compiler's message names, its set, and the cure; "" if it names none."""
    option = max((name for name in options if name in message), key=len, default="")
    if not option:
        return ""
    known = [name for one in OPTIONS.values() for name in one]
    near = guess(option, known) + " " if option not in known else ""
    sets = [name for name in _held(options) if option in OPTIONS[name]][:1]
    of = "".join(f" of {name!r} (for {', '.join(SETS[name]['chips'])})" for name in sets)
    compilers = ", ".join(map(" ".join, versions([platform]).items()))
    said = message.partition("\n")[0].rstrip(": ")
    refusal = f"{option}={options[option]}{of} is refused by {compilers}: {said}"
    return f"{refusal}; {near}leave it out"


def _held(options: Mapping[str, Any]) -> list[str]:
    """The sets of which options have every option, with that value: True is "true"."""
    given = {name: str(value).lower() for name, value in options.items()}
    return [name for name, one in OPTIONS.items() if one.items() <= given.items()]
