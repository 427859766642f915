"""What a notebook shows of a schedule and of a price. `ringcoll.ipython` registers it."""

from ringcoll.costs.counts import Price
from ringcoll.draw.plan import plan
from ringcoll.draw.svg import as_svg
from ringcoll.schedules.schedule import AllToAllSchedule, Schedule

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


def schedule_svg(schedule: Schedule) -> str:
    """The picture of a schedule."""
    kind = "all_to_all" if isinstance(schedule, AllToAllSchedule) else "all_gather"
    return as_svg(plan(kind, schedule, schedule.shape))


def price_html(price: Price) -> str:
    """A price as a table, in shards."""
    rows = (
        f'<tr><th scope="row">{words}</th><td>{getattr(price, name)}</td></tr>'
        for name, words in _COUNTS.items()
    )
    head = '<thead><tr><th scope="col">counted, in shards</th><th></th></tr></thead>'
    return f"<table>{head}<tbody>{''.join(rows)}</tbody></table>"
