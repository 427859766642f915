"""MSCCL files: written, read back and proved; wrong ones are refused in words."""

import re
from collections import Counter

import pytest
from msccl_files import CHAIN, HUB, algo, block, gpu, step
from support import SIZES, runnable

from ringcoll import formats
from ringcoll.costs import price
from ringcoll.schedules.schedule import Move, Schedule, ScheduleError

pytestmark = pytest.mark.quick

COLLECTIVES = ("all_gather", "psum_scatter", "psum", "all_to_all")
SHAPES = [*((n,) for n in SIZES), (2, 3), (2, 2, 2)]


def sent(program):
    """For each rank, the shards that it sends (or parts of them)."""
    shares = Counter()
    for at, one in program.steps():
        shares[at.rank] += one.count * one.does.sends * program.size / program.chunks
    return shares


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_is_written_is_read_back_and_proved(collective, shape):
    for algorithm in runnable(collective, *shape):
        written = formats.program(collective, algorithm, shape)
        read = formats.from_msccl(formats.to_msccl(written))
        assert read == written
        assert formats.prove(read) == ("in place", "out of place")
        wanted = price(collective, algorithm, shape).sent
        assert all(share == pytest.approx(float(wanted)) for share in sent(read).values())


def test_all_reduces_have_one_program_and_others_that_msccl_lacks_are_refused():
    programs = [formats.program(name, "ring", (3,)) for name in ("pmean", "pmax", "psum")]
    assert programs[0].collective == "psum"
    assert programs[0].ranks == programs[1].ranks == programs[2].ranks
    for name in ("ragged_all_to_all", "pbroadcast"):
        with pytest.raises(ValueError, match=f"{name}: MSCCL has no such collective"):
            formats.program(name, "pairwise", (3,))


@pytest.mark.parametrize(("rank", "counts"), [(7, [1, 2, 4]), (0, [1, 1, 1, 1, 3])])
def test_shards_in_a_row_are_one_message(rank, counts):
    """Rank 7 sends shard 7, 6 and 7, then 4 to 7. Rank 0 sends 0, 7 and 0, then 5 to 7 and 0."""
    steps = formats.program("all_gather", "bruck", (8,)).steps()
    sends = [step.count for at, step in steps if at.rank == rank and step.does.sends]
    assert sorted(sends) == counts


def test_a_users_schedule_is_written_by_its_name():
    def mine(n):
        return Schedule((n,), tuple((Move(-1, (-t % n,)),) for t in range(n - 1)))

    program = formats.program("all_gather", mine, (4,))
    assert program.name == "all_gather_mine"
    assert formats.prove(program)


# -- programs that are not the same on every rank --


@pytest.mark.parametrize(("text", "place"), [(CHAIN, "in place"), (HUB, "out of place")])
def test_ranks_that_differ_are_checked_one_by_one(text, place):
    program = formats.from_msccl(text)
    assert formats.prove(program) == (place,)
    assert formats.from_msccl(formats.to_msccl(program)) == program


def test_a_place_is_proved_by_itself():
    both = CHAIN.replace('outofplace="0"', 'outofplace="1"').replace('o_chunks="0"', 'o_chunks="1"')
    with pytest.raises(ScheduleError, match=r"rank 0 does not get chunk 0: .* rank 0 \(out of"):
        formats.prove(formats.from_msccl(both))


