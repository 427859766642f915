"""Pictures: a box for each rank, an arrow for each message, nothing overlaps; coloured code."""

import re
from itertools import combinations
from math import dist, hypot, prod
from xml.etree import ElementTree

import numpy as np
import pytest

from ringcoll.algorithms import ring
from ringcoll.draw import as_svg, frames, plan
from ringcoll.draw.layout import cell_places, plane_size
from ringcoll.draw.picture import Picture
from ringcoll.draw.style import COLOURS, DARK, DARK_COLOURS, EMPTY, is_dark
from ringcoll.io.svg import Element

pytestmark = pytest.mark.quick

PLANS = [
    ("psum", "ring", (4,)),
    ("all_gather", "torus", (4, 2)),
    ("all_to_all", "bruck", (5,)),
    ("psum", "recursive_doubling", (6,)),
    ("psum_scatter", "direct", (8,)),
    ("psum", "torus", (2, 2, 2)),
    ("psum", "ring", (1,)),
    ("psum", "bidirectional_ring", (2,)),
    ("pmin", "one_shot", (3,)),
]


@pytest.mark.parametrize(("collective", "algorithm", "shape"), PLANS)
def test_arrows_go_from_sender_to_receiver(collective, algorithm, shape):
    drawn = plan(collective, algorithm, shape)
    picture = Picture(drawn)
    for number, frame in enumerate(frames(drawn)):
        one = Element("svg")
        picture.draw(one, number)
        of = {name: [e.attrib for e in one.iter(name)] for name in ("rect", "path", "polygon")}
        sides = ("x", "y", "width", "height")
        boxes = [[float(e[side]) for side in sides] for e in of["rect"] if e.get("rx") == "7"]
        assert len(boxes) == drawn.size

        def nearest(point, boxes=boxes):
            def distance(rank):
                x, y, width, height = boxes[rank]
                return hypot(
                    *(
                        max(low - at, 0, at - low - size)
                        for at, low, size in zip(point, (x, y), (width, height), strict=True)
                    )
                )

            return min(range(len(boxes)), key=distance)

        def points(text):
            numbers = [float(n) for n in re.findall(r"-?[\d.]+", text)]
            return list(zip(numbers[::2], numbers[1::2], strict=True))

        ways, named = [], []
        for path in of["path"]:  # an arrow that wraps round a grid has dashed parts before the last
            ways.append(points(path["d"]))
            if "stroke-dasharray" not in path:
                named.append((nearest(ways[0][0]), nearest(ways[-1][-1])))
                ways = []
        assert named == [(m.sender, m.receiver) for m in frame.messages]
        tips = [nearest(points(polygon["points"])[0]) for polygon in of["polygon"]]
        assert tips == [m.receiver for m in frame.messages]


ROUTES = [
    ("bidirectional_ring", (2,)),
    ("bidirectional_ring", (8,)),
    ("two_ended", (3,)),
    ("bruck", (5,)),
    ("bruck", (8,)),
    ("halving_doubling", (8,)),
    ("recursive_doubling", (8,)),
    ("torus", (4, 2)),
    ("torus", (4, 4)),
    ("torus", (2, 2, 2)),
    ("direct", (4, 4)),
    (ring(6), (3, 2)),  # also from (0, 1) to (1, 0)
]


@pytest.mark.parametrize(("algorithm", "shape"), ROUTES)
def test_messages_overlap_neither_messages_nor_ranks(algorithm, shape):
    picture = Picture(plan("psum", algorithm, shape))
    (width, height), box = picture.layout.box, (picture.corner, picture.extent)
    for routes in picture.routes:
        for one, other in combinations([route.middle for route in routes], 2):
            assert dist(one, other) > 11
        for way in (way for route in routes for way in route.ways):
            for x, y in (way.at(t / 12) for t in range(13)):
                assert all(0 < at - low < size for at, low, size in zip((x, y), *box, strict=True))
                for left, top in picture.layout.centres:
                    assert abs(x - left) > width / 2 or abs(y - top) > height / 2


@pytest.mark.parametrize(("algorithm", "shape"), ROUTES)
def test_arrows_are_symmetric_and_straight_ones_leave_a_side(algorithm, shape):
    picture = Picture(plan("psum", algorithm, shape))
    centres, (width, height) = picture.layout.centres, picture.layout.box
    for posts, routes in zip(picture.posts, picture.routes, strict=True):
        for (message, *_), route in zip(posts, routes, strict=True):
            ends = centres[message.sender], centres[message.receiver]
            first, last = route.ways[0], route.ways[-1]
            if first is last:  # it does not wrap round the grid
                one, other = (dist(end, first.towards) for end in ends)
                assert one == pytest.approx(other)
            across, down = np.abs(np.subtract(first.end, first.start))
            straight = dist(first.start, first.towards) == pytest.approx((across + down) / 2)
            # Along a column its contents are a column, along a row they are a row.
            assert (route.upright, route.level) == (straight and not across, straight and not down)
            if straight:
                for (x, y), (left, top) in zip((first.start, last.end), ends, strict=True):
                    assert abs(x - left) < width / 2 or abs(y - top) < height / 2


