"""Counts of collectives, and what a program sends without need: programs of CPUs, each by hand."""

import jax
import jax.numpy as jnp
import pytest
from hlo_texts import SHAPE, blocking, computation, program
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from ringcoll import overlap

PARTITIONER = "the partitioner"
MESH = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)


def lowered(function):
    """A program on a shard of [4, 4] of each rank."""
    specs = {"in_specs": P("data", "model"), "out_specs": P("data")}
    mapped = jax.shard_map(function, mesh=MESH, **specs, check_vma=False)
    return jax.jit(mapped).lower(jnp.ones((8, 16)))


def on_one_axis(function):
    """The same; another mesh shards the operand, and what becomes of it."""
    along = NamedSharding(jax.make_mesh((8,), ("d",), (AxisType.Auto,)), P("d"))
    spec = P(("data", "model"))
    mapped = jax.shard_map(function, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=False)
    resharded = jax.jit(lambda x: lax.with_sharding_constraint(mapped(x), along))
    return resharded.lower(jax.ShapeDtypeStruct((32, 4), jnp.float32, sharding=along))


def partitioned():
    """A step whose partitioner adds collectives, in a loop of five turns too."""

    def step(x, w, v):
        def turn(h, _):
            sharding = NamedSharding(MESH, P("data"))
            return lax.with_sharding_constraint(jnp.tanh(h @ v), sharding), None

        return jnp.sum(lax.scan(turn, jnp.tanh(x @ w), length=5)[0] ** 2)

    def like(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, P(*spec)))

    x, w, v = like((16, 32), "data"), like((32, 64), None, "model"), like((64, 64), "model", None)
    return jax.jit(step).lower(x, w, v)


