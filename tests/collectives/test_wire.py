"""Collectives with a narrow wire: values, gradients, bits, what travels, and what is refused."""

import re
from functools import partial
from itertools import groupby
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import SEEDS, covering
from jax import lax
from jax.sharding import PartitionSpec as P
from sent import PERMUTE, messages
from support import every_rank, make_mesh, per_rank

import ringcoll
from ringcoll import Wire, costs
from ringcoll.collectives import sums as ways
from ringcoll.costs.wire import CODES
from ringcoll.runtime import run as running


def test_leaves_share_messages_and_no_scale():
    small = np.array([[127.0, 64], [1, 127]])  # multiples of each rank's largest / 127
    large = 1e9 * small
    call = partial(ringcoll.psum, axis_name="x", algorithm="direct", wire="int8")
    sums = per_rank(make_mesh(2), lambda a, b: call([a, b]), large, small)
    np.testing.assert_allclose(sums, [[large.sum(0)] * 2, [small.sum(0)] * 2], rtol=1e-5)


#: By function, two forms of a call: the shape of one rank's operand on n ranks, and the arguments.
FORMS = {
    "all_gather": ((lambda n: (3, 4), {"axis": 1, "tiled": True}), (lambda n: (3, 4), {"axis": 0})),
    "psum_scatter": (
        (lambda n: (3, 4 * n), {"scatter_dimension": 1, "tiled": True}),
        (lambda n: (n, 8), {"scatter_dimension": 0}),
    ),
    "psum": ((lambda n: (5, 2), {}), (lambda n: (n, 4), {})),
    "pmean": ((lambda n: (5, 2), {}), (lambda n: (n, 4), {})),
    "all_to_all": (
        (lambda n: (2 * n, 4), {"split_axis": 0, "concat_axis": 1, "tiled": True}),
        (lambda n: (n, 2, 4), {"split_axis": 0, "concat_axis": 0}),
    ),
}
#: The mesh, the axes and the groups.
PLACES = {
    "one rank": ((1,), "x", None),
    "four": ((4,), "x", None),
    "yx": ((2, 2), ("y", "x"), None),
    "groups": ((6,), "x", ((4, 1, 2), (0, 5, 3))),
}
#: What is done with the call.
WAYS = {
    "value": lambda call, x, w: call(x),
    "vmap": lambda call, x, w: jax.vmap(call)(jnp.stack([x, -x])),
    "tree": lambda call, x, w: call({"a": x, "b": (4 * x, None), "of size 0": x[:, :0]}),
    "gradient": lambda call, x, w: jax.grad(lambda x: (jax.checkpoint(call)(x) * w).sum())(x),
}
FACTORS = {
    "function": [*FORMS],
    "algorithm": [
        *("auto", "lax", "ring", "bidirectional_ring", "bruck", "direct", "recursive_doubling")
    ],
    "form": [0, 1],
    "codes": [*CODES],
    "block": [4, 128],
    "dtype": ["float32", "bfloat16", "float16"],
    "place": [*PLACES],
    "way": [*WAYS],
    "unroll up to": [24, 2],
    "check_vma": [True, False],
}
TRANSPOSE = {"all_gather": "psum_scatter", "psum_scatter": "all_gather"}
SUMS = ("psum", "pmean", "psum_scatter")


def forbidden(case):
    """Also if no function has the algorithm and is called in this way."""
    if case.get("place") == "groups" and (case.get("check_vma") or case.get("way") == "vmap"):
        return True  # lax has no groups there
    functions = [case["function"]] if "function" in case else FORMS
    return not any(fits(name, case.get("algorithm", "auto"), case.get("way")) for name in functions)


def fits(function, algorithm, way):
    if way == "tree" and function not in ("psum", "pmean"):
        return False  # not element by element: operands of other shapes, such as those of size 0
    if function == "pmean":  # a sum, divided
        return algorithm in ("auto", "recursive_doubling")
    if function == "all_to_all":
        return algorithm in ("auto", "lax", "ring", "bruck")
    return algorithm != "recursive_doubling" or function == "psum"


