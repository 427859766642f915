"""The work of a visit, counted from its products, as on paper; and what "auto" makes of it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from ringcoll.collectives.counting import work_of
from ringcoll.costs.under_work import Work

RANKS = 8
W, ALL = jnp.ones((2, 3)), jnp.ones((32, 3))  # fixed: the second has rows for all ranks
SUM, BUFFER, SHARD = jnp.ones((2, 3)), jnp.ones((32, 3)), jnp.ones((4, 2))


def placed(y, x):
    return lax.dynamic_update_slice_in_dim(y, x @ W, 4, 0)


def summed(y, x):
    return y + x.T @ lax.dynamic_slice_in_dim(ALL, 4, 4)


def twice(y, x):
    return lax.scan(lambda y, _: (jax.jit(placed)(y, x), None), y, length=2)[0]


def sometimes(y, x):
    return lax.cond(y[0, 0] > 0, placed, lambda y, x: y, placed(y, x), x)


def until_positive(y, x):
    return lax.while_loop(lambda y: y[0, 0] < 0, lambda y: placed(y, x), y)


def produced():
    return lax.dynamic_slice_in_dim(ALL, 4, 4).T @ jnp.ones((4, 5))


@pytest.mark.parametrize(
    ("visit", "operands", "sums", "expected"),
    [
        (placed, (BUFFER, SHARD), [(32, 3)], Work(384.0, read_once=8 * (32 + 48), reread=24)),
        (
            summed,
            (SUM, SHARD),
            [(2, 3)],
            Work(384.0, read_once=8 * 32, slice_reads=8 * 48, accumulated=24),
        ),
        (twice, (BUFFER, SHARD), [(32, 3)], Work(768.0, read_once=16 * (32 + 48), reread=48)),
        (produced, (), [], Work(960.0, read_once=8 * 60, reread=80, slice_reads=8 * 48)),
        (sometimes, (BUFFER, SHARD), [], None),
        (until_positive, (BUFFER, SHARD), [], None),
        (lambda y, x: y + x.sum(), (BUFFER, SHARD), [], None),
    ],
)  # fmt: skip
def test_work_is_that_on_paper(visit, operands, sums, expected):
    program = jax.make_jaxpr(visit)(*operands)
    assert work_of(program.jaxpr, len(operands[1:]), RANKS, sums) == expected


def on_v5e(call):
    """The plan of a call on eight chips of v5e that are not here."""
    device = AbstractDevice("TPU v5 lite", None, "tpu")
    mesh = AbstractMesh((8,), ("x",), abstract_device=device, axis_types=(AxisType.Auto,))
    of = NamedSharding(mesh, P())
    shapes = (1024, 8192), (8192, 3584)
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=of) for shape in shapes]
    program = jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    (told, plan), *_ = ringcoll.explain(program)(*operands).plans  # then the built-in's
    return f"{told}: {plan}"


def all_gather_matmul(x, w, **options):
    return ringcoll.all_gather_map(lambda rows: rows @ w, x, "x", **options)


def test_auto_is_that_of_the_same_matmul():
    gathered = "gather over x=8, bfloat16[1024,8192]: "
    assert on_v5e(all_gather_matmul) == f"{gathered}bidirectional_ring: 2.54 ms; two_ended 2.59 ms"
    little = Work(flops=1.0)
    priced = on_v5e(lambda x, w: all_gather_matmul(x, w, work=little))
    assert priced == f"{gathered}bidirectional_ring: 1.31 ms; lax 1.48 ms"
    idle = on_v5e(lambda x, w: ringcoll.gather(x, "x", lambda c, a: (c + a.value.sum(), None), x))
    assert idle == f"{gathered}lax: no product was counted; give its work"
    summed = on_v5e(lambda x, w: ringcoll.reduce(lambda wanted: wanted.take(w) @ w.T, "x"))
    assert summed.startswith("reduce over x=8, bfloat16[1024,8192]: bidirectional_ring: ")
