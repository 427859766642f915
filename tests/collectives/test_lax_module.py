"""`from ringcoll import lax` is all of `jax.lax`, with ringcoll's collectives."""

import inspect
import warnings

import jax.lax
import pytest

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
