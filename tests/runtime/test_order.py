"""On a CPU, which runs whatever is ready: products take turns, and come before permutes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import crossed, data, make_mesh

import ringcoll
from ringcoll.overlap.hlo import parse
from ringcoll.runtime import engine
from ringcoll.runtime.barriers import Beforehand, order_of_work
from ringcoll.runtime.cpu.when_ready import WhenReady

N = 4


@pytest.fixture(autouse=True)
def of_several_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)


def program(call, specs, out):
    """The instructions of a program by name, and all that each depends on."""
    mesh = make_mesh(N)
    operands = [
        jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, spec))
        for spec in specs
    ]
    mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out)
    text = jax.jit(mapped).lower(*operands).compile().as_text()
    all_of = parse(text).entry.by_name
    needs: dict[str, set[str]] = {}
    for name, instruction in all_of.items():  # operands come first
        of = [operand for operand in instruction.operands if operand in needs]
        needs[name] = set(of).union(*(needs[operand] for operand in of))
    return all_of, needs


def named(all_of, primitive):
    return [
        name for name, of in all_of.items() if (of.attribute("op_name") or "").endswith(primitive)
    ]


def test_the_products_of_a_sum_take_turns():
    all_of, needs = program(
        lambda x, w: ringcoll.matmul_reduce_scatter(x, w, "x", algorithm="ring"),
        (P(None, "x"), P("x")),
        P("x"),
    )
    products = named(all_of, "dot_general")
    assert len(products) == N
    before = [len(needs[product] & set(products)) for product in products]
    assert sorted(before) == list(range(N))
    hops = {name for name, of in all_of.items() if of.opcode == "collective-permute"}
    # The product beside the first hop waits for no hop; each later sum waits for one more.
    assert sorted(len(needs[product] & hops) for product in products) == [0, *range(N - 1)]
    if jax.__version_info__ < (0, 11):
        return  # that compiler looks through the barrier, and slices the array again
    for product in products:  # its operand is kept, or a message might overwrite it
        (cut,) = (of for of in all_of[product].operands if all_of[of].opcode == "fusion")
        others = [name for name, of in all_of.items() if cut in of.operands and name != product]
        assert any(product in needs[other] for other in others)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_what_is_late_is_computed_first(steps):
    def call(x):
        return lax.ppermute(WhenReady().late(x, steps), "x", [(i, (i + 1) % N) for i in range(N)])

    all_of, needs = program(call, (P("x"),), P("x"))
    (sent,) = (of.operands[0] for of in all_of.values() if of.opcode == "collective-permute")
    assert len([of for of in needs[sent] | {sent} if all_of[of].opcode == "fusion"]) >= steps


def test_products_do_not_wait_for_empty_buffers():
    all_of, needs = program(
        lambda x, w: ringcoll.all_gather_matmul(x, w, "x", algorithm="ring"),
        (P("x"), P(None, "x")),
        P(None, "x"),
    )
    products = named(all_of, "dot_general")
    permutes = [of for of in all_of.values() if of.opcode == "collective-permute"]
    assert (len(products), len(permutes)) == (N, N - 1)
    for permute in permutes:  # what arrived is not sent as it is
        assert all_of[permute.operands[0]].opcode == "fusion"
    results = [
        name
        for name, of in all_of.items()
        if of.shapes[0].dims == (64, 16) and of.opcode != "parameter"
    ]
    assert len(results) > N
    assert all(needs[name] & set(products) for name in results)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    crossed(
        [(), (3,), (0, 2), (2, 5)], [np.float32, np.int8, np.uint32, np.complex64, jnp.bfloat16]
    ),
)
def test_nothing_is_changed(dtype, shape):
    values = np.arange(-1, np.prod(shape, dtype=int) - 1).reshape(shape)
    x = jnp.asarray(values.astype(dtype))
    for steps in (1, 2, 3):
        np.testing.assert_array_equal(WhenReady().late(x, steps), x)
    np.testing.assert_array_equal(WhenReady().apart(WhenReady().after(x, [x])), x)
    assert int(WhenReady().after(jnp.int32(7), [x, x])) == 7


def test_where_work_is_not_ordered(monkeypatch):
    found = []

    def call(x):
        found.append(order_of_work())
        return x

    mesh = make_mesh(2, 2, names=("x", "y"))
    for processes, axes in [(2, {"x", "y"}), (2, {"x"}), (1, {"x", "y"})]:
        monkeypatch.setattr(jax, "process_count", lambda n=processes: n)
        mapped = jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names=axes)
        jax.jit(mapped).lower(np.ones(4, np.float32))
    assert [type(order) for order in found] == [WhenReady, Beforehand, Beforehand]


def test_under_vmap_there_is_one_index_for_all():
    def call(x, w):
        gathered = partial(ringcoll.all_gather_matmul, axis_name="x", algorithm="ring")
        return jax.vmap(lambda x: gathered(x, w))(jnp.stack([x, 2 * x]))

    specs = P("x"), P(None, "x")
    mapped = jax.shard_map(call, mesh=make_mesh(N), in_specs=specs, out_specs=P(None, None, "x"))
    compiled = jax.jit(mapped).lower(*[np.ones((64, 64), np.float32)] * 2).compile()
    computations = parse(compiled.as_text()).computations.values()
    opcodes = {of.opcode for computation in computations for of in computation.instructions}
    assert "dynamic-update-slice" in opcodes
    assert "scatter" not in opcodes


@pytest.mark.parametrize(
    ("algorithm", "unroll"), crossed(["ring", "bidirectional_ring", "two_ended"], [24, 1])
)
def test_values_and_gradients_are_those_of_one_process(algorithm, unroll, monkeypatch):
    """Also in loops, under vmap, and with fewer rows than lanes."""
    mesh, specs = make_mesh(5), (P(None, None, "x"), P("x"))

    def call(x, w):
        def one(x):
            y = ringcoll.matmul_reduce_scatter(x, w, "x", algorithm=algorithm)
            return ringcoll.all_gather_matmul(y, w.T, "x", algorithm=algorithm)

        y, pull_back = jax.vjp(jax.vmap(one), x)
        return y, *pull_back(jnp.sign(y))

    x, w = (data(shape, ranks=8) % 3 - 1 for shape in ((2, 5, 10), (10, 4)))
    out = P(None, None, "x")
    mapped = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(out, out)))
    monkeypatch.setattr(engine, "UNROLL_UP_TO", unroll)
    y, dx = mapped(x, w)
    np.testing.assert_array_equal(y, x @ w @ w.T)
    np.testing.assert_array_equal(dx, np.sign(x @ w @ w.T) @ w @ w.T)