def replaced(text, before, after, nth=0):
    """A text with the n-th of some parts replaced."""
    places = [found.start() for found in re.finditer(re.escape(before), text)]
    return text[: places[nth]] + after + text[places[nth] + len(before) :]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is not XML: no element found"),
        ("<xml/>", "<xml>: it is the outermost element; that of an MSCCL file is an <algo>"),
        (CHAIN.replace(' deps="-1"', "", 1), "it has no attribute 'deps'"),
        (CHAIN.replace('type="rrc"', 'type="rrx"'), "rank 0, thread block 0, step 0: no kind rrx"),
        (CHAIN.replace('coll="allreduce"', 'coll="scan"'), "coll is not one of allgather"),
        (CHAIN.replace('ngpus="3"', 'ngpus="4"'), "it has 3 <gpu>, not as many as ngpus"),
        (CHAIN.replace('gpu id="1"', 'gpu id="7"'), 'i_chunks="1" o_chunks="0" s_chunks="0">: id'),
        (CHAIN.replace('tb id="1"', 'tb id="x"', 1), "id is not a whole number from 0"),
        (CHAIN.replace('srcoff="0"', 'srcoff="1"', 1), "from i[1] on, but there are 1"),
        (CHAIN.replace('cnt="1"', 'cnt="999999999"', 1), "rrc of 999999999 chunks from i[0] on"),
        (CHAIN.replace('cnt="1"', 'cnt="0"', 1), "rrc of 0 chunks; name 1 or more"),
        (CHAIN.replace('recv="1"', 'recv="0"', 1), "rank 0 sends to itself; copy by cpy"),
        (CHAIN.replace('s_chunks="0"', 's_chunks="65537"', 1), "a buffer of 65537 chunks; at most"),
        (CHAIN.replace('deps="0"', 'deps="5"', 1), "thread block 0, step 5, which has no hasdep"),
        (CHAIN.replace("<step", "<stop", 1), "it is in <tb>, where only <step> can be"),
        (CHAIN.replace('inplace="1"', 'inplace="0"'), "for calls neither in place nor out of"),
        (CHAIN.replace('o_chunks="0"', 'o_chunks="2"').replace("allreduce", "allgather"),
         "all_gather: 2 chunks do not divide among 3 ranks"),
    ],
)  # fmt: skip
def test_a_broken_file_is_refused(text, words):
    with pytest.raises(ScheduleError) as refused:
        formats.from_msccl(text)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # Rank 1 forwards the arrived sum without its own chunk.
        (CHAIN.replace('"rrs"', '"rcs"'),
         "rank 0 does not get chunk 0: at the end, o[0] lacks chunk 0 of rank 1; "
         "rank 0, thread block 0, step 0 wrote it last (in place)"),
        # Rank 2 does not take the result.
        (CHAIN.replace('"r"', '"nop"'),
         "messages from rank 1 to rank 2 on channel 0: 1 sent, 0 received"),
        (CHAIN.replace('"s"', '"nop"', 1),
         "messages from rank 0 to rank 1 on channel 0: 0 sent, 1 received"),
        (CHAIN.replace('recv="1"', 'recv="3"', 1), "from rank 1 to rank 0 on channel 0: 1 sent, 0"),
        # Two thread blocks receive from rank 1.
        (CHAIN.replace('<tb id="1" send="1" recv="-1"', '<tb id="1" send="-1" recv="1"', 1)
         .replace('type="s"', 'type="r"', 1), "two thread blocks have its connection"),
        # Rank 0 may send before it has the sum, so rank 1 may get that before it has sent.
        (replaced(CHAIN, 'depid="0" deps="0"', 'depid="-1" deps="-1"'),
         "rank 1, thread block 0, step 0: it reads i[0], and thread block 1, step 0 writes it"),
        # Rank 2 waits for the sum before it sends its part.
        (replaced(replaced(CHAIN, 'depid="-1" deps="-1"', 'depid="1" deps="0"', 3),
                  'hasdep="0"', 'hasdep="1"', 4), ": it waits for ever, for rank "),
        (HUB.replace('cnt="3"', 'cnt="2"', 1),
         "rank 1, thread block 0, step 1: it receives 3 chunks, but rank 0, thread block 0"),
        (replaced(HUB, 'dstoff="2"', 'dstoff="1"'),
         "rank 0, thread block 1, step 1: it reads o[2], which holds nothing yet"),
        (replaced(HUB, 'dstbuf="o" dstoff="0"', 'dstbuf="s" dstoff="0"', 1)
         .replace('s_chunks="0"', 's_chunks="3"'),
         "rank 1 does not get chunk 0: at the end, o[0] lacks chunk 0 of rank 0 (out of place)"),
        (replaced(HUB, 'dstoff="1"', 'dstoff="2"').replace('dstoff="2" cnt="1" depid="0"',
                                                           'dstoff="1" cnt="1" depid="0"'),
         "rank 0 does not get chunk 1: at the end, o[1] lacks chunk 0 of rank 1"),
        # A contribution is added twice.
        (CHAIN.replace('"rcs"', '"rrcs"'), "step 0: it adds chunk 0 of rank 1 twice"),
        # Only in place is the input the output.
        (CHAIN.replace('inplace="1" outofplace="0"', 'inplace="0"'), "lacks chunk 0 of rank 0"),
    ],
)  # fmt: skip
def test_a_wrong_program_is_refused_with_rank_step_and_chunk(text, words):
    with pytest.raises(ScheduleError) as refused:
        formats.prove(formats.from_msccl(text))
    assert words in str(refused.value)


def test_a_sum_of_too_much_is_refused():
    """Every rank gets the sum of both, where each should get its own part."""

    def rank(number):
        other = 1 - number
        steps = (
            *(step(0, "cpy", count=2, target="o 0"), step(1, "s", count=2)),
            step(2, "rrc", "o 0", "o 0", count=2),
        )
        return gpu(number, (2, 2, 0), block(0, other, other, *steps))

    text = algo("alltoall", [rank(0), rank(1)], 'inplace="0"', chunks=2)
    with pytest.raises(ScheduleError, match=r"o\[0\] also holds chunk 0 of rank 1"):
        formats.prove(formats.from_msccl(text))


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

    assert formats.prove(program("0 1"))
    with pytest.raises(ScheduleError, match=r"thread block 1, step 1: it writes i\[0\], and"):
        formats.prove(program("-1 -1"))


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_a_ring_of_fused_steps_is_right_whatever_chunk_a_rank_completes(n, lanes):
    # Rank r sends chunk r first, as is usual: the sum of chunk r is complete at rank r - 1.
    def one(rank, lane):
        def at(t):
            return f"i {(rank - t) % n * lanes + lane}"

        kinds = ["s", *["rrs"] * (n - 2), "rrcs", *["rcs"] * (n - 2), "r"]
        steps = (step(t, kind, at(t), at(t)) for t, kind in enumerate(kinds))
        return block(lane, (rank + 1) % n, (rank - 1) % n, *steps, chan=lane)

    ranks = [gpu(r, (n * lanes, 0, 0), *(one(r, lane) for lane in range(lanes))) for r in range(n)]
    program = formats.from_msccl(algo("allreduce", ranks, chunks=n * lanes))
    assert formats.prove(program) == ("in place",)
    assert set(sent(program).values()) == {float(price("psum", "ring", (n,)).sent)}
