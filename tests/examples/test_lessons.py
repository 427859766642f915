"""Every lesson runs by itself and checks its claims; a claim that does not hold ends it."""

import re

import pytest
from support import HERE, flags_of_cpu, mostly_exhaustive, python

from ringcoll import learn

FOLDER = HERE / "examples" / "lessons"
LESSONS = sorted(path.stem for path in FOLDER.glob("[0-9][0-9]_*.py"))


def ran(*arguments):
    """The output of a lesson, and the number of its claims."""
    done = python("-W", "error", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, len(re.findall("^✓ .", done.stdout, re.M))


@pytest.mark.parametrize("lesson", mostly_exhaustive(LESSONS, lambda lesson: lesson[:2] == "04"))
def test_a_lesson_makes_all_its_claims(lesson):
    """Also the claims in the solutions of its exercises."""
    printed, claims = ran("-m", f"examples.lessons.{lesson}")
    source = (FOLDER / f"{lesson}.py").read_text(encoding="utf-8")
    in_source = len(re.findall(r"\bclaim\(", source))
    assert in_source
    assert claims >= in_source or "pip install" in printed, printed  # of what is not installed


def test_without_the_compiler_for_tpus_a_cpu_program_is_read():
    program = (
        "import runpy, sys; sys.modules['libtpu'] = None; "
        "runpy.run_module('examples.lessons.06_reading_the_schedule', run_name='__main__')"
    )
    with flags_of_cpu():
        printed, claims = ran("-c", program)
    assert claims == 4  # two of the lesson, two of its first exercise
    assert "pip install -e '.[tpu]' in ringcoll's checkout (no TPU is needed" in printed


def test_a_claim_that_does_not_hold_ends_a_lesson(capsys):
    with pytest.raises(AssertionError, match="it does not hold: 2 is 3"):
        learn.claim("2 is 3", 2 == 3)
    assert capsys.readouterr().out == ""


def test_they_are_in_the_index_in_order():
    index = (HERE / "docs" / "learn.md").read_text(encoding="utf-8")
    titles = [
        re.search("^# (Lesson .*)$", (FOLDER / f"{name}.py").read_text("utf-8"), re.M)[1]
        for name in LESSONS
    ]
    linked = re.findall(r"^- \[(.*)\]\(\.\./examples/lessons/(\w+)\.py\): ", index, re.M)
    assert linked == list(zip(titles, LESSONS, strict=True))
