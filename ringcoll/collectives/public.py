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
_NOT_THE_USERS = sys.stdlib_module_names | {"ringcoll", "jax", "jaxlib", "numpy"}
#: Types of values that a message shows; other arguments are shown by their names.
_SHOWN = str, int, float, PartitionSpec, type(None)


def public(path: str = "", *, arguments: bool = True) -> Callable[[F], F]:
    """A decorator of public functions: their errors name the call as the user wrote it.

    The error of a public function that is called inside becomes one of the call outside. What a
    function of the user raises, such as a visit, is not changed.

    Args:
        path: the path of the function in `ringcoll`, such as "layers.fsdp.".
        arguments: whether the message has the arguments.
    """

    def decorated(function: F) -> F:
        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except REFUSALS as error:
                if not _is_of_user(error):
                    given = _given(called, args, kwargs)
                    shown = _shown(called, given) if arguments and given else ""
                    words = vars(error).setdefault("words", _words(error, function, given))
                    error.args = (f"ringcoll.{path}{function.__name__}{shown}: {words}",)
                raise

        return cast(F, called)

    return decorated


def _is_of_user(error: Exception) -> bool:
    """Whether it was raised in a function of the user."""
    modules = (
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    return any(module.partition(".")[0] not in _NOT_THE_USERS for module in modules)


def _given(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments that the user gave, by name, and dimensions; none if they do not fit."""
    try:
        given = signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        return {}
    defaults = {name: one.default for name, one in signature(function).parameters.items()}
    return {name: value for name, value in defaults.items() if isinstance(value, int)} | given


def _shown(function: Callable[..., Any], given: dict[str, Any]) -> str:
    """The arguments of a call: operands by their names, then the others with their values."""
    parameters = signature(function).parameters
    operands, others = [], []
    for name in sorted(given, key=list(parameters).index):
        is_operand = parameters[name].annotation in (Any, Array, ArrayLike)
        if is_operand or not all(isinstance(x, _SHOWN) for x in jax.tree.leaves(given[name])):
            operands.append(name)
        else:
            others.append(f"{name}={given[name]!r}")
    return f"({', '.join(operands + others)})"


def _words(error: Exception, function: Callable[..., Any], given: dict[str, Any]) -> str:
    """What is wrong, in the words of the body or of lax, and the cure."""
    # Some words of lax go on: "To fix this, please call psum under `jax.shard_map`."
    words = str(*error.args[:1]).removeprefix("Found an ").partition(". To fix this")[0]
    if words.startswith("unbound axis name"):
        return f"{words}; {bound_axes()}"
    if words:
        return words
    words = f"not supported by jax.lax.{function.__name__}"
    # lax has no groups under check_vma=True.
    return words + "; pass check_vma=False to jax.shard_map" * ("axis_index_groups" in given)


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
