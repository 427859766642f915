"""Bad calls are refused before anything is sent, with lax's type and words, and a cure."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import MAIN
from support import data, make_mesh, per_rank

import ringcoll
from ringcoll import algorithms, lax
from ringcoll.collectives import all_gather
from ringcoll.collectives.sums import Tree

N = 3
MESH = make_mesh(N)


def attempt(function, check_vma=False):
    """Run on three ranks, and return the exception."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        per_rank(MESH, function, data((N, N, 2)), check_vma=check_vma)
    return caught.value


def keys(x):
    return jax.random.wrap_key_data(x.astype(jnp.uint32))


# Calls that both refuse, by either module. A name begins with that of the function.
REFUSED_BY_LAX = {
    "all_gather axis": lambda L, x: L.all_gather(x, "x", axis=3),  # of 3
    "all_gather to": lambda L, x: L.all_gather(x, "x", to="replicated"),
    "psum_scatter stacked": lambda L, x: L.psum_scatter(x, "x", scatter_dimension=1),
    "psum_scatter tiled": lambda L, x: L.psum_scatter(x, "x", scatter_dimension=1, tiled=True),
    "all_to_all stacked": lambda L, x: L.all_to_all(x, "x", 1, 0),
    "all_to_all tiled": lambda L, x: L.all_to_all(x, "x", 1, 0, tiled=True),
    "pswapaxes": lambda L, x: L.pswapaxes(x, "x", 1),
    "pmean of random keys": lambda L, x: L.pmean(keys(x), "x"),
    **{
        f"{name} unbound": lambda L, x, name=name: getattr(L, name)(x, "typo")
        for name in ("psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter")
    },
    **{
        f"psum groups {groups}": lambda L, x, g=groups: L.psum(x, "x", axis_index_groups=g)
        for groups in ([[0, 1], [1, 2]], [[0, 1], [2, 0], [1, 2]], [[0, 2]])
    },
    **{
        f"pmax groups {groups}": lambda L, x, g=groups: L.pmax(x, "x", axis_index_groups=g)
        for groups in ("abc", [[0, 1], [2, None]], [[0, 1, -1]], 5, [0, 1, 2], [[0.0, 1.0, 2.0]])
    },
    **{
        f"ppermute {perm}": lambda L, x, perm=perm: L.ppermute(x, "x", perm)
        for perm in (
            *([(0, 1), (0, 2)], [(0, N)], [(9, 0)], [(0, -N - 1)], None, 5, [0, 1], [(0.0, 1.0)]),
            *([((0, 1), (1, 2))], [(0, 1, 2)], [(0, None)]),
        )
    },
    **{
        f"pshuffle {perm}": lambda L, x, perm=perm: L.pshuffle(x, "x", perm)
        for perm in ([0, 0, 1], None, 5, [0.0, 1.0, 2.0], [[0], [1], [2]])
    },
    **{
        f"{case.name} over a set": lambda L, x, case=case: case.ours(
            L, jnp.ones(case.shape(N)), {"x"}, N
        )
        for case in MAIN
    },
}

#: Calls in which lax raises Python's own errors; their type is enough.
WITHOUT_WORDS = [
    name
    for name in REFUSED_BY_LAX
    if name.startswith(("ppermute ", "pshuffle ", "pmax groups")) or name.endswith("over a set")
]


@pytest.mark.parametrize("case", REFUSED_BY_LAX)
def test_our_refusal_has_the_type_and_the_words_of_lax(case):
    call = REFUSED_BY_LAX[case]
    theirs = attempt(lambda x: call(jax.lax, x))
    ours = attempt(lambda x: call(lax, x))
    assert type(ours) is type(theirs)
    own_words = str(theirs).removeprefix("Found an ").partition(". To fix")[0]
    assert own_words in str(ours) or case in WITHOUT_WORDS
    assert str(ours).startswith(f"ringcoll.{case.split()[0]}(")


