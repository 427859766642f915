"""Times of programs for GPUs: what was measured on the machine, and streams that take turns."""

import json

import pytest
from hlo_texts import blocking, done, program, start, untiled

from ringcoll import costs, overlap
from ringcoll.costs.machines import MACHINES

H100 = MACHINES["h100"]
#: Seconds of the matmul of `matmul`: float32, 500^3.
PRODUCT = H100.matmuls[4].start + 2 * 500**3 * H100.matmuls[4].delta
HOP = costs.predict("ppermute", 1e6, costs.place_of(4, "h100"))


def matmul(name, x="x"):
    return f"%{name} = f32[500,500]{{1,0}} fusion(%{x}, %w), kind=kCustom, calls=%matmul"


def on_other_stream(name, x="x"):
    """A matmul on another stream, and the wait for it."""
    kind = "kind=kCustom, calls=%matmul"
    of = "((f32[500,500]{1,0}, f32[500,500]{1,0}), f32[500,500]{1,0})"
    return (
        f"%{name}.s = {of} fusion-start(%{x}, %w), {kind}",
        f"%{name} = f32[500,500]{{1,0}} fusion-done(%{name}.s)",
    )


def timed(*lines, chip="h100", **options):
    return overlap.report(untiled(program(*lines, **options)), chip=chip)


def test_a_permute_and_a_matmul_take_what_was_measured():
    report = timed(start("s"), matmul("y"), done("d", "s"), matmul("z", "d"))
    assert report.timed
    assert report.rows[0].wire == pytest.approx(HOP)
    assert report.compute == pytest.approx(2 * PRODUCT)
    assert report.exposed == pytest.approx(HOP - PRODUCT)
    assert report.total == pytest.approx(HOP + PRODUCT)
    assert dict(report.sources) == {"measured": pytest.approx(2 * PRODUCT)}


@pytest.mark.parametrize(
    ("opcode", "name", "times"),
    [
        ("all-gather", "all_gather", 4),
        ("reduce-scatter", "psum_scatter", 1),
        ("all-reduce", "psum", 1),
        ("all-to-all", "all_to_all", 1),
        ("collective-broadcast", "pbroadcast", 1),
    ],
)
def test_built_in_collectives_are_those_of_predict(opcode, name, times):
    """Bytes as nccl-tests counts them: of an all-gather, those of the result."""
    report = timed(matmul("y"), blocking(opcode, "y"))
    taken = costs.predict(name, times * 1e6, costs.place_of(4, "h100"))
    assert report.exposed == pytest.approx(taken)
    pairs = timed(matmul("y"), blocking(opcode, "y", groups="{{0,1},{2,3}}"))
    least = costs.predict(name, min(times, 2) * 1e6, costs.place_of(2, "h100"))
    assert pairs.exposed == pytest.approx(least)


@pytest.mark.parametrize(
    ("groups", "what"),
    [
        ("{{0,1,2,3}}", ""),
        ("{{0,1,8,9}}", "psum of 1e+06 bytes on 4 ranks"),  # on two hosts
        ("{{0,1,2,8}}", "psum of 1e+06 bytes on 4 ranks"),
        ("{{0,1,8}}", "psum of 1e+06 bytes on 3 ranks"),
        ("{{0,1},{2,3,4}}", "psum of 1e+06 bytes on 3 ranks"),
    ],
)
def test_without_a_measurement_of_each_collective_there_are_no_times(groups, what):
    report = timed(matmul("y"), blocking("all-reduce", "y", groups=groups), ranks=16)
    assert report.timed == (not what)
    assert [row.without_matmul for row in report.rows] == [1]
    assert (f"nobody measured this: {what} of h100" in str(report)) == bool(what)
    other = timed(matmul("y"), chip=overlap.Gpu("h200", 4.8e12))
    assert "nobody measured this: a matmul of 32 bits on h200" in str(other)
    if not what:
        (row,) = report.rows
        assert row.wire == pytest.approx(costs.predict("psum", 1e6, costs.place_of(4, "h100")))


def test_transfers_run_one_after_the_other():
    report = timed(start("s"), start("t"), done("d", "s"), done("e", "t"))
    assert report.total == report.exposed == pytest.approx(2 * HOP)
    assert {segment.ways for segment in report.segments if segment.row == "wire"} == {("port",)}
    nobody = "source_target_pairs={{0,0}}"
    assert timed(start("s", pairs=nobody), done("d", "s")).total == 0