def coded(mesh, shape, codes):
    """Integers that the codes hold exactly, whatever the blocks: every second one is the largest.

    The largest differs from rank to rank.
    """
    largest = 127 if codes == "int8" else 7
    rng = np.random.default_rng(largest)
    x = rng.integers(-min(largest, 16), min(largest, 16), (mesh.size, *shape)).astype(np.float64)
    x[..., ::2] = largest
    return x * 2.0 ** (np.arange(mesh.size) % 3).reshape(-1, *[1] * len(shape))


def algorithm_of(case):
    """The name of the algorithm. An exchange by a ring is "pairwise"."""
    if case["function"] == "all_to_all" and case["algorithm"] == "ring":
        return "pairwise"
    return case["algorithm"]


def ranks_of(case):
    mesh, _, groups = PLACES[case["place"]]
    return (len(groups[0]),) if groups else mesh


def operands_of(case):
    """All ranks' operands, and weights of results; float64."""
    mesh, n = make_mesh(*PLACES[case["place"]][0]), prod(ranks_of(case))
    shape, options = FORMS[case["function"]][case["form"]]
    x = jax.ShapeDtypeStruct(shape(n), jnp.float32)
    mapped = partial(getattr(lax, case["function"]), axis_name="i", **options)
    every = jax.ShapeDtypeStruct((n, *x.shape), jnp.float32)
    result = jax.eval_shape(jax.vmap(mapped, axis_name="i"), every)
    return [coded(mesh, of, case["codes"]) for of in (x.shape, result.shape[1:])]


def run(case, module, x, w):
    function, (_, axes, groups) = case["function"], PLACES[case["place"]]
    options = FORMS[function][case["form"]][1] | ({"axis_index_groups": groups} if groups else {})
    if module is ringcoll:
        wire = Wire(case["codes"], case["block"])
        options |= {"algorithm": algorithm_of(case), "wire": wire}
    call = partial(getattr(module, function), axis_name=axes, **options)
    return WAYS[case["way"]](call, x, w)


def allowed(case, exact, largest, total):
    """The error that is allowed: one rounding where contributions are encoded once; or the bound.

    `largest` is the largest magnitude of a rank, `total` the sum of all ranks' largest.
    """
    is_back = case["way"] == "gradient"
    what, n = case["function"], prod(ranks_of(case))
    what = TRANSPOSE.get(what, what) if is_back else what
    eps = float(jnp.finfo(case["dtype"]).eps)
    algorithm = case["algorithm"]
    if n == 1:
        return 0
    if is_back and what in ("psum", "pmean") and case["check_vma"]:
        return n * eps * total  # by lax, without a wire: JAX's own sum of the weights
    if what in TRANSPOSE.values() or what == "all_to_all":
        once = ("lax",) if len(ranks_of(case)) > 1 else ("auto", "lax", "direct")
        if what != "psum_scatter" or algorithm in once:
            # A scale is smaller by 2**-22, so that its largest code does not overflow.
            return eps / 2 * abs(exact) + 2.0**-20 * (total if what in SUMS else largest)
    algorithm = "direct" if algorithm in ("auto", "lax") else algorithm
    wire = Wire(case["codes"], case["block"])
    relative = costs.error_bound(what, algorithm, ranks_of(case), eps, wire=wire)
    assert relative < 1.6 * n  # it says something
    return relative * total / (n if what == "pmean" else 1)


def check(case, found, exact, largest, total):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert ours.dtype == case["dtype"], case
        assert ours.shape == theirs.shape, case
        scale = 4 if case["way"] == "tree" else 1
        error = abs(np.asarray(ours, np.float64) - theirs)
        limit = allowed(case, theirs, scale * largest, scale * total)
        assert (error <= limit).all(), (case, error.max(), limit)
        if case["function"] in ("psum", "pmean", "all_gather") and case["way"] == "value":
            ranks = PLACES[case["place"]][2] or [range(len(ours))]
            for group in map(list, ranks):
                assert (ours[group] == ours[group[0]]).all(), case


