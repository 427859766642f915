"""A page in which the reader chooses a collective, an algorithm, ranks, bytes and a machine.

Python computes everything: pictures, words, formulas and seconds. The page only looks them up.
"""

import base64
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html import escape
from math import prod
from typing import Any

import numpy as np

from ringcoll.costs.closed_forms import at, closed_form, prices
from ringcoll.costs.counts import Price
from ringcoll.costs.machines import MACHINES
from ringcoll.costs.model import fastest
from ringcoll.costs.places import place_of
from ringcoll.costs.prediction import LAX, seconds_of
from ringcoll.draw import style
from ringcoll.draw.captions import round_counts
from ringcoll.draw.motion import Film
from ringcoll.draw.page import legend_html, moving_svg, notes_html, rounds_html
from ringcoll.draw.picture import MOST_RANKS
from ringcoll.draw.plan import Plan, plan
from ringcoll.draw.source import highlight, paragraphs, source
from ringcoll.io.text import bytes_in_words
from ringcoll.schedules.registry import algorithms_of, names
from ringcoll.web.page import page, part, shared

#: The collectives, and their names in the literature.
COLLECTIVES: Mapping[str, str] = {
    "psum": "all-reduce",
    "all_gather": "all-gather",
    "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
}
SHAPES: Sequence[tuple[int, ...]] = (
    *((2,), (3,), (4,), (6,), (8,), (16,)),
    *((4, 2), (2, 2, 2)),
)
#: Bytes of the full vector: 1 KiB to 4 GiB.
SIZES = tuple(2**k for k in range(10, 33))
BUILT_IN = "built-in"

Shape = tuple[int, ...]


def as_explorer(shapes: Sequence[Shape] = SHAPES) -> str:
    """HTML: choose a collective, an algorithm, ranks, bytes and a machine; see, price, compare.

    Args:
        shapes: the shapes of ranks to choose from, each of 2 to 16 ranks.

    Raises:
        ValueError: a shape has fewer or more ranks, or there is no shape.

    >>> "all-reduce" in draw.as_explorer([(2,)])
    True
    """
    for shape in shapes:
        if not 2 <= prod(shape) <= MOST_RANKS:
            raise ValueError(
                f"explore: ranks {_shape_name(shape)}: pictures can show 2 to {MOST_RANKS} ranks"
            )
    if not shapes:
        raise ValueError("explore: no ranks to choose from; give one shape or more, such as 4")
    pictures, priced = {}, {}
    for collective in COLLECTIVES:
        for shape in shapes:
            plans = dict(_plans(collective, shape))
            for name, drawn_plan in plans.items():
                key = f"{collective}|{name}|{_shape_name(shape)}"
                pictures[key] = pack(_picture_data(drawn_plan))
            for machine in MACHINES:
                if found := _price_data(collective, plans, shape, machine):
                    priced[f"{collective}|{_shape_name(shape)}|{machine}"] = found
    data = {
        "sizes": [[size, bytes_in_words(size)] for size in SIZES],
        "shapes": [_shape_name(shape) for shape in shapes],
        "machines": [[name, machine.what] for name, machine in MACHINES.items()],
        "collectives": [[name, title, _algorithms(name)] for name, title in COLLECTIVES.items()],
        "colours": style.COLOURS,
        "builtIn": BUILT_IN,
        "pictures": pictures,
        "prices": pack(priced),
    }
    body = part(
        "ringcoll.draw",
        "explore.html",
        player=shared("player.html", picture="", legend=""),
        dark=style.dark(),
    )
    scripts = [shared("player.js"), part("ringcoll.draw", "explore.js")]
    return page("Collective algorithms: rounds and prices", body, scripts, data)


def pack(data: Any) -> str:
    """Data as a text that a browser unpacks when it is needed: JSON, by gzip, in base 64."""
    plain = json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
    return base64.b64encode(gzip.compress(plain, 9, mtime=0)).decode()


def _shape_name(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _plans(collective: str, shape: Shape) -> Iterator[tuple[str, Plan]]:
    """The plan of every algorithm that has a schedule for a shape."""
    for name in names(collective):
        try:
            yield name, plan(collective, name, shape)
        except ValueError:  # the algorithm has no schedule for these ranks
            continue


def _algorithms(collective: str) -> list[dict[str, str]]:
    """What the page shows of each algorithm that does not depend on the ranks."""
    entries = []
    for name in names(collective):
        function = algorithms_of(collective)[name]
        summary, *prose = paragraphs(function)
        forms = {
            where: closed_form(prices(collective, name, on_a_ring))
            for where, on_a_ring in (("switch", False), ("ring", True))
        }
        entries.append(
            {
                "name": name,
                "summary": summary,
                "prose": "".join(f"<p>{escape(text)}</p>" for text in prose),
                "code": highlight(source(function)),
                "forms": "; ".join(f"on a {w}: {form}" for w, form in forms.items() if form),
            }
        )
    return entries


def _picture_data(drawn_plan: Plan) -> dict[str, Any]:
    return {
        "picture": moving_svg(Film(drawn_plan)),
        "legend": legend_html(drawn_plan),
        "rounds": rounds_html(drawn_plan),
        "counted": round_counts(drawn_plan),
        "explained": notes_html(drawn_plan),
        "shards": drawn_plan.size,
    }


def _price_data(
    collective: str, plans: Mapping[str, Plan], shape: Shape, machine: str
) -> dict[str, Any] | None:
    """The seconds of each algorithm at each size, its formula, and the fastest at each size.

    None if the machine cannot have these ranks.
    """
    seconds: dict[str, list[float]] = {}
    formulas: dict[str, str] = {}
    for name in (LAX, *plans):
        try:
            place = place_of(shape, MACHINES[machine])
            taken = seconds_of(collective, place, name)
        except ValueError:  # the machine does not have these axes or hosts
            continue
        seconds[name] = [taken(b) for b in SIZES]
        if name != LAX:
            cost = place.price(collective, name)
            if isinstance(cost, Price):
                formulas[name] = at(prod(shape), cost, MACHINES[machine].model.gamma > 0)
    if not seconds:
        return None
    lines = {name: partial(np.interp, xp=SIZES, fp=taken) for name, taken in seconds.items()}
    ranges = fastest(lines, SIZES[0], SIZES[-1])
    return {
        "seconds": {name: [float(f"{t:.6g}") for t in taken] for name, taken in seconds.items()},
        "formulas": formulas,
        "fastest": [[one.name, one.least, bytes_in_words(one.least)] for one in ranges],
    }
