"""Our collectives run wherever those of lax do."""

import jax
import pytest
from contexts import CONTEXTS
from support import mostly_exhaustive, python

#: Those that found faults, or in which the change for loops (`runtime.cpu.loops`) has a part.
USUAL = (
    *("custom_partition", "without_results", "two_threads", "a_lowering_that_raises"),
    *("cleared_listeners", "exported"),
)


@pytest.mark.parametrize("name", mostly_exhaustive(CONTEXTS, lambda name: name in USUAL))
def test_every_collective_in_a_context(name):
    if name == "custom_partition" and jax.__version_info__ >= (0, 12):
        pytest.skip("lax's collectives fail there too")
    done = python("tests/runtime/contexts.py", name)
    assert done.stdout.splitlines()[-1:] == ["as jax.lax"], done.stderr[-3000:]
