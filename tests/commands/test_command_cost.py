"""`python -m ringcoll cost`: times and crossovers against the model, by brute force."""

import argparse
import json
import re
from functools import partial
from unittest.mock import ANY

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from ringcoll.__main__ import main
from ringcoll.algorithms import GATHERS, names, ring
from ringcoll.choose.plan import EARLY
from ringcoll.commands.arguments import shapes
from ringcoll.costs import DEVICES, Range, fastest, place_of, predict, price, seconds
from ringcoll.io.text import seconds_in_words

pytestmark = pytest.mark.quick


def cost(capsys, *arguments):
    assert main(["cost", *arguments]) == 0
    return capsys.readouterr().out


# -- the parts --


def test_the_fastest_is_found_to_the_byte():
    lines = {"low": lambda b: 9 + b, "flat": lambda b: 1000, "bent": lambda b: max(990, b - 3000)}
    assert fastest(lines, 1, 10_000) == [
        Range("low", 1, 981),  # where it ties with the last
        Range("bent", 982, 3999),
        Range("flat", 4000, 10_000),
    ]
    assert fastest({"one": float}, 5, 5) == [Range("one", 5, 5)]


def test_ranks_are_lists_of_shapes():
    assert shapes("2..16") == [(2,), (4,), (8,), (16,)]
    assert shapes("3..9,3,5") == [(4,), (8,), (3,), (5,)]
    assert shapes("4x2,2..4x8") == [(4, 2), (2, 8), (4, 8)]
    for text in ("", "0", "x4", "8..2", "3..3", "four", "2..-4"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a number of ranks; write 8, 2"):
            shapes(text)


def test_words():
    assert [seconds_in_words(s) for s in (1.234e-7, 9.99e-4, 9.996e-4, 0.5, 20.42)] == [
        *("0.123 us", "999 us", "1 ms", "500 ms", "20.42 s")
    ]
    assert [seconds_in_words(s, like=2e-5) for s in (0, 1.234e-7, 9.996e-4, 0.5, 12345)] == [
        *("0 us", "0.123 us", "1000 us", "500000 us", "12345000000 us")
    ]
    assert [seconds_in_words(s, like=2e-2) for s in (5e-6, 20.42)] == ["0.005 ms", "20420 ms"]


@pytest.mark.parametrize("asked", ["all_reduce -n 2..256 --bytes 1K", "all_gather_matmul -n 8,16"])
def test_a_table_has_one_unit(capsys, asked):
    for table in cost(capsys, *asked.split()).split("\n\n"):
        assert len(set(re.findall(r" [\d.]+ (us|ms|s)\b\*?(?=  |$)", table, re.M))) <= 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("-n 8", "\n8 ranks: one ring of chips along each axis\n"),
        ("-n 8 --network switch", "\n8 ranks: one switch\n"),
        (
            "-n 8,2x4",
            "\n2x4 ranks: chips along each axis; an axis of 2 or 4 is a line, not a ring\n",
        ),
        ("-n 16X16,2..8", "\n16x16, 4, 8 ranks: one ring of chips"),
        ("-n 16x16", "\n16x16 ranks: one ring of chips along each axis\n"),
        ("-n 8 --network 4X4", "\n8 ranks: the last axis of a mesh on 4x4 chips"),
        ("-n 16,2x8,8 --device h100", "\n16, 2x8 ranks: 2 hosts of 8\n8 ranks: one switch\n"),
        ("-n 8 --device gloo", "\n8 ranks: 8 hosts of 1\n"),
    ],
)
def test_it_says_where_the_ranks_are(capsys, asked, words):
    assert words in cost(capsys, "all_gather", *asked.split())


# -- the command --


def test_the_cost_of_a_wire_is_the_predicted_one(capsys):
    printed = cost(capsys, "all_reduce", "--ranks", "4x2", "--bytes", "64M", "--wire", "int8")
    assert "int8 and scales: 0.516 of the bytes of bfloat16" in printed
    for name in ("lax", "direct", "torus"):
        taken = predict("psum", 2**26, place_of((4, 2), "v5e"), name, "bfloat16", wire="int8")
        assert re.search(rf"\n{name} +{re.escape(seconds_in_words(taken))}[*\n]", printed)


