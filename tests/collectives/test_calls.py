"""Every drop-in, called in every way: few calls in which every pair of values occurs.

Each call is compared with what is right: the values on every rank, the derivative forward and in
reverse (by NumPy), the type (by jax.lax, traced at the same place), and what the lowered program
sends (by the price of the algorithm). Calls that need as many devices are one program.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import AUTO, AXES, MODES, OF_THE_AXIS, PERMUTES, SUMS, Call, numbers
from cases import CASES, MAIN, Case
from covering import SEEDS, any_of, covering
from sent import PERMUTE, messages, total
from support import assert_same, every_rank, exists, make_mesh, per_rank, runnable

import ringcoll
import ringcoll.lax
from ringcoll import Tree, pmax, pmean, pmin, psum
from ringcoll.choose.table import Table, TableRow, choices
from ringcoll.collectives import by_schedule
from ringcoll.runtime import run as running
from ringcoll.runtime.hosts import HostSpread
from ringcoll.runtime.value_types import varying
from ringcoll.schedules.registry import LAX

MESH = make_mesh(4)  # of one axis, x


def test_all_gather():
    x = np.arange(24.0).reshape(4, 3, 2)  # of four ranks
    y = per_rank(MESH, lambda x: ringcoll.all_gather(x, "x", tiled=True, algorithm="ring"), x)
    np.testing.assert_array_equal(y, [x.reshape(12, 2)] * 4)


def test_psum_scatter():
    x = np.arange(32.0).reshape(4, 8)
    y = per_rank(MESH, lambda x: ringcoll.psum_scatter(x, "x", tiled=True, algorithm="ring"), x)
    np.testing.assert_array_equal(y, x.sum(0).reshape(4, 2))


def test_psum_pmean_pmax_and_pmin():
    x, functions = np.array([[3.0, 8], [5, 2], [9, 4], [7, 6]]), (psum, pmean, pmax, pmin)
    y = per_rank(MESH, lambda x: [f(x, "x", algorithm="ring") for f in functions], x)
    np.testing.assert_array_equal(y, [[[24, 20]] * 4, [[6, 5]] * 4, [[9, 8]] * 4, [[3, 2]] * 4])


def test_pbroadcast():
    x = np.arange(12.0).reshape(4, 3)
    y = per_rank(MESH, lambda x: ringcoll.pbroadcast(x, "x", 2, algorithm="ring"), x)
    np.testing.assert_array_equal(y, [[6, 7, 8]] * 4)


def test_all_to_all():
    x = np.arange(32.0).reshape(4, 4, 2)  # x[2, 3] goes from rank 2 to rank 3
    y = per_rank(MESH, lambda x: ringcoll.all_to_all(x, "x", 0, 0, algorithm="pairwise"), x)
    np.testing.assert_array_equal(y, x.swapaxes(0, 1))


def test_ppermute():
    x = np.arange(8.0).reshape(4, 2)
    y = per_rank(MESH, lambda x: ringcoll.ppermute(x, "x", [(0, 2), (2, 3), (3, 1)]), x)
    np.testing.assert_array_equal(y, [[0, 0], [6, 7], [0, 1], [4, 5]])


#: "mixed" is a tree with whole numbers, and with booleans if lax takes them.
NUMBERS = ["float32", "bfloat16", "float8_e5m2", "mixed"]
COMMON: dict[str, Sequence[Any]] = {
    "ranks": [1, 2, 3, 4, 5, 8],
    "axes": ["x", "xy", "yx", "y of two"],
    "groups": ["none", "even", "scattered"],
    "dtype": [*NUMBERS, "complex64", "key"],
    "size": ["usual", "zero"],
    "mode": [*MODES],
    "derivative": ["forward", "reverse"],
    "check_vma": [False, True],
    "program": ["usual", "loops", "x64"],
}
OWN = ["own schedule", "own table"]
WIDE = {"axes": [*AXES], "accumulate": [None, "float32", "float64"], "order": [None, Tree(8)]}


def of(*names: str) -> list[Case]:
    return [case for case in CASES if case.name in names]


def by(collective: str, *own: str) -> list[str]:
    """The names of algorithms."""
    return ["auto", *choices(collective), *own]


#: Of all-reduces that are like psum: one of each kind; in the exhaustive tier, all.
FEW = ["auto", LAX, "ring", "halving_doubling", "one_shot"]

#: The factors of each function, or of functions that are alike; those of `COMMON` too.
TABLES: dict[str, dict[str, Sequence[Any]]] = {
    "all_gather": {"case": of("all_gather"), "algorithm": by("all_gather", *OWN), **WIDE},
    "psum_scatter": {
        "case": of("psum_scatter"),
        "algorithm": by("psum_scatter", *OWN),
        "dtype": [*NUMBERS, "complex64"],
        **WIDE,
    },
    "psum and pmean": {
        "case": of("psum", "pmean"),
        "algorithm": by("psum", *OWN, "own function", "own stages"),
        "groups": [*COMMON["groups"], "uneven"],
        "dtype": [*NUMBERS, "complex64"],
        **WIDE,
    },
    "pmax and pmin": {
        "case": of("pmax", "pmin"),
        "algorithm": FEW,
        "derivative": ["reverse"],  # which they do not have
        "groups": [*COMMON["groups"], "uneven"],
        "dtype": NUMBERS,
    },
    "all_to_all": {"case": of("all_to_all", "pswapaxes"), "algorithm": by("all_to_all", *OWN)},
    "pbroadcast": {"case": of("pbroadcast"), "algorithm": FEW, "groups": ["none"]},
    "permutes": {"case": of(*PERMUTES), "groups": ["none"]},
}

IS_OLD = jax.__version_info__ < (0, 11)
POWERS_OF_TWO = ("recursive_doubling", "halving_doubling")
#: What cannot be, by the names of some factors.
FORBIDDEN: list[Callable[..., Any]] = [
    # Without axes, each rank is alone, and there are no groups.
    lambda axes, ranks: axes == "none" and ranks > 1,
    lambda axes, groups: axes == "none" and groups != "none",
    # Groups of several sizes are lax's.
    lambda groups, ranks: groups == "uneven" and ranks == 1,
    lambda groups, algorithm: groups == "uneven" and algorithm not in ("auto", LAX),
    # lax has no groups along a vmap, whose axis JAX does not type, or to an invariant.
    lambda groups, mode: groups != "none" and mode in OF_THE_AXIS,
    lambda check_vma, mode: check_vma and mode in OF_THE_AXIS,
    lambda groups, case: groups != "none" and "to" in case.options(1),
    # jax 0.10 gathers no keys to an invariant, nor anything along a vmap.
    lambda dtype, case: IS_OLD and dtype == "key" and "to" in case.options(1),
    lambda mode, case: IS_OLD and mode in OF_THE_AXIS and "to" in case.options(1),
    # accumulate_dtype is real, and float64 needs x64.
    lambda accumulate, dtype: accumulate and dtype == "complex64",
    lambda accumulate, program: accumulate == "float64" and program != "x64",
    # There is no y, or it is not the last axis.
    lambda mode, axes: mode == "vmap of x" and axes in ("xy", "yx", "y of two", "none"),
    lambda mode, axes: mode == "vmap of y" and axes in ("x", "none"),
    # The gradient of a mean adds thirds or fifths.
    lambda derivative, ranks, case: (
        derivative == "reverse" and ranks in (3, 5) and case.name == "pmean"
    ),
    # lax divides all means by the size of the first group.
    lambda groups, case: groups == "uneven" and case.name == "pmean",
    # A schedule for ranks that a mesh does not have.
    lambda mode, axes, algorithm: (
        mode == "vmap of y" and axes in ("xy", "yx") and algorithm in ("own schedule", "own stages")
    ),
    lambda size, case: size == "zero" and case.shape(1) == (),  # a scalar has a size
    # A tree has 8 leaves, an axis, and groups of one size, and is not along a mesh and a vmap.
    lambda order, ranks: order and ranks in (3, 5),
    lambda order, axes: order and axes == "none",
    lambda order, groups: order and groups == "uneven",
    lambda order, mode, axes: order and mode == "vmap of y" and axes in ("xy", "yx"),
]


def calls_of(table: str, seed: int) -> list[Call]:
    """The calls of a table."""

    collective = TABLES[table]["case"][0].collective
    of_powers = [name for name in POWERS_OF_TWO if name in TABLES[table].get("algorithm", ())]
    of_powers = [name for name in of_powers if not exists(collective, name, (3,))]
    of_this_table: list[Callable[..., Any]] = [
        lambda algorithm, ranks: algorithm in of_powers and ranks in (3, 5),
        # These add by a tree.
        lambda order, algorithm: order and algorithm not in ("auto", LAX, "one_shot", *of_powers),
        lambda order, algorithm, axes: order and algorithm == "one_shot" and axes in ("xy", "yx"),
        # lax has no groups of sums, if types are checked.
        lambda groups, check_vma: table == "psum and pmean" and groups != "none" and check_vma,
        # A permutation along a mesh and a vmap.
        lambda mode, axes: table == "permutes" and mode == "vmap of y" and axes in ("xy", "yx"),
    ]
    factors = COMMON | TABLES[table]
    if seed and factors.get("algorithm") is FEW:
        factors["algorithm"] = by("psum", *OWN, "own stages")
    return [Call(**row) for row in covering(factors, any_of(FORBIDDEN + of_this_table), seed)]


# ---- the program of a call


def described(aval: Any) -> tuple:
    return aval.shape, aval.dtype, aval.weak_type, aval.mat, aval.sharding.spec


def ours(call: Call, x: Any) -> Any:
    """Our results. Their types are those of lax's, here."""
    axes = AXES[call.axes]
    axis_name = axes[0] if len(axes) == 1 else axes
    y = call.case.ours(ringcoll.lax, x, axis_name, call.ranks, **call.options())
    groups = {"axis_index_groups": call.members} if call.members else {}
    by_lax = partial(call.case.by_lax, axes=axis_name, n=call.ranks, **groups)
    for mine, leaf in zip(jax.tree.leaves(y), jax.tree.leaves(x), strict=True):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):  # lax 0.12 cannot gather keys
            assert mine.dtype == leaf.dtype
        elif not (call.case.name == "pbroadcast" and call.mode in OF_THE_AXIS):  # nor this
            (theirs,) = jax.make_jaxpr(by_lax)(jax.typeof(leaf)).out_avals
            assert described(jax.typeof(mine)) == described(theirs), call
    return y


