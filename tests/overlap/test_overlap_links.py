"""Which links a built-in collective occupies, and what runs beside it; see `hlo_texts`."""

from itertools import product

import pytest
from hlo_texts import CHIP, SHAPE, done, program, start, us

from ringcoll import overlap
from ringcoll.placement.network import Network

#: Ranks 0 to 7 on two rows of four, no axis a ring.
GRID = Network(tuple(product(range(2), range(4))), (False, False))
ROWS, COLUMNS = "{{0,1,2,3},{4,5,6,7}}", "{{0,4},{1,5},{2,6},{3,7}}"


def gather(name, groups):
    full = f"({SHAPE}, f32[2000,500]{{1,0:T(8,128)}})"
    begin = f"%{name} = {full} all-gather-start(%x), replica_groups={groups}, dimensions={{0}}"
    return begin, f"%{name}d = f32[2000,500] all-gather-done(%{name})"


def permute(pairs):
    return start("s", pairs=f"source_target_pairs={{{pairs}}}"), done("d", "s")


def totals(*lines):
    """Total and busiest link, in microseconds."""
    placed = overlap.Program(program(*lines, ranks=8), network=GRID)
    return us(overlap.report(placed, chip=CHIP), "total", "communication")


def both(one, other):
    """Two collectives that both start before the first is waited for."""
    return one[0], other[0], one[1], other[1]


def test_collectives_over_two_axes_run_beside_each_other():
    # The end of a row has one link to its row, for 3 MB, and one to its column, for 1 MB.
    rows, columns = gather("r", ROWS), gather("c", COLUMNS)
    assert totals(*rows) == (3000, 3000)
    assert totals(*columns) == (1000, 1000)
    assert totals(*both(rows, columns)) == (3000, 3000)


def test_groups_whose_members_are_far_apart_share_links():
    """On a ring of 8, each of 8 shards of 1 MB passes 4 of the 16 links: 2 MB a link."""
    ring = Network(tuple((r,) for r in range(8)), (True,))
    # Three of the shards alone are 1.5 MB a link; who is alone sends nothing.
    for groups, took in ((COLUMNS, 2000), (COLUMNS.replace("3,7", "3},{7"), 1500)):
        text = program(*gather("c", groups), ranks=8)
        report = overlap.report(overlap.Program(text, network=ring), chip=CHIP)
        assert us(report, "total") == (took,)


def test_the_devices_of_a_chip_share_its_links():
    """2 x 2 chips of two devices: what both groups send takes twice as long."""
    chips = Network(tuple(product(range(2), range(2), range(2))), (False,) * 3, cores=True)
    ring = "{0,2},{2,6},{6,4},{4,0}"
    for lines, took in (
        (gather("g", "{{0,2,4,6},{1},{3},{5},{7}}"), 1500),  # three shards of 1 MB, two links
        (gather("g", "{{0,2,4,6},{1,3,5,7}}"), 3000),
        (gather("g", "{{0,1},{2,3},{4,5},{6,7}}"), 1000),  # inside each chip
        (gather("g", "{{0,1,2,3,4,5,6,7}}"), 3000),  # each chip gets six shards
        (permute(f"{ring}"), 1001),
        (permute(f"{ring},{{1,3}},{{3,7}},{{7,5}},{{5,1}}"), 2001),
    ):
        placed = overlap.Program(program(*lines, ranks=8), network=chips)
        assert us(overlap.report(placed, chip=CHIP), "total") == (took,)


@pytest.mark.parametrize(
    ("places", "ring", "group", "links"),
    [
        (range(16), True, (15, 0), 1),
        (range(16), True, (14, 15, 0, 1), 3),
        (range(16), True, tuple(range(16)), 8),
        (range(16), True, (0, 4, 8, 12), 8),
        (range(4), False, (0, 1, 2, 3), 3),
        (range(16), True, (5,), 0),
    ],
)
def test_the_farthest_rank_of_a_group(places, ring, group, links):
    assert Network(tuple((p,) for p in places), (ring,)).reach(group) == links


@pytest.mark.parametrize(("chips", "took"), [(2, 2000), (4, 4000)])
def test_both_devices_of_chips_on_a_line_gather(chips, took):
    """Two shards of 1 MB of each chip go to each other chip: 2 * 3 of 4 chips, over six links."""
    places = tuple(product(range(chips), range(1), range(2)))
    network = Network(places, (False,) * 3, cores=True)
    ranks = ",".join(map(str, range(2 * chips)))
    text = program(*gather("g", f"{{{{{ranks}}}}}"), ranks=2 * chips)
    report = overlap.report(overlap.Program(text, network=network), chip=CHIP)
    assert us(report, "total") == (took,)


def test_collectives_over_the_same_links_wait_for_each_other():
    over_all = gather("a", "{{0,1,2,3,4,5,6,7}}")  # 7 MB over two links of a corner
    assert totals(*both(gather("r", ROWS), gather("q", ROWS))) == (6000, 6000)
    assert totals(*both(gather("r", ROWS), over_all)) == (6500, 6500)


def test_a_permute_along_one_axis_runs_beside_a_collective_along_the_other():
    down = "source_target_pairs={{0,4},{1,5},{2,6},{3,7}}"
    along = "source_target_pairs={{0,1},{4,5}}"
    columns = gather("c", COLUMNS)
    assert totals(*both(columns, (start("s", pairs=along), done("d", "s")))) == (1001, 1001)
    assert totals(*both(columns, (start("s", pairs=down), done("d", "s")))) == (2001, 2001)


@pytest.mark.parametrize(
    ("places", "wrap", "group"),
    [
        (GRID.places, GRID.wrap, (0, 1, 2, 3)),
        (GRID.places, GRID.wrap, (1, 3)),  # and the link of 2 between them
        (GRID.places, GRID.wrap, (0, 1, 4, 6)),
        (GRID.places, GRID.wrap, tuple(range(8))),
        (tuple((r,) for r in range(8)), (True,), (7, 0, 1)),
        (tuple(product(range(4), range(4), range(2))), (True, False, False), (0, 7, 13, 30)),
    ],
)
def test_the_links_of_a_group_are_those_of_paths_between_its_members(places, wrap, group):
    for cores in (False, True):
        _check_links(Network(places, wrap, cores), group)


def _check_links(network, group):
    walked = {link for a in group for b in group for link in network.path(a, b)}
    assert network.group_links(group) == walked
    assert network.reach(group) >= max(network.hops(a, b) for a in group for b in group)


@pytest.mark.parametrize("lines", [gather("r", "{{0,8}}"), (start("s"), done("d", "s"))])
def test_ranks_outside_the_network_raise(lines):
    network = GRID if "gather" in lines[0] else Network.ring(2)
    placed = overlap.Program(program(*lines, ranks=8), network=network)
    with pytest.raises(overlap.HloError, match=r"more than the [82] ranks.*pass mesh="):
        overlap.report(placed, chip=CHIP)