#: Programs; and for each collective: its kind, how often it runs, bytes, axes, and who asked.
COUNTED = {
    "a sum": (
        lambda: lowered(lambda x: lax.psum(x, "model")),
        [("all-reduce", 1, 2 * 3 / 4 * 64, ("model",), "the program")],
    ),
    "a sum over both axes": (
        lambda: lowered(lambda x: lax.psum(x, ("data", "model"))),
        [("all-reduce", 1, 2 * 7 / 8 * 64, ("data", "model"), "the program")],
    ),
    "a ring": (
        lambda: lowered(lambda x: ringcoll.all_gather(x, "data", algorithm="ring")),
        [("collective-permute", 1, 64, ("data",), "ringcoll")],
    ),
    "a loop": (
        lambda: lowered(lambda x: lax.fori_loop(0, 3, lambda _, x: lax.pmax(x + 1, "data"), x)),
        [("all-reduce", 3, 64, ("data",), "the program")],
    ),
    "nothing": (lambda: lowered(lambda x: 2 * x), []),
    "a loop whose turns are not known, and sends nothing": (
        lambda: lowered(
            lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, lax.pmax(x, "data"))
        ),
        [("all-reduce", 1, 64, ("data",), "the program")],
    ),
    "axes that only the shard_map names": (
        lambda: on_one_axis(lambda x: lax.psum(x, "model")),
        [("all-reduce", 1, 2 * 3 / 4 * 64, ("model",), "the program")],
    ),
    "all axes that only the shard_map names": (
        lambda: on_one_axis(lambda x: lax.psum(x, ("data", "model"))),
        [("all-reduce", 1, 2 * 7 / 8 * 64, ("data", "model"), "the program")],
    ),
    "a ring along an axis that only the shard_map names": (
        lambda: on_one_axis(lambda x: ringcoll.all_gather(x, "model", algorithm="ring")),
        [("collective-permute", 1, 64, ("model",), "ringcoll")] * 3,
    ),
    "a loop's condition": (
        lambda: lowered(
            lambda x: lax.while_loop(lambda c: lax.psum(c.sum(), "model") < 9, lambda c: c + 1, x)
        ),
        [("all-reduce", 2, 2 * 3 / 4 * 4, ("model",), "the program")],
    ),
    "a part of an axis": (
        lambda: jax.jit(
            lambda x: x.reshape(2, 4, 16).sum(1),
            in_shardings=NamedSharding(MESH, P("model")),
            out_shardings=NamedSharding(MESH, P()),
        ).lower(jnp.ones((8, 16))),
        [
            ("all-reduce", 1, 2 * 1 / 2 * 64, ("model",), PARTITIONER),
            ("all-gather", 1, 64, ("model",), PARTITIONER),
        ],
    ),
    "what the partitioner adds": (
        partitioned,
        [
            ("all-reduce", 5, 2 * 3 / 4 * 8 * 64 * 4, ("model",), PARTITIONER),
            ("all-reduce", 1, 2 * 3 / 4 * 4, ("model",), PARTITIONER),
            ("all-reduce", 1, 4, ("data",), PARTITIONER),
        ],
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_collectives_of_a_program(name):
    make, expected = COUNTED[name]
    allowed = {"allow_unread": "while*" if "condition" in name else ()}
    rows = overlap.collectives(make(), **allowed)
    assert [(row.kind, row.count, row.bytes, row.axes, row.asked) for row in rows] == expected
    ours = [row for row in rows if row.asked != PARTITIONER]
    assert all(row.at.startswith("test_overlap_counts.py:") for row in ours)
    assert overlap.collectives(make().compile().as_text(), mesh=MESH, **allowed) == rows
    counts, sent = {}, {}
    for kind, count, size, *_ in expected:
        counts[kind] = counts.get(kind, 0) + count
        sent[kind] = sent.get(kind, 0) + count * size
    overlap.assert_collectives(make(), counts, sent, **allowed)
    overlap.assert_collectives(make().compile(), counts, **allowed)


def test_a_failure_lists_what_is_there():
    program = COUNTED["a sum"][0]()
    with pytest.raises(AssertionError) as failure:
        overlap.assert_collectives(program, {"all-gather": 2}, {"all-gather": 5})
    lines = str(failure.value).splitlines()
    assert lines[:3] == [
        "all-gather runs 0 times, not 2",
        "all-gather sends 0 bytes, not 5",
        "all-reduce runs 1 times, not 0",
    ]
    assert lines[-1].split() == (
        ["1", "96", "model", "the", "program", "all-reduce", *lines[-1].split()[6:]]
    )
    assert lines[-1].endswith(" psum")
    with pytest.raises(AssertionError, match="all-reduce sends 96 bytes, not 95"):
        overlap.assert_collectives(program, {"all-reduce": 1}, bytes={"all-reduce": 95})
    with pytest.raises(ValueError, match="did you mean 'all-reduce'"):
        overlap.assert_collectives(program, {"all_reduce": 1})
    for wrong in (None, "all-reduce", {"all-reduce": "1"}):
        with pytest.raises(TypeError, match="is not a mapping from kinds to numbers"):
            overlap.assert_collectives(program, wrong)
    with pytest.raises(AssertionError, match="not 1\n\nthe program has no collective"):
        overlap.assert_collectives(COUNTED["nothing"][0](), {"all-reduce": 1})


def gathered(x):
    return lax.all_gather(x, "model", tiled=True)


def own_block(x):
    return lax.dynamic_slice_in_dim(x, lax.axis_index("model"), 1, 1)


TWICE, AGAIN, SLICE = "gathered twice", "summed again", "a slice of a sum"
#: Programs with a fault: what it is, and its bytes.
FAULTS = [
    (lambda x: lax.psum(2 * lax.psum(x, "model"), "model"), AGAIN, 96),
    (lambda x: lax.pmean(3 * lax.pmean(x, ("data", "model")), "model"), AGAIN, 96),
    (lambda x: lax.psum(gathered(x), "model"), AGAIN, 384),
    (lambda x: 2 * own_block(lax.psum(x, "model")), SLICE, 96),
    (lambda x: lax.psum(x, "model")[:, :2], SLICE, 96),
    (lambda x: (gathered(x).sum(0), gathered(x.reshape(2, 8)).reshape(16, 4) + 1), TWICE, 192),
]
#: Programs without one.
FINE = {
    "sums over two axes": lambda x: lax.psum(2 * lax.psum(x, "model"), "data"),
    "a sum of what differs": lambda x: lax.psum(
        lax.psum(x, "model") * lax.axis_index("model"), "model"
    ),
    "most of a sum": lambda x: lax.psum(x, "model")[:, :3],
    "a sum and its slice": lambda x: (total := lax.psum(x, "model"), total[:, :1]),
    "two gathers": lambda x: (gathered(x), lax.all_gather(x, "data", tiled=True)),
    "gathers of two operands": lambda x: (gathered(x), gathered(x + 1)),
    "a gather in each pass": lambda x: jax.grad(
        jax.checkpoint(lambda x: jnp.sum(jnp.sin(gathered(x)) ** 2))
    )(x),
    "a slice that each rank chooses by its data": lambda x: lax.dynamic_slice_in_dim(
        lax.psum(x, "model"), x[0, 0].astype(int), 1, 0
    ),
    "a gather in each pass, fused": lambda x: jax.grad(
        lambda w: jnp.mean(jax.checkpoint(lambda w: jnp.tanh(gathered(w)))(w) ** 2)
    )(x),
    "two narrowings": lambda x: (gathered(x.astype(jnp.int8)), gathered(x.astype(jnp.bfloat16))),
    "a narrow sum": lambda x: 2 * lax.psum(x.astype(jnp.bfloat16), "model"),
    "a sum that is narrowed": lambda x: lax.psum(x, "model").astype(jnp.float16).T,
    "a maximum of a sum": lambda x: lax.pmax(lax.psum(x, "model"), "model"),
}


@pytest.mark.parametrize(("function", "what", "size"), FAULTS)
def test_a_fault_is_found(function, what, size):
    (found,) = overlap.waste(lowered(function))
    assert (found.what, found.bytes, found.seconds) == (what, size, 0)
    assert str(found).startswith(f"{what}: test_overlap_counts.py:")
    assert "'model'" in found.cure
    (timed,) = overlap.waste(lowered(function), chip="v5e")
    assert timed.seconds > 0


@pytest.mark.parametrize("name", FINE)
def test_what_is_needed_is_no_fault(name):
    assert overlap.waste(lowered(FINE[name])) == ()


@pytest.mark.parametrize(("second", "found"), [("jvp()/dot", 1), ("transpose(jvp())/dot", 0)])
def test_passes_are_told_by_the_products_behind_a_conversion(second, found):
    """The fusions convert and turn. Of the products, one is of the forward pass."""
    names = {"u": "jvp()/dot", "v": second}
    lines = []
    for i, name in names.items():
        lines += [
            blocking("all-gather", groups="{{0,1}}").replace("all-gather.1", f"g{i}"),
            f"%f{i} = {SHAPE} fusion(%g{i}), kind=kLoop, calls=%narrow",
            f"%d{i} = {SHAPE} fusion(%f{i}, %w), kind=kOutput, calls=%product{i}, "
            f'metadata={{op_name="{name}"}}',
        ]
    turned = f'%t = {SHAPE} transpose(%p), dimensions={{1,0}}, metadata={{op_name="jvp()/mul"}}'
    before = computation("narrow", {"p": SHAPE}, turned)
    for i, name in names.items():
        product = f'%dot = {SHAPE} dot(%a, %b), metadata={{op_name="{name}"}}'
        before += computation(f"product{i}", {"a": SHAPE, "b": SHAPE}, product)
    text = program(*lines, f"%r = {SHAPE} add(%du, %dv)", ranks=2, before=before)
    assert [fault.what for fault in overlap.waste(text)] == [TWICE] * found


def test_waste_of_a_long_program_takes_no_time():
    """Each of 200 fusions has two operands: the two before it."""
    added = f"%s = {SHAPE} add(%p, %q)"
    total = "%k = f32[] add(%i, %j)"
    sums = computation("sums", {"i": "f32[]", "j": "f32[]"}, total)
    groups = "replica_groups={{0,1,2,3}}"
    lines = [f"%f0 = {SHAPE} all-reduce(%x), {groups}, to_apply=%sums", f"%f1 = {SHAPE} copy(%f0)"]
    for i in range(2, 200):
        lines += [f"%f{i} = {SHAPE} fusion(%f{i - 1}, %f{i - 2}), kind=kLoop, calls=%added"]
    before = sums + computation("added", {"p": SHAPE, "q": SHAPE}, added)
    assert overlap.waste(program(*lines, before=before)) == ()


@pytest.mark.parametrize("read", [overlap.collectives, overlap.waste, overlap.report])
def test_garbled_texts_end_in_words(read):
    text = COUNTED["a loop"][0]().compile().as_text()
    without_body = text[: text.index("\n\n%")] + text[text.index("\nENTRY") :]
    for wrong in (without_body, text.replace("num_partitions=8", "num_partitions=99999999999")):
        with pytest.raises(overlap.HloError):
            read(wrong)


def test_sums_over_groups_that_cross_are_no_fault():
    """After the second sum, the ranks of a pair of the first no longer have the same."""
    pairs, crossing = [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2], [1, 4], [3, 6], [5, 7]]

    def program(x):
        for groups in (pairs, crossing, pairs):
            x = jnp.sin(lax.psum(x, "z", axis_index_groups=groups))
        return x

    mesh = jax.make_mesh((8,), ("z",), (AxisType.Auto,))
    mapped = jax.shard_map(program, mesh=mesh, in_specs=P("z"), out_specs=P("z"), check_vma=False)
    assert overlap.waste(jax.jit(mapped).lower(jnp.ones((8, 16)))) == ()
