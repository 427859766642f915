"""Marks of messages: what a watch notes, in whatever dtype they are, and how ranks agree."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import assert_same, data, make_mesh

import ringcoll
from ringcoll.debug import progress
from ringcoll.debug.progress import LOG, noted
from ringcoll.runtime.scopes import around_messages


@pytest.fixture(autouse=True)
def _nothing_noted():
    LOG.clear()


def mapped(function, mesh, axes="x"):
    spec = P(axes)
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


def numbers(results):
    """The same results, with the numbers of keys in place of keys."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, results)


@pytest.mark.parametrize("processes", [1, 2])
def test_messages_of_every_dtype_are_marked(processes, monkeypatch):
    """A mark reads a number of each message; keys have none, and messages of size 0.

    In several processes, ranks first tell each other what they are about to send.
    """
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    dtypes = ("complex64", "bool", "int4", "uint32", "float8_e5m2", "bfloat16")
    xs = {dtype: jnp.asarray(data((8, 3), jnp.dtype(dtype))) for dtype in dtypes}
    xs |= {"keys": jax.random.split(jax.random.key(0), 8), "of size 0": jnp.ones((8, 0))}

    def program(xs):
        turned = ringcoll.ppermute(xs, "x", [(0, 1), (1, 2)])
        gathered = ringcoll.all_gather(xs, "x", tiled=True, algorithm="ring")
        total = ringcoll.psum({"sum": xs["complex64"], "count": xs["bool"]}, "x", algorithm="lax")
        return turned, gathered, total

    plain = mapped(program, make_mesh(4))(xs)
    assert not LOG.last
    with around_messages(noted):
        watched = mapped(program, make_mesh(4))(xs)
    assert_same(numbers(watched), numbers(plain))
    names = {where.removeprefix("ringcoll.") for _, _, where in LOG.times}
    rounds = {f"all_gather(ring)/round {number}" for number in (1, 2, 3)}
    assert names == {"ppermute", "psum(lax)", *rounds}
    assert {rank for _, rank, _ in LOG.times} == {0, 1, 2, 3}
    assert not LOG.stuck()
    assert not LOG.stays_stuck(0)


def test_a_permutation_is_told_by_its_pairs():
    told = []

    def watcher(send, messages, over, groups, to, where):
        told.append(to)
        return send(messages)

    with around_messages(watcher):
        mapped(lambda x: ringcoll.ppermute(x, "x", [(0, 1)]), make_mesh(4))(jnp.ones(8))
    assert told == [((0, 1),)]


def test_marks_in_groups_over_two_axes_and_under_vmap(monkeypatch):
    """Only the ranks of a group agree. A batch is one message."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    groups, x = [[2, 0], [1, 3]], jnp.asarray(data((4, 3)))

    def in_groups(x):
        return jax.vmap(
            lambda x: ringcoll.psum(x, "x", axis_index_groups=groups, algorithm="ring")
        )(x)

    def over_both(x):
        return ringcoll.psum(x, ("y", "x"), algorithm="recursive_doubling")

    runs = [(in_groups, make_mesh(4), "x"), (over_both, make_mesh(2, 2), ("x", "y"))]
    for run, mesh, axes in runs:
        plain = mapped(run, mesh, axes)(x)
        with around_messages(noted):
            assert_same(mapped(run, mesh, axes)(x), plain)
    of_both = {(axes, rank) for axes, rank, _ in LOG.times if len(axes) > 1}
    assert of_both == {((("x", 2), ("y", 2)), rank) for rank in range(4)}
    last = [line for line in LOG.last_marks() if "y=" in line]
    stage = re.escape("ringcoll.psum(recursive_doubling)/stage 2/round 1")
    assert re.fullmatch(rf"rank 2 \(x=1, y=0\): after {stage}, done [\d.]+ s ago", last[2])


def test_what_a_rank_is_in_is_said_with_how_often():
    for is_done in (False, True, False):
        LOG.note((("x", 4),), 3, "a round", is_done)
    (line,) = LOG.last_marks()
    assert re.fullmatch(r"rank 3 \(x=3\): in a round, time 2, begun [\d.]+ s ago", line)
    assert LOG.stuck() == {((("x", 4),), 3)}
    assert LOG.stays_stuck(0)


def test_ranks_that_begin_different_operations_end_the_process():
    tags = np.zeros((2, 3, 24), np.uint8)  # a batch of the tags of three ranks
    words = (b"psum: f32", b"psum: f32", b"pmax: f32")
    for rank, text in enumerate(words):
        tags[:, rank, 8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
    heard = []
    LOG.enders.append(heard.extend)
    with pytest.raises(RuntimeError, match="rank 0 over x, y begins psum: f32"):
        progress._compare(("x", "y"), tags)
    LOG.enders.remove(heard.extend)
    lines = [f"rank {rank} over x, y begins {words[rank].decode()}" for rank in (0, 2)]
    assert heard == lines
    assert progress._compare(("x",), tags[:, :2]).tolist() == [True, True]
