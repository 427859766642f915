"""Bad calls are refused before anything is sent, with lax's type and words, and a cure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import MAIN
from support import data, make_mesh, per_rank

from ringcoll import algorithms, lax
from ringcoll.collectives import all_gather

N = 3
MESH = make_mesh(N)


def attempt(function, shape=(N, 2), check_vma=False):
    """Run on three ranks, and return the exception."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        per_rank(MESH, function, data((N, *shape)), check_vma=check_vma)
    return caught.value


# Calls that both refuse, by either module. A name begins with that of the function.
REFUSED_BY_LAX = {
    "all_gather axis": lambda L, x: L.all_gather(x, "x", axis=3),  # of 3
    "all_gather to": lambda L, x: L.all_gather(x, "x", to="replicated"),
    "psum_scatter stacked": lambda L, x: L.psum_scatter(x, "x", scatter_dimension=1),
    "psum_scatter tiled": lambda L, x: L.psum_scatter(x, "x", scatter_dimension=1, tiled=True),
    "all_to_all stacked": lambda L, x: L.all_to_all(x, "x", 1, 0),
    "all_to_all tiled": lambda L, x: L.all_to_all(x, "x", 1, 0, tiled=True),
    "pswapaxes": lambda L, x: L.pswapaxes(x, "x", 1),
    "pmean of random keys": lambda L, x: L.pmean(
        jax.random.wrap_key_data(x.astype(jnp.uint32)), "x"
    ),
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


# Calls that only we refuse: lax fails later, or without words, or not at all.
REFUSED_BY_US = {
    "an axis that is not bound, under check_vma": (
        NameError,
        lambda x: lax.psum(x, "typo"),
        ("ringcoll.psum", "unbound axis name: typo", "the axes here are 'x'"),
    ),
    "an axis twice": (  # by which lax 0.12 ends the process
        ValueError,
        lambda x: lax.psum(x, ("x", "x")),
        ("ringcoll.psum", "axis_name=('x', 'x')", "repeated axis", "name each axis once"),
    ),
    "no such algorithm": (
        ValueError,
        lambda x: lax.psum(x, "x", algorithm="rign"),
        ("ringcoll.psum", "no algorithm 'rign'", "choose from auto, ring, "),
    ),
    "no power of two": (
        ValueError,
        lambda x: lax.psum(x, "x", algorithm="halving_doubling"),
        ("ringcoll.psum", "got 3 ranks", "use algorithm='bruck'"),
    ),
    "a schedule of other ranks": (
        ValueError,
        lambda x: lax.psum(x, "x", algorithm=algorithms.ring(4)),
        ("ringcoll.psum", "a schedule of 4 ranks", "(3,)"),
    ),
    "a dtype too narrow": (
        ValueError,
        lambda x: lax.psum(x, "x", accumulate_dtype=jnp.bfloat16),
        ("ringcoll.psum", "accumulate_dtype=bfloat16 cannot hold every float32", "pass a dtype"),
    ),
    "a dtype with fewer exponents": (
        ValueError,
        lambda x: lax.psum(x.astype(jnp.bfloat16), "x", accumulate_dtype=jnp.float16),
        ("accumulate_dtype=float16 cannot hold every bfloat16",),
    ),
    "a source that is not a rank": (
        ValueError,
        lambda x: lax.pbroadcast(x, "x", N),
        ("ringcoll.pbroadcast", f"source={N}", "not a rank"),
    ),
    "groups of several sizes, by hand": (
        ValueError,
        lambda x: lax.psum(x, "x", axis_index_groups=[[0], [1, 2]], algorithm="ring"),
        ("ringcoll.psum", "algorithm='ring'", "groups of one size"),
    ),
    "groups that are no lists": (
        TypeError,
        lambda x: lax.psum(x, "x", axis_index_groups=5),
        ("lists of ranks: 'int' object is not iterable; pass one such as [[0, 1], [2, 3]]",),
    ),
    "ranks that are no pairs": (
        TypeError,
        lambda x: lax.ppermute(x, "x", 5),
        ("pairs of ranks: 'int' object is not iterable; pass pairs (source, target)",),
    ),
    "a shuffle of more ranks": (
        ValueError,
        lambda x: lax.pshuffle(x, "x", [0, 1, 2, 3]),
        ("ringcoll.pshuffle", "perm=[0, 1, 2, 3]", "must be unique", "send once"),
    ),
    "a source that is not an integer": (
        TypeError,
        lambda x: lax.pbroadcast(x, "x", 1.0),
        ("ringcoll.pbroadcast", "source=1.0 is not an integer", "pass a Python int"),
    ),
    **{
        f"{name} of random keys": (
            TypeError,
            lambda x, name=name: getattr(lax, name)(
                [x, jax.random.wrap_key_data(x.astype(jnp.uint32))], "x"
            ),
            (f"ringcoll.{name}", "a random key is not a number", "leave it out"),
        )
        for name in ("psum", "pmax", "pmin", "psum_scatter")
    },
    "a traced source that is not an integer": (
        TypeError,
        lambda x: lax.pbroadcast(x, "x", x.sum()),
        ("ringcoll.pbroadcast", "source is float32[]", "pass one integer"),
    ),
    "a dimension that is not an integer": (
        TypeError,
        lambda x: lax.all_gather(x, "x", axis="0"),
        ("ringcoll.all_gather", "axis='0' is not an integer", "pass a Python int"),
    ),
    "a dtype that is none": (
        TypeError,
        lambda x: lax.psum(x, "x", accumulate_dtype="wide"),
        ("ringcoll.psum", "accumulate_dtype='wide' is not a dtype", "such as jnp.float32"),
    ),
    "a group of nobody": (
        ValueError,
        lambda x: lax.psum(x, "x", axis_index_groups=[[0, 1, 2], []]),
        ("ringcoll.psum", "a group of no ranks; leave it out"),
    ),
    **{
        f"an algorithm that is {junk!r}": (
            TypeError,
            lambda x, junk=junk: lax.psum(x, "x", algorithm=junk),
            ("ringcoll.psum", f"algorithm={junk!r} is not an algorithm", "pass a name, a Table"),
        )
        for junk in (None, np.array([1, 2]), ["ring"])
    },
    "an algorithm without a hash": (
        TypeError,
        lambda x: lax.psum(x, "x", algorithm=(algorithms.ring(3), [])),
        ("ringcoll.psum", "unhashable", "pass something hashable"),
    ),
    "a table by its path": (
        ValueError,
        lambda x: lax.psum(x, "x", algorithm="table.json"),
        ("ringcoll.psum", "no algorithm 'table.json'", "ringcoll.Table.load('table.json')"),
    ),
    "a permutation by an algorithm": (
        TypeError,
        lambda x: lax.ppermute(x, "x", [(0, 1)], algorithm="ring"),
        ("ringcoll.ppermute", "algorithm='ring'", "one hop", "leave it out"),
    ),
    "no list of pairs": (
        TypeError,
        lambda x: lax.ppermute(x, "x", {0: 1}),
        ("ringcoll.ppermute", "perm={0: 1}", "must be a list or a tuple"),
    ),
}


@pytest.mark.parametrize("case", REFUSED_BY_US)
def test_what_lax_lets_pass_is_refused_in_words(case):
    kind, call, words = REFUSED_BY_US[case]
    refusal = attempt(call, check_vma="check_vma" in case)
    assert type(refusal) is kind
    for word in words:
        assert word in str(refusal)


@pytest.mark.parametrize("raised", [KeyError("mine"), ValueError("mine"), TypeError("mine")])
def test_what_a_function_of_one_s_own_raises_is_chained_and_said_to_be_its_own(raised):
    def my_algorithm(n):
        raise raised

    refusal = attempt(lambda x: lax.psum(x, "x", algorithm=my_algorithm))
    assert type(refusal) is (TypeError if isinstance(raised, TypeError) else ValueError)
    assert f"my_algorithm(3) raised {type(raised).__name__}: " in str(refusal)
    while refusal is not raised:
        refusal = refusal.__cause__
        assert refusal is not None


@pytest.mark.parametrize("by", [lambda f: f, jax.jit])
def test_outside_of_shard_map_the_cure_is_to_call_it_inside(by):
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
