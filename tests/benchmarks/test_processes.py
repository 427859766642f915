"""Benchmarks over several processes of this machine, each with devices of its own."""

import json

import pytest
from processes import together

from ringcoll.choose.table import Table

SHORT = "-b 1K -e 1K -n 3 --budget 200 -d bfloat16"


@pytest.mark.parametrize(
    ("devices", "collectives"),
    [
        ((1, 1), "psum,all_to_all"),  # a sum is a scatter and a gather
        pytest.param(
            (2, 2, 2), "all_gather,psum_scatter,psum,all_to_all", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_collectives_over_processes_are_right(devices, collectives, tmp_path):
    path = tmp_path / "measured.json"
    flags = f"{SHORT} --collective {collectives} --json {path}"
    printed = together(devices, "-m", "benchmarks", *flags.split())
    assert "#wrong 0" in printed[0]
    assert not any("Measured" in text for text in printed[1:])  # the first speaks for all
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = [*found["checks"], *found["rows"]]
    assert {row["ranks"] for row in rows} == {sum(devices)}
    assert {row["collective"] for row in rows} == set(collectives.split(","))
    assert all(row["wrong"] == 0 for row in rows)


@pytest.mark.exhaustive
def test_processes_choose_alike_and_write_one_table(tmp_path):
    path = tmp_path / "table.json"
    options = "tune -b 1K -e 1K -n 3 --budget 9 -d float32 --collective psum,all_gather --table"
    printed = together((1, 1, 1), "-m", "benchmarks", *options.split(), path)
    assert "#wrong 0" in printed[0]
    table = Table.load(path)
    assert "3 processes" in table.measured_on
    for row in table.rows:
        assert (row.ranks, row.hosts, row.ranks_a_host) == ((3, 4), (3, 4), (1, 2))
