"""Collectives with a narrow wire: bounds, bits, gradients, what travels, and what is refused."""

import re
from functools import partial
from itertools import cycle
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support import SIZES, distinct, make_mesh, mostly_exhaustive, per_rank

import ringcoll
from ringcoll import Wire, precision, pricing
from ringcoll.collectives.table import choices
from ringcoll.costs.wire import CODES

#: The shape of one rank's operand, the call, and NumPy's results for all operands `[rank, ...]`.
CALLS = {
    "all_gather": (
        lambda n: (6, 5),
        partial(ringcoll.all_gather, axis=1, tiled=True),
        lambda xs: np.stack([np.concatenate([*xs], 1)] * len(xs)),
    ),
    "psum_scatter": (
        lambda n: (6, 5 * n),
        partial(ringcoll.psum_scatter, scatter_dimension=-1, tiled=True),
        lambda xs: np.stack(np.split(xs.sum(0), len(xs), 1)),
    ),
    "psum": (lambda n: (6, 7), ringcoll.psum, lambda xs: np.stack([xs.sum(0)] * len(xs))),
    "pmean": (lambda n: (6, 7), ringcoll.pmean, lambda xs: np.stack([xs.mean(0)] * len(xs))),
    "all_to_all": (
        lambda n: (2 * n, 5),
        partial(ringcoll.all_to_all, split_axis=0, concat_axis=1, tiled=True),
        lambda xs: np.stack(
            [np.concatenate([np.split(x, len(xs))[r] for x in xs], 1) for r in range(len(xs))]
        ),
    ),
}
SUMS = ("psum_scatter", "psum", "pmean")


def every(collective, n):
    """All algorithms of a collective: "auto", the schedules and the built-ins."""
    schedules = distinct(collective, n)
    known = [a for a in choices(collective) if a.partition("+")[0] in schedules or "lax" in a[:3]]
    assert {"lax", "pairwise" if collective == "all_to_all" else "ring"} <= {*known}
    return ["auto", *known]


def bound(collective, algorithm, n, dtype, wire):
    """The error bound, relative to the largest magnitudes; a mean's is that of its sum over n."""
    algorithm = algorithm.partition("+")[0]
    if algorithm in ("auto", "lax", "lax_as_bits"):
        algorithm = "pairwise" if collective == "all_to_all" else "direct"
    eps = float(jnp.finfo(dtype).eps)
    relative = precision.error_bound(collective, algorithm, (n,), eps, wire=wire)
    return relative / (n if collective == "pmean" else 1)


def cases():
    """Every number of ranks, with codes and dtypes in turn; `test_codes` has all combinations."""
    usual = [(3, "int8", "bfloat16"), (1, "float8_e5m2", "float32")]
    turns = zip(SIZES[1:], cycle(CODES), cycle(("float32", "bfloat16")), strict=False)
    return mostly_exhaustive(dict.fromkeys([*usual, *turns]), lambda *case: case in usual)


@pytest.mark.parametrize(("n", "codes", "dtype"), cases())
def test_every_algorithm_is_within_its_bound_forward_and_back(n, codes, dtype):
    """Values have all magnitudes: the largest of one rank is the smallest of another."""
    wire, mesh = Wire(codes, 8), make_mesh(n)
    rng = np.random.default_rng(n)
    operands, cotangents = {}, {}
    for name, (shape, _, numpy) in CALLS.items():
        x = rng.normal(size=(n, *shape(n))) * 10.0 ** rng.integers(-3, 3, (n, *shape(n)))
        operands[name] = np.asarray(jnp.asarray(x, dtype))
        like = numpy(np.zeros((n, *shape(n))))
        cotangents[name] = np.asarray(jnp.asarray(rng.normal(size=like.shape), dtype))

    def there_and_back(name, algorithm, x, ct):
        call = partial(CALLS[name][1], axis_name="x", algorithm=algorithm, wire=wire)
        y, pull_back = jax.vjp(call, x)
        return y, pull_back(ct)[0]

    def program(xs, cts):
        return {
            name: {
                a: there_and_back(name, a, xs[name], cts[name])
                for a in every(name, n)[:: 3 if name == "pmean" else 1]  # a sum, divided
            }
            for name in CALLS
        }

    done = per_rank(mesh, program, operands, cotangents, check_vma=False)
    for name, (shape, _, numpy) in CALLS.items():
        x, ct = (np.asarray(some[name], float) for some in (operands, cotangents))
        back = transposed(name, numpy, shape(n), ct)
        other = {"all_gather": "psum_scatter", "psum_scatter": "all_gather"}.get(name, name)
        for algorithm, (y, of_x) in done[name].items():
            check(y, numpy(x), x, name, algorithm, n, dtype, wire)
            check(of_x, back, ct, other, algorithm, n, dtype, wire)
            if name in ("psum", "pmean", "all_gather"):
                assert all((y[r] == y[0]).all() for r in range(n)), (name, algorithm)


