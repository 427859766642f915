"""How ringcoll refuses a call: a body raises in plain words, and `public` adds the call to them."""

import operator
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

import jax
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

F = TypeVar("F", bound=Callable[..., Any])

#: The exceptions that a body or lax raises for a wrong call. Others are faults of ours.
REFUSALS = (NameError, TypeError, LookupError, ValueError, NotImplementedError)
#: The modules whose functions may be on the way from a public function to an error of the call.
_NOT_THE_USERS = sys.stdlib_module_names | {"ringcoll", "jax", "jaxlib", "numpy", "opt_einsum"}
#: Types of values that a message shows, also in lists; other arguments are shown by their names.
_PLAIN = str, int, float, PartitionSpec, type(None)


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
                words = vars(error).get("words") or _words(error, function, kwargs)
                if not (words.startswith("ringcoll.") or _is_of_user(error)):
                    shown = _shown(called, args, kwargs) if arguments else ""
                    call = f"ringcoll.{path}{name or function.__name__}{shown}"
                    error.args, vars(error)["words"] = (f"{call}: {words}",), words
                raise

        return cast(F, called)

    return decorated


def _is_of_user(error: Exception) -> bool:
    """Whether it was raised in a function of the user."""
    modules = (
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    return any(module.partition(".")[0] not in _NOT_THE_USERS for module in modules)


def _shown(function: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """The arguments of a call, with dimensions also if nobody gave them.

    Operands are shown by their names, the others with their values.
    """
    parameters = signature(function).parameters
    try:
        given = signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return ""
    operands, others = [], []
    for key, parameter in parameters.items():
        value = given.get(key, parameter.default)
        if key not in given and not isinstance(value, int):
            continue
        if parameter.annotation in (Any, Array, ArrayLike) or not _is_plain(value):
            operands.append(key)
        else:
            others.append(f"{key}={value!r}")
    return f"({', '.join(operands + others)})"


def _is_plain(value: Any) -> bool:
    """Whether a message shows a value."""
    if isinstance(value, dict):
        value = (*value, *value.values())
    return (
        all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, _PLAIN)
    )


def _words(error: Exception, function: Callable[..., Any], options: dict[str, Any]) -> str:
    """What is wrong, in the words of the body or of lax, and the cure."""
    # Some words of lax go on: "To fix this, please call psum under `jax.shard_map`."
    words = str(*error.args[:1]).removeprefix("Found an ").partition(". To fix this")[0]
    if words.startswith("unbound axis name"):
        return f"{words}; {bound_axes()}"
    if words:
        return words
    words = f"not supported by jax.lax.{function.__name__}"
    # lax has no groups under check_vma=True.
    return words + "; pass check_vma=False to jax.shard_map" * ("axis_index_groups" in options)


def bound_axes() -> str:
    """The cure for an axis that is not bound."""
    bound = ", ".join(map(repr, jax.sharding.get_abstract_mesh().manual_axes))
    return f"the axes here are {bound}" if bound else "call it inside jax.shard_map"


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
