"""What attention over ranks sends and keeps, counted in its programs; what it takes for "auto"."""

import re
from functools import partial
from importlib.util import find_spec
from itertools import product

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from operations import hops
from support import make_mesh, mostly_exhaustive, with_gradients

import ringcoll
from ringcoll import overlap
from ringcoll.choose.plan import Heads
from ringcoll.layers import context_parallel as cp
from ringcoll.layers.context_parallel.auto import OF_SCORE, Attention, fastest, plans
from ringcoll.layers.context_parallel.tiles import Mask

TOPOLOGIES = {2: "v5e:2x1", 4: "v5e:2x2", 8: "v5e:4x2", 16: "v5e:4x4"}


def attention(mesh, **options):
    spec = P(None, "x")
    attend = partial(cp.attention, axis_name="x", causal=True, **options)
    return jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_keys_travel_once_forward_and_again_with_their_gradients_backward(n):
    """n - 1 hops forward. Backward n - 1 hops of keys and n - 1 of gradients, the last one home."""
    q, k = jnp.ones((1, 8 * n, 4, 4)), jnp.ones((1, 8 * n, 2, 4))
    attend = attention(make_mesh(n), algorithm="ring", layout="zigzag")
    forward = jax.make_jaxpr(attend)(q, k, k)
    assert hops(forward.jaxpr) == n - 1
    both = jax.make_jaxpr(with_gradients(attend))(q, k, k)
    assert hops(both.jaxpr) == 3 * (n - 1)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="its XLA:CPU drops barriers too early")
def test_what_travels_backward_is_not_kept_from_the_forward_pass():
    """The compiled program sends keys twice; one that sent them once would hold all shards."""
    q, k = jnp.ones((1, 32, 4, 4)), jnp.ones((1, 32, 2, 4))
    attend = attention(make_mesh(4), algorithm="ring", layout="zigzag")
    text = jax.jit(with_gradients(attend)).lower(q, k, k).compile().as_text()
    assert len(re.findall(r" collective-permute(?:-start)?\(", text)) == 9


def test_shards_that_no_query_sees_are_not_sent():
    """A window of one shard: one round forward, and backward one there and one back."""
    x = jnp.ones((1, 64, 2, 4))
    attend = attention(make_mesh(8), algorithm="ring", window=8)
    assert hops(jax.make_jaxpr(attend)(x, x, x).jaxpr) == 1
    assert hops(jax.make_jaxpr(with_gradients(attend))(x, x, x).jaxpr) == 3


@pytest.mark.tpu_aot
@pytest.mark.skipif(
    find_spec("libtpu") is None, reason="libtpu is not installed: pip install -e '.[tpu]'"
)
@pytest.mark.parametrize(
    ("n", "gradients"),
    mostly_exhaustive(
        product(TOPOLOGIES, [False, True]), lambda n, gradients: n == 4 and gradients
    ),
)
def test_a_rank_holds_its_shard_what_travels_and_its_sums(n, gradients):
    """Temporaries of the compiled program, for 2048 positions a rank and any number of ranks."""
    part, heads, groups, d = 2048, 8, 2, 128
    topology = TOPOLOGIES[n]
    mesh = ringcoll.mesh(topology, x=n)
    sharding = jax.NamedSharding(mesh, P(None, "x"))
    q, k = (
        jax.ShapeDtypeStruct((1, n * part, count, d), jnp.bfloat16, sharding=sharding)
        for count in (heads, groups)
    )
    attend = attention(mesh, algorithm="ring", layout="zigzag")
    function = with_gradients(attend) if gradients else attend
    seen = overlap.report(overlap.compile_for(topology, function, q, k, k))
    queries, keys = (2 * part * count * d for count in (heads, groups))  # bytes
    own = 2 * queries + 2 * keys  # with the result, or its cotangent
    wire = 2 * 2 * keys  # the shard that has arrived, and the next one
    sums = 2 * queries  # in float32, as all sums
    if gradients:
        own += queries
        wire += 2 * 2 * 2 * keys  # gradients that have arrived, and those that are sent
        sums += 2 * 2 * keys
    assert seen.temporaries <= 1.1 * (own + wire + sums)
    if n > 2:  # one of two visits cannot hide the hop home
        assert seen.exposed_share <= (0.06 if gradients else 0.03)


# -- what "auto" is, by its price --


def attended(sizes=(8,), layout="contiguous", length=512, groups=8, window=None):
    return Attention(sizes, layout, Mask(True, window), 1, length, 32, groups, (128, 128), 2)


def prices(*options, **more):
    attention = attended(*options, **more)
    found = {(plan.algorithm, plan.form): plan for plan in plans(attention, "TPU v5 lite")}
    return found, fastest(attention, "TPU v5 lite")


def test_auto_takes_what_its_price_says():
    for layout in ("contiguous", "zigzag", "striped"):
        for length in (512, 4096, 16384):
            for groups in (8, 2):
                found, chosen = prices((8,), layout, length, groups)
                assert chosen.seconds == min(plan.seconds for plan in found.values())
                assert (("ulysses", Heads((0,))) in found) == (groups == 8)
    (full, _), (near, _) = prices(groups=32), prices(groups=32, window=512)
    hops = (7, 1)  # where scores are few, a round is as long as its hop, but for the last one
    ring = "ring", None
    assert near[ring].seconds < full[ring].seconds * hops[1] / hops[0] * 1.5


def test_auto_has_a_plan_for_every_set_of_exchanged_axes():
    found, _ = prices((2, 4))
    gathers = ("ring", "bidirectional_ring", "lax")
    mixed = {
        (name, exchanged) for name in gathers for exchanged in (None, Heads((0,)), Heads((1,)))
    }
    assert found.keys() == mixed | {("ulysses", Heads((0, 1)))}
    assert str(found["ring", Heads((1,))]) == "ring, heads exchanged over axes (1,)"


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 80GB HBM3", None])
def test_auto_is_a_built_in_where_nothing_hides(kind):
    """On axes of 2 and 4, a rank gets one of 8 groups of heads; of 4 groups it would get half."""
    whole, half = (fastest(attended((2, 4), groups=groups), kind) for groups in (8, 4))
    assert (whole.name, half.name) == ("ulysses, heads exchanged over axes (0, 1)", "lax")
    assert whole.why == half.why == "only TPUs hide messages under work"


def test_auto_prefers_a_ring_to_a_gather_that_costs_as_much():
    """The built-in holds all keys. Compiled with gradients for v5e:4x2, 128k, it takes 1.17."""
    found, chosen = prices(layout="zigzag", length=16384)
    scores = 32 * 8 * 16384 * 16384 / 2  # of a rank; they hide every message of a ring
    for name in ("ring", "bidirectional_ring"):
        assert found[name, None].seconds == pytest.approx(scores * OF_SCORE, rel=0.01)
    assert found["lax", None].seconds < 1.05 * chosen.seconds
    assert chosen.algorithm == "ring"