@pytest.mark.parametrize("seed", SEEDS)
def test_every_call_is_within_its_bound(seed, monkeypatch):
    def results(module, some, operands):
        """By one program: in float32 by lax, and in the dtype of each case by ringcoll."""

        def program(xs):
            found = []
            for case, of in zip(some, xs, strict=True):
                for room in (running, ways):
                    monkeypatch.setattr(room, "UNROLL_UP_TO", case["unroll up to"])
                found.append(run(case, module, *of))
            return found

        dtypes = [case["dtype"] if module is ringcoll else "float32" for case in some]
        pairs = zip(operands, dtypes, strict=True)
        xs = [[np.asarray(x, dtype) for x in of] for of, dtype in pairs]
        mesh = make_mesh(*PLACES[some[0]["place"]][0])
        return per_rank(mesh, program, xs, check_vma=some[0]["check_vma"])

    def program_of(case):
        return PLACES[case["place"]][0], case["check_vma"]

    cases = sorted(covering(FACTORS, forbidden, seed), key=program_of)
    for _, group in groupby(cases, program_of):
        some = list(group)
        operands = [operands_of(case) for case in some]
        ours, theirs = (results(module, some, operands) for module in (ringcoll, lax))
        for case, found, exact, of in zip(some, ours, theirs, operands, strict=True):
            by_rank = [np.abs(x).reshape(len(x), -1).max(1) for x in of]
            check(case, found, exact, max(x.max() for x in by_rank), max(x.sum() for x in by_rank))


@pytest.mark.parametrize("algorithm", ["lax", "direct", "ring"])
def test_a_sum_is_rounded_once(algorithm):
    """Two ranks encode each contribution once. Received values are wide, whatever they become."""
    x = np.array(
        jnp.asarray(np.random.default_rng(0).uniform(-1.7, 1.7, (2, 2, 512)), jnp.bfloat16)
    )
    x[..., ::2] = 1.7265625  # the largest in every block
    call = partial(ringcoll.psum_scatter, axis_name="x", wire=Wire("int8", 8), algorithm=algorithm)
    found = np.asarray(per_rank(make_mesh(2), call, x), np.float64)
    scale = 1.7265625 * (1 - 2.0**-22) / 127
    coded = np.round(x.astype(np.float64) / scale) * scale
    for rank in (0, 1):
        own = coded if algorithm == "lax" else x.astype(np.float64)  # the others do not send it
        exact = own[rank, rank] + coded[1 - rank, rank]
        assert (abs(found[rank] - exact) <= 2.0**-8 * abs(exact) + 2.0**-20).all()


@pytest.mark.parametrize("unroll", [24, 1])
def test_sums_of_decoded_values_are_as_wide_as_asked(unroll, monkeypatch):
    """2**30 + 1 - 2**30 needs more digits than float32 has."""
    monkeypatch.setattr(ways, "UNROLL_UP_TO", unroll)
    x = np.float32([2**30, 1, -(2**30)]).reshape(3, 1, 1) * np.ones((3, 3, 2), np.float32)
    with jax.enable_x64(True):
        options = {"wire": "int8", "accumulate_dtype": "float64", "axis_name": "x"}
        scattered = per_rank(
            make_mesh(3),
            lambda x: {
                by: ringcoll.psum_scatter(x, algorithm=by, **options) for by in ("lax", "direct")
            },
            x,
        )
    for by, sums in scattered.items():
        # By "direct" the other two subtract what they have from what was decoded.
        np.testing.assert_allclose(sums[1], 1, rtol=1e-2, err_msg=by)


