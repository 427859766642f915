"""Every matmul with a collective, by tables of its arguments, against NumPy.

Each case compares values (exact, so all that a result may do is round once), dtypes, weak types,
varying axes, the gradients of all factors, and what the traced program says: the precision and the
type of every product, and which elements of which dtype the ranks send.
"""

from collections import Counter
from contextlib import ExitStack
from functools import partial
from itertools import product
from math import prod
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import Case
from jax import lax
from jax.sharding import PartitionSpec as P
from matmul_cases import (
    C64,
    F8,
    MORE_OF_ALL,
    PATHS,
    RANKS,
    TABLES,
    TRANSFORMS,
    WERE_WRONG,
    adds_cotangents,
    cases_of,
    sizes_of,
)
from matmul_forms import FORMS, SHARDED
from operations import equations
from support import make_mesh, mostly_exhaustive, per_rank

import ringcoll
from ringcoll import algorithms


def test_all_gather_matmul():
    x, w = np.arange(24.0).reshape(4, 2, 3), np.arange(24.0).reshape(4, 3, 2)
    call = partial(ringcoll.all_gather_matmul, axis_name="x", algorithm="ring")
    y = per_rank(make_mesh(4), call, x, w, jit=False)
    np.testing.assert_array_equal(y, x.reshape(8, 3) @ w)


def test_matmul_reduce_scatter():
    x, w = np.arange(96.0).reshape(4, 8, 3), np.arange(24.0).reshape(4, 3, 2)
    call = partial(ringcoll.matmul_reduce_scatter, axis_name="x", algorithm="ring")
    y = per_rank(make_mesh(4), call, x, w)
    np.testing.assert_array_equal(y, (x @ w).sum(0).reshape(4, 2, 2))


def test_few_rows_travel_in_place_of_a_weight():
    """The recipe of docs/matmuls.md."""

    def few_rows(x, w):
        columns = ringcoll.all_to_all(x, "x", 1, 0, tiled=True)
        return ringcoll.matmul_reduce_scatter(columns, w, "x", algorithm="ring")

    x, w = np.arange(96.0).reshape(4, 3, 8), np.arange(32.0).reshape(4, 2, 4)
    np.testing.assert_array_equal(per_rank(make_mesh(4), few_rows, x, w), x @ w.reshape(8, 4))


def test_matmul_all_reduce():
    x, w = np.arange(96.0).reshape(4, 8, 3), np.arange(24.0).reshape(4, 3, 2)
    call = partial(ringcoll.matmul_all_reduce, axis_name="x", algorithm="ring")
    y = per_rank(make_mesh(4), call, x, w)
    np.testing.assert_array_equal(y, [(x @ w).sum(0)] * 4)


def test_all_gather_einsum():
    x, w = np.arange(24.0).reshape(4, 2, 3), np.arange(96.0).reshape(4, 8, 3)
    call = partial(ringcoll.all_gather_einsum, "bk,bk->kb", gather="b", algorithm="ring")
    y = per_rank(make_mesh(4), partial(call, axis_name="x"), x, w)
    np.testing.assert_array_equal(y, (x.reshape(8, 3) * w).swapaxes(1, 2))


def test_einsum_reduce_scatter():
    x, w = np.arange(24.0).reshape(4, 2, 3), np.arange(96.0).reshape(4, 8, 3)
    call = partial(ringcoll.einsum_reduce_scatter, "bk,ck->cb", scatter="c", algorithm="ring")
    y = per_rank(make_mesh(4), partial(call, axis_name="x"), x, w)
    np.testing.assert_array_equal(y, np.einsum("rbk,rck->cb", x, w).reshape(4, 2, 2))


