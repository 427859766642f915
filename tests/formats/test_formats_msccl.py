"""MSCCL files: written, proved, read back as the same schedule; wrong ones are refused in words."""

import re

import pytest
from msccl_files import CHAIN, HUB, algo, block, gpu, step
from support import SIZES, runnable

from ringcoll import formats
from ringcoll.draw import as_text, frames, plan
from ringcoll.formats.counting import in_rounds
from ringcoll.formats.recovery import plans_of
from ringcoll.pricing import price
from ringcoll.schedules.schedule import Move, Schedule, ScheduleError

pytestmark = pytest.mark.quick

COLLECTIVES = ("all_gather", "psum_scatter", "psum", "all_to_all")
SHAPES = [*((n,) for n in SIZES), (4, 2), (2, 3), (2, 2, 2)]


def messages(program):
    """For each round: who sends what to whom, and whose data is in it."""
    return [
        sorted(
            (
                m.sender,
                m.receiver,
                m.lane,
                sorted((p.column, *sorted(p.contributors)) for p in m.pieces),
            )
            for m in frame.messages
        )
        for frame in frames(program)
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_is_written_is_read_back_proved_and_the_same_schedule(collective, shape):
    for algorithm in runnable(collective, *shape):
        wanted = plan(collective, algorithm, shape)
        written = formats.program(collective, algorithm, shape)
        read = formats.from_msccl(formats.to_msccl(written))
        proof = formats.prove(read)
        assert proof.places == ("in place", "out of place")
        assert not proof.overwrites_input
        (found,) = plans_of(proof)
        assert messages(found) == messages(wanted), algorithm
        assert proof.rounds == wanted.paid.rounds
        paid = price(collective, algorithm, shape)
        counted = formats.price_of(proof)
        assert (counted.sent, counted.link, counted.additions) == (
            paid.sent,
            paid.link,
            paid.additions,
        )
        lanes = {phase.schedule.lanes for phase in wanted.phases}
        if lanes == {1}:
            assert counted.messages == paid.messages


@pytest.mark.parametrize("name", ["pmean", "all_reduce", "pmax"])
def test_other_names_of_an_all_reduce_have_its_program(name):
    ours = formats.program(name, "ring", (3,))
    assert (ours.collective, ours.ranks) == ("psum", formats.program("psum", "ring", (3,)).ranks)


@pytest.mark.parametrize("collective", ["ragged_all_to_all", "pbroadcast"])
def test_what_other_tools_have_not_is_refused(collective):
    with pytest.raises(ValueError, match=f"{collective}: other tools have no such collective"):
        formats.program(collective, "pairwise", (3,))


def test_one_message_is_enough_for_a_connection_to_hold():
    for collective, algorithm in [
        ("psum", "direct"),
        ("all_to_all", "bruck"),
        ("psum", "one_shot"),
    ]:
        assert formats.prove(formats.program(collective, algorithm, (8,))).buffered == 1


# -- programs that are not the same on every rank --


def test_a_chain_is_checked_rank_by_rank():
    proof = formats.prove(formats.from_msccl(CHAIN))
    assert (proof.places, proof.rounds, len(proof.messages)) == (("in place",), 4, 4)
    assert formats.schedule_of(proof) is None
    paid = formats.price_of(proof)
    assert (paid.messages, paid.sent, paid.additions) == (4, 12, 6)  # in thirds of the vector
    assert list(in_rounds(proof))[:4] == [
        "round 1 of 4: 1 message",
        "  rank 2 to 1: chunk 0 of rank 2",
        "round 2 of 4: 1 message",
        "  rank 1 to 0: chunk 0 of ranks 1, 2",
    ]
    drawn = formats.svg_of(proof)
    assert drawn.count("round 4 of 4") == 1
    assert drawn.count("<polygon") == 4  # an arrow for each message


def test_a_hub_is_proved_drawn_and_written_again():
    program = formats.from_msccl(HUB)
    proof = formats.prove(program)
    assert (proof.places, proof.rounds) == (("out of place",), 2)
    assert formats.schedule_of(proof) is None
    assert formats.svg_of(proof).count("<polygon") == 4
    again = formats.from_msccl(formats.to_msccl(program))
    assert formats.prove(again).messages == proof.messages


def test_a_place_is_proved_by_itself():
    both = CHAIN.replace('outofplace="0"', 'outofplace="1"').replace('o_chunks="0"', 'o_chunks="1"')
    program = formats.from_msccl(both)
    assert formats.prove(program, "in place").places == ("in place",)
    with pytest.raises(ScheduleError, match=r"rank 0 does not get chunk 0: .* nothing \(out of"):
        formats.prove(program)


def line_of(text, part, nth=0):
    """The number of the line in which a part stands, and the text without it."""
    lines = [i for i, line in enumerate(text.splitlines(), 1) if part in line]
    return lines[nth]


def replaced(text, before, after, nth=0):
    """A text with the n-th of some parts replaced."""
    places = [found.start() for found in re.finditer(re.escape(before), text)]
    return text[: places[nth]] + after + text[places[nth] + len(before) :]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "is not XML: no element found"),
        (CHAIN[:-8], 26, "is not XML: no element found"),
        (CHAIN.replace("<gpu", "<gpv", 1), 9, "is not XML: mismatched tag"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><algo/>", 1, "has a document type"),
        ("<xml/>", 1, "<xml> is the outermost element; that of an MSCCL file is an <algo>"),
        (CHAIN.replace(' deps="-1"', "", 1), 4, "<step> has no attribute 'deps'"),
        (CHAIN.replace('type="rrc"', 'type="rrx"'), 4, 'type="rrx" is not one of s, r, rcs'),
        (CHAIN.replace('coll="allreduce"', 'coll="scan"'), 1, 'coll="scan" is not one of'),
        (CHAIN.replace('proto="LL"', 'proto="LL9"'), 1, 'proto="LL9" is not one of Simple'),
        (CHAIN.replace('ngpus="3"', 'ngpus="4"'), 1, 'ngpus="4", but it has 3 <gpu>'),
        (CHAIN.replace('gpu id="1"', 'gpu id="7"'), 18, 'id="2", but there is no id="1"'),
        (CHAIN.replace('gpu id="1"', 'gpu id="0"'), 10, '<gpu> id="0" is there twice'),
        (CHAIN.replace('tb id="1"', 'tb id="x"', 1), 6, 'id="x" is not a whole number from 0'),
        (CHAIN.replace('recv="1"', 'recv="3"', 1), 3, "receives from rank 3, but ranks are 0 to 2"),
        (CHAIN.replace('recv="1"', 'recv="0"', 1), 3, "receives from rank 0, itself"),
        (CHAIN.replace('srcoff="0"', 'srcoff="1"', 1), 4, "i[1], but rank 0 has 1 chunks of input"),
        (CHAIN.replace('srcbuf="i"', 'srcbuf="x"', 1), 4, "there is no buffer 'x'"),
        (CHAIN.replace('cnt="1"', 'cnt="0"', 1), 4, "rrc of 0 chunks"),
        (CHAIN.replace('cnt="1"', 'cnt="999999999"', 1), 4, "i[999999998], but rank 0 has 1"),
        (CHAIN.replace('s_chunks="0"', 's_chunks="65537"', 1), 2, "rank 0 has a buffer of 65537"),
        (CHAIN.replace('deps="0"', 'deps="5"', 1), 7, "waits for thread block 0, step 5, which is"),
        (CHAIN.replace('depid="0"', 'depid="5"', 1), 7, "waits for thread block 5, which is not"),
        (CHAIN.replace('deps="0"', 'deps="-1"', 1), 7, 'depid="0" and deps="-1": one is -1'),
        (CHAIN.replace('hasdep="1"', 'hasdep="0"'), 7, 'step 0, which has hasdep="0"'),
        (CHAIN.replace('send="1"', 'send="-1"', 1), 7, "s sends, but its thread block sends to no"),
        (CHAIN.replace("<step", "<stop", 1), 4, "<stop> is in <tb>, where only <step> can be"),
        (
            CHAIN.replace('o_chunks="0"', 'o_chunks="2"').replace("allreduce", "allgather"),
            None,
            "all_gather: 2 chunks do not divide among 3 ranks",
        ),
    ],
)  # fmt: skip
def test_a_broken_file_is_refused_with_its_line(text, line, words):
    where = "mine.xml, " + (f"line {line}: " if line else "")
    with pytest.raises(ScheduleError) as refused:
        formats.from_msccl(text, "mine.xml")
    message = str(refused.value)
    assert message.startswith(where.removesuffix(", ")), message
    assert words in message


