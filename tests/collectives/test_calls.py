"""Every drop-in, called in every way: few calls in which every pair of values occurs.

Each call is compared with what is right: the values on every rank, the derivative forward and in
reverse (by NumPy), the type (by jax.lax, traced at the same place), and what the lowered program
sends (by the price of the algorithm). Calls that need as many devices are one program.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import ALL_REDUCES, AUTO, AXES, MODES, OF_THE_AXIS, PERMUTES, Call, numbers
from cases import CASES
from covering import SEEDS, covering
from sent import PERMUTE, messages, total
from support import assert_same, every_rank, exists

import ringcoll.lax
from ringcoll.collectives import by_schedule
from ringcoll.collectives.table import BUILT_INS, LAX, choices, halves
from ringcoll.runtime import engine
from ringcoll.runtime.value_types import varying

COMMON: dict[str, Sequence[Any]] = {
    "ranks": [1, 2, 3, 4, 5, 8],
    "axes": [*AXES],
    "groups": ["none", "even", "scattered"],
    "dtype": [
        *("float32", "bfloat16", "float8_e5m2", "int32", "bool", "complex64", "key", "mixed")
    ],
    "size": ["usual", "zero"],
    "mode": [*MODES],
    "check_vma": [False, True],
    "program": ["usual", "loops", "x64"],
}
OWN = ["own function", "own schedule", "own table"]
WIDE = {"accumulate": [None, "float32", "float64"], "order": [None, "tree"]}


def of(*names: str) -> list:
    return [case for case in CASES if case.name in names]


def by(collective: str, *own: str) -> list[str]:
    """The names of algorithms; of those that gather as bits, only one."""
    named = [name for name in choices(collective) if "+" not in name or name.startswith("ring+")]
    return ["auto", *named, *own]


TABLES: dict[str, dict[str, Sequence[Any]]] = {
    "all_gather": {"case": of("all_gather"), "algorithm": by("all_gather", *OWN), **WIDE},
    "psum_scatter": {"case": of("psum_scatter"), "algorithm": by("psum_scatter", *OWN), **WIDE},
    "all-reduce": {
        "case": of("psum", "pmean"),
        "algorithm": by("psum", *OWN, "own stages"),
        **WIDE,
    },
    "extrema": {
        "case": of("pmax", "pmin"),
        "algorithm": by("psum", *OWN, "own stages"),
    },
    "all_to_all": {
        "case": of("all_to_all", "pswapaxes"),
        "algorithm": by("all_to_all", *OWN),
    },
    "pbroadcast": {
        "case": of("pbroadcast"),
        "algorithm": by("pbroadcast", *OWN, "own stages"),
    },
    "permute": {"case": of(*PERMUTES)},
}
for name in ("all-reduce", "extrema"):
    TABLES[name] |= {"groups": [*COMMON["groups"], "uneven"]}
for name in ("pbroadcast", "permute"):
    TABLES[name] |= {"groups": ["none"]}


def may_run(call: dict[str, Any]) -> bool:
    """Whether an algorithm runs on this number of ranks."""
    if call["algorithm"] in ("auto", *BUILT_INS) or call["algorithm"].startswith("own"):
        return True
    wanted = ("case", "ranks", "axes", "groups", "algorithm")
    shape = Call(**{name: call[name] for name in wanted}).shape
    return exists(call["case"].collective, halves(call["algorithm"]).reduces, shape)


#: What cannot be. A rule about factors that a part of a case does not have says nothing.
FORBIDDEN = {
    "no axes: few functions take that": lambda c: (
        c["axes"] == "none"
        and c["case"].name not in ("psum", "pmean", "all_gather", "psum_scatter")
    ),
    "no axes: each rank is alone": lambda c: c["axes"] == "none" and c["ranks"] != 1,
    "no axes have no groups": lambda c: c["axes"] == "none" and c["groups"] != "none",
    "there is a group of others": lambda c: c["groups"] == "uneven" and c["ranks"] < 2,
    "uneven groups are lax's": lambda c: (
        c["groups"] == "uneven" and c["algorithm"] not in ("auto", LAX)
    ),
    "lax has no groups in a vmap": lambda c: c["groups"] != "none" and c["mode"] in OF_THE_AXIS,
    "lax has no groups of sums, if types are checked": lambda c: (
        c["groups"] != "none" and c["check_vma"] and c["case"].name in ALL_REDUCES
    ),
    "lax has no groups of an invariant": lambda c: (
        c["groups"] != "none" and "to" in c["case"].options(1)
    ),
    "lax does not add bools": lambda c: c["dtype"] == "bool" and c["case"].name == "psum_scatter",
    "no sum of keys": lambda c: c["dtype"] == "key" and c["case"].name in REFUSE_KEYS,
    "complex numbers have no order": lambda c: (
        c["dtype"] == "complex64" and c["case"].name in ("pmax", "pmin")
    ),
    "accumulate_dtype is real": lambda c: c["accumulate"] and c["dtype"] == "complex64",
    "float64 needs x64": lambda c: c["accumulate"] == "float64" and c["program"] != "x64",
    "the algorithm has a schedule": lambda c: not may_run(c),
    "a vmap of x has one axis": lambda c: c["mode"] == "vmap of x" and c["axes"] != "x",
    "a vmap of y has an y": lambda c: c["mode"] == "vmap of y" and c["axes"] in ("x", "none"),
    "one permute along a mesh and a vmap": lambda c: (
        c["mode"] == "vmap of y" and c["axes"] in ("xy", "yx") and c["case"].name in PERMUTES
    ),
    "a schedule of ranks that are not on the mesh": lambda c: (
        c["mode"] == "vmap of y"
        and c["axes"] in ("xy", "yx")
        and c["algorithm"] in ("own schedule", "own stages")
    ),
    "zero of a scalar": lambda c: c["size"] == "zero" and c["case"].shape(1) == (),
    "a tree of order": lambda c: c["order"] and c["ranks"] in (3, 5),
    "no axes have no order": lambda c: c["order"] and c["axes"] == "none",
    "one order in uneven groups": lambda c: c["order"] and c["groups"] == "uneven",
    "order along a mesh and a vmap": lambda c: (
        c["order"] and c["mode"] == "vmap of y" and c["axes"] in ("xy", "yx")
    ),
    "some algorithms add by the tree": lambda c: (
        c["order"] and not adds_by_the_tree(c["algorithm"])
    ),
}
REFUSE_KEYS = ("psum", "pmean", "pmax", "pmin", "psum_scatter")


def adds_by_the_tree(algorithm: str) -> bool:
    return algorithm in ("auto", LAX, "recursive_doubling", "halving_doubling")


def is_forbidden(case: dict[str, Any]) -> bool:
    def says(rule: Any) -> bool:
        try:
            return bool(rule(case))
        except KeyError:
            return False

    return any(says(rule) for rule in FORBIDDEN.values())


def calls_of(name: str, seed: int) -> list[Call]:
    return [Call(**row) for row in covering(COMMON | TABLES[name], is_forbidden, seed)]


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
    """The result for x; the tangent for those of t, the gradient for cotangents ct."""
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
        _, push, y = jax.linearize(of_moved, moved, has_aux=True)
        with jax.named_scope("tangent"):
            dy = push(t)
        with jax.named_scope("back"):
            (dx,) = jax.linear_transpose(push, moved)(ct)
        return {"result": y, "tangent": dy, "gradient": dx}


def right_and_given(call: Call) -> tuple[dict[str, Any], list[dict]]:
    """The right results of `run`, and its operands, of all ranks."""
    case, x = call.case, call.operands("x")
    y = {name: call.right(case.expected, leaf) for name, leaf in x.items()}
    right: dict[str, Any] = {"result": {"none": None, "empty": (), "of": [y]}}
    moving = [name for name in x if call.is_differentiated(name)]
    t = {name: leaf for name, leaf in call.operands("t").items() if name in moving}
    wide = call.accumulate is not None
    ct = {name: numbers(y[name].shape, y[name].dtype.name, wide, f"ct {name}") for name in moving}
    if moving:
        right["tangent"] = {name: call.right(case.expected, t[name]) for name in moving}
        right["gradient"] = {name: call.right(case.gradient, ct[name]) for name in moving}
    return right, [x, t, ct]


def folded(call: Call, x: np.ndarray) -> np.ndarray:
    """All ranks' arrays as the program takes them: an axis that is a vmap is a dimension."""
    x = x.view(np.uint32).reshape(*x.shape, 2) if call.dtype == "key" else x
    n = call.vmapped
    return x.reshape(len(x) // n, n, *x.shape[1:]) if call.mode in OF_THE_AXIS else x


def mapped(number: int, call: Call) -> Any:
    return every_rank(call.make_mesh(), partial(run, number, call), call.check_vma)


def check(calls: Sequence[Call], program: str, jit: bool = True) -> None:
    """Compare some calls, as one program."""
    rights, operands = zip(*map(right_and_given, calls), strict=True)
    folds = [
        jax.tree.map(partial(folded, call), given)
        for call, given in zip(calls, operands, strict=True)
    ]

    def everything(operands: list) -> list:
        return [mapped(i, call)(*operands[i]) for i, call in enumerate(calls)]

    limit = {"loops": 1}.get(program, engine.UNROLL_UP_TO)
    with (
        mock.patch.object(by_schedule, "default_table", return_value=AUTO),
        mock.patch.object(engine, "UNROLL_UP_TO", limit),
        jax.enable_x64(True) if program == "x64" else nullcontext(),
    ):
        if jit:
            lowered = jax.jit(everything).lower(folds)
            results = lowered.compile()(folds)
            check_sent(calls, lowered.as_text(debug_info=True))
        else:
            results = everything(folds)
    wrong = []
    for call, right, result in zip(calls, rights, jax.device_get(results), strict=True):
        try:
            assert_same(jax.tree.map(partial(unfolded, call), result), right)
        except AssertionError as error:
            wrong.append(f"{call}\n{error}")
    assert not wrong, f"{len(wrong)} of {len(calls)} calls:\n" + "\n\n".join(wrong)


def unfolded(call: Call, x: np.ndarray) -> np.ndarray:
    x = x.reshape(-1, *x.shape[2:]) if call.mode in OF_THE_AXIS else x
    return np.ascontiguousarray(x).view(np.uint64)[..., 0] if call.dtype == "key" else x


def check_sent(calls: Sequence[Call], text: str) -> None:
    """Compare what a program sends with the price, call by call."""
    sent: dict[int, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for message in messages(text):
        number = int(re.search(r"call (\d+)\b", message.name)[1])
        ways = [way for way in ("tangent", "back") if f"/{way}/" in message.name]
        sent[number][ways[0] if ways else "forward"].append(message)
    for number, call in enumerate(calls):
        try:
            check_call_sent(call, sent[number])
        except AssertionError as error:
            raise AssertionError(f"{call}\n{error}") from error


def check_call_sent(call: Call, sent: dict[str, list]) -> None:
    names = [*call.leaves()]
    moving = [name for name in names if call.is_differentiated(name)]
    collective = call.case.collective
    expected = {"forward": call.price(collective, names)}
    expected["tangent"] = call.price(collective, moving)
    expected["back"] = call.price(BACK.get(collective, collective), moving)
    if call.check_vma and (collective in ALL_REDUCES or "to" in call.case.options(1)):
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
    if on_mesh:
        check_names(call, sent["forward"])


def check_names(call: Call, sent: list) -> None:
    """Each message has the name of the algorithm that picked it; the built-in is the built-in."""
    found = {re.search(r"ringcoll\.(\w+)(?:\(([^()]+)\))?", m.name) for m in sent}
    del found


#: The collective by which the gradient is sent.
BACK = {"all_gather": "psum_scatter", "psum_scatter": "all_gather", "pbroadcast": "psum"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TABLES)
def test_calls(name, seed):
    programs: dict[Any, list[Call]] = defaultdict(list)
    for call in calls_of(name, seed):
        programs[call.program, call.make_mesh().size].append(call)
    for (program, _), calls in sorted(programs.items(), key=lambda item: item[0]):
        check(calls, program)
