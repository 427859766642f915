"""A moving picture as GIF or MP4, for slides that cannot show SVG. Pillow draws the frames."""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from io import BytesIO
from itertools import chain, pairwise
from math import dist
from os import path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import numpy as np

from ringcoll.draw.layout import Point
from ringcoll.draw.motion import ARRIVE, ASIDE, LEAVE, SECONDS
from ringcoll.draw.routes import Bezier
from ringcoll.draw.style import INK, PAPER

FORMATS = (".gif", ".mp4")
_SVG = "{http://www.w3.org/2000/svg}"
_STEPS = 12  # frames while the messages of a round travel
_RATE = 25  # frames a second of an MP4
_FONTS = {False: "DejaVuSans.ttf", True: "DejaVuSans-Bold.ttf"}  # matplotlib has them too


def check(ending: str) -> None:
    """Refuse a format that cannot be written here.

    Raises:
        ModuleNotFoundError: Pillow is not installed; or, for an MP4, there is no ffmpeg.
    """
    if find_spec("PIL") is None:
        raise ModuleNotFoundError(
            f"{ending}: Pillow is not installed: pip install -e '.[film]'; or write an .svg, "
            "which needs nothing"
        )
    if ending == ".mp4" and shutil.which("ffmpeg") is None:
        raise ModuleNotFoundError(
            ".mp4: there is no ffmpeg on the path: install it, or write a .gif or an .svg"
        )


def as_film(svg: str, ending: str) -> bytes:
    """The content of a film's file, in light colours.

    Args:
        svg: the text that `as_motion` returns.
        ending: one of `FORMATS`.

    Raises:
        ModuleNotFoundError: as `check`.
        OSError: ffmpeg failed; it has printed why.
        ValueError: the ending is not one of `FORMATS`.
    """
    if ending not in FORMATS:
        raise ValueError(f"{ending!r} is not one of {', '.join(FORMATS)}")
    check(ending)
    screen = _Screen(svg)
    times, lasts = zip(*_times(screen.rounds), strict=True)
    images = map(screen.at, times)  # one at a time: all of a large film would fill the memory
    return _gif(images, lasts) if ending == ".gif" else _mp4(images, lasts)


def _times(rounds: int) -> Iterator[tuple[float, float]]:
    """For each frame: its time in the film, in rounds, and how many seconds it is shown."""
    yield 0.5, 0.6 * SECONDS
    for number in range(1, rounds - 1):
        yield number + LEAVE / 2, LEAVE * SECONDS
        for step in range(_STEPS):
            share = (step + 0.5) / _STEPS
            yield number + LEAVE + share * (ARRIVE - LEAVE), (ARRIVE - LEAVE) * SECONDS / _STEPS
        yield number + (1 + ARRIVE) / 2, (1 - ARRIVE) * SECONDS
    yield rounds - 0.5, SECONDS


def _gif(images: Iterator[Any], lasts: Sequence[float]) -> bytes:
    indexed = (image.quantize(128, dither=0) for image in images)
    file = BytesIO()
    milliseconds = [round(1000 * seconds) for seconds in lasts]
    next(indexed).save(
        file, "GIF", save_all=True, append_images=indexed, duration=milliseconds, loop=0
    )
    return file.getvalue()


