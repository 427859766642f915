"""Counts of collectives, and what a program sends without need: programs of CPUs, each by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from ringcoll import overlap
from ringcoll.overlap.counts import in_lines

MESH = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)


def lowered(function, *operands, ins=P("data", "model"), outs=P("data")):
    mapped = jax.shard_map(function, mesh=MESH, in_specs=ins, out_specs=outs, check_vma=False)
    return jax.jit(mapped).lower(*(operands or (jnp.ones((8, 16)),)))


def partitioned():
    """A step whose partitioner adds collectives, in a loop of five turns too."""

    def step(x, w, v):
        def turn(h, _):
            return lax.with_sharding_constraint(
                jnp.tanh(h @ v), NamedSharding(MESH, P("data"))
            ), None

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
        lambda: lowered(lambda x: lax.psum(x, ("data", "model")), outs=P()),
        [("all-reduce", 1, 2 * 7 / 8 * 64, ("data", "model"), "the program")],
    ),
    "a ring": (
        lambda: lowered(lambda x: ringcoll.all_gather(x, "data", algorithm="ring")),
        [("collective-permute", 1, 64, ("data",), "ringcoll")],
    ),
    "a loop": (
        lambda: lowered(
            lambda x: lax.scan(lambda c, _: (lax.pmax(c + 1, "data"), None), x, length=3)[0]
        ),
        [("all-reduce", 3, 64, ("data",), "the program")],
    ),
    "nothing": (lambda: lowered(lambda x: 2 * x), []),
    "what the partitioner adds": (
        partitioned,
        [
            ("all-reduce", 5, 2 * 3 / 4 * 8 * 64 * 4, ("model",), "the partitioner"),
            ("all-reduce", 1, 4, ("data",), "the partitioner"),
        ],
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_collectives_of_a_program(name):
    make, expected = COUNTED[name]
    rows = overlap.collectives(make())
    assert [(row.kind, row.count, row.bytes, row.axes, row.asked) for row in rows] == expected
    assert all(row.at.startswith("test_overlap_counts.py:") for row in rows)
    assert overlap.collectives(make().compile().as_text(), mesh=MESH) == rows
    counts, sent = {}, {}
    for kind, count, size, *_ in expected:
        counts[kind] = counts.get(kind, 0) + count
        sent[kind] = sent.get(kind, 0) + count * size
    overlap.assert_collectives(make(), counts, sent)
    overlap.assert_collectives(make().compile(), counts)


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
    assert in_lines(()) == ["the program has no collective"]


def gathered(x):
    return lax.all_gather(x, "model", tiled=True)


def own_block(x):
    return lax.dynamic_slice_in_dim(x, lax.axis_index("model"), 1, 1)


#: Programs with a fault (what it is, and its bytes), and the same without.
FAULTS = {
    "summed again": (lambda x: lax.psum(2 * lax.psum(x, "model"), "model"), 96),
    "a mean of a mean": (lambda x: lax.pmean(3 * lax.pmean(x, ("data", "model")), "model"), 96),
    "a sum of what is gathered": (lambda x: lax.psum(gathered(x), "model"), 384),
    "a slice of a sum": (lambda x: 2 * own_block(lax.psum(x, "model")), 96),
    "the first columns of a sum": (lambda x: lax.psum(x, "model")[:, :2], 96),
    "gathered twice": (lambda x: (gathered(x), gathered(lax.optimization_barrier(x)) + 1), 192),
    "gathered twice, in two dtypes": (
        lambda x: (gathered(x), gathered(x.astype(jnp.float16).astype(jnp.float32))), 192
    ),
}  # fmt: skip
FINE = {
    "sums over two axes": lambda x: lax.psum(2 * lax.psum(x, "model"), "data"),
    "a sum of what differs": lambda x: lax.psum(
        lax.psum(x, "model") * lax.axis_index("model"), "model"
    ),
    "a sum of a block of a sum": lambda x: lax.psum(own_block(lax.psum(x, "model")), "model"),
    "most of a sum": lambda x: lax.psum(x, "model")[:, :3],
    "a sum and its slice": lambda x: (total := lax.psum(x, "model"), total[:, :1]),
    "two gathers": lambda x: (gathered(x), lax.all_gather(x, "data", tiled=True)),
    "gathers of two operands": lambda x: (gathered(x), gathered(x + 1)),
    "a gather in each pass": lambda x: jax.grad(
        jax.checkpoint(lambda x: jnp.sum(jnp.sin(gathered(x)) ** 2))
    )(x),
    "a maximum of a sum": lambda x: lax.pmax(lax.psum(x, "model"), "model"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name):
    function, size = FAULTS[name]
    found = overlap.waste(lowered(function))
    whats = [one.what for one in found]
    assert (whats, found[0].bytes, found[0].seconds) == (whats[:1], size, 0)
    kind = "gathered twice" if "twice" in name else "a slice of a sum"
    assert whats[0] == (
        kind
        if "twice" in name or ("a sum" in name[6:] and "gathered" not in name)
        else "summed again"
    )
    assert "test_overlap_counts.py:" in str(found[0])
    assert "'model'" in found[0].cure
    timed = overlap.waste(lowered(function), chip="v5e")
    assert timed[0].seconds > 0


@pytest.mark.parametrize("name", FINE)
def test_what_is_needed_is_no_fault(name):
    assert overlap.waste(lowered(FINE[name])) == ()
