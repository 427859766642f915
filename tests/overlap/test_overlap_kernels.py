"""Kernels take what their text or the caller says, or are named; the host's memory is a queue."""

import json
import math
from dataclasses import replace

import pytest
from hlo_texts import CHIP, MATMUL, SHAPE, blocking, computation, dot, program, untiled, us

from ringcoll import __main__ as command_line
from ringcoll import overlap
from ringcoll.commands import overlap as command

#: 1 TFLOP/s; so 1 GFLOP takes 1000 us, and 1 MB 100 us.
ESTIMATE = '"cost_estimate":{"flops":"FLOPS","transcendentals":"0","bytes_accessed":"BYTES"},'


def kernel(flops="", moved="0", name="k", target="tpu_custom_call"):
    estimate = ESTIMATE.replace("FLOPS", flops).replace("BYTES", moved) if flops else ""
    config = f'backend_config={{"custom_call_config":{{"body":"TUzv",{estimate}"layout":true}}}}'
    return f'%{name} = {SHAPE} custom-call(%x), custom_call_target="{target}", {config}'


def escaped(line):
    """As a text that is only lowered has it."""
    head, config, rest = line.partition("backend_config=")
    quoted = rest.replace('"', '\\"').replace(":", ": ").replace(",", ", ")
    return f'{head}{config}"{quoted}"'


OWN = computation("own", {"x": SHAPE}, kernel())
ASLEEP = computation("own", {"x": SHAPE}, kernel(), end='}, execution_thread="sparsecore"')
BRANCHES = f"%y = {SHAPE} conditional(%x, %x, %x), branch_computations={{%own, %own}}"
SPARSE = (
    "%b = ((), (), s32[4]) custom-call-start(), called_computations={%own}",
    f"%u = (({SHAPE}), {SHAPE}, s32[4]) custom-call-update(%b, %x)",
    f"%e = {SHAPE} custom-call-done(%u)",
)


@pytest.mark.parametrize(
    ("lines", "taken", "unpriced"),
    [
        ((kernel("2000000000"),), 2000, ()),
        ((kernel("2000000000", "30000000"),), 3000, ()),  # its bytes take longer
        ((escaped(kernel("2000000000")),), 2000, ()),
        ((kernel("0", "1000000"),), 100, ()),
        # Without an estimate: the bytes of the operand and of the result.
        ((kernel(),), 200, ("k",)),
        ((kernel(target="triton_kernel_call"),), 200, ("k",)),
        ((kernel(), kernel(name="k2")), 400, ("k", "k2")),
        ((f"%f = {SHAPE} fusion(%x), kind=kCustom, calls=%own",), 200, ("k",)),
        ((f"%c = {SHAPE} call(%x), to_apply=%own",), 200, ("k",)),
        ((BRANCHES,), 200, ("k",)),
        (SPARSE, 200, ("k",)),
        # The compiler's own calls are no kernels.
        ((kernel(target="TopK"),), 200, ()),
        ((dot("y"),), 1000, ()),
    ],
)
def test_a_kernel_without_an_estimate_has_no_price(lines, taken, unpriced):
    own = ASLEEP if lines is SPARSE else OWN
    text = program(*lines, before=MATMUL + own * ("%own" in "".join(lines)))
    report = overlap.report(text, chip=CHIP)
    assert us(report, "total") == (taken,)
    assert report.unpriced == unpriced
    first = str(report).splitlines()[0]
    assert first.endswith(f", without a price: {', '.join(unpriced)}") == bool(unpriced)
    assert json.loads(report.to_json())["unpriced"] == [*unpriced]
    assert overlap.Report.from_json(report.to_json()).unpriced == unpriced
    overlap.assert_overlapped(text, chip=CHIP, min_collectives=0, allow_unread=("k", "k[2]"))
    overlap.assert_collectives(text, {})
    if unpriced:
        with pytest.raises(AssertionError, match=f"{unpriced[-1]} of jit_f: kernels without a"):
            overlap.assert_overlapped(text, chip=CHIP, min_collectives=0, allow_unread="other")


