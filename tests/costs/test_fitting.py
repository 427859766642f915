"""A machine from the output of nccl-tests: its errors, and the fit."""

import json
import re

import pytest

from ringcoll.__main__ import main
from ringcoll.costs import place_of, predict
from ringcoll.costs.fitting import fit_machine, read_timings

SIZES = [2**k for k in range(10, 31, 2)]


def nccl(test, ranks=8, start=30.0, root=True, sizes=SIZES, rate=1e5):
    """What nccl-tests prints, with columns in place, and a line of fewer bytes than ranks."""
    names = ["size", "count", "type", "redop", *(["root"] if root else [])]
    sides = ["time", "algbw", "busbw", "#wrong"] * 2
    lines = [f"# Collective test starting: {test}_perf", "# nThread 1 nGpus 8 minBytes 4"]
    lines += [
        f"#  Rank {r:2} Group  0 Pid  9{r} on gpu-{r // 8} device {r % 8} [0x19] NVIDIA H100 80GB"
        for r in range(ranks)
    ]
    lines += ["#", "#" + " " * 60 + "out-of-place    in-place", "# " + "  ".join(names + sides)]
    lines += ["#  (B)  (elements)   (us)  (GB/s)  (GB/s)   (us)  (GB/s)  (GB/s)"]
    for size in (0, *sizes):
        row = [size, size // 4, "float", "none", *([-1] if root else [])]
        for time in (start + size / rate, 0.5):  # in place is not looked at
            row += [f"{time:.2f}", "0.10", "0.10", "N/A"]
        lines.append("   ".join(map(str, row)))
    lines += ["# Out of bounds values : 0 OK", f"# Collective test concluded: {test}_perf", ""]
    return "\n".join(lines)


#: Its times begin in line 9.
NCCL = nccl("all_reduce", 2)


def split(groups, hosts, ranks=8):
    """The output of a run whose ranks measure in groups, on so many hosts."""
    lines = nccl("all_gather", ranks).splitlines()
    for rank, (group, host) in enumerate(zip(groups, hosts, strict=True)):
        at = 2 + rank
        lines[at] = lines[at].replace("Group  0", f"Group {group:2}" if group is not None else "")
        lines[at] = lines[at].replace("gpu-0", f"gpu-{host}")
    return "\n".join(lines)


def behind(words, text):
    """The text as a launcher prints it; {0} is the number of the line."""
    return "\n".join(words.format(n) + line for n, line in enumerate(text.splitlines(), 98))


@pytest.mark.parametrize(
    ("test", "collective", "newline"),
    [
        ("all_reduce", "psum", "\r\n"),
        ("all_gather", "all_gather", "\n"),
        ("reduce_scatter", "psum_scatter", "\n"),
        ("alltoall", "all_to_all", "\n"),
        ("sendrecv", "ppermute", "\n"),
        ("broadcast", "pbroadcast", "\n"),
    ],
)
def test_a_machine_is_fitted_to_one_nccl_test(test, collective, newline, tmp_path):
    table, machine = tmp_path / "nccl.txt", tmp_path / "mine.json"
    table.write_bytes(nccl(test).replace("\n", newline).encode())
    assert main(["machine", "--fit", str(table), "--output", str(machine)]) == 0
    for size in (2**10, 2**20, 2**30):
        taken = predict(collective, size, place_of(8, str(machine)))
        assert taken == pytest.approx((30 + size / 1e5) * 1e-6, rel=0.05)


@pytest.mark.parametrize("words", ["", "0: ", "[1,0]<stdout>:", "[0] ", "10:59:{0} h-3 ", "    "])
def test_outputs_of_nccl_tests_may_follow_each_other_and_have_prefixes_of_a_launcher(words):
    text = nccl("all_gather", 16) + nccl("alltoall", 8, 40.0, root=False)
    timings = read_timings(behind(words, text))
    gathers, exchanges = timings[: len(SIZES)], timings[len(SIZES) :]
    assert {(one.collective, one.ranks, one.hosts) for one in gathers} == {("all_gather", 16, 2)}
    assert {(one.collective, one.ranks, one.hosts) for one in exchanges} == {("all_to_all", 8, 1)}
    starts = gathers[0].seconds, exchanges[0].seconds
    assert starts == pytest.approx((30e-6, 40e-6), rel=1e-3)


@pytest.mark.parametrize(
    ("groups", "hosts", "ranks", "places"),
    [
        ([0, 1] * 4, [0, 0, 0, 0, 1, 1, 1, 1], 4, 2),
        ([0] * 4 + [1] * 4, [0, 0, 0, 0, 1, 1, 1, 1], 4, 1),
        ([0, 1, 3] * 2, [0, 0, 0, 1, 1, 1], 2, 2),
        ([0, 0, 1, 1, 2, 2], [0] * 6, 2, 1),
        ([0] * 4, [0, 0, 1, 1], 4, 2),
        ([None] * 4, [0, 0, 1, 1], 4, 2),  # older versions print no group
    ],
)
def test_a_split_run_is_of_the_ranks_of_a_group(groups, hosts, ranks, places):
    timings = read_timings(split(groups, hosts, len(groups)))
    assert {(one.ranks, one.hosts) for one in timings} == {(ranks, places)}


def test_a_byte_order_mark_is_left_out(tmp_path):
    (tmp_path / "marked").write_text(NCCL, encoding="utf-8-sig")
    assert main(["machine", "--fit", str(tmp_path / "marked")]) == 0


def test_a_machine_is_fitted_written_and_predicted(tmp_path, capsys):
    table, machine = tmp_path / "nccl.txt", tmp_path / "mine.json"
    table.write_text(nccl("all_gather", start=10) + nccl("sendrecv", start=10))
    assert main(["machine", "--fit", str(table), "--output", str(machine)]) == 0
    printed = capsys.readouterr().out
    assert "all_gather on 8 ranks: 11 points" in printed
    assert "fitted to permutes, median error 0%: 10 us a message, 100 GB/s" in printed
    for size in (2**10, 2**21, 2**30):
        taken = predict("all_gather", size, place_of(8, str(machine)))
        assert taken == pytest.approx((10 + size / 1e5) * 1e-6, rel=0.05)
    seven = 7 * (10 + 2**27 / 1e5) * 1e-6
    assert predict("all_gather", 2**30, place_of(8, str(machine)), "ring") == pytest.approx(
        seven, rel=0.05
    )
    assert main(["machine", "--show", str(machine)]) == 0
    assert "mine: measured by the user" in capsys.readouterr().out


def test_a_smaller_size_takes_as_long_as_the_smallest_that_was_measured(tmp_path):
    table, machine = tmp_path / "nccl.txt", tmp_path / "large.json"
    table.write_text(nccl("all_gather", start=10, sizes=SIZES[5:]))
    assert main(["machine", "--fit", str(table), "--output", str(machine)]) == 0
    for size in (1, 2**20):
        found = predict("all_gather", size, place_of(8, str(machine)))
        assert found == pytest.approx(20.5e-6, rel=0.05)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: the file is empty"),
        ("\n".join(NCCL.splitlines()[:6]), "line 1: nccl-tests' output without its header"),
        ("\n".join(NCCL.splitlines()[:8]), "line 1: no measurement; give a time in each line"),
        (NCCL.replace("#", ""), "'#  size  count  type ...', or no such output (its JSON is not"),
        ("size,time\n1024,3.5", "line 1: nccl-tests' output without its header"),
        (
            split([0, 0, 0, 1], [0, 0, 1, 1], 4),
            "(ranks and hosts: [(1, 1), (3, 2)]); measure groups",
        ),
        (
            split([0, 1, 1, 0], [0, 1, 1, 1], 4),
            "(ranks and hosts: [(2, 1), (2, 2)]); measure groups",
        ),
        (NCCL[: NCCL.rindex("0.50")], "line 20: 9 columns; nccl-tests prints"),
        (NCCL.replace("30.01", "-1"), "line 10: 1024 bytes, -1e-06 s: give bytes and a time"),
        (NCCL.replace("30.01", "N/A", 1), "line 10: ['1024', 'N/A']: not a number"),
        (nccl("all_reduce", 1), "line 9: 1 ranks; measure 2 to 65536"),
        (NCCL.replace("all_reduce_perf", "test"), "line 9: no test is named above"),
        (NCCL + nccl("alltoall").replace("Rank", "Node"), "line 37: no line '#  Rank  0 ...'"),
        (
            re.sub("#  Rank  0.*\n", "", NCCL),
            "line 3: rank 0 is missing or cut off",
        ),
        (NCCL.replace("N/A", "1", 1), "line 9: #wrong is not 0: the results are wrong"),
        (NCCL + behind("0: ", NCCL), "line 1: not every '#  size  count  type ...' has the same"),
        ('{"version": 2, "results": []}', "or no such output (its JSON is not read)"),
        (nccl("hypercube"), "collective 'hypercube' is not known; there are all_gather"),
        (nccl("sendrecv", rate=1e99), "line 16: the times do not grow with the byt"),
        (
            nccl("all_gather", sizes=SIZES[:1] * 9),
            "all_gather on 8 ranks has 1 sizes; measure 4 or",
        ),
    ],
)
def test_a_bad_table_is_refused_with_its_line(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        fit_machine("mine", read_timings(text))


def test_a_file_that_cannot_be_fitted_is_named(tmp_path, capsys):
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    for name, words in (
        ("binary.txt", "line 2: this is not text in UTF-8; save it as such"),
        ("nothing.txt", "No such file"),
        (".", "Is a directory"),
    ):
        with pytest.raises(SystemExit):
            main(["machine", "--fit", str(tmp_path / name)])
        assert f"--fit {tmp_path / name}: {words}" in capsys.readouterr().err


GOOD = {
    "name": "mine",
    "what": "a test",
    "aliases": [],
    "axes": 0,
    "ranks_a_host": 4,
    "rates": {"start_seconds": [1e-6, "a test"], "link_bytes_per_second": [1e9, "a test"]},
}


FALLING = {
    "collective": "psum",
    "ranks": 4,
    "hosts": 1,
    "error": 0.1,
    "source": "a test",
    "knots": [[1, 2], [2, 1]],
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rates": {}, "axes": 2}, "start_seconds"),
        ({"rates": GOOD["rates"] | {"link_bytes_per_second": [0, ""]}}, "division by zero"),
        ({"rates": GOOD["rates"] | {"start_seconds": [-1, ""]}}, "a rate is not above 0"),
        (
            {"rates": GOOD["rates"] | {"built_in_share": [80, ""]}},
            "built_in_share is 80, not a share",
        ),
        (
            {"rates": GOOD["rates"] | {"built_in_sum_share": [0, ""]}},
            "built_in_sum_share is 0, not",
        ),
        (
            {"rates": GOOD["rates"] | {"devices_a_chip": [1.5, ""]}},
            "devices_a_chip is 1.5, not a w",
        ),
        ({"axes": "2"}, "axes is '2', not a whole number from 0"),
        ({"aliases": [1]}, "a name in `aliases`, or a source, is not text"),
        ({"curves": [FALLING | {"knots": [[1, 0], [2, 1]]}]}, "a curve has 1 bytes in 0 seconds"),
        ({"curves": [{"collective": "psum", "ranks": 4, "hosts": 1, "knots": []}]}, "is not the f"),
        ({"curves": [FALLING | {"ranks": 1}]}, "a curve is of fewer than 2 ranks"),
        ({"curves": [FALLING]}, "the knots of a curve do not rise"),
    ],
)
def test_a_file_that_is_no_machine_is_refused(tmp_path, changes, words):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(GOOD | changes))
    with pytest.raises(ValueError, match=re.escape(words)):
        predict("psum", 8, place_of(4, str(file)))


def test_machines_are_listed_with_their_sources(capsys):
    assert main(["machine"]) == 0
    assert "h100: NVIDIA H100 SXM5: 8 on NVSwitch" in capsys.readouterr().out
    assert main(["machine", "--show", "h100"]) == 0
    assert "matmuls in bfloat16 6" in capsys.readouterr().out
    assert main(["machine", "--show", "TPU v5p"]) == 0
    assert "start_seconds 3.55e-06: measured: marin-community" in capsys.readouterr().out
