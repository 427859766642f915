"""Run other people's code with ringcoll's collectives: `with ringcoll.replacing(jax.lax):`.

While a region is open on any thread, each attribute of its modules that is a collective of
`jax.lax` is replaced by a dispatcher. On a thread with an open region, a dispatcher calls
ringcoll's function; on all other threads it calls lax's. When the last region of a module closes,
lax's functions are put back.
"""

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ringcoll.collectives import choice
from ringcoll.collectives.all_gather import all_gather, psum_scatter
from ringcoll.collectives.all_reduce import pmax, pmean, pmin, psum
from ringcoll.collectives.all_to_all import all_to_all, pswapaxes
from ringcoll.collectives.broadcast import pbroadcast
from ringcoll.collectives.permute import ppermute, pshuffle
from ringcoll.collectives.ragged_all_to_all import ragged_all_to_all
from ringcoll.collectives.table import Table
from ringcoll.runtime import built_in


class _Options(NamedTuple):
    """The options that a region sets for a function."""

    algorithm: str | Table
    accumulate_dtype: np.dtype | None


#: The options of each function by the regions around, as pairs, because the value of a context must
#: be hashable. User contexts are a part of `jit`'s key, so `jit` compiles once for each value.
_around = jax.make_user_context(default_value=())


class _Region:
    """The options of a region while it is open on the thread that opened it.

    A generator may close its region while later regions are open. These stay in effect.
    """

    def __init__(self, says: dict[str, _Options]) -> None:
        self.says, self.is_open = says, False

    def open(self) -> None:
        """Enter the region, and forget regions of this thread that another thread has closed."""
        for region in [region for region in _here.regions if not region.is_open]:
            region._leave()
        self.is_open = True
        _here.regions.append(self)
        self._enter()

    def close(self) -> None:
        """Leave the region; on another thread, only note that it is closed."""
        self.is_open = False
        if self in _here.regions:
            self._leave()

    def _enter(self) -> None:
        self._context = _around(tuple((dict(_around.value) | self.says).items()))
        self._context.__enter__()

    def _leave(self) -> None:
        index = _here.regions.index(self)
        inner = _here.regions[index + 1 :]
        for region in reversed([self, *inner]):  # contexts can only be closed in order
            region._context.__exit__(None, None, None)
        del _here.regions[index]
        for region in inner:
            region._enter()


class _Here(threading.local):
    """The regions of a thread, the innermost last."""

    def __init__(self) -> None:
        self.regions: list[_Region] = []


_here = _Here()

#: A module, and the name of one of its attributes.
Attribute = tuple[ModuleType, str]
#: How many regions replace an attribute, on all threads; and the lock that guards the count.
_open: Counter[Attribute] = Counter()
_changing = threading.Lock()


def _dispatcher(ours: Callable[..., Any]) -> Callable[..., Any]:
    """Calls ringcoll's function in a region that names it, otherwise lax's of the same name."""
    name = ours.__name__
    theirs, parameters = getattr(built_in, name), inspect.signature(ours).parameters
    # Permutations have an `algorithm` only to refuse it.
    takes = parameters.keys() - ({"algorithm"} if parameters["algorithm"].default is None else ())

    @wraps(theirs)
    def dispatcher(*args: Any, **kwargs: Any) -> Any:
        options = dict(_around.value).get(name)
        if options is None:
            return theirs(*args, **kwargs)
        settings = options._asdict()
        # A name is set as a context: if the function cannot run by it, the call stays "auto".
        is_named = options.algorithm != "auto" and isinstance(options.algorithm, str)
        with choice.algorithm(settings.pop("algorithm")) if is_named else nullcontext():
            return ours(*args, **{k: v for k, v in settings.items() if k in takes} | kwargs)

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

    The region belongs to its thread: other threads call lax's functions. Regions nest; for each
    function, the innermost region that names it decides. When the last region closes, even by an
    exception, modules are as they were. It is also a decorator: `@ringcoll.replacing(jax.lax)`.

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
    names = _checked_names(only)
    options = _Options(_checked_algorithm(algorithm), _checked_dtype(accumulate_dtype))
    replaced = _replace((module, *modules), names)
    region = _Region(dict.fromkeys(names, options))
    try:
        region.open()
        yield
    finally:
        region.close()
        _restore(replaced)


def _replace(modules: Iterable[ModuleType], names: Collection[str]) -> list[Attribute]:
    with _changing:
        found = [attribute for module in modules for attribute in _attributes(module, names)]
        for module, key in found:
            _open[module, key] += 1
            setattr(module, key, _DISPATCHERS[_NAMES[id(vars(module)[key])]])
    return found


def _restore(replaced: Iterable[Attribute]) -> None:
    with _changing:
        for module, key in replaced:
            _open[module, key] -= 1
            name = _NAMES.get(id(vars(module).get(key)))  # None: other code has set it meanwhile
            if not _open[module, key] and name is not None:
                setattr(module, key, getattr(built_in, name))


def _attributes(module: ModuleType, names: Collection[str]) -> list[Attribute]:
    """The attributes of a module that are these functions of jax.lax, under any name."""
    if not isinstance(module, ModuleType):
        raise TypeError(
            f"ringcoll.replacing({module!r}): is not a module; pass one such as jax.lax"
        )
    named = ((key, _NAMES.get(id(value))) for key, value in vars(module).items())
    found = [(module, key) for key, name in named if name is not None and name in names]
    if not found:
        raise ValueError(
            f"ringcoll.replacing({module.__name__}): the module has none of jax.lax's "
            f"{', '.join(names)}; pass jax.lax, or a module that has `from jax.lax import psum`"
        )
    return found


def _checked_names(only: str | Iterable[str] | None) -> tuple[str, ...]:
    names = tuple(_DISPATCHERS) if only is None else (only,) if isinstance(only, str) else (*only,)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"ringcoll.replacing: only has {name!r}; pass names, such as 'psum'")
        if name not in _DISPATCHERS:
            known = ", ".join(_DISPATCHERS)
            raise ValueError(f"ringcoll.replacing: only={name!r} is no collective; pass {known}")
    return names


def _checked_algorithm(algorithm: str | Table) -> str | Table:
    if isinstance(algorithm, str):
        choice.check_known(f"ringcoll.replacing: algorithm={algorithm!r}", algorithm)
    elif not isinstance(algorithm, Table):
        raise TypeError(
            f"ringcoll.replacing: algorithm={algorithm!r} is neither a name nor a Table; "
            "other collectives could not run by it"
        )
    return algorithm


def _checked_dtype(dtype: DTypeLike | None) -> np.dtype | None:
    try:
        return None if dtype is None else jnp.dtype(dtype)
    except TypeError as error:
        words = f"ringcoll.replacing: accumulate_dtype={dtype!r} is not a dtype; pass jnp.float32"
        raise TypeError(words) from error
