"""On a CPU no collective starts while a loop that sends is running: read off compiled programs."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax as jax_lax
from jax.sharding import PartitionSpec as P
from loops import too_early, too_late
from support import make_mesh, mostly_exhaustive

from benchmarks.soak import steps
from ringcoll import lax
from ringcoll.runtime import primitive
from ringcoll.xla_cpu import loops as cpu_loops


@pytest.mark.parametrize("number", mostly_exhaustive(range(12), lambda number: number < 2))
def test_a_drawn_training_step(number):
    step = steps.draw(0, number)
    program = step.program().lower(step.state(), step.batch(0)).compile()
    assert too_early(program.as_text()) == []
    assert steps.differing(step, program) == []


def test_steps_are_what_goes_wrong_otherwise(monkeypatch):
    """Without the added dependencies, the judge sees a fault."""
    monkeypatch.setattr(primitive, "on_lowering", [])
    rings = dict.fromkeys(("all_gather", "psum_scatter", "psum"), ("ring",))
    step = steps.Step((2, 4), 2, "scan", "", "gather", (1, 1, 1), rings)
    text = step.program().lower(step.state(), step.batch(0)).compile().as_text()
    assert too_early(text)


def ring(x):
    return lax.psum(x, "x", algorithm="ring")


def lanes(x):
    return lax.psum_scatter(x, "x", tiled=True, algorithm="bidirectional_ring")


def loop(x, send=lambda x: jax_lax.psum(x, "x")):
    return jax_lax.scan(lambda c, _: (jnp.sin(send(c)), jnp.cos(c)), x, length=3)


def called(x):
    return jax.jit(lambda x: (ring(jnp.sin(x)), loop(x)))(x)


def unused(x):
    """A compiler may drop the smallest array that the loop carries."""

    def turn(carry):
        count, small, y = carry
        return count + 1, small * 2, jnp.sin(jax_lax.psum(y, "x"))

    return jax_lax.while_loop(lambda carry: carry[0] < 3, turn, (0, jnp.zeros(1), x))[2]


def bare_branch(x):
    return jax_lax.cond(x[0] > 0, lambda x: jax_lax.psum(x, "x"), jnp.negative, x)


#: Each of the first seven alone notices a mutant.
PROGRAMS = {
    "before": lambda x: (ring(x), loop(x * 2), ring(x * 3)),
    "behind": lambda x: (loop(x), ring(x), loop(x * 2), ring(x + 1)),
    "by lanes": lambda x: (lanes(x), loop(x), lanes(x * 2)),
    "lanes in a call": lambda x: (jax.jit(lanes)(x * 3), loop(x), jax.jit(lanes)(x * 2)),
    "called": lambda x: (ring(x), called(x * 2), ring(x * 3)),
    "bare branch": lambda x: (bare_branch(x), ring(x), bare_branch(x * 2), ring(x + 1)),
    "unused": lambda x: (ring(x), unused(x * 2), ring(x + 1)),
    "gradient": lambda x: jax.grad(lambda x: sum(map(jnp.sum, (ring(x), *loop(x, ring)))))(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_and_collectives_are_apart(name):
    mesh = make_mesh(4)
    x = jax.device_put(np.arange(1.0, 65), jax.NamedSharding(mesh, P("x")))
    mapped = jax.jit(
        jax.shard_map(PROGRAMS[name], mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    )
    compiled = mapped.lower(x).compile()
    assert too_early(compiled.as_text()) == []
    assert too_late(compiled.as_text()) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitive, "on_lowering", [])
        jax.clear_caches()
        plain = mapped.lower(x).compile()(x)
    chex.assert_trees_all_equal(compiled(x), plain)


def test_meshes_of_one_program():
    """Each mesh has its own axes, with any names."""
    devices = np.array(jax.devices()[:4])
    meshes = [jax.sharding.Mesh(devices.reshape(n, -1), (str(n), "a-b")) for n in (1, 2)]

    def of(x):
        send = partial(lax.psum, axis_name="a-b", algorithm="ring")
        return send(x) + loop(x * 2, send)[0] + send(x * 3)

    def mapped(x):
        for mesh in meshes:
            x = jax.shard_map(of, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(x)
        return x

    assert too_early(jax.jit(mapped).lower(jnp.ones(8)).compile().as_text()) == []


def test_lowering_is_always_heard(monkeypatch):
    """Also in another thread, just while a listener is being replaced."""
    heard = []
    unregister = jax.monitoring.unregister_event_duration_listener

    def meanwhile(listener):
        unregister(listener)
        jax.monitoring.record_event_duration_secs("/meanwhile", 0.0)

    def lower():
        jax.clear_caches()
        mapped = jax.shard_map(ring, mesh=make_mesh(4), in_specs=P(), out_specs=P())
        jax.jit(mapped).lower(jnp.ones(8))

    with monkeypatch.context() as patch:
        patch.setattr(cpu_loops, "_when_lowered", lambda event, *_, **__: heard.append(event))
        lower()
        patch.setattr(jax.monitoring, "unregister_event_duration_listener", meanwhile)
        lower()
    lower()  # and the true one is back
    assert "/meanwhile" in heard


def text_twice(mapped, monkeypatch):
    """The text of a program as it is lowered, and without the added dependencies."""
    texts = [jax.jit(mapped).lower(jnp.ones(64)).as_text()]
    monkeypatch.setattr(primitive, "on_lowering", [])
    jax.clear_caches()
    return *texts, jax.jit(mapped).lower(jnp.ones(64)).as_text()


def test_a_program_without_loops_stays_as_it_is(monkeypatch):
    def program(x):
        return ring(x), lanes(x), jax.jit(ring)(jnp.sin(x))

    options = {"in_specs": P("x"), "out_specs": P("x"), "check_vma": False}
    apart, plain = text_twice(jax.shard_map(program, mesh=make_mesh(4), **options), monkeypatch)
    assert apart == plain


def test_automatic_axes_change_nothing(monkeypatch):
    """Within, all axes are manual; around it, nobody knows where the first element is."""

    def over(axis, function, **mesh):
        options = {"in_specs": P(axis), "out_specs": P(axis), "axis_names": {axis}, **mesh}
        return jax.shard_map(function, check_vma=False, **options)

    def outer(x):
        return over("x", lambda x: loop(x, ring)[0])(x), over("x", ring)(x * 2)

    mapped = over("y", outer, mesh=make_mesh(2, 2, names=("x", "y")))
    apart, plain = text_twice(mapped, monkeypatch)
    assert apart == plain


def test_a_failed_change_changes_nothing(monkeypatch, caplog):
    def program(x):
        return loop(x), ring(x), jax.jit(loop)(x * 2), ring(x + 1)

    def write(number, value, write=cpu_loops._when_there):
        values.append(write(number, value))
        if len(values) == 3:
            raise ZeroDivisionError
        return values[-1]

    values = []
    monkeypatch.setattr(cpu_loops, "_when_there", write)
    options = {"in_specs": P("x"), "out_specs": P("x"), "check_vma": False}
    failed, plain = text_twice(jax.shard_map(program, mesh=make_mesh(4), **options), monkeypatch)
    assert len(values) == 3
    assert failed == plain
    assert "stay as JAX lowered them" in caplog.text
