"""The tables of the calls of matmuls: their arguments, the values of each, and what cannot be."""

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from covering import Case, any_of, covering
from jax import lax
from matmul_forms import FORMS, SHARDED
from support import exists

from ringcoll.choose.plan import Late, Plan
from ringcoll.collectives import choice
from ringcoll.matmuls import plans
from ringcoll.runtime import run as running
from ringcoll.schedules.schedule import Move, Schedule

F32, BF16, F8, C64 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.complex64
I8, I32 = jnp.int8, jnp.int32


def backwards(*shape: int) -> Schedule:
    """An algorithm of one's own: a ring in the other direction."""
    n = prod(shape)
    return Schedule(shape, tuple((Move(-1, (-t % n,)),) for t in range(n - 1)))


#: Sizes of the mesh, and axes: one, two in both orders, one of two.
RANKS = [
    *(((n,), "x") for n in (1, 2, 3, 5, 8)),
    *(((2, 3), ("x", "y")), ((2, 2), ("y", "x")), ((2, 3), "y")),
]
#: How a call is transformed; whether the first factor has a batch, and whether the others have.
TRANSFORMS = {
    "none": (lambda f: f, False, False),
    "remat": (jax.checkpoint, False, False),
    "vmap of the first": (lambda f: lambda x, *w: jax.vmap(lambda x: f(x, *w))(x), True, False),
    "vmap of the others": (lambda f: lambda x, *w: jax.vmap(lambda w: f(x, *w))(w), False, True),
    "vmap of all": (jax.vmap, True, True),
    "scan over the first": (lambda f: lambda x, *w: lax.map(lambda x: f(x, *w), x), True, False),
    "scan over all": (lambda f: lambda *of: lax.map(lambda of: f(*of), of), True, True),
}


HALVES = "bidirectional_ring"


#: Forms that "auto" or the engine choose elsewhere: what to replace by what.
PATHS: dict[str, dict[tuple[Any, str], Any]] = {
    "usual": {},
    "loops": {(running, "UNROLL_UP_TO"): 0},
    "late products": {  # the last of several, computed from the whole gathered factor
        (choice, "hides"): lambda kind: True,
        (plans, "of_gather"): lambda gather, *_: [
            Plan(HALVES, form=Late((len(gather.products) - 1,)))
        ],
        (plans, "of_scatter"): lambda *_: [Plan(HALVES)],
    },
}
ONLY_AUTO = ("late products",)

#: The arguments of every call, and the values of each.
COMMON: dict[str, list[Any]] = {
    "ranks": RANKS,
    "algorithm": [
        *("auto", "lax", "ring", "bidirectional_ring", "two_ended"),
        *("recursive_doubling", "hamiltonian", backwards),
    ],
    # Of the factor that is gathered (or x), and of the other one.
    "dtypes": [
        *((F32, F32), (BF16, BF16), (BF16, F32), (F32, BF16), (F8, F8)),
        *((BF16, C64), (I8, I32)),
    ],
    "transform": [*TRANSFORMS],
    "length": [3, 1, 0],
    "precision": [None, "highest"],
    "preferred": [None, F32, BF16],
    "accumulate": [None, F32],
    "same": [None, "first", "others"],  # which factors are the same on every rank
    "check_vma": [True, False],
    "gradients": [True, False, False],  # which take most of the time
}
GATHERS = COMMON | {
    "form": [
        *("leading dimensions", "contraction gathered", "weight gathered"),
        *("columns of the weight gathered", "a batch of weights gathered"),
        *("sharded rows gathered", "sharded weight gathered"),
    ],
    "second": [None, F32, BF16],  # a second factor that shares the gather
    "residuals": ["save", "regather"],
    "path": ["usual", "loops", *ONLY_AUTO],
}
SUMS = COMMON | {
    "form": [name for name, form in (FORMS | SHARDED).items() if form.travels in ("y", "sum")],
    "path": ["usual", "loops", *ONLY_AUTO],
}
TABLES = {"gathers": GATHERS, "sums": SUMS}
#: More values, for the exhaustive tier.
MORE_OF_ALL: dict[str, list[Any]] = {
    "ranks": [((4,), "x"), ((4, 2), ("y", "x"))],
    "algorithm": ["bruck", "direct", "torus", "a schedule"],
    "dtypes": [(C64, F32), (I32, I8), (I8, I8), (F32, I32)],
    "preferred": [I32],
}
MORE = {
    "gathers": MORE_OF_ALL | {"form": ["rows gathered", "a batch gathered"]},
    "sums": MORE_OF_ALL,
}


