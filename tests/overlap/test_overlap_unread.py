"""Communication of an unknown kind is named. It is never silently free."""

import pytest
from hlo_texts import CHIP, MATMUL, SHAPE, blocking, done, dot, loop, program, start

from ringcoll.overlap.hlo import parse
from ringcoll.overlap.network import Network
from ringcoll.overlap.timeline import Timeline


def unread(text):
    """The names that could not be read, each of which is in a note."""
    timeline = Timeline(parse(text), Network.ring(4), CHIP, {}).run()
    assert all(any(name in note for note in timeline.notes) for name in timeline.unread)
    return timeline.unread


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
SUMS = f"""%sums (a: f32[500,500]) -> f32[500,500] {{
  %a = {SHAPE} parameter(0)
  ROOT %ar = {SHAPE} all-reduce(%a), replica_groups={{}}
}}

"""


def test_known_instructions_are_read():
    assert unread(program(start("s"), dot("y"), done("d", "s"), blocking("all-gather"))) == set()
    assert unread(program(kernel(), dot("y"))) == set()


@pytest.mark.parametrize("config", REMOTE)
def test_a_kernel_that_communicates_by_itself(config):
    assert unread(program(kernel(config), dot("y"))) == {"k"}


def test_a_kernel_in_the_branch_that_is_not_the_worst():
    quick = f"%quick (a: f32[500,500]) -> f32[500,500] {{\n  %x = {SHAPE} parameter(0)\n"
    branches = f"{quick}  ROOT {kernel(REMOTE[0])}\n}}\n\n" + SUMS
    line = f"%y = {SHAPE} conditional(%x, %x, %x), branch_computations={{%quick, %sums}}"
    assert unread(program(line, before=MATMUL + branches)) == {"k"}


def test_a_kernel_in_a_fusion_or_in_a_computation_that_is_started():
    body = f"%own (x: f32[500,500]) -> f32[500,500] {{\n  %x = {SHAPE} parameter(0)\n"
    body += f"  ROOT {kernel(REMOTE[0])}\n}}\n\n"
    fused = f"%f = {SHAPE} fusion(%x), kind=kCustom, calls=%own"
    begun = f"%b = (({SHAPE}), {SHAPE}, u32[]) async-start(%x), calls=%own"
    ended = f"%e = {SHAPE} async-done(%b)"
    assert unread(program(fused, before=MATMUL + body)) == {"f"}
    assert unread(program(begun, ended, before=MATMUL + body)) == {"b"}


@pytest.mark.parametrize("opcode", ["send", "recv", "infeed", "outfeed"])
def test_instructions_that_wait_for_others_are_unread(opcode):
    lines = [f"%o = ({SHAPE}, u32[], token[]) {opcode}(%x, %x), is_host_transfer=true"]
    if opcode in ("send", "recv"):
        lines.append(f"%e = token[] {opcode}-done(%o)")
    assert unread(program(*lines)) == {"o"}


def test_collectives_that_are_not_known_or_run_in_an_unknown_way():
    assert unread(program(f"%o = {SHAPE} all-shuffle(%x), replica_groups={{}}")) == {"o"}
    assert unread(program(f"%o = {SHAPE} collective-swap-start(%x)")) == {"o"}
    called = f"%o = {SHAPE} custom-call(%x), called_computations={{%sums}}"
    assert unread(program(called, before=MATMUL + SUMS)) == {"o"}
    twice = SUMS.replace("ROOT", f"%a2 = {SHAPE} all-reduce(%a), replica_groups={{}}\n  ROOT")
    fused = f"%o = {SHAPE} fusion(%x), kind=kCustom, calls=%sums"
    assert unread(program(fused, before=MATMUL + SUMS)) == set()
    assert unread(program(fused, before=MATMUL + twice)) == {"o"}


def test_transfers_without_an_end_or_a_start_are_unread():
    assert unread(program(start("s"), dot("y"))) == {"s"}
    assert unread(program(dot("y"), done("d", "y"))) == {"d"}


def test_loops_whose_turns_or_conditions_cannot_be_read():
    lines = start("s"), dot("y"), done("next", "s")
    assert unread(loop("", *lines)) == set()
    assert unread(loop("", *lines).replace("s32[] constant(7)", "s32[] custom-call()")) == {"while"}
    asked = loop("", *lines).replace(
        "%bound = s32[]", "%b = s32[] constant(7)\n  %bound = s32[] all-reduce(%b)\n  %g = s32[]"
    )
    assert unread(asked) == {"while"}


def test_an_instruction_of_several_lines_is_read_whole():
    text = program(kernel(REMOTE[1]))
    for stop in ("}", "} // main", '}, execution_thread="main"'):
        entry = parse(text.removesuffix("}\n") + stop + "\n").entry
        assert [i.opcode for i in entry.instructions] == ["parameter", "parameter", "custom-call"]
        assert entry.root.name == "k"
        assert entry.root.number("collective_id") == 0
