""" "auto" on GPUs: never slower by measured collectives and matmuls."""

from itertools import product

import numpy as np
import pytest
from test_matmul_choice import array

from ringcoll.collectives.table import default_table
from ringcoll.cost import predict
from ringcoll.costs.machines import MACHINES
from ringcoll.matmuls import auto_gpus
from ringcoll.matmuls.labels import Gather, Product, Scatter
from ringcoll.schedules.registry import COLLECTIVES

GPUS = ("h100", "h200", "b200", "gb200", "gb300")
BF16 = np.dtype(np.float16)  # as wide
RANKS = {"h100": (2, 4, 8), "h200": (8,), "b200": (2, 4, 8), "gb200": (4, 8, 72), "gb300": (4, 8)}
#: By how much it may be slower than the built-in, as predicted.
SLOWER = 1.05
#: The shapes of `benchmarks/pages/gpus.md`; in the last two a permute is shorter than its product.
SHAPES = {
    (8192, 8192, 28672): "lax",
    (8192, 4096, 14336): "lax",
    (4096, 4096, 14336): "lax",
    (2048, 4096, 14336): "lax",
    (2048, 4096, 4096): "lax",
    (131072, 8192, 28672): "ring",
    (262144, 8192, 28672): "ring",
}

ROWS = Gather("m", "mk", (Product("kf", "mf", BF16),))
COLUMNS = Gather("f", "kf", (Product("mk", "mf", BF16),))
CONTRACTION = Gather("k", "kf", (Product("mk", "mf", BF16),))
SUM = Scatter("m", "mf", (("mk", "kf"),), BF16)


def chosen(form, n, m, k, f, gpu):
    """The choice of "auto", the bytes of a shard, and the other bytes that each round moves."""
    result = 2 * m * f // n
    if form == "sum":
        pair = array(m, k // n), array(k // n, f)
        return auto_gpus.to_scatter(SUM, [pair], n, gpu), result, 3 * result
    gather, x, other, moved = {
        "rows": (ROWS, array(m // n, k), array(k, f // n), 2 * result / n),
        "columns": (COLUMNS, array(k, f // n), array(m // n, k), 2 * result / n),
        "contraction": (CONTRACTION, array(k // n, f), array(m // n, k), result),
    }[form]
    return auto_gpus.to_gather(gather, x, [other], n, gpu), 2 * x.size, moved


def seconds(form, n, m, k, f, gpu, shard, moved):
    """Seconds by the built-in and by the ring, computed here again from the measurements."""
    device = MACHINES[gpu]
    rate, flops = device.matmul(2), 2 * m * k * f / n
    name = "psum_scatter" if form == "sum" else "all_gather"
    hop = predict("ppermute", shard, n, gpu)
    a_round = rate.start + flops / n * rate.delta + moved * device.model.memory
    built_in = predict(name, n * shard, n, gpu) + rate.start + flops * rate.delta
    return {"lax": built_in, "ring": a_round + (n - 1) * max(hop, a_round)}


CELLS = [
    (gpu, n, form, shape)
    for gpu in GPUS
    for n, form, shape in product(
        RANKS[gpu],
        ("rows", "columns", "contraction", "sum"),
        product((1024, 8192, 131072), (1024, 8192), (1024, 28672)),
    )
]


def test_auto_is_in_no_cell_predicted_slower_than_the_built_in():
    """And where the built-in takes 1.33 times as long as the ring, the ring is taken."""
    taken = []
    for gpu, n, form, (m, k, f) in CELLS:
        sizes = tuple(size // n * n for size in (m, k, f))
        picked, *bytes_of = chosen(form, n, *sizes, gpu)
        found = seconds(form, n, *sizes, gpu, *bytes_of)
        assert found[picked] <= SLOWER * found["lax"], (gpu, n, form, sizes, found)
        if found["lax"] > 1.33 * found["ring"]:
            assert picked == "ring", (gpu, n, form, sizes, found)
        taken.append(picked)
    assert {"lax", "ring"} == {*taken}


@pytest.mark.parametrize(("shape", "algorithm"), SHAPES.items())
@pytest.mark.parametrize("form", ["rows", "sum"])
def test_on_eight_h100_the_ring_is_taken_where_a_hop_is_shorter_than_its_product(
    form, shape, algorithm
):
    """There it is 1.15 times as fast, and the built-in everywhere else."""
    m, k, f = shape
    sizes = (m, f, k) if form == "sum" else shape  # as the layer after it
    picked, shard, moved = chosen(form, 8, *sizes, "NVIDIA H100 80GB HBM3")
    rate = MACHINES["h100"].matmul(2)
    is_shorter = predict("ppermute", shard, 8, "h100") < 2 * m * k * f / 64 * rate.delta
    found = seconds(form, 8, *sizes, "h100", shard, moved)
    assert picked == algorithm == ("ring" if is_shorter else "lax")
    assert (found["lax"] > 1.15 * found["ring"]) == is_shorter


def test_wider_elements_take_longer_to_multiply():
    """A matmul in float32 hides a permute that one in bfloat16 does not."""
    wide = np.dtype(np.float32)
    x, w = array(8192, 8192), array(8192, 2560)
    in_bf16 = auto_gpus.to_gather(ROWS, x, [w], 8, "h100")
    x.dtype = w.dtype = wide
    rows = Gather("m", "mk", (Product("kf", "mf", wide),))
    assert (in_bf16, auto_gpus.to_gather(rows, x, [w], 8, "h100")) == ("lax", "ring")


@pytest.mark.parametrize("gpu", GPUS)
def test_auto_of_a_collective_is_in_no_cell_predicted_slower_than_the_built_in(gpu):
    table = default_table()
    for name, n, size in product(COLLECTIVES, RANKS[gpu], (2**10, 2**20, 2**30)):
        if name == "pbroadcast":
            continue  # priced as an all-reduce
        picked = table.pick(name, "gpu", n, size, "bfloat16", "0.12.0.1")
        least = predict(name, size, n, gpu)
        assert predict(name, size, n, gpu, picked) <= SLOWER * least, (name, n, size, picked)
