"""Run other people's code with ringcoll's collectives: `with ringcoll.replacing(jax.lax):`.

While a region is open, each attribute of its modules that is a collective of `jax.lax` is a
dispatcher, which calls ringcoll's function with the options of the region opened last that names
it. When the last region of an attribute closes, lax's function is put back.
"""

import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ringcoll.choose.table import Table
from ringcoll.collectives import choice
from ringcoll.collectives.all_gather import all_gather, psum_scatter
from ringcoll.collectives.all_reduce import pmax, pmean, pmin, psum
from ringcoll.collectives.all_to_all import all_to_all, pswapaxes
from ringcoll.collectives.broadcast import pbroadcast
from ringcoll.collectives.permute import ppermute, pshuffle
from ringcoll.collectives.public import public
from ringcoll.collectives.ragged_all_to_all import ragged_all_to_all
from ringcoll.runtime import built_in


class _Region(NamedTuple):
    """The attributes that a region replaces, the functions that it names, and their options."""

    attributes: tuple[tuple[ModuleType, str], ...]
    names: tuple[str, ...]
    algorithm: str | Table
    accumulate_dtype: np.dtype | None


#: The open regions of all threads in the order in which they opened, by identity, because two may
#: be equal; and the lock for a change. It is reentrant because the garbage collector may close a
#: generator, and its region, at any time.
_open: dict[int, _Region] = {}
_changing = threading.RLock()
#: The open regions, the last opened first, the same on all threads. User contexts are a part of
#: `jit`'s key, so `jit` compiles once for each value.
_in_effect = jax.make_user_context(default_value=())


def _dispatcher(ours: Callable[..., Any]) -> Callable[..., Any]:
    """Calls ringcoll's function if an open region names it, otherwise lax's of the same name."""
    name = ours.__name__
    theirs = getattr(built_in, name)
    takes_dtype = "accumulate_dtype" in inspect.signature(ours).parameters

    @wraps(theirs)
    def dispatcher(*args: Any, **kwargs: Any) -> Any:
        region = next((region for region in _in_effect.value if name in region.names), None)
        if region is None:
            return theirs(*args, **kwargs)
        options = {"accumulate_dtype": region.accumulate_dtype} if takes_dtype else {}
        # As a context: if the function cannot run by this algorithm, the call stays "auto".
        with nullcontext() if region.algorithm == "auto" else choice.algorithm(region.algorithm):
            return ours(*args, **options | kwargs)

    return dispatcher


_OURS = (
    *(all_gather, all_to_all, pbroadcast, pmax, pmean, pmin, ppermute, pshuffle, psum),
    *(psum_scatter, pswapaxes, ragged_all_to_all),
)
_DISPATCHERS = {ours.__name__: _dispatcher(ours) for ours in _OURS}
#: The name of lax's function, or of its dispatcher, by identity: an attribute may not be hashable.
_NAMES = {id(getattr(built_in, name)): name for name in _DISPATCHERS}
_NAMES |= {id(dispatcher): name for name, dispatcher in _DISPATCHERS.items()}