@pytest.mark.parametrize("n", mostly_exhaustive(SIZES, lambda n: n == 3))
def test_all_ranks_have_the_bits_that_the_owner_of_a_sum_sent(n):
    """With few numbers, which a compiler may add a second time where they are decoded."""
    x = np.random.default_rng(n).normal(size=(n, 16, 2)).astype(np.float32)
    for algorithm in ("direct", "ring"):
        done = per_rank(
            make_mesh(n),
            lambda x, a=algorithm: [ringcoll.psum(y, "x", algorithm=a, wire="int8") for y in x],
            x,
        )
        assert all((y == y[0]).all() for y in done), algorithm


def transposed(name, numpy, shape, ct):
    """NumPy's gradients for the cotangents of all ranks, by the matrix of the collective."""
    n = len(ct)
    if name in ("psum", "pmean"):
        return numpy(ct)
    size = n * prod(shape)
    columns = [numpy(one.reshape(n, *shape)).reshape(-1) for one in np.eye(size)]
    return (np.stack(columns) @ ct.reshape(-1)).reshape(n, *shape)


def check(found, exact, operands, name, algorithm, n, dtype, wire):
    largest = abs(operands).reshape(n, -1).max(1)
    largest = largest.sum() if name in SUMS else largest.max()
    relative = bound(name, algorithm, n, dtype, wire)
    err = abs(np.asarray(found, float) - exact).max()
    assert err <= relative * largest + 2.0**-120, (name, algorithm, err / largest, relative)
    if n == 1:
        assert err == 0
    else:
        assert relative < 1.6 * n  # it says something


@pytest.mark.parametrize("check_vma", mostly_exhaustive((True, False), bool))
def test_contributions_are_encoded_once(check_vma):
    """The data are codes times a scale, so one encoding is exact, and a second one is not."""
    mesh, rng = make_mesh(4), np.random.default_rng(0)
    x = rng.integers(-16, 16, (4, 8, 24)).astype(np.float32)
    x[..., ::4] = 127  # in every block of 4
    x = np.asarray(jnp.asarray(x, jnp.bfloat16))
    wire = Wire("int8", 4)

    def program(x):
        sums = partial(ringcoll.psum_scatter, axis_name="x", tiled=True, wire=wire)
        whole = partial(ringcoll.all_gather, axis_name="x", tiled=True, wire=wire)
        swap = partial(
            ringcoll.all_to_all, axis_name="x", split_axis=0, concat_axis=0, tiled=True, wire=wire
        )
        return (
            {a: sums(x, algorithm=a) for a in ("auto", "lax", "direct", "ring")},
            {a: whole(x, algorithm=a) for a in every("all_gather", 4)},
            {a: swap(x, algorithm=a) for a in every("all_to_all", 4)},
        )

    sums, wholes, swapped = per_rank(mesh, program, x, check_vma=check_vma)
    exact = x.astype(np.float32)
    total = np.stack(np.split(exact.sum(0), 4))
    for algorithm, y in sums.items():
        is_exact = (abs(np.asarray(y, np.float32) - total) < 1e-3).all()
        assert is_exact == (algorithm != "ring"), algorithm
    for algorithm, y in wholes.items():
        assert (np.asarray(y, np.float32) == exact.reshape(-1, 24)).all(), algorithm
    expected = np.stack([np.concatenate([np.split(r, 4)[d] for r in exact]) for d in range(4)])
    for algorithm, y in swapped.items():
        assert (np.asarray(y, np.float32) == expected).all(), algorithm


