"""The benchmarks: what they count, choose and write, and that they see wrong results."""

import json
from dataclasses import replace
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from support import check_doubling, doubling_times, is_part, mostly_exhaustive

from benchmarks.__main__ import main
from benchmarks.collectives import tune
from benchmarks.collectives.cases import AXIS, CASES
from benchmarks.compiled import matmul, programs
from benchmarks.measuring import measure, model
from benchmarks.measuring.data import count_wrong, exact
from benchmarks.measuring.measure import Point
from benchmarks.measuring.row import Quartiles
from ringcoll import Schedule, algorithms, costs
from ringcoll.choose.table import Table
from ringcoll.schedules.registry import LAX

BY_NAME = {case.name: case for case in CASES}


def mesh_of(n):
    return Mesh(np.array(jax.devices()[:n]), (AXIS,))


def made_row(algorithm, ratio, nbytes=1024, spread=0.0):
    vs_lax = Quartiles(ratio - spread, ratio, ratio + spread)
    row = Point(BY_NAME["psum"], np.float32, nbytes, mesh_of(8)).row(algorithm)
    return replace(row, vs_lax=vs_lax, wrong=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_data_sums_exactly_in_any_order_and_differs_by_rank(dtype):
    x = exact((8, 256), jnp.dtype(dtype), 8)
    wide = x.astype(np.float64).sum(0)
    for order in list(permutations(range(8)))[::5000]:
        total = x[order[0]]
        for rank in order[1:]:
            total = total + x[rank]
        np.testing.assert_array_equal(total.astype(np.float64), wide)
    assert len({row.tobytes() for row in x}) == 8


def test_wrong_is_counted_in_bits_and_against_every_truth():
    x = np.array([0.0, 1.0, 2.0], np.float32)
    assert count_wrong(x, x, x) == 0
    assert count_wrong(x, x, np.array([0.0, 1.0, 3.0], np.float32)) == 1
    assert count_wrong(x, np.array([-0.0, 1.0, 2.0], np.float32)) == 1
    assert count_wrong(x, x.astype(np.float64)) == 3


@pytest.mark.parametrize("dtype", mostly_exhaustive(["float32", "bfloat16"], "float32".__eq__))
@pytest.mark.parametrize("n", mostly_exhaustive([1, 3, 8], lambda n: n == 3))
@pytest.mark.parametrize("name", BY_NAME)
def test_the_references_agree_with_lax(name, n, dtype):
    point = Point(BY_NAME[name], jnp.dtype(dtype), 120, mesh_of(n))
    by_numpy, by_lax = point.truths
    assert len(by_lax) == n
    assert sum(map(count_wrong, by_lax, by_numpy)) == 0


@pytest.mark.parametrize(
    ("name", "count", "size", "operand", "factor"),
    [
        ("all_gather", 32, 1024, 128, 7 / 8),
        ("psum_scatter", 32, 1024, 1024, 7 / 8),
        ("psum", 256, 1024, 1024, 14 / 8),
        ("all_to_all", 32, 1024, 1024, 7 / 8),
        ("ragged_all_to_all", 32, 1024, 1024, 7 / 8),
        ("pbroadcast", 256, 1024, 1024, 1),
        ("ppermute", 256, 1024, 1024, 1),
    ],
)
def test_sizes_and_rates_are_those_of_nccl_tests(name, count, size, operand, factor):
    row = Point(BY_NAME[name], np.float32, 1024, mesh_of(8)).row(LAX)
    assert (row.count, row.size, row.operand_bytes) == (count, size, operand)
    assert row.busbw(2.0) == factor * 512


def test_a_ratio_to_lax_is_taken_in_each_round(monkeypatch):
    times = {LAX: [1.0, 2.0, 4.0], "ring": [3.0, 8.0, 20.0]}
    arrays = {name: np.array(of) for name, of in times.items()}
    monkeypatch.setattr(measure, "interleave", lambda *_: arrays)
    point = Point(BY_NAME["psum"], np.float32, 64, mesh_of(2))
    by_lax, ring = measure.measure(point, ["ring"], 1, 3, checks=False)
    assert (by_lax.seconds.median, by_lax.vs_lax) == (2, Quartiles(1, 1, 1))
    assert ring.seconds.median == 8
    assert (ring.vs_lax.low, ring.vs_lax.median, ring.vs_lax.high) == (3.5, 4, 4.5)


def test_predictions_come_from_the_model_of_the_run():
    true = costs.Model(alpha=1e-5, beta=1e-9, gamma=2e-9)
    rows = []
    for name, algorithm in [("psum", "ring"), ("psum", "recursive_doubling"), ("ppermute", "hop")]:
        for size in (2**10, 2**16, 2**22):
            row = Point(BY_NAME[name], np.float32, size, mesh_of(8)).row(algorithm)
            rows.append(replace(row, seconds=Quartiles(0, model.predict(row, true), 0)))
    fitted, predicted = model.fit_rows([*rows, replace(rows[0], algorithm=LAX, resolved=LAX)])
    assert fitted["float32"].error < 1e-6
    assert predicted[0].predicted == pytest.approx(rows[0].seconds.median)
    assert predicted[-1].predicted is None


def test_a_sweep_writes_what_it_measured(tmp_path, capsys):
    chosen = ["--collective", "all_gather,psum", "--algorithm", "auto,ring", "-d", "bfloat16"]
    flags = ["-b", "1K", "-e", "4K", "-f", "4", "-n", "4", "-g", "3"]
    assert main([*flags, *chosen, "--json", str(tmp_path / "json")]) == 0
    out = capsys.readouterr().out
    for word in ("busbw = 1.33 x", "<1 faster", "#wrong 0", "predicted", "auto: lax", "took lax"):
        assert word in out
    assert "…" not in out
    *lines, last = out.splitlines()
    assert max(map(len, lines[:-1])) <= 100  # the last two have paths
    assert last == f"picture: {tmp_path / 'json.svg'}"
    for text in ("psum of bfloat16: time over lax by size", "predicted", ">recursive", ">ring"):
        assert (text in (tmp_path / "json.svg").read_text()) == (text != ">recursive")
    written = json.loads((tmp_path / "json").read_text())
    assert written["measured_on"]["devices"] == 3
    names = [row["algorithm"] for row in written["checks"]]
    assert names == ["lax", "lax", "auto", "auto", "ring", "ring"]  # of each collective
    assert len(written["rows"]) == 2 * 2 * 3
    ring = written["rows"][-1]
    assert (ring["algorithm"], ring["size"], ring["wrong"]) == ("ring", 4096, 0)
    assert ring["busbw"] == pytest.approx(4096 / ring["seconds"]["median"] * 4 / 3)
    assert ring["predicted"] > 0


def test_a_wrong_algorithm_is_seen(monkeypatch, tmp_path, capsys):
    def broken(n):
        *rounds, last = algorithms.ring(n).rounds
        return Schedule((n,), (*rounds, (replace(last[0], shift=-1),)))

    monkeypatch.setitem(algorithms.GATHERS, "broken", broken)
    monkeypatch.setattr(Schedule, "check", lambda self: self)  # which would have refused it
    chosen = ["--collective", "all_gather", "--algorithm", "ring,broken", "-d", "float32"]
    path = str(tmp_path / "json")
    assert main([*["-b", "1K", "-e", "1K", "-n", "1"], *chosen, "-J", path]) == 1
    assert "wrong: all_gather broken float32" in capsys.readouterr().out
    written = json.loads((tmp_path / "json").read_text())
    for rows in (written["checks"], written["rows"]):
        wrong = {row["algorithm"]: row["wrong"] for row in rows}
        assert wrong["ring"] == wrong["lax"] == 0
        assert wrong["broken"] > 7 * rows[0]["count"]  # on every rank


@pytest.mark.exhaustive
def test_calls_in_the_order_of_a_tree_run_beside_the_others(tmp_path):
    """A ring adds in a different order."""
    path, chosen = tmp_path / "json", ["-e", "4K", "-n", "2", "-d", "bfloat16,int32"]
    chosen += ["--collective", "psum,pmax", "--algorithm", "ring,halving_doubling,auto"]
    flags = ["-b", "4K", *chosen, "--order", "tree", "-g"]
    assert main([*flags, "4", "-J", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    found = {(row["collective"], row["type"], row["algorithm"]) for row in rows}
    ordered = {("psum", "bfloat16", f"{name}:tree") for name in ("lax", "auto", "halving_doubling")}
    assert {one for one in found if ":" in one[2]} == ordered
    assert {row["wrong"] for row in rows} == {0}
    with pytest.raises(SystemExit, match="tree: 6 ranks are no power of two; give -g 4"):
        main([*flags, "6"])


@pytest.mark.parametrize(
    "name",
    mostly_exhaustive(["all_gather", "psum_scatter", "psum", "all_to_all"], "psum".__eq__),
)
def test_what_is_outside_the_bound_of_a_wire_is_wrong(name):
    point = Point(BY_NAME[name], np.dtype(jnp.bfloat16), 12288, mesh_of(4))
    allowed = point.allowed("lax:int8")
    assert 0 < allowed < point.allowed("lax:float8_e5m2")
    right = point.program("lax:int8")()
    assert point.wrong("lax:int8", right) == 0
    assert np.any(np.asarray(right) != np.asarray(point.program(LAX)()))  # it was encoded
    further = right.at[7].add(2 * allowed + 1).at[-1].set(jnp.nan)
    # For a sum on all ranks, three differ from the first in one place, and one in another.
    assert point.wrong("lax:int8", further) == (6 if name == "psum" else 2)


MATMUL = ["matmul", "--shape", "16x16x16", "-g", "2", "-n", "3", "--algorithm", "ring,auto"]


def test_matmuls_are_compared_and_timed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(matmul, "interleave", doubling_times)
    path = tmp_path / "json"
    assert main([*MATMUL, "-J", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    check_doubling(rows, capsys.readouterr().out)
    assert len(rows) == len(programs.FORMS) * 2 * 3  # directions; plain beside two
    assert {row["wrong"] for row in rows} == {0}
    chunks = {row["form"]: row["chunk"] for row in rows}  # of float32, on each of two ranks
    assert chunks["all_gather_matmul"] == chunks["matmul_reduce_scatter"] == 16 * 16 * 4 // 2


def test_a_wrong_matmul_is_seen(monkeypatch, tmp_path):
    path = tmp_path / "json"
    flags = [*MATMUL, "--direction", "forward", "--form", "all_gather_matmul", "-J", str(path)]
    form = programs.FORMS["all_gather_matmul"]
    wrong = replace(form, ours=lambda x, w, **options: form.ours(x, w, **options) + 1)
    monkeypatch.setitem(programs.FORMS, "all_gather_matmul", wrong)
    assert main(flags) == 1
    rows = json.loads(path.read_text())["rows"]
    assert all(row["wrong"] for row in rows if row["algorithm"] != "plain")


# -- the table that is measured --


def test_tune_writes_a_table(monkeypatch, tmp_path, capsys):
    """On a machine where all algorithms are faster than lax, and the third one is the fastest."""

    def times(programs, rounds, end):
        return {name: np.full(3, 1.0 - 0.2 * i) for i, name in enumerate(programs)}

    monkeypatch.setattr(measure, "interleave", times)
    monkeypatch.setattr(tune, "_one_call", lambda point, name: len(name))  # shortest names first
    path = tmp_path / "table.json"
    flags = ["-b", "1K", "-e", "4K", "-n", "3", "-g", "2", "-d", "float32"]
    flags += ["--collective", "psum_scatter"]
    assert main(["tune", *flags, "--table", str(path)]) == 0
    table = Table.load(path)
    assert "2 x cpu" in table.measured_on
    names = sorted(algorithms.names("psum_scatter"), key=len)
    (row,) = table.rows
    assert (row.collective, row.platform, row.algorithm) == ("psum_scatter", "cpu", names[2])
    assert (row.bytes, row.dtypes) == ((None, None), ("float32",))
    assert row.why == "0.40 of the time of lax"
    line = ["psum_scatter", "float32", names[2], "1K", "to", "4K", "0.40"]
    printed = capsys.readouterr().out.partition("The choice")[2]
    assert any(is_part(line, of.split()) for of in printed.splitlines())


@pytest.mark.parametrize(
    ("rivals", "before", "expected"),
    [
        ([("ring", 0.5), ("bruck", 0.7)], LAX, "ring"),
        ([("ring", 0.97), ("bruck", 0.99)], LAX, LAX),
        ([("ring", 0.90, 0.1), ("bruck", 0.93)], LAX, "bruck"),
        ([("ring", 0.50), ("bruck", 0.52)], "bruck", "bruck"),
        ([("ring", 0.50), ("bruck", 0.60)], "bruck", "ring"),
    ],
)
def test_tune_chooses_clearly_faster_algorithms(rivals, before, expected):
    rows = [made_row(LAX, 1.0)]
    rows += [made_row(name, ratio, spread=sum(spread)) for name, ratio, *spread in rivals]
    assert tune.choose(rows, before).algorithm == expected
    wrong = [rows[0], *(replace(row, wrong=1) for row in rows[1:])]
    assert tune.choose(wrong, before).algorithm == LAX


def test_neighbouring_sizes_share_a_row():
    chosen = [
        made_row(LAX, 1.0, 1024),
        made_row("ring", 0.8, 4096),
        made_row("ring", 0.6, 16384),
        made_row("bruck", 0.5, 65536),
    ]
    ring, bruck = tune.table_rows(chosen, "cpu", **tune.measured_bounds(mesh_of(5)))
    assert (ring.algorithm, ring.bytes, ring.dtypes) == ("ring", (2048, 32768), ("float32",))
    assert (bruck.algorithm, bruck.bytes) == ("bruck", (32768, None))
    for row in (ring, bruck):
        assert (row.ranks, row.hosts, row.ranks_a_host) == ((5, 6), (1, 2), (5, 6))
        call = "psum", "cpu", 5, 65536, "float32", jax.__version__
        assert Table((row,)).pick(*call) == ("bruck" if row is bruck else LAX)
        assert Table((row,)).pick(*call[:-1], "99.0") == LAX
    assert ring.why.startswith("0.60 to 0.80 ")
    assert bruck.why.startswith("0.50 of ")
