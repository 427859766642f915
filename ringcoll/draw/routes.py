"""Route the messages of a round through a picture so that few of them cross or overlap."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot

from ringcoll.draw.layout import PictureLayout, Point, cell_places, long_axes, plane_size

_APART = 18.0  # between two curves side by side


@dataclass(frozen=True)
class Bezier:
    """A curve from one point to another, bent towards a third (a quadratic Bezier)."""

    start: Point
    towards: Point
    end: Point

    def at(self, t: float) -> Point:
        """The point at a share t of the way."""
        (ax, ay), (tx, ty), (bx, by) = self.start, self.towards, self.end
        a, both, b = (1 - t) ** 2, 2 * t * (1 - t), t**2
        return a * ax + both * tx + b * bx, a * ay + both * ty + b * by

    @property
    def heading(self) -> Point:
        """The direction in which it ends, of length 1."""
        return _unit(self.towards, self.end)


@dataclass(frozen=True)
class Route:
    """The curve of one message, or two if it leaves the grid and enters on the other side.

    The content of the message is drawn at `middle`: as a column if `upright`, as a row if `level`.
    """

    ways: tuple[Bezier, ...]
    middle: Point
    upright: bool = False
    level: bool = False


def routes(on: PictureLayout, ends: Sequence[tuple[int, int]]) -> list[Route]:
    """A route for each pair of a sender and a receiver of one round."""
    on_link = Counter(map(frozenset, ends))
    drawn: Counter[frozenset[int]] = Counter()
    result = []
    for sender, receiver in ends:
        link = frozenset((sender, receiver))
        turn, count = drawn[link], on_link[link]
        drawn[link] += 1
        if len(long_axes(on.shape)) == 1:
            result.append(_on_circle(on, sender, receiver, turn))
        else:
            result.append(_on_grid(on, sender, receiver, turn, count))
    return result


def _on_circle(on: PictureLayout, sender: int, receiver: int, turn: int) -> Route:
    """A route on the circle; between ranks that are not neighbours it bends to the centre."""
    (ax, ay), (bx, by) = on.centres[sender], on.centres[receiver]
    ux, uy = _unit((ax, ay), (bx, by))
    mx, my = (ax + bx) / 2, (ay + by) / 2
    near = (sender - receiver) % len(on.centres) in (1, len(on.centres) - 1)
    bend = 18.0 + 0.07 * hypot(ax - bx, ay - by) + 2 * _APART * (turn // 2)
    pull = 0.0 if near else 0.4
    towards = (mx * (1 - pull) + uy * bend, my * (1 - pull) - ux * bend)
    way = _between(on, (ax, ay), towards, (bx, by))
    return Route((way,), way.at(0.46 if near else 0.3))


def _on_grid(on: PictureLayout, sender: int, receiver: int, turn: int, count: int) -> Route:
    """A route on the grid: a line to a neighbour, or two lines around the end of an axis.

    To any other rank it is a curve past the boxes between.
    """
    cells, (columns, rows) = cell_places(on.shape), plane_size(on.shape)
    (acol, arow), (bcol, brow) = cells[sender], cells[receiver]
    across, down = abs(acol - bcol), abs(arow - brow)
    one_plane = acol // columns == bcol // columns
    (ax, ay), (bx, by) = on.centres[sender], on.centres[receiver]
    if one_plane and 0 in (across, down):
        thick = on.box[1] if across else on.box[0]
        aside = (turn - (count - 1) / 2) * min(26.0, (thick - 8) / count)
        dx, dy = (0.0, aside) if across else (aside, 0.0)
        a, b = (ax + dx, ay + dy), (bx + dx, by + dy)
        half = on.box[0 if across else 1] / 2 + 4
        if across + down == 1:
            way = _straight(a, b, half)
            return Route((way,), way.at(0.45), upright=not across, level=not down)
        if across + down == (columns if across else rows) - 1:
            out, into = _wrapped(a, b, half, on.gap * 0.85)
            return Route((out, into), into.at(0.4), upright=not across, level=not down)
    ux, uy = _unit((ax, ay), (bx, by))
    towards = (ax + bx) / 2 + uy * _APART, (ay + by) / 2 - ux * _APART
    if not down:  # in the upper half of the rows the curve passes above, in the lower half below
        past = on.box[1] + 40 + 2 * _APART * turn
        towards = (ax + bx) / 2, ay + (past if 2 * arow >= rows else -past)
    elif not across:  # the curve passes beside the column
        towards = (ax + bx) / 2 + uy * (on.box[0] + 40 + 2 * _APART * (turn // 2)), (ay + by) / 2
    way = _between(on, (ax, ay), towards, (bx, by))
    return Route((way,), way.at(0.38))


def _unit(a: Point, b: Point) -> Point:
    dx, dy = b[0] - a[0], b[1] - a[1]
    length = hypot(dx, dy) or 1.0
    return dx / length, dy / length


def _between(on: PictureLayout, a: Point, towards: Point, b: Point) -> Bezier:
    """A curve from the edge of one box to the edge of another."""
    return Bezier(_edge(a, towards, on.box), towards, _edge(b, towards, on.box))


def _edge(middle: Point, towards: Point, box: Point) -> Point:
    """A point just outside a box, on the line from its centre."""
    ux, uy = _unit(middle, towards)
    half = (box[0] / 2 + 4, box[1] / 2 + 4)
    reach = min(half[0] / max(abs(ux), 1e-9), half[1] / max(abs(uy), 1e-9))
    return middle[0] + ux * reach, middle[1] + uy * reach


def _straight(a: Point, b: Point, half: float) -> Bezier:
    ux, uy = _unit(a, b)
    start, end = (a[0] + ux * half, a[1] + uy * half), (b[0] - ux * half, b[1] - uy * half)
    return Bezier(start, ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2), end)


def _wrapped(a: Point, b: Point, half: float, length: float) -> tuple[Bezier, Bezier]:
    """A line out of the grid on one side, and a line into it on the other."""
    ux, uy = _unit(b, a)  # away from the receiver, because the message wraps
    beyond = (a[0] + ux * (2 * half + length), a[1] + uy * (2 * half + length))
    before = (b[0] - ux * (2 * half + length), b[1] - uy * (2 * half + length))
    return _straight(a, beyond, half), _straight(before, b, half)