KINDS = {"collective-permute", "all-gather", "all-to-all", "all-reduce", "reduce-scatter"}
OPERATION = re.compile(rf"= \(?(\w+)\[([\d,]*)\].*? ({'|'.join(sorted(KINDS))})(?:-start)?\(")


def sent(text):
    """The messages of a compiled program: (kind, dtype, elements)."""
    found = OPERATION.findall(text)
    return [
        (kind, dtype, prod(map(int, filter(None, dims.split(","))))) for dtype, dims, kind in found
    ]


@pytest.mark.parametrize("collective", ["all_gather", "psum_scatter", "psum", "all_to_all"])
def test_what_travels_is_bytes_as_many_as_priced(collective):
    """In the compiled program: no compiler moves the decoding before the message."""
    n, wire = 8, Wire("int8")
    shape = {"all_gather": (64, 128)}.get(collective, (64 * n, 128))
    dims = {"split_axis": 0, "concat_axis": 0} if collective == "all_to_all" else {}
    tiled = {} if collective == "psum" else {"tiled": True}
    shard = prod(shape) // (1 if collective == "all_gather" else n)

    def compiled(algorithm):
        call = partial(
            getattr(ringcoll, collective),
            axis_name="x",
            algorithm=algorithm,
            wire=wire,
            **dims,
            **tiled,
        )
        x = jax.ShapeDtypeStruct((n, *shape), jnp.bfloat16)
        mapped = jax.shard_map(
            lambda x: 2 * call(2 * x[0])[None],
            mesh=make_mesh(n),
            in_specs=jax.P("x"),
            out_specs=jax.P("x"),
            check_vma=False,
        )
        return sent(jax.jit(mapped).lower(x).compile().as_text())

    direct = "pairwise" if collective == "all_to_all" else "direct"
    found = compiled(direct)
    assert {(kind, dtype) for kind, dtype, _ in found} == {("collective-permute", "u8")}
    nbytes = sum(size for *_, size in found)
    assert nbytes == pricing.wire_bytes(collective, direct, (n,), shard, 2, wire=wire)
    assert nbytes <= 0.53 * pricing.wire_bytes(collective, direct, (n,), shard, 2)
    assert {dtype for _, dtype, _ in compiled("lax")} == {"u8"}


def test_transforms_groups_axes_and_pytrees():
    """vmap, scan, remat, groups, two axes, joined leaves, wide sums: within the bound."""
    mesh, wire, rng = make_mesh(2, 4), Wire("int8", 16), np.random.default_rng(0)
    x = rng.normal(size=(8, 3, 40)).astype(np.float32)
    total = partial(ringcoll.psum, axis_name=("x", "y"), wire=wire)

    def program(x):
        def turn(carry, row):
            return carry + total(row), total(row)

        return {
            "two axes": total(x),
            "vmap": jax.vmap(total)(x),
            "scan": lax.scan(turn, jnp.zeros(40), x)[1],
            "remat": jax.checkpoint(total)(x),
            "wide": ringcoll.psum(x, ("x", "y"), wire=wire, accumulate_dtype="float32"),
            # They share no scale, although one message of all would put several into one block.
            "leaves": jnp.stack(total([1e9 * x[0][:34], *x], algorithm="direct")[1:]),
            "narrow": total(x.astype(jnp.bfloat16)).astype(jnp.float32),
            "mean": 8 * ringcoll.pmean(x, ("x", "y"), wire="int8"),
        }

    def eager(x):
        return {"eager": total(x)}

    for run, options in (
        (program, {"check_vma": True}),
        (program, {"check_vma": False}),
        (eager, {"jit": False}),
    ):
        done = per_rank(mesh, run, x, **options)
        limit = precision.error_bound("psum", "direct", (8,), 2.0**-7, wire=wire)
        limit *= abs(x).reshape(8, -1).max(1).sum()
        for name, y in done.items():
            assert abs(np.asarray(y) - x.sum(0)).max() < limit, name
            assert (y == y[:1]).all(), name

    groups = [[3, 0, 5, 6], [2, 7, 4, 1]]
    line, add = make_mesh(8), partial(ringcoll.psum, axis_name="x", axis_index_groups=groups)
    grouped = per_rank(line, partial(add, wire=wire), x, check_vma=False)
    assert (
        grouped == per_rank(line, partial(add, wire=wire, algorithm="ring"), x, check_vma=False)
    ).mean() < 1
    for group in groups:
        assert abs(np.asarray(grouped)[group] - x[group].sum(0)).max() < limit