class Call:
    """One case: the operands of all ranks, and what the call must return."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.form = (FORMS | SHARDED)[case["form"]]
        shape, self.axes = case["ranks"]
        self.n, self.size = prod(sizes_of(shape, self.axes)), prod(shape)
        second = case.get("second")
        kinds = [jnp.dtype(kind) for kind in (*case["dtypes"], *[second] * bool(second))]
        self.outs = [
            jnp.dtype(case["preferred"] or jnp.result_type(kinds[0], k)) for k in kinds[1:]
        ]
        self.kinds, others = kinds, len(kinds) - 1
        self.floats = [i for i, kind in enumerate(kinds) if jnp.issubdtype(kind, jnp.inexact)]
        self.wanted = self.floats if case["gradients"] else []  # the factors with gradients
        self.wrap, *batched = TRANSFORMS[case["transform"]]
        self.batched = batched[:1] + batched[1:] * others
        self.same = [case["same"] == "first"] + [case["same"] == "others"] * others
        length = case["length"]
        if self.form.travels == "sum":
            length = {3: 5}.get(length, length)  # which most numbers of ranks do not divide
        self.shapes = self.form.lengths(self.n, length)
        first, other, y = self.shapes
        rng, limits = np.random.default_rng(seed), self.limits()
        self.operands = [
            numbers(
                rng,
                kind,
                limits[min(i, 1)] if self.floats else None,
                self.leading(same, batch) + shape,
            )
            for i, (kind, same, batch, shape) in enumerate(
                zip(kinds, self.same, self.batched, [first] + [other] * others, strict=True)
            )
        ]
        leading = self.leading(False, any(self.batched))
        self.cts = [numbers(rng, kind, limits[2], leading + y) for kind in self.outs]

    def limits(self) -> tuple[int, int, int]:
        """The largest numbers of the first factor, of the others, and of the cotangents.

        Sums of at most 96 products are exact: in bfloat16 up to 256, in float32 up to 2**24. If
        sums are rounded once, only the last one may be inexact; float8 ends at 448.
        """
        exact = all(kind.itemsize >= 4 or kind.kind == "i" for kind in (*self.kinds, *self.outs))
        adds = adds_cotangents(self.case["transform"]) or self.case["same"]
        wide = self.case["accumulate"] and not adds
        if F8 in self.kinds:
            return 3, 3, 2
        return (64, 64, 2) if exact or wide else (2, 1, 1)

    def leading(self, same: bool, batch: bool) -> tuple[int, ...]:
        return (1 if same else self.size,) + (2,) * batch

    def options(self) -> dict[str, Any]:
        case = self.case
        algorithm = case["algorithm"]
        return {
            "algorithm": algorithms.ring(self.n) if algorithm == "a schedule" else algorithm,
            "precision": case["precision"],
            "preferred_element_type": case["preferred"],
            "accumulate_dtype": case["accumulate"],
        } | ({"residuals": case["residuals"]} if "residuals" in case else {})

    def wide(self, kind: Any) -> Any:
        """The dtype of partial sums of a result in a dtype."""
        wide = self.case["accumulate"] if jnp.issubdtype(kind, jnp.inexact) else None
        return jnp.dtype(wide or kind)

    def sent(self) -> Counter[Any] | None:
        """How many elements of which dtype a rank sends in all; None if this is not known."""
        case, form = self.case, self.form
        found: Counter[Any] = Counter()
        if adds_cotangents(case["transform"]) or case["transform"] == "remat":
            return None
        is_plain = case["algorithm"] in ("auto", "lax") and case["path"] != "late products"
        if is_plain:
            return found
        first, _, y = self.shapes
        times = (self.n - 1) * (1 + any(self.batched))
        if form.travels in "xw":
            again = self.wanted and case["residuals"] == "regather"
            found[self.kinds[0]] += times * prod(first) * (2 if again else 1)
            found[self.wide(self.kinds[0])] += times * prod(first) * bool(self.wanted)
            return found
        block = list(y)
        if form.travels == "sum":
            block[-2] = -(-block[-2] // self.n)
        found[self.wide(self.outs[0])] += times * prod(block)
        if self.wanted and not (form.travels == "sum" and case["check_vma"]):
            found[self.outs[0]] += times * prod(block)
        return found

    def run(self, operands: list[Any], cts: list[Any], types: list[Any]) -> Any:
        """The results and the gradients of the factors that are floats; `types` gets the types."""
        names = "xyz"[: len(self.case["ranks"][0])]

        def called(first: Any, *others: Any) -> list[Any]:
            other = others[0] if len(others) == 1 else others
            x, w = (other, first) if self.form.travels == "w" else (first, other)
            return jax.tree.leaves(self.form.function(x, w, self.axes, **self.options()))

        def function(*floats: Any) -> list[Any]:
            factors = list(operands)
            for i, x in zip(self.wanted, floats, strict=True):
                factors[i] = x
            ys = self.wrap(called)(*factors)
            types.extend(map(jax.typeof, ys))
            if not self.case["check_vma"]:
                return ys
            missing = [tuple(sorted({*names} - jax.typeof(y).mat.varying)) for y in ys]
            pairs = zip(ys, missing, strict=True)
            return [lax.pcast(y, m, to="varying") if m else y for y, m in pairs]

        if not self.wanted:
            return function(), []
        ys, pull_back = jax.vjp(function, *(operands[i] for i in self.wanted))
        return ys, list(pull_back(cts))

    def expected(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The right results and gradients of all ranks, each rounded once."""
        shape, ranks = self.case["ranks"][0], self.case["ranks"][0]
        names = "xyz"[: len(shape)]
        inside = ["xyz".index(axis) for axis in self.axes]
        outside = [i for i in range(len(names)) if i not in inside]
        rings = np.arange(self.size).reshape(ranks).transpose(*outside, *inside).reshape(-1, self.n)
        wide = np.result_type(*(wide_kind(kind) for kind in self.kinds))
        factors = [
            np.broadcast_to(x, (self.size, *x.shape[1:])).astype(wide) for x in self.operands
        ]
        cts = [ct.astype(wide) for ct in self.cts]
        of_batch = []
        for b in range(2 if any(self.batched) else 1):
            one = [x[:, b] if batch else x for x, batch in zip(factors, self.batched, strict=True)]
            some = [ct[:, b] if any(self.batched) else ct for ct in cts]
            results = [np.zeros_like(ct) for ct in some]
            gradients = [np.zeros_like(x) for x in one]
            for ring in rings:
                ys, back = self.form.expected([x[ring] for x in one], [ct[ring] for ct in some])
                for whole, part in zip(results + gradients, ys + back, strict=True):
                    whole[ring] = part
            of_batch.append((results, gradients))
        ys = [
            np.stack(y, 1) if any(self.batched) else y[0]
            for y in zip(*(r for r, _ in of_batch), strict=True)
        ]
        gradients = [
            np.stack(g, 1) if batch else np.sum(g, 0)
            for g, batch in zip(
                zip(*(g for _, g in of_batch), strict=True), self.batched, strict=True
            )
        ]
        if self.case["check_vma"]:  # JAX adds the gradients of what is the same on every rank
            gradients = [
                np.broadcast_to(g.sum(0), g.shape) if same else g
                for g, same in zip(gradients, self.same, strict=True)
            ]
        return (
            [rounded(y, kind) for y, kind in zip(ys, self.outs, strict=True)],
            [rounded(gradients[i], self.kinds[i]) for i in self.wanted],
        )


