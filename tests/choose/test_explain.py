"""`ringcoll.explain`: the plans of a program, a line each."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import make_mesh

import ringcoll
from ringcoll.choose.plan import Plan
from ringcoll.choose.table import Table, TableRow
from ringcoll.runtime.hosts import HostSpread

TABLE = Table(
    (
        TableRow("psum", "cpu", "ring", hosts=(2, None), why="half the time of lax"),
        TableRow("psum", "*", "recursive_doubling", bytes=(None, 64)),
    )
)
GATHERED = "all_gather_einsum over x=8, bfloat16[1024,8192], bfloat16[8192,3584]"
SCATTERED = "einsum_reduce_scatter over x=8, bfloat16[8192,3584], bfloat16[8192,3584]"
FORWARD = f"{GATHERED}: bidirectional_ring: 2.54 ms; two_ended 2.59 ms"
BACKWARD = f"{SCATTERED}: bidirectional_ring, by turns: 2.69 ms; bidirectional_ring 3.05 ms"
PLAIN = "all_gather over x=8, bfloat16[1024,8192]: lax: no row covers it: the built-in"
SHARED = "lax: CPUs and GPUs hide no messages under matmuls"


def mapped(call, mesh):
    return jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


def summed(x, w, **options):
    return ringcoll.all_gather_matmul(x, w, "x", **options).astype(jnp.float32).sum()


def on(kind, platform):
    """A mesh of eight devices that are not here, and operands on it."""
    device = AbstractDevice(kind, None, platform)
    mesh = AbstractMesh((8,), ("x",), abstract_device=device, axis_types=(AxisType.Auto,))
    of = NamedSharding(mesh, P())
    shapes = (1024, 8192), (8192, 3584)
    return mesh, [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=of) for shape in shapes]


V5E = on("TPU v5 lite", "tpu")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (partial(ringcoll.psum, algorithm=TABLE), "lax: no row covers it: the built-in"),
        (partial(ringcoll.psum, algorithm="ring"), "ring: named by the caller"),
    ],
)
def test_a_collective(call, words):
    total = mapped(lambda x: call(x, "x"), make_mesh(4))
    told = ringcoll.explain(total)(jax.ShapeDtypeStruct((4, 8), np.float32))
    assert str(told) == f"psum over x=4, float32[4,8]: {words}"
    ((of, plan),) = told.plans
    assert (of, str(plan)) == ("psum over x=4, float32[4,8]", words)
    assert isinstance(plan, Plan)
    assert hash(told) == hash(ringcoll.explain(total)(jnp.ones((4, 8))))


def test_a_collective_between_hosts(monkeypatch):
    monkeypatch.setattr(
        ringcoll.collectives.by_schedule, "on_hosts", lambda *_: HostSpread(4, None)
    )
    total = mapped(lambda x: ringcoll.psum(x, "x", algorithm=TABLE), make_mesh(4))
    words = "ring: row 1 of the table: half the time of lax"
    assert str(ringcoll.explain(total)(jnp.ones(1024))) == f"psum over x=4, float32[1024]: {words}"


def test_groups_and_equal_calls():
    def call(x):
        for _ in range(3):
            x = ringcoll.psum(x, ("x", "y"), axis_index_groups=[[0, 1], [2, 3]], algorithm=TABLE)
        return x

    line = "psum over x=2, y=2 in groups of 2, float32[2]: recursive_doubling: row 2 of the table"
    assert str(ringcoll.explain(mapped(call, make_mesh(2, 2)))(jnp.ones(2))) == line


@pytest.mark.parametrize(
    ("kind", "platform", "words"),
    [
        ("TPU v5 lite", "tpu", FORWARD),
        ("NVIDIA H100 80GB HBM3", "cuda", f"{GATHERED}: {SHARED}\n{PLAIN}"),
    ],
)
def test_a_matmul(kind, platform, words):
    mesh, operands = on(kind, platform)
    assert str(ringcoll.explain(mapped(summed, mesh))(*operands)) == words


def test_named_algorithms():
    mesh, operands = V5E
    named = f"{GATHERED}: ring: named by the caller"
    assert (
        str(ringcoll.explain(mapped(partial(summed, algorithm="ring"), mesh))(*operands)) == named
    )
    with ringcoll.algorithm("ring"):
        assert str(ringcoll.explain(mapped(summed, mesh))(*operands)) == named
    mine = mapped(partial(summed, algorithm=lambda n: ringcoll.algorithms.ring(n)), mesh)
    assert str(ringcoll.explain(mine)(*operands)) == f"{GATHERED}: <lambda>: named by the caller"


def test_a_function_that_was_traced_before():
    mesh, operands = V5E
    function = jax.jit(mapped(summed, mesh))
    plain = function.trace(*operands).lower(lowering_platforms=("tpu",)).as_text()
    for _ in range(2):
        assert str(ringcoll.explain(function)(*operands)) == FORWARD
    again = function.trace(*operands).lower(lowering_platforms=("tpu",)).as_text()
    assert again == plain


@pytest.mark.parametrize(
    "around",
    [
        lambda f: jax.grad(f, (0, 1)),
        lambda f: jax.grad(jax.jit(f), (0, 1)),  # f is traced, and then its forward pass
        lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    ],
)
def test_a_gradient(around):
    mesh, operands = V5E
    assert (
        str(ringcoll.explain(around(mapped(summed, mesh)))(*operands)) == f"{FORWARD}\n{BACKWARD}"
    )


def test_a_second_derivative():
    mesh, (x, w) = V5E
    squared = mapped(lambda x, w: summed(x, w) ** 2, mesh)
    twice = jax.grad(lambda x, w: jax.grad(squared)(x, w).astype(jnp.float32).sum())
    two = f"{GATHERED}, bfloat16[8192,3584]: bidirectional_ring, sums at the end: 5.06 ms; "
    two += "two_ended, sums at the end 5.11 ms"
    assert str(ringcoll.explain(twice)(x, w)) == f"{FORWARD}\n{two}"


def test_a_vmap():
    mesh, (x, w) = V5E
    several = jax.ShapeDtypeStruct((3, *x.shape), x.dtype, sharding=x.sharding)
    assert str(ringcoll.explain(jax.vmap(mapped(summed, mesh), (0, None)))(several, w)) == FORWARD


def test_what_is_not_used_has_no_plan():
    mesh, operands = V5E
    unused = mapped(lambda x, w: (summed(x, w), x.sum())[1], mesh)
    assert ringcoll.explain(unused)(*operands).plans == ()
