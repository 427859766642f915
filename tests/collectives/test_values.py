"""Operands: dtypes, constants, keys, pytrees, empty arrays; and bits that must not change."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, MAIN, TRACED, check, each_algorithm, first_algorithm
from jax import lax
from jax.sharding import PartitionSpec as P
from support import assert_same, make_mesh, mostly_exhaustive, per_rank

import ringcoll.lax
from ringcoll.runtime import engine

DTYPES = [
    *("bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e5m2fnuz"),
    *("bfloat16", "float16", "float32", "complex64"),
]
WIDE = ["int64", "uint64", "float64", "complex128"]
SUMS = ("psum", "pmean", "pmax", "pmin")


def supported(dtype):
    """The cases that lax can compile on CPU: it does not add bools or order complex numbers."""
    without = {"bool": ("psum_scatter",), "complex64": ("pmax", "pmin")}
    without["complex128"] = without["complex64"]
    return [case for case in MAIN if case.name not in without.get(dtype, ())]


#: Dtypes that are no numbers, or narrower than a byte, or widened by XLA.
USUAL = ("bool", "int4", "bfloat16")


@pytest.mark.parametrize("dtype", mostly_exhaustive(DTYPES, USUAL.__contains__))
def test_dtypes(dtype):
    """On an odd number of ranks, so that lanes and stages have odd sizes too."""
    cases = supported(dtype)
    check(make_mesh(3), "x", cases, lambda case, *shape: case.algorithms(*shape)[:2], dtype=dtype)


@pytest.mark.parametrize("dtype", mostly_exhaustive(WIDE, lambda dtype: dtype == "float64"))
def test_wide_dtypes(dtype):
    with jax.enable_x64(True):
        check(make_mesh(3), "x", supported(dtype), first_algorithm, dtype=dtype)


@pytest.mark.exhaustive
def test_every_algorithm_with_wide_integers_around(monkeypatch):
    """Under `jax_enable_x64` a Python int is an int64, but a rank is an int32; in loops too."""
    monkeypatch.setattr(engine, "UNROLL_UP_TO", 2)
    with jax.enable_x64(True):
        check(make_mesh(5), "x", MAIN, each_algorithm)


CONSTANTS = [1, 1.5, 2 + 1j, np.float32(2), np.int8(3), np.arange(3, dtype=np.int8)]


@pytest.mark.parametrize("constant", CONSTANTS, ids=repr)
@pytest.mark.parametrize("name", ["psum", "pmean"])
def test_sums_of_constants_are_constants(name, constant):
    """They have the types of lax's results, so that `n = psum(1, axis)` stays an int."""
    ours, theirs = (
        traced(lambda: getattr(module, name)(constant, "x"))  # noqa: B023
        for module in (ringcoll.lax, lax)
    )
    assert type(ours) is type(theirs)
    assert not isinstance(ours, jax.core.Tracer)
    np.testing.assert_array_equal(ours, theirs, strict=True)


def traced(function):
    """The result of a function without arguments inside a `shard_map` over five ranks."""
    results = []

    def program():
        results.append(function())
        return ()

    jax.make_jaxpr(jax.shard_map(program, mesh=make_mesh(5), in_specs=(), out_specs=()))()
    return results[0]


def test_the_sum_of_one_is_the_number_of_ranks():
    def program(x):
        n = ringcoll.lax.psum(1, "x")
        assert type(n) is int
        return x + n

    assert_same(per_rank(make_mesh(3), program, np.zeros(3)), np.full(3, 3, np.float32))


MOVERS = [case for case in [*MAIN, TRACED] if case.name not in (*SUMS, "psum_scatter")]


@pytest.mark.parametrize(
    "dtype",
    mostly_exhaustive(
        ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float32"],
        ("bfloat16", "float32").__contains__,
    ),
)
def test_movers_change_no_value(dtype):
    """-0.0 stays -0.0, a NaN some NaN, the smallest subnormal itself; a broadcast keeps bits.

    (XLA:CPU gives all NaNs of bfloat16 the same bits, in lax's own collectives too.)
    """
    mesh, kind = make_mesh(3), jnp.dtype(dtype)
    unsigned = np.dtype(f"uint{8 * kind.itemsize}")
    bits = {str(case): _any_bits((3, *case.shape(3)), unsigned) for case in MOVERS}

    def ours(operands):
        def each(case):
            x = operands[str(case)]
            return [case.ours(ringcoll.lax, x, "x", 3, **extra) for extra in case.algorithms(3)]

        return {str(case): each(case) for case in MOVERS}

    def theirs(operands):
        return {str(case): case.theirs(operands[str(case)], "x", 3) for case in MOVERS}

    floats = {name: x.view(kind) for name, x in bits.items()}
    results = per_rank(mesh, ours, floats)
    for name, expected in per_rank(mesh, theirs, bits).items():
        for result in map(np.asarray, results[name]):
            assert result.dtype == kind
            with np.errstate(invalid="ignore"):  # as NumPy says of some NaNs of bfloat16
                is_nan = (result != result) & (np.asarray(expected).view(kind) != result)
            some_nan = is_nan & (dtype == "bfloat16") & ("pbroadcast" not in name)
            same = result.view(unsigned) == np.asarray(expected)
            assert (same | some_nan).all(), name


