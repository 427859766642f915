"""Programs for eight H200 from the real compiler: our messages have matmuls over them.

Neither a GPU nor CUDA is needed, only XLA's plugin. The programs are compiled in a process of their
own, so that no other test finds the plugin loaded: see `gpu_programs`.
"""

import json
from importlib.util import find_spec

import pytest
from support import python

from ringcoll import overlap

pytestmark = [
    pytest.mark.gpu_aot,
    pytest.mark.skipif(
        find_spec("jax_cuda13_plugin") is None,
        reason="XLA's plugin for GPUs is not installed: pip install -e '.[gpu]'",
    ),
]


@pytest.fixture(scope="module")
def programs(printed) -> dict:
    """What `gpu_programs` has compiled, for exhaustive tests."""
    return json.loads(printed("tests/gpu_programs.py"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["gather", "scatter", "weights"])
@pytest.mark.parametrize(("both", "hops"), [("", 7), (" both", 14)])
def test_messages_of_the_ring_have_a_matmul_under_them(programs, form, both, hops):
    ours, plain = (programs[f"{form} {algorithm}{both}"] for algorithm in ("ring", "lax"))
    assert ours["verdict"] == "green", ours["text"]
    assert {row["kind"] for row in ours["rows"]} == {"collective-permute"}
    assert sum(row["count"] for row in ours["rows"]) == hops  # some are of a loop
    assert all(row["asynchronous"] and not row["without_matmul"] for row in ours["rows"])
    assert plain["verdict"].startswith("red: "), plain["text"]
    assert plain["flops"] == ours["flops"] > 0
    assert any(row["without_matmul"] and not row["asynchronous"] for row in plain["rows"])


@pytest.mark.exhaustive
def test_regathering_leaves_at_most_one_hop_exposed(programs):
    report = programs["regather"]
    assert sum(row["count"] for row in report["rows"]) > 14
    assert sum(row["without_matmul"] for row in report["rows"]) <= 1, report["text"]


@pytest.mark.exhaustive
def test_one_direction_is_exposed_without_the_compiler_option(programs):
    """This is why the ring goes one way on GPUs. If this fails, it need not."""
    both = [programs[f"both ways{told}"]["rows"] for told in ("", ", two at once")]
    assert [sum(row["without_matmul"] for row in rows) for rows in both] == [7, 0]
    assert len(programs["both ways"]["rows"]) == 14


@pytest.mark.exhaustive
def test_every_gpu_that_is_compiled_for_is_counted_and_the_measured_ones_are_timed(programs):
    assert programs["kinds"] == ["NVIDIA H200"] * 8
    assert {"h100", "h200", "b200", "gb200"} == {*programs["targets"]}
    for name, (chip, total, flops) in programs["targets"].items():
        is_measured = name in overlap.CHIPS
        assert (chip, total > 0) == (name if is_measured else None, is_measured)
        assert flops > 0


#: A permute of 256 MiB takes less than its product.
HIDDEN = ("--topology", "h100:4", "--shape", "65536x8192x28672", "--max-exposed", "0.01")


def test_the_command_counts_and_times():
    ours = python("-m", "ringcoll", "overlap", *HIDDEN, "--example", "all_gather_matmul")
    assert ours.returncode == 0, ours.stderr
    assert "3 of 3 collectives have a matmul between start and done" in ours.stdout
    assert "exposed 0 us (0.0%)" in ours.stdout
