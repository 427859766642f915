"""Limits of an assertion: shares and seconds, by kind. What cannot be read is never green."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hlo_texts import CHIP, blocking, done, dot, loop, program, start, untiled

from ringcoll import __main__ as command_line
from ringcoll import overlap
from ringcoll.commands import overlap as command

HIDDEN = program(start("s"), dot("y"), done("d", "s"), dot("z", "d"))
#: A matmul of 1000 us, a permute of 1001 and a gather, by two links of a ring, of 1500.
BOTH = program(dot("y"), start("s", "y"), done("d", "s"), blocking("all-gather", "d"))
#: A loop whose operand says when it ends: 1001 us a turn, 1 us of it exposed.
ENDLESS = loop("", start("s"), dot("y"), done("next", "s")).replace(
    "s32[] constant(7)", "s32[] get-tuple-element(%d), index=0"
)


def check(text, *limits, **options):
    return overlap.assert_overlapped(text, *limits, chip=CHIP, **options)


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        ({}, r"71.4% of the time of jit_f is exposed communication, more than the 5.0% allowed"),
        ({"max_exposed": {"all-gather": 0.42}}, "42.8% of the time of jit_f is exposed all-gather"),
        ({"max_exposed": {"total": 0.5, "all-reduce": 0}}, "71.4% .* exposed communication"),
        ({"max_exposed_seconds": 2500e-6}, "2501.0 us of jit_f are exposed communication, more th"),
        ({"max_exposed_seconds": {"collective-permute": 1e-3}}, "1001.0 us .* are exposed coll"),
        ({"max_exposed": 1, "min_collectives": 3}, "jit_f has 2 collectives .* fewer than min_co"),
    ],
)
def test_exceeding_a_limit_fails(limits, complaint):
    with pytest.raises(AssertionError, match=complaint) as caught:
        check(BOTH, **limits)
    assert str(caught.value).count("allowed") + str(caught.value).count("fewer") == 1
    assert "total 3501 us" in str(caught.value)


def test_limits_hold_what_is_expected_of_a_built_in_collective():
    """Half of the rate of its links makes the gather 3000 us."""
    check(BOTH, max_exposed_seconds={"all-gather": 1501e-6})
    chip = replace(CHIP, built_in=0.5)
    with pytest.raises(AssertionError, match=r"3000.0 us of jit_f .* all-gather") as caught:
        overlap.assert_overlapped(BOTH, max_exposed_seconds={"all-gather": 1501e-6}, chip=chip)
    first = "total 3501 to 5001 us = compute 1000 + memory 0 + exposed 2501 to 4001 us (80.0%)"
    assert first in str(caught.value)


@pytest.mark.parametrize("wrong", [{"built_in": 80}, {"built_in_sum": 0}, {"start": -1.0}])
def test_a_chip_of_absurd_rates_is_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"^Chip: {name}={value} is not "):
        replace(CHIP, **wrong)


def test_within_a_limit_passes():
    for shares in (0.72, np.float32(0.72), {"all-gather": 0.43, "collective-permute": 0.29}):
        check(BOTH, shares, min_collectives=2)
    for seconds in (2502e-6, {"total": 2502e-6, "all-reduce": 0.0}):
        check(BOTH, max_exposed_seconds=seconds)


def test_each_breach_is_reported():
    with pytest.raises(AssertionError) as caught:
        check(BOTH, {"all-gather": 0, "collective-permute": 0}, min_collectives=9)
    message = str(caught.value).partition("The report:")[0]
    assert [message.count(word) for word in ("fewer than", "more than the 0.0% allowed")] == [1, 2]


def test_a_program_without_collectives_fails():
    for nothing in (program(dot("y")), program(blocking("all-gather", groups="{{0},{1},{2},{3}}"))):
        with pytest.raises(AssertionError, match="0 collectives that send anything, fewer"):
            check(nothing, 1)
        assert check(nothing, min_collectives=0).exposed == 0


def test_an_unread_instruction_fails_unless_allowed():
    report = overlap.report(ENDLESS, chip=CHIP)
    assert report.unread == ("while",)
    assert json.loads(report.to_json())["unread"] == ["while"]
    assert "\nnot read, so the times may leave it out: while" in str(report)
    for others in ((), ("whil",), "while.1", ["WHILE", "s"]):
        with pytest.raises(AssertionError, match=r"(?s)while .*could not be read.*\('while',\)"):
            check(ENDLESS, allow_unread=others)
    for names in ("while", ("s", "while"), ["whi*"], iter(["wh?le"])):
        check(ENDLESS, allow_unread=names)


def test_seconds_of_an_untimed_program_are_refused():
    with pytest.raises(ValueError, match="jit_f has no times, as a TPU's"):
        overlap.assert_overlapped(untiled(HIDDEN), max_exposed_seconds=1.0)
    with pytest.raises(AssertionError, match=r"100\.0% of the collectives of jit_f is exposed"):
        overlap.assert_overlapped(untiled(program(blocking("all-gather"))), {"all-gather": 0.99})


@pytest.mark.parametrize(
    ("limits", "error", "complaint"),
    [
        ({"max_exposed": {}}, ValueError, r"max_exposed=\{\} limits nothing"),
        ({"max_exposed": math.nan}, ValueError, "max_exposed=nan is not between 0 and 1; pass"),
        ({"max_exposed": "0.1"}, TypeError, "max_exposed='0.1' is not a number"),
        ({"max_exposed": {"all-gather": 2}}, ValueError, r"max_exposed\['all-gather'\]=2 is not"),
        ({"max_exposed": {"gather": 0}}, ValueError, "'gather' is no kind of collective; name one"),
        ({"max_exposed_seconds": math.inf}, ValueError, "max_exposed_seconds=inf is not 0 or more"),
    ],
)
def test_bad_limits_are_refused_before_the_program_is_read(limits, error, complaint):
    with pytest.raises(error, match=complaint):
        overlap.assert_overlapped("no program", **limits)


# -- the command, with a program that is at hand --


@pytest.mark.parametrize(
    ("text", "arguments", "status", "message"),
    [
        (BOTH, "", 0, ""),
        (BOTH, "--json", 0, ""),
        (BOTH, "--max-exposed 0.71", 1, "71.4% of the time of jit_f is exposed communication"),
        (BOTH, "--max-exposed 1 --max-exposed all-gather=0.1", 1, "42.8% of the time of jit_f is"),
        (BOTH, "--max-exposed much", 2, "argument --max-exposed: invalid share value: 'much'"),
        (BOTH, "--max-exposed 2", 2, "--max-exposed['total']=2.0 is not between 0 and 1; pass"),
        (ENDLESS, "--max-exposed 1", 1, "while of jit_f could not be read, so the times may leave"),
    ],
)
def test_limits_of_the_command(monkeypatch, capsys, text, arguments, status, message):
    report = overlap.report(text, chip=CHIP if ":T(" in text else None)
    monkeypatch.setattr(command, "mesh_of", lambda _: None)
    monkeypatch.setattr(command, "example", lambda *_: (None, ()))
    monkeypatch.setattr(command, "_compile_and_report", lambda *_: (overlap.Program(text), report))
    try:
        ended = command_line.main(["overlap", "--example", "ring_matmul", *arguments.split()])
    except SystemExit as refused:
        ended = refused.code
    out, err = capsys.readouterr()
    if arguments == "--json":  # no list: an example is compared only in words
        assert json.loads(out)["name"] == "jit_f"
    assert ended == status
    assert message in err
    assert bool(err) == bool(message)