def test_infinities_and_nans_stay():
    x = np.random.default_rng(0).normal(size=(4, 4, 32)).astype(np.float32)
    x[1, 0, 0], x[2, 1, 1], x[3, 2, 2] = np.inf, np.nan, -np.inf

    def program(x):
        options = {"axis_name": "x", "wire": Wire("int8", 32)}
        return [
            [
                ringcoll.psum(x, algorithm=a, **options)
                for a in ("auto", "direct", "ring", "one_shot")
            ],
            ringcoll.all_gather(x, **options),
        ]

    sums, gathered = per_rank(make_mesh(4), program, x)
    for y in sums:
        assert np.isinf(y[:, 0, 0]).all() or np.isnan(y[:, 0, 0]).all()
        assert not np.isfinite(y[:, [0, 1, 2], [0, 1, 2]]).any()
        assert np.isfinite(y[:, 3]).all()
    special = ~np.isfinite(x)
    for y in np.asarray(gathered):
        np.testing.assert_array_equal(y[special], x[special])


def test_rounding_at_random_under_every_transform():
    mesh = make_mesh(4)
    x = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 256)

    def program(x):
        def of(key, x=x, algorithm="auto"):
            wire = Wire("int8", 16, key)
            return ringcoll.psum(x, "x", wire=wire, algorithm=algorithm)

        def loss(x, key):
            return (of(key, x) * jnp.arange(8.0)[None]).sum()

        return (
            jax.vmap(of)(keys),
            {a: of(keys[0], algorithm=a) for a in ("lax", "ring", "recursive_doubling")},
            jax.vmap(partial(jax.grad(loss), x))(keys),
            [ringcoll.psum([x, x[0]], "x", wire=Wire(stochastic=keys[0]))],
        )

    for check_vma in (True, False):
        found = per_rank(mesh, program, x, check_vma=check_vma)
        many, each, grads, _ = jax.tree.map(np.asarray, found)
        assert len(np.unique(many[0], axis=0)) > 200  # another key, other bits
        scale = abs(x).reshape(4, -1).max(1).sum() * 2 / 127
        assert abs(many.mean(1) - x.sum(0)).max() < 5 * scale / 256**0.5
        for y in (*each.values(), many):
            assert (y == y[:1]).all()
        exact = np.broadcast_to(np.arange(8.0) * (1 if check_vma else 4), x.shape)
        assert abs(grads.mean(1) - exact).max() < 5 * 4 * 7 * 2 / 127 / 256**0.5


def test_a_ragged_exchange_ignores_rows_that_say_nothing():
    n = 4
    rows = np.zeros((n, 5, 3), np.float32)
    rows[:, :2] = np.arange(1, 1 + 2 * n * 3).reshape(n, 2, 3)
    rows[:, 2:] = np.nan  # which share a block with the others, if they travel

    def send(x):
        r = lax.axis_index("x")
        to = (jnp.arange(n) == (r + 1) % n).astype(jnp.int32) * 2
        came = (jnp.arange(n) == (r - 1) % n).astype(jnp.int32) * 2
        zeros = jnp.zeros(n, jnp.int32)
        call = partial(ringcoll.ragged_all_to_all, axis_name="x", wire=Wire("int8", 64), max_send=4)
        f = lambda x: call(x, jnp.full((5, 3), 7.0), zeros, to, zeros, came)  # noqa: E731
        y, back = jax.vjp(f, x)
        return y, back(jnp.ones_like(y))[0]

    y, back = per_rank(make_mesh(n), send, rows)
    assert abs(y[:, :2] - np.roll(rows, 1, 0)[:, :2]).max() <= 24 / 250
    assert (y[:, 2:] == 7).all()
    np.testing.assert_allclose(back[:, :2], 1, rtol=1e-2)
    assert (back[:, 2:] == 0).all()


