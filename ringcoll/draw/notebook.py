"""How a notebook shows a schedule, a plan and a price."""

from collections.abc import Sequence
from html import escape

from ringcoll.costs.counts import Price
from ringcoll.draw.plan import Plan, plan
from ringcoll.draw.svg import as_svg
from ringcoll.schedules.schedule import AllToAllSchedule, Schedule

#: The figures of a price, in words.
_COUNTS = {
    "rounds": "rounds",
    "messages": "messages that a rank sends",
    "startups": "messages that start one after the other",
    "hops": "links that messages pass, one after the other",
    "sent": "shards that leave a rank",
    "raw": "of these, shards without a partial sum",
    "link": "shards on the busiest link",
    "additions": "shards that a rank adds",
}


def of_schedule(schedule: Schedule) -> str | None:
    """The picture of a schedule; None if it is wrong or too large to draw."""
    kind = "all_to_all" if isinstance(schedule, AllToAllSchedule) else "all_gather"
    try:
        return as_svg(plan(kind, schedule, schedule.shape))
    except ValueError:
        return None


def of_plan(drawn_plan: Plan) -> str | None:
    """The picture of a plan; None if it is too large to draw."""
    try:
        return as_svg(drawn_plan)
    except ValueError:
        return None


def of_price(paid: Price) -> str:
    """A price as a table, in shards."""
    rows = [(words, f"{getattr(paid, name)}") for name, words in _COUNTS.items()]
    return table(("counted, in shards", ""), rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in HTML."""

    def row(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f"<table><thead>{row('th', heads)}</thead><tbody>{body}</tbody></table>"
