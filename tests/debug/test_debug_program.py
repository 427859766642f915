"""`check_consistent` compares everything that changes a program, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import flags_of_cpu, make_mesh, python

import ringcoll
from ringcoll import debug
from ringcoll.debug.consistent import _shortened, described, environment

X = jax.ShapeDtypeStruct((8, 3), jnp.float32)
KEEP = jax.checkpoint_policies


ROWS = P("x")


def mapped(function, mesh=None, out_specs=ROWS):
    mesh = make_mesh(4) if mesh is None else mesh
    return jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=out_specs, check_vma=False)


def total(x):
    return ringcoll.psum(x, "x", algorithm="ring")


def sums(*scales):
    """A program of equal calls; a dict holds their results in this order of names."""

    def function(x):
        sums_by_scale = {scale: total(scale * x) for scale in scales}
        return sums_by_scale[1] - sums_by_scale[100]

    return mapped(function)


def shifted(by):
    return mapped(lambda x: total(x) + by)


def turned(most):
    return mapped(lambda x: lax.while_loop(lambda c: c[0, 0] < most, total, x))


def constrained(spec):
    sharding = NamedSharding(make_mesh(4), spec)
    return lambda x: lax.with_sharding_constraint(mapped(total)(x), sharding)


def kept(policy, **more):
    def loss(x):
        named = jax.checkpoint(
            lambda x: jnp.sin(checkpoint_name(jnp.sin(x), "a")).sum(), policy=policy
        )
        return named(x, **more)

    return jax.grad(loss)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (sums(1, 100), sums(100, 1)),
        (mapped(total), mapped(total, Mesh(make_mesh(4).devices[::-1], "x"))),
        (turned(1.0), turned(2.0)),
        (turned(np.arange(1.0)[0]), turned(np.arange(2.0)[1])),
        (shifted(np.arange(6.0).reshape(2, 3)), shifted(np.arange(6.0)[::-1].reshape(2, 3))),
        (shifted(np.zeros((2, 99, 3))[:, 0]), shifted(np.full((2, 3), 1e-30))),
        (mapped(total), mapped(total, out_specs=P())),
        (constrained(P("x")), constrained(P())),
        (jax.jit(mapped(total)), jax.jit(mapped(total), donate_argnums=0)),
        (
            jax.jit(mapped(total), out_shardings=NamedSharding(make_mesh(4), P("x"))),
            jax.jit(mapped(total), out_shardings=NamedSharding(make_mesh(4), P())),
        ),
        (kept(KEEP.save_only_these_names("a")), kept(KEEP.save_only_these_names("b"))),
        (
            lambda x: jnp.dot(x, x.T, precision="highest"),
            lambda x: jnp.dot(x, x.T, precision="default"),
        ),
        (lambda x: {"a": x, "b": 2 * x}, lambda x: {"b": x, "a": 2 * x}),
        (
            lambda x: jax.random.normal(jax.random.key(0), x.shape),
            lambda x: jax.random.normal(jax.random.key(1), x.shape),
        ),
    ],
)
def test_a_difference_between_programs_shows(one, other, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)  # then the devices are another's
    first, second = described(one, X), described(other, X)
    assert first == described(one, X)
    assert first.calls == second.calls
    assert first != second


def test_local_devices_do_not_matter():
    orders = (make_mesh(4).devices, make_mesh(4).devices[::-1])
    assert len({str(described(mapped(total, Mesh(each, "x")), X)) for each in orders}) == 1


def test_operands_may_be_on_a_mesh_without_devices():
    of = NamedSharding(make_mesh(4).abstract_mesh, P("x"))
    found = described(mapped(total), jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=of))
    assert found.arguments[0] == "argument [0][0]: float32[8,3] on 0 of its own devices"


def test_of_long_lines_the_first_difference_is_shown():
    same = "a" * 300
    assert _shortened([same, f"{same} more"]) == [f"...{'a' * 50}...", f"...{'a' * 50} more..."]
    assert _shortened(["b" * 300, same])[0] == f"...{'b' * 200}..."
    assert _shortened(["b", "c"]) == ["b", "c"]


def test_a_difference_of_the_environment_shows(monkeypatch):
    before = environment()
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/own --xla_force_host_platform_device_count=2")
    mine = environment()
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/other")
    assert environment() == mine
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert environment() != mine
    monkeypatch.undo()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_async_collective_fusion=true")
    assert environment() != before
    monkeypatch.undo()
    with monkeypatch.context() as changed:
        changed.setattr(jax, "__version__", "0.0")
        assert environment() != before
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    of_mesh = []
    for devices in (make_mesh(4).devices, make_mesh(4).devices[::-1]):
        with jax.set_mesh(Mesh(devices, "x")):
            of_mesh.append(environment())
    assert of_mesh[0] != of_mesh[1]
    assert environment() == before


def test_static_arguments_and_compiler_options():
    def step(x, activation, times=1):
        return mapped(lambda x: activation(total(x)) * times)(x)

    jitted = jax.jit(
        step,
        static_argnums=1,
        static_argnames="times",
        compiler_options={"xla_embed_ir_in_executable": True},
    )
    calls = debug.check_consistent(jitted, X, jnp.tanh, times=2)
    assert calls == ["psum over x=4, float32[2,3]: ring: named by the caller"]
    programs = [described(jitted, X, jnp.tanh, times=times).program for times in (1, 2, 2)]
    assert programs[0] != programs[1] == programs[2]


VARIOUS = """
import jax, jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec as P
import ringcoll
from ringcoll.debug.consistent import _shortened, described, environment

mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

def various(x, key):
    y = jax.random.normal(key, (4, 4)) + jax.random.normal(jax.random.PRNGKey(3), (4, 4))
    y = lax.conv_general_dilated(x[None, None], y[None, None, :2, :2], (1, 1), "SAME")[0, 0]
    y = y.at[0].set(3) + jnp.take(y, jnp.array([1, 0, 2, 3]), axis=0)
    y = lax.with_sharding_constraint(y, NamedSharding(mesh, P("x")))
    own = object()  # of a process: its address differs
    jax.debug.callback(lambda y: own, y)
    y = jax.pure_callback(lambda y: (own, y)[1], jax.ShapeDtypeStruct(y.shape, y.dtype), y)
    y = io_callback(lambda y: (own, y)[1], jax.ShapeDtypeStruct(y.shape, y.dtype), y, ordered=True)
    y = jax.nn.softmax(jnp.linalg.solve(y, y)) + lax.reduce(y, 0.0, lambda a, b: a + b, (0,))[None]
    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x, (x,)), lambda residuals, ct: (ct * 2,))
    y = identity(jax.nn.relu(y)) + lax.top_k(y, 4)[0] + jnp.fft.fft(y).real
    total = jax.shard_map(
        lambda x: ringcoll.psum(x, ("x", "y"), algorithm="ring") + lax.axis_index(("x", "y")),
        mesh=mesh, in_specs=P(("x", "y")), out_specs=P(("x", "y")),
    )
    return total(y).sum()

def loss(x, key):
    names = KEEP.save_only_these_names("a", "b", "c", "d")
    policy = KEEP.save_from_both_policies(names, KEEP.dots_saveable)
    named = jax.checkpoint(lambda x: checkpoint_name(jnp.sin(x), "a").sum(), policy=policy)
    return named(x) + various(lax.stop_gradient(x), key)

KEEP = jax.checkpoint_policies
found = described(jax.value_and_grad(loss), jnp.ones((4, 4)), jax.random.key(1))

def gathered_and_summed(x):
    whole = ringcoll.all_gather(x, ("i", "j"), tiled=True, algorithm="ring")
    return ringcoll.psum(whole, ("i", "j"), algorithm="bruck")

mesh = jax.make_mesh((4, 2), ("i", "j"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
f = jax.shard_map(gathered_and_summed, mesh=mesh, in_specs=P(("i", "j")), out_specs=P())
print(*{"i", "j"})
print(jax.jit(f).lower(jnp.ones(16)).as_text())
print(*environment(), *found.calls, *found.arguments, *found.program, sep="\\n")
"""


def test_programs_are_the_same_in_every_process(monkeypatch):
    """As described, and as lowered: whatever the order of sets, and with no addresses."""
    orders, texts = set(), []
    for seed in "01":
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        with flags_of_cpu():
            done = python("-c", VARIOUS)
        assert done.returncode == 0, done.stderr
        order, text = done.stdout.split("\n", 1)
        orders.add(order)
        texts.append(text)
    assert orders == {"i j", "j i"}  # else the test could not fail
    assert texts[0] == texts[1]
    for each in ("top_k", "python_cpu_callback", "collective_permute"):
        assert each in texts[0]