def columns(printed):
    """The times of each algorithm in the first table."""
    table = printed.partition("\nranks ")[2].partition("\n\n")[0].splitlines()[1:]
    rows = (re.split(" {2,}", line.replace("*", " ").rstrip()) for line in table)
    return {name: times for name, *times in rows}


def test_a_column_for_each_number_of_ranks(capsys):
    wide = cost(capsys, "all_gather", "--ranks", "2..2048")
    assert [row.count("s") for row in re.findall(r"^ring( .*)$", wide, re.M)] == [6, 5]
    printed = cost(capsys, "all_gather", "--ranks", "6,8")
    assert "modelled on v5e: alpha 0.9 us, hop 1 us, beta 1/(45 GB/s)" in printed
    times = columns(printed)
    assert times["recursive_doubling"][0] == "-"
    for name in GATHERS:
        taken = seconds(price("all_gather", name, (8,), (8,)), 2**23, DEVICES["v5e"])
        assert times[name][1] == seconds_in_words(taken, like=666e-6)
    assert (
        "\n- recursive_doubling: recursive halving and doubling need a power of two, got 6 ranks"
        in printed
    )


def test_at_a_crossover_the_fastest_changes(capsys):
    two = "one_shot", "ring"
    printed = cost(capsys, "all_reduce", "--network", "switch", "--algorithm", ",".join(two))
    size = float(re.search(r"\n8  one_shot  \| ([\d.]+)K \| ring\n", printed)[1]) * 2**10
    few, many = (seconds(price("psum", a, (8,)), size / 8, DEVICES["v5e"]) for a in two)
    assert few == pytest.approx(many, rel=0.01)


def test_a_users_schedule_and_network(capsys):
    own = "--function ringcoll.algorithms:two_ended --algorithm ring"
    options = ("--network", "8x1", "--bytes", "1K,1M")
    on_a_line = cost(capsys, "all_gather", "--ranks", "8", *options, *own.split())
    assert [*columns(on_a_line)] == ["ring", "two_ended"]
    assert "B = 1K" in on_a_line
    assert "B = 1M" in on_a_line
    printed = cost(capsys, "reduce_scatter", "--ranks", "8", "--network", "switch")
    assert columns(printed)["two_ended"] == ["1.53 ms"]
    assert "8  bruck = recursive_doubling\n" in printed  # always


def test_what_was_not_measured_is_said_once(capsys):
    asked = ["--device", "h100", "-n", "4,8,16", "--bytes", "64M,32G", "--algorithm", "lax,ring"]
    printed = cost(capsys, "all_reduce", *asked)
    place = place_of(4, "h100")
    taken = (predict("psum", 2**26, place, name) for name in ("lax", "ring"))
    lax, by_ring = (seconds_in_words(each, like=395e-6) for each in taken)
    assert columns(printed) == {
        "lax": [lax, ANY, "not measured"],
        "ring": [by_ring, ANY, "not measured"],
    }
    assert columns(printed.partition("B = 64M")[2].partition("\n\n")[2]) == {
        "lax": ["not measured"] * 3,
        "ring": [ANY, ANY, "not measured"],
    }
    assert (
        printed.count("\n- not measured, so not compared: python -m ringcoll machine --show h100")
        == 1
    )
    assert "\n16  not measured\n" in printed
    rows = json.loads(cost(capsys, "all_reduce", *asked, "--json"))
    assert [row["seconds"] for row in rows[-2:]] == [None, None]
    assert "messages were not measured" in cost(capsys, "all_reduce", "--device", "h200")
    assert "not measured" not in cost(capsys, "all_reduce")


def test_the_defaults_are_eight_v5e(capsys):
    """All algorithms and the built-in, as `predict` prices them."""
    printed = cost(capsys, "all_reduce")
    assert printed.startswith("modelled on v5e: alpha 0.9 us")
    for name in ("lax", *names("psum")):
        assert columns(printed)[name] == [
            seconds_in_words(predict("psum", 2**26, place_of(8, "v5e"), name))
        ]
    assert cost(capsys, "all_reduce", "-n", "8", "--device", "v5e") == printed
    assert "\nlax" not in cost(capsys, "tour")
    assert [*columns(cost(capsys, "ppermute"))] == ["lax"]