def is_float(dtype: Any) -> bool:
    return dtype in (F32, BF16)


def is_given(algorithm: Any) -> bool:
    return algorithm in (backwards, "a schedule")


def runs_on(algorithm: Any, shape: tuple[int, ...], axes: Any) -> bool:
    sizes = sizes_of(shape, axes)
    if is_given(algorithm):
        return len(sizes) == 1
    return algorithm in ("auto", "lax") or exists("all_gather", algorithm, sizes)


def sizes_of(shape: tuple[int, ...], axes: Any) -> tuple[int, ...]:
    return tuple(shape["xyz".index(axis)] for axis in axes)


def adds_cotangents(transform: str) -> bool:
    """Whether JAX adds the gradients of one factor, each of which is rounded."""
    _, *batched = TRANSFORMS[transform]
    return batched[0] != batched[1]


#: What cannot be, by the names of some factors.
FORBIDDEN: list[Callable[..., Any]] = [
    lambda ranks, algorithm: not runs_on(algorithm, *ranks),
    lambda form, second: "sharded" in form and second,
    lambda path, algorithm: path in ONLY_AUTO and algorithm != "auto",
    lambda dtypes, preferred: is_float(preferred) and not all(map(is_float, dtypes)),
    lambda dtypes, preferred: preferred == I32 and dtypes != (I8, I8),
    lambda second, preferred: second and preferred == I32,
    lambda dtypes, second: second and dtypes[0] in (F8, I8, I32),
    lambda dtypes, accumulate: accumulate and C64 in dtypes,  # it cannot hold them
    # XLA:CPU aborts at the sum of such a gradient over ranks.
    lambda dtypes, length, gradients: C64 in dtypes and not length and gradients,
    # Sums in float8 are exact only if they are rounded once.
    lambda dtypes, accumulate: F8 in dtypes and not accumulate,
    lambda dtypes, transform: F8 in dtypes and adds_cotangents(transform),
    lambda dtypes, same: F8 in dtypes and same,
]


#: Cases that were wrong once.
WERE_WRONG = [
    {  # the gradient of w, which is wider than the result, was rounded as the result is
        **{"form": "sum on every rank", "ranks": ((3,), "x"), "algorithm": "ring"},
        **{"dtypes": (BF16, F32), "preferred": BF16, "accumulate": F32, "precision": None},
        **{"path": "usual", "transform": "none", "length": 3, "same": None},
        **{"check_vma": True, "gradients": True},
    },
    {  # XLA:CPU crashed when a loop and a collective waited for complex numbers
        **{"form": "leading dimensions", "ranks": ((2,), "x"), "algorithm": "bidirectional_ring"},
        **{"dtypes": (C64, F32), "preferred": None, "accumulate": None, "precision": None},
        **{"path": "usual", "transform": "scan over all", "length": 3, "same": None},
        **{"check_vma": True, "gradients": True, "second": None, "residuals": "save"},
    },
]
#: What takes seconds to compile, and so is left to the exhaustive tier.
SLOW: list[Callable[..., Any]] = [
    lambda ranks, gradients, transform: prod(ranks[0]) > 3 and gradients and transform != "none",
    lambda ranks, gradients, path: prod(ranks[0]) > 4 and gradients and path == "loops",
]


@lru_cache
def cases_of(table: str, seed: int) -> list[Case]:
    """The cases of a table; more values, and all that is slow, if the seed is not 0."""
    rules = FORBIDDEN if seed else FORBIDDEN + SLOW
    more = MORE[table] if seed else {}
    factors = {name: values + more.get(name, []) for name, values in TABLES[table].items()}
    return covering(factors, any_of(rules), seed)
