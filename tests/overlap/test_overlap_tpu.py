"""Programs of the real TPU compiler: what it overlaps is green, what it cannot is red.

No TPU is needed, only libtpu. The programs are compiled in a process of their own, because a
process loads libtpu only once, and keeps it: see `tpu_programs`.
"""

import json
from importlib.metadata import version
from importlib.util import find_spec

import jax
import pytest
from support import HERE, python

from benchmarks.compiled import recorded_claims

pytestmark = [
    pytest.mark.tpu_aot,
    pytest.mark.skipif(
        find_spec("libtpu") is None, reason="libtpu is not installed: pip install -e '.[tpu]'"
    ),
]


@pytest.fixture(scope="module")
def programs(printed) -> dict:
    """The small programs that `tpu_programs` compiled, and those that were refused."""
    return json.loads(printed("tests/tpu_programs.py"))


@pytest.fixture(scope="module")
def models(printed) -> dict:
    """README's headline, matmuls with gradients, and layers."""
    return json.loads(printed("tests/tpu_programs.py", "exhaustive"))


@pytest.fixture(scope="module")
def kinds(printed) -> dict:
    """Programs of `tpu_kinds`, whose communication is written in a different way."""
    return json.loads(printed("tests/tpu_kinds.py"))


def test_a_ring_that_multiplies_its_shards_is_overlapped(programs):
    report = programs["overlapped"]
    assert report["verdict"] == "green", report["text"]
    assert [row["kind"] for row in report["rows"]] == ["collective-permute"] * 7
    assert all(row["asynchronous"] and row["hops"] == 1 for row in report["rows"])
    assert {row["bytes"] for row in report["rows"]} == {256 * 2048 * 2}
    assert report["flops"] == 2 * 2048 * 2048 * 40960 / 8


def test_a_ring_that_sends_after_its_matmul_fails_the_assertion(programs):
    report = programs["after_the_matmul"]
    assert report["verdict"].startswith("red: "), report["text"]
    # Seven hops of 1 MiB at 45 GB/s, and 1 us each; no matmul hides them.
    hops = 7 * (256 * 2048 * 2 / 45e9 + 1e-6)
    assert 0.9 * hops < report["exposed"] <= 1.0001 * hops
    assert all(row["without_matmul"] for row in report["rows"])
    assert report["flops"] == programs["overlapped"]["flops"]


@pytest.mark.exhaustive
def test_claims_of_the_headline_hold(models):
    """What README says of our matmuls and the plain forms on three TPUs, compiled again."""
    series = {tuple(one.jax.split(".")[:2]) for one in recorded_claims.load()}
    if tuple(version("jax").split(".")[:2]) not in series:
        pytest.skip(f"nothing is claimed of this version of JAX, only of {sorted(series)}")
    # Fails for a compiler without claims: else CI would not notice. (--update adds them.)
    assert len(models["headline"]) == 12
    wrong = {name: now for name, now in models["headline"].items() if now["off"]}
    assert not wrong, "python -m benchmarks claims"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ours", "plain", "share"),
    [
        ("gathers auto", "gathers lax", 0.02),
        ("scatters auto", "scatters lax", 0.02),
        ("gathers both auto", "gathers both lax", 0.02),
        ("scatters both auto", "scatters both lax", 0.02),
        ("gated_mlp auto", "gated_mlp lax", 0.05),
        ("step ours", "step plain", 0.05),
    ],
)
def test_ours_hide_their_messages_and_the_built_in_forms_do_not(models, ours, plain, share):
    assert models[ours]["exposed_share"] <= share, models[ours]["text"]
    assert models[ours]["verdict"] == "green", models[ours]["text"]
    assert models[plain]["verdict"].startswith("red: "), models[plain]["text"]


@pytest.mark.exhaustive
def test_layers_of_a_step_send_permutes_or_built_in_collectives(models):
    ours, plain = (models[f"step {form}"]["rows"] for form in ("ours", "plain"))
    assert {row["kind"] for row in ours} == {"collective-permute", "all-reduce"}  # of the loss
    blocking = {(row["kind"], row["count"]) for row in plain if not row["asynchronous"]}
    expected = {("all-gather", 4), ("reduce-scatter", 4), ("all-reduce", 1)}
    assert blocking == expected, models["step plain"]["text"]


def test_a_loop_counts_its_turns(programs):
    report = programs["loop"]
    (row,) = report["rows"]
    assert (row["count"], row["matmuls"]) == (7, 7)
    assert row["wire"] == pytest.approx(256 * 2048 * 2 / 45e9 + 1e-6)