def test_json(capsys):
    asked = ("all_gather", "--bytes", "1K,64M", "--device", "h100", "--algorithm", "lax,ring")
    assert json.loads(cost(capsys, *asked, "--json")) == [
        {
            "collective": "all_gather",
            "bytes": nbytes,
            "ranks": [8],
            "device": "h100",
            "algorithm": name,
            "wire": None,
            "seconds": predict("all_gather", nbytes, place_of(8, "h100"), name),
        }
        for nbytes in (2**10, 2**26)
        for name in ("lax", "ring")
    ]


# -- matmuls with a collective --

#: The options of each call, the sharding of its operands, and the sizes of a rank's shard if the
#: shape is 8x8x16 and there are two ranks. The last two are the second layer: [m, f] @ [f, k].
ROWS, COLUMNS = P("x"), P(None, "x")
MATMULS = {
    "all_gather_matmul": (ROWS, COLUMNS, 4 * 8),
    "all_gather_matmul --dim -1": (COLUMNS, COLUMNS, 8 * 4),
    "all_gather_matmul --operand 1": (ROWS, ROWS, 4 * 16),
    "all_gather_matmul --operand 1 --dim -1": (ROWS, COLUMNS, 8 * 8),
    "matmul_reduce_scatter": (COLUMNS, ROWS, 4 * 8),
    "matmul_reduce_scatter --dim -1": (COLUMNS, ROWS, 8 * 4),
}
#: A FLOP takes 1 second, a byte on the wire 2, a message 3 more, and memory nothing.
PAPER = {
    "start_seconds": [3, "paper"],
    "link_bytes_per_second": [0.5, "paper"],
    "flops_per_second": [1, "paper"],
    "memory_bytes_per_second": [1e30, "paper"],
}


def forms(capsys, *arguments):
    """The lines of the table, by form."""
    printed = json.loads(cost(capsys, *arguments, "--json"))
    return {line["form"]: line for line in printed}


@pytest.mark.parametrize("call", MATMULS)
def test_what_the_price_of_a_matmul_consists_of(capsys, tmp_path, call):
    """A rank has 2 * 8 * 8 * 16 / 2 FLOPs. Half of them hide the one hop of a ring."""
    machine = {"name": "paper", "what": "", "aliases": [], "axes": 2, "rates": PAPER}
    (tmp_path / "paper.json").write_text(json.dumps(machine))
    asked = *call.split(), "--shape", "8x8x16", "-n", "2", "--device", f"{tmp_path}/paper.json"
    *_, shard = MATMULS[call]
    found, work, hop = forms(capsys, *asked), 1024, 3 + 2 * 2 * shard
    assert found["ring"]["rounds"] == 1
    assert found["ring"]["hop"] == pytest.approx(hop)
    assert found["ring"]["product"] == pytest.approx(work)
    assert found["ring"]["exposed"] == pytest.approx(max(hop - work / 2, 0), abs=1e-6)
    wire = 2 * 2 * shard  # two ranks have one link
    start = 3 * 2 * (2**0.5 - 1)  # of 2 ranks on a plane, whose sides are assumed to be equal
    assert found["lax"]["rounds"] is None
    assert found["lax"]["hop"] == pytest.approx(wire + start)
    assert found["lax"]["exposed"] == pytest.approx(wire + start)
    assert found["lax"]["of_the_limit"] == pytest.approx((work + wire + start) / work)
    machine["rates"] = PAPER | {"link_bytes_per_second": [1 / 200, "paper"]}
    (tmp_path / "paper.json").write_text(json.dumps(machine))
    slow = forms(capsys, *asked)["lax"]
    assert slow["of_the_limit"] == pytest.approx((work + start) / (100 * wire) + 1)


def test_the_limit_has_all_links_and_no_codes(capsys):
    """On 16 v5e, a built-in sum becomes an all-reduce, of half of the links at 63 % of the rate."""
    asked = "--shape", "512x8192x8192"
    found = forms(capsys, "matmul_reduce_scatter", *asked, "-n", "16")["lax"]
    start = 1.9e-6 * 6  # a corner of 4 x 4 is 6 links away
    limit = (found["hop"] - start) / 2 * 0.63
    assert limit > found["product"]
    assert found["of_the_limit"] == pytest.approx(found["total"] / limit)
    plain, coded = (
        forms(capsys, "all_gather_matmul", "--shape", "8192x8192x28672", *wire)["lax"]
        for wire in ((), ("--wire", "int8"))
    )
    assert coded["hop"] < plain["hop"]
    assert coded["of_the_limit"] == pytest.approx(coded["total"] / plain["product"])


