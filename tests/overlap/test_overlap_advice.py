"""What to change first: which pairs are found, and what is predicted for them, as on paper.

(x is 1,000,000 bytes, a matmul 1000 us, a link 1 GB/s; four ranks in a ring.)
"""

from hlo_texts import CHIP, MATMUL, SHAPE, done, dot, loop, program, start

from ringcoll import overlap
from ringcoll.overlap.network import Network

PART = SHAPE.replace("500,500", "125,500")
GROUPS = "replica_groups={{0,1,2,3}}"
#: A quarter of x; all of it, by three quarters over two links: 375 us.
GATHER = (
    f"%part = {PART} slice(%x), slice={{[0:125], [0:500]}}",
    f"%g = {SHAPE} all-gather(%part), {GROUPS}, dimensions={{0}}",
)
#: The same, begun.
BEGUN = f"%s = ({PART}, {SHAPE}) all-gather-start(%part), {GROUPS}, dimensions={{0}}"
SCATTER = f"%r = {PART} reduce-scatter(%y), {GROUPS}, dimensions={{0}}, to_apply=%add"
FIRST = "to change first: "


def advice(*lines, text=None, **options):
    report = overlap.report(text or program(*lines, **options), chip=CHIP)
    assert " ".join(str(report).split()).endswith(report.advice)
    assert max(map(len, str(report).splitlines())) <= 100
    assert report.to_dict()["advice"] == report.advice
    return report.advice.removeprefix(FIRST)


def test_gather_then_multiply():
    # Four pieces of 250 us, each over a hop of 1 + 125 us.
    assert advice(*GATHER, dot("y", "g")) == (
        "gather, then multiply at g: 375 us exposed, 1375 us with the matmul; `all_gather_matmul` "
        "would take at best 1000 us (modelled)"
    )


def test_two_products_of_one_gather_are_taken_together():
    found = advice(*GATHER, dot("y", "g"), dot("z", "g"))
    assert "2375 us with the matmul; `all_gather_matmul` would take at best 2000 us" in found


def test_a_short_matmul_leaves_hops_bare():
    # Of 3,000,000 bytes, 300 us: a piece of 75, then three hops of 126.
    found = advice(*GATHER, dot("y", "g", cycles=250_000))
    assert (
        "675 us with the matmul; `all_gather_matmul` would take at best 453 us (modelled)" in found
    )


def test_multiply_then_scatter():
    # Each round also adds a quarter: 3 x 250,000 bytes to and from memory, 75 us.
    assert advice(dot("y"), SCATTER) == (
        "multiply, then scatter at r: 375 us exposed, 1375 us with the matmul; "
        "`matmul_reduce_scatter` would take at best 1300 us (modelled)"
    )


def test_multiply_then_reduce():
    # The same, and a gather of 375 us.
    assert advice(dot("y"), f"%r = {SHAPE} all-reduce(%y), {GROUPS}, to_apply=%add") == (
        "multiply, then reduce at r: 750 us exposed, 1750 us with the matmul; "
        "`matmul_all_reduce` would take at best 1675 us (modelled)"
    )


def test_an_all_reduce_for_a_scatter_is_one():
    line = ', metadata={op_name="f/reduce_scatter" source_file="a.py" source_line=9}'
    found = advice(dot("y"), f"%r = {SHAPE} all-reduce(%y), {GROUPS}, to_apply=%add{line}")
    assert found.startswith(
        "multiply, then scatter at a.py:9: 750 us exposed, 1750 us with the mat"
    )
    assert found.endswith("`matmul_reduce_scatter` would take at best 1300 us (modelled)")


def test_a_sum_over_the_gathered_dimension_is_no_faster():
    # Every round adds the whole result: 4 x 1,000,000 bytes, 400 us.
    columns = GATHER[1].replace("dimensions={0}", "dimensions={1}")
    assert advice(GATHER[0], columns, dot("y", "g")).endswith(
        "1375 us with the matmul; no form of ringcoll is quicker by its model (2600 us)"
    )
    right = f"%y = {SHAPE} convolution(%w, %g), dim_labels=bf_io->bf"  # 300 us
    assert "(1900 us)" in advice(*GATHER, right)  # 4 x (400 + 75)
    assert "would take" in advice(GATHER[0], columns, right)


def test_values_are_traced_through_copies_and_casts():
    inner = f"""%handed (a: f32[500,500]) -> f32[500,500] {{
  %a = {SHAPE} parameter(0)
  %c = {SHAPE} copy(%a)
  ROOT %b = {SHAPE} bitcast(%c)
}}

"""
    ended = f"%e = {SHAPE} all-gather-done(%s)"
    handed = f"%g = {SHAPE} fusion(%e), kind=kLoop, calls=%handed"
    found = advice(GATHER[0], BEGUN, ended, handed, dot("y", "g"), before=inner + MATMUL)
    assert found.startswith("gather, then multiply at s: 375 us exposed, ")
    back = f"%q = {SHAPE} fusion(%y), kind=kLoop, calls=%handed"
    found = advice(dot("y"), back, SCATTER.replace("%y", "%q"), before=inner + MATMUL)
    assert found.startswith("multiply, then scatter at r: 375 us exposed, ")