def test_a_dump_is_read_as_the_compiled_program(programs):
    report, early = programs["dumped"], programs["dumped before code"]
    for name in ("rows", "total", "exposed", "sources"):
        assert report[name] == programs["loop"][name]
    assert early["sources"].keys() == {"share", "roofline"}
    assert early["compute"] == pytest.approx(report["compute"], rel=0.25)
    assert [row["count"] for row in early["rows"]] == [7]
    assert early["notes"][0].endswith(".after_optimizations.txt")


def test_a_built_in_all_gather_is_exposed_whole(programs):
    report = programs["plain"]
    (row,) = report["rows"]
    assert (row["kind"], row["asynchronous"]) == ("all-gather", False)
    # Each corner of the 4 x 2 has two links, over which seven shards come; the farthest is 4 away.
    least = 7 * 256 * 2048 * 2 / 90e9
    assert report["least"]["exposed"] == pytest.approx(least)
    assert report["exposed"] == pytest.approx(least / 0.89 + 4 * 1.9e-6)
    assert report["verdict"].startswith("red: ")


@pytest.mark.exhaustive
def test_all_gathers_that_the_compiler_spreads_are_read(models):
    rows = models["layers"]["rows"]
    assert [row["kind"] for row in rows] == ["all-gather"] * 4
    spread = [row for row in rows if row["asynchronous"]]
    assert len(spread) == 3
    assert all(row["matmuls"] == 1 and row["exposed"] == 0 for row in spread)


def test_times_are_near_the_rates_of_the_chip(programs):
    for name in ("overlapped", "plain"):
        report = programs[name]
        assert report["compute"] == pytest.approx(report["flops"] / 197e12, rel=0.2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", ["default", "auto", "mixed"])
def test_a_static_profile_is_taken_first(models, axes):
    report = models[f"profiled {axes}"]
    assert report["sources"].keys() == {"profile"}, report["text"]
    assert report["temporaries"] is not None
    assert report["program_bytes"] > 0


@pytest.mark.exhaustive
def test_the_page_of_meshes_has_the_table_of_hops():
    printed = python("-m", "benchmarks", "meshes", "--hops").stdout
    page = (HERE / "docs" / "meshes.md").read_text(encoding="utf-8")
    assert printed in page


def test_rings_take_single_hops_in_the_order_of_mesh(programs):
    assert programs["hops"] == {
        **{"v5e:4x2": [1], "v5e:8x8": [1], "v5p:2x2x2": [1]},
        **{"two axes": [2, 1], "far": [14]},  # a line of four, and one of two
    }


def test_impossible_topologies_and_meshes_raise(programs):
    assert "no topology 'v5e:5x7'" in programs["refused topology"]
    assert "{'x': 4}, but v5e:4x2 has 8 devices" in programs["refused axes"]
    assert "(TPU v5 lite), which is not one of the 8 devices" in programs["refused kind"]
    assert "not one of the 4 devices of v5e:2x2 (TPU v5 lite)" in programs["refused slice"]


# -- other communication: on a tpu7x's sparse cores, and by a kernel --


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="this JAX cannot write a tpu7x's programs as text"
)
@pytest.mark.exhaustive
def test_collectives_on_sparse_cores_are_exposed(kinds):
    gathered, summed = kinds["gathered"], kinds["summed"]
    assert gathered["kinds"] == ["all-gather"]
    assert summed["kinds"] == ["all-reduce", "reduce-scatter"]
    assert gathered["unread"] == summed["unread"] == []
    # Seven shards of 8 MiB over two or three links of 90 GB/s; nothing hides them.
    seconds = 7 * 1024 * 4096 * 2 / 90e9
    assert seconds / 3 * 0.999 < gathered["exposed"] < seconds / 2 * 1.001
    assert summed["exposed"] > 0


@pytest.mark.exhaustive
def test_a_kernel_with_remote_copies_is_unread_by_name(kinds):
    (name,) = kinds["kernel"]["unread"]
    assert kinds["kernel"]["kinds"] == []
    assert any(name in note and "remote copies" in note for note in kinds["kernel"]["assumptions"])
    assert kinds["kernel"]["unpriced"] == [name]


@pytest.mark.exhaustive
def test_attention_of_jax_has_a_price(kinds):
    """Causal: of two products forward and seven backward, half of the scores."""
    splash = kinds["splash"]
    flops = (2 + 3 + 4) / 2 * 2 * 4 * 1024 * 1024 * 128
    assert splash["sources"]["attention"] == pytest.approx(flops / 0.32 / 918e12, rel=1e-6)
    assert (splash["unpriced"], splash["unread"], splash["host"]) == ([], [], 0)


@pytest.mark.exhaustive
def test_what_is_kept_on_the_host_is_copied_by_the_layer(kinds):
    """Of four layers, 8 MiB there and back; less is waited for, as work hides some of it."""
    layer = 4096 * 1024 * 2 / 32e9
    assert layer < kinds["offloaded"]["host"] < 8 * layer * 1.001