def numbers(rng: Any, kind: Any, limit: int | None, shape: tuple[int, ...]) -> np.ndarray:
    """Integers up to a limit; without one, all that an integer dtype has."""
    if limit is None:
        return rng.integers(jnp.iinfo(kind).min, jnp.iinfo(kind).max, shape, kind, endpoint=True)
    x = rng.integers(-limit, limit, shape, endpoint=True)
    return (x + 1j * x[::-1] if kind.kind == "c" else x).astype(kind)


def wide_kind(kind: Any) -> Any:
    return {"i": np.int64, "c": np.complex128}.get(kind.kind, np.float64)


def rounded(x: np.ndarray, kind: Any) -> np.ndarray:
    return (x if kind.kind == "c" else x.real).astype(kind)


# -- many cases in one program --


def compare(calls: list[Call], mesh: Any, check_vma: bool) -> None:
    """Run cases with one mesh as one program, and check each of them."""
    types: list[list[Any]] = [[] for _ in calls]

    def every(operands: Any, cts: Any) -> list[Any]:
        return [one(i, *of) for i, of in enumerate(zip(operands, cts, strict=True))]

    def one(i: int, operands: list[Any], cts: list[Any]) -> Any:
        def named(*of: Any) -> Any:
            return jax.tree.map(lambda x: x[None], calls[i].run(*of, types[i]))

        named.__name__ = f"case_{i}"
        factors, cts = ([x[0] for x in xs] for xs in (operands, cts))
        with ExitStack() as stack:
            for (module, name), value in PATHS[calls[i].case["path"]].items():
                stack.enter_context(mock.patch.object(module, name, value))
            try:
                return jax.jit(named)(factors, cts)
            except Exception as error:
                error.add_note(f"{calls[i].case}")
                raise

    over = P(mesh.axis_names)
    specs = [[P() if same else over for same in call.same] for call in calls]
    mapped = jax.shard_map(
        every, mesh=mesh, in_specs=(specs, over), out_specs=over, check_vma=check_vma
    )
    operands = [call.operands for call in calls], [call.cts for call in calls]
    traced = jax.jit(mapped).trace(*operands)
    found = jax.device_get(traced.lower().compile()(*operands))
    programs = {
        e.params["name"]: e.params["jaxpr"].jaxpr
        for e, _ in equations(traced.jaxpr.jaxpr)
        if "case_" in str(e.params.get("name"))
    }
    for i, call in enumerate(calls):
        for got, right in zip(
            jax.tree.leaves(found[i]), jax.tree.leaves(call.expected()), strict=True
        ):
            assert got.dtype == right.dtype, call.case
            np.testing.assert_array_equal(got, right, str(call.case))
        check_types(call, types[i], set(mesh.axis_names) if check_vma else set())
        check_program(call, list(equations(programs[f"case_{i}"])))


