"""Moving pictures: at any time they show what is held, and messages go where they are sent."""

import re
from collections import Counter
from math import hypot
from xml.etree import ElementTree

import pytest
from test_draw_svg import PLANS

from ringcoll.draw import as_motion, frames, plan
from ringcoll.draw.motion import ARRIVE, LEAVE, Film
from ringcoll.draw.style import Element

pytestmark = pytest.mark.quick

TAG = "{http://www.w3.org/2000/svg}"
MOVING = [*PLANS, ("tour", "ring", (4,)), ("tour", "bidirectional_ring", (5,))]


def seen(element, share):
    """Whether an element is shown at a share of the film, by its own animation alone."""
    for child in element:
        if child.tag == "animate" and child.get("attributeName") == "visibility":
            times = map(float, child.get("keyTimes").split(";"))
            values = child.get("values").split(";")
            return [v for t, v in zip(times, values, strict=True) if t <= share][-1] == "visible"
    return True


def drawn(groups):
    """The places and contents of cells, without their times."""
    return Counter(
        (
            group.get("transform"),
            *(str([e.tag, e.text, e.attrib]) for e in group if e.tag != "animate"),
        )
        for group in groups
    )


@pytest.mark.parametrize(("collective", "algorithm", "shape"), MOVING)
def test_an_animation_shows_the_frame_after_each_round(collective, algorithm, shape):
    drawn_plan = plan(collective, algorithm, shape)
    film = Film(drawn_plan)
    moving = Element("svg")
    film.draw(moving)
    held = [e for e in moving.find("g") if e.tag == "g" and e.get("transform")]
    for number in range(film.last + 1):
        still = Element("svg")
        film.picture.draw(still, number)
        cells = [e for e in still.find("g") if e.tag == "g"]
        shown = [e for e in held if seen(e, (number + 0.99) / film.lasts)]
        assert len(shown) == drawn_plan.size * len(film.picture.cells)
        assert drawn(shown) == drawn(cells)


@pytest.mark.parametrize(
    ("collective", "rank", "column", "number", "sizes"),
    [
        ("psum_scatter", 2, 3, 1, [0]),  # a sum is given away, a shard is kept
        ("all_gather", 2, 2, 1, [1]),
        ("tour", 1, 0, 2, [4, 0]),  # it forwards the shard, then the sum
        ("tour", 1, 0, 3, [0, 0]),
    ],
)
def test_shards_held_while_messages_travel(collective, rank, column, number, sizes):
    film, flying = Film(plan(collective, "ring", (4,))), number + (LEAVE + ARRIVE) / 2
    held = [held for start, held, _ in film._states(rank, column) if start <= flying][-1]
    assert [len(lane) for lane in held] == sizes


@pytest.mark.parametrize(("collective", "algorithm", "shape"), MOVING)
def test_messages_travel_from_the_sender_to_the_receiver_within_their_round(
    collective, algorithm, shape
):
    drawn_plan = plan(collective, algorithm, shape)
    film = Film(drawn_plan)
    root = Element("svg")
    film.draw(root)
    # Messages that share an arrow travel as one; this is the first of them.
    messages = [
        (number, post[0]) for number, posts in enumerate(film.picture.posts) for post in posts
    ]
    assert sum(len(post) for posts in film.picture.posts for post in posts) == sum(
        len(f.messages) for f in frames(drawn_plan)
    )
    moved = [e for e in root.iter() if e.find("animateMotion") is not None]
    assert len(moved) == len(messages)
    width, height = film.picture.layout.box
    for element, (number, message) in zip(moved, messages, strict=True):
        motion = element.find("animateMotion")
        times = [float(t) * film.lasts for t in motion.get("keyTimes").split(";")]
        assert times[1] == pytest.approx(number + LEAVE, abs=0.002)
        assert times[-2] == pytest.approx(number + ARRIVE, abs=0.002)
        for share in ((number + 0.05), (number + 0.95)):
            assert not seen(element, share / film.lasts)
        assert seen(element, (number + 0.5) / film.lasts)
        points = [float(x) for x in re.findall(r"-?[\d.]+", motion.get("path"))]
        for rank, (x, y) in ((message.sender, points[:2]), (message.receiver, points[-2:])):
            middle = film.picture.layout.centres[rank]
            assert abs(x - middle[0]) < width / 2
            assert abs(y - middle[1]) < height / 2
        assert hypot(points[0] - points[-2], points[1] - points[-1]) > 20


def test_rounds_are_numbered_through_and_counted():
    svg = as_motion(plan("all_reduce", "ring", (4,)))
    root = ElementTree.fromstring(svg)
    moving = next(e for e in root if e.get("class") == "moving")
    texts = [e.text for e in moving.iter(TAG + "text")]
    assert "round 3 of 6 · reduce-scatter" in texts
    assert "round 4 of 6 · all-gather" in texts
    assert "every rank r sends to r-1: its sum of shard r+1" in texts
    assert svg.count("<style") == 1
    (clock,) = set(re.findall(r'dur="([\d.]+)s"', svg))
    assert float(clock) == pytest.approx(8 * 2.4)
