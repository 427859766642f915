"""Options together: every algorithm, also the built-ins, with wide sums, groups and gradients.

The sums of the data are exact in the wide dtype, but not in their own. So only one result is right:
jax.lax's result for the wide operand, rounded once. All ranks are compared, forward and backward.
(XLA:CPU always adds bfloat16 in float32. It does not add float32 in float64.)
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import assert_same, distinct, make_mesh, mostly_exhaustive, per_rank

import ringcoll
from ringcoll.collectives.table import choices

WIDER = {"bfloat16": "float32", "float32": "float64"}
GROUPS = {
    "none": None,
    "even": [[3, 0, 5, 6], [2, 7, 4, 1]],
    "uneven": [[2, 6, 1], [3, 0, 5, 4, 7]],  # which lax does, and of all-reduces alone
}

#: The operand's shape in groups of n, and the call of either module.
SUMS = {
    "all_gather": (
        lambda n: (30, 2),
        lambda m, x, **options: m.all_gather(x, "x", axis=1, **options),
    ),
    "all_gather tiled": (
        lambda n: (30, 2),
        lambda m, x, **options: m.all_gather(x, "x", axis=1, tiled=True, **options),
    ),
    "psum_scatter": (
        lambda n: (30, n),
        lambda m, x, **options: m.psum_scatter(x, "x", scatter_dimension=1, **options),
    ),
    "psum_scatter tiled": (
        lambda n: (2 * n, 30),
        lambda m, x, **options: m.psum_scatter(x, "x", tiled=True, **options),
    ),
    "psum": (lambda n: (30, 2), lambda m, x, **options: m.psum(x, "x", **options)),
    "pmean": (lambda n: (30, 2), lambda m, x, **options: m.pmean(x, "x", **options)),
}


def every(collective, n):
    """All algorithms that can run on n ranks: "auto", the schedules, the built-ins."""
    kinds = {"schedules": distinct(collective, n), "built-ins": ["lax"]}
    known = [
        name
        for name in choices(collective)
        if name.partition("+")[0] in kinds["schedules"] or name.startswith("lax")
    ]
    assert {"ring", *kinds["built-ins"]} <= {*known}
    return [{}, *({"algorithm": name} for name in known)]


def there_and_back(call, x, ct):
    """The result, and the gradient for a cotangent."""
    y, pull_back = jax.vjp(call, x)
    return [y, *pull_back(jnp.resize(ct, y.shape).astype(y.dtype))]


def is_usual(name, dtype, groups):
    """Each collective, each dtype and each kind of groups, once."""
    return (name, dtype, groups) in [
        ("all_gather", "bfloat16", "none"),
        ("psum_scatter tiled", "float32", "none"),
        ("psum", "float32", "none"),
        ("pmean", "float32", "even"),
        ("psum", "float32", "uneven"),
    ]


@pytest.mark.parametrize(
    ("name", "dtype", "groups"),
    mostly_exhaustive(
        [
            *((name, dtype, "none") for name in SUMS for dtype in WIDER),
            *((name, "float32", "even") for name in SUMS),
            *((name, "float32", "uneven") for name in ("psum", "pmean")),
        ],
        is_usual,
    ),
)
def test_sums_are_wide_by_every_algorithm_forward_and_back(name, dtype, groups):
    members, (shape, call) = GROUPS[groups], SUMS[name]
    n, ranks = 4, 4 if members is None else 8
    grouped = {} if members is None else {"axis_index_groups": members}
    collective = {"pmean": "psum"}.get(name, name.partition(" ")[0])
    variants = [{}] if groups == "uneven" else every(collective, n)
    wide = {"accumulate_dtype": WIDER[dtype]}

    def program(x, ct):
        by_lax = there_and_back(
            lambda x: call(lax, x, **grouped), x.astype(WIDER[dtype]), ct.astype(WIDER[dtype])
        )
        by_us = {
            str(options): there_and_back(
                lambda x, options=options: call(ringcoll, x, **grouped, **options), x, ct
            )
            for options in [*({**options, **wide} for options in variants), variants[-1]]
        }
        return by_us, [y.astype(dtype) for y in by_lax]

    # All integers that the dtype has, of either sign: their sums have more digits.
    most = 2 ** (int(jnp.finfo(dtype).nmant) + 1)
    rng = np.random.default_rng(0)
    x, ct = (rng.integers(-most, most, (ranks, *of)).astype(dtype) for of in (shape(n), (290,)))
    with jax.enable_x64(True):
        results, right = per_rank(make_mesh(ranks), program, x, ct, check_vma=False)
    narrow = results.pop(str(variants[-1]))
    for options, ours in results.items():
        assert_same({options: ours}, {options: right})
    if dtype == "float32":  # or this would say nothing
        assert any((np.asarray(a) != b).any() for a, b in zip(narrow, right, strict=True))
