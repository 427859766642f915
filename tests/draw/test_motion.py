"""Moving pictures: at any time they show what is held, and messages go where they are sent."""

import json
import re
import shutil
import stat
import subprocess
import sys
from collections import Counter
from io import BytesIO
from math import hypot
from xml.etree import ElementTree

import pytest
from test_draw_svg import SHOWN

from ringcoll.__main__ import main
from ringcoll.draw import as_motion, frames, plan
from ringcoll.draw.film import as_film
from ringcoll.draw.motion import ARRIVE, LEAVE, Film
from ringcoll.draw.style import Element

pytestmark = pytest.mark.quick

TAG = "{http://www.w3.org/2000/svg}"
MOVING = [*SHOWN, ("tour", "ring", (4,)), ("tour", "bidirectional_ring", (5,))]


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
def test_after_each_round_it_shows_what_the_still_does(collective, algorithm, shape):
    drawn_plan = plan(collective, algorithm, shape)
    film = Film(drawn_plan)
    moving = Element("svg")
    film.draw(moving)
    held = [e for e in moving.iter() if e.get("data-follow")]
    for number in range(film.last + 1):
        still = Element("svg")
        film.picture.draw(still, number, headed=False)
        cells = [e for e in next(iter(still)) if e.tag == "g"]
        shown = [e for e in held if seen(e, (number + 0.99) / film.lasts)]
        assert len(shown) == drawn_plan.size * len(film.picture.cells)
        assert drawn(shown) == drawn(cells)


def test_what_is_sent_away_is_gone_in_flight_but_a_shard_stays():
    for collective, left in (("psum_scatter", 0), ("all_gather", 1)):
        film = Film(plan(collective, "ring", (4,)))
        sent = film.picture.frames[1].messages[2].pieces[0].column
        states = list(film._states(2, sent))
        at = [(held, start) for start, held, _ in states if start <= 1 + (LEAVE + ARRIVE) / 2]
        assert len(at[-1][0][0]) == left


def test_a_tour_keeps_a_shard_until_it_has_added_and_lets_go_of_its_sum():
    film = Film(plan("tour", "ring", (4,)))
    for number, sizes in ((2, [4, 0]), (3, [0])):  # it forwards the shard, then the sum
        flying = number + (LEAVE + ARRIVE) / 2
        held = [held for start, held, _ in film._states(1, 0) if start <= flying][-1]
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
    width, height = film.picture.machine.box
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
            middle = film.picture.machine.middles[rank]
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


def test_one_shard_is_followed_or_refused():
    svg = as_motion(plan("all_gather", "ring", (4,)), follow=2)
    root = ElementTree.fromstring(svg)
    marked = [e for e in root.iter() if e.get("data-of")]
    assert {e.get("class") for e in marked if e.get("data-of") == " 2 "} == {None}
    assert {e.get("class") for e in marked if e.get("data-of") != " 2 "} == {"aside"}
    with pytest.raises(ValueError, match="follow 4: there are shards 0 to 3"):
        as_motion(plan("all_gather", "ring", (4,)), follow=4)


# -- files --


def test_a_gif_shows_before_in_flight_and_after():
    image = pytest.importorskip("PIL.Image")
    svg = as_motion(plan("all_gather", "ring", (2,)))
    film = image.open(BytesIO(as_film(svg, ".gif")))
    assert film.n_frames == 1 + 14 + 1  # the start, a round, the end
    root = ElementTree.fromstring(svg)
    assert film.size == (int(root.get("width")), int(root.get("height")))
    images = []
    for number in (1, 7, 14):  # before, in flight, after
        film.seek(number)
        images.append(film.convert("RGB").tobytes())
    assert len(set(images)) == 3
    with pytest.raises(ValueError, match=r"'.avi' is not one of .gif, .mp4"):
        as_film(svg, ".avi")


def test_an_mp4_is_what_ffmpeg_makes_of_the_frames(tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    ffmpeg = tmp_path / "ffmpeg"
    ffmpeg.write_text(
        f"#!{sys.executable}\nimport sys\nraw = sys.stdin.buffer.read()\n"
        "open(sys.argv[-1], 'w').write(f'{len(raw)} {sys.argv[1:-1]}')\n"
    )
    ffmpeg.chmod(ffmpeg.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    film = as_film(as_motion(plan("all_gather", "ring", (2,))), ".mp4").decode()
    width, height = map(int, re.search(r"'(\d+)x(\d+)'", film).groups())
    assert width % 2 == height % 2 == 0
    count = int(film.split()[0]) / (3 * width * height)
    assert count == pytest.approx(25 * 2.4 * (0.6 + 1 + 1), abs=8)
    ffmpeg.write_text(f"#!{sys.executable}\nimport sys\nsys.stdin.buffer.read()\nsys.exit(3)\n")
    with pytest.raises(OSError, match="ffmpeg ended with status 3"):
        as_film(as_motion(plan("all_gather", "ring", (2,))), ".mp4")


@pytest.mark.skipif(
    not all(map(shutil.which, ("ffmpeg", "ffprobe"))),
    reason="no ffmpeg: Debian's package of that name",
)
def test_an_mp4_plays_as_long_as_its_rounds(tmp_path):
    pytest.importorskip("PIL")
    asked, file = ["draw", "all_gather", "--algorithm", "ring", "-n", "2"], tmp_path / "film.mp4"
    assert main([*asked, "--animate", str(file)]) == 0
    wanted = "stream=codec_name,pix_fmt,width,height,nb_frames,r_frame_rate"
    command = ["ffprobe", "-v", "error", "-show_entries", wanted, "-of", "json", str(file)]
    (found,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)[
        "streams"
    ]
    root = ElementTree.fromstring(as_motion(plan("all_gather", "ring", (2,))))
    assert found["width"] == int(root.get("width")) // 2 * 2
    assert found["height"] == int(root.get("height")) // 2 * 2
    assert (found["codec_name"], found["pix_fmt"]) == ("h264", "yuv420p")  # which slides play
    assert found["r_frame_rate"] == "25/1"
    assert int(found["nb_frames"]) == pytest.approx(25 * 2.4 * (0.6 + 1 + 1), abs=8)


def test_the_command_writes_films(tmp_path, monkeypatch, capsys):
    asked = ["draw", "all_gather", "--algorithm", "ring", "-n", "2"]
    file = tmp_path / "film.svg"
    assert main([*asked, "--animate", str(file), "--follow", "1"]) == 0
    assert file.read_text() == as_motion(plan("all_gather", "ring", (2,)), 1)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("PATH", "")
    for more, message in (
        (["--animate", f"{file}.mp4"], "there is no ffmpeg on the path: install it"),
        (["--animate", f"{file}.avi"], "'.avi' is not one of .svg, .gif, .mp4"),
        (["--follow", "1"], "--follow is for what moves: give --animate or --html too"),
        (["--animate", str(file), "--follow", "2"], "follow 2: there are shards 0 to 1"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*asked, *more])
        assert message in capsys.readouterr().err