def test_two_thread_blocks_of_one_connection_are_refused():
    text = CHAIN.replace('<tb id="1" send="1" recv="-1"', '<tb id="1" send="1" recv="1"', 1)
    with pytest.raises(ScheduleError, match="from rank 1 on channel 0, as thread block 0 does"):
        formats.from_msccl(text)


@pytest.mark.parametrize(
    ("text", "part", "nth", "words"),
    [
        # Rank 1 forwards the arrived sum without its own chunk.
        (CHAIN.replace('"rrs"', '"rcs"'), 'type="rrc"', 0,
         "rank 0 does not get chunk 0: at the end o[0] holds chunk 0 of ranks 0, 2, "
         "without chunk 0 of rank 1; thread block 0, step 0 wrote it last (in place)"),
        # Rank 2 does not take the result.
        (CHAIN.replace('"r"', '"nop"'), 'type="rcs"', 0,
         "rank 1, thread block 1, step 0: rank 2, to which it sends, receives 0 of 1 messages"),
        (CHAIN.replace('"s"', '"nop"', 1), 'type="rcs"', 0,
         "rank 1, thread block 1, step 0: rank 0, from which it receives, sends 0 of 1 messages"),
        # Rank 0 may send before it has the sum, so rank 1 may get that before it has sent.
        (replaced(CHAIN, 'depid="0" deps="0"', 'depid="-1" deps="-1"'), 'type="rrs"', 0,
         "rank 1, thread block 0, step 0: it reads i[0], and thread block 1, step 0 writes it"),
        # Rank 2 waits for the sum before it sends its part.
        (replaced(replaced(CHAIN, 'depid="-1" deps="-1"', 'depid="1" deps="0"', 3),
                  'hasdep="0"', 'hasdep="1"', 4), 'type="rrc"', 0,
         "rank 0, thread block 0, step 0: it waits for ever: for rank 1, thread block 0, step 0"),
        (HUB.replace('cnt="3"', 'cnt="2"', 1), 'type="r"', 2,
         "rank 1, thread block 0, step 1: it receives 3 chunks, but rank 0, thread block 0"),
        (replaced(HUB, 'dstoff="2"', 'dstoff="1"'), 'type="s"', 1,
         "rank 0, thread block 1, step 1: it reads o[2], which holds nothing yet"),
        (replaced(HUB, 'dstbuf="o" dstoff="0"', 'dstbuf="s" dstoff="0"', 1)
         .replace('s_chunks="0"', 's_chunks="3"'), 'gpu id="1"', 0,
         "rank 1 does not get chunk 0: at the end o[0] holds nothing (out of place)"),
        (replaced(HUB, 'dstoff="1"', 'dstoff="2"').replace('dstoff="2" cnt="1" depid="0"',
                                                           'dstoff="1" cnt="1" depid="0"'),
         'type="r"', 1, "rank 0 does not get chunk 1: at the end o[1] holds chunk 0 of rank 2"),
    ],
)  # fmt: skip
def test_a_wrong_program_is_refused_with_rank_step_and_chunk(text, part, nth, words):
    with pytest.raises(ScheduleError) as refused:
        formats.prove(formats.from_msccl(text, "mine.xml"))
    message = str(refused.value)
    assert words in message
    assert message.startswith(f"mine.xml, line {line_of(text, part, nth)}: "), message


