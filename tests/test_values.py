"""What may be sent: dtypes, constants, keys, pytrees, nothing; and bits that stay bits."""

import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, MAIN, check, first_algorithm, operand
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P
from support import assert_same, make_mesh, per_rank, runnable

import ringcoll.lax
from ringcoll import engine

DTYPES = """bool int4 uint4 int8 uint8 int16 uint16 int32 uint32
    float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz float8_e5m2fnuz bfloat16 float16
    float32 complex64""".split()
WIDE = "int64 uint64 float64 complex128".split()
SUMS = ("psum", "pmean", "pmax", "pmin")


def supported(dtype):
    """The cases that lax can compile on CPU: it adds no bool and orders no complex."""
    without = {"bool": ("psum_scatter",), "complex64": ("pmax", "pmin")}
    without["complex128"] = without["complex64"]
    return [case for case in MAIN if case.name not in without.get(dtype, ())]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    """On a number of ranks that is odd, so that lanes and stages are of odd sizes too."""
    cases = supported(dtype)
    check(make_mesh(3), "x", cases, lambda case, *shape: case.algorithms(*shape)[:2], dtype=dtype)


@pytest.mark.parametrize("dtype", WIDE)
def test_wide_dtypes(dtype):
    with jax.enable_x64(True):
        check(make_mesh(3), "x", supported(dtype), first_algorithm, dtype=dtype)


def test_every_algorithm_with_wide_integers_around(monkeypatch):
    """Under `jax_enable_x64` a Python int is an int64, but a rank is an int32; in loops too."""
    monkeypatch.setattr(engine, "LOOP_FROM", 2)
    with jax.enable_x64(True):
        check(make_mesh(5), "x", MAIN, lambda case, *shape: case.algorithms(*shape))


CONSTANTS = [1, 1.5, True, 2 + 1j, np.float32(2), np.int8(3), np.arange(3, dtype=np.int8), None]


@pytest.mark.parametrize("constant", CONSTANTS, ids=repr)
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_constants_are_constants(name, constant):
    """Of the same Python or NumPy type: `psum(1, axis)` is how programs ask for n, an int."""
    seen = []

    def program(_):
        for module in (ringcoll.lax, lax):
            seen.append(getattr(module, name)(constant, "x"))
        return ()

    jax.make_jaxpr(jax.vmap(program, axis_name="x"))(jnp.zeros(5))
    ours, theirs = seen
    assert type(ours) is type(theirs)
    if not isinstance(theirs, jax.core.Tracer):
        assert_same(ours, theirs)


def test_the_sum_of_one_is_the_number_of_ranks():
    def program(x):
        n = ringcoll.lax.psum(1, "x")
        assert type(n) is int
        return x + n

    assert_same(per_rank(make_mesh(3), program, np.zeros(3)), np.full(3, 3, np.float32))


FLOATS = ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32"]
MOVERS = [c for c in MAIN if c.name not in (*SUMS, "psum_scatter")]


@pytest.mark.parametrize("dtype", FLOATS)
def test_movers_move_bits(dtype):
    """-0.0 stays -0.0 and every NaN the NaN it was: as the same bits sent as integers."""
    mesh, kind = make_mesh(3), jnp.dtype(dtype)
    rng = np.random.default_rng(0)
    unsigned = np.dtype(f"uint{8 * kind.itemsize}")
    special = np.array([-0.0, jnp.nan, -jnp.inf]).astype(kind).view(unsigned)

    def bits(case):
        any_bits = rng.integers(0, 256, (3, *case.shape(3), kind.itemsize), np.uint8)
        made = any_bits.view(unsigned)[..., 0]
        made.reshape(3, -1)[:, : special.size] = special
        return made

    operands = {str(case): bits(case) for case in MOVERS}

    def ours(operands):
        return {
            f"{case} {extra}": case.ours(ringcoll.lax, operands[str(case)], "x", 3, **extra)
            for case in MOVERS
            for extra in case.algorithms(3)
        }

    expected = per_rank(
        mesh, lambda xs: {str(case): case.theirs(xs[str(case)], "x", 3) for case in MOVERS}, operands
    )
    floats = per_rank(mesh, ours, {name: x.view(kind) for name, x in operands.items()})
    for name, result in floats.items():
        (case,) = (case for case in expected if name.startswith(case))
        np.testing.assert_array_equal(np.asarray(result).view(unsigned), expected[case], name)


