"""Collective matmuls whose messages are encoded: bounds, who decodes what, what is refused."""

import re
from functools import partial
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from matmul_forms import FORMS
from operations import count
from support import SIZES, make_mesh, mostly_exhaustive, per_rank

import ringcoll
from ringcoll import Wire, costs
from ringcoll.collectives import visits
from ringcoll.costs import DEVICES
from ringcoll.matmuls import plans
from ringcoll.matmuls.labels import Gather, Product
from ringcoll.runtime.slicing import concatenated, end_to_end


def test_a_gathered_shard_is_what_all_ranks_decode():
    x = np.random.default_rng(0).normal(size=(4, 3, 8)).astype(np.float32)

    def program(x):
        shards = ringcoll.all_gather(x, "x", tiled=True, wire="int8")
        product = partial(ringcoll.all_gather_matmul, x, jnp.eye(8), "x", wire="int8")
        return shards, {name: product(algorithm=name) for name in ("lax", "ring")}

    shards, products = per_rank(make_mesh(4), program, x, check_vma=False)
    for name, y in products.items():
        np.testing.assert_array_equal(y, shards, name)


NAMES = ("rows gathered", "contraction gathered")
BUILT_IN_FORMS = ("auto", "lax")


def there_and_back(call, options, x, w, ct):
    """The result, and the gradients of a loss whose cotangent is `ct`."""

    def loss(x, w):
        y = call(x, w, **options)
        return (y * ct).sum(), y

    (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
    return y, *gradients


def bound(algorithm, n, wire):
    """The bound relative to the largest magnitudes, and some roundings of the products."""
    if n == 1:
        return 1e-5
    algorithm = "direct" if algorithm in BUILT_IN_FORMS else algorithm
    eps = float(jnp.finfo(jnp.float32).eps)
    return costs.error_bound("all_gather", algorithm, (n,), eps, wire=wire) + 1e-5


#: Algorithms by name, and one that gathers again. (On CPU "auto" is "lax".)
VARIANTS = {name: {"algorithm": name} for name in ("auto", "direct", "bidirectional_ring")}
VARIANTS["ring/regather"] = {"algorithm": "ring", "residuals": "regather"}


def cases():
    """Every number of ranks, codes in turn; the effect of types does not depend on codes."""
    kinds = cycle((("float8_e4m3fn", False), ("int8", True)))
    some = [(n, *kind, NAMES) for n, kind in zip(SIZES, kinds, strict=False)]
    some.append((3, "int8", True, NAMES[1:]))
    return mostly_exhaustive(some, lambda *case: len(case[-1]) == 1)


@pytest.mark.parametrize(("n", "codes", "check_vma", "names"), cases())
def test_values_and_gradients_are_within_the_bound(n, codes, check_vma, names):
    wire, mesh, rng = Wire(codes, 8), make_mesh(n), np.random.default_rng(n)
    operands = {}
    for name in names:
        shapes = *FORMS[name].shapes(n), FORMS[name].lengths(n)[2]
        operands[name] = [rng.normal(size=(n, *s)).astype(np.float32) for s in shapes]

    def program(operands):
        results = {}
        for name, factors in operands.items():
            call = FORMS[name].ours
            options = {key: of | {"wire": wire} for key, of in VARIANTS.items()}
            options["plain"] = {"algorithm": "lax"}
            results[name] = {key: there_and_back(call, of, *factors) for key, of in options.items()}
        return results

    for name, by in per_rank(mesh, program, operands, check_vma=check_vma).items():
        (x, w, ct), plain = operands[name], by.pop("plain")
        along = lambda a, dim: abs(a).sum(dim).max()  # noqa: E731
        for variant, found in by.items():
            algorithm = variant.partition("/")[0]
            gather = bound(algorithm, n, wire) * abs(x).max()
            bounds = (
                gather * along(w, 1),
                1e-5 * sum(abs(ct[r] @ w[r].T).max() for r in range(n)),
                gather * along(ct, 1),
            )
            for what, got, wanted, most in zip("yxw", found, plain, bounds, strict=True):
                off = abs(got - wanted).max()
                assert off <= most + 1e-5, (name, variant, what, off, most)
            assert (abs(found[0] - plain[0]).max() > 1e-4) == (n > 1), (name, variant)


def test_the_price_knows_the_bytes():
    """On v6e the messages of this gather take longer than its products in bfloat16."""
    x = jax.ShapeDtypeStruct((1024, 8192), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((8192, 3584), jnp.bfloat16)
    product = Product("kf", "mf", np.dtype(jnp.bfloat16))
    plain, narrow = (
        {
            plan.name: plan.seconds
            for plan in plans.of_gather(
                Gather("m", "mk", (product,), wire), x, [w], (8,), DEVICES["v6e"]
            )
        }
        for wire in (None, Wire("int8"))
    )
    assert min(narrow.values()) < 0.99 * min(plain.values())
    assert narrow["lax"] < 0.9 * plain["lax"]
    assert min(narrow, key=narrow.__getitem__) == "bidirectional_ring"  # compiled: 660 us
    assert 0.9 * 660e-6 < narrow["bidirectional_ring"] < 1.1 * 660e-6


@pytest.mark.parametrize("algorithm", ["lax", "ring", "bidirectional_ring"])
def test_only_bytes_travel_to_the_product_and_only_floats_back(algorithm):
    """In the lowered program. The bytes are at most 0.53 of bfloat16's."""
    mesh, ins = make_mesh(4), (P("x"), P(None, "x"))

    def sent(is_gradient=False, **options):
        def forward(x, w):
            return ringcoll.all_gather_matmul(x, w, "x", algorithm=algorithm, **options)

        function = jax.grad(lambda *of: (forward(*of) ** 2).sum(), (0, 1))
        function, out = (function, ins) if is_gradient else (forward, ins[1])
        mapped = jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=out)
        operands = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 512), (512, 256))]
        text = jax.jit(mapped).lower(*operands).as_text()
        kinds = "all_gather|all_to_all|collective_permute|reduce_scatter|all_reduce"
        # The shape and dtype of the result of each collective.
        return re.findall(rf'"stablehlo\.(?:{kinds})".*?-> tensor<([0-9x]+)(\w+)>', text, re.S)

    narrow, wide = sent(wire="int8"), sent()
    assert {dtype for *_, dtype in narrow} == {"ui8"}

    def numbers(found):
        return sum(np.prod([int(d) for d in shape[:-1].split("x")]) for shape, _ in found)

    assert 0.5 * 2 * numbers(wide) < numbers(narrow) <= 0.53 * 2 * numbers(wide)
    both, both_wide = sent(True, wire="int8"), sent(True)
    assert [of for of in both if of[1] != "ui8"] == both_wide[len(wide) :]


def test_decoded_shards_are_joined_in_one_buffer(monkeypatch):
    """A concatenation would copy them; the products have the same bits."""
    mesh, rng = make_mesh(4), np.random.default_rng(0)
    x, w = (rng.normal(size=(4, *s)).astype(np.float32) for s in ((6, 16), (16, 8)))

    def program(x, w):
        options = {"algorithm": "bidirectional_ring", "wire": "int8"}
        return ringcoll.all_gather_matmul(x, w, "x", **options)

    results, joined = [], []
    for join in (concatenated, end_to_end):
        monkeypatch.setattr(visits, "end_to_end", join)
        results.append(per_rank(mesh, program, x, w))
        traced = jax.make_jaxpr(lambda *of: program(*of), axis_env=[("x", 4)])(x[0], w[0])
        joined.append(count(traced.jaxpr, "concatenate"))
    assert joined[1] < joined[0]
    np.testing.assert_array_equal(*results)
    assert np.abs(results[0]).min() > 0