def test_a_contribution_is_added_once():
    twice = CHAIN.replace('"rcs"', '"rrcs"')
    with pytest.raises(ScheduleError, match=r"rank 1, .* step 0: it adds chunk 0 of rank 1 twice"):
        formats.prove(formats.from_msccl(twice))


def test_connections_that_hold_more_messages_are_asked_for():
    # Each rank sends two messages before it takes any.
    def rank(number):
        other = 1 - number
        return gpu(number, (2, 2, 2), block(
            0, other, other,
            step(0, "s", "i 0"), step(1, "s", "i 1"), step(2, "r", target="s 0"),
            step(3, "r", target="s 1"), step(4, "cpy", target="o 0", count=2),
            step(5, "re", "s 0", "o 0", count=2),
        ))  # fmt: skip

    proof = formats.prove(formats.from_msccl(algo("all_reduce", [rank(0), rank(1)], 'inplace="0"')))
    assert (proof.buffered, proof.rounds) == (2, 1)
    (stage,) = formats.schedule_of(proof)
    assert stage.rounds == ((Move(1, (0,), 0, 0), Move(1, (0,), 0, 1)),)


def test_an_input_that_is_overwritten_is_told():
    program = formats.from_msccl(CHAIN.replace('inplace="1" outofplace="0"', 'inplace="0"'))
    with pytest.raises(ScheduleError, match="holds nothing"):
        formats.prove(program)
    copied = CHAIN.replace('inplace="1" outofplace="0"', 'inplace="0"')
    for rank in range(3):
        one, after = f'<gpu id="{rank}" i_chunks="1" o_chunks="0"', {0: "0 0", 1: "1 0", 2: "1 0"}
        at = copied.index("</gpu>", copied.index(one))
        copied = (
            copied[:at]
            + block(2, -1, -1, step(0, "cpy", target="o 0", after=after[rank]))
            + copied[at:]
        )
    copied = copied.replace('o_chunks="0"', 'o_chunks="1"').replace('hasdep="0"', 'hasdep="1"')
    assert formats.prove(formats.from_msccl(copied)).overwrites_input