@contextmanager
def replacing(
    module: ModuleType,
    *modules: ModuleType,
    algorithm: str | Table = "auto",
    accumulate_dtype: DTypeLike | None = None,
    only: str | Iterable[str] | None = None,
) -> Iterator[None]:
    """Run code that calls jax.lax's collectives with ringcoll's: `with replacing(jax.lax):`.

    Use it for code that you do not own, such as a batch norm or an optimizer. All calls of
    `lax.psum(...)` and `jax.lax.psum(...)` that are traced inside, in any library, call ringcoll's
    function. A module with `from jax.lax import psum` has its own reference: pass that module too.
    A function that was stored before (`partial(lax.psum, axis_name="x")`) stays lax's.

    A region holds for all threads. If it opens or closes while another thread traces a program,
    some of that program's calls are ours and some are lax's, and `jit` keeps the program. Regions
    nest; for each function, the last region opened that names it decides. They may close in any
    order. When the last one closes, even by an exception, modules are as they were. It is also a
    decorator: `@ringcoll.replacing(jax.lax)`.

    `jit` compiles once for each region's arguments, so a function that ran outside is traced
    again inside, and vice versa. A compiled program (`.lower(...).compile()`) does not change. A
    gradient uses the algorithm of its function, wherever the gradient is taken. (But the backward
    pass of a `custom_vjp` is traced where the gradient is taken.)

    Shapes, steps, bytes, gradients and source: those of the functions.

    Args:
        module: the module whose attributes are replaced: `jax.lax`, or one that imported functions
            from it.
        modules: further modules.
        algorithm: a name or a `Table`. If a function cannot run by that name ("ring" for an
            `all_to_all`), the call is "auto".
        accumulate_dtype: the dtype of partial sums, for functions that add floats or whose gradient
            does.
        only: the names of the functions to replace; None for all.

    Raises:
        TypeError: a module is not a module; the algorithm is neither a name nor a `Table`; the
            dtype is not a dtype; `only` has something other than strings.
        ValueError: there is no algorithm of this name; `only` has a name that is not a collective;
            a module has none of these functions of jax.lax.

    >>> def from_a_library(x):
    ...     return jax.lax.pmean(x, "x")
    >>> mean = ranks(from_a_library, out_specs=P())
    >>> with ringcoll.replacing(jax.lax, algorithm="ring"):
    ...     program = mean.lower(jnp.arange(4.0)).as_text()
    >>> program.count("collective_permute")  # 3 rounds of a reduce-scatter, 3 of an all-gather
    6
    """
    options: Any = {"algorithm": algorithm, "accumulate_dtype": accumulate_dtype, "only": only}
    region = _region(module, *modules, **options)
    try:
        _change(region, opens=True)
        yield
    finally:
        _change(region, opens=False)


@public(name="replacing")
def _region(
    module: ModuleType,
    *modules: ModuleType,
    algorithm: str | Table,
    accumulate_dtype: DTypeLike | None,
    only: str | Iterable[str] | None,
) -> _Region:
    names = _checked_names(only)
    choice.check_name_or_table(algorithm)
    dtype = _checked_dtype(accumulate_dtype)
    attributes = [pair for each in (module, *modules) for pair in _attributes(each, names)]
    return _Region(tuple(attributes), names, algorithm, dtype)


def _change(region: _Region, *, opens: bool) -> None:
    """Open or close a region, and set its attributes: to dispatchers where a region is open."""
    with _changing:
        if opens:
            _open[id(region)] = region
        else:
            _open.pop(id(region), None)
        _in_effect.set_global(tuple(dict.fromkeys(reversed(_open.values()))))
        replaced = {pair for each in _open.values() for pair in each.attributes}
        for module, key in region.attributes:
            name = _NAMES.get(id(vars(module).get(key)))
            if name is not None:  # None: other code has set it meanwhile
                is_replaced = (module, key) in replaced
                function = _DISPATCHERS[name] if is_replaced else getattr(built_in, name)
                setattr(module, key, function)


def _attributes(module: ModuleType, names: Collection[str]) -> list[tuple[ModuleType, str]]:
    """The attributes of a module that are these functions of jax.lax, under any name."""
    if not isinstance(module, ModuleType):
        raise TypeError(f"ringcoll.replacing({module!r}): not a module; pass jax.lax")
    named = ((key, _NAMES.get(id(value))) for key, value in vars(module).items())
    attributes = [(module, key) for key, name in named if name is not None and name in names]
    if not attributes:
        raise ValueError(
            f"ringcoll.replacing({module.__name__}): the module has none of jax.lax's "
            f"{', '.join(names)}; pass jax.lax, or a module that has `from jax.lax import psum`"
        )
    return attributes


def _checked_names(only: str | Iterable[str] | None) -> tuple[str, ...]:
    only = tuple(_DISPATCHERS) if only is None else only
    is_one = isinstance(only, str) or not isinstance(only, Iterable)
    names: tuple[Any, ...] = (only,) if is_one else (*only,)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"only={name!r}: a name is a string; pass one such as 'psum'")
        if name not in _DISPATCHERS:
            known = ", ".join(_DISPATCHERS)
            raise ValueError(f"only={name!r}: not a collective; pass {known}")
    return names


def _checked_dtype(dtype: DTypeLike | None) -> np.dtype | None:
    try:
        return None if dtype is None else jnp.dtype(dtype)
    except TypeError as error:
        raise TypeError(
            f"accumulate_dtype={dtype!r}: not a dtype; pass one such as jnp.float32"
        ) from error