def test_matmuls_on_two_streams_take_turns():
    (one, wait), (two, last) = on_other_stream("m"), on_other_stream("n")
    report = timed(one, two, matmul("y"), wait, last)
    assert report.total == report.compute == pytest.approx(3 * PRODUCT)
    assert report.exposed == report.memory == 0


def test_a_transfer_under_a_matmul_of_another_stream_is_exposed_for_the_rest():
    one, wait = on_other_stream("m")
    report = timed(one, start("s"), done("d", "s"), wait)
    assert report.exposed == pytest.approx(HOP - PRODUCT)
    assert report.total == pytest.approx(HOP)
    assert report.rows[0].compute == pytest.approx(PRODUCT)
    later = timed(one, start("s"), done("d", "s"), wait, start("t", "m"), done("e", "t"), chip=None)
    assert [(row.matmuls, row.without_matmul) for row in later.rows] == [(1, 0), (0, 1)]
    assert later.rows[0].flops == later.flops == report.flops == 2 * 500**3
    inside = timed(start("s"), one, done("d", "s"), wait, chip=None)
    assert [(row.matmuls, row.without_matmul) for row in inside.rows] == [(1, 0)]


def test_elementwise_work_on_a_gpu_takes_its_memory_time():
    """Three arrays. The workspace of a library's matmul does not count."""
    report = timed("%a = f32[500,500]{1,0} add(%x, %w)")
    assert report.total == pytest.approx(3e6 * H100.model.memory)
    assert dict(report.sources) == {"roofline": report.total}
    config = '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}'
    gemm = (
        "%g = (f32[500,500]{1,0}, s8[999999999]{0}) custom-call(%x, %w), "
        f'custom_call_target="__cublas$gemm", backend_config={{"gemm_backend_config":{config}}}'
    )
    report = timed(start("s"), gemm, done("d", "s"))
    assert report.compute == pytest.approx(PRODUCT)
    (row,) = report.rows
    assert (row.matmuls, row.without_matmul, row.flops) == (1, 0, 2 * 500**3)


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 2), ("f8e4m3fn", 1), ("f64", 8)])
def test_a_matmul_has_the_price_of_its_dtype_or_none(dtype, width):
    text = untiled(program("%d = f32[500,500]{1,0} dot(%x, %w), lhs_contracting_dims={1}"))
    text = text.replace("%x = f32", f"%x = {dtype}").replace("%w = f32", f"%w = {dtype}")
    report, rate = overlap.report(text, chip="h100"), H100.matmuls.get(width)
    assert report.total == pytest.approx(rate.start + 2 * 500**3 * rate.delta if rate else 0)
    assert (f"a matmul of {8 * width} bits on h100" in str(report)) == (rate is None)


def test_a_report_of_a_gpu_names_its_model_and_error():
    report = timed(start("s"), matmul("y"), done("d", "s"), chip="NVIDIA H100")
    text = str(report)
    for words in (
        "h100: memory 3350 GB/s",
        "as measured there",
        "median error",
        "nobody has measure",
    ):
        assert words in text
    assert "1 of 1 collectives have a matmul between start and done" in text
    assert json.loads(report.to_json())["chip"] == {"name": "h100", "hbm": 3.35e12}
    gpus = {name for name, chip in overlap.CHIPS.items() if isinstance(chip, overlap.Gpu)}
    assert gpus == {"h100", "b200"}  # whose matmuls and permutes were measured


def test_the_device_kind_tells_the_gpu():
    text = untiled(program(matmul("y")))
    known = overlap.report(overlap.Program(text, kind="NVIDIA H100 80GB HBM3"))
    assert known.chip == overlap.CHIPS["h100"]
    assert not overlap.report(overlap.Program(text, kind="NVIDIA GeForce")).timed
    with pytest.raises(ValueError, match="is a TPU program, but nothing says of which"):
        overlap.report(program(matmul("y")), chip="h100")
    with pytest.raises(ValueError, match="is a TPU program, but no chip 'TPU v4' is known; pass"):
        overlap.report(overlap.Program(program(matmul("y")), kind="TPU v4"))
    with pytest.raises(ValueError, match=r"no chip is named 'abacus', only .*tpu7x, .*h100"):
        timed(matmul("y"), chip="abacus")