def run(number: int, call: Call, x: dict, t: dict, ct: dict) -> dict[str, Any]:
    """The result for x, and its derivative: for tangents t, or in reverse for cotangents ct."""
    x = {
        name: jax.random.wrap_key_data(leaf) if call.dtype == "key" else leaf
        for name, leaf in x.items()
    }

    def whole(moved: dict) -> Any:
        tree = {"none": None, "empty": (), "of": [x | moved]}
        return MODES[call.mode](partial(ours, call), tree)

    def of_moved(moved: dict) -> tuple[dict, Any]:
        y, axes = whole(moved), jax.sharding.get_abstract_mesh().axis_names
        return {name: varying(y["of"][0][name], axes) for name in moved}, y

    with jax.named_scope(f"call {number}"):
        if not t:
            y = whole({})
            return {"result": jax.tree.map(jax.random.key_data, y) if call.dtype == "key" else y}
        moved = {name: x[name] for name in t}
        if call.derivative == "forward":
            _, dy, y = jax.jvp(of_moved, (moved,), (t,), has_aux=True)
            return {"result": y, "forward": dy}
        _, pull_back, y = jax.vjp(of_moved, moved, has_aux=True)
        with jax.named_scope("back"):
            (dx,) = pull_back(ct)
        return {"result": y, "reverse": dx}


