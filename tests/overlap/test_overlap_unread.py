"""Communication of an unknown kind is named. It is never silently free."""

from functools import partial

import pytest
from hlo_texts import (
    CHIP,
    MATMUL,
    SHAPE,
    blocking,
    computation,
    done,
    dot,
    loop,
    program,
    start,
    untiled,
    us,
)

from ringcoll import overlap
from ringcoll.overlap.hlo import parse
from ringcoll.overlap.timeline import Timeline
from ringcoll.placement.network import Network


def kernel(config=""):
    """A kernel as JAX 0.12 writes it, with line breaks."""
    return f"""%k = {SHAPE} custom-call(%x), custom_call_target="tpu_custom_call", \
frontend_attributes={{kernel_metadata={{
"mesh_axes":"[\\"x\\"]"
}}}}, backend_config={{"custom_call_config":{{"body":"TUzv",{config}"layout":true}}}}"""


REMOTE = (
    *('"has_communication":true,', '"collective_id":"0",', '"collective_id": 0,'),
    *('"has_communication": true,', '\\"has_communication\\": true,'),
)
SUM = f"%ar = {SHAPE} all-reduce(%a), replica_groups={{}}"
SUMS = computation("sums", {"a": SHAPE}, SUM)
TWICE = computation("sums", {"a": SHAPE}, SUM.replace("%ar", "%a2"), SUM)
#: A kernel in a computation.
OWN = computation("own", {"x": SHAPE}, kernel(REMOTE[0]))
BRANCHES = f"%y = {SHAPE} conditional(%x, %x, %x), branch_computations={{%own, %sums}}"
FUSED = f"%o = {SHAPE} fusion(%x), kind=kCustom, calls="
BEGUN = f"%o = (({SHAPE}), {SHAPE}, u32[]) async-start(%x), calls=%own"
TURNS = loop("", start("s"), dot("y"), done("next", "s"))
#: The counter is the last of a carry that is joined elsewhere.
BARRED = (
    TURNS.replace("%carry =", "%joined =")
    .replace("index=0", "index=2")
    .replace("  %while", f"  %carry = (s32[], {SHAPE}, {SHAPE}) opt-barrier(%joined)\n  %while")
)
ASKED = "%g = s32[] all-reduce(%k)\n  %bound = s32[]"
#: A permute as XLA:GPU also writes it. Its halves have different channels, and ends have no pairs.
PAIRS = "_xla_send_recv_source_target_pairs={{0,1},{1,2},{2,3}}"
TOKEN = "%t = token[] after-all()"
ENDS = f"({SHAPE}, u32[], token[])"
RECV = f"%r = {ENDS} recv(%t), channel_id=2, frontend_attributes={{{PAIRS}}}"
SEND = f"%s = {ENDS} send(%x, %t), channel_id=1, frontend_attributes={{{PAIRS}}}"
RECEIVED = f"%rd = ({SHAPE}, token[]) recv-done(%r), channel_id=2"
SENT = "%sd = token[] send-done(%s), channel_id=1"
#: What starts all collectives of a computation, and its end.
GATHERED = "f32[2000,500]{1,0:T(8,128)}"
MEMBERS = (
    f"%ag = {GATHERED} all-gather(%a), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}",
    f"%ar = {SHAPE} all-reduce(%b), replica_groups={{{{0,1,2,3}}}}",
    f"%both = ({GATHERED}, {SHAPE}) tuple(%ag, %ar)",
)
PARTS = {"a": SHAPE, "b": SHAPE}
GROUP = computation("group", PARTS, *MEMBERS)
STARTED = f"%g = (({SHAPE}, {SHAPE}), ({GATHERED}, {SHAPE})) async-start(%x, %w), calls=%group"
ENDED = f"%e = ({GATHERED}, {SHAPE}) async-done(%g)"
#: The group has a computation of its own around them, which may run any number of times.
NESTED = computation("inner", PARTS, *MEMBERS) + computation(
    "group", PARTS, f"%c = ({GATHERED}, {SHAPE}) call(%a, %b), to_apply=%inner"
)
HOST = f"%o = ({SHAPE}, u32[], token[]) OPCODE(%x, %x), is_host_transfer=true"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (program(start("s"), dot("y"), done("d", "s"), blocking("all-gather")), ""),
        (program(kernel(), dot("y")), ""),
        *((program(kernel(config), dot("y")), "k") for config in REMOTE),
        # A kernel in the branch that is not the worst, in a fusion, or in what is started.
        (program(BRANCHES, before=MATMUL + OWN + SUMS), "k"),
        (program(f"{FUSED}%own", before=MATMUL + OWN), "o"),
        (program(BEGUN, f"%e = {SHAPE} async-done(%o)", before=MATMUL + OWN), "o"),
        # Instructions that wait for others.
        *((program(HOST.replace("OPCODE", opcode)), "o") for opcode in ("infeed", "outfeed")),
        *((program(HOST.replace("OPCODE", opcode), f"%e = token[] {opcode}-done(%o)"), "o")
          for opcode in ("send", "recv")),
        # A send and a recv with pairs are a permute; some collectives in one start are a group.
        (program(TOKEN, RECV, SEND, RECEIVED, SENT), ""),
        (program(STARTED, ENDED, before=MATMUL + GROUP), ""),
        (program(STARTED, ENDED, before=MATMUL + NESTED), "g"),
        (program(STARTED, ENDED, before=MATMUL + GROUP.replace("%both", kernel(REMOTE[0]).replace(
            "(%x)", "(%a)") + "\n  %both")), "g"),
        # Collectives that are not known, or run in an unknown way.
        (program(f"%o = {SHAPE} all-shuffle(%x), replica_groups={{}}"), "o"),
        (program(f"%o = {SHAPE} collective-swap-start(%x)"), "o"),
        (program(f"%o = {SHAPE} custom-call(%x), called_computations={{%sums}}",
                 before=MATMUL + SUMS), "o"),
        (program(f"{FUSED}%sums", before=MATMUL + SUMS), ""),
        (program(f"{FUSED}%sums", before=MATMUL + TWICE), "o"),
        # Transfers without an end or a start.
        (program(start("s"), dot("y")), "s"),
        (program(dot("y"), done("d", "y")), "d"),
        # Loops whose turns or conditions cannot be read.
        (TURNS, ""),
        (TURNS.replace("s32[] constant(7)", "s32[] custom-call()"), "while"),
        (TURNS.replace("%bound = s32[]", ASKED), ""),
        (BARRED, "while"),
    ],
)  # fmt: skip
def test_unread_instructions_are_named(text, names):
    """The name is in a note, too."""
    timeline = Timeline(parse(text), Network.ring(4), CHIP, {}).run()
    assert timeline.unread == {*names.split()}
    assert all(any(name in note for note in timeline.notes) for name in timeline.unread)