def _mp4(images: Iterator[Any], lasts: Sequence[float]) -> bytes:
    first = next(images)
    # Even sides, because this format stores one colour for two by two pixels.
    width, height = (side // 2 * 2 for side in first.size)
    with TemporaryDirectory() as folder:
        file = path.join(folder, "film.mp4")
        taken = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {_RATE} -i -".split()
        written = ["-pix_fmt", "yuv420p", "-movflags", "+faststart", file]
        command = ["ffmpeg", "-v", "error", "-y", *taken, *written]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as ffmpeg:
            assert ffmpeg.stdin is not None  # a pipe was asked for
            for image, seconds in zip(chain([first], images), lasts, strict=True):
                frame = image.crop((0, 0, width, height)).tobytes()
                ffmpeg.stdin.write(frame * max(round(seconds * _RATE), 1))
        if ffmpeg.returncode:
            raise OSError(f"ffmpeg ended with status {ffmpeg.returncode}")
        with open(file, "rb") as film:
            return film.read()


class _Screen:
    """Draws an SVG of `as_motion` at any time. It knows only the shapes and animations there."""

    def __init__(self, svg: str) -> None:
        root = ElementTree.fromstring(svg)
        self._moving = next(e for e in root if e.get("class") == "moving")
        self._size = round(float(root.get("width", 0))), round(float(root.get("height", 0)))
        clocks = {e.get("dur") for e in root.iter() if e.get("dur")}
        (self._lasts,) = (float((clock or "").rstrip("s")) for clock in clocks)
        self.rounds = round(self._lasts / SECONDS)

    def at(self, time: float) -> Any:
        """The image at a time, in rounds. It is drawn at twice the size, for smooth edges."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (2 * self._size[0], 2 * self._size[1]), "white")
        self._share = time / self.rounds
        self._to = ImageDraw.Draw(image, "RGBA")  # this mode blends colours by their opacity
        self._draw(self._moving, (0.0, 0.0), 1.0, True)
        return image.reduce(2)

    def _draw(self, e: ElementTree.Element, at: Point, alpha: float, on: bool) -> None:
        """Draw an element and what is in it, if `on`: whether it is visible now."""
        moved = (0.0, 0.0)
        for child in e:
            if child.tag == f"{_SVG}animate" and child.get("attributeName") == "visibility":
                on = self._value(child) == "visible"
            elif child.tag == f"{_SVG}animateMotion":
                moved = self._moved(child)
        shift = _numbers(e.get("transform", "")) or [0.0, 0.0]
        at = at[0] + shift[0] + moved[0], at[1] + shift[1] + moved[1]
        alpha *= ASIDE if e.get("class") == "aside" else 1
        match e.tag.removeprefix(_SVG):
            case "g":
                for child in e:
                    self._draw(child, at, alpha, on)
            case "rect" if on:
                self._rect(e, at, alpha)
            case "text" if on:
                self._text(e, at, alpha)
            case "path" if on:
                for part in _polylines(e.get("d", "")):
                    self._to.line(_doubled(part, at), _colour(e, "stroke", alpha), 3)
            case "polygon" if on:
                xs = _numbers(e.get("points", ""))
                corners = list(zip(xs[::2], xs[1::2], strict=True))
                self._to.polygon(_doubled(corners, at), _colour(e, "fill", alpha))

    def _rect(self, e: ElementTree.Element, at: Point, alpha: float) -> None:
        x, y, width, height = (float(e.get(side, 0)) for side in ("x", "y", "width", "height"))
        for child in e:  # only the bar of the film has a child: it grows
            if child.get("attributeName") == "width":
                width = self._share * _numbers(child.get("values", ""))[1]
        alpha *= float(e.get("fill-opacity", 1))
        box = _doubled([(x, y), (x + width, y + height)], at)
        self._to.rounded_rectangle(
            [*box[0], *box[1]],
            2 * float(e.get("rx", 0)),
            _colour(e, "fill", alpha),
            _colour(e, "stroke", alpha),
            round(2 * float(e.get("stroke-width", 1))),
        )

    def _text(self, e: ElementTree.Element, at: Point, alpha: float) -> None:
        ((x, y),) = _doubled([(float(e.get("x", 0)), float(e.get("y", 0)))], at)
        font = _font(round(2 * float(e.get("font-size", 12))), "font-weight" in e.attrib)
        self._to.text(
            (x, y),
            e.text or "",
            _faded(e.get("fill", INK), alpha),
            font,
            "ls" if e.get("text-anchor") == "start" else "ms",
            stroke_width=round(float(e.get("stroke-width", 0))),
            stroke_fill=_faded(e.get("stroke", PAPER), alpha),
        )

    def _value(self, animated: ElementTree.Element) -> str:
        """The value of an animation in steps, now."""
        times = map(float, (animated.get("keyTimes") or "").split(";"))
        values = (animated.get("values") or "").split(";")
        return [v for t, v in zip(times, values, strict=True) if t <= self._share][-1]

    def _moved(self, animated: ElementTree.Element) -> Point:
        """Where on its path a moving element is now."""
        times, shares = (
            [float(x) for x in (animated.get(name) or "").split(";")]
            for name in ("keyTimes", "keyPoints")
        )
        gone = float(np.interp(self._share, times, shares))
        parts = _polylines(animated.get("path") or "")
        steps = [pair for part in parts for pair in pairwise(part)]
        left = gone * sum(dist(*step) for step in steps)
        for (ax, ay), (bx, by) in steps:
            length = dist((ax, ay), (bx, by))
            if left <= length:
                share = left / (length or 1)
                return ax + share * (bx - ax), ay + share * (by - ay)
            left -= length
        return steps[-1][1]


def _numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", text)]


@lru_cache(maxsize=4096)
def _polylines(path: str) -> tuple[tuple[Point, ...], ...]:
    """The parts of a path of lines and curves, as points; a curve becomes eight lines."""
    parts: list[list[Point]] = []
    for letter, numbers in re.findall(r"([MLQ])([^MLQ]*)", path):
        xs = _numbers(numbers)
        points = list(zip(xs[::2], xs[1::2], strict=True))
        if letter == "M":
            parts.append(points)
        elif letter == "L":
            parts[-1] += points
        else:
            curve = Bezier(parts[-1][-1], *points)
            parts[-1] += [curve.at(t / 8) for t in range(1, 9)]
    return tuple(map(tuple, parts))


def _doubled(points: Iterable[Point], at: Point) -> list[Point]:
    """Points relative to `at`, at twice the size."""
    return [(2 * (x + at[0]), 2 * (y + at[1])) for x, y in points]


def _colour(e: ElementTree.Element, what: str, alpha: float) -> tuple[int, ...] | None:
    """Red, green, blue and opacity; None for none."""
    text = e.get(what, "none")
    if text == "none":
        return None
    return (*bytes.fromhex(text[1:]), round(255 * alpha))


def _faded(text: str, alpha: float) -> tuple[int, ...]:
    """The colour of a text, mixed with white here, because Pillow does not blend text."""
    return tuple(round(alpha * c + 255 * (1 - alpha)) for c in bytes.fromhex(text[1:]))


@lru_cache(maxsize=64)
def _font(size: int, bold: bool) -> Any:
    from PIL import ImageFont

    try:
        return ImageFont.truetype(_FONTS[bold], size)
    except OSError:  # this machine does not have the font
        return ImageFont.load_default(size)
