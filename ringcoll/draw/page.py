"""A collective as a page that plays its rounds: one file, which loads no other."""

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from ringcoll.costs.counts import Price
from ringcoll.costs.machines import DEVICES
from ringcoll.costs.model import seconds
from ringcoll.draw.captions import explained, running
from ringcoll.draw.legend import SIDE, entries
from ringcoll.draw.picture import Picture
from ringcoll.draw.plan import Plan
from ringcoll.draw.source import highlighted, paragraphs, source
from ringcoll.draw.svg import document, finished

_PAYLOAD = 64 * 2**20
_WIDE = 820  # pixels; a wider picture gets the whole width of the page


def as_page(plan: Plan) -> str:
    """HTML: the picture of each round, what moves, the code, and the price.

    Args:
        plan: of at most 16 ranks.

    Raises:
        ValueError: too many ranks for a picture.

    >>> page = draw.as_page(draw.plan("all_gather", "ring", (4,)))
    >>> "<title>" in page, page.count("<svg")
    (True, 11)
    """
    picture = Picture(plan)
    template = Template(files("ringcoll.draw").joinpath("page.html").read_text(encoding="utf-8"))
    code = source(plan.function) if plan.function else ""
    summary, *prose = (paragraphs(plan.function) if plan.function else []) or [""]
    paid = plan.price(plan.shape)
    return template.substitute(
        title=escape(plan.title),
        collective=escape(plan.collective.replace("_", "-")),
        algorithm=escape(plan.algorithm),
        ranks=" &times; ".join(map(str, plan.shape)),
        summary=escape(summary),
        prose="".join(f"<p>{escape(paragraph)}</p>" for paragraph in prose),
        explained=_set(" ".join(explained(plan))),
        wide=" wide" if picture.size[0] > _WIDE else "",
        frames="\n".join(_figure(picture, number) for number in range(len(picture.frames))),
        legend=_legend(plan),
        last=len(picture.frames) - 1,
        rounds="\n".join(_rounds(plan)),
        code=highlighted(code) if code else escape(repr(plan.made)),
        counts=_table(_counts(plan, paid)),
        devices=_table(_devices(plan, paid)),
        ring="ring" if sum(n > 1 for n in plan.shape) < 2 else "torus",
    )


def _set(words: str) -> str:
    """A text as HTML: minus signs for hyphens before digits, and no line break in brackets."""
    minus = re.sub(r"(?<=[a-z])-(?=\d)", "\N{MINUS SIGN}", words)
    return re.sub(r"\([^()]*\)", lambda m: m[0].replace(" ", "\xa0"), escape(minus))


def _figure(picture: Picture, number: int) -> str:
    width, height = picture.size
    root = document(f"{picture.plan.title}, {picture.heading(number)}")
    root.set("style", f"min-width: {0.54 * width:.0f}px; max-width: {1.4 * width:.0f}px")
    picture.draw(root, number, headed=False)
    hidden = " hidden" if number else ""
    return f'<div class="frame" data-frame="{number}"{hidden}>{finished(root, width, height)}</div>'


def _legend(plan: Plan) -> str:
    made = []
    for glyph, text in entries(plan):
        root = document(text)
        glyph(root)
        made.append(f"<span>{finished(root, SIDE, SIDE)}{escape(text)}</span>")
    return "".join(made)


def _rounds(plan: Plan) -> list[str]:
    """A list of rounds with buttons that show them."""
    made, named = [_entry(0, "", "", [])], ""
    for number, now in plan.numbered():
        name, rank, said = running(plan, now)
        if name != named:
            named = name
            made.append(f'<li class="phase">{escape(named)}</li>')
        made.append(_entry(number, named, rank, said))
    return made


def _entry(number: int, phase: str, rank: str, texts: Sequence[str]) -> str:
    name = f"Round {number}" if number else "Before the first round"
    data = f'data-go="{number}" data-phase="{escape(phase)}" data-rank="{_set(rank)}"'
    lines = "".join(f"<span>{_set(line)}</span>" for line in texts)
    return f'<li><button type="button" {data}><b>{name}</b>{lines}</button></li>'


def _counts(plan: Plan, paid: Price) -> list[list[str]]:
    vectors = {
        "full vectors sent": paid.sent / plan.size,
        "on the busiest link": paid.link / plan.size,
        "full vectors added": paid.additions / plan.size,
    }
    return [
        ["Each rank", "", "of 64 MiB"],
        ["rounds", f"{paid.rounds}", ""],
        ["messages sent", f"{paid.messages}", ""],
        ["messages started one after the other", f"{paid.startups}", ""],
        ["links passed one after the other", f"{paid.hops}", ""],
        *([name, f"{x}", f"{float(x) * 64:.4g} MiB"] for name, x in vectors.items()),
    ]


def _devices(plan: Plan, paid: Price) -> list[list[str]]:
    rows = [["Device", "Link, each way", "Modelled time"]]
    axes = sum(n > 1 for n in plan.shape)
    for name, model in DEVICES.items():
        if model.axes < axes:  # it has no torus of so many axes
            continue
        took = seconds(paid, _PAYLOAD / plan.size, model)
        rows.append([name, f"{1e-9 / model.beta:.0f} GB/s", f"{took * 1e6:,.0f} µs"])
    return rows


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = [
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in body
    ]
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