# Calls that only we refuse: lax fails later, or without words, or not at all. The words name the
# argument, the value and the cure.
REFUSED_BY_US = [
    # By an axis twice, lax 0.12 ends the process.
    (ValueError, lambda x: lax.psum(x, ("x", "x")), "('x', 'x').*repeated.*name each axis once"),
    (ValueError, lambda x: lax.psum(x, "x", algorithm="rign"), "no .*'rign'; .*from auto, ring, "),
    (
        ValueError,
        lambda x: lax.psum(x, "x", algorithm="halving_doubling"),
        "got 3 ranks.* use algorithm='bruck'",
    ),
    (
        ValueError,
        lambda x: lax.psum(x, "x", algorithm=algorithms.ring(4)),
        "a schedule of 4 ranks.*(3,)",
    ),
    (
        ValueError,
        lambda x: lax.psum(x, "x", accumulate_dtype=jnp.bfloat16),
        "=bfloat16 cannot hold every float32.*pass a dtype",
    ),
    (
        ValueError,
        lambda x: lax.psum(x.astype(jnp.bfloat16), "x", accumulate_dtype=jnp.float16),
        "=float16 cannot hold every bfloat16",
    ),
    (ValueError, lambda x: lax.pbroadcast(x, "x", N), "source=3.* not a rank"),
    (
        ValueError,
        lambda x: lax.psum(x, "x", axis_index_groups=[[0], [1, 2]], algorithm="ring"),
        "algorithm='ring'.* groups of one size",
    ),
    (
        TypeError,
        lambda x: lax.psum(x, "x", axis_index_groups=5),
        "of ranks: 'int' object is not iterable; pass one such as [[0, 1], [2, 3]]",
    ),
    (TypeError, lambda x: lax.ppermute(x, "x", 5), "is not iterable; pass pairs (source, target)"),
    (ValueError, lambda x: lax.pshuffle(x, "x", [0, 1, 2, 3]), "must be unique.* send once"),
    (TypeError, lambda x: lax.pbroadcast(x, "x", 1.0), "source=1.0 is not .*pass a Python int"),
    (TypeError, lambda x: lax.psum([x, keys(x)], "x"), "key is not a number.* leave it out"),
    (TypeError, lambda x: lax.pmax([x, keys(x)], "x"), "a random key is not a number"),
    (TypeError, lambda x: lax.psum_scatter([x, keys(x)], "x"), "a random key is not a number"),
    (TypeError, lambda x: lax.pbroadcast(x, "x", x.sum()), "is float32[].*pass one integer"),
    (TypeError, lambda x: lax.all_gather(x, "x", axis="0"), "axis='0' is not .*pass a Python int"),
    (
        TypeError,
        lambda x: lax.psum(x, "x", accumulate_dtype="wide"),
        "='wide' is not a dtype.*such as jnp.float32",
    ),
    (
        ValueError,
        lambda x: lax.psum(x, "x", axis_index_groups=[[0, 1, 2], []]),
        "a group of no ranks; leave it out",
    ),
    (TypeError, lambda x: lax.psum(x, "x", algorithm=None), "=None is not .*pass a name, a Table"),
    (TypeError, lambda x: lax.psum(x, "x", algorithm=np.array([1, 2])), "is not an algorithm"),
    (
        TypeError,
        lambda x: lax.psum(x, "x", algorithm=(algorithms.ring(3), [])),
        "unhashable.*pass something hashable",
    ),
    (
        ValueError,
        lambda x: lax.psum(x, "x", algorithm="table.json"),
        "no algorithm 'table.json'.*ringcoll.Table.load('table.json')",
    ),
    (
        TypeError,
        lambda x: lax.ppermute(x, "x", [(0, 1)], algorithm="ring"),
        "algorithm='ring'.* one hop.* leave it out",
    ),
    (TypeError, lambda x: lax.ppermute(x, "x", {0: 1}), "perm={0: 1}.* be a list or a tuple"),
]


@pytest.mark.parametrize(
    ("kind", "call", "words"), REFUSED_BY_US, ids=[w for *_, w in REFUSED_BY_US]
)
def test_what_lax_lets_pass_is_refused_in_words(kind, call, words):
    refusal = attempt(call)
    assert type(refusal) is kind
    in_order = ".*".join(map(re.escape, words.split(".*")))
    assert re.search(rf"^ringcoll\.\w+\(.*{in_order}", str(refusal), re.S), refusal


@pytest.mark.parametrize("by", [lambda f: f, jax.jit])
def test_an_axis_that_is_not_bound(by):
    with jax.set_mesh(MESH), pytest.raises(NameError) as refusal:
        by(lambda x: lax.psum(x, "x"))(jnp.ones(N))
    words = "unbound axis name: x; call it inside jax.shard_map"
    assert str(refusal.value) == f"ringcoll.psum(x, axis_name='x'): {words}"


def test_groups_under_check_vma_are_refused_as_by_lax_with_the_cure():
    groups = [[0, 1, 2]]
    theirs = attempt(lambda x: jax.lax.psum(x, "x", axis_index_groups=groups), check_vma=True)
    ours = attempt(lambda x: lax.psum(x, "x", axis_index_groups=groups), check_vma=True)
    assert type(ours) is type(theirs) is NotImplementedError
    assert "check_vma=False" in str(ours)


