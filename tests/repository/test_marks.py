"""Which cases of a matrix run by default, and which are exhaustive."""

from itertools import product

from support import crossed, mostly_exhaustive


def usual(cases):
    return [case.values for case in cases if not case.marks]


def test_of_crossed_options_each_value_is_usual():
    options = [1, 2, 3], "ab", [True, False]
    cases = crossed(*options)
    assert [case.values for case in cases] == [*product(*options)]
    assert usual(cases) == [(1, "a", True), (2, "b", False), (3, "a", True)]


def test_what_is_not_usual_is_exhaustive():
    cases = mostly_exhaustive([(1, "a"), (2, "b")], lambda number, letter: letter == "b")
    assert usual(cases) == [(2, "b")]
    assert [mark.name for mark in cases[0].marks] == ["exhaustive"]
    assert usual(mostly_exhaustive("ab", lambda letter: letter == "a")) == [("a",)]
