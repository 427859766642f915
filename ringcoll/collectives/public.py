"""How ringcoll refuses a call: a body raises in plain words, and `public` adds the call to them."""

import operator
import os
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from reprlib import Repr
from typing import Any, TypeVar, cast

import jax
from jax import Array
from jax.typing import ArrayLike

F = TypeVar("F", bound=Callable[..., Any])

#: The exceptions that a body or lax raises for a wrong call; others pass unchanged.
REFUSALS = (NameError, TypeError, LookupError, ValueError, NotImplementedError)
#: The packages whose functions may be on the way from a public function to an error of the call.
_PACKAGES = ("ringcoll", "jax", "jaxlib", "numpy", "opt_einsum", "ml_dtypes")
#: The attribute of an error that has its words without a call.
_WORDS = "_ringcoll_words"
_STANDARD_LIBRARY = os.path.dirname(os.__file__)
_short = Repr()  # long values are cut
_short.maxstring = _short.maxother = 200
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = 16


def public(path: str = "", *, name: str = "", arguments: bool = True) -> Callable[[F], F]:
    """A decorator of public functions: their errors name the call as the user wrote it.

    The error of a public function that is called inside becomes one of the call outside. What a
    function of the user raises, such as a visit, is not changed.

    Args:
        path: the path of the function in `ringcoll`, such as "layers.fsdp.".
        name: the name of the function that the user calls, if it is not this one.
        arguments: whether the message has the arguments.
    """

    def decorated(function: F) -> F:
        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except REFUSALS as error:
                if not _is_of_user(error):
                    words = vars(error).get(_WORDS) or _words(error, function.__name__, kwargs)
                    if not words.startswith("ringcoll."):  # else it names a call already
                        shown = _shown(called, args, kwargs) if arguments else ""
                        call = f"ringcoll.{path}{name or function.__name__}{shown}"
                        error.args, vars(error)[_WORDS] = (f"{call}: {words}",), words
                raise

        return cast(F, called)

    return decorated


def _is_of_user(error: Exception) -> bool:
    """Whether a function that is not ours, JAX's or Python's raised it."""
    return any(
        not _is_known(frame.f_globals.get("__name__", ""))
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _is_known(module: str) -> bool:
    root = module.partition(".")[0]
    if root not in sys.stdlib_module_names:
        return root in _PACKAGES
    file = getattr(sys.modules.get(root), "__file__", None)  # a user may have a profile.py
    return file is not None and file.startswith(_STANDARD_LIBRARY)


def _shown(function: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """The arguments of a call: operands and functions by their names, the others with values.

    Integers, such as dimensions, are shown even if nobody gave them.
    """
    called = signature(function)
    try:
        given = called.bind(*args, **kwargs).arguments
    except TypeError:
        return ""
    operands, others = [], []
    for key, parameter in called.parameters.items():
        value = given.get(key, parameter.default)
        if key not in given and not isinstance(value, int):
            continue
        is_positional = parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
        if parameter.annotation in (Any, Array, ArrayLike) or (is_positional and callable(value)):
            operands.append(key)
        else:
            own = getattr(value, "__name__", None) if callable(value) else None
            others.append(f"{key}={own or _short.repr(value)}")
    return f"({', '.join(operands + others)})"


def _words(error: Exception, function: str, kwargs: dict[str, Any]) -> str:
    """What is wrong, in the words of the body or of lax, and the cure."""
    # Some words of lax go on: "To fix this, please call psum under `jax.shard_map`."
    words = str(*error.args[:1]).removeprefix("Found an ").partition(". To fix this")[0]
    if words.startswith("unbound axis name"):
        return f"{words}; {bound_axes()}"
    # lax has no groups under check_vma=True.
    has_groups = kwargs.get("axis_index_groups") is not None
    cure = "; pass check_vma=False to jax.shard_map" * has_groups
    return words or f"not supported by jax.lax.{function}{cure}"


def bound_axes() -> str:
    """The cure for an axis that is not bound."""
    bound = ", ".join(map(repr, jax.sharding.get_abstract_mesh().manual_axes))
    return f"the axes here are {bound}" if bound else "call it inside jax.shard_map"


def check_function(name: str, value: Any) -> None:
    """Refuse an argument that is no function."""
    if not callable(value):
        raise TypeError(f"{name} is a {type(value).__name__}, no function; pass a function")


def integer(name: str, value: Any, ndim: int | None = None) -> int:
    """An argument that must be a whole number.

    With `ndim` it is one of `ndim` dimensions, and is returned as a number from 0.
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name}={value!r} is not an integer; pass a Python int") from error
    if ndim is None:
        return number
    if not -ndim <= number < ndim:
        raise ValueError(
            f"{name}: axis {number} is out of bounds for array of dimension {ndim}; count "
            "dimensions from 0, or from the last with -1"
        )
    return number % ndim