@pytest.mark.parametrize(("algorithm", "shape"), ROUTES)
def test_a_picture_has_room_for_ranks_arrows_and_contents(algorithm, shape):
    picture = Picture(plan("psum", algorithm, shape))
    on, every = picture.layout, [route for routes in picture.routes for route in routes]
    low, size, centres, box = map(np.array, (picture.corner, picture.extent, on.centres, on.box))
    ways = [way.at(t / 4) for route in every for way in route.ways for t in range(5)]
    contents, room = np.array([route.middle for route in every]), (24, 14)
    boxes = [centres - box / 2, centres + box / 2, contents - room, contents + room]
    drawn = np.concatenate([*boxes, ways])
    for margin in (drawn.min(0) - low, low + size - drawn.max(0)):
        assert all((margin >= 0) & (margin <= 10))


@pytest.mark.parametrize(
    ("shape", "places", "plane"),
    [
        ((5,), ["01234"], None),  # ranks on a circle are on no grid
        ((7,), ["0123", "456"], None),
        ((10,), ["0123", "4567", "89"], None),
        ((2, 3), ["012", "345"], (3, 2)),
        ((3, 2), ["024", "135"], (3, 2)),  # the longer axis is horizontal
        ((1, 3, 2), ["024", "135"], (3, 2)),
        ((3, 2, 2), ["014589", "2367ab"], (2, 2)),  # three planes side by side
    ],
)
def test_cells_are_placed_by_rank(shape, places, plane):
    assert plane is None or plane_size(shape) == plane
    assert cell_places(shape) == [
        (row.index(f"{rank:x}"), down)
        for rank in range(prod(shape))
        for down, row in enumerate(places)
        if f"{rank:x}" in row
    ]


@pytest.mark.parametrize(("collective", "algorithm", "shape"), PLANS)
def test_a_frame_is_between_its_heading_and_the_legend(collective, algorithm, shape):
    tag = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(as_svg(plan(collective, algorithm, shape)))
    outer, *_, legend = root.findall(f"{tag}g")
    (inner,) = outer.findall(f"{tag}g")
    moved = [re.findall(r"[\d.]+", group.get("transform")) for group in (outer, inner, legend)]
    (ax, ay), (bx, by), (_, bottom) = np.array(moved, float)
    for box in [box for box in inner.findall(f"{tag}rect") if box.get("rx") == "7"]:
        x, y, width, height = (float(box.get(side)) for side in ("x", "y", "width", "height"))
        left, top = ax + bx + x, ay + by + y
        assert 16 < left < left + width < float(root.get("width")) - 16
        assert top > ay + 14  # where the heading is
        assert top + height < bottom


def test_boxes_do_not_overlap():
    for shape in [(n,) for n in range(2, 17)] + [(4, 4), (3, 5), (2, 2, 2), (2, 2, 4)]:
        picture = Picture(plan("psum", "ring", shape))
        width, height = picture.layout.box
        for (ax, ay), (bx, by) in combinations(picture.layout.centres, 2):
            assert abs(ax - bx) > width + 20 or abs(ay - by) > height + 20


#: What eyes without red or green cones see: Machado, Oliveira, Fernandes (2009).
SEEN = {
    "all": np.eye(3),
    "no red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "no green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
}


def least_distance(colours, eyes):
    """The least distance between two of these colours in OKLab, as these eyes see them."""
    srgb = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in colours])
    linear = np.where(srgb < 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.array(SEEN[eyes]).T, 0, None)
    cones = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
    lab = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    oklab = np.cbrt(seen @ np.array(cones).T) @ np.array(lab).T
    return min(np.linalg.norm(a - b) for a, b in combinations(oklab, 2))


@pytest.mark.parametrize("eyes", SEEN)
def test_colours_are_distinguishable(eyes):
    for colours, empty in ((COLOURS, EMPTY), (DARK_COLOURS, DARK[EMPTY])):
        assert len(colours) == 16
        assert least_distance((*colours, empty), eyes) > 0.08
    # Text on a colour is light or dark, whatever the page's background.
    assert [is_dark(c) for c in DARK_COLOURS] == [is_dark(c) for c in COLOURS]