def test_beyond_a_number_of_ranks_programs_do_not_grow(monkeypatch):
    monkeypatch.setattr(ways, "UNROLL_UP_TO", 2)

    def operations(n):
        call = partial(ringcoll.psum_scatter, axis_name="x", algorithm="lax", wire="int8")
        mapped = jax.shard_map(call, mesh=make_mesh(n), in_specs=P(), out_specs=P("x"))
        return jax.jit(mapped).lower(jnp.ones((n, 8))).as_text().count(" stablehlo.")

    # Each block is cut out and stacked. It is encoded and decoded together with the others.
    assert operations(6) - operations(3) <= 2 * 3
    assert operations(2) - operations(1) > 20  # up to that number, by itself


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_all_ranks_have_the_same_bits(algorithm):
    """With few numbers, which a compiler may add a second time where they are decoded."""
    x = np.random.default_rng(3).normal(size=(3, 8, 2)).astype(np.float32)
    call = partial(ringcoll.psum, axis_name="x", algorithm=algorithm, wire="int8")
    sums = per_rank(make_mesh(3), lambda x: [call(y) for y in x], x)
    assert all((y == y[0]).all() for y in sums)


@pytest.mark.parametrize("function", [*FORMS])
def test_messages_are_bytes_as_many_as_priced(function):
    """The compiled programs of TPUs and GPUs: `test_wire_compiled`."""
    n, wire = 8, Wire("int8", 32)
    shape, options = FORMS[function][0]
    algorithm = "pairwise" if function == "all_to_all" else "direct"
    x = jax.ShapeDtypeStruct((n, 16, *shape(n)[1:]), jnp.bfloat16)

    def sent(algorithm):
        call = partial(getattr(ringcoll, function), axis_name="x", wire=wire, **options)
        mapped = every_rank(make_mesh(n), lambda x: call(2 * x, algorithm=algorithm), False)
        found = messages(jax.jit(mapped).lower(x).as_text())
        assert {message.dtype for message in found} == {"ui8"}
        return found

    shard = prod(x.shape[1:]) // (1 if function == "all_gather" else n)
    nbytes = sum(message.bytes for message in sent(algorithm))
    assert nbytes == costs.wire_bytes(function, algorithm, (n,), shard, 2, wire=wire)
    assert PERMUTE not in {message.kind for message in sent("lax")}


@pytest.mark.parametrize("function", [*FORMS, "ragged_all_to_all"])
def test_what_no_wire_carries_is_refused(function):
    def refused(x, kind, words, **options):
        if function == "ragged_all_to_all":
            ints = jnp.zeros(2, jnp.int32)
            call = partial(ringcoll.ragged_all_to_all, x, x, ints, ints, ints, ints)
        else:
            call = partial(getattr(ringcoll, function), x, **FORMS[function][0][1])
        with pytest.raises(kind, match=rf"ringcoll\.{function}\(.*{re.escape(words)}"):
            call(axis_name="x", **options)

    def program(x):
        refused(x, ValueError, "'int4' has no codes; choose from 'int8'", wire="int4")
        refused(x, TypeError, "wire=8 is not a wire; pass 'int8', or a ringcoll.Wire", wire=8)
        for dtype in ("int32", "complex64", "float8_e5m2"):
            words = f"an operand of {dtype} is not encoded"
            refused(x.astype(dtype), TypeError, words, wire="int8")
        return x

    jax.eval_shape(every_rank(make_mesh(2), program, True), jnp.ones((2, 4, 2)))


@pytest.mark.parametrize("options", [{"axis_index_groups": [[0], [1, 2]]}, {"axis_name": 0}])
def test_what_only_lax_can_do_has_no_wire(options):
    def program(x):
        with pytest.raises(ValueError, match=r"jax\.lax alone can do this call"):
            ringcoll.psum(x, **{"axis_name": "x", "wire": "int8", **options})
        return ringcoll.psum(2.0, "x", wire="int8") + x  # a constant is not sent

    ones = np.ones((3, 2), np.float32)
    assert (per_rank(make_mesh(3), program, ones, check_vma=False) == 7).all()


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
