"""The benchmark that writes a table: what it chooses, and what it writes."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from support import is_part
from test_benchmarks import made_row, mesh_of

from benchmarks.__main__ import main
from benchmarks.collectives import tune
from benchmarks.collectives.cases import LAX
from benchmarks.measuring import measure
from ringcoll import algorithms
from ringcoll.choose.table import Table


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
        assert row.covers(*call) == (row is bruck)
        assert not row.covers(*call[:-1], "99.0")
    assert ring.why.startswith("0.60 to 0.80 ")
    assert bruck.why.startswith("0.50 of ")
