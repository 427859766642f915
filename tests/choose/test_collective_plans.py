"""The plan of a collective: the row of a table that covers it, or the built-in; decided once."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import make_mesh

import ringcoll
from ringcoll.choose.plan import Plan, by_table
from ringcoll.choose.table import Table, TableRow
from ringcoll.collectives import by_schedule
from ringcoll.collectives.sums import ByTree, Coded, Exchanged, Tree
from ringcoll.costs.wire import Wire

TABLE = Table(
    (
        TableRow("psum", "cpu", "recursive_doubling", hosts=(2, None), bytes=(None, 2**16)),
        TableRow("psum", "cpu", "ring", (2, 9), hosts=(1, 2), dtypes=("bfloat16", "float8")),
        TableRow("psum_scatter", "*", "ring", jax=("0.11", None), why="half the time of lax"),
        TableRow("all_to_all", "cpu", "pairwise", bytes=(1024, 4096), why="measured"),
    )
)
BUILT_IN = Plan("lax", why="no row covers it: the built-in")
#: The plan of a call on four ranks of a CPU: its collective, elements, and hosts or sums; and why.
CASES = [
    ("psum", 256, {"hosts": 2}, "recursive_doubling: row 1 of the table"),
    ("psum", 2**14, {"hosts": 2}, str(BUILT_IN)),
    ("psum", 256, {}, str(BUILT_IN)),
    (
        "psum_scatter",
        256,
        {"ranks_a_host": 1},
        "ring: row 3 of the table: half the time of lax",
    ),
    ("psum_scatter", 256, ByTree(order=Tree()), "lax: ring does not add by the balanced tree"),
    ("psum", 256, ByTree(order=Tree()), str(BUILT_IN)),
    (  # the owner of a sum adds all contributions: by a schedule of one round
        "psum",
        2048,
        Coded(wire=Wire("int8")),
        "direct: row 4 of the table: measured",
    ),
    (
        "all_to_all",
        2048,
        Coded(wire=Wire("int8")),
        "pairwise: row 4 of the table: measured",
    ),
    ("all_gather", 2048, Coded(wire=Wire("int8")), str(BUILT_IN)),
]


@pytest.mark.parametrize(("collective", "elements", "sums", "words"), CASES)
def test_a_plan_and_its_reason(collective, elements, sums, words):
    hosts, sums = (sums, Exchanged()) if isinstance(sums, dict) else ({}, sums)

    def pick(what, *message):
        return by_table(TABLE, what, "cpu", 4, *message, "0.12.0", **hosts)

    assert str(sums.plan(pick, collective, (4,), elements, np.dtype("float32"))) == words


@pytest.mark.parametrize("leaves", [1, 2])
@pytest.mark.parametrize("collective", ["psum", "psum_scatter", "all_gather"])
def test_a_call_by_auto_is_decided_once(monkeypatch, collective, leaves):
    calls = []

    def counted(*call, **more):
        calls.append(call[1])
        return by_table(*call, **more)

    monkeypatch.setattr(by_schedule, "by_table", counted)
    call = partial(getattr(ringcoll, collective), axis_name="x")
    # Small leaves of an all-reduce share messages, so they share a decision.
    decisions = 1 if collective == "psum" else leaves
    mapped = jax.shard_map(call, mesh=make_mesh(4), in_specs=P(), out_specs=P("x"), check_vma=False)
    operand = [jax.ShapeDtypeStruct((4 + i, 4)[::-1], np.float32) for i in range(leaves)]
    jax.jit(mapped).lower(operand)
    assert calls == [collective] * decisions
