"""Hosts made on this machine, and collectives between them: bytes on links, times and choices."""

import json
from dataclasses import replace

import pytest

from benchmarks.__main__ import main
from benchmarks.collectives.cases import CASES
from benchmarks.hosts import namespaces
from benchmarks.hosts.links import HostLinks
from benchmarks.hosts.wire import choose_algorithms
from benchmarks.measuring.row import Measurement

as_root = pytest.mark.skipif(bool(namespaces.cannot()), reason=namespaces.cannot())


def measured(path, *arguments):
    """The output of `cluster`, and its rows by algorithm."""
    assert main(["cluster", *arguments, "-n", "2", "--budget", "20", "-J", str(path)]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    return found["wire"], {row["algorithm"]: row for row in found["rows"]}


@as_root
@pytest.mark.exhaustive
@pytest.mark.parametrize("links", ["star", "ring"])
def test_bytes_on_links_are_those_of_the_schedules(links, tmp_path, capfd):
    hosts = f"--hosts 3 --rate 400mbit --links {links} wire -b 1M -e 1M -d float32".split()
    algorithms = "ring,two_ended,direct"
    options = "--collective", "all_gather", "--algorithm", algorithms
    wire, rows = measured(tmp_path / "found.json", *hosts, *options)
    assert wire["links"] == links
    assert (wire["hosts"], wire["local"], wire["rate"]) == (3, 1, 5e7)
    assert 0.5 * 5e7 < wire["tcp"] < 1.1 * 5e7
    for name in algorithms.split(","):
        assert rows[name]["wrong"] == 0
        # Headers and acknowledgements add to it; what the processes say besides is little.
        assert rows[name]["of_price"] == pytest.approx(1, abs=0.03), name
        assert rows[name]["of_bound"] > 0.9
    assert rows["lax"]["sent"] > 0
    assert "#wrong 0" in capfd.readouterr().out


@pytest.mark.exhaustive
def test_processes_on_loopback_need_no_root(tmp_path, capfd):
    options = "--loopback --hosts 2 --devices 2 wire -b 64K -e 64K -d float32 --collective psum"
    wire, rows = measured(tmp_path / "found.json", *options.split(), "--algorithm", "ring,ring@2x2")
    assert (wire["hosts"], wire["local"], wire["rate"]) == (2, 2, wire["tcp"])
    assert {name: row["wrong"] for name, row in rows.items()} == dict.fromkeys(rows, 0)
    assert set(rows) == {"lax", "ring", "ring@2x2"}
    assert "2 hosts of 2 ranks" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("hosts", "local", "links", "collective", "bound"),
    [
        (4, 1, "star", "all_gather", 3 / 4),
        (4, 1, "star", "psum", 3 / 2),
        (4, 2, "star", "psum", 3 / 2),  # each host sends for its ranks together
        (4, 1, "star", "all_to_all", 3 / 4),
        (4, 2, "star", "all_to_all", 3 / 2),  # and its ranks' blocks are all others
        (4, 1, "ring", "all_gather", 3 / 8),
        (2, 1, "ring", "psum", 1),
        (4, 1, "ring", "all_to_all", (1 + 2 + 1) / 4 / 2),  # as many links are passed
        (5, 1, "ring", "all_to_all", (1 + 2 + 2 + 1) / 5 / 2),
        (4, 1, "star", "pbroadcast", 1),
        (4, 1, "ring", "pbroadcast", 1 / 2),
        (2, 1, "star", "ppermute", 1),
    ],
)
def test_bounds(hosts, local, links, collective, bound):
    case = next(case for case in CASES if case.name == collective)
    assert HostLinks(hosts, local, links, 1, 1).bound(case, 1000) == pytest.approx(1000 * bound)


@pytest.mark.parametrize(
    ("local", "links", "collective", "algorithm", "price", "paid"),
    [
        # A swap goes in one direction, then in the other.
        (1, "star", "all_gather", "recursive_doubling", 3, 6),
        (1, "star", "all_gather", "bruck", 3, 5),  # its last round is a swap
        (1, "star", "psum", "recursive_doubling", 8, 16),
        (1, "star", "all_to_all", "pairwise", 3, 4),
        (1, "ring", "all_gather", "two_ended", 2, 3),  # two directions, one after the other
        (2, "star", "all_gather", "ring", 7, 7),
        (2, "star", "all_gather", "ring@4x2", 6, 6),
    ],
)
def test_bytes_and_time_on_a_link(local, links, collective, algorithm, price, paid):
    n = 4 * local
    row = Measurement(collective, "", "float32", n, algorithm, algorithm, n, n, 1, 1, 1.0)
    wire = HostLinks(4, local, links, 1, 1)
    assert wire.price(row) == price
    assert wire.paid(row).link == paid


def test_bytes_of_codes_on_a_link():
    """Two rounds of three shards of 256 values, each in 2 blocks of 128 and their scales."""
    n, count = 4, 1024
    row = Measurement("psum", "sum", "bfloat16", n, "x", "ring:int8", 1, 2 * count, count, 1, 1.5)
    wire = HostLinks(n, 1, "star", 1, 1)
    assert wire.price(row) == 6 * 2 * (128 + 4)
    assert wire.paid(row) is wire.price(replace(row, resolved="auto:int8")) is None


def test_each_collective_runs_by_its_own_algorithms():
    both = ["all_gather", "all_to_all"]
    assert choose_algorithms(both, "ring,bruck,ring@2x2,pairwise,auto", 2, 2) == {
        "all_gather": ["ring", "bruck", "ring@2x2", "auto"],
        "all_to_all": ["bruck", "pairwise", "auto"],
    }
    by_default, by_all = (
        choose_algorithms(["psum"], asked, 2, 2)["psum"] for asked in (None, "all")
    )
    assert {"ring", "ring@2x2"} < set(by_default) < set(by_all)
    assert set(by_all) - set(by_default) >= {"auto"}
    assert choose_algorithms(["psum"], "auto", 2, 2)["psum"] == by_all
    with pytest.raises(SystemExit, match="no 'halving_doubling'; choose from"):
        choose_algorithms(["psum"], "ring,halving_doubling", 3, 1)
