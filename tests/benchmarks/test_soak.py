"""A short soak: it sees wrong results and leaks, and finds a wrong call again."""

import re
from collections import Counter
from dataclasses import replace

import jax
import pytest

from benchmarks.__main__ import main
from benchmarks.collectives.references import REFERENCES
from benchmarks.soak import memory, soak, steps
from benchmarks.soak.random_calls import TOGETHER, draw
from ringcoll import algorithms
from ringcoll.schedules.schedule import Schedule


@pytest.mark.exhaustive
def test_a_short_soak(capsys):
    assert main(["soak", "--count", "20", "--seed", "1"]) == 0
    assert "#wrong 0 of 20 calls" in capsys.readouterr().out


def test_a_call_depends_on_its_seed_and_number_alone():
    calls = [draw(1, i, 8) for i in range(3 * TOGETHER)]
    assert [draw(1, i, 8) for i in reversed(range(3 * TOGETHER))] == calls[::-1]
    assert [draw(2, i, 8) for i in range(3 * TOGETHER)] != calls
    for i in range(0, len(calls), TOGETHER):
        assert len({call.setting for call in calls[i : i + TOGETHER]}) == 1
    assert len({call.setting for call in calls}) == 3


def test_everything_is_drawn():
    calls = [draw(1, i, 8) for i in range(2000)]
    counted = Counter(label for call in calls for label in soak._labels(call))
    assert set(REFERENCES) <= set(counted)
    assert min(counted.values()) > 100
    drawn = {(call.name, call.options.get("algorithm")) for call in calls}
    for collective in algorithms.COLLECTIVES:
        assert {(collective, name) for name in algorithms.names(collective)} <= drawn
    assert {call.teams().shape[1] for call in calls} == set(range(1, 9))
    assert {len(call.shapes[0]) for call in calls} == set(range(4))
    assert any(0 in shape for call in calls for shape in call.shapes)


def is_misled(call):
    """Whether the call is wrong. On two ranks it is right: both neighbours of a rank are one."""
    by = call.name, call.options.get("algorithm")
    return by == ("all_gather", "misled") and call.teams().shape[1] in (3, 5, 7)


def test_a_wrong_algorithm_is_found_and_found_again(monkeypatch, capsys):
    def misled(*shape):
        schedule = algorithms.ring(*shape)
        *rounds, last = schedule.rounds or [()]
        turned = tuple(replace(move, shift=-move.shift) for move in last)
        return Schedule(schedule.shape, (*rounds, turned) if last else ())

    monkeypatch.setitem(algorithms.GATHERS, "misled", misled)
    monkeypatch.setattr(Schedule, "check", lambda self: self)  # which would have refused it
    calls = (draw(1, i, 8) for i in range(10_000) if 0 < i % TOGETHER < TOGETHER - 1)
    number = next(call.number for call in calls if is_misled(call))
    assert main(f"soak --seed 1 --only {number - 1}-{number + 1}".split()) == 1
    printed = capsys.readouterr().out
    assert f"wrong: call {number}: " in printed
    assert "#wrong 1 of 3 calls" in printed
    again = re.search(r"again: python -m benchmarks (.*)", printed).group(1)
    assert again == f"soak --seed 1 -g 8 --only {number}"
    assert main(again.split()) == 1
    printed = capsys.readouterr().out
    assert f"{number}: all_gather(" in printed
    assert "elements are wrong" in printed


known = pytest.mark.skipif(not memory.is_known(), reason="this system does not say what is live")


@known
@pytest.mark.parametrize(
    ("leak", "flat"),
    [
        (lambda n: None, True),
        (lambda n: b"." * n * 2**20, False),
        (lambda n: [(i,) for i in range(n * 2**10)], False),  # of Python's own
    ],
)
def test_a_soak_that_leaks_fails(leak, flat, monkeypatch, capsys):
    kept = []

    def faults(calls):
        kept.append(leak(len(calls)))
        return []

    monkeypatch.setattr(soak, "faults", faults)
    monkeypatch.setattr(soak.steps, "differing", lambda step: [])
    monkeypatch.setattr(soak, "EVERY", TOGETHER)
    monkeypatch.setattr(memory, "FEWEST", 3)
    monkeypatch.setattr(memory, "LIMIT", 2**19)  # the other tests' threads come and go
    monkeypatch.setattr(memory, "BLOCKS", 2**9)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # of the other tests
    assert main(["soak", "--seed", "1", "--count", str(6 * TOGETHER)]) == (not flat)
    assert f"blocks a call: {'flat' if flat else 'not flat'} (" in capsys.readouterr().out


def test_a_wrong_training_step_is_reported_and_replayed(monkeypatch, capsys):
    monkeypatch.setattr(soak.steps, "draw", lambda seed, number, devices: (seed, number, devices))
    monkeypatch.setattr(soak.steps, "differing", lambda step: ["a leaf"] if step[1] == 1 else [])
    monkeypatch.setattr(soak, "faults", lambda calls: [])
    assert main(["soak", "--seed", "7", "--count", str(2 * soak.STEP_EVERY)]) == 1
    printed = capsys.readouterr().out
    assert "wrong: a leaf of (7, 1, 8)" in printed
    assert "#wrong 1 of 128 calls" in printed
    assert "2 steps" in printed
    again = re.search(r"again: python -m benchmarks (.*)", printed).group(1)
    assert again == "soak --seed 7 -g 8 --program 1"
    assert main(again.split()) == 1
    assert main(["soak", "--seed", "7", "--program", "0"]) == 0


def a_step(**algorithms):
    return steps.Step((2, 2), 2, "scan", "", "gather", (1, 1, 1), algorithms)


@pytest.mark.exhaustive
@pytest.mark.parametrize("leaf", ["layers", "seen"])
def test_a_training_step_is_compared_leaf_by_leaf(leaf):
    """The wrong step leaves some leaves unchanged."""
    right = a_step().program(by_lax=True)

    def wrong(state, batch):
        return right(dict(state), batch) | {leaf: state[leaf]}

    found = steps.differing(a_step(), wrong)
    of_layers = ["['layers']['scale']", "['layers']['shift']"]
    # The metrics are of the layers, too.
    assert found == ["['seen']"] if leaf == "seen" else found[:2] == of_layers