@pytest.mark.parametrize(
    ("given", "taken", "unpriced"),
    [
        ({"k": 1e-3}, 1800, ("k2",)),
        ({"k*": 1e-3}, 2000, ()),
        ({"k2": 0.0, "k*": 2e-3}, 2000, ()),  # the first that fits
        ({"k*": 2e-3, "k2": 0}, 4000, ()),
        ({}, 1000, ("k2",)),
    ],
)
def test_what_was_measured_of_a_kernel_counts(given, taken, unpriced):
    text = program(kernel("1000000"), kernel(name="k2").replace("500,500", "1000,1750"))
    report = overlap.report(text, chip=CHIP, kernels=given)
    assert (us(report, "total"), report.unpriced) == ((taken,), unpriced)
    told = [line for line in report.assumptions if "from what was given for kernels" in line]
    assert len(told) == bool(given)
    allow = {"allow_unread": unpriced, "min_collectives": 0}
    assert overlap.assert_overlapped(text, chip=CHIP, kernels=given, **allow) == report


@pytest.mark.parametrize(
    ("given", "error", "complaint"),
    [
        ({"s*": 1.0}, ValueError, r"kernels: 's\*' is no kernel; name one of k$"),
        ({"y": 1.0}, ValueError, "'y' is no kernel; name one of k$"),
        ({"k": -1.0}, ValueError, r"kernels\['k'\]=-1.0 is not 0 or more, and finite"),
        ({"k": math.nan}, ValueError, r"kernels\['k'\]=nan is not 0 or more"),
        ({"k": "1"}, TypeError, r"kernels\['k'\]='1' is not a number"),
        ({"k": True}, TypeError, r"kernels\['k'\]=True is not a number"),
        (1e-3, ValueError, "'total' is no kernel"),
    ],
)
def test_bad_seconds_of_kernels_are_refused(given, error, complaint):
    with pytest.raises(error, match=complaint):
        overlap.report(program(kernel(), dot("y")), chip=CHIP, kernels=given)
    with pytest.raises(ValueError, match="'k' is no kernel; there is none"):
        overlap.report(program(dot("y")), chip=CHIP, kernels={"k": 1.0})
    with pytest.raises(ValueError, match="jit_f has no times; pass a chip"):
        overlap.report(untiled(program(kernel())), kernels={"k": 1.0})


def test_the_command_takes_what_was_measured(monkeypatch, capsys):
    text = program(kernel(), dot("y"), blocking("all-gather"))
    monkeypatch.setattr(command, "mesh_of", lambda _: None)
    monkeypatch.setattr(command, "example", lambda *_: (None, ()))
    monkeypatch.setattr(
        command, "compile_for", lambda *_, **__: overlap.Program(text, "TPU v5 lite")
    )
    run = ["overlap", "--example", "ring_matmul", "--max-exposed", "1"]
    assert command_line.main([*run, "--json"]) == 1
    assert "k of jit_f: kernels without a price" in capsys.readouterr().err
    assert command_line.main([*run, "--json", "--kernel", "k=2e-3"]) == 0
    assert json.loads(capsys.readouterr().out)["sources"]["given"] == 2e-3
    for wrong in ("k2=1", "k=-1", "k", "=1"):
        with pytest.raises(SystemExit):
            command_line.main([*run, "--kernel", wrong])
        assert "kernel" in capsys.readouterr().err


# -- attention: q, k and v of 4 heads x 1024 x 64 (values: 32), in blocks of 256 --

HEADS = "bf16[4,1024,DEPTH]{2,1,0:T(8,128)(2,1)}"
Q, V = HEADS.replace("DEPTH", "64"), HEADS.replace("DEPTH", "32")
#: FLOPs of a product as deep as a head of the queries. One of the values has half of them.
PRODUCT = 2 * 4 * 1024 * 1024 * 64
POSITIONS = "s32[1024,128]{1,0:T(8,128)}"
SEGMENTS = (POSITIONS, "s32[8,1024]{1,0:T(8,128)}")
FLASH = "/jit(flash_attention)/pallas_call"


