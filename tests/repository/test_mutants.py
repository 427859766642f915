"""The list of mutants is true: each can be made, its tests are there. `mutation.py` runs it."""

import ast
from collections import Counter
from functools import cache

import mutation
import pytest
from support import HERE

MUTANTS = mutation.mutants()


@cache
def names_in(file):
    """The names of the tests in a file."""
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    return {of.name for of in tree.body if isinstance(of, ast.FunctionDef)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made_and_has_tests(mutant):
    changed = mutant.of((HERE / mutant.file).read_text(encoding="utf-8"))
    compile(changed, mutant.file, "exec")
    assert mutant.before != mutant.after
    assert mutant.harm
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert not name or name.partition("[")[0] in names_in(file), test


def test_there_are_many_of_every_room_and_few_survive():
    rooms = Counter(mutant.room for mutant in MUTANTS)
    assert len(MUTANTS) >= 150
    assert len(rooms) >= 10
    assert sum(bool(mutant.survives) for mutant in MUTANTS) <= 0.03 * len(MUTANTS)
    assert len({(mutant.file, mutant.before, mutant.after) for mutant in MUTANTS}) == len(MUTANTS)


def test_a_text_that_is_not_there_once_is_no_mutant():
    one = mutation.Mutant("room", 1, "file", "a", "b", "harm", ["test"])
    assert one.of("xay") == "xby"
    for text in ("x", "aa"):
        with pytest.raises(ValueError, match=r"room 1: [02] times in file: 'a'"):
            one.of(text)


@pytest.mark.parametrize(
    ("passing", "reason", "status", "message"),
    [
        (lambda text: text == "right", "", 0, "1 of 1 died; not as listed: -"),
        (lambda text: True, "", 1, "0 of 1 died; not as listed: room 1"),
        (lambda text: True, "nobody can tell", 0, "0 of 1 died; not as listed: -"),
        (lambda text: text == "right", "nobody can tell", 1, "1 of 1 died; not as listed: room 1"),
        (lambda text: False, "", 2, "without any mutant"),
    ],
)
def test_the_status_says_whether_the_list_is_true(
    monkeypatch, tmp_path, capsys, passing, reason, status, message
):
    (tmp_path / "code.py").write_text("right", encoding="utf-8")
    monkeypatch.setattr(mutation, "HERE", tmp_path)
    monkeypatch.setattr(
        mutation, "passes", lambda tree, tests: passing((tree / "code.py").read_text())
    )
    mutant = mutation.Mutant("room", 1, "code.py", "right", "wrong", "harm", ["test"], reason)
    assert mutation.run([mutant]) == status
    assert message in capsys.readouterr().out
    assert (tmp_path / "code.py").read_text(encoding="utf-8") == "right"


def test_tests_that_fail_are_told_from_those_that_are_not_there(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_good(): pass\ndef test_bad(): assert 0\n")
    assert mutation.passes(tmp_path, ["test_it.py::test_good"])
    assert not mutation.passes(tmp_path, ["test_it.py"])
    with pytest.raises(ValueError, match="test_none"):
        mutation.passes(tmp_path, ["test_it.py::test_none"])
