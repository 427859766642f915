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

import ringcoll
from ringcoll.choose.plan import Late, cheapest
from ringcoll.choose.under_work import machine, neighbours
from ringcoll.collectives import choice
from ringcoll.costs import DEVICES
from ringcoll.matmuls import plans
from ringcoll.matmuls.labels import Gather, Product, Scatter

HALVES, WHOLE = "bidirectional_ring", "two_ended"
V5E, V5P, V6E, TPU7X = "TPU v5 lite", "TPU v5p", "TPU v6 lite", "TPU7x"
H100 = "NVIDIA H100 80GB HBM3"
#: By name: the call, and the shapes of a rank's factors on n ranks if whole ones are m x k x f.
CALLS = {
    "rows": (ringcoll.all_gather_matmul, lambda m, k, f, n: ((m // n, k), (k, f))),
    "contraction": (
        partial(ringcoll.all_gather_matmul, dim=-1),
        lambda m, k, f, n: ((m, k // n), (k, f)),
    ),
    "weight": (
        partial(ringcoll.all_gather_matmul, operand=1),
        lambda m, k, f, n: ((m, k), (k // n, f)),
    ),
    "columns": (
        partial(ringcoll.all_gather_matmul, operand=1, dim=-1),
        lambda m, k, f, n: ((m, k), (k, f // n)),
    ),
    "sum": (ringcoll.matmul_reduce_scatter, lambda m, k, f, n: ((m, k // n), (k // n, f))),
}
CHOICES = [
    # Large matmuls hide the collective. Where latency is longer than the matmul, "lax" is taken.
    (V5E, "rows", (8192, 8192, 3584), 8, HALVES),
    (V6E, "rows", (8192, 8192, 3584), 8, HALVES),
    (V5E, "rows", (1024, 4096, 512), 8, HALVES),
    (V6E, "rows", (1024, 4096, 512), 8, HALVES),  # 50, "lax" 71: it waits for four links
    (V5P, "rows", (1024, 4096, 512), 8, "lax"),  # a built-in gather has three links there
    (V5E, "sum", (4096, 4096, 4096), 8, HALVES),
    (V6E, "sum", (1024, 4096, 4096), 8, "lax"),  # 72; lost: in halves 62
    # Every round reads the other factor again: dear for few rows, less so with whole shards.
    (V5E, "rows", (128, 8192, 3584), 8, "lax"),  # 114 us, ring 168
    (V5E, "rows", (512, 8192, 3584), 8, "lax"),  # 239, 252
    (V5E, "rows", (512, 8192, 1792), 8, HALVES),  # 161, whole 134
    (V5E, "rows", (512, 8192, 3584), 16, "lax"),  # priced alike
    (V5E, "sum", (512, 28672, 8192), 16, WHOLE),  # 295, in halves 164
    (V5E, "sum", (2048, 28672, 8192), 8, HALVES),  # 1028, 723, whole 757
    (V5P, "sum", (512, 28672, 8192), 8, "lax"),  # 131, 306; of half the columns 104, 76
    (V5P, "sum", (512, 14336, 8192), 8, HALVES),
    (TPU7X, "sum", (2048, 28672, 8192), 8, HALVES),  # 244, "lax" 274
    # Sums that every round adds to.
    (V5E, "contraction", (512, 8192, 7168), 4, "lax"),  # 467; lost: one way 401
    (V5E, "contraction", (512, 8192, 1792), 16, WHOLE),  # 167, 155
    (V5E, "contraction", (8192, 8192, 3584), 8, HALVES),  # 2674, whole 3826
    (V6E, "contraction", (128, 8192, 3584), 8, "lax"),  # 48, 65
    (V5E, "weight", (65536, 8192, 28672), 8, "lax"),
    (V5E, "weight", (4096, 4096, 14336), 8, "lax"),  # 3670, 5569
    (V5E, "weight", (4096, 8192, 8192), 8, HALVES),  # 3115, whole 3533
    (V5E, "columns", (4096, 4096, 14336), 8, HALVES),
    (V5E, "columns", (4096, 4096, 14336), 16, HALVES),  # of 448 columns, which are no whole tiles
    (V6E, "weight", (8192, 8192, 14336), 8, "lax"),
    (H100, "rows", (131072, 8192, 3584), 8, "lax"),
    (H100, "sum", (8192, 28672, 8192), 8, "lax"),
    ("cpu", "rows", (8192, 8192, 3584), 8, "lax"),  # whose devices share its cores
    (V5E, "rows", (64, 64, 64), 1, "lax"),
]


def program(kind, call, m, k, f, sizes, made=lambda call: call):
    """The lowered text of what is made of a call, on a mesh of a kind of device."""
    platform = {"N": "cuda", "c": "cpu"}.get(kind[0], "tpu")
    call, shapes = CALLS[call]
    mesh = AbstractMesh(
        sizes,
        (*"xyz"[: len(sizes)],),
        abstract_device=AbstractDevice(kind, None, platform),
        axis_types=(AxisType.Auto,) * len(sizes),
    )
    mapped = jax.shard_map(
        made(lambda x, w: call(x, w, mesh.axis_names)),
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
    assert {*re.findall(r"ringcoll\.\w*einsum\w*\((\w+)\)", text)} == {algorithm}


def gradients(call):
    return jax.grad(lambda x, w: call(x, w).astype(jnp.float32).sum(), (0, 1))


@pytest.mark.parametrize(
    ("kind", "algorithm"), [(V5E, HALVES), (V5P, "lax"), (V6E, "lax"), (TPU7X, "lax")]
)
def test_a_sparse_core_gathers_weights_and_scatters_their_gradients(kind, algorithm):
    text = program(kind, "columns", 4096, 4096, 14336, (8,), gradients)
    found = re.findall(r"ringcoll\.(\w*einsum\w*)\((\w+)\)", text)
    assert {*found} == {
        (name, algorithm) for name in ("all_gather_einsum", "einsum_reduce_scatter")
    }


@pytest.mark.parametrize(
    ("kind", "sizes", "shape", "algorithm"),
    [
        (V5P, (2, 2, 2), (8192, 8192, 1024), "hamiltonian"),  # 748, 499
        (V5E, (4, 2), (8192, 8192, 3584), "lax"),  # 3995, 3732
        (V6E, (4, 2), (8192, 8192, 3584), "lax"),  # 1252, 2349
    ],
)
def test_what_auto_is_over_several_axes(kind, sizes, shape, algorithm):
    assert "hamiltonian" not in neighbours((16, 16))  # 255 rounds
    assert "bruck" not in neighbours((8,))
    text = program(kind, "rows", *shape, sizes)
    assert {*re.findall(r"ringcoll\.\w+\((\w+)\)", text)} == {algorithm}


# -- what is decided while a program is traced, by shapes alone --

TWO_BYTES = np.dtype(np.float16)
SUM = Scatter("m", "mf", (("mk", "kf"),), TWO_BYTES)


def array(*shape, dtype=TWO_BYTES):
    return SimpleNamespace(shape=shape, size=int(np.prod(shape)), dtype=np.dtype(dtype))


def test_a_product_with_a_large_sum_is_computed_late():
    """The gradients of a sum: one is placed, the other would be added up."""
    gather = Gather("m", "mf", (Product("kf", "mk", TWO_BYTES), Product("mk", "kf", TWO_BYTES)))
    ct, small = array(1024, 8192), [array(128, 8192), array(8192, 128)]
    large = [array(3584, 8192), array(8192, 3584)]
    for others, form in ((large, Late((1,))), (small, None)):
        found = plans.of_gather(gather, ct, others, (8,), DEVICES["v5e"])
        assert cheapest(found).form == form


def test_of_symbolic_sizes_nothing_is_guessed(monkeypatch):
    monkeypatch.setattr(choice, "device_kind", lambda: V5E)
    symbolic = SimpleNamespace(shape=("b", 64))
    plan = choice.plan_under_work("auto", ("x",), (symbolic, array(64, 64)), plans_on=pytest.fail)
    assert str(plan) == "lax: sizes are symbols"


@pytest.mark.parametrize(
    ("kind", "ranks", "of", "axes"),
    [(V5P, 8, 16, 2), (V5P, 8, 8, 3), (V5P, 8, 64, 3), (V5E, 8, 16, 2)],
)
def test_ranks_beside_others_are_a_plane_of_a_small_slice(kind, ranks, of, axes):
    assert machine(kind, ranks, of).axes == axes
    assert machine(None) is machine(H100) is DEVICES["v6e"]