def attention(name, *after, grid="[1,4,4]", results=(Q,), depth=(Q, Q, V), op=""):
    """A call of an attention kernel; `grid` is the shape of the blocks of its mask."""
    mask = [f"s8{grid}{{2,1,0:T(8,128)}}"] * 2 if grid else []
    operands = [*mask, *depth, *after]
    given = [f"%o{i} = {shape} constant(0)" for i, shape in enumerate(operands)]
    names = ", ".join(f"%o{i}" for i in range(len(operands)))
    blocks = f'\n"xprof_metadata":"{{\\"block_q{op}\\": 256, \\"block_kv{op}\\": 256}}"\n'
    call = f"%{name}.1 = ({', '.join(results)}) custom-call({names}), "
    call += 'custom_call_target="tpu_custom_call", '
    call += (
        f'frontend_attributes={{kernel_metadata={{{blocks}}}}}, metadata={{op_name="{name}{op}"}}'
    )
    return given, call


@pytest.mark.parametrize(
    ("call", "products", "said"),
    [
        # The positions of a mask that is computed are the last operand.
        (attention("splash_mha_fwd_residuals", POSITIONS), 1.5 / 2, "causal"),
        (attention("splash_mqa_fwd_no_residuals", POSITIONS), 1.5 / 2, "causal"),
        (attention("splash_mha_fwd_segmented_residuals", *SEGMENTS, POSITIONS), 1.5 / 2, "causal"),
        (attention("splash_mha_fwd_segmented_residuals", *SEGMENTS), 1.5, ""),
        (attention("splash_mha_fwd_residuals"), 1.5, ""),
        (attention("splash_mha_fwd_residuals", "s32[3,256,256]{2,1,0}"), 1.5, "all scores"),
        # Three of four blocks of keys, or of queries: a window.
        (attention("splash_mha_fwd_residuals", POSITIONS, grid="[1,4,3]"), 1.5 * 0.75, "blocks"),
        (attention("splash_mha_dkv_no_residuals", POSITIONS, grid="[1,3,4]", op="_dkv"),
         3 * 0.75, "blocks"),
        (attention("splash_mha_dq_no_residuals", Q, V, Q, POSITIONS, op="_dq"), 2.5 / 2, "causal"),
        (attention("splash_mha_dkv_no_residuals", POSITIONS, op="_dkv"), 3 / 2, "causal"),
        # The fused one has the gradient of the queries, for each block of keys.
        (attention("splash_mha_dkv_no_residuals", POSITIONS, op="_dkv",
                   results=(Q.replace("[4", "[4,4"), Q, V)), 4 / 2, "causal"),
        # Depth before length.
        (attention("splash_mha_fwd_residuals", POSITIONS, depth=(
            Q.replace("1024,64", "64,1024"), Q.replace("1024,64", "64,1024"), V)), 0.75, "causal"),
        # Flash attention has no mask in the text.
        (attention("custom-call", grid="", op=FLASH), 1.5, "all scores"),
        (attention("flash_mha_bwd_dq_block_q_major_256", Q, grid=""), 2.5, "all scores"),
        (attention("flash_mha_bwd_dkv_block_q_major_256", Q, grid=""), 3, "all scores"),
    ],
)  # fmt: skip
def test_an_attention_kernel_takes_its_flops_at_a_share_of_the_peak(call, products, said):
    given, line = call
    report = overlap.report(program(*given, line), chip=CHIP)
    assert report.flops == products * PRODUCT
    assert report.total == pytest.approx(products * PRODUCT / 0.32 / CHIP.flops)
    masks = [line for line in report.assumptions if line.startswith("the mask of ")]
    assert [said in mask for mask in masks] == [True] * bool(said)
    assert not report.unpriced


@pytest.mark.parametrize("cycles", [1, 10_000_000])
def test_cycles_of_a_profile_are_the_least_of_a_kernel(cycles):
    given, call = attention("splash_mha_fwd_residuals", POSITIONS)
    for line, name, taken in (
        (call, "splash_mha_fwd_residuals.1", 0.75 * PRODUCT / 0.32 / CHIP.flops),
        (kernel("2000000000"), "k", 2e-3),
        (kernel(), "k", 2e-4),
    ):
        found = overlap.Program(program(*given, line), profile={name: cycles})
        report = overlap.report(found, chip=CHIP)
        assert report.total == pytest.approx(max(taken, cycles * 1e-9))
        assert report.unpriced == (("k",) if taken == 2e-4 else ())


