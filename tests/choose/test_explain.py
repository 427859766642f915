"""`ringcoll.explain`: the plans of a program, a row each."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import make_mesh

import ringcoll
from ringcoll import lax
from ringcoll.choose.plan import Plan
from ringcoll.choose.table import Table, TableRow
from ringcoll.layers import context_parallel, expert_parallel, tensor_parallel
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
BACKWARD = f"{SCATTERED}: bidirectional_ring: 3.05 ms; two_ended 3.1 ms"
PLAIN = "all_gather over x=8, bfloat16[1024,8192]: lax: no row covers it: the built-in"
SHARED = "lax: only TPUs hide messages under work"


def words_of(told):
    return "\n".join(f"{call}: {plan}" for call, plan in told.plans)


def explained(program, *operands):
    return words_of(ringcoll.explain(program)(*operands))


def mapped(call, mesh):
    return jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


def summed(x, w, **options):
    return ringcoll.all_gather_matmul(x, w, "x", **options).astype(jnp.float32).sum()


def on(kind, platform, groups=1):
    """A mesh of groups of eight devices that are not here, and operands on it."""
    device, types = AbstractDevice(kind, None, platform), (AxisType.Auto,) * 2
    mesh = AbstractMesh((groups, 8), ("y", "x"), abstract_device=device, axis_types=types)
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
    assert words_of(told) == f"psum over x=4, float32[4,8]: {words}"
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
    assert explained(total, jnp.ones(1024)) == f"psum over x=4, float32[1024]: {words}"


def test_groups_and_equal_calls():
    def call(x):
        for _ in range(3):
            x = ringcoll.psum(x, ("x", "y"), axis_index_groups=[[0, 1], [2, 3]], algorithm=TABLE)
        return x

    line = "psum over x=2, y=2 in groups of 2, float32[2]: recursive_doubling: row 2 of the table"
    assert explained(mapped(call, make_mesh(2, 2)), jnp.ones(2)) == line


@pytest.mark.parametrize(
    ("kind", "platform", "words"),
    [
        ("TPU v5 lite", "tpu", FORWARD),
        ("NVIDIA H100 80GB HBM3", "cuda", f"{GATHERED}: {SHARED}\n{PLAIN}"),
    ],
)
def test_a_matmul(kind, platform, words):
    mesh, operands = on(kind, platform)
    assert explained(mapped(summed, mesh), *operands) == words


def attended(x, w):
    return context_parallel.attention(*[x.reshape(1, 512, 64, 256)] * 3, "x", causal=True)


def mixed(x, w):
    experts = {"gate": w[None], "up": w[None], "down": w.T[None]}
    return expert_parallel.moe(x, w[:, :8], experts, "x", top_k=2).output


@pytest.mark.parametrize("call", [summed, attended, mixed])
def test_two_groups_share_the_links_of_a_chip_with_two_devices(call):
    alone, beside = (
        max(plan.seconds or 0 for _, plan in ringcoll.explain(mapped(call, mesh))(*operands).plans)
        for mesh, operands in (on("TPU7x", "tpu", groups) for groups in (1, 2))
    )
    assert beside > 1.1 * alone > 0


def test_named_algorithms():
    mesh, operands = V5E
    named = f"{GATHERED}: ring: named by the caller"
    assert explained(mapped(partial(summed, algorithm="ring"), mesh), *operands) == named
    with ringcoll.algorithm("ring"):
        assert explained(mapped(summed, mesh), *operands) == named
    mine = mapped(partial(summed, algorithm=lambda n: ringcoll.algorithms.ring(n)), mesh)
    assert explained(mine, *operands) == f"{GATHERED}: <lambda>: named by the caller"


def test_a_function_that_was_traced_before():
    mesh, operands = V5E
    function = jax.jit(mapped(summed, mesh))
    plain = function.trace(*operands).lower(lowering_platforms=("tpu",)).as_text()
    for _ in range(2):
        assert explained(function, *operands) == FORWARD
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
    assert explained(around(mapped(summed, mesh)), *operands) == f"{FORWARD}\n{BACKWARD}"


def test_a_second_derivative():
    mesh, (x, w) = V5E
    squared = mapped(lambda x, w: summed(x, w) ** 2, mesh)
    twice = jax.grad(lambda x, w: jax.grad(squared)(x, w).astype(jnp.float32).sum())
    two = f"{GATHERED}, bfloat16[8192,3584]: bidirectional_ring, sums at the end: 5.06 ms; "
    two += "two_ended, sums at the end 5.11 ms"
    assert explained(twice, x, w) == f"{FORWARD}\n{two}"


def test_a_vmap():
    mesh, (x, w) = V5E
    several = jax.ShapeDtypeStruct((3, *x.shape), x.dtype, sharding=x.sharding)
    assert explained(jax.vmap(mapped(summed, mesh), (0, None)), several, w) == FORWARD


def test_what_is_not_used_has_no_plan():
    mesh, operands = V5E
    unused = mapped(lambda x, w: (summed(x, w), x.sum())[1], mesh)
    assert ringcoll.explain(unused)(*operands).plans == ()


def helped(x):
    return lax.pmean(x, "x")


def of_many(x, w):
    """Calls of every kind, each on a line of its own."""
    y = ringcoll.all_gather_matmul(x, w, "x")
    z = helped(y[:8, 0])
    z = lax.pswapaxes(z, "x", 0)
    z = jax.tree.map(lambda leaf: lax.psum(leaf, "x", algorithm="ring"), [z])[0]
    z += jax.lax.scan(lambda c, rows: (c, lax.pmax(rows, "x")), 0, y[:3, :8])[1].sum()
    z += jax.jit(lambda z: lax.psum_scatter(z, "x", tiled=True))(z).sum()
    out = tensor_parallel.mlp({"up": w, "down": w.T}, x, "x")
    return out.sum() + z.sum()


#: What each line of `of_many` calls, as counted from its `def`.
CALLED = {
    2: "all_gather_einsum",
    -1: "pmean",
    4: "pswapaxes",
    5: "psum",
    6: "pmax",
    7: "psum_scatter",
    8: "einsum_reduce_scatter",
}


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("on_tpus", [False, True])
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_table_has_the_line_of_each_call(around, on_tpus, check_vma):
    mesh = V5E[0] if on_tpus else make_mesh(8)
    of = NamedSharding(mesh, P())
    operands = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=of) for s in ((64, 128), (128, 64))]
    options = {"in_specs": (P("x"), P()), "out_specs": P("x"), "check_vma": check_vma}
    program = jax.shard_map(lambda x, w: of_many(x, w)[None], mesh=mesh, **options)
    told = ringcoll.explain(around(program))(*operands)
    first = inspect.getsourcelines(of_many)[1]
    helper = inspect.getsourcelines(helped)[1] + 1
    calls = [call.split()[0] for call, _ in told.plans]
    found = {*zip(told.lines, calls, strict=True)}
    for after, name in CALLED.items():
        assert (f"test_explain.py:{helper if after < 0 else first + after}", name) in found
    assert {line.split(":")[0] for line in told.lines} == {"test_explain.py"}
    printed = str(told).splitlines()
    assert max(map(len, printed)) <= 105
    assert printed[0].split() == ["line", "call", "form", "us", "next", "best", "the", "built-in"]


def test_a_gradient_is_of_the_line_of_its_call():
    mesh, operands = V5E
    first = inspect.getsourcelines(summed)[1] + 1
    told = ringcoll.explain(jax.grad(mapped(summed, mesh), (0, 1)))(*operands)
    assert told.lines == (f"test_explain.py:{first}",) * 2
    table = " ".join(str(told).split())
    assert "bidirectional_ring 2538 two_ended 2595 3918" in table
    assert "the built-in" in table


def test_a_program_without_calls_says_so():
    total = mapped(lambda x: jax.lax.psum(x, "x"), make_mesh(4))
    told = ringcoll.explain(total)(jnp.ones(4))
    assert (told.plans, told.lines) == ((), ())
    assert str(told) == "the program calls no collective, matmul or layer of ringcoll"


@pytest.mark.parametrize("stage", ["Traced", "Lowered", "Compiled", "int"])
@pytest.mark.parametrize("call", [ringcoll.explain, ringcoll.debug.check_consistent])
def test_what_cannot_be_traced_is_refused(call, stage):
    traced = jax.jit(lambda x: x).trace(jnp.ones(4))
    made = {"Traced": traced, "Lowered": traced.lower(), "int": 3}
    made["Compiled"] = made["Lowered"].compile()
    words = f"{call.__name__}: {stage} is no function that can be traced; pass the function"
    with pytest.raises(TypeError, match=words):
        call(made[stage])