def check_types(call: Call, types: list[Any], names: set[str]) -> None:
    varying = names - set(call.axes) if call.form.travels == "sum" else names
    for aval, kind in zip(types, call.outs, strict=True):
        assert (aval.dtype, aval.weak_type) == (kind, False), call.case
        assert aval.mat.varying == varying, call.case


def check_program(call: Call, program: list[Any]) -> None:
    """Check the precision and the type of every product, and what every rank sends in all."""
    case, form = call.case, call.form
    products = [e.params for e, _ in program if e.primitive.name == "dot_general"]
    precision = case["precision"] and (lax.Precision.HIGHEST,) * 2
    assert {of["precision"] for of in products} <= {precision}, case
    allowed = {*map(call.wide, (*call.outs, *call.kinds))} | ({C64} & {*case["dtypes"]})
    if form.travels == "sum":  # its gradient may be a plain product
        allowed |= {*call.outs, *call.kinds}
    if case["gradients"]:  # sums over rounds
        allowed |= {np.dtype(np.float32)}
    assert {of["preferred_element_type"] for of in products} <= allowed, case
    chosen = {
        e.params["collective"].algorithm
        for e, _ in program
        if hasattr(e.params.get("collective"), "algorithm")
    }
    algorithm = call.options()["algorithm"]
    if form.travels == "sum":
        assert chosen == {algorithm}, case
    else:  # the collective of a plain form
        assert chosen <= {algorithm} & {"auto", "lax"}, case
    sent = Counter()
    for e, times in program:
        for x in e.invars if e.primitive.name == "ringcoll_ppermute" else ():
            sent[x.aval.dtype] += times * x.aval.size
    right = call.sent()
    assert right is None or +sent == +right, (sent, right, case)


def calls_of(ranks: Any, seed: int) -> list[Call]:
    cases = [case for table in TABLES for case in cases_of(table, seed)] + WERE_WRONG
    return [Call(case, i) for i, case in enumerate(cases) if case["ranks"] == ranks]


@pytest.mark.parametrize(
    ("ranks", "seed"),
    mostly_exhaustive(
        product([*RANKS, *MORE_OF_ALL["ranks"]], (0, 1)),
        lambda ranks, seed: ranks in RANKS and not seed,
    ),
    ids=str,
)
@pytest.mark.parametrize("check_vma", [True, False])
def test_every_case_is_right(ranks, check_vma, seed):
    calls = [call for call in calls_of(ranks, seed) if call.case["check_vma"] == check_vma]
    if calls:
        compare(calls, make_mesh(*ranks[0]), check_vma)
