"""Our collectives run wherever those of lax do."""

import jax
import pytest
from contexts import CONTEXTS
from support import python

#: Those that found faults, or in which the change for loops (`runtime.cpu.loops`) has a part. The
#: last one clears JAX's listeners.
USUAL = (
    *("custom_partition", "without_results", "two_threads", "a_lowering_that_raises", "exported"),
    "cleared_listeners",
)


def check(algorithms, names):
    if jax.__version_info__ >= (0, 12):  # there lax's collectives fail too
        names = [name for name in names if name != "custom_partition"]
    done = python("tests/runtime/contexts.py", algorithms, *names)
    lines = [f"{name}: as jax.lax" for name in names]
    assert [line for line in done.stdout.splitlines() if line in lines] == lines, done.stderr[
        -3000:
    ]


def test_a_ring_runs_in_the_usual_contexts():
    """In one process, because most of its time goes into starting it."""
    check("ring", USUAL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONTEXTS)
def test_every_collective_runs_in_a_context_of_its_own(name):
    check("auto,ring", [name])
