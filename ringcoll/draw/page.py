"""A page that plays the rounds of a collective: one file, which loads no other."""

import re
from collections.abc import Sequence
from html import escape

from ringcoll.costs.counts import Price, price
from ringcoll.costs.machines import DEVICES
from ringcoll.costs.model import seconds
from ringcoll.draw.captions import name_notes, round_counts, round_words
from ringcoll.draw.legend import SIDE, entries
from ringcoll.draw.motion import Film
from ringcoll.draw.plan import Execution
from ringcoll.draw.source import highlight, paragraphs, source
from ringcoll.draw.style import DARK
from ringcoll.schedules.registry import in_lax
from ringcoll.web.page import page, part, table
from ringcoll.web.svg import dark, document, svg_text

_PAYLOAD = 64 * 2**20
_WIDE = 820  # pixels; a wider picture gets the whole width of the page


def as_page(plan: Execution, follow: int | None = None) -> str:
    """HTML: a page with the rounds as a film, their messages in words, the code and the price.

    Args:
        plan: a plan of at most 16 ranks.
        follow: a shard to follow from the start, as for `as_motion`; a click changes it.

    Raises:
        ValueError: there are too many ranks for a picture, or there is no such shard.

    >>> page = draw.as_page(draw.plan("all_gather", "ring", (4,)))
    >>> "<title>" in page, page.count("<animateMotion")
    (True, 12)
    """
    film = Film(plan, follow)
    code = source(plan.function) if plan.function else ""
    summary, *prose = (paragraphs(plan.function) if plan.function else []) or [""]
    on_torus = price(in_lax(plan.collective), plan.made, plan.shape, plan.shape)
    body = part(
        "ringcoll.draw",
        "page.html",
        dark=dark(DARK),
        picture=_moving_svg(film),
        legend=_legend_html(plan),
        collective=escape(plan.collective.replace("_", "-")),
        algorithm=escape(plan.algorithm),
        ranks=" &times; ".join(map(str, plan.shape)),
        summary=escape(summary),
        prose="".join(f"<p>{escape(paragraph)}</p>" for paragraph in prose),
        explained=_typeset(" ".join(name_notes(plan))),
        counted=escape(f"{round_counts(plan)}."),
        wide=" wide" if film.picture.size[0] > _WIDE else "",
        rounds=_rounds_html(plan),
        code=highlight(code) if code else escape(repr(plan.made)),
        counts=table(_counts(plan, on_torus)),
        devices=table(_devices(plan, on_torus)),
        ring="ring" if sum(n > 1 for n in plan.shape) < 2 else "torus",
    )
    data = {"shards": plan.size, "follow": follow}
    return page(plan.title, body, part("ringcoll.draw", "page.js"), data)


def _moving_svg(film: Film) -> str:
    """The SVG of the ranks alone, for a page that plays it and has the dark colours."""
    width, height = film.picture.size
    root = document(film.picture.plan.title)
    film.draw(root)
    root.set("style", f"--natural: {width:.0f}px")
    return svg_text(root, width, height)


def _typeset(words: str) -> str:
    """A text as HTML, with minus signs before digits and no line break inside brackets."""
    minus = re.sub(r"(?<=[a-z])-(?=\d)", "\N{MINUS SIGN}", words)
    return re.sub(r"\([^()]*\)", lambda m: m[0].replace(" ", "\xa0"), escape(minus))


def _legend_html(plan: Execution) -> str:
    """What the squares of the picture mean, as HTML."""
    spans = []
    for glyph, text in entries(plan):
        root = document(text)
        glyph(root)
        spans.append(f"<span>{svg_text(root, SIDE, SIDE)}{escape(text)}</span>")
    return "".join(spans)


def _rounds_html(plan: Execution) -> str:
    """The list of rounds, as HTML; each round is a button that shows it."""
    items, named = [_round_button(0, "", "", [])], ""
    for number, now in plan.numbered():
        name, rank, messages = round_words(plan, now)
        if name != named:
            named = name
            items.append(f'<li class="phase">{escape(named)}</li>')
        items.append(_round_button(number, named, rank, messages))
    return "\n".join(items)


def _round_button(number: int, phase: str, rank: str, texts: Sequence[str]) -> str:
    name = f"Round {number}" if number else "Before the first round"
    data = f'data-go="{number}" data-phase="{escape(phase)}" data-rank="{_typeset(rank)}"'
    lines = "".join(f"<span>{_typeset(line)}</span>" for line in texts)
    return f'<li><button type="button" {data}><b>{name}</b>{lines}</button></li>'


def _counts(plan: Execution, price: Price) -> list[list[str]]:
    vectors = {
        "full vectors sent": price.sent / plan.size,
        "on the busiest link": price.link / plan.size,
        "full vectors added": price.additions / plan.size,
    }
    return [
        ["Each rank", "", "of 64 MiB"],
        ["rounds", f"{price.rounds}", ""],
        ["messages sent", f"{price.messages}", ""],
        ["messages started one after the other", f"{price.startups}", ""],
        ["links passed one after the other", f"{price.hops}", ""],
        *([name, f"{x}", f"{float(x) * 64:.4g} MiB"] for name, x in vectors.items()),
    ]


def _devices(plan: Execution, price: Price) -> list[list[str]]:
    rows = [["Device", "Message", "Link passed", "Link, each way", "Modelled time"]]
    axes = sum(n > 1 for n in plan.shape)
    for name, model in DEVICES.items():
        if model.axes < axes:  # it has no torus of so many axes
            continue
        took = seconds(price, _PAYLOAD / plan.size, model)
        starts = (f"{seconds * 1e6:.3g} µs" for seconds in (model.alpha, model.hop))
        rows.append([name, *starts, f"{1e-9 / model.beta:.0f} GB/s", f"{took * 1e6:,.0f} µs"])
    return rows