def right_and_given(call: Call, by_reciprocal: bool = False) -> tuple[dict[str, Any], list[dict]]:
    """The right results of `run`, and its operands, of all ranks."""
    case, x = call.case, call.operands("x")
    expected, gradient = case.expected, case.gradient
    if by_reciprocal:
        expected = gradient = case.by_reciprocal
    y = {name: call.right(expected, leaf) for name, leaf in x.items()}
    right: dict[str, Any] = {"result": {"none": None, "empty": (), "of": [y]}}
    moving = [name for name in x if call.is_differentiated(name)]
    t = {name: leaf for name, leaf in call.operands("t").items() if name in moving}
    dtypes = {name: dtype for name, (dtype, _) in call.leaves().items()}
    ct = {
        name: numbers(y[name].shape, dtypes[name], call.how(dtypes[name]), f"ct {name}")
        for name in moving
    }
    if moving:
        of, by = (expected, t) if call.derivative == "forward" else (gradient, ct)
        right[call.derivative] = {name: call.right(of, by[name]) for name in moving}
    return right, [x, t, ct]


def folded(call: Call, x: np.ndarray) -> np.ndarray:
    """All ranks' arrays as the program takes them: an axis that is a vmap is a dimension."""
    x = x.view(np.uint32).reshape(*x.shape, 2) if call.dtype == "key" else x
    n = call.vmapped
    return x.reshape(len(x) // n, n, *x.shape[1:]) if call.mode in OF_THE_AXIS else x


def check(calls: Sequence[Call], program: str, jit: bool = True) -> None:
    """Compare some calls, as one program."""
    limit = 1 if program == "loops" else running.UNROLL_UP_TO
    with (
        mock.patch.object(by_schedule, "default_table", return_value=AUTO),
        mock.patch.object(running, "UNROLL_UP_TO", limit),
        jax.enable_x64(True) if program == "x64" else nullcontext(),
    ):
        rights, operands = zip(*map(right_and_given, calls), strict=True)
        results, text = results_of(calls, operands, jit)
        sent = sent_by(text)
        wrong = []
        for i, (call, right, result) in enumerate(zip(calls, rights, results, strict=True)):
            try:
                assert_right(call, jax.tree.map(partial(unfolded, call), result), right)
                if text:
                    check_sent(call, sent[i])
            except AssertionError as error:
                wrong.append(f"{call}\n{error}")
    assert not wrong, f"{len(wrong)} of {len(calls)} calls:\n" + "\n\n".join(wrong)


def results_of(calls: Sequence[Call], operands: Sequence[list], jit: bool) -> tuple[list, str]:
    """The results of all ranks, and the lowered program, if it tells which call sends a message.

    In eager mode there is no program. Before JAX 0.11, a collective is a function within it, whose
    messages do not tell who calls it.
    """

    def everything(operands: list) -> list:
        results = []
        for i, call in enumerate(calls):
            mapped = every_rank(call.make_mesh(), partial(run, i, call), call.check_vma)
            try:
                results.append(mapped(*operands[i]))
            except Exception as error:
                error.add_note(str(call))
                raise
        return results

    folds = [
        jax.tree.map(partial(folded, call), given)
        for call, given in zip(calls, operands, strict=True)
    ]
    if not jit:
        return jax.device_get(everything(folds)), ""
    lowered = jax.jit(everything).lower(folds)
    text = lowered.as_text(debug_info=True) if not IS_OLD else ""
    return jax.device_get(lowered.compile()(folds)), text


def assert_right(call: Call, result: Any, right: Any) -> None:
    if call.case.name == "pmean":
        other, _ = right_and_given(call, by_reciprocal=True)
        right = jax.tree.map(lambda x, a, b: np.where(x == b, b, a), result, right, other)
    assert_same(result, right)


def unfolded(call: Call, x: np.ndarray) -> np.ndarray:
    x = x.reshape(len(x) * call.vmapped, *x.shape[2:]) if call.mode in OF_THE_AXIS else x
    return np.ascontiguousarray(x).view(np.uint64)[..., 0] if call.dtype == "key" else x


def sent_by(text: str) -> dict[int, dict[str, list]]:
    """What each call of a program sends: forward and back."""
    sent: dict[int, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for message in messages(text):
        number = int(re.search(r"call (\d+)\b", message.name)[1])
        way = "back" if "/back/" in message.name else "forward"
        sent[number][way].append(message)
    return sent


def check_sent(call: Call, sent: dict[str, list]) -> None:
    """Compare what a call sends with its price."""
    names = [*call.leaves()]
    moving = [name for name in names if call.is_differentiated(name)]
    collective = call.case.collective
    expected = {"forward": call.price(names), "back": total([])}
    if call.derivative == "forward":
        expected["forward"] += call.price(moving)
    else:
        expected["back"] = call.price(moving, back=True)
    if call.check_vma and (collective in SUMS[:2] or "to" in call.case.options(1)):
        expected["back"] = total([])  # types say that all ranks have the same cotangent
    on_mesh = call.mode not in OF_THE_AXIS
    for way, paid in expected.items():
        permutes = [message for message in sent[way] if message.kind == PERMUTE]
        if on_mesh and call.program != "loops":
            assert total(permutes) == paid, way
        elif on_mesh:
            assert 0 <= len(permutes) <= paid["messages"], way
            assert bool(permutes) == bool(paid["messages"]), way
        elif len(AXES[call.axes]) == 1:
            assert not sent[way], way
    if on_mesh and call.algorithm and call.axes != "none" and call.groups != "uneven":
        check_names(call, sent["forward"], names)


def check_names(call: Call, sent: list, names: Sequence[str]) -> None:
    """Profiles show the algorithm that ran; by a built-in, sums have the wide dtype."""
    dtypes = {call.leaves()[name][0] for name in names}
    picked = {call.picked(call.case.collective, dtype) for dtype in dtypes}
    if all(isinstance(each, str) for each in picked):
        found = {re.search(r"ringcoll\.\w+\(([^()]+)\)", message.name)[1] for message in sent}
        assert found <= picked
    built_in = {message.dtype for message in sent if message.kind != PERMUTE}
    if picked == {LAX} and call.accumulate and call.case.name in SUMS and not call.order:
        assert built_in <= {{"float32": "f32", "float64": "f64"}[call.accumulate], "i32"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TABLES)
def test_calls(name, seed):
    programs: dict[Any, list[Call]] = defaultdict(list)
    for call in calls_of(name, seed):
        programs[call.program, call.make_mesh().size].append(call)
    for (program, _), calls in sorted(programs.items(), key=lambda item: item[0]):
        check(calls, program)


#: Outside of `jit`, each operation is a program by itself, so there are few of these.
EAGER: dict[str, Sequence[Any]] = {
    "case": [case for case in MAIN if case.name in ("psum", "pmin", "all_to_all", "ppermute")],
    "ranks": [2, 3],
    "dtype": ["float32", "bfloat16"],
    "algorithm": [None, "first"],
    "mode": ["plain", "vmap"],
    "derivative": ["forward", "reverse"],
    "check_vma": [False, True],
}


@pytest.mark.parametrize("seed", SEEDS)
def test_eager_calls(seed):
    forbidden = any_of([lambda algorithm, case: algorithm and not case.takes_algorithm])
    calls = []
    for row in covering(EAGER, forbidden, seed):
        if row["algorithm"]:
            row["algorithm"] = runnable(row["case"].collective, row["ranks"])[0]
        calls.append(Call(**row))
    check(calls, "usual", jit=False)


@pytest.mark.parametrize("name", [case.name for case in MAIN])
def test_nothing_is_nothing_on_whatever_axis(name):
    """Of no leaves, most functions of lax do not look at the axis either."""
    case = next(case for case in MAIN if case.name == name)

    nothing = {"none": None, "empty": ()}
    assert case.ours(ringcoll.lax, nothing, "no axis", 3) == nothing


@pytest.mark.parametrize(("hosts", "algorithm"), [(1, "ring"), (2, "direct")])
def test_a_table_is_told_of_hosts(hosts, algorithm, monkeypatch):
    monkeypatch.setattr(by_schedule, "on_hosts", lambda *_: HostSpread(hosts, None))
    rows = (TableRow("psum", "cpu", "direct", hosts=(2, None)), TableRow("psum", "cpu", "ring"))
    mapped = every_rank(
        make_mesh(3), lambda x: ringcoll.psum(x, "x", algorithm=Table(rows)), check_vma=False
    )
    sent = messages(jax.jit(mapped).lower(np.ones((3, 3))).as_text(debug_info=True))
    assert {re.search(r"psum\((\w+)\)", message.name)[1] for message in sent} == {algorithm}
