"""What "auto" is for a matmul: hidden, hidden with some products late, or beside lax."""

from types import SimpleNamespace

import numpy as np
import pytest

from ringcoll.cost import DEVICES
from ringcoll.labels import Product
from ringcoll.quickest import gathered, scattered

BF16 = np.dtype(np.float16)  # of as many bytes
V5E, V6E = DEVICES["v5e"], DEVICES["v6e"]
RING = "bidirectional_ring"


def array(*shape):
    return SimpleNamespace(shape=shape, size=int(np.prod(shape)), dtype=BF16)


def rows(machine, m, k, f, n=8):
    """x: [m/n, k] of which the rows are gathered, w: [k, f]."""
    product = Product("kf", "mf", BF16)
    return gathered(machine, n, "m", "mk", [product], array(m // n, k), [array(k, f)])


def contracted(machine, m, k, f, n=8):
    """w: [k/n, f] of which the contracted rows are gathered, x: [m, k]: products are added."""
    product = Product("mk", "mf", BF16)
    return gathered(machine, n, "k", "kf", [product], array(k // n, f), [array(m, k)])


def summed(machine, m, k, f, n=8):
    """x: [m, k/n] and w: [k/n, f], whose sum is scattered along m."""
    pair = array(m, k // n), array(k // n, f)
    return scattered(machine, n, "mf", [("mk", "kf")], BF16, [pair])


@pytest.mark.parametrize("machine", DEVICES.values(), ids=DEVICES)
def test_large_matmuls_hide_the_collective(machine):
    assert rows(machine, 8192, 8192, 3584) == (RING, ())
    assert summed(machine, 8192, 28672, 8192) == RING


def test_where_latency_is_longer_than_the_matmul_lax_is_taken():
    # 1024 x 4096 x 512: 22 us of compute on v5e, 5 on v6e, against 7 hops of 1 us.
    assert rows(V5E, 1024, 4096, 512) == (RING, ())
    assert rows(V6E, 1024, 4096, 512) == ("lax", ())
    assert summed(V6E, 1024, 4096, 4096) == "lax"
    assert summed(V5E, 1024, 4096, 4096) == RING


def test_a_product_that_is_added_up_is_hidden_under_only_where_its_result_is_small():
    assert contracted(V5E, 1024, 8192, 8192) == (RING, ())
    assert contracted(V5E, 65536, 8192, 28672) == ("lax", ())


def test_beside_one_that_is_placed_a_product_with_a_large_result_is_made_late():
    # The gradients of a matmul_reduce_scatter, of a cotangent [m/n, f]: dx: [m, k/n] is
    # placed, dw: [k/n, f] would be added up.
    products = [Product("kf", "mk", BF16), Product("mk", "kf", BF16)]
    others = [array(3584, 8192), array(8192, 3584)]
    assert gathered(V5E, 8, "m", "mf", products, array(1024, 8192), others) == (RING, (1,))
    small = [array(128, 8192), array(8192, 128)]
    assert gathered(V5E, 8, "m", "mf", products, array(1024, 8192), small)[1] == ()


def test_one_rank_has_nothing_to_hide():
    assert rows(V5E, 64, 64, 64, n=1) == (RING, ())