def test_random_keys():
    """A typed key goes wherever lax takes one, and comes back a key of the same kind."""
    mesh = make_mesh(3)
    key = partial(jax.random.key, impl="rbg")
    cases = [case for case in MOVERS if case.name != "pbroadcast"]

    def program(seed):
        ours, theirs = {}, {}
        for case in cases:
            keys = jax.random.split(key(seed), case.shape(3))
            theirs[str(case)] = jax.random.key_data(case.theirs(keys, "x", 3))
            for extra in case.algorithms(3):
                result = case.ours(ringcoll.lax, keys, "x", 3, **extra)
                assert result.dtype == keys.dtype
                ours[str(case)] = jax.random.key_data(result)
        return ours, theirs

    assert_same(*per_rank(mesh, program, np.arange(3)))


LEAVES = {
    "none": None,
    "deep": [{"f32": np.arange(5, dtype=np.float32)}, (np.arange(4, dtype=np.int8),)],
    "bool": np.array([True, False]),
    "bf16": np.arange(6).reshape(2, 3).astype(jnp.bfloat16),
    "scalar": np.float32(3),
    "of nothing": np.zeros((2, 0), np.float32),
    "large": np.arange(2**15, dtype=np.float32),
    "more": [np.full(k, k, np.float32) for k in range(1, 9)],
}


@pytest.mark.parametrize("name", [*SUMS, "pbroadcast", "all_gather", "ppermute"])
def test_pytrees(name):
    """Small leaves of a dtype travel together; nobody can tell."""
    (case,) = (case for case in MAIN if case.name == name)
    mesh = make_mesh(3)
    each = jax.tree.map(lambda x: np.stack([x * 0 + x, x, x * 0] if x.dtype != bool else [x] * 3), LEAVES)

    def program(tree):
        tree["weak"] = lax.pcast(lax.full((2,), 1.5), "x", to="varying")
        ours = [case.ours(ringcoll.lax, tree, "x", 3, **e) for e in [{}, *case.algorithms(3)[:1]]]
        return ours, [jax.tree.map(lambda x: case.theirs(x, "x", 3), tree)] * len(ours)

    assert_same(*per_rank(mesh, program, each))


def permutes(function, *operands):
    """How many collective-permutes a program on four ranks holds."""
    mapped = jax.shard_map(function, mesh=make_mesh(4), in_specs=P("x"), out_specs=P())
    return jax.jit(mapped).lower(*operands).as_text().count("stablehlo.collective_permute")


def test_small_leaves_share_one_ring():
    psum = partial(ringcoll.lax.psum, axis_name="x", algorithm="ring")
    one = permutes(psum, jnp.zeros(4))
    assert one == 6
    many = [jnp.zeros((4, size)) for size in range(20)]
    assert permutes(psum, many) == one
    assert permutes(psum, [*many, *(x.astype(jnp.int8) for x in many)]) == 2 * one
    assert permutes(lambda xs: [psum(x) for x in xs], many) == 19 * one
    large = jnp.zeros((4, 2**16))
    assert permutes(psum, [*many, large]) == 2 * one


def test_nothing_is_sent_of_nothing():
    assert permutes(partial(ringcoll.lax.psum, axis_name="x", algorithm="ring"), jnp.zeros((4, 0))) == 0


@pytest.mark.parametrize("algorithm", [None, "first"])
def test_of_size_nothing(algorithm):
    """lax cannot compile a psum_scatter of nothing; ours can."""
    mesh = make_mesh(3)
    x = np.zeros((3, 3, 0, 2), np.float32)

    def program(x):
        ours, theirs = {}, {}
        for case in MAIN:
            extra = first_algorithm(case, 3)[0] if algorithm else {}
            ours[case.name] = case.ours(ringcoll.lax, x, "x", 3, **extra)
            theirs[case.name] = case.theirs(x, "x", 3)
        ours["psum_scatter"] = ringcoll.lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True, **extra)
        theirs["psum_scatter"] = x
        return ours, theirs

    assert_same(*per_rank(mesh, program, x))


@given(st.data())
def test_anything(data):
    """Any call of any size and dtype, by any algorithm, anywhere."""
    shape, axes = data.draw(
        st.sampled_from([((3,), "x"), ((4,), "x"), ((2, 2), ("y", "x")), ((3, 2), ("x", "y"))]), "mesh"
    )
    case = data.draw(st.sampled_from(CASES), "case")
    dtype = data.draw(st.sampled_from(["int32", "bfloat16", "float8_e5m2", "float32"]), "dtype")
    lead = data.draw(st.integers(0, 9), "size")
    del lead

    def any_algorithm(case, *shape):
        return [data.draw(st.sampled_from(case.algorithms(*shape)), "algorithm")]

    check(make_mesh(*shape), axes, [case], any_algorithm, dtype=dtype)