def _any_bits(shape, unsigned):
    """Random bits; the first values are the greatest NaN, -0.0 and the smallest subnormal."""
    bits = np.random.default_rng(0).integers(0, np.iinfo(unsigned).max, shape, unsigned)
    largest = np.iinfo(unsigned).max
    bits.reshape(shape[0], -1)[:, :3] = [largest, largest // 2 + 1, 1]
    return bits


def test_random_keys():
    """A typed key goes wherever lax takes one, and comes back as a key of the same kind.

    lax 0.12 cannot compile an all_gather of keys, so the numbers of the keys are compared.
    """
    cases = [case for case in MOVERS if case.name != "pbroadcast"]

    def program(seed):
        ours, theirs = {}, {}
        for case in cases:
            keys = jax.random.split(jax.random.key(seed, impl="rbg"), case.shape(3))
            expected = case.theirs(jax.random.key_data(keys), "x", 3)
            for extra in case.algorithms(3):
                result = case.ours(ringcoll.lax, keys, "x", 3, **extra)
                assert result.dtype == keys.dtype
                ours[f"{case} {extra}"] = jax.random.key_data(result)
                theirs[f"{case} {extra}"] = expected
        return ours, theirs

    assert_same(*per_rank(make_mesh(3), program, np.arange(3)))


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


@pytest.mark.parametrize(
    "name",
    mostly_exhaustive(
        [*SUMS, "pbroadcast", "all_gather", "ppermute"], ("psum", "pmin", "all_gather").__contains__
    ),
)
def test_pytrees(name):
    """Small leaves of a dtype share messages, and results do not show it."""
    case = next(c for c in CASES if c.name == name and c.options(3).get("axis", 0) == 0)

    def of_three(x):
        """(0 - x instead of -x: of zeros of both signs, either may be the least.)"""
        return np.stack([x, x + x, x & x if x.dtype == bool else np.zeros_like(x) - x])

    on_ranks = jax.tree.map(of_three, LEAVES)

    def program(tree):
        tree["weak"] = lax.pcast(lax.full((2,), 1.5), "x", to="varying")
        tree["same on all ranks"] = jnp.zeros(3) if name != "pbroadcast" else None
        extras = [{}, *case.algorithms(3)[:1]]
        ours = [case.ours(ringcoll.lax, tree, "x", 3, **extra) for extra in extras]
        return ours, [jax.tree.map(lambda x: case.theirs(x, "x", 3), tree)] * len(ours)

    assert_same(*per_rank(make_mesh(3), program, on_ranks))


def permutes(function, *operands):
    """How many collective-permutes a program on four ranks has."""
    mapped = jax.shard_map(function, mesh=make_mesh(4), in_specs=P("x"), out_specs=P())
    return jax.jit(mapped).lower(*operands).as_text().count("stablehlo.collective_permute")


def test_small_leaves_share_one_ring():
    psum = partial(ringcoll.lax.psum, axis_name="x", algorithm="ring")
    one = permutes(psum, jnp.zeros(4))
    assert one == 6
    many = [np.zeros((4, size), np.float32) for size in range(20)]
    assert permutes(psum, many) == one
    assert permutes(psum, [*many, *(x.astype(jnp.int8) for x in many)]) == 2 * one
    large = jnp.zeros((4, 2**18))
    assert permutes(psum, [*many, large]) == 2 * one


def test_nothing_is_sent_of_nothing():
    psum = partial(ringcoll.lax.psum, axis_name="x", algorithm="ring")
    assert permutes(psum, jnp.zeros((4, 0))) == 0


def test_of_no_elements():
    """lax cannot compile a psum_scatter along a dimension of size 0; ours can."""
    along = {"scatter_dimension": 2, "tiled": True}

    def program(x):
        ours, theirs = {}, {}
        for case in MAIN:
            for extra in [{}, *first_algorithm(case, 3)]:
                theirs[f"{case} {extra}"] = case.theirs(x, "x", 3)
                ours[f"{case} {extra}"] = case.ours(ringcoll.lax, x, "x", 3, **extra)
        for algorithm in ("auto", "ring"):
            theirs[algorithm] = x
            ours[algorithm] = ringcoll.lax.psum_scatter(x, "x", **along, algorithm=algorithm)
        return ours, theirs

    assert_same(*per_rank(make_mesh(3), program, np.zeros((3, 3, 3, 0), np.float32)))
