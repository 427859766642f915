"""Operands: dtypes, constants, keys, pytrees, empty arrays; and bits that must not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import MAIN, TRACED, check, first_algorithm
from jax import lax
from support import assert_same, data, make_mesh, mostly_exhaustive, per_rank

import ringcoll.lax

DTYPES = ["int4", "uint4", "int8", "uint8", "int16", "uint16", "uint32"]
DTYPES += ["float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2fnuz", "float16"]
WIDE = ["int64", "uint64", "float64", "complex128"]


@pytest.mark.parametrize(
    "dtype", mostly_exhaustive([*DTYPES, *WIDE], ("int4", "float16", "float64").__contains__)
)
def test_dtypes_that_tables_of_calls_do_not_have(dtype):
    """On an odd number of ranks, so that lanes and stages have odd sizes too."""
    cases = [case for case in MAIN if dtype != "complex128" or case.name not in ("pmax", "pmin")]
    with jax.enable_x64(dtype in WIDE):
        check(make_mesh(3), cases, first_algorithm, dtype=dtype)


SUMS = ("psum", "pmean", "pmax", "pmin", "psum_scatter")
MOVERS = [case for case in [*MAIN, TRACED] if case.name not in SUMS]


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

    floats = {name: x.view(kind) for name, x in bits.items()}
    results = per_rank(mesh, ours, floats)
    for case in MOVERS:
        name = str(case)
        expected = case.expected(bits[name])
        for result in map(np.asarray, results[name]):
            assert result.dtype == kind
            with np.errstate(invalid="ignore"):  # as NumPy says of some NaNs of bfloat16
                is_nan = (result != result) & (expected.view(kind) != result)
            some_nan = is_nan & (dtype == "bfloat16") & ("pbroadcast" not in name)
            same = result.view(unsigned) == expected
            assert (same | some_nan).all(), name


def _any_bits(shape, unsigned):
    """Random bits; the first values are the greatest NaN, -0.0 and the smallest subnormal."""
    bits = np.random.default_rng(0).integers(0, np.iinfo(unsigned).max, shape, unsigned)
    largest = np.iinfo(unsigned).max
    bits.reshape(shape[0], -1)[:, :3] = [largest, largest // 2 + 1, 1]
    return bits


@pytest.mark.parametrize(
    "form",
    [
        lambda: np.array([[0, 2], [1, 3]]),
        lambda: [np.array([0, 2]), range(1, 4, 2)],
        lambda: {(0, 2), (1, 3)},
        lambda: {"even": [0, 2], "odd": [1, 3]}.values(),
        lambda: (iter(group) for group in [[np.int8(0), 2], [True, 3]]),  # of psum lax takes none
    ],
)
def test_groups_may_have_any_form_that_lax_takes(form):
    """They are read once, so that all leaves have the same groups."""
    calls = {
        **{name: {} for name in ("psum", "pmean", "pmax", "all_gather")},
        "pswapaxes": {"axis": 0},
        "psum_scatter": {"tiled": True},
        "all_to_all": {"split_axis": 0, "concat_axis": 1, "tiled": True},
    }

    def of(module, groups):
        def program(x):
            results = {}
            for name, call in calls.items():
                call = call | {"axis_index_groups": groups()}
                results[name] = getattr(module, name)([x, 2 * x], "x", **call)
            return results

        return program

    x = data((4, 2, 2))
    ours = per_rank(make_mesh(4), of(ringcoll.lax, form), x, check_vma=False)
    theirs = of(lax, lambda: [[0, 2], [1, 3]])
    assert_same(ours, per_rank(make_mesh(4), theirs, x, check_vma=False))
