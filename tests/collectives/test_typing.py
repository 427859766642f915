"""What an editor and a type checker know of a program that uses the package."""

import inspect
import re
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Unpack, get_origin

import pytest
from support import python
from test_doctests import named, public

import ringcoll
from ringcoll import debug, layers, learn

USER = """\
import jax

import ringcoll
from ringcoll import lax
from ringcoll.layers import tensor_parallel as tp


def known(x: jax.Array) -> jax.Array:
    rank = lax.axis_index("x")
    total, _ = lax.scan(lambda carry, y: (carry + y, None), x[0], x)
    row = lax.dynamic_slice_in_dim(lax.linalg.cholesky(x), rank, 1)
    with ringcoll.algorithm("ring"), ringcoll.debug.deadline(60):
        print(ringcoll.draw.plan("all_reduce", "ring", (4,)), ringcoll.overlap.report)
    y = ringcoll.all_gather_matmul(x, row, "x", algorithm="ring", residuals="regather")
    y = tp.mlp({"up": x, "down": row}, y, "x", algorithm="ring", preferred_element_type=float)
    return lax.psum(total + y, "x", algorithm="ring", accumulate_dtype=jax.numpy.float32)


def refused(x: jax.Array) -> None:
    lax.psun(x, "x")
    lax.psum(x, "x", algorithm=5)
    lax.all_gather(x, "x", algoritm="ring")
    ringcoll.algorithm(5)
    ringcoll.matmul_all_reduce(x, x, "x", residuals="save")
    tp.mlp(x, x, "x", algoritm="ring")
    tp.gated_mlp(x, x, "x", residuals="keep")
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("mypy") is None, reason="no mypy: pip install -e '.[dev]'")
def test_mypy_knows_every_name_of_lax_and_ours_as_ours(tmp_path):
    file = tmp_path / "user.py"
    file.write_text(USER, encoding="utf-8")
    printed = python("-m", "mypy", "--config-file=", "--check-untyped-defs", str(file)).stdout
    lines = USER.splitlines()
    wrong = lines.index("def refused(x: jax.Array) -> None:") + 1
    found = {int(number) - 1 for number in re.findall(r"user.py:(\d+): error: ", printed)}
    assert found == {*range(wrong, len(lines))}, printed


def of_options():
    """Public functions that take `**options: Unpack[...]`."""
    last = {f: [*inspect.signature(inspect.unwrap(f)).parameters.values()][-1] for f in public()}
    return named(f for f, one in last.items() if get_origin(one.annotation) is Unpack)


@pytest.mark.parametrize("function", of_options(), ids=lambda f: f.__name__)
def test_an_unknown_option_is_refused_with_the_nearest_one(function):
    """The error names a path at which the function is."""
    with pytest.raises(TypeError, match="keyword argument 'algoritm'; did you mean") as caught:
        function(algoritm="ring")
    path, _, words = str(caught.value).partition(": ")
    assert resolve_name(path) is function
    assert words.endswith("did you mean 'algorithm'?")
    with pytest.raises(TypeError, match=r"argument 'qqq'; choose from .*, algorithm, "):
        function(qqq=1)


def test_options_show_their_defaults_in_signatures():
    shown = str(inspect.signature(layers.tensor_parallel.mlp))
    assert "residuals: Literal['save', 'regather'] = 'save'" in shown
    assert "sequence_parallel: bool = True" in shown
    assert {f.__name__ for f in of_options()} >= {"all_gather_matmul", "linear", "gather", "copied"}


def test_public_functions_name_their_options():
    """`**options` would hide `algorithm=` from an editor. Some functions pass on a caller's own."""
    hidden = {
        function
        for function in public()
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.VAR_KEYWORD
    }
    # They pass on the arguments of a function, the names of axes, or the names of results.
    assert hidden == {debug.check_consistent, ringcoll.mesh, learn.make_mesh, learn.agree}