def test_nothing_is_sent_by_a_call_that_is_refused(monkeypatch):
    """Not even for the leaves before the bad one."""
    sent = []
    monkeypatch.setattr(all_gather.PsumScatter, "__call__", lambda self, x: sent.append(x))
    both = lambda x: lax.psum_scatter([x, x[:2]], "x", tiled=True, algorithm="ring")  # noqa: E731
    assert "must be divisible by shard_count 3" in str(attempt(both))
    assert not sent


@pytest.mark.parametrize(
    "perm",
    [
        lambda: zip(range(N), [1, 2, 0], strict=True),
        lambda: ((rank, (rank + 1) % N) for rank in range(N)),
        lambda: {(0, 1), (1, 2), (2, 0)},
        lambda: np.array([(0, 1), (1, 2), (2, 0)]),
        lambda: {0: 1, 1: 2, 2: 0}.items(),
        lambda: [np.array([0, 1]), [1, 2], (np.int8(2), False)],
    ],
)
def test_a_permutation_may_have_any_form_that_lax_takes(perm):
    """lax 0.10.2 takes any iterable of pairs, 0.12 only lists and tuples.

    (If it is an iterator, it is empty when lax 0.10.2 sends the second leaf.)
    """

    def outcome(call):
        try:
            return np.asarray(per_rank(MESH, call, data((N, 2))))
        except TypeError:
            return "refused"

    ours = outcome(lambda x: lax.ppermute([x, x], "x", perm())[1])
    np.testing.assert_array_equal(ours, outcome(lambda x: jax.lax.ppermute(x, "x", perm())))


def test_over_a_vmapped_axis_groups_are_refused():
    """ringcoll refuses them, because lax's own words do not say which axis."""

    def total(x):
        return lax.psum(x, "v", axis_index_groups=[[0, 1], [2, 3]], algorithm="ring")

    with pytest.raises(NotImplementedError, match=r"over the vmapped axis 'v'.*use a mesh axis"):
        jax.vmap(total, axis_name="v")(jnp.ones((4, 3)))


def raises(error):
    def raising(*_, **__):
        raise error

    return raising


class OfUser(ValueError):
    words = ("an attribute of its own",)


def as_profile(x):
    """A visit in a module of the user that has the name of one of Python's."""
    names = {"__name__": "profile", "raising": raises(IndexError("in a module"))}
    exec("def visit(carry, arrived):\n    raising()", names)
    return visited(x, names["visit"])


def visited(x, visit):
    return ringcoll.gather(x, "x", visit, jnp.zeros(2), algorithm="ring")


# What is raised in a function of the user, and by what; it names itself, or nothing.
FROM_VISITS = {
    "mine": lambda x: visited(x, raises(ValueError("mine"))),
    "'mine'": lambda x: visited(x, jax.checkpoint(raises(KeyError("mine")))),
    "of its own": lambda x: visited(x, raises(OfUser("of its own"))),
    "in a module": as_profile,
    "produced": lambda x: ringcoll.reduce(raises(TypeError("produced")), "x"),
    "ringcoll.psum(x, axis_name='z'): unbound axis name: z; the axes here are 'x'": (
        lambda x: visited(x, lambda carry, arrived: (carry + lax.psum(arrived.value, "z"), None))
    ),
    "ringcoll.Rows.take: dimension 0 of float32[5] is no multiple of 3 x 3": (
        lambda x: ringcoll.tour(x, "x", lambda c, a: (c, a.take(jnp.ones(5))), jnp.zeros(2))
    ),
}


@pytest.mark.parametrize("words", FROM_VISITS)
def test_what_a_users_function_raises_is_not_changed(words):
    assert str(attempt(FROM_VISITS[words])).partition("\n")[0].startswith(words)


def test_the_call_has_what_was_given_in_short():
    """Operands and functions by their names, other values cut, dimensions also by default."""
    perm = [(rank, 0) for rank in range(100)]
    message = str(attempt(lambda x: lax.ppermute(x, "x", perm)))
    assert message.startswith("ringcoll.ppermute(x, axis_name='x', perm=[(0, 0), (1, 0), ")
    assert len(message.partition("): ")[0]) < 300
    own = str(attempt(lambda x: lax.all_gather(x, {"x"}, algorithm=algorithms.ring, order=Tree())))
    assert own.startswith(
        "ringcoll.all_gather(x, axis_name={'x'}, axis=0, tiled=False, algorithm=ring"
    )
    assert "order=Tree(leaves=8)): " in own


def test_a_fault_of_ours_is_not_called_one_of_the_call(monkeypatch):
    monkeypatch.setattr(all_gather, "bind_leaves", raises(AssertionError("a fault")))
    assert str(attempt(lambda x: lax.all_gather(x, "x"))) == "a fault"
