"""Communication of an unknown kind is named. It is never silently free."""

import pytest
from hlo_texts import CHIP, MATMUL, SHAPE, blocking, computation, done, dot, loop, program, start

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
