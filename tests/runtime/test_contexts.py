"""Our collectives run wherever those of lax do."""

import jax
import pytest
from contexts import CONTEXTS
from support import flags_of_cpu, python


@pytest.mark.parametrize("algorithms", ["ring", pytest.param("auto", marks=pytest.mark.exhaustive)])
def test_every_collective_runs_in_every_context(algorithms):
    """In one process, because most of its time goes into starting it; listeners go last."""
    names = [*CONTEXTS]
    if jax.__version_info__ >= (0, 12):  # there lax's collectives fail too
        names.remove("custom_partition")
    with flags_of_cpu():
        done = python("tests/runtime/contexts.py", algorithms, *names)
    lines = [f"{name}: as jax.lax" for name in names]
    found = [line for line in done.stdout.splitlines() if line in lines]
    assert found == lines, done.stderr[-3000:]
