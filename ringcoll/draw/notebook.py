"""What a notebook shows of a schedule, a plan and a price. `ringcoll.ipython` registers it."""

from ringcoll.costs.counts import Price
from ringcoll.draw.plan import Plan, plan
from ringcoll.draw.svg import as_svg
from ringcoll.schedules.schedule import AllToAllSchedule, Schedule
from ringcoll.web.page import table

#: The counts of a price, in words.
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


def schedule_svg(schedule: Schedule) -> str | None:
    """The picture of a schedule; None if it is wrong or too large to draw."""
    kind = "all_to_all" if isinstance(schedule, AllToAllSchedule) else "all_gather"
    try:
        return as_svg(plan(kind, schedule, schedule.shape))
    except ValueError:
        return None


def plan_svg(drawn_plan: Plan) -> str | None:
    """The picture of a plan; None if it is too large to draw."""
    try:
        return as_svg(drawn_plan)
    except ValueError:
        return None


def price_html(price: Price) -> str:
    """A price as a table, in shards."""
    counts = ([words, f"{getattr(price, name)}"] for name, words in _COUNTS.items())
    return table([["counted, in shards", ""], *counts])
