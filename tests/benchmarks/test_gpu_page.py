"""The programs of `benchmarks/pages/gpus.md`, by their claims."""

from collections import defaultdict

import pytest

from benchmarks.compiled import pages, recorded_claims
from benchmarks.compiled.switch_forms import FORMS, SWITCH_FORMS

BUILT_IN = ("plain", "compiler", "compiler/tuned")
#: Where a hop is shorter than its product.
SHORT_HOPS = ("131072x8192x28672",)


def totals():
    """Microseconds by algorithm, for each topology, form and shape of the page."""
    named = {w for t in pages.tables() if t.page.endswith("gpus.md") for w in t.programs()}
    found = defaultdict(dict)
    for claim in recorded_claims.load():
        if claim.which in named:
            flags = dict(claim.which.flags)
            key = flags["topology"], flags["form"], flags["shape"]
            found[key][flags["algorithm"]] = claim.total_us
    return found


def test_auto_is_in_no_program_slower_than_the_built_in():
    found = totals()
    assert len(found) == 18
    for key, by in found.items():
        assert by["auto"] <= 1.05 * min(by[name] for name in BUILT_IN if name in by), key


def test_chunks_are_faster_where_their_collectives_are_shorter_than_their_products():
    by = totals()["h100:8", "all_gather_matmul", "8192x8192x28672"]
    assert by["plain"] > 1.15 * by["chunks8"]
    assert by["plain"] < by["grouped"]


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("name", SWITCH_FORMS)
def test_forms_for_a_switch_are_right(name, n):
    """The data are whole numbers, so results are exact. All ranks are compared."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P
    from support import make_mesh

    rows = jnp.arange(8 * n * 3 * n).reshape(8 * n, 3 * n) % 7 - 3
    w = jnp.arange(3 * n * 2 * n).reshape(3 * n, 2 * n) % 5 - 2
    specs = {
        FORMS[0]: ((P("x"), P(None, "x")), P(None, "x")),
        FORMS[1]: ((P(None, "x"), P("x")), P("x")),
    }
    for form, (ins, out) in specs.items():
        mapped = jax.shard_map(
            SWITCH_FORMS[name][form], mesh=make_mesh(n), in_specs=ins, out_specs=out
        )
        np.testing.assert_array_equal(jax.jit(mapped)(rows, w), rows @ w)
