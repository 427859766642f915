"""One frame as a picture: a box of shards for every rank, an arrow for every message."""

from collections.abc import Sequence
from math import ceil
from typing import Any

from ringcoll.draw import layout, style
from ringcoll.draw.captions import round_words
from ringcoll.draw.plan import Execution, check_size
from ringcoll.draw.routes import Route, routes
from ringcoll.draw.steps import Frame, Message, RankSet, frames
from ringcoll.io.svg import FAINT, INK, PAPER, Box, Element, label, rect, shape
from ringcoll.schedules.schedule import digits

_PAD, _HEAD, _TITLE = 8.0, 20.0, 34.0


class Picture:
    """Draws the frames of a plan, all of one size."""

    def __init__(self, plan: Execution) -> None:
        check_size(plan)
        self.plan = plan
        self.frames = frames(plan)
        side = 24.0 if plan.size <= 8 else 20.0
        self.cells = [(0, 0)] if plan.whole else layout.cell_places(plan.shape)
        self.cell = (max(plan.size * 16.0, 64.0) if plan.whole else side, side)
        columns, rows = (max(c) + 1 for c in zip(*self.cells, strict=True))
        self.on_grid = len(layout.long_axes(plan.shape)) > 1
        # On a grid, a box is wide enough for four messages side by side.
        width = max(columns * self.cell[0] + 2 * _PAD, 80.0 if self.on_grid else 56.0)
        box = (width, rows * self.cell[1] + _HEAD + _PAD)
        self.inset = (width - columns * self.cell[0]) / 2
        self.layout = layout.place_ranks(plan.shape, box, self._gap())
        self.posts = [self._group_by_arrow(frame.messages) for frame in self.frames]
        self.routes = [
            routes(self.layout, [(post[0].sender, post[0].receiver) for post in posts])
            for posts in self.posts
        ]
        self.corner, self.extent = self._extent()

    def _group_by_arrow(self, messages: Sequence[Message]) -> list[list[Message]]:
        """Messages grouped by arrow: in a tour, a shard and a sum to one rank share an arrow."""
        posts: dict[Any, list[Message]] = {}
        for i, message in enumerate(messages):
            key = (message.sender, message.receiver) if self.plan.tour else i
            posts.setdefault(key, []).append(message)
        return list(posts.values())

    def _gap(self) -> float:
        """The space between boxes: enough for the largest message."""
        most = max((len(m.pieces) for f in self.frames for m in f.messages), default=1)
        most = 1 if self.plan.whole else most
        if self.on_grid:
            return 44 + 11.0 * min(most, 4)
        crowded = max(len(f.messages) for f in self.frames) > 2 * self.plan.size
        return (52.0 if self.plan.size <= 8 else 38.0) + 20 * (most > 4) + 24 * crowded

    def _extent(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """The upper left corner and the size of a box around all frames."""
        width, height = self.layout.box
        xs = [x + side * width / 2 for x, _ in self.layout.centres for side in (-1, 1)]
        ys = [y + side * height / 2 for _, y in self.layout.centres for side in (-1, 1)]
        for route in (route for of_round in self.routes for route in of_round):
            for x, y in (way.at(t / 4) for way in route.ways for t in range(5)):
                xs += [x - 10, x + 10]
                ys += [y - 10, y + 10]
            xs += [route.middle[0] - 24, route.middle[0] + 24]
            ys += [route.middle[1] - 14, route.middle[1] + 14]
        return (min(xs), min(ys)), (max(xs) - min(xs), max(ys) - min(ys))

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of a frame, with its heading and margins."""
        return max(self.extent[0], 230.0) + 28, self.extent[1] + _TITLE + 14

    def colours(self, column: int) -> Sequence[str]:
        """The colours of a cell: one for a column, or one for each rank of a whole vector."""
        return style.COLOURS[: self.plan.size] if self.plan.whole else style.COLOURS[column:][:1]

    @property
    def stripes(self) -> int:
        """The stripes of a cell: one for each rank whose data may be in it."""
        return self.plan.size if self.plan.adds else 1

    def heading(self, number: int) -> str:
        """The number of a frame and its phase, in words."""
        if number == 0:
            return "before the first round"
        name, *_ = round_words(self.plan, dict(self.plan.numbered())[number])
        return f"round {number} of {len(self.frames) - 1} · {name}"

    def draw(self, into: Element, number: int) -> None:
        """Draw one frame, with its upper left corner at the origin."""
        frame = self.frames[number]
        label(into, (self.size[0] / 2, 14), self.heading(number), 13, fill=FAINT)
        x, y = (self.size[0] - self.extent[0]) / 2 - self.corner[0], _TITLE - self.corner[1]
        inner = shape(into, "g", transform=f"translate({x:.1f} {y:.1f})")
        dense = self.is_dense(number)
        for post, route in zip(self.posts[number], self.routes[number], strict=True):
            self.arrow(inner, post, route, dense)
        before = self.frames[max(number - 1, 0)]
        for rank in range(self.plan.size):
            self.box(inner, rank)
            for column in range(len(self.cells)):
                now, was = (self.stripes_held(f, rank, column) for f in (frame, before))
                self.column(inner, rank, column, now, is_more(now, was))
        for post, route in zip(self.posts[number], self.routes[number], strict=True):
            if not dense:
                self.glyph(inner, post, route, route.middle)

    def is_dense(self, number: int) -> bool:
        """Whether a round has so many messages that their contents would hide the ranks."""
        return len(self.frames[number].messages) > 6 * self.plan.size

    def box(self, into: Element, rank: int) -> None:
        """Draw a rank with its name, but without its data."""
        (x, y), (width, height) = self.layout.centres[rank], self.layout.box
        x, y = x - width / 2, y - height / 2
        rect(into, (x, y, width, height), style.BOX, rx=7, stroke=style.LINE)
        name = f"rank {rank}"
        if self.on_grid:
            name = f"{rank} ({', '.join(map(str, digits(rank, self.plan.shape)))})"
        label(into, (x + width / 2, y + 15), name, 12, font_weight="600")

    def stripes_held(self, frame: Frame, rank: int, column: int) -> Sequence[RankSet]:
        """The stripes of what a rank holds of a column, one set for each lane."""
        return [self._stripes_of(lane[column], i) for i, lane in enumerate(frame.held[rank])]

    def _stripes_of(self, held: RankSet, lane: int) -> RankSet:
        """The stripes of what is held in a lane. A shard of a tour is complete: it has all."""
        return frozenset(range(self.plan.size)) if held and self.is_shard(lane) else held

    def is_shard(self, lane: int) -> bool:
        """Whether a lane holds the shards of a tour and not its sums."""
        return self.plan.tour is not None and lane < self.plan.tour.out.lanes

    def place(self, rank: int, column: int) -> Box:
        """The box in which a rank shows its data of a column."""
        (x, y), (width, height) = self.layout.centres[rank], self.layout.box
        x, y = x - width / 2 + self.inset, y - height / 2 + _HEAD
        across, down = self.cells[column]
        wide, high = self.cell
        return (x + across * wide + 1, y + down * high + 1, wide - 2, high - 2)

    def column(
        self, into: Element, rank: int, column: int, held: Sequence[RankSet], is_new: bool
    ) -> Element:
        """Draw what a rank holds of a column, by lane, outlined if it is new; return the group."""
        x, y, width, height = self.place(rank, column)
        group = shape(into, "g", transform=f"translate({x:.1f} {y:.1f})")
        box = (0, 0, width, height)
        style.cell(group, box, held, self.stripes, self.colours(column))
        if is_new:
            style.outline(group, box)
        if self.plan.whole:
            for whose in sorted(held[0]):
                middle = (width * (whose + 0.5) / self.plan.size, height / 2 + 3.5)
                label(group, middle, str(whose), 9.5, fill=_on(style.COLOURS[whose]))
            return group
        look = {"fill": style.MUTED}
        if len(held[0]) == self.stripes and len(set(held)) == 1:
            look = {"fill": _on(style.COLOURS[column])}
        elif any(held):
            look = {"fill": INK, "stroke": PAPER, "paint_order": "stroke"}
            look["stroke_width"] = "2.6"
        label(group, (width / 2, height / 2 + 3.7), str(column), 10.5, **look)
        return group

    # -- messages --

    def arrow(self, into: Element, post: Sequence[Message], route: Route, dense: bool) -> None:
        """Draw the arrow of messages; in a dense round, in the colour of what they carry."""
        colour = style.LINE
        pieces = [piece for message in post for piece in message.pieces]
        if dense and len(pieces) == 1 and not self.plan.whole:
            colour = self.colours(pieces[0].column)[0]
        for way in route.ways:
            dashed = {"stroke_dasharray": "3 3"} if way is not route.ways[-1] else {}
            (ax, ay), (tx, ty), (bx, by) = way.start, way.towards, way.end
            path = f"M{ax:.1f} {ay:.1f}Q{tx:.1f} {ty:.1f} {bx:.1f} {by:.1f}"
            shape(into, "path", d=path, fill="none", stroke=colour, stroke_width=1.5, **dashed)
        (x, y), (ux, uy) = route.ways[-1].end, route.ways[-1].heading
        tip = ((x, y), *((x - 8 * ux + s * uy, y - 8 * uy - s * ux) for s in (-3.6, 3.6)))
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in tip)
        shape(into, "polygon", points=points, fill=colour if dense else FAINT)

    def glyph(
        self, into: Element, post: Sequence[Message], route: Route, at: tuple[float, float]
    ) -> None:
        """Draw what messages on one arrow carry, around a point."""
        pieces = [(piece, message.lane) for message in post for piece in message.pieces]
        count = len(pieces)
        width, height = (30.0, 11.0) if self.plan.whole else (11.0, 11.0)
        columns = min(count, 2 if count <= 4 else 4)
        if self.plan.whole:
            columns = 1
        elif route.upright:
            columns = ceil(count / 4)
        elif route.level:
            columns = min(count, 4)
        rows = ceil(count / columns)
        x, y = at[0] - columns * width / 2, at[1] - rows * height / 2
        around = (x - 2, y - 2, columns * width + 4, rows * height + 4)
        rect(into, around, PAPER, rx=3, stroke=FAINT, stroke_width=0.8)
        # A block gets one stripe, because several would be too thin to show their colours.
        stripes = 1 if self.plan.has_blocks else self.stripes
        for i, (piece, lane) in enumerate(pieces):
            column, row = i % columns, i // columns
            box = (x + column * width + 0.5, y + row * height + 0.5, width - 1, height - 1)
            held = [self._stripes_of(piece.contributors, lane)]
            style.cell(into, box, held, stripes, self.colours(piece.column))


def is_more(now: Sequence[RankSet], was: Sequence[RankSet]) -> bool:
    """Whether a rank holds more than before, in any lane."""
    return any(now[i % len(now)] - before for i, before in enumerate(was))


def _on(colour: str) -> str:
    """The colour of a text on a background of this colour."""
    return style.ON_DARK if style.is_dark(colour) else style.ON_LIGHT