REFUSED = {
    "codes": ("int4", ValueError, "'int4' has no codes; choose from 'int8'"),
    "kind": (8, TypeError, "wire=8 is not a wire; pass 'int8', or a ringcoll.Wire"),
    "key": (Wire(stochastic=3), TypeError, "stochastic=3 is not a key; pass one such as"),
}


@pytest.mark.parametrize("name", [*CALLS, "ragged_all_to_all"])
def test_what_no_wire_carries_is_refused_in_words(name):
    def refused(x, kind, words, **options):
        if name == "ragged_all_to_all":
            ints = jnp.zeros(2, jnp.int32)
            call = partial(ringcoll.ragged_all_to_all, x, x, ints, ints, ints, ints)
        else:
            call = partial(CALLS[name][1], x)
        with pytest.raises(kind, match=rf"ringcoll\.{name}\(.*{re.escape(words)}"):
            call(axis_name="x", **options)

    def program(x):
        for wire, kind, words in REFUSED.values():
            refused(x, kind, words, wire=wire)
        for dtype in ("int32", "complex64", "float8_e5m2"):
            words = f"an operand of {dtype} is not encoded"
            refused(x.astype(dtype), TypeError, words, wire="int8")
        return x

    per_rank(make_mesh(2), program, np.ones((2, 4, 2), np.float32))


def test_what_only_lax_can_do_has_no_wire():
    def program(x):
        uneven = [[0], [1, 2]]
        for options in ({"axis_index_groups": uneven}, {"axis_name": 0}):
            with pytest.raises(ValueError, match=r"jax\.lax alone can do this call"):
                ringcoll.psum(x, **{"axis_name": "x", "wire": "int8", **options})
        return ringcoll.psum(2.0, "x", wire="int8") + x

    assert (
        per_rank(make_mesh(3), program, np.ones((3, 2), np.float32), check_vma=False) == 7
    ).all()


@pytest.mark.parametrize(("algorithm", "lanes"), [("ring", 1), ("bidirectional_ring", 2)])
def test_lanes_are_encoded_in_step(algorithm, lanes):
    """A barrier joins the codes of all lanes of a round. A single lane needs none."""

    def scattered(x):
        return ringcoll.psum_scatter(x, "x", tiled=True, algorithm=algorithm, wire="int8")

    mapped = jax.shard_map(scattered, mesh=make_mesh(4), in_specs=P(), out_specs=P("x"))
    text = jax.jit(mapped).lower(jnp.ones((64, 256))).as_text()
    operands = [line.count("%") - 1 for line in text.splitlines() if "optimization_barrier" in line]
    # On a CPU there are more of them: see `test_on_a_cpu_codes_are_written_apart`.
    assert operands.count(2) == (3 if lanes > 1 else 0)


@pytest.mark.parametrize(("algorithm", "messages"), [("ring", 3 + 1), ("lax", 4 + 1)])
def test_on_a_cpu_codes_are_written_apart(algorithm, messages):
    """XLA:CPU must not fuse the bytes of a message with anything: it would take much longer."""

    def summed(x):
        return ringcoll.psum(x, "x", algorithm=algorithm, wire="int8")

    mapped = jax.shard_map(summed, mesh=make_mesh(4), in_specs=P(), out_specs=P())
    lowered = jax.jit(mapped).lower(jnp.ones((64, 256)))
    barriers = [line for line in lowered.as_text().splitlines() if "optimization_barrier" in line]
    apart = [line for line in barriers if line.count("%") - 1 == 5]  # codes, and bytes of scales
    assert len(apart) == messages
    if jax.__version_info__ < (0, 11):
        return  # its XLA:CPU drops barriers before it fuses
    for computation in lowered.compile().as_text().split("\n\n"):
        kinds = [word for word in ("round-nearest-even(", "shift-left(") if word in computation]
        assert len(kinds) < 2, computation
        assert not kinds or " concatenate(" not in computation, computation
