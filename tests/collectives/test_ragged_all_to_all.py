"""`ragged_all_to_all`: every rank's rows against NumPy, gradients, `vmap`, refusals.

jax.lax cannot run its own function on CPU, so only its types and errors are compared.
"""

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
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import assert_same, data, every_rank, make_mesh, per_rank, runnable, trace

import ringcoll
from benchmarks.collectives.ragged import moved
from ringcoll import Wire, algorithms, costs
from ringcoll.choose.table import Table, TableRow
from ringcoll.collectives import rows


def test_ragged_all_to_all():
    """Rank 0 keeps the 1 and sends 2 and 3; rank 1 sends the 4 and keeps the 5."""
    operand, output = np.array([[1.0, 2, 3], [4, 5, 6]]), np.full((2, 3), 9.0)
    starts, sizes = np.array([[0, 1], [0, 1]]), np.array([[1, 2], [1, 1]])
    places, received = np.array([[0, 0], [1, 2]]), np.array([[1, 1], [2, 1]])
    program = partial(ringcoll.ragged_all_to_all, axis_name="x", algorithm="pairwise")
    operands = operand, output, starts, sizes, places, received
    with jax.enable_x64(True):  # the numbers are int64
        y = per_rank(make_mesh(2), program, *operands, jit=False)
    np.testing.assert_array_equal(y, [[1, 4, 9], [2, 3, 5]])


ROW = (2, 4)


# -- the numbers of a call --


def packed(sizes, order):
    """Where slices of these sizes start if they lie in this order, with gaps between them."""
    starts = np.zeros_like(sizes)
    starts[order] = np.cumsum(sizes[order] + 1) - sizes[order]
    return starts


def uneven(n, slices=1, seed=0):
    """Offsets and sizes of all ranks, no two alike: gaps, empty slices, any order."""
    rng = np.random.default_rng([seed, n, slices])
    sends = rng.integers(0, 4, (n, n, slices))
    gets = sends.swapaxes(0, 1).reshape(n, -1)
    at = np.stack([packed(one.reshape(-1), rng.permutation(n * slices)) for one in sends])
    to = np.stack([packed(one, rng.permutation(n * slices)) for one in gets])
    to = to.reshape(n, n, slices).swapaxes(0, 1).reshape(n, -1)
    return [x.astype(np.int32) for x in (at, sends.reshape(n, -1), to, gets)]


def overlapping(n, slices, seed):
    """Each rank sends the same rows to several ranks. Every third rank receives no rows."""
    at, sends, _, _ = uneven(n, slices, seed)
    sends = sends.reshape(n, n, slices) * (np.arange(n) % 3 != 1).reshape(1, n, 1)
    gets = sends.swapaxes(0, 1).reshape(n, -1)
    to = (np.cumsum(gets + 1, 1) - gets).reshape(n, n, slices).swapaxes(0, 1)
    of_rank = (at % 3, sends.reshape(n, -1), to.reshape(n, -1), gets)
    return [x.astype(np.int32) for x in of_rank]


def nothing(n, slices, seed):
    return [np.zeros((n, n * slices), np.int32)] * 4


SIZES = {"uneven": uneven, "overlapping": overlapping, "nothing": nothing}


def arrays(n, numbers, dtype="float32", row=ROW):
    """Operands and outputs that hold all slices and one more row."""
    at, sends, to, _ = numbers
    rows, ends = int((at + sends).max()) + 1, int((to + sends).max()) + 1
    whole = data((n, rows + ends, *row), jnp.dtype(dtype), n)
    return [whole[:, :rows], whole[:, rows:]]


def call(*xs, **options):
    return ringcoll.ragged_all_to_all(*xs, **{"axis_name": "x", **options})


def pulled_back(ct, rows, numbers):
    """The gradients of operand and output: rows travel back, and gradients of one row are added."""
    at, sends, to, _ = numbers
    slices = sends.shape[1] // len(ct)
    to_operand, to_output = np.zeros((len(ct), rows, *ct.shape[2:]), ct.dtype), ct.copy()
    for rank, number in np.ndindex(sends.shape):
        target, size = number // slices, sends[rank, number]
        source, start = slice(at[rank, number], at[rank, number] + size), to[rank, number]
        to_operand[rank, source] += ct[target, start : start + size]
        to_output[target, start : start + size] = 0
    return to_operand, to_output


# -- the table --


def own_algorithm(n):
    """An algorithm of a caller's own: blocks travel the other way round."""
    return algorithms.pairwise(n) if n < 3 else algorithms.bruck_all_to_all(n)


