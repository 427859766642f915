"""A check that a program computes the same by every algorithm."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringcoll.choose.table import choices
from ringcoll.collectives.choice import algorithm
from ringcoll.debug.explaining import jitted, lowered
from ringcoll.schedules.registry import COLLECTIVES, LAX


def same_by_all(
    function: Callable[..., Any], *, gradients: bool = True, tolerance: float | None = None
) -> Callable[..., Any]:
    """A function that runs `function` by every algorithm, and compares with the built-ins.

    Use it in tests. On a CPU, "auto" visits once, after a built-in collective, so a test of your
    own visit, product or layer would run no round. Calls that name an algorithm keep it. For a
    program of jax.lax, pass `ringcoll.replaced(function)`.

    Args:
        function: a function of arrays or of pytrees of arrays, such as a `jax.shard_map`.
        gradients: whether the gradients of its float operands are compared too. Pass False for a
            function that has none, such as a `pmax`.
        tolerance: the largest difference, relative to the largest number of an array. None is, for
            floats, one rounding for each device, to the coarsest dtype of operands and results, but
            at most a tenth; for other dtypes 0.

    Returns:
        A function of the same operands; it returns the result by the built-ins.

    Raises:
        TypeError: it is no function that can be traced.
        ValueError: it makes no call that another algorithm can run.
        AssertionError: a result or a gradient differs; the message names the algorithm.

    >>> matmul = lambda x, w: ringcoll.all_gather_map(lambda rows: rows @ w, x, "x")
    >>> checked = ringcoll.debug.same_by_all(ranks(matmul, (P("x"), P()), P("x")))
    >>> checked(jnp.ones((8, 2)), jnp.ones((2, 3))).shape
    (32, 3)
    """
    jitted("debug.same_by_all", function)

    @wraps(function)
    def checked(*operands: Any, **named: Any) -> Any:
        # Under a vjp, `shard_map` cannot name wrong out_specs.
        jax.eval_shape(function, *operands, **named)
        leaves, structure = jax.tree.flatten((operands, named))
        moving = [i for i, x in enumerate(leaves) if gradients and _is_inexact(x)]

        def results(moved: list[Any]) -> Any:
            every = leaves[:]
            for i, x in zip(moving, moved, strict=True):
                every[i] = x
            operands, named = jax.tree.unflatten(structure, every)
            return function(*operands, **named)

        def with_gradients(moved: list[Any]) -> Any:
            y, pull_back = jax.vjp(results, moved) if moving else (results([]), None)
            return y, pull_back(jax.tree.map(_cotangent, y))[0] if pull_back else []

        names = dict.fromkeys(name for kind in COLLECTIVES for name in choices(kind))
        given, ways, found = [leaves[i] for i in moving], dict[Any, str](), dict[str, Any]()
        for name in [LAX, *names]:
            with algorithm(name):
                _, program, plans = lowered(jax.jit(with_gradients), (given,), {})
            way = tuple((call, plan.algorithm) for _, call, plan in plans)
            if ways.setdefault(way, name) == name:  # else its calls run as by an earlier name
                found[name] = jax.device_get(program.compile()(given))
        if len(found) < 2:
            raise ValueError(
                "ringcoll.debug.same_by_all: no call of the function can run by another algorithm; "
                "leave algorithm= out of its calls of ringcoll"
            )
        arrays = jax.tree.leaves((given, found[LAX]))
        floats = [jnp.result_type(x) for x in arrays if _is_inexact(x)]
        coarsest = max((float(jnp.finfo(dtype).eps) for dtype in floats), default=0.0)
        bound = min(jax.device_count() * coarsest, 0.1) if tolerance is None else tolerance
        for name, result in found.items():
            _compare(name, "the result", result[0], found[LAX][0], bound)
            for i, x, right in zip(moving, result[1], found[LAX][1], strict=True):
                _compare(name, f"the gradient of array {i} of the operands", x, right, bound)
        return found[LAX][0]

    return checked


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _cotangent(y: Any) -> Any:
    """Different numbers, so that rows that are swapped have different gradients."""
    if not _is_inexact(y):
        return np.zeros(y.shape, jax.dtypes.float0)
    return (1 + jnp.arange(y.size) % 7).astype(y.dtype).reshape(y.shape)


def _compare(name: str, what: str, found: Any, expected: Any, bound: float) -> None:
    """Raise an error if a float differs by more than the bound, or another number at all."""
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, x), right in pairs:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, right = map(jax.random.key_data, (x, right))
        x, right = np.asarray(x), np.asarray(right)
        wide = np.promote_types(x.dtype, np.float64) if _is_inexact(x) else x.dtype
        x, right = x.astype(wide), right.astype(wide)
        finite = np.abs(right)[np.isfinite(right)]
        allowed = bound * finite.max(initial=0) if _is_inexact(x) else 0
        with np.errstate(invalid="ignore"):  # inf - inf
            same = (x == right) | (np.abs(x - right) <= allowed) | (np.isnan(x) & np.isnan(right))
        if not same.all():
            at = tuple(map(int, np.argwhere(~same)[0]))
            raise AssertionError(
                f"ringcoll.debug.same_by_all: by {name!r}, {what}{jax.tree_util.keystr(path)} "
                f"differs from that by 'lax': {x[at]} at {list(at)}, in place of {right[at]}"
            )
