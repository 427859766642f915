"""On a CPU no collective starts while a loop that sends is running: read off compiled programs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax as jax_lax
from jax.sharding import PartitionSpec as P
from loops import too_early
from support import make_mesh

from benchmarks import steps
from ringcoll import lax, loops_on_cpu


@pytest.mark.parametrize("number", range(50))
def test_a_drawn_training_step(number):
    step = steps.draw(0, number)
    program = step.program().lower(step.state(), step.batch(0)).compile()
    assert too_early(program.as_text()) == []
    assert steps.differing(step, program) == []


def test_steps_are_what_goes_wrong_otherwise(monkeypatch):
    """Without what keeps them apart, the judge sees it."""
    monkeypatch.setattr(loops_on_cpu, "keep_apart", lambda module, axes: None)
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


PROGRAMS = {
    "before": lambda x: (ring(x), loop(x * 2), ring(x * 3)),
    "behind": lambda x: (loop(x), ring(x), loop(x * 2), ring(x + 1)),
    "by lanes": lambda x: (lanes(x), loop(x), lanes(x * 2)),
    "ours within": lambda x: (ring(x), loop(x * 2, ring), loop(x * 3, ring)),
    "nested": lambda x: (ring(x), nested(x * 2), ring(x * 3)),
    "branch": lambda x: (ring(x), branch(x * 2), ring(x * 3)),
    "types": lambda x: (ring(x), of_other_types(x), ring(x * 3)),
    "handed on": lambda x: ring(handed_on(x)),
    "called": lambda x: (ring(x), called(x * 2), ring(x * 3)),
    "unneeded": lambda x: (loop(x)[1], ring(x)),
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops_on_cpu, "keep_apart", lambda module, axes: None)
        jax.clear_caches()
        plain = mapped.lower(x).compile()(x)
    chex.assert_trees_all_equal(compiled(x), plain)


def text_twice(mapped, monkeypatch):
    """Of a program as it is lowered, and as it would be if nothing were kept apart."""
    texts = [jax.jit(mapped).lower(jnp.ones(64)).as_text()]
    monkeypatch.setattr(loops_on_cpu, "keep_apart", lambda module, axes: None)
    jax.clear_caches()
    return *texts, jax.jit(mapped).lower(jnp.ones(64)).as_text()


def test_a_program_without_loops_stays_as_it_is(monkeypatch):
    def program(x):
        return ring(x), lanes(x), jax.jit(ring)(jnp.sin(x))

    how = {"in_specs": P("x"), "out_specs": P("x"), "check_vma": False}
    apart, plain = text_twice(jax.shard_map(program, mesh=make_mesh(4), **how), monkeypatch)
    assert apart == plain


def test_where_an_axis_is_the_compiler_s_nothing_changes(monkeypatch):
    """Within, all axes are manual; around it, nobody knows where the first element is."""

    def over(axis, function, **mesh):
        how = {"in_specs": P(axis), "out_specs": P(axis), "axis_names": {axis}, **mesh}
        return jax.shard_map(function, check_vma=False, **how)

    def outer(x):
        return over("x", lambda x: loop(x, ring)[0])(x), over("x", ring)(x * 2)

    mapped = over("y", outer, mesh=make_mesh(2, 2, names=("x", "y")))
    apart, plain = text_twice(mapped, monkeypatch)
    assert apart == plain
