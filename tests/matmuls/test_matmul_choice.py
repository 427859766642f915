"""What "auto" is for a matmul, by device and shapes; the microseconds beside some are compiled."""

import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import make_mesh

import ringcoll
from ringcoll import algorithms
from ringcoll.costs import DEVICES
from ringcoll.matmuls import auto, auto_hosts, exchange, forms
from ringcoll.matmuls.forms import Form, by_platform
from ringcoll.matmuls.labels import Gather, Product, Scatter
from ringcoll.runtime import hosts

HALVES, WHOLE, ONE_WAY = "bidirectional_ring", "two_ended", "ring"
V5E, V5P, V6E, TPU7X = "TPU v5 lite", "TPU v5p", "TPU v6 lite", "TPU7x"
H100 = "NVIDIA H100 80GB HBM3"
#: By name: the call, and the shapes of a rank's factors on n ranks if whole ones are m x k x f.
CALLS = {
    "rows": (ringcoll.all_gather_matmul, lambda m, k, f, n: ((m // n, k), (k, f))),
    "contraction": (
        partial(ringcoll.all_gather_matmul, dimension=-1),
        lambda m, k, f, n: ((m, k // n), (k, f)),
    ),
    "weight": (
        partial(ringcoll.all_gather_matmul, operand=1),
        lambda m, k, f, n: ((m, k), (k // n, f)),
    ),
    "columns": (
        partial(ringcoll.all_gather_matmul, operand=1, dimension=-1),
        lambda m, k, f, n: ((m, k), (k, f // n)),
    ),
    "sum": (ringcoll.matmul_reduce_scatter, lambda m, k, f, n: ((m, k // n), (k // n, f))),
}
CHOICES = [
    # Large matmuls hide the collective. Where latency is longer than the matmul, "lax" is taken.
    (V5E, "rows", (8192, 8192, 3584), 8, HALVES),
    (V6E, "rows", (8192, 8192, 3584), 8, HALVES),
    (V5E, "rows", (1024, 4096, 512), 8, HALVES),
    (V6E, "rows", (1024, 4096, 512), 8, "lax"),
    (V5P, "rows", (1024, 4096, 512), 8, "lax"),  # a built-in gather has three links there
    (V5E, "sum", (1024, 4096, 4096), 8, HALVES),
    (V6E, "sum", (1024, 4096, 4096), 8, "lax"),
    # Every round reads the other factor again: dear for few rows, less so with whole shards.
    (V5E, "rows", (128, 8192, 3584), 8, "lax"),  # 114 us, ring 168
    (V5E, "rows", (512, 8192, 3584), 8, "lax"),  # 239, 252
    (V5E, "rows", (512, 8192, 1792), 8, WHOLE),  # 161, 134
    (V5E, "rows", (2048, 8192, 3584), 8, WHOLE),
    (V5E, "sum", (512, 28672, 8192), 16, WHOLE),  # 295, in halves 164
    (V5E, "sum", (2048, 28672, 8192), 8, HALVES),  # 1028, 723, whole 757
    (V5P, "sum", (512, 28672, 8192), 8, "lax"),  # 131, 306; of half the columns 104, 76
    (V5P, "sum", (512, 14336, 8192), 8, HALVES),
    (TPU7X, "sum", (2048, 28672, 8192), 8, "lax"),  # 229, 270
    # Sums that every round adds to.
    (V5E, "contraction", (512, 8192, 7168), 4, ONE_WAY),  # 467, 401
    (V5E, "contraction", (512, 8192, 1792), 16, WHOLE),  # 167, 155
    (V5E, "contraction", (8192, 8192, 3584), 8, HALVES),  # 3826, 2674
    (V6E, "contraction", (128, 8192, 3584), 8, "lax"),  # 48, 65
    (V5E, "weight", (65536, 8192, 28672), 8, "lax"),
    (V5E, "weight", (4096, 4096, 14336), 8, "lax"),  # 3670, 5569
    (V5E, "weight", (4096, 8192, 8192), 8, HALVES),  # 3533, 3115
    # Halves of 448 columns are no whole tiles.
    (V5E, "columns", (4096, 4096, 14336), 8, HALVES),
    (V5E, "columns", (4096, 4096, 14336), 16, WHOLE),
    # Few rows travel in place of a large weight.
    (V6E, "weight", (128, 8192, 14336), 8, "rows"),  # 1245, 205
    (V6E, "columns", (128, 8192, 14336), 8, "rows"),
    (V6E, "weight", (8192, 8192, 14336), 8, "lax"),
    (H100, "rows", (131072, 8192, 3584), 8, "lax"),
    (H100, "sum", (8192, 28672, 8192), 8, "lax"),
    ("cpu", "rows", (8192, 8192, 3584), 8, "lax"),  # whose devices share its cores
    (V5E, "rows", (64, 64, 64), 1, "lax"),
]


def program(kind, call, m, k, f, sizes):
    """The lowered text of a call on a mesh of a kind of device."""
    platform = {"N": "cuda", "c": "cpu"}.get(kind[0], "tpu")
    call, shapes = CALLS[call]
    mesh = AbstractMesh(
        sizes,
        (*"xyz"[: len(sizes)],),
        abstract_device=AbstractDevice(kind, None, platform),
        axis_types=(AxisType.Auto,) * len(sizes),
    )
    mapped = jax.shard_map(
        lambda x, w: call(x, w, mesh.axis_names),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    of = NamedSharding(mesh, P())
    factors = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=of)
        for shape in shapes(m, k, f, int(np.prod(sizes)))
    ]
    return (
        jax.jit(mapped)
        .trace(*factors)
        .lower(lowering_platforms=(platform,))
        .as_text(debug_info=True)
    )


@pytest.mark.parametrize(("kind", "call", "shape", "n", "algorithm"), CHOICES)
def test_what_auto_is(kind, call, shape, n, algorithm):
    text = program(kind, call, *shape, (n,))
    rows_travel = "stablehlo.all_to_all" in text
    assert rows_travel == (algorithm == "rows")
    if not rows_travel:
        assert {*re.findall(r"ringcoll\.\w+\((\w+)\)", text)} == {algorithm}


@pytest.mark.parametrize(
    ("kind", "sizes", "shape", "algorithm"),
    [
        (V5P, (2, 2, 2), (8192, 8192, 1024), "hamiltonian"),  # 748, 499
        (V5E, (4, 2), (8192, 8192, 3584), "hamiltonian"),  # 3826, 3732
        (V6E, (4, 2), (8192, 8192, 3584), "lax"),  # 1252, 2349
    ],
)
def test_what_auto_is_over_several_axes(kind, sizes, shape, algorithm):
    assert list(auto.hiding_algorithms((16, 16), DEVICES["v5e"])) == [HALVES]  # 255 rounds
    text = program(kind, "rows", *shape, sizes)
    assert {*re.findall(r"ringcoll\.\w+\((\w+)\)", text)} == {algorithm}


# -- what is decided while a program is traced, by shapes alone --

TWO_BYTES = np.dtype(np.float16)
ROWS = Gather("m", "mk", (Product("kf", "mf", TWO_BYTES),))
SUM = Scatter("m", "mf", (("mk", "kf"),), TWO_BYTES)


def array(*shape, dtype=TWO_BYTES):
    return SimpleNamespace(shape=shape, size=int(np.prod(shape)), dtype=np.dtype(dtype))


@pytest.mark.parametrize(
    ("kind", "m", "k", "n", "terms", "keeps", "algorithm"),
    [
        ("v6e", 512, 14336, 8, 1, False, "lax"),  # 144, ring 153
        ("v6e", 8192, 4096, 8, 1, False, HALVES),  # 2038, 1683
        ("v5e", 512, 28672, 8, 1, False, WHOLE),  # 648, 587
        ("v5e", 512, 28672, 8, 1, True, "lax"),  # 2153, 2286
        ("v5e", 512, 14336, 8, 1, True, HALVES),  # 1240, 1088
        ("v5p", 512, 14336, 8, 1, True, "lax"),  # 563, 664
        ("v5e", 512, 14336, 4, 2, False, "lax"),  # 2254, 2404
        ("v5p", 2048, 28672, 8, 1, False, HALVES),  # 1065, whole 1234
    ],
)
def test_after_other_work_a_sum_may_wait_for_its_weight(kind, m, k, n, terms, keeps, algorithm):
    """As in a gated MLP, and with what it keeps for gradients."""
    sums = Scatter("m", "mf", (("mk", "kf"),) * terms, TWO_BYTES, follows=True, keeps=keeps)
    pair = array(m, k // n), array(k // n, 8192)
    assert auto.to_scatter(sums, [pair] * terms, (n,), DEVICES[kind]) == algorithm


def test_a_product_with_a_large_sum_is_computed_late():
    """The gradients of a sum: one is placed, the other would be added up."""
    gather = Gather("m", "mf", (Product("kf", "mk", TWO_BYTES), Product("mk", "kf", TWO_BYTES)))
    ct, small = array(1024, 8192), [array(128, 8192), array(8192, 128)]
    large = [array(3584, 8192), array(8192, 3584)]
    assert auto.to_gather(gather, ct, large, (8,), DEVICES["v5e"]) == (HALVES, (1,))
    assert auto.to_gather(gather, ct, small, (8,), DEVICES["v5e"]) == (HALVES, ())


@pytest.mark.parametrize(
    ("kind", "f", "algorithm", "expected"),
    [
        (V5E, 3584, HALVES, True),
        (V5E, 3584, ONE_WAY, False),  # whose hop is longer
        (V6E, 3584, HALVES, False),
        (V5E, 1024, HALVES, False),
        (V5E, 7168, HALVES, False),  # w leaves no room for shards beside the core
        (V5E, 14336, HALVES, True),  # w is read again in any case
        ("cpu", 3584, HALVES, False),
    ],
)
def test_rounds_that_forward_are_a_loop_of_two_if_a_hop_more_is_hidden(
    kind, f, algorithm, expected
):
    schedule = algorithms.build("all_gather", algorithm, (8,))
    x, w = array(1024, 8192), array(8192, f)
    assert auto.pairs_pay(ROWS, x, [w], schedule, kind) == expected


@pytest.mark.parametrize(
    ("kind", "m", "k", "f", "expected"),
    [
        (V6E, 8192, 3584, 8192, True),  # half a block: 94 us of wire, its products 66
        (V5E, 8192, 3584, 8192, False),  # 187 and 305
        (V5E, 1024, 512, 4096, False),  # products 2.7 us, w from memory 5.2
        (V5E, 2048, 512, 4096, True),
        (H100, 8192, 3584, 8192, False),
    ],
)
def test_halves_by_turns_pay_under_a_longer_wire(kind, m, k, f, expected):
    assert auto.turns_pay(SUM, [array(m, k), array(k, f)], 8, kind) == expected


@pytest.mark.parametrize(
    ("kind", "m", "f", "n", "algorithm", "joining"),
    [
        ("v5e", 1024, 3584, 8, HALVES, "apart"),
        ("v5p", 1024, 3584, 8, HALVES, "copied"),
        ("v6e", 1024, 3584, 8, HALVES, "fused"),
        ("v6e", 1024, 28672, 8, HALVES, "copied"),  # apart 8565, copied 5727
        ("v5p", 256, 3584, 8, WHOLE, "copied"),  # apart 422, fused 375, copied 345
        ("v5e", 1024, 1792, 8, HALVES, "fused"),  # halves that travel longer than products take
    ],
)
def test_how_two_parts_of_a_round_are_multiplied(kind, m, f, n, algorithm, joining):
    """x: [m, 8192] on each rank, w: [8192, f]."""
    schedule = algorithms.build("all_gather", algorithm, (n,))
    assert auto.joining(ROWS, array(m, 8192), [array(8192, f)], schedule, DEVICES[kind]) == joining


def test_rows_are_the_longest_label_that_only_the_other_factor_has():
    product, home = Product("bsk", "bsf", TWO_BYTES), Product("kf", "bsf", TWO_BYTES)
    x, scatter = array(1, 512, 64), Scatter("s", "bsf", (("kf", "bsk"),), TWO_BYTES)
    assert exchange.in_place_of(Gather("k", "kf", (product,)), product, x) == scatter
    gather = Gather("s", "bsk", (home,))
    assert exchange.in_place_of(Gather("f", "kf", (product,)), product, x) == gather
    batch, vector = Product("ekf", "emf", TWO_BYTES), Product("k", "f", TWO_BYTES)
    assert exchange.in_place_of(Gather("e", "emk", (batch,)), batch, array(8, 4, 4)) is None
    assert exchange.in_place_of(Gather("k", "kf", (vector,)), vector, array(8)) is None


def test_rows_do_not_travel_for_several_products_or_if_the_weight_is_kept():
    v6e, weight = DEVICES["v6e"], Gather("k", "kf", (Product("mk", "mf", TWO_BYTES),))
    w, x = array(1024, 14336), array(512, 8192)
    assert exchange.pays(weight, w, [x], (8,), v6e)
    assert not exchange.pays(weight, w, [x], (8,), v6e, keeps=True)  # 2694, rows twice 3044
    assert exchange.pays(weight, w, [array(128, 8192)], (8,), v6e, keeps=True)
    assert not exchange.pays(weight, w, [array(128, 8192)], (2, 4), v6e)
    one, x = Product("kf", "mf", TWO_BYTES), array(1024, 8192)
    assert exchange.pays(Gather("m", "mk", (one,)), x, [array(8192, 128)], (8,), v6e)
    assert not exchange.pays(Gather("m", "mk", (one,) * 2), x, [array(8192, 128)] * 2, (8,), v6e)


def test_of_symbolic_sizes_nothing_is_guessed():
    symbolic, w = SimpleNamespace(shape=("b", 64), size="64*b", dtype=TWO_BYTES), array(64, 64)
    assert auto.to_gather(ROWS, symbolic, [w], (8,), DEVICES["v5e"]) == ("lax", ())
    assert auto.to_scatter(SUM, [(symbolic, w)], (8,), DEVICES["v5e"]) == "lax"
    assert auto_hosts.to_gather(ROWS, symbolic, [w], 8) == "lax"
    assert auto_hosts.to_scatter(SUM, [(symbolic, w)], 8, "0.10.2") == "lax"
    assert not exchange.pays(ROWS, symbolic, [w], (8,), DEVICES["v5e"])


@pytest.mark.parametrize(
    ("kind", "ranks", "of", "axes"),
    [(V5P, 8, 16, 2), (V5P, 8, 8, 3), (V5P, 8, 64, 3), (V5E, 8, 16, 2)],
)
def test_ranks_beside_others_are_a_plane_of_a_small_slice(kind, ranks, of, axes):
    assert auto.machine(kind, ranks, of).axes == axes
    assert auto.machine(None) is auto.machine(H100) is DEVICES["v6e"]


# -- between hosts on CPU --


@pytest.mark.parametrize(
    ("m", "k", "f", "n", "dtype", "jax", "expected"),
    [
        (1024, 1024, 16384, 4, np.float32, "0.12.0", ("ring", "ring")),
        (128, 128, 128, 4, np.float32, "0.12.0", ("lax", "lax")),
        # Little work, many bytes: the built-in sum sends twice as many as the ring.
        (8192, 8192, 8, 4, np.float32, "0.12.0", ("lax", "ring")),
        # The built-in sends narrow floats as wide ones.
        (8192, 8192, 8, 4, jnp.bfloat16, "0.12.0", ("ring", "ring")),
        (8192, 8192, 8, 4, np.int16, "0.12.0", ("lax", "ring")),
        # Two hosts send to each other in turn.
        (1024, 1024, 16384, 2, np.float32, "0.12.0", ("lax", "ring")),
        (1024, 1024, 16384, 2, jnp.bfloat16, "0.12.0", ("ring", "ring")),
        (4096, 16, 4096, 3, np.float32, "0.12.0", ("ring", "ring")),
        (4096, 16, 4096, 2, np.float32, "0.12.0", ("lax", "lax")),
        (256, 64, 64, 4, np.float32, "0.10.2", ("lax", "ring")),  # the built-in sum may be wrong
    ],
)
def test_what_auto_is_between_hosts(m, k, f, n, dtype, jax, expected):
    kind = np.dtype(dtype)
    gather = Gather("m", "mk", (Product("kf", "mf", kind),))
    scatter = Scatter("m", "mf", (("mk", "kf"),), kind)
    x, w = array(m // n, k, dtype=kind), array(k, f, dtype=kind)
    pair = array(m, k // n, dtype=kind), array(k // n, f, dtype=kind)
    chosen = auto_hosts.to_gather(gather, x, [w], n), auto_hosts.to_scatter(scatter, [pair], n, jax)
    assert chosen == expected


def test_processes_of_one_host_have_the_form_of_one_process(monkeypatch):
    """The mesh, not the number of processes, tells whether there are several hosts."""
    for module in (forms, hosts):
        monkeypatch.setattr(module, "are_cpu_processes", lambda: True)
    numbers = {"bidirectional_ring": 1, "lax": 2, "two_ended": 3}

    def call(x):
        tpus, between = map(Form, ("bidirectional_ring", "two_ended"))
        return by_platform(("x",), tpus, between, lambda form, x: x + numbers[form.algorithm], x)

    run = jax.shard_map(call, mesh=make_mesh(2), in_specs=P(), out_specs=P())
    assert jax.jit(run)(jnp.float32(0)) == 2
