"""What "auto" is for a matmul on TPUs: hidden, hidden with some products late, or beside lax."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import make_mesh

import ringcoll
from ringcoll import algorithms
from ringcoll.cost import DEVICES
from ringcoll.costs.matmul import Work
from ringcoll.matmuls import auto, auto_hosts, options
from ringcoll.matmuls.auto import (
    hiding_algorithms,
    joining,
    machine,
    pairs_pay,
    to_gather,
    to_scatter,
    turns_pay,
)
from ringcoll.matmuls.labels import Gather, Product, Scatter

TWO_BYTES = np.dtype(np.float16)
V5E, V6E = DEVICES["v5e"], DEVICES["v6e"]
RING, TWO_ENDED, ONE_WAY = "bidirectional_ring", "two_ended", "ring"


ROWS = Gather("m", "mk", (Product("kf", "mf", TWO_BYTES),))
SUM_OF_ROWS = Scatter("m", "mf", (("mk", "kf"),), TWO_BYTES)


def array(*shape):
    return SimpleNamespace(shape=shape, size=int(np.prod(shape)), dtype=TWO_BYTES)


def rows(model, m, k, f, n=8):
    """x: [m/n, k], whose rows are gathered; w: [k, f]."""
    product = Product("kf", "mf", TWO_BYTES)
    return to_gather(Gather("m", "mk", (product,)), array(m // n, k), [array(k, f)], (n,), model)


def columns(model, m, k, f, n=8):
    """w: [k, f/n], whose columns are gathered; x: [m, k]: as in layers of FSDP."""
    product = Product("mk", "mf", TWO_BYTES)
    return to_gather(Gather("f", "kf", (product,)), array(k, f // n), [array(m, k)], (n,), model)


def contracted(model, m, k, f, n=8):
    """w: [k/n, f], whose contracted rows are gathered; x: [m, k]: products are added."""
    product = Product("mk", "mf", TWO_BYTES)
    return to_gather(Gather("k", "kf", (product,)), array(k // n, f), [array(m, k)], (n,), model)


def summed(model, m, k, f, n=8):
    """x: [m, k/n] and w: [k/n, f], whose sum is scattered along m."""
    pair = array(m, k // n), array(k // n, f)
    return to_scatter(Scatter("m", "mf", (("mk", "kf"),), TWO_BYTES), [pair], (n,), model)


@pytest.mark.parametrize("model", DEVICES.values(), ids=DEVICES)
def test_large_matmuls_hide_the_collective(model):
    assert rows(model, 8192, 8192, 3584) == (RING, ())
    assert summed(model, 8192, 28672, 8192) == RING


def test_where_latency_is_longer_than_the_matmul_lax_is_taken():
    # 1024 x 4096 x 512: 22 us of compute on v5e, 5 on v6e, against 7 hops of 1 us.
    assert rows(V5E, 1024, 4096, 512) == (RING, ())
    assert rows(V6E, 1024, 4096, 512) == ("lax", ())
    assert summed(V6E, 1024, 4096, 4096) == "lax"
    assert summed(V5E, 1024, 4096, 4096) == RING


def test_factors_that_every_round_reads_make_few_rows_dear():
    """Compiled, plain and ring in microseconds: v6e 48 and 129, 305 and 233; v5e 114 and 168."""
    for model in (V5E, V6E):
        assert rows(model, 128, 8192, 3584) == ("lax", ())
        assert summed(model, 128, 28672, 8192) == "lax"
        # Whole shards either way, so that w is read five times, not eight: 732 and 221.
        assert rows(model, 2048, 8192, 3584) == (TWO_ENDED, ())
        assert summed(model, 2048, 28672, 8192) == RING
    assert rows(V5E, 512, 8192, 3584) == ("lax", ())  # 239 and 252
    assert rows(V5E, 512, 8192, 1792) == (TWO_ENDED, ())  # half the bytes: 161 and 134


def test_what_the_memory_beside_the_core_does_not_hold_is_read_from_the_main_memory():
    """Compiled: on v5p 131 and 306, of half the columns 104 and 76; on tpu7x 229 and 270."""
    v5p = DEVICES["v5p"]
    assert summed(DEVICES["tpu7x"], 2048, 28672, 8192) == "lax"
    assert summed(v5p, 512, 28672, 8192) == "lax"
    assert summed(v5p, 512, 14336, 8192) == RING


def test_where_a_built_in_scatter_is_an_all_reduce_the_ring_is_taken_sooner():
    """Compiled: v5e:4x4, 295, in halves 164, whole 173."""
    assert summed(V5E, 512, 28672, 8192, n=16) == TWO_ENDED


def priced(monkeypatch, choose, *args):
    """The first work that a choice prices."""
    seen = []

    def bare_seconds(work, *args, **options):
        seen.extend(work)
        return 0.0

    monkeypatch.setattr(auto, "bare_seconds", bare_seconds)
    choose(V5E, *args)
    return seen[0]


def test_what_is_read_once_and_what_in_every_round(monkeypatch):
    m, k, f, n = 16, 4, 6, 2
    flops = 2 * m * k * f
    x, w, y = 2 * m * k, 2 * k * f, 2 * m * f
    gathered = priced(monkeypatch, rows, m, k, f, n)
    assert gathered == Work(flops, added=0, once=x + y, again=w, placed=y)
    added = priced(monkeypatch, contracted, m, k, f, n)
    assert added == Work(flops, added=y, once=w, sliced=x)  # w travels
    # k is of both ranks. The arrived sum and the product are read, and their sum is written.
    scattered = priced(monkeypatch, summed, m, k, f, n)
    assert scattered == Work(
        flops / n, added=3 * y / n, once=y, again=w / n, cut=x / n, joined=y / n, written=y
    )


def test_halves_by_turns_pay_under_a_longer_wire_if_products_hide_reading_what_is_not_cut():
    def pays(device_kind, m, k, f):
        x, w = array(m, k), array(k, f)
        sums = Scatter("m", "mf", (("mk", "kf"),), TWO_BYTES)
        return turns_pay(sums, [x, w], 8, device_kind)

    v5e, v6e = "TPU v5 lite", "TPU v6 lite"
    # A block is 16 MB. Half of it is 94 us of v6e's wire, and its products are 66 us.
    assert pays(v6e, 8192, 3584, 8192)
    assert not pays(v5e, 8192, 3584, 8192)  # 187 and 305
    # 2 x 128 x 512 x 4096 operations take 2.7 us on v5e, 4 MB from memory 5.2.
    assert not pays(v5e, 1024, 512, 4096)
    assert pays(v5e, 2048, 512, 4096)
    assert not pays("NVIDIA H200", 8192, 3584, 8192)  # whose scheduler hides nothing then
    assert not pays(None, 8192, 3584, 8192)


def test_a_gradient_finds_its_factors_fetched():
    """Both gradients of a contraction on v6e: compiled, the ring takes 170 us, lax 157.

    The contraction is gathered: 512 x 8192 x 14336.
    """
    pair = array(512, 1792), array(8192, 1792)
    sums = Scatter("k", "mk", (("mf", "kf"),), TWO_BYTES)
    assert to_scatter(sums, [pair], (8,), V6E) == RING
    assert to_scatter(replace(sums, follows=True), [pair], (8,), V6E) == "lax"


def after_other_work(kind, m, k, f, n, terms=1, keeps=False):
    """x: [m, k/n] and w: [k/n, f], whose sum is scattered along m, after other products."""
    pair = array(m, k // n), array(k // n, f)
    sums = Scatter("m", "mf", (("mk", "kf"),) * terms, TWO_BYTES, follows=True, keeps=keeps)
    return to_scatter(sums, [pair] * terms, (n,), DEVICES[kind])


@pytest.mark.parametrize(
    ("kind", "m", "k", "n", "compiled"),
    [
        ("v6e", 512, 14336, 8, {"lax": 144, RING: 153}),
        ("v5e", 256, 14336, 4, {"lax": 385, RING: 426}),
        ("v5e", 512, 28672, 8, {"lax": 648, RING: 653, TWO_ENDED: 587}),
        ("v5e", 512, 28672, 4, {"lax": 1307, RING: 1587}),
        ("v6e", 2048, 8192, 8, {"lax": 434, RING: 430}),
        ("v6e", 8192, 4096, 8, {"lax": 2038, RING: 1683}),
        ("v6e", 2048, 4096, 4, {"lax": 422, RING: 403}),
    ],
)
def test_after_other_work_a_ring_may_wait_for_its_weight(kind, m, k, n, compiled):
    """Compiled, microseconds of a gated MLP, or of attention if k <= 8192, by the scatter."""
    assert after_other_work(kind, m, k, 8192, n) == min(compiled, key=compiled.get)
    alone = TWO_ENDED if (kind, m, k, n) == ("v5e", 512, 28672, 8) else RING
    assert summed(DEVICES[kind], m, k, 8192, n) == alone


@pytest.mark.parametrize(
    ("kind", "m", "k", "n", "lax", "ring"),
    [
        ("v5e", 512, 14336, 4, 2150, 2254),
        ("v5e", 512, 28672, 8, 2153, 2286),
        ("v5e", 512, 14336, 8, 1240, 1088),
        ("v5p", 512, 14336, 8, 563, 664),
        ("v5e", 2048, 14336, 4, 7156, 6687),
        ("v5p", 2048, 14336, 8, 2021, 1822),
        ("v6e", 2048, 28672, 8, 2388, 2283),
        ("v5e", 512, 4096, 8, 642, 599),
    ],
)
def test_beside_what_is_kept_for_gradients_a_ring_may_displace_a_weight(kind, m, k, n, lax, ring):
    """Compiled, a gated MLP, or attention if k <= 8192, with both gradients, by either scatter."""
    chosen = after_other_work(kind, m, k, 8192, n, keeps=True)
    assert chosen == ("lax" if lax < ring else RING)
    forward = TWO_ENDED if (kind, m, k, n) == ("v5e", 512, 28672, 8) else RING
    assert after_other_work(kind, m, k, 8192, n) == forward


def test_the_forward_pass_of_a_gradient_keeps_its_factors(monkeypatch):
    seen = []
    choose = auto.to_scatter
    note = lambda scatter, *of: seen.append(scatter.keeps) or choose(scatter, *of)  # noqa: E731
    monkeypatch.setattr(auto, "to_scatter", note)
    matmul = jax.shard_map(
        lambda x, w: ringcoll.matmul_reduce_scatter(x, w, "x"),
        mesh=make_mesh(4),
        in_specs=(P(None, "x"), P("x")),
        out_specs=P("x"),
    )
    operands = jnp.ones((8, 8)), jnp.ones((8, 4))
    jax.eval_shape(matmul, *operands)
    jax.eval_shape(jax.grad(lambda *of: matmul(*of).sum()), *operands)
    assert seen == [False, True]


def test_gradients_by_few_rows_are_scattered_whole_if_the_ring_may_wait_for_the_weight():
    """Compiled, the gradients of a gather of rows by lax and ring: 157 and 163, 745 and 685."""
    assert after_other_work("v6e", 512, 14336, 8192, 8) == "lax"
    assert after_other_work("v5e", 512, 14336, 8192, 4) == RING
    # The gradients of a gated MLP, 2254 and 2404, and of attention, 369 and 422.
    assert after_other_work("v5e", 512, 14336, 8192, 4, terms=2) == "lax"
    assert after_other_work("v5e", 128, 4096, 8192, 4, terms=2) == "lax"


def test_a_sum_that_is_not_held_is_dear_to_write():
    """Compiled, the gradient of a gathered weight, 128 rows of x: lax 3866 and ring 3314."""
    pair = array(128, 8192), array(128, 14336)
    sums = Scatter("k", "kf", (("mk", "mf"),), TWO_BYTES, follows=True)
    assert to_scatter(sums, [pair], (4,), V5E) == RING


def test_every_product_of_a_sum_counts_by_its_own_sizes():
    """As in the gradient by x of a wide and of a narrow product, in either order."""
    wide, narrow = ((array(640, k), array(k, 4096)) for k in (4096, 8))
    sum_of_two = Scatter("m", "mf", (("mk", "kf"),) * 2, TWO_BYTES)
    assert to_scatter(sum_of_two, [narrow, narrow], (8,), V5E) == "lax"
    assert to_scatter(sum_of_two, [wide, narrow], (8,), V5E) == RING
    assert to_scatter(sum_of_two, [narrow, wide], (8,), V5E) == RING


def test_where_a_built_in_gather_comes_by_more_links_it_needs_more_work_to_beat_it():
    v5p = DEVICES["v5p"]  # whose corners have three
    assert rows(v5p, 1024, 4096, 512) == ("lax", ())
    assert rows(v5p, 4096, 4096, 1792) == (TWO_ENDED, ())
    assert rows(V5E, 32768, 8192, 112, n=256) == ("lax", ())  # a torus of 16 x 16 has four
    assert rows(V5E, 32768, 8192, 448, n=64) == (RING, ())


def test_a_loop_of_two_rounds_has_a_hop_more_which_must_be_hidden():
    def pays(kind, f, lanes=2):
        ring = algorithms.build("all_gather", RING if lanes == 2 else "ring", (8,))
        return pairs_pay(ROWS, array(1024, 8192), [array(8192, f)], ring, kind)

    assert pays("TPU v5e", 3584)
    assert not pays("TPU v5e", 3584, lanes=1)  # whole shards one way round
    assert not pays("TPU v6e", 3584)  # whose wire is longer
    assert not pays("TPU v5e", 1024)
    assert not pays("cpu", 3584)
    assert not pays(None, 3584)
    assert not pays("TPU v5e", 7168)  # 112 MiB, which leave no room for shards
    assert pays("TPU v5e", 14336)  # is read again in any case


def test_over_several_axes_the_links_of_all_axes_are_used():
    """Compiled, lax and hamiltonian: v5p:2x2x2 748 and 499; 4 x 2, v5e 3826, 3732; v6e 1252, 2349.

    As 4 x 4, v5e 10625 and 8800.
    """
    v5p = DEVICES["v5p"]
    several = "hamiltonian"

    def load(sizes, model):
        (name, (_, *others)), *more = hiding_algorithms(sizes, model).items()
        assert len(others) == np.prod(sizes) - 1
        assert not more
        return name, others[0].load

    assert load((2, 2, 2), v5p) == (several, pytest.approx(1 / 3))
    assert load((2, 2, 2), V5E) == (several, pytest.approx(1 / 2))  # three axes by two links
    assert load((4, 4), V5E) == (several, pytest.approx(3 / 4))
    assert list(hiding_algorithms((8,), V5E)) == [RING, TWO_ENDED, ONE_WAY]
    assert load((16, 16), V5E) == (RING, 1 / 2)  # a program of 255 rounds would be too large

    def by(model, sizes, m, k, f):
        x = array(m // int(np.prod(sizes)), k)
        gathered = to_gather(ROWS, x, [array(k, f)], sizes, model)
        pair = array(m, f), array(f, k)  # the layer after it
        return gathered[0], to_scatter(SUM_OF_ROWS, [pair], sizes, model)

    assert by(v5p, (2, 2, 2), 8192, 8192, 1024) == (several, several)
    assert by(V5E, (4, 2), 8192, 8192, 3584)[0] == several
    assert by(V6E, (4, 2), 8192, 8192, 3584) == ("lax", "lax")
    assert by(V5E, (4, 4), 32768, 8192, 1792) == (several, several)


@pytest.mark.parametrize(
    ("kind", "ranks", "of", "axes"),
    [("TPU v5p", 8, 16, 2), ("TPU v5p", 8, 8, 3), ("TPU v5p", 8, 64, 3), ("TPU v5 lite", 8, 16, 2)],
)
def test_ranks_beside_others_are_a_plane_of_a_small_slice(kind, ranks, of, axes):
    assert machine(kind, ranks, of).axes == axes


def test_a_matmul_knows_how_many_ranks_are_beside_its_own(monkeypatch):
    monkeypatch.setattr(options, "device_kind", lambda: "TPU v5p")
    found = []

    def axes_of(*names):
        found.append(options.Options(names, "auto").model().axes)

    mesh = jax.make_mesh((2, 4), ("data", "model"))
    for names in (("model",), ("data", "model")):
        jax.eval_shape(
            jax.shard_map(
                lambda names=names: axes_of(*names), mesh=mesh, in_specs=(), out_specs=None
            )
        )
    assert found == [2, 3]


def test_halves_of_columns_are_whole_tiles():
    assert columns(V5E, 4096, 4096, 14336, n=8) == (RING, ())  # of 896 columns
    assert columns(V5E, 4096, 4096, 14336, n=16) == ("two_ended", ())  # of 448


def test_a_product_that_is_added_up_is_hidden_under_only_where_its_result_is_small():
    assert contracted(V5E, 1024, 8192, 8192) == (RING, ())
    assert contracted(V5E, 2048, 8192, 4096) == (RING, ())  # compiled: 863 us, plain 1365
    assert contracted(V5E, 4096, 8192, 8192) == (RING, ())  # 3115 and 3533
    assert contracted(V5E, 65536, 8192, 28672) == ("lax", ())
    # The memory beside the core holds the sum, but not the operands too.
    assert contracted(V5E, 4096, 4096, 14336) == ("lax", ())  # 5569 and 3670
    assert contracted(V6E, 4096, 4096, 14336) == ("lax", ())  # 2657 and 1166
    assert contracted(V5E, 2048, 4096, 14336) == (RING, ())
    # Half of the sum's reads and writes are under the matmul. With more work, more would be.
    assert contracted(V5E, 16384, 8192, 4096) == ("lax", ())


@pytest.mark.parametrize(
    ("kind", "m", "f", "n", "compiled"),
    [
        ("v5e", 512, 7168, 4, {"lax": 467, RING: 476, TWO_ENDED: 442, ONE_WAY: 401}),
        ("v5e", 8192, 7168, 4, {"lax": 6151, RING: 6384, TWO_ENDED: 6238, ONE_WAY: 5101}),
        ("v5e", 512, 1792, 16, {"lax": 167, RING: 201, TWO_ENDED: 155, ONE_WAY: 224}),
        ("v5e", 512, 896, 16, {"lax": 129, RING: 123, TWO_ENDED: 113, ONE_WAY: 203}),
        ("v5e", 8192, 3584, 8, {"lax": 3826, RING: 2674, TWO_ENDED: 2873, ONE_WAY: 3006}),
        ("v5p", 2048, 3584, 8, {"lax": 408, RING: 380, TWO_ENDED: 352, ONE_WAY: 460}),
        ("v6e", 2048, 3584, 8, {"lax": 305, RING: 271, TWO_ENDED: 294, ONE_WAY: 390}),
        ("v6e", 128, 3584, 8, {"lax": 48, RING: 76, TWO_ENDED: 73, ONE_WAY: 65}),
    ],
)
def test_a_product_of_whole_shards_is_added_up_less_often(kind, m, f, n, compiled):
    """x: [m, 8192/n], whose contraction is gathered; w: [8192, f]. Compiled microseconds."""
    gather = Gather("k", "mk", (Product("kf", "mf", TWO_BYTES),))
    chosen = to_gather(gather, array(m, 8192 // n), [array(8192, f)], (n,), DEVICES[kind])
    assert chosen == (min(compiled, key=compiled.get), ())


def test_whole_shards_are_not_gathered_for_two_products_of_which_one_is_added_up():
    """As in the gradients of attention, 512 x 8192 x 4096 on v5e:4x2: 652 us, in halves 599."""
    products = Product("kf", "mk", TWO_BYTES), Product("mk", "kf", TWO_BYTES)
    gather = Gather("m", "mf", products)
    others = [array(512, 8192), array(512, 512)]
    seconds = auto.gather_seconds(gather, array(64, 8192), others, (8,), V5E)
    assert list(seconds) == ["lax", RING]


def test_before_a_late_product_whole_shards_need_the_other_operand_beside_the_core():
    """Both gradients of a scatter, 2048 x 8192 x 28672 on v5p: 1204 us, with lax 1059."""
    products = Product("kf", "mk", TWO_BYTES), Product("mk", "kf", TWO_BYTES)
    gather = Gather("m", "mf", products)
    others = [array(3584, 8192), array(2048, 3584)]
    of = gather, array(256, 8192), others, (8,)
    assert list(auto.gather_seconds(*of, DEVICES["v5p"], (1,))) == ["lax", RING]
    assert list(auto.gather_seconds(*of, V6E, (1,))) == ["lax", RING, TWO_ENDED]
    assert to_gather(*of, DEVICES["v5p"]) == ("lax", ())


@pytest.mark.parametrize(
    ("kind", "m", "k", "n", "compiled"),
    [
        ("v5e", 512, 28672, 8, {"lax": 316, RING: 264, TWO_ENDED: 254}),
        ("v5e", 2048, 28672, 4, {"lax": 1828, RING: 1399, TWO_ENDED: 1507}),
        ("v5e", 128, 8192, 16, {"lax": 67, RING: 64, TWO_ENDED: 56}),
        ("v5e", 2048, 28672, 8, {"lax": 1028, RING: 723, TWO_ENDED: 757}),
        ("v5p", 2048, 28672, 8, {"lax": 498, RING: 406, TWO_ENDED: 381}),
        ("v6e", 512, 28672, 8, {"lax": 115, RING: 115, TWO_ENDED: 109}),
        ("v6e", 128, 28672, 8, {"lax": 57, RING: 110, TWO_ENDED: 94}),
    ],
)
def test_blocks_that_are_scattered_whole_read_a_weight_less_often(kind, m, k, n, compiled):
    """x: [m, k/n] and w: [k/n, 8192], whose sum is scattered along m. Compiled microseconds."""
    assert summed(DEVICES[kind], m, k, 8192, n) == min(compiled, key=compiled.get)


@pytest.mark.parametrize(
    ("kind", "m", "k", "n", "terms"),
    [
        ("v5e", 128, 8192, 16, 3),  # gradients of attention: 297 us, in halves 273
        ("v5p", 2048, 28672, 8, 1),  # of a gather of rows: 1234 and 1065
        ("v5p", 2048, 14336, 8, 2),  # of a gated MLP: 2030 and 1822
    ],
)
def test_after_other_work_not_every_sum_may_be_scattered_whole(kind, m, k, n, terms):
    pair = array(m, k // n), array(k // n, 8192)
    sums = Scatter("m", "mf", (("mk", "kf"),) * terms, TWO_BYTES, follows=True)
    seconds = auto.scatter_seconds(sums, [pair] * terms, (n,), DEVICES[kind])
    assert list(seconds) == ["lax", RING]


def test_beside_a_gathered_operand_that_is_kept_a_large_sum_is_not_gathered_one_way():
    """Both gradients of 8192 x 8192 x 28672 on v5e:2x2: 19784 us, in halves 18161, plain 17921."""
    gather = Gather("k", "mk", (Product("kf", "mf", TWO_BYTES),))
    operands = array(8192, 2048), [array(8192, 7168)], (4,), V5E
    assert to_gather(gather, *operands) == (ONE_WAY, ())
    assert to_gather(replace(gather, keeps=True), *operands) == (RING, ())


def test_beside_one_that_is_placed_a_product_with_a_large_result_is_made_late():
    # The gradients of a matmul_reduce_scatter, of a cotangent [m/n, f]: dx: [m, k/n] is
    # placed, dw: [k/n, f] would be added up.
    gradients = Gather("m", "mf", (Product("kf", "mk", TWO_BYTES), Product("mk", "kf", TWO_BYTES)))
    ct = array(1024, 8192)
    others = [array(3584, 8192), array(8192, 3584)]
    assert to_gather(gradients, ct, others, (8,), V5E) == (RING, (1,))
    small = [array(128, 8192), array(8192, 128)]
    assert to_gather(gradients, ct, small, (8,), V5E) == (RING, ())


def test_one_rank_has_nothing_to_hide():
    assert rows(V5E, 64, 64, 64, n=1) == ("lax", ())


def test_of_symbolic_sizes_nothing_is_guessed():
    gather = Gather("m", "mk", (Product("kf", "mf", TWO_BYTES),))
    symbolic = SimpleNamespace(shape=("b", 64), size="64*b", dtype=TWO_BYTES)
    assert to_gather(gather, symbolic, [array(64, 64)], (8,), V5E) == ("lax", ())
    assert auto_hosts.to_gather(gather, symbolic, [array(64, 64)], 8) == "lax"
    scatter = Scatter("m", "mf", (("mk", "kf"),), TWO_BYTES)
    assert auto_hosts.to_scatter(scatter, [(symbolic, array(64, 64))], 8, "0.10.2") == "lax"


def test_machines_are_known_by_what_devices_call_themselves():
    assert machine("TPU v5 lite") is DEVICES["v5e"]
    assert machine("TPU7x") is DEVICES["tpu7x"]
    assert machine("NVIDIA H200") is machine(None) is DEVICES["v6e"]


def joined_as(gather, x, others, ranks, model, algorithm=RING):
    schedule = algorithms.build("all_gather", algorithm, (ranks,))
    return joining(gather, x, others, schedule, model)


@pytest.mark.parametrize(("name", "best"), [("v5e", "apart"), ("v5p", "copied"), ("v6e", "fused")])
def test_how_what_comes_by_two_lanes_is_multiplied(name, best):
    gather = Gather("m", "mk", (Product("kf", "mf", TWO_BYTES),))
    x, w = array(1024, 8192), array(8192, 3584)
    assert joined_as(gather, x, [w], 8, DEVICES[name]) == best
    long = array(8192, 28672)  # eight times the compute: half a matmul covers the hop
    # On v6e half a matmul takes less than to read w. (Compiled: apart 8565, copied 5727 us.)
    assert joined_as(gather, x, [long], 8, DEVICES[name]) == (
        "copied" if name == "v6e" else "apart"
    )


def test_products_of_few_rows_are_not_made_apart_because_each_reads_the_other_factor():
    gather = Gather("m", "mk", (Product("kf", "mf", TWO_BYTES),))
    x, w = array(32, 8192), array(8192, 7168)
    # Compiled on v5e:2x2: apart 188 us, fused 102, copied 105.
    assert joined_as(gather, x, [w], 4, V5E) in ("fused", "copied")


def test_two_shards_of_a_round_read_the_other_factor_twice_if_they_are_apart():
    gather = Gather("m", "mk", (Product("kf", "mf", TWO_BYTES),))
    x, w = array(256, 8192), array(8192, 3584)
    # Compiled on v5p:2x2x2: apart 422 us, fused 375, copied 345.
    assert joined_as(gather, x, [w], 8, DEVICES["v5p"], TWO_ENDED) == "copied"


def test_halves_that_travel_for_longer_than_their_products_take_are_joined():
    x, tpu7x = array(1024, 8192), DEVICES["tpu7x"]
    assert joined_as(ROWS, x, [array(8192, 3584)], 8, V5E) == "apart"
    assert joined_as(ROWS, x, [array(8192, 1792)], 8, V5E) == "fused"
    assert joined_as(ROWS, x, [array(8192, 3584)], 8, tpu7x) == "copied"


def test_what_is_added_up_is_joined():
    gather = Gather("k", "kf", (Product("mk", "mf", TWO_BYTES),))
    assert joined_as(gather, array(1024, 8192), [array(65536, 8192)], 8, V5E) != "apart"