def test_an_instruction_of_several_lines_is_read_whole():
    text = program(kernel(REMOTE[1]))
    for stop in ("}", "} // main", '}, execution_thread="main"'):
        entry = parse(text.removesuffix("}\n") + stop + "\n").entry
        assert [i.opcode for i in entry.instructions] == ["parameter", "parameter", "custom-call"]
        assert entry.root.name == "k"
        assert entry.root.number("collective_id") == 0


COUNTS = overlap.collectives, overlap.waste, partial(overlap.assert_collectives, counts={})


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("text", "name"),
    [
        (program(kernel(REMOTE[0])), "k"),
        (program(TOKEN, SEND.replace(PAIRS, "")), "s"),
        (program(TOKEN, RECV.replace(PAIRS, "")), "r"),
        (TURNS.replace("s32[] constant(7)", "s32[] custom-call()"), "while"),
    ],
)
def test_what_counts_fails_where_something_is_unread(count, text, name):
    with pytest.raises(
        AssertionError, match=rf"{name} of jit_f could not be read.*{name}'"
    ) as failed:
        count(text)
    assert f"{name} " in str(failed.value).splitlines()[-1]
    with pytest.raises(TypeError, match="allow_unread: 3 is no name"):
        count(text, allow_unread=[3])
    if name != "while":
        assert not count(text, allow_unread=(f"{name}*", "s"))


@pytest.mark.parametrize(
    ("lines", "taken", "exposed"),
    [
        # 1001 us; a matmul may stand between, and what stands after either end waits for both.
        ((TOKEN, RECV, SEND, RECEIVED, SENT), 1001, 1001),
        ((TOKEN, SEND, RECV, SENT, RECEIVED), 1001, 1001),
        ((TOKEN, RECV, SEND, dot("y"), RECEIVED, SENT), 1001, 1),
        ((TOKEN, RECV, SEND, RECEIVED, dot("y"), SENT), 2001, 1001),
        # As XLA:GPU writes it where stages of a pipeline overlap.
        ((TOKEN, RECV, RECEIVED, SEND, dot("y"), SENT), 1001, 1),
    ],
)
def test_a_send_and_a_recv_with_pairs_are_a_permute(lines, taken, exposed):
    report = overlap.report(program(*lines), chip=CHIP)
    (row,) = report.rows
    assert (row.kind, row.count, row.bytes, row.hops) == ("collective-permute", 1, 1e6, 1)
    assert us(report, "total", "exposed") == (taken, exposed)
    overlap.assert_collectives(
        untiled(program(*lines)), {"collective-permute": 1}, {"collective-permute": 1e6}
    )


def test_a_group_counts_all_of_its_members():
    """3 MB over two links, then 1.5 MB; a matmul hides 1000 us of them."""
    text = program(STARTED, dot("y"), ENDED, before=MATMUL + GROUP)
    report = overlap.report(text, chip=CHIP)
    assert [(row.name, row.kind, row.count) for row in report.rows] == [
        ("ag", "all-gather", 1),
        ("ar", "all-reduce", 1),
    ]
    assert us(report, "total", "exposed") == (1500 + 750, 1250)
    overlap.assert_collectives(text, {"all-gather": 1, "all-reduce": 1})
