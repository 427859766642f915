"""The tree of additions is read off a schedule, and proved to be one tree whatever n is."""

import pytest

from ringcoll import ScheduleError, algorithms, costs
from ringcoll.__main__ import main
from ringcoll.schedules.tree import balanced, balanced_algorithms


def leaves_of(tree, of_rank):
    """A tree of ranks with each rank's own tree of leaves in its place."""
    if isinstance(tree, tuple):
        return tuple(leaves_of(part, of_rank) for part in tree)
    return balanced(of_rank, tree * of_rank)


@pytest.mark.parametrize("shape", [(1,), (2,), (4,), (8,), (2, 2), (4, 2), (2, 2, 2)])
def test_ranks_with_leaves_make_one_tree(shape):
    schedule = algorithms.recursive_doubling(*shape)
    costs.check_balanced(schedule)
    for rank in range(schedule.size):
        own_tree = leaves_of(costs.tree(schedule, rank), 8 // schedule.size)
        assert own_tree == balanced(8)


def test_other_trees_are_told_apart():
    assert costs.tree(algorithms.ring(4)) == (0, (1, (2, 3)))
    assert costs.tree(algorithms.ring(3), 1) == ((0, 2), 1)  # in the order of their lowest ranks
    assert costs.tree(algorithms.recursive_doubling_all_reduce(4)) == ((0, 2), (1, 3))
    assert costs.tree(algorithms.one_shot(5)) == (((0, 1), (2, 3)), 4)
    for wrong in (algorithms.ring(4), algorithms.bruck(8), algorithms.direct(4)):
        with pytest.raises(ScheduleError, match=r"the sum of rank \d is"):
            costs.check_balanced(wrong)
    with pytest.raises(ScheduleError, match="not a power of two"):
        costs.check_balanced(algorithms.ring(3))


@pytest.mark.parametrize("ranks", [0, 3])
def test_only_powers_of_two_have_a_balanced_tree(ranks):
    with pytest.raises(ValueError, match=f"balanced: {ranks} ranks are not a power of two"):
        balanced(ranks)


@pytest.mark.parametrize("of", [(4,), (-1,), (0, 1)])
def test_a_tree_is_of_a_rank_and_a_lane(of):
    for made in (algorithms.ring(4), algorithms.recursive_doubling_all_reduce(4)):
        with pytest.raises(ValueError, match=f"^tree: rank {of[0]}, lane .* of 4 ranks and 1 lane"):
            costs.tree(made, *of)


def test_names_are_read_off_schedules():
    assert balanced_algorithms("psum_scatter", (8,)) == ("recursive_doubling",)
    assert balanced_algorithms("psum", (8,)) == ("halving_doubling", "one_shot")
    assert "ring" in balanced_algorithms("psum", (2,))
    assert balanced_algorithms("psum", (3,)) == ()


def test_additions_are_printed(capsys):
    assert (
        main(["draw", "psum", "--algorithm", "halving_doubling", "-n", "4", "--order", "tree"]) == 0
    )
    assert capsys.readouterr().out.splitlines()[3] == "rank 3: ((0, 1), (2, 3))"
    assert main(["explain", "halving_doubling"]) == 0
    assert "is ((0, 1), (2, 3)): balanced, so order=Tree(...) takes it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            ["psum", "--algorithm", "ring"],
            "not ((0, 1), (2, 3)); choose from halving_doubling, one_",
        ),
        (["all_gather", "--algorithm", "ring"], "all_gather adds nothing; draw a psum"),
        (["psum", "--algorithm", "one_shot", "--svg", "tree.svg"], "is printed; leave out --svg"),
    ],
)
def test_what_has_no_balanced_tree_is_not_drawn(asked, words, capsys):
    with pytest.raises(SystemExit):
        main(["draw", *asked, "-n", "4", "--order", "tree"])
    assert words in " ".join(capsys.readouterr().err.split())