@pytest.mark.parametrize("call", MATMULS)
@pytest.mark.parametrize("shape", [(128, 8192, 28672), (2048, 8192, 14336), (8192, 8192, 1024)])
@pytest.mark.parametrize(("kind", "chip"), [("TPU v5 lite", "v5e"), ("TPU v6 lite", "v6e")])
def test_the_marked_line_is_the_plan_of_the_call(capsys, call, shape, kind, chip):
    name, *options = call.split()
    given = dict(zip(options[::2], map(int, options[1::2]), strict=True))
    asked = {flag.removeprefix("--"): value for flag, value in given.items()}
    m, k, f = shape
    sizes = (m, k), (k, f)
    if name == "matmul_reduce_scatter":
        sizes = (m, f), (f, k)
    device = AbstractDevice(kind, None, "tpu")
    mesh = AbstractMesh((8,), ("x",), abstract_device=device, axis_types=(AxisType.Auto,))
    *sharded, _ = MATMULS[call]
    matmul = jax.shard_map(
        lambda x, w: getattr(ringcoll, name)(x, w, "x", **asked),
        mesh=mesh, in_specs=tuple(sharded), out_specs=P(), check_vma=False,
    )  # fmt: skip
    operands = [
        jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for size, spec in zip(sizes, sharded, strict=True)
    ]
    (_, plan), *_ = ringcoll.explain(matmul)(*operands).plans  # then those of its collectives
    typed = *call.split(), "--shape", "x".join(map(str, shape)), "--device", chip
    found, printed = forms(capsys, *typed), cost(capsys, *typed)
    assert [form for form, line in found.items() if line["chosen"]] == [plan.name]
    assert plan.seconds == found[plan.name]["total"] or plan.why == EARLY
    is_early = "operand" in asked and chip == "v6e"
    assert (plan.why == EARLY) == (EARLY in " ".join(printed.split())) == is_early
    assert re.findall(r"^(\S.*?)  .*\*  ", printed, re.M) == [plan.name]


def test_a_table_for_each_number_of_ranks(capsys):
    printed = cost(capsys, "all_gather_matmul", "-n", "4,4x2")
    assert re.findall(r"; (n = .*)", printed) == ["n = 4, v5e", "n = 4x2, v5e"]
    assert max(map(len, printed.splitlines())) <= 100


# -- users' schedules --


def of_eight(n):
    if n != 8:
        raise KeyError(n)
    return ring(n)


def two_step(hosts, local):
    return ring(hosts * local + 1)


given, recursive_doubling = partial(ring, direction=-1), of_eight


def test_functions_of_some_numbers_only(capsys):
    own = f"--algorithm ring,recursive_doubling --function {__name__}"
    printed = cost(capsys, "all_gather", "--ranks", "6,8", *f"{own}:of_eight".split())
    assert [columns(printed)[name][0] for name in ("recursive_doubling", "of_eight")] == ["-", "-"]
    assert "\n- of_eight: --function test_command_cost:of_eight: called with (6,), the" in printed
    assert "KeyError: 6 (" in printed
    printed = cost(capsys, "all_gather", "--ranks", "6,10", "--algorithm", "recursive_doubling",
                "--function", f"{__name__}:given")  # fmt: skip
    assert [*columns(printed)] == ["recursive_doubling", "given"]
    printed = cost(capsys, "all_gather", "--ranks", "8", *f"{own}:recursive_doubling".split())
    assert "recursive_doubling (--function)  " in printed  # beside the library's
    printed = cost(capsys, "all_gather", "--ranks", "2x4,8", "--algorithm", "ring",
                "--function", f"{__name__}:two_step")  # fmt: skip
    printed = " ".join(printed.split())
    assert "- two_step: all_gather: a schedule of 9 ranks on axes of sizes (2, 4); " in printed
    assert "or pass a function of n (two_step(2, 4) returned it)" in printed
    assert "called with (8,), the sizes of the axes: TypeError: two_step() missing 1" in printed
    printed = cost(capsys, "all_gather", "--ranks", "3,4", "--algorithm", "recursive_doubling")
    assert "\n3  -\n4  recursive_doubling\n" in printed
