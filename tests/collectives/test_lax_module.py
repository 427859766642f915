"""`from ringcoll import lax` is all of `jax.lax`, with ringcoll's collectives."""

import inspect
import warnings

import jax.lax
import numpy as np
import pytest
from cases import MAIN, check, first_algorithm
from support import make_mesh, per_rank

import ringcoll
from ringcoll import lax

OURS = (
    *("all_gather", "psum_scatter", "psum", "pmean", "pmax", "pmin", "all_to_all"),
    *("pbroadcast", "pshuffle", "pswapaxes", "ppermute", "ragged_all_to_all"),
)


@pytest.mark.parametrize("name", OURS)
def test_ours_take_what_lax_takes_and_more_by_keyword_only(name):
    ours = inspect.signature(getattr(lax, name)).parameters
    theirs = inspect.signature(getattr(jax.lax, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for argument, parameter in theirs.items():
        assert (ours[argument].kind, ours[argument].default) == (parameter.kind, parameter.default)
    for argument in list(ours)[len(theirs) :]:
        own = ("algorithm", "accumulate_dtype", "max_send", "wire", "order")
        assert argument in own
        assert ours[argument].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("name", OURS)
def test_ours_are_the_same_by_either_name_and_not_lax_s(name):
    assert getattr(lax, name) is getattr(ringcoll, name)
    assert getattr(lax, name) is not getattr(jax.lax, name)


def test_the_rest_is_lax_s_own():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # lax deprecates some of its own
        for name in dir(jax.lax):
            if name not in OURS and not name.startswith("_"):
                assert getattr(lax, name) is getattr(jax.lax, name), name
    assert set(dir(jax.lax)) <= set(dir(lax))


def test_what_lax_has_not_this_has_not():
    with pytest.raises(AttributeError, match=r"'ringcoll\.lax' has no attribute 'all_reduse'"):
        lax.all_reduse  # noqa: B018


@pytest.mark.parametrize("name", OURS)
def test_docstrings_say_what_they_must(name):
    text = inspect.getdoc(getattr(ringcoll, name)) or ""
    first, blank, *_ = text.splitlines()
    assert first.endswith(".")
    assert blank == ""
    assert "Gradient:" in text or "gradient" in text
    assert "->" in text  # the shapes, as algebra


def test_ours_in_the_place_of_lax_s_do_not_call_themselves():
    """Every function, both ways, and a matmul."""
    mesh, x = make_mesh(3), np.arange(12, dtype=np.float32).reshape(3, 2, 2)

    def matmuls(x):
        y = ringcoll.all_gather_matmul(x, x, "x", algorithm="lax")
        return ringcoll.matmul_reduce_scatter(y, x, "x", algorithm="lax")

    expected = per_rank(mesh, matmuls, x)
    groups = [[0], [1, 2]]  # of several sizes: lax's
    with ringcoll.replacing(jax.lax):
        check(mesh, "x", MAIN, lambda case, *shape: [{}, *first_algorithm(case, *shape)])
        np.testing.assert_array_equal(per_rank(mesh, matmuls, x), expected)
        grouped = per_rank(
            mesh, lambda x: jax.lax.psum(x, "x", axis_index_groups=groups), x, check_vma=False
        )
    np.testing.assert_array_equal(grouped, np.stack([x[0], x[1:].sum(0), x[1:].sum(0)]))
