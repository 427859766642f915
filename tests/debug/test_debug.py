"""`ringcoll.debug` on one process: the calls that it lists, and marks that change nothing."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import assert_same, data, make_mesh, mostly_exhaustive, python

import ringcoll
from ringcoll import debug
from ringcoll.debug import consistent
from ringcoll.debug.progress import LOG
from ringcoll.runtime import run as running


@pytest.fixture(autouse=True)
def _nothing_noted():
    LOG.clear()


def mapped(function, check_vma=False):
    return jax.shard_map(
        function, mesh=make_mesh(4), in_specs=P("x"), out_specs=P("x"), check_vma=check_vma
    )


def marks():
    """How often each rank noted each place. Every rank must be done."""
    found = {}
    for (axes, rank, where), times in LOG.times.items():
        found.setdefault(where, {})[axes, rank] = times
    assert all(mark.is_done for mark in LOG.last.values())
    LOG.clear()
    return found


def calls(function):
    return debug.check_consistent(mapped(function), jax.ShapeDtypeStruct((8, 3), jnp.float32))


def test_different_calls_are_listed_in_order():
    def program(x):
        y = ringcoll.psum(x, "x", algorithm="ring")
        y = lax.scan(lambda c, _: (c + ringcoll.pmax(c, "x", algorithm="lax"), None), y, length=3)
        y = ringcoll.psum(y[0], "x", algorithm="ring")  # listed once
        return ringcoll.all_gather_matmul(y, jnp.ones((3, 2)), "x", algorithm="two_ended")

    named = "named by the caller"
    assert calls(jax.jit(program)) == [
        f"psum over x=4, float32[2,3]: ring: {named}",
        f"pmax over x=4, float32[2,3]: lax: {named}",
        f"all_gather_einsum over x=4, float32[2,3], float32[3,2]: two_ended: {named}",
    ]


CHECK = "ringcoll.debug.check_consistent(fn, ...): "


def in_processes(monkeypatch, *programs):
    """What `check_consistent` says in processes with these programs. Here they are threads."""
    n, given = len(programs), {}
    barrier, own = threading.Barrier(n, timeout=60), threading.local()

    def gathered(mine):
        given[own.process] = mine
        barrier.wait()
        rows = np.stack([given[process] for process in range(n)])
        barrier.wait()
        return rows

    def check(process):
        own.process = process
        try:
            return debug.check_consistent(programs[process], jnp.ones((8, 3)))
        except ValueError as error:
            return str(error)

    monkeypatch.setattr(jax, "process_count", lambda: n)
    monkeypatch.setattr(consistent, "_gathered", gathered)
    with ThreadPoolExecutor(n) as pool:
        return [*pool.map(check, range(n))]


def summed(x, algorithm="ring"):
    return ringcoll.psum(x, "x", algorithm=algorithm)


@pytest.mark.parametrize(
    ("other", "place", "words"),
    [
        (mapped(partial(summed, algorithm="bruck")), "call 1", "psum over x=4, float32[2,3]: bru"),
        (mapped(lambda x: ringcoll.pmax(summed(x), "x")), "call 2", "pmax over x=4, float32[2,3]"),
        (mapped(lambda x: x), "call 1", "no more calls"),
        (mapped(partial(summed, algorithm="rign")), "call 1", "no program, but ValueError: ringc"),
        (mapped(lambda x: summed(summed(x))), "line {} of its program", " stablehlo."),
        (mapped(lambda x: 2 * summed(x)), "line {} of its program", "dense<2.000000e+00>"),
    ],
)
def test_processes_that_differ_are_told_where(other, place, words, monkeypatch):
    usual, alone = mapped(lambda x: summed(x)), calls(summed)
    assert in_processes(monkeypatch, usual, usual) == [alone] * 2
    (said,) = {*in_processes(monkeypatch, usual, usual, other)}
    head, of_first, of_other, cure = said.removeprefix(CHECK).splitlines()
    where = re.escape(place).replace(r"\{\}", r"\d+")
    assert re.fullmatch(rf"process 2 differs from process 0 \(and 1 more\) in {where}", head)
    assert of_first.startswith("  process 0: ")
    assert of_other.startswith("  process 2: ")
    assert words in of_other
    assert cure.startswith("let every process make the same calls")


def test_an_error_of_tracing_passes_unchanged():
    with pytest.raises(ValueError, match="no algorithm 'rign'; did you mean 'ring'"):
        calls(lambda x: ringcoll.psum(x, "x", algorithm="rign"))


def of_each(algorithm):
    """Every kind of function that sends, by this algorithm where it takes one."""

    def program(x):
        y = ringcoll.psum_scatter(x, "x", tiled=True, algorithm=algorithm)
        y = ringcoll.all_gather(y, "x", tiled=True, algorithm=algorithm)
        y = y + ringcoll.psum(x, "x", algorithm=algorithm)
        y = ringcoll.all_gather_matmul(y, jnp.ones((3, 2)), "x", algorithm=algorithm)
        y = ringcoll.matmul_reduce_scatter(y, jnp.ones((2, 3)), "x", algorithm=algorithm)
        return ringcoll.ppermute(y, "x", [(0, 1)])

    return program


@pytest.mark.parametrize(
    ("algorithm", "check_vma"),
    mostly_exhaustive(
        product(["ring", "bidirectional_ring", "lax"], [False, True]),
        lambda *case: case == ("ring", False),
    ),
)
def test_marks_change_no_result(algorithm, check_vma):
    x = jnp.asarray(data((32, 3), jnp.bfloat16))
    step = jax.jit(jax.value_and_grad(
        lambda x: jnp.sum(mapped(of_each(algorithm), check_vma=check_vma)(x) ** 2)
    ))  # fmt: skip
    plain = step(x)
    assert not LOG.last
    assert "callback" not in step.lower(x).as_text()
    with debug.deadline(300):
        watched = step(x)  # traced anew, though it was jitted before
    assert_same(watched, plain)
    found = marks()
    ranks = {((("x", 4),), rank) for rank in range(4)}
    assert all(set(of) == ranks for of in found.values())
    names = {where.split("/")[0].removeprefix("ringcoll.") for where in found}
    called = {"psum_scatter", "all_gather", "psum"}
    if algorithm != "lax":  # by "lax", a matmul is a gather, or a scatter, beside its product
        called |= {"all_gather_einsum", "einsum_reduce_scatter"}
    assert names == {"ppermute", *(f"{name}({algorithm})" for name in called)}
    rounds = {where.split("/", 1)[1] for where in found if "psum(" in where and "/" in where}
    halves = ("reduce_scatter", "all_gather")
    of_ring = {f"{half}/round {i}" for half in halves for i in (1, 2, 3)}
    assert rounds == (set() if algorithm == "lax" else of_ring)
    assert_same(step(x), plain)
    assert not LOG.last  # and not without a deadline, though it was jitted under one


def test_marks_in_every_mode(monkeypatch):
    monkeypatch.setattr(running, "UNROLL_UP_TO", 2)
    x = jnp.ones((8, 3))

    def total(x):
        return ringcoll.psum(x, "x", algorithm="recursive_doubling")

    def repeated(x):
        return lax.scan(lambda c, _: (total(c) / 4, None), x, length=5)[0]

    stages = {
        "ringcoll.psum(recursive_doubling)/stage 1/round 1",
        "ringcoll.psum(recursive_doubling)/stage 2/round 1",
    }
    runs = [(mapped(total), 1), (jax.jit(mapped(repeated)), 5), (jax.vmap(mapped(total)), 1)]
    for run, times in runs:
        with debug.deadline(300):
            run(x[None] if times == 1 and run is runs[2][0] else x)
        found = marks()
        assert set(found) == stages
        assert {n for of in found.values() for n in of.values()} == {times}
    with debug.deadline(300):
        mapped(lambda x: ringcoll.all_gather(x, "x", algorithm="ring"))(x)
        jax.vmap(mapped(lambda x: ringcoll.all_gather_matmul(x, x.T, "x", algorithm="ring")))(
            jnp.stack([x, x])
        )
    of = {where: next(iter(times.values())) for where, times in marks().items()}
    loop = "ringcoll.all_gather(ring)/rounds 1 to 3"
    assert of[loop] == 3  # a turn each
    assert "ringcoll.all_gather_einsum(ring)/rounds 1 to 3" in of


def test_automatic_axes_are_not_marked():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    run = jax.shard_map(
        lambda x: ringcoll.psum(x, "x", algorithm="recursive_doubling"), mesh=mesh, in_specs=P("x"),
        out_specs=P(), axis_names={"x"},
    )  # fmt: skip
    with debug.deadline(300):
        assert jax.jit(run)(jnp.ones((4, 2))).tolist() == [[4, 4]]
    assert not LOG.last


def test_a_deadline_waits_for_dispatched_work():
    program = jax.jit(mapped(lambda x: lax.fori_loop(0, 200, lambda _, x: ringcoll.pmax(
        x, "x", algorithm="recursive_doubling"), x)))  # fmt: skip

    @debug.deadline(300)
    def step():
        program(jnp.ones((8, 3)))

    step()
    assert {n for of in marks().values() for n in of.values()} == {200}
    time.sleep(0.1)
    assert not [t for t in threading.enumerate() if isinstance(t, threading.Timer)]


@pytest.fixture
def held():
    """A program whose rank 0 waits before its collective, and the function that lets it go on."""
    let = threading.Event()

    def wait(x):
        let.wait()
        return x

    def program(x):
        mine = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = lax.cond(
            lax.axis_index("x") == 0, lambda x: jax.pure_callback(wait, mine, x), lambda x: x, x
        )
        return ringcoll.pmax(x, "x", algorithm="lax")

    yield jax.jit(mapped(program)), let
    let.set()


@pytest.mark.parametrize("grace", [60, 1])
def test_an_exception_waits_for_ranks_in_a_collective(held, grace, capfd):
    program, let = held
    results = []

    def leave():
        with debug.deadline(300, grace=grace):
            results.append(program(jnp.ones((8, 3))))
            while not LOG.stuck():
                time.sleep(0.01)
            if grace == 60:
                threading.Timer(0.2, let.set).start()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        leave()
    printed = capfd.readouterr().err
    if grace == 60:
        assert not printed
        assert not LOG.stuck()
    else:
        assert "ringcoll.debug.deadline(300) is left by KeyError on " in printed
        assert "rank 1 (x=1): in ringcoll.pmax(lax), begun " in printed
        let.set()
    assert results[0].tolist() == [[1] * 3] * 8


def test_a_deadline_ends_the_process(monkeypatch, capfd):
    timers, done = [], []

    class Timer:
        def __init__(self, interval, function, *of):
            timers.append((interval, lambda: function(*of)))

        start = cancel = lambda self: None

    monkeypatch.setattr(threading, "Timer", Timer)
    monkeypatch.setattr(time, "sleep", lambda seconds: done.append(seconds))
    monkeypatch.setattr("os._exit", lambda status: done.append(f"exit {status}"))
    with debug.deadline(30, grace=7):
        ((interval, is_over),) = timers
        is_over()
        (differ,) = LOG.enders
        differ(["rank 0 begins"])
    assert interval == 30
    assert done == [7, f"exit {debug.STATUS}"] * 2
    printed = capfd.readouterr().err
    assert "deadline(30) is over on " in printed
    assert "deadline(30) ends: ranks that are to exchange messages differ on " in printed
    assert printed.endswith("\nrank 0 begins\n")


def test_a_deadline_in_a_generator_at_exit():
    ended = python(
        "-c",
        """
import jax, ringcoll
def waiting():
    with ringcoll.debug.deadline(300):
        yield
waits = waiting()
next(waits)
""",
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"seconds": 0}, "seconds=0; pass a number of seconds, from 0.001 to"),
        ({"seconds": "60"}, "seconds='60'; pass a number"),
        ({"seconds": 1, "grace": -1}, "grace=-1; pass a number of seconds, from 0 to"),
    ],
)
def test_refusals_of_deadline(arguments, complaint):
    with pytest.raises(ValueError, match=complaint), debug.deadline(**arguments):
        pass
