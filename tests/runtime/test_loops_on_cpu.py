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
from ringcoll.runtime.cpu import loops as cpu_loops


@pytest.mark.parametrize("number", mostly_exhaustive(range(12), lambda number: number < 2))
def test_a_drawn_training_step(number):
    step = steps.draw(0, number)
    program = step.program().lower(step.state(), step.batch(0)).compile()
    assert too_early(program.as_text()) == []
    assert steps.differing(step, program) == []


def test_steps_are_what_goes_wrong_otherwise(monkeypatch):
    """Without the added dependencies, the judge sees a fault."""
    monkeypatch.setattr(cpu_loops, "keep_apart", lambda module: None)
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


def nested(x):
    return jax_lax.scan(lambda c, _: (loop(c)[0], ring(jnp.tan(x))), x, length=2)


def branch(x):
    return jax_lax.cond(x[0] > 0, lambda x: loop(x)[0], jnp.negative, x)


def of_other_types(x):
    bits, numbers = x > 0, x + 1j * x

    def turn(carry, _):
        return (jax_lax.ppermute(carry[0], "x", [(0, 1)]), jax_lax.psum(carry[1], "x")), None

    (bits, numbers), _ = jax_lax.scan(turn, (bits, numbers), length=3)
    return bits, numbers, ring(bits), ring(numbers)


def handed_on(x):
    return jax_lax.while_loop(
        lambda carry: jnp.all(carry[0] < 9),
        lambda carry: (jax_lax.psum(carry[0], "x"), carry[1]),
        (jnp.abs(x), jnp.sin(x)),
    )[1]


def called(x):
    return jax.jit(lambda x: (ring(jnp.sin(x)), loop(x)))(x)


def beside_in_calls(x):
    """A call depends on the loop, but some operations within it do not."""
    both = jax.jit(lambda a, x: (jnp.sin(a), ring(x)))
    apart = jax.jit(lambda a, x: (jnp.sin(a), jnp.sin(x)))
    a = loop(x)[0]
    return both(a, x * 2), ring(apart(a, x * 3)[1])


def barrier(x):
    a, x = jax_lax.optimization_barrier((loop(x)[0], x * 2))
    return a, ring(x)


def counted(x):
    """A compiler knows the number to which the loop counts."""

    def turn(carry):
        return carry[0] + 1, jnp.sin(jax_lax.psum(carry[1], "x"))

    count, y = jax_lax.while_loop(lambda carry: carry[0] < 3, turn, (0, x))
    return y, ring(jnp.full(8, 1.0) * count)


def unused(x):
    """A compiler may drop the smallest array that the loop carries."""

    def turn(carry):
        count, small, y = carry
        return count + 1, small * 2, jnp.sin(jax_lax.psum(y, "x"))

    return jax_lax.while_loop(lambda carry: carry[0] < 3, turn, (0, jnp.zeros(1), x))[2]


def bare_branch(x):
    return jax_lax.cond(x[0] > 0, lambda x: jax_lax.psum(x, "x"), jnp.negative, x)


def constants(x):
    return loop(x), [ring(jnp.full(8, number)) for number in (0.0, 1.0, 107.0)]


PROGRAMS = {
    "before": lambda x: (ring(x), loop(x * 2), ring(x * 3)),
    "behind": lambda x: (loop(x), ring(x), loop(x * 2), ring(x + 1)),
    "by lanes": lambda x: (lanes(x), loop(x), lanes(x * 2)),
    "ours within": lambda x: (ring(x), loop(x * 2, ring), loop(x * 3, ring)),
    "nested": lambda x: (ring(x), nested(x * 2), ring(x * 3)),
    "branch": lambda x: (ring(x), branch(x * 2), ring(x * 3)),
    "unused": lambda x: (ring(x), unused(x * 2), ring(x + 1)),
    "bare branch": lambda x: (bare_branch(x), ring(x), bare_branch(x * 2), ring(x + 1)),
    "a loop in a call": lambda x: (jax.jit(loop)(x), ring(x), jax.jit(loop)(x * 2), ring(x + 1)),
    "lanes in a call": lambda x: (jax.jit(lanes)(x * 3), loop(x), jax.jit(lanes)(x * 2)),
    "types": lambda x: (ring(x), of_other_types(x), ring(x * 3)),
    "beside in calls": beside_in_calls,
    "barrier": barrier,
    "counted": counted,
    "constants": constants,
    "handed on": lambda x: ring(handed_on(x)),
    "called": lambda x: (ring(x), called(x * 2), ring(x * 3)),
    "unneeded": lambda x: (loop(x)[1], ring(x)),
    "gradient": lambda x: jax.grad(lambda x: sum(map(jnp.sum, (ring(x), *loop(x, ring)))))(x),
}


#: Each of the first seven alone notices a mutant; the others mix them.
USUAL = (
    *("before", "behind", "by lanes", "lanes in a call", "called", "bare branch", "unused"),
    "gradient",
)


@pytest.mark.parametrize("name", mostly_exhaustive(PROGRAMS, lambda name: name in USUAL))
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
        patch.setattr(cpu_loops, "keep_apart", lambda module: None)
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


def test_the_judge_knows_what_a_loop_only_hands_on():
    """What a loop only passes on is there before it. What it ignores may come late."""
    text = """
%turn (carry: (f32[], f32[], f32[])) -> (f32[], f32[], f32[]) {
  %carry = (f32[], f32[], f32[]) parameter(0)
  %a = f32[] get-tuple-element(%carry), index=0
  %b = f32[] get-tuple-element(%carry), index=1
  %c = f32[] get-tuple-element(%carry), index=2
  %sum = f32[] all-reduce(%a), to_apply=%add
  ROOT %end = (f32[], f32[], f32[]) tuple(%sum, %b, %c)
}

%asks (asked: (f32[], f32[], f32[])) -> pred[] {
  %asked = (f32[], f32[], f32[]) parameter(0)
  %limit = f32[] get-tuple-element(%asked), index=2
  ROOT %is_below = pred[] compare(%limit, %limit), direction=LT
}

ENTRY %main (x: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %start = (f32[], f32[], f32[]) tuple(%x, %x, %x)
  %first = (f32[], f32[], f32[]) while(%start), condition=%asks, body=%turn
  %made = f32[] get-tuple-element(%first), index=0
  %handed_on = f32[] get-tuple-element(%first), index=1
  %good = f32[] all-reduce(%made), to_apply=%add
  %bad = f32[] all-reduce(%handed_on), to_apply=%add
  %second_start = (f32[], f32[], f32[]) tuple(%x, %made, %x)
  %second = (f32[], f32[], f32[]) while(%second_start), condition=%asks, body=%turn
  %third_start = (f32[], f32[], f32[]) tuple(%good, %x, %x)
  %third = (f32[], f32[], f32[]) while(%third_start), condition=%asks, body=%turn
  %fourth_start = (f32[], f32[], f32[]) tuple(%x, %x, %made)
  %fourth = (f32[], f32[], f32[]) while(%fourth_start), condition=%asks, body=%turn
}
"""
    late = {"second": {"third", "fourth"}, "third": {"fourth"}}
    expected = {("first", "bad"), ("first", "second")}
    expected |= {(loop, name) for loop, names in late.items() for name in names}
    assert set(too_early(text)) == expected


def text_twice(mapped, monkeypatch):
    """The text of a program as it is lowered, and without the added dependencies."""
    texts = [jax.jit(mapped).lower(jnp.ones(64)).as_text()]
    monkeypatch.setattr(cpu_loops, "keep_apart", lambda module: None)
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
