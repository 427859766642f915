"""A picture that moves: in each round the messages leave, travel and arrive.

It is one SVG file that needs no script. SMIL animates it: browsers run SMIL, also in an image.
Time is in units of a round: round k lasts from k to k + 1.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil, dist

from ringcoll.draw import style
from ringcoll.draw.captions import sentence
from ringcoll.draw.legend import legend
from ringcoll.draw.picture import Picture, is_more
from ringcoll.draw.plan import Execution
from ringcoll.draw.routes import Route
from ringcoll.draw.steps import Message, RankSet
from ringcoll.draw.svg import MARGIN
from ringcoll.draw.text import wrap
from ringcoll.io.svg import FAINT, Box, Element, dark, document, label, rect, shape, svg_text

_SECONDS = 2.4  # a round
#: Within a round, when its messages leave and arrive.
LEAVE, ARRIVE = 0.2, 0.72
_INSIDE = 0.1  # how long a message is over the box of its sender, and then of its receiver
_EASE = "0 0 1 1;.4 0 1 1;0 0 1 1;0 0 .4 1;0 0 1 1"
_TOP, _LINE = 64.0, 17.0
_MOST_STILL = 6  # frames (rounds and the start) that are legible side by side
_STILL = """
.ringcoll .still{display:none}
@media (prefers-reduced-motion:reduce){
.ringcoll .still{display:inline}
.ringcoll .moving{display:none}
}
"""


def as_motion(plan: Execution) -> str:
    """SVG: the rounds as a film that repeats, with captions and a legend.

    If the reader's device asks for reduced motion, the rounds are shown side by side and nothing
    moves. Of more than five rounds, it shows the first, the last and some between.

    Args:
        plan: a plan of at most 16 ranks.

    Raises:
        ValueError: there are too many ranks.

    >>> draw.as_motion(draw.plan("all_gather", "ring", (4,))).count("<animateMotion")
    12
    """
    film = Film(plan)
    root = document(plan.title, dark(style.DARK) + _STILL)
    width, height = film.picture.size
    captions = ["Before the first round", *(sentence(plan, now) for _, now in plan.numbered())]
    wrapped = [wrap(line, int(max(width, 330.0) / 6.2)) for line in captions]
    wide = max(width, 8.4 * len(plan.title), 330.0) + 2 * MARGIN
    moving = shape(root, "g", **{"class": "moving"})
    label(moving, (wide / 2, 30), plan.title, 15, font_weight="600")
    film.draw(shape(moving, "g", transform=f"translate({(wide - width) / 2:.1f} {_TOP - 20})"))
    bottom = _TOP - 12 + height
    for number, lines in enumerate(wrapped):
        shown = shape(moving, "g")
        film.show_between(shown, number, number + 1 + (number == film.last))
        label(shown, (wide / 2, 51), film.picture.heading(number), 13, fill=FAINT)
        for i, line in enumerate(lines):
            label(shown, (wide / 2, bottom + _LINE * i), line, 12)
    below = bottom + _LINE * max(map(len, wrapped))
    film.bar(moving, (wide / 2 - 90, below - 4, 180.0, 3.0))
    at = shape(moving, "g", transform=f"translate({MARGIN} {below + 12:.1f})")
    total_height = below + 12 + legend(at, plan, wide - 2 * MARGIN) + MARGIN
    _still(film.picture, shape(root, "g", **{"class": "still"}), (wide, total_height))
    return svg_text(root, wide, total_height)


class Film:
    """The moving part of a picture: ranks, data, arrows and messages, without words."""

    def __init__(self, plan: Execution) -> None:
        self.picture = Picture(plan)
        self.last = len(self.picture.frames) - 1
        self.lasts = self.last + 2  # the start and the end are shown for as long as a round

    def draw(self, into: Element) -> None:
        """Draw everything that ranks hold and send, each at its time."""
        width, height = self.picture.size
        (x, y), (wide, high) = self.picture.corner, self.picture.extent
        place = f"translate({(width - wide) / 2 - x:.1f} {(height - high) / 2 - y:.1f})"
        inner = shape(into, "g", transform=place)
        rounds = [self._round(inner, number) for number in range(1, self.last + 1)]
        for rank in range(self.picture.plan.size):
            self.picture.box(inner, rank)
            for column in range(len(self.picture.cells)):
                self._cell(inner, rank, column)
        for number, travelling in enumerate(rounds, 1):
            inner.append(travelling)
            self.show_between(travelling, number, number + 1)

    def _round(self, into: Element, number: int) -> Element:
        """Draw the arrows of a round. Return its messages, which are drawn later, above ranks."""
        picture = self.picture
        arrows, travelling = shape(into, "g"), Element("g")
        self.show_between(arrows, number, number + 1 + (number == self.last))
        for post, route in zip(picture.posts[number], picture.routes[number], strict=True):
            picture.arrow(arrows, post, route, picture.is_dense(number))
            glyph = shape(travelling, "g")
            picture.glyph(glyph, post, route, (0, 0))
            self._animate_travel(glyph, post, route, number)
        return travelling

    def _middle(self, rank: int, post: Sequence[Message]) -> tuple[float, float]:
        """The middle of a rank's cells of what messages carry."""
        columns = [piece.column for message in post for piece in message.pieces]
        places = [self.picture.place(rank, column) for column in columns]
        x = sum(x + width / 2 for x, _, width, _ in places) / len(places)
        y = sum(y + height / 2 for _, y, _, height in places) / len(places)
        return x, y

    def _cell(self, into: Element, rank: int, column: int) -> None:
        """Draw everything that a rank holds in a column over time."""
        states = list(self._states(rank, column))
        ends = [start for start, _, _ in states[1:]] + [float(self.lasts)]
        for (start, held, is_new), end in zip(states, ends, strict=True):
            shown = self.picture.column(into, rank, column, held, is_new)
            self.show_between(shown, start, end)

    def _states(self, rank: int, column: int) -> Iterator[tuple[float, Sequence[RankSet], bool]]:
        """When a column changes: the time, what the rank holds then, and whether that is new."""
        held_after = [self.picture.stripes_held(f, rank, column) for f in self.picture.frames]
        shown: tuple[Sequence[RankSet], bool] = held_after[0], False
        yield 0.0, *shown
        for number, (was, now) in enumerate(pairwise(held_after), 1):
            # What is not sent away. A tour drops a shard only after the addition of the round.
            kept = [
                w if self.picture.is_shard(i) else w & now[i % len(now)] for i, w in enumerate(was)
            ]
            for time, held, is_new in (
                (number, was, False),
                (number + LEAVE, kept, False),
                (number + ARRIVE, now, is_more(now, was)),
            ):
                state = held, is_new
                if state != shown:
                    shown = state
                    yield time, *state

    def show_between(self, element: Element, start: float, end: float) -> None:
        """Show an element only from one time to another."""
        times, values = ["0"], ["visible" if start <= 0 else "hidden"]
        for time, value in ((start, "visible"), (end, "hidden")):
            if 0 < time < self.lasts:
                times.append(self._key_time(time))
                values.append(value)
        if len(times) == 1:
            return
        element.set("visibility", values[0])
        self._animate(
            element,
            "animate",
            attributeName="visibility",
            calcMode="discrete",
            values=";".join(values),
            keyTimes=";".join(times),
        )

    def _animate_travel(
        self, glyph: Element, post: Sequence[Message], route: Route, number: int
    ) -> None:
        """Move messages out of their cells, over their arrow, and into the receiver's cells.

        At any time, all messages of a round have gone the same share of their arrows.
        """
        a, b = self._middle(post[0].sender, post), self._middle(post[0].receiver, post)
        path, lengths = f"M{a[0]:.0f} {a[1]:.0f}", [dist(a, route.ways[0].start)]
        for i, way in enumerate(route.ways):
            (ax, ay), (tx, ty), (bx, by) = way.start, way.towards, way.end
            path += f"{'M' if i else 'L'}{ax:.0f} {ay:.0f}Q{tx:.0f} {ty:.0f} {bx:.0f} {by:.0f}"
            lengths.append(sum(dist(way.at(t / 8), way.at((t + 1) / 8)) for t in range(8)))
        path += f"L{b[0]:.0f} {b[1]:.0f}"
        total_length = sum(lengths) + dist(route.ways[-1].end, b)
        out, home = lengths[0] / total_length, sum(lengths) / total_length
        start, end = number + LEAVE, number + ARRIVE
        times = (start, start + _INSIDE, end - _INSIDE, end)
        self.show_between(glyph, start, end)
        self._animate(
            glyph,
            "animateMotion",
            path=path,
            calcMode="spline",
            keyPoints=f"0;0;{out:.3f};{home:.3f};1;1",
            keyTimes=f"0;{';'.join(map(self._key_time, times))};1",
            keySplines=_EASE,
        )

    def bar(self, into: Element, box: Box) -> None:
        """Draw the bar that shows how far the film has run."""
        x, y, width, height = box
        rect(into, box, style.EMPTY, rx=1.5)
        done = shape(into, "rect", x=x, y=y, width=0, height=height, rx=1.5, fill=style.MUTED)
        self._animate(done, "animate", attributeName="width", values=f"0;{width:g}")

    def _animate(self, element: Element, tag: str, **attributes: str) -> None:
        lasts = f"{self.lasts * _SECONDS:g}s"
        animation = shape(element, tag)
        for name, value in {**attributes, "dur": lasts, "repeatCount": "indefinite"}.items():
            animation.set(name, value)

    def _key_time(self, time: float) -> str:
        return f"{time / self.lasts:.5f}".rstrip("0")


def _still(picture: Picture, into: Element, size: tuple[float, float]) -> None:
    """Draw some frames side by side, with the first and the last, as large as they fit."""
    last, (width, height) = len(picture.frames) - 1, picture.size
    count = min(last + 1, _MOST_STILL)
    chosen = sorted({round(i * last / max(count - 1, 1)) for i in range(count)})

    def scale(columns: int) -> float:
        rows = ceil(len(chosen) / columns)
        return min((size[0] - 16) / (columns * width), (size[1] - 56) / (rows * height))

    columns = max(range(1, len(chosen) + 1), key=scale)
    by = scale(columns)
    left = (size[0] - columns * width * by) / 2
    label(into, (size[0] / 2, 30), picture.plan.title, 15, font_weight="600")
    for i, number in enumerate(chosen):
        x, y = left + i % columns * width * by, 48 + i // columns * height * by
        place = f"translate({x:.1f} {y:.1f}) scale({by:.3f})"
        picture.draw(shape(into, "g", transform=place), number)