def test_values_are_traced_into_asynchronous_calls():
    """As in programs for tpu7x: the operands come by an update, in a tuple."""
    body = f"""%offloaded (a: f32[500,500]) -> f32[125,500] {{
  %a = {SHAPE} parameter(0)
  %t = ({SHAPE}, {SHAPE}) tuple(%a, %a)
  %o = ({SHAPE}, {SHAPE}) opt-barrier(%t)
  %v = {SHAPE} get-tuple-element(%o), index=1
  ROOT %rs = {PART} reduce-scatter(%v), {GROUPS}, dimensions={{0}}
}}, execution_thread="sparsecore"

"""
    begun = "%s = ((), (), s32[1]) call-start(), to_apply=%offloaded"
    update = f"%u = (({SHAPE}), {PART}) call-update(%s, %y)"
    ended = f"%d = {PART} call-done(%u)"
    found = advice(begun, dot("y"), update, ended, before=body + MATMUL)
    assert found.startswith("multiply, then scatter at s: 375 us exposed, 1375 us with the matmul")
    body = f"""%offloaded (a: f32[125,500]) -> f32[500,500] {{
  %a = {PART} parameter(0)
  ROOT %ag = {SHAPE} all-gather(%a), {GROUPS}, dimensions={{0}}
}}, execution_thread="sparsecore"

"""
    update, ended = (
        f"%u = (({PART}), {SHAPE}) call-update(%s, %part)",
        f"%d = {SHAPE} call-done(%u)",
    )
    found = advice(begun, GATHER[0], update, ended, dot("y", "d"), before=body + MATMUL)
    assert found.startswith("gather, then multiply at s: 375 us exposed, 1375 us with the matmul")


def test_a_scatter_that_is_rewritten_has_the_line_of_its_matmul():
    """As in programs for v6e: padded, then an all-reduce of which a slice is kept."""
    body = f"""%all-reduce-scatter (a: f32[500,500]) -> f32[125,500] {{
  %a = {SHAPE} parameter(0)
  %zero = f32[] constant(0)
  %p = {SHAPE} pad(%a, %zero), padding=0_0x0_0
  %ar = {SHAPE} all-reduce(%p), {GROUPS}, to_apply=%add
  %n = u32[] partition-id()
  ROOT %ds = {PART} dynamic-slice(%ar, %n, %n), dynamic_slice_sizes={{125,500}}
}}

"""
    product = dot("y") + ', metadata={op_name="f/dot_general" source_file="a.py" source_line=9}'
    summed = f"%f = {PART} fusion(%y), kind=kCustom, calls=%all-reduce-scatter"
    found = advice(product, summed, before=body + MATMUL)
    assert found.startswith(
        "multiply, then scatter at a.py:9: 375 us exposed, 1375 us with the matm"
    )


def test_all_turns_of_a_loop_count():
    turns = ', backend_config={"known_trip_count":{"n":"7"}}'
    found = advice(text=loop(turns, *GATHER, dot("next", "g")))
    assert "2625 us exposed, 9625 us with the matmul" in found
    assert "would take at best 7000 us" in found


def test_two_neighbours_share_a_link():
    # Half of x goes over one link, 500 us. Ours: two matmuls of 500 us, and a hop of 1 + 500.
    pair = [line.replace("{{0,1,2,3}}", "{{0,1}}").replace("125", "250") for line in GATHER]
    text = program(*pair, dot("y", "g"), ranks=2)
    network = Network(((0,), (1,)), (False,))
    report = overlap.report(overlap.Program(text, network=network), chip=CHIP)
    assert "500 us exposed, 1500 us with" in report.advice
    assert report.advice.endswith("would take at best 1001 us (modelled)")


def test_a_line_of_source_is_named():
    metadata = ', metadata={op_name="jit(f)/%s" source_file="/a/train.py" source_line=41}'
    gather = GATHER[1] + metadata % "all_gather"
    assert advice(GATHER[0], gather, dot("y", "g")).startswith(
        "gather, then multiply at train.py:41: "
    )
    assert advice(GATHER[0], gather) == "train.py:41 all_gather (all-gather): 375 us exposed"
    ours = GATHER[1] + metadata % "ringcoll.all_gather_einsum(lax)/all_gather"  # chosen by "auto"
    assert advice(GATHER[0], ours, dot("y", "g")) == (
        "train.py:41 all_gather_einsum (all-gather): 375 us exposed"
    )


def test_an_untraceable_operand_names_the_collective_alone():
    assert advice(start("s"), done("d", "s"), dot("y", "d"), *GATHER) == (
        "s (collective-permute): 1001 us exposed"
    )
    assert advice(*GATHER, f"%t = {SHAPE} transpose(%g), dimensions={{1,0}}", dot("y", "t")) == (
        "g (all-gather): 375 us exposed"
    )
    assert advice(f"%y = {SHAPE} add(%x, %w)", SCATTER) == "r (reduce-scatter): 375 us exposed"


def test_there_is_no_advice_if_nothing_is_exposed():
    assert advice(dot("y")) == ""
    assert advice(GATHER[0], BEGUN, dot("y"), f"%e = {SHAPE} all-gather-done(%s)") == ""


def test_without_times_a_form_is_named():
    text = program(*GATHER, dot("y", "g")).replace(":T(8,128)", "").replace(":T(128)", "")
    assert overlap.report(text).advice == (
        FIRST + "gather, then multiply at g: no matmul runs under it; try `all_gather_matmul`"
    )
    text = program(start("s"), done("d", "s")).replace(":T(8,128)", "").replace(":T(128)", "")
    assert overlap.report(text).advice == FIRST + "s (collective-permute): no matmul runs under it"