def test_what_is_the_same_but_no_schedule_stays_a_program():
    # On two ranks, all messages are sent again, to scratch.
    def rank(number):
        other = 1 - number
        return gpu(number, (1, 2, 1), block(
            0, other, other,
            step(0, "cpy", target=f"o {number}"), step(1, "s"), step(2, "r", target=f"o {other}"),
            step(3, "s"), step(4, "r", target="s 0"),
        ))  # fmt: skip

    proof = formats.prove(formats.from_msccl(algo("allgather", [rank(0), rank(1)], 'inplace="0"')))
    assert formats.schedule_of(proof) is None
    assert proof.rounds == 2


def test_a_schedule_of_ones_own_is_written_by_its_name():
    def mine(n):
        return Schedule((n,), tuple((Move(-1, (-t % n,)),) for t in range(n - 1)))

    program = formats.program("all_gather", mine, (4,))
    assert program.name == "all_gather_mine"
    found = formats.schedule_of(formats.prove(program))
    assert found == mine(4)
    assert "round 3 of 3" in as_text(plan("all_gather", found, (4,)))


def test_a_picture_has_as_many_chunks_for_every_shard():
    ranks = formats.from_msccl(CHAIN).ranks
    assert formats.svg_of(formats.prove(formats.from_msccl(CHAIN))).startswith("<svg")
    text = CHAIN.replace('i_chunks="1"', 'i_chunks="2"').replace('cnt="1"', 'cnt="2"')
    assert len(ranks) == 3
    with pytest.raises(ValueError, match="2 chunks on 3 ranks: a picture has a column for each"):
        formats.svg_of(formats.prove(formats.from_msccl(text)))


def test_a_write_may_not_overtake_a_read():
    # Thread block 1 clears what thread block 0 copies to the output, before or after.
    def rank(number, after):
        other = 1 - number
        return gpu(number, (1, 2, 0),
            block(0, other, -1, step(0, "cpy", target=f"o {number}"), step(1, "s", tells=1)),
            block(1, -1, other, step(0, "r", target=f"o {other}"),
                  step(1, "cpy", f"o {other}", "i 0", after=after)))  # fmt: skip

    def program(after):
        ranks = [rank(0, after), rank(1, after)]
        return formats.from_msccl(algo("allgather", ranks, 'inplace="0"'))

    assert formats.prove(program("0 1")).overwrites_input
    with pytest.raises(ScheduleError, match=r"thread block 1, step 1: it writes i\[0\], and"):
        formats.prove(program("-1 -1"))


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_a_ring_of_fused_steps_is_the_ring_whatever_chunk_a_rank_completes(n, lanes):
    # Rank r sends chunk r first, as is usual: the sum of chunk r is complete at rank r - 1.
    def one(rank, lane):
        def at(t):
            return f"i {(rank - t) % n * lanes + lane}"

        kinds = ["s", *["rrs"] * (n - 2), "rrcs", *["rcs"] * (n - 2), "r"]
        steps = (step(t, kind, at(t), at(t)) for t, kind in enumerate(kinds))
        return block(lane, (rank + 1) % n, (rank - 1) % n, *steps, chan=lane)

    ranks = [gpu(r, (n * lanes, 0, 0), *(one(r, lane) for lane in range(lanes))) for r in range(n)]
    proof = formats.prove(formats.from_msccl(algo("allreduce", ranks, chunks=n * lanes)))
    parts = formats.schedules_of(proof)
    assert len(parts) == (1 if n == 2 else 2)  # both halves send ahead, which is one way of two
    gather = parts[-1].schedule
    assert [{(m.shift % n, m.offsets) for m in moves} for moves in gather.rounds] == [
        {(1, (t,))} for t in range(n - 1)
    ]
    if n > 2:
        scatter = parts[0].schedule
        assert [part.collective for part in parts] == ["psum_scatter", "all_gather"]
        assert all(m.shift % n == n - 1 for moves in scatter.rounds for m in moves)
        assert formats.schedule_of(proof) is None
    assert (gather.lanes, proof.rounds, proof.buffered) == (lanes, 2 * (n - 1), 2)
    assert formats.price_of(proof).sent == price("psum", "ring", (n,)).sent
