"""A gathered factor that stays, while the rows of the other factor travel."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import make_mesh, mostly_exhaustive
from test_matmul_auto import compared
from test_matmuls import FORMS

import ringcoll
from ringcoll.cost import DEVICES
from ringcoll.matmuls import exchange, forms
from ringcoll.matmuls.labels import Gather, Product, Scatter

TWO_BYTES = np.dtype(np.float16)


def array(*shape):
    return SimpleNamespace(shape=shape, size=int(np.prod(shape)), dtype=TWO_BYTES)


def where_possible(options, gather, x, others, keeps=False):
    found = [
        exchange.in_place_of(gather, *pair) for pair in zip(gather.products, others, strict=True)
    ]
    return options.algorithm == "auto" and None not in found


@pytest.mark.parametrize(
    ("n", "check_vma"),
    mostly_exhaustive(
        [(n, check_vma) for n in (1, 2, 3, 4, 5, 8) for check_vma in (True, False)],
        lambda n, check_vma: n == 3 and check_vma,
    ),
)
def test_all_forms_compute_the_same(n, check_vma, monkeypatch):
    monkeypatch.setattr(forms, "PLAIN_ON", ())
    monkeypatch.setattr(exchange, "stays", where_possible)
    compared(n, {}, check_vma=check_vma)


def test_what_travels_instead(monkeypatch):
    """Forward and backward: rows there, sums home; rows there, products home."""
    monkeypatch.setattr(forms, "PLAIN_ON", ())
    monkeypatch.setattr(exchange, "stays", where_possible)

    def program(x, w):
        call = FORMS["weight gathered"].ours
        y, pull = jax.vjp(call, x, w)
        return pull(y)

    mapped = jax.shard_map(program, mesh=make_mesh(4), in_specs=(P("x"), P("x")), out_specs=P("x"))
    x, w = jax.ShapeDtypeStruct((12, 8), np.float32), jax.ShapeDtypeStruct((8, 6), np.float32)
    text = jax.jit(mapped).lower(x, w).as_text()
    assert text.count("stablehlo.all_to_all") == 2
    assert text.count("stablehlo.all_gather") == 1  # of the cotangent, none of w


def test_rows_are_the_longest_label_that_only_the_other_factor_has():
    product = Product("bsk", "bsf", TWO_BYTES)
    contracted = Gather("k", "kf", (product,))
    x = array(1, 512, 64)
    assert exchange.in_place_of(contracted, product, x) == Scatter(
        "s", "bsf", (("kf", "bsk"),), TWO_BYTES
    )
    columns = Gather("f", "kf", (product,))
    home = Product("kf", "bsf", TWO_BYTES)
    assert exchange.in_place_of(columns, product, x) == Gather("s", "bsk", (home,))
    batch = Product("ekf", "emf", TWO_BYTES)
    assert exchange.in_place_of(Gather("e", "emk", (batch,)), batch, array(8, 4, 4)) is None
    vector = Product("k", "f", TWO_BYTES)
    assert exchange.in_place_of(Gather("k", "kf", (vector,)), vector, array(8)) is None


def fsdp(model, m, k, f, n=8, by="k", sizes=None, keeps=False):
    """Whether rows travel: w: [k, f], sharded by `by`, x: [m, k] on each rank."""
    w = array(k // n, f) if by == "k" else array(k, f // n)
    gather = Gather(by, "kf", (Product("mk", "mf", TWO_BYTES),))
    return exchange.pays(gather, w, [array(m, k)], sizes or (n,), model, keeps)


def test_few_rows_travel_in_place_of_a_large_weight():
    """Compiled, 8192 x 14336, in microseconds: w gathered and rows exchanged.

    v6e: 1245 and 205 with 128 rows a rank, 1264 and 728 with 512. tpu7x: 889 and 561 with 512.
    """
    for model in DEVICES.values():
        assert fsdp(model, 128, 8192, 14336)
        assert fsdp(model, 128, 8192, 14336, by="f")
        assert fsdp(model, 512, 8192, 14336)
        assert not fsdp(model, 8192, 8192, 14336)
        assert not fsdp(model, 65536, 8192, 28672)
        assert not fsdp(model, 1, 64, 64, n=1)
        assert not fsdp(model, 128, 8192, 14336, sizes=(2, 4))


def test_rows_that_are_few_once_may_be_many_twice():
    """A gathered w serves the gradient by x too.

    Compiled, with both gradients, v6e, 512 rows a rank: w gathered 2694 us, rows exchanged there
    and back 3044.
    """
    v6e = DEVICES["v6e"]
    assert fsdp(v6e, 512, 8192, 14336)
    assert not fsdp(v6e, 512, 8192, 14336, keeps=True)
    assert fsdp(v6e, 128, 8192, 14336, keeps=True)


def test_several_products_share_a_gather():
    two = Gather("m", "mk", (Product("kf", "mf", TWO_BYTES),) * 2)
    one = Gather("m", "mk", (Product("kf", "mf", TWO_BYTES),))
    x, w = array(1024, 8192), array(8192, 128)
    assert exchange.pays(one, x, [w], (8,), DEVICES["v6e"])  # compiled as 4096 columns: 421, 690
    assert not exchange.pays(two, x, [w, w], (8,), DEVICES["v6e"])


def test_of_symbolic_sizes_nothing_is_guessed():
    gather = Gather("k", "kf", (Product("mk", "mf", TWO_BYTES),))
    symbolic = SimpleNamespace(shape=("b", 64), size="64*b", dtype=TWO_BYTES)
    assert not exchange.pays(gather, array(8, 64), [symbolic], (8,), DEVICES["v5e"])


def test_only_tpus_exchange_and_only_by_auto():
    """Not with a wire or by a tree either, because their sums are others."""

    def count(**options):
        call = lambda x, w: ringcoll.all_gather_matmul(x, w, "x", operand=1, **options)  # noqa: E731
        mapped = jax.shard_map(call, mesh=make_mesh(8), in_specs=(P("x"), P("x")), out_specs=P("x"))
        x = jax.ShapeDtypeStruct((1024, 8192), jax.numpy.bfloat16)
        w = jax.ShapeDtypeStruct((8192, 14336), jax.numpy.bfloat16)
        return str(jax.make_jaxpr(mapped)(x, w)).count(" all_to_all[")

    assert count() == 0  # this is a CPU
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "device_kind", lambda: "TPU v6 lite")
        assert count() == 1
        assert count(algorithm="ring") == 0
        assert count(algorithm="lax") == 0
        assert count(wire="int8") == count(wire="int8", gradient_wire=None) == 0
        assert count(order="tree") == 0
