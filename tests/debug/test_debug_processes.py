"""`ringcoll.debug` when processes of this machine really fail, or really differ."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.hosts.failures import FAILURES, ended
from benchmarks.measuring import launch
from ringcoll.debug import STATUS

pytestmark = pytest.mark.exhaustive  # six groups of processes

ABORTED = -6  # by JAX, when the first process has ended before
START = """
import argparse, atexit, os, time
import jax, jax.numpy as jnp
from benchmarks.measuring import processes
parser = argparse.ArgumentParser()
processes.add_arguments(parser)
processes.start(parser.parse_args())
import ringcoll
from ringcoll import debug
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((2,), ("x",))
own = jax.process_index()
step = jax.jit(jax.shard_map(
    lambda x: ringcoll.psum(x, "x", algorithm="ring"), mesh=mesh, in_specs=P(), out_specs=P()
))
"""
ALIKE = START + "print(debug.check_consistent(step, jnp.ones(4)))"
#: The other process is gone; what is done at the end takes longer than the deadline.
HOOK = (
    START
    + """
def hook():
    time.sleep(25)
    print("the hook has run", flush=True)

atexit.register(hook)
jax.block_until_ready(step(jnp.ones(4)))
with debug.deadline(20, grace=1):
    if own == 1:
        os._exit(1)
    jax.block_until_ready(step(jnp.ones(4)))
"""
)


@pytest.fixture(scope="module")
def ends():
    """How each process ends. They wait for each other, so all run at once."""
    rows = [("has", "checked", 3), ("is killed in the middle", "deadline", 3)]
    rows += [("never arrives", "deadline", 2), ("has a dtype as wide", "deadline", 2)]
    with ThreadPoolExecutor(max_workers=6) as pool:
        each = pool.map(lambda row: ended(*row, seconds=20, patience=200), rows)
        scripts = {script: pool.submit(run, script) for script in (HOOK, ALIKE)}
        found = {only: found for (only, _, _), found in zip(rows, each, strict=True)}
        return found | {script: ends.result() for script, ends in scripts.items()}


def run(script):
    with launch.loopback() as at:
        return launch.together(launch.python(at, 2, "-c", script), [1, 1], seconds=200)


def test_processes_that_differ(ends):
    """All of them say so, in each row. `test_debug` compares what they say."""
    differ = "check_consistent(fn, ...): process 2 differs from process 0 (and 1 more) in "
    rows = [name for name in FAILURES if "has" in name]
    for end in ends["has"]:
        assert (end.status, end.text.count(differ)) == (0, len(rows)), end


def test_one_process_is_killed(ends):
    *others, killed = ends["is killed in the middle"]
    assert others[0].status == STATUS
    assert killed.status == -9
    for rank, end in enumerate(others):
        assert end.status in (STATUS, ABORTED), end
        assert "ringcoll.debug.deadline(20) is left by JaxRuntimeError on " in end.text
        where = f"rank {rank} (x={rank}): in ringcoll.psum(ring)/"
        assert where in end.text
        assert end.text.split(where)[1].split("/round ")[0] in ("reduce_scatter", "all_gather")


def test_one_process_never_arrives(ends):
    waits, sleeps = ends["never arrives"]
    for end in (waits, sleeps):
        assert end.status == STATUS, end
        assert "ringcoll.debug.deadline(20) is over on " in end.text
        assert "Python is at\n" in end.text
    first = "\nrank 0 (x=0): in ringcoll.psum(ring)/reduce_scatter/round 1, begun "
    assert first in waits.text
    assert "\nno rank has come to a collective of ringcoll\n" in sleeps.text
    assert "in _process\n" in sleeps.text


def test_messages_of_other_dtypes_are_not_exchanged(ends):
    for rank, end in enumerate(ends["has a dtype as wide"]):
        assert end.status == STATUS or (rank, end.status) == (1, ABORTED), end
        assert "ringcoll.debug.deadline(20) ends: ranks that are to exchange messages" in end.text
        begins = "begins ringcoll.psum(ring)/reduce_scatter/round 1:"
        for rank, dtype in enumerate(("float32", "int32")):
            assert f"\nrank {rank} over x {begins} {dtype}[1,1,6]" in end.text
        assert "values" not in end.text


def test_exit_hooks_of_a_stuck_process(ends):
    left, gone = ends[HOOK]
    assert gone.status == 1
    assert left.status == STATUS, left
    assert "ringcoll.debug.deadline(20) is left by JaxRuntimeError on " in left.text
    assert "\nthe hook has run\n" in left.text


def test_equal_programs_are_not_refused(ends):
    for end in ends[ALIKE]:
        assert end.status == 0, end
        assert "['psum over x=2, float32[4]: ring: " in end.text