#: The mesh, the axes, the groups, and the devices of each group in the order of its ranks.
PLACES = {
    "one rank": ((1,), "x", None, [[0]]),
    "three": ((3,), "x", None, [[0, 1, 2]]),
    "yx": ((2, 2), ("y", "x"), None, [[0, 2, 1, 3]]),
    "along y": ((2, 3), "y", None, [[0, 1, 2], [3, 4, 5]]),
    "groups": ((6,), "x", ((4, 1, 2), (0, 5, 3)), [[4, 1, 2], [0, 5, 3]]),
}
FACTORS = {
    "algorithm": ["auto", "lax", "pairwise", "bruck", own_algorithm],
    "sizes": [*SIZES],
    "slices": [1, 3],
    "max_send": [None, "as many", 99],
    "dtype": ["float32", "bfloat16", "complex64", "uint32", "bool", "int4"],
    "integers": [("i4",) * 4, ("i2", "u1", "i4", "u4")],
    "row": [ROW, (), (0,)],
    "wire": [None, Wire("int8", 4), Wire("float8_e4m3fn", 128)],
    "way": ["value", "vmap", "gradient", "twice", "vmap of gradients"],
    "place": [*PLACES],
    "check_vma": [True, False],
}
INEXACT = ("float32", "bfloat16", "complex64")


def forbidden(case):
    keys = ("place", "dtype", "wire", "sizes")
    place, dtype, wire, sizes = map(case.get, keys)
    return (
        (place == "groups" and bool(case.get("check_vma")))  # lax has no groups there
        or (place == "yx" and case.get("algorithm") is own_algorithm)  # of one axis
        or (case.get("way") not in (None, "value", "vmap") and dtype not in (None, *INEXACT))
        or (wire is not None and dtype not in (None, "float32", "bfloat16"))
        or (wire is not None and case.get("row") == ())  # every second value is the largest
        # Then a rank may send more rows than there are: see `test_rows_that_are_sent_twice...`.
        or (sizes == "overlapping" and case.get("slices") == 3 and case.get("max_send", 1) is None)
    )


def of_all_groups(function, place, *xs):
    """The results of all devices, by a function of the arrays of one group of ranks."""
    results = None
    for group in PLACES[place][3]:
        found = function(*(x[group] for x in xs))
        results = results or [np.zeros((len(xs[0]), *x.shape[1:]), x.dtype) for x in found]
        for whole, part in zip(results, found, strict=True):
            whole[group] = part
    return results


def numbers_of(case):
    """The numbers of all devices; with groups, the ranks of each have others."""
    groups = PLACES[case["place"]][3]
    make = SIZES[case["sizes"]]
    each = [make(len(group), case["slices"], seed) for seed, group in enumerate(groups)]
    devices = np.argsort(np.ravel(groups))
    return [np.concatenate(some)[devices] for some in zip(*each, strict=True)]


def operands_of(case):
    """Operand, output, cotangent and the four arrays of integers of all devices."""
    numbers, dtype, wire = numbers_of(case), jnp.dtype(case["dtype"]), case["wire"]
    operand, output = arrays(prod(PLACES[case["place"]][0]), numbers, dtype, case["row"])
    ct = data(output.shape, dtype) if jnp.issubdtype(dtype, jnp.inexact) else output
    if wire:  # codes hold every value, whatever the blocks
        largest = 127 if wire.dtype == "int8" else 7
        for x in (operand, ct):
            x[...] = np.asarray(np.asarray(x, float) % 7, dtype)
            x[..., ::2] = largest
    if jnp.issubdtype(dtype, jnp.floating) and case["way"] in ("value", "vmap") and operand.size:
        at, sends = numbers[:2]
        for rank, x in enumerate(operand):  # what is not sent must not be looked at
            sent = [range(a, a + s) for a, s in zip(at[rank], sends[rank], strict=True)]
            x[[row for row in range(len(x)) if not any(row in some for some in sent)]] = np.nan
    kinds = zip(numbers, case["integers"], strict=True)
    return operand, output, ct, *(x.astype(kind) for x, kind in kinds)


def options_of(case):
    _, axes, groups, _ = PLACES[case["place"]]
    options = {"axis_name": axes, "algorithm": case["algorithm"], "wire": case["wire"]}
    if case["max_send"] == "as many":
        sends = numbers_of(case)[1]
        most = sends.reshape(len(sends), -1, case["slices"]).sum(2).max()
        options["max_send"] = max(int(most), 1)
    elif case["max_send"]:
        options["max_send"] = case["max_send"]
    return options | ({"axis_index_groups": groups} if groups else {})