# -- the memory of the host: 2 GB/s, so 1 MB takes 500 us; in that of the chip it takes 100 us --

FAR = replace(CHIP, host=2e9)

HOST = SHAPE.replace("(8,128)", "(8,128)S(5)")
STACK = HOST.replace("[500", "[7,500").replace("{1", "{2,1")
SLICE = SHAPE.replace("[500", "[1,500").replace("{1", "{2,1")
ZERO, STACKED = "%z = s32[] constant(0)", f"%p = {STACK} parameter(2)"
TO = f"%c = ({HOST}, {SHAPE}, u32[]) copy-start(%x)", f"%d = {HOST} copy-done(%c)"
BACK = f"%c2 = ({SHAPE}, {HOST}, u32[]) copy-start(%h)", f"%d2 = {SHAPE} copy-done(%c2)"
ON_HOST = f"%h = {HOST} parameter(2)"
NEAR = f"%n = ({SHAPE.replace(')}', ')S(1)}')}, {SHAPE}, u32[]) copy-start(%x)"
NEAR_DONE = f"%nd = {SHAPE.replace(')}', ')S(1)}')} copy-done(%n)"
UPDATE = (
    f"%u = (({STACK}, {SLICE}, s32[], s32[], s32[]), {STACK}, u32[]) "
    "dynamic-update-slice-start(%p, %s, %z, %z, %z)",
    f"%ud = {STACK} dynamic-update-slice-done(%u)",
)
TAKE = (
    f"%t = (({STACK}, s32[], s32[], s32[]), {SLICE}, u32[]) dynamic-slice-start(%p, %z, %z, %z), "
    "dynamic_slice_sizes={1,500,500}",
    f"%td = {SLICE} dynamic-slice-done(%t)",
)
INTO = f"%s = {SLICE} bitcast(%x)"


@pytest.mark.parametrize(
    ("lines", "taken", "waited"),
    [
        (TO, 500, 500),
        ((ON_HOST, *BACK), 500, 500),
        ((f"%c = {HOST} copy(%x)",), 500, 500),  # without start and done
        ((TO[0], dot("y"), TO[1]), 1000, 0),
        ((TO[0], dot("y", cycles=300_000), TO[1]), 500, 200),
        # One queue for both ways, beside that of the chip's own memory, which takes 100 us.
        ((ON_HOST, TO[0], *BACK, TO[1]), 1000, 1000),
        ((TO[0], NEAR, TO[1], NEAR_DONE), 500, 500),
        # Of a stack, what is taken or replaced counts.
        ((ZERO, STACKED, INTO, *UPDATE), 500, 500),
        ((ZERO, STACKED, *TAKE), 500, 500),
        ((ZERO, STACKED, INTO, f"%u = {STACK} dynamic-update-slice(%p, %s, %z, %z, %z)"),
         500, 500),
    ],
)  # fmt: skip
def test_copies_to_the_host_are_a_queue_of_their_own(lines, taken, waited):
    report = overlap.report(program(*lines), chip=FAR)
    assert us(report, "total", "host") == (taken, waited)
    assert report.compute + report.memory + report.host == pytest.approx(report.total)
    head, figures = str(report).splitlines()[0], str(report).partition("total")[2]
    assert ("waits for the host" in head) == ("waits for the host" in figures) == bool(waited)
    assert json.loads(report.to_json())["host"] == report.host
    if waited:
        assert '"cat": "host"' in report.to_perfetto()


def test_an_update_of_a_stack_beside_the_core_counts_the_update():
    """1 MB is read and written; the stack has seven."""
    lines = [line.replace("S(5)", "") for line in (ZERO, STACKED, INTO, *UPDATE)]
    assert us(overlap.report(program(*lines), chip=CHIP), "total", "host") == (200, 0)


def test_a_copy_to_the_host_of_a_gpu_is_not_measured():
    report = overlap.report(untiled(program(*TO)), chip="h100")
    assert not report.timed
    assert any("nobody measured this: a copy between h100" in line for line in report.assumptions)
    assert overlap.CHIPS["v6e"].host == 2 * overlap.CHIPS["v5e"].host == 32e9