def run(case, operand, output, ct, *numbers):
    def function(operand, output, *numbers):
        return call(operand, output, *numbers, **options_of(case))

    def of_arrays(operand, output):
        return jax.checkpoint(function)(operand, output, *numbers)

    def back_of(operand):
        return jax.vjp(lambda x: of_arrays(x, output), operand)[1]

    if case["way"] == "value":
        return [function(operand, output, *numbers)]
    if case["way"] == "vmap":  # operands along the last dimension, sizes along the first
        fewer = [numbers[0], numbers[1] // 2, numbers[2], numbers[3] // 2]
        both = [jnp.stack(two) for two in zip(numbers, fewer, strict=True)]
        batch = jnp.stack([operand, operand], -1)
        return [jax.vmap(function, (-1, None, 0, 0, 0, 0))(batch, output, *both)]
    if case["way"] == "gradient":  # of both, and forward and back of one
        _, moved_on = jax.jvp(lambda x: of_arrays(x, output), (operand,), (-operand,))
        return [*jax.vjp(of_arrays, operand, output)[1](ct), *back_of(operand)(ct), moved_on]
    if case["way"] == "twice":
        return jax.vjp(lambda ct: back_of(operand)(ct)[0], ct)[1](operand)
    step = lambda carry, cts: (carry, jax.vmap(back_of(operand))(cts)[0])  # noqa: E731
    return [lax.scan(step, 0, jnp.stack([ct, -ct])[None])[1][0]]


def expected(case, operand, output, ct, *numbers):
    """What NumPy makes of the arrays of one group of ranks."""
    numbers = [x.astype(np.int32) for x in numbers]
    rows, blank = operand.shape[1], np.zeros_like(output)
    if case["way"] == "value":
        return [moved(operand, output, *numbers)]
    if case["way"] == "vmap":
        fewer = [numbers[0], numbers[1] // 2, numbers[2], numbers[3] // 2]
        return [np.stack([moved(operand, output, *some) for some in (numbers, fewer)], 1)]
    if case["way"] == "gradient":
        of_operand, of_output = pulled_back(ct, rows, numbers)
        return [of_operand, of_output, of_operand, moved(-operand, blank, *numbers)]
    if case["way"] == "twice":
        return [moved(operand, blank, *numbers)]
    return [np.stack([pulled_back(some, rows, numbers)[0] for some in (ct, -ct)], 1)]


def check(case, found, exact):
    for ours, right in zip(found, exact, strict=True):
        if case["wire"] is None:
            if case["way"] not in ("value", "vmap"):  # -0.0 is 0.0 where gradients are added
                ours, right = (x + np.zeros((), x.dtype) for x in (ours, right))
            assert_same({str(case): ours}, {str(case): right})
            continue
        assert ours.dtype == right.dtype, case
        # A scale is smaller by 2**-22. Rows that several ranks send are added in the dtype.
        rounded = float(jnp.finfo(right.dtype).eps) if case["sizes"] == "overlapping" else 0
        ours, right = np.asarray(ours, float), np.asarray(right, float)
        limit = (2.0**-20 + 3 * rounded) * 127 * 4
        np.testing.assert_allclose(ours, right, rtol=0, atol=limit, err_msg=str(case))


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_arrive_and_the_others_stay(seed):
    def program_of(case):
        return PLACES[case["place"]][0], case["check_vma"]

    cases = sorted(covering(FACTORS, forbidden, seed), key=program_of)
    for (shape, check_vma), group in groupby(cases, program_of):
        some = list(group)
        operands = [operands_of(case) for case in some]

        def program(xs, some=some):
            return [run(case, *of) for case, of in zip(some, xs, strict=True)]

        found = per_rank(make_mesh(*shape), program, operands, check_vma=check_vma)
        for case, xs, ours in zip(some, operands, found, strict=True):
            check(case, ours, of_all_groups(partial(expected, case), case["place"], *xs))


def test_a_rank_may_have_nothing_at_all():
    n, numbers = 2, nothing(2, 1, 0)
    full, empty = data((n, 3, 2)), np.zeros((n, 0, 2), np.float32)
    pairs = [(full, full + 1), (empty, full), (full, empty)]
    ys = per_rank(
        make_mesh(n), lambda pairs, *of: [call(*two, *of) for two in pairs], pairs, *numbers
    )
    for y, (_, output) in zip(ys, pairs, strict=True):
        assert_same(np.asarray(y), output)


# -- max_send --


def lowered(program, *xs):
    """The StableHLO of the program of every rank."""
    mapped = every_rank(make_mesh(len(xs[0])), program, check_vma=True)
    return jax.jit(mapped).lower(*xs).as_text()


@pytest.mark.parametrize("slices", [1, 3])
def test_messages_are_as_priced(slices):
    numbers = uneven(4, slices)
    xs, most = (*arrays(4, numbers), *numbers), int(numbers[1].reshape(4, 4, slices).sum(2).max())
    of_table = Table((TableRow("ragged_all_to_all", "cpu", "bruck"),))
    for algorithm in [*runnable("all_to_all", 4), of_table]:
        program = partial(call, algorithm=algorithm, max_send=most)
        text = lowered(program, *xs)
        name = "bruck" if algorithm is of_table else algorithm
        price = costs.price("ragged_all_to_all", name, (4,))
        sent = re.findall(r"collective_permute.*-> tensor<(\d+)x(\d+)x2x4xf32>", text)
        assert (len(sent), sum(int(k) for k, _ in sent)) == (price.messages, price.sent)
        assert {int(rows) for _, rows in sent} == {most}


def test_a_program_checks_only_what_may_be_wrong():
    numbers = uneven(2)
    xs, more = (*arrays(2, numbers), *numbers), [np.tile(x, 2) for x in numbers]
    both = [np.stack([x, x], 1) for x in xs]
    assert "callback" not in lowered(call, *xs)
    assert "callback" not in lowered(jax.vmap(call), *both)
    assert "callback" not in lowered(partial(call, max_send=99), *xs)
    assert "callback" in lowered(partial(call, max_send=2), *xs)
    assert "callback" in lowered(jax.vmap(partial(call, max_send=2)), *both)
    assert "callback" in lowered(call, *xs[:2], *more)  # slices may share rows


@pytest.mark.parametrize(("dtype", "lost"), [("float32", np.nan), ("int8", -128), ("uint8", 255)])
def test_rows_that_do_not_fit_off_cpu(dtype, lost):
    """Two ranks, two slices each. A block holds three rows, but the first gets four."""
    at, sizes = np.array([[4, 0], [6, 2]], np.int32), np.array([[2, 2], [1, 1]], np.int32)
    blocks, output = jnp.array([1, 2, 3, 4, 5, 0], dtype), jnp.full(8, 9, dtype)
    result = rows.put(blocks, output, at, sizes, 3)
    assert_same(np.asarray(result), np.array([3, lost, 5, 9, 1, 2, 4, 9]).astype(dtype))


REFUSED = jax.errors.JaxRuntimeError


@pytest.mark.parametrize("slices", [1, 3])
def test_more_rows_than_max_send_are_refused_by_all_ranks(slices):
    """Ranks along the other axis of the mesh have fewer rows, but would wait for ever."""
    numbers = [np.tile(x, (2, 1)) for x in uneven(3, slices)]
    numbers[1][:3] = numbers[3][:3] = 0
    most = int(numbers[1].reshape(6, 3, slices).sum(2).max())
    xs = *arrays(6, numbers), *numbers

    def run(max_send):
        def program(*xs):
            y = ringcoll.ragged_all_to_all(*xs, axis_name="y", max_send=max_send)
            return y, lax.psum(y, ("x", "y"))

        return jax.block_until_ready(per_rank(make_mesh(2, 3), program, *xs))[0]

    with pytest.raises(REFUSED, match=f"has {most} rows for another.*{most - 1}"):
        run(most - 1)
    expected = [moved(*(x[half] for x in xs)) for half in (slice(3), slice(3, 6))]
    assert_same(np.asarray(run(most)), np.concatenate(expected))
    jax.effects_barrier()  # JAX waits for callbacks, and no longer for those that raised


def test_rows_that_are_sent_twice():
    """Two slices have the same rows. By default a block has no room for both."""
    operand, output = data((1, 3, 2)), np.zeros((1, 6, 2), np.float32)
    numbers = [np.array([x], np.int32) for x in ([0, 0], [3, 3], [0, 3], [3, 3])]
    with pytest.raises(REFUSED, match="a rank has 6 rows for another"):
        jax.block_until_ready(per_rank(make_mesh(1), call, operand, output, *numbers))
    y = per_rank(make_mesh(1), partial(call, max_send=6), operand, output, *numbers)
    assert_same(np.asarray(y), np.concatenate([operand, operand], 1))
    jax.effects_barrier()


def test_the_result_varies_as_any_operand_does():
    """lax gives it the type of `output`, which may be the same on all ranks before the call."""
    numbers = uneven(2)
    xs = *arrays(2, numbers), *numbers

    def program(operand, output, *numbers):
        same = jnp.zeros(output.shape)
        z = ringcoll.ragged_all_to_all(operand, same, *numbers, axis_name="y")
        assert jax.typeof(same).mat.varying == frozenset()
        assert jax.typeof(z).mat.varying == {"x", "y"}
        return z

    both = [np.concatenate([x, x]) for x in xs]
    z = np.asarray(per_rank(make_mesh(2, 2), program, *both))
    xs = xs[0], np.zeros_like(xs[1]), *numbers
    assert_same(z, np.concatenate([moved(*xs)] * 2))


def test_rows_that_are_sharded_over_a_different_axis():
    """As with tensor-parallel experts: the compiler splits rows, forward and backward."""
    numbers = uneven(2, 2)
    operand, output = arrays(2, numbers, row=(4,))
    mesh = jax.make_mesh(
        (2, 2), ("x", "y"), (AxisType.Auto, AxisType.Explicit), devices=jax.devices()[:4]
    )

    def one_rank(operand, output, *numbers):
        def function(operand, output):
            numbers_here = (x[0] for x in numbers)
            return call(operand[0], output[0], *numbers_here, algorithm="pairwise")[None]

        y, back = jax.vjp(function, operand, output)
        return y, back(y)

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(one_rank, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
        rows = (jax.device_put(x, P("x", None, "y")) for x in (operand, output))
        y, back = jax.jit(mapped)(*rows, *(jax.device_put(x, P("x")) for x in numbers))
    expected = moved(operand, output, *numbers)
    assert_same(np.asarray(y), expected)
    assert_same(jax.tree.map(np.asarray, back), pulled_back(expected, operand.shape[1], numbers))


# -- refusals --

X, Y, ONE = jnp.zeros((4, 2)), jnp.zeros((5, 2)), jnp.zeros(2, jnp.int32)
REFUSALS = [
    ((X, Y, ONE, ONE.astype(float), ONE, ONE), {}, ValueError, "send_sizes must be integer type"),
    ((X, Y, ONE[None], *[ONE] * 3), {}, ValueError, "input_offsets must be rank 1 with positive"),
    ((X, Y, *[ONE] * 4), {"axis_name": "z"}, NameError, "unbound axis name: z.*the axes here are"),
    ((X, Y, *[ONE] * 4), {"axis_name": {"x"}}, TypeError, "unhashable"),
    ((X, Y[0], *[ONE] * 4), {}, ValueError, r"\(4, 2\) and \(2,\); let them differ only in their"),
    ((X, Y[:, :1], *[ONE] * 4), {}, ValueError, "let them differ only in their first dimension"),
    ((X, Y.astype(int), *[ONE] * 4), {}, TypeError, "operand is float32 and output is int32; cast"),
    ((X, Y, *[ONE] * 3, ONE[:1]), {}, ValueError, "recv_sizes: 1.*pass a multiple of 2 of each"),
    ((X, Y, *[jnp.zeros(3, int)] * 4), {}, ValueError, "one multiple of 2 ranks.*a multiple of 2"),
    ((X, Y, *[ONE] * 4), {"max_send": 0}, ValueError, "max_send=0.*pass 1 or more"),
    ((X, Y, *[ONE] * 4), {"max_send": 1.5}, TypeError, "max_send=1.5 is not an integer"),
    ((X, Y, *[ONE] * 4), {"algorithm": "ring"}, ValueError, "choose from .*pairwise, bruck"),
    ((X, Y, *[ONE] * 4), {"axis_index_groups": [[0]]}, ValueError, "in exactly one group"),
    (([[1.0]], Y, *[ONE] * 4), {}, TypeError, "not a valid JAX type"),
]


@pytest.mark.parametrize(("xs", "options", "kind", "words"), REFUSALS)
def test_refusals_name_the_call_and_the_cure(xs, options, kind, words):
    with pytest.raises(kind, match=f"(?s)ringcoll.ragged_all_to_all.*{words}"):
        trace(lambda: call(*xs, **options), make_mesh(2))


def test_rows_that_an_int32_cannot_count_are_refused():
    rows = jax.ShapeDtypeStruct((2**31,), jnp.uint8)
    numbers = jax.ShapeDtypeStruct((4,), jnp.int32)
    mapped = jax.shard_map(call, mesh=make_mesh(2), in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(ValueError, match=r"(?s)in 2 blocks of 1073741824.*a smaller max_send"):
        jax.jit(mapped).lower(rows, rows, *[numbers] * 4)


def test_an_axis_of_a_vmap_is_refused_as_in_lax():
    batch = [jnp.stack([x, x]) for x in (X, Y, *[ONE] * 4)]
    with pytest.raises(NotImplementedError, match=r"over the vmapped axis 'v'.*use a mesh axis"):
        jax.vmap(partial(ringcoll.ragged_all_to_all, axis_name="v"), axis_name="v")(*batch)
