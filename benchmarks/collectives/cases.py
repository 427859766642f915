"""The table of the collectives: a row describes one of them to the benchmarks.

Sizes are those of nccl-tests. `count` is the count in a call of NCCL: the elements of one block if
blocks are gathered, scattered or exchanged, else of the whole vector. `size` is the bytes of a
rank's operand or result, whichever is larger. So the operand of `all_gather` has 1/n of its size,
and the operand of any other collective has all of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax as jax_lax

from benchmarks.collectives import ragged, references
from ringcoll import Tree
from ringcoll import lax as our_lax
from ringcoll.algorithms import COLLECTIVES, build, names
from ringcoll.choose.table import runs
from ringcoll.costs.wire import ENCODED
from ringcoll.schedules.registry import LAX, ScheduleLike
from ringcoll.schedules.tree import balanced_algorithms

AXIS = "x"
TREE = "tree"
#: The dtypes whose sums are rounded, and that a wire can encode.
ROUNDED_TYPES = ("float32", "bfloat16", "float16")
#: The collectives that have `order=`.
ORDERED = ("psum_scatter", "psum")
#: By default, algorithms of few rounds are timed up to this many bytes.
SMALL = 2**18


@dataclass(frozen=True)
class Case:
    """A collective: its name in jax.lax and in ringcoll, its sizes, its reference, its call.

    Attributes:
        name: the name of the function.
        redop: its reduction, as nccl-tests names it; "" if it has none.
        sends, gets: the operand and the result of one of n ranks, in units of `count` elements.
        busbw: bus bandwidth over algorithm bandwidth on n ranks; from nccl-tests.
        reference: the reference in NumPy, `[n, sends * count] -> [n, gets * count]`, a row for each
            rank.
        call: `(library, x, **how)`: calls the library's function of that name.
        best: the algorithms timed by default: at all sizes, and only at small sizes.
    """

    name: str
    redop: str
    sends: Callable[[int], int]
    gets: Callable[[int], int]
    busbw: Callable[[int], float]
    reference: Callable[[np.ndarray], np.ndarray]
    call: Callable[..., Any]
    best: tuple[str, str]

    def count(self, size: int, itemsize: int, n: int) -> int:
        """The largest count whose size is not above `size`; at least 1."""
        return max(size // (itemsize * max(self.sends(n), self.gets(n))), 1)

    def size(self, count: int, itemsize: int, n: int) -> int:
        """The bytes of a rank's operand or result, whichever is larger."""
        return count * itemsize * max(self.sends(n), self.gets(n))

    def algorithms(self, n: int) -> tuple[str, ...]:
        """The hand-written algorithms that run on n ranks."""
        if self.name not in COLLECTIVES:
            return self.best[:1]
        return tuple(name for name in names(self.name) if exists(self.name, name, n))

    def schedule(self, algorithm: str) -> ScheduleLike:
        """The argument for a name: the name itself, or the schedule of `ring@4x2`."""
        name, shape = on_shape(algorithm)
        return build(self.name, name, shape) if shape else name

    def choices(self, n: int) -> tuple[str, ...]:
        """All algorithms that can be compared with lax on n ranks."""
        if self.name not in COLLECTIVES:
            return self.algorithms(n)
        return ("auto", *self.algorithms(n))

    def with_options(
        self, algorithms: Sequence[str], dtype: Any, n: int, wire: str | None, order: str | None
    ) -> list[str]:
        """The algorithms, and after them their forms with a wire, and in the order of a tree."""
        forms = list(algorithms)
        is_rounded = jnp.dtype(dtype).name in ROUNDED_TYPES
        if wire and is_rounded and self.name in ENCODED:
            forms += (f"{name}:{wire}" for name in dict.fromkeys((LAX, *algorithms)))
        if order and is_rounded and self.name in ORDERED:
            ordered = ("auto", *balanced_algorithms(self.name, (n,)))
            forms += (f"{name}:{order}" for name in algorithms if name in ordered)
            forms.append(f"{LAX}:{order}")
        return forms

    def timed(self, size: int) -> tuple[str, ...]:
        """The algorithms timed by default."""
        return ("auto", *(self.best if size <= SMALL else self.best[:1]))

    def run(self, algorithm: str, x: Array, platform: str) -> Any:
        """Run it in a `shard_map`: by jax.lax, or by an algorithm of ringcoll (see `on_shape`)."""
        if algorithm != LAX:
            name, options = name_and_options(algorithm)
            arguments: dict[str, Any] = dict(options)
            if self.name in COLLECTIVES:
                arguments["algorithm"] = self.schedule(name)
            if "order" in options:
                arguments["order"] = Tree(jax_lax.axis_size(AXIS))
            return self.call(our_lax, x, **arguments)
        # If lax does not have the collective, run what people write instead.
        if self.name == "ragged_all_to_all" and platform == "cpu":
            return jax_lax.all_to_all(x, AXIS, 0, 0, tiled=True)
        if self.name == "pbroadcast" and platform != "gpu":
            mine = jnp.where(jax_lax.axis_index(AXIS) == 0, x, jnp.zeros_like(x))
            return jax_lax.psum(mine, AXIS)
        return self.call(jax_lax, x)


def name_and_options(algorithm: str) -> tuple[str, dict[str, str]]:
    """Split `ring:int8` (messages hold codes) or `lax:tree` into the algorithm and its options."""
    name, _, option = algorithm.partition(":")
    if not option:
        return name, {}
    return name, {"order" if option == TREE else "wire": option}


def on_shape(algorithm: str) -> tuple[str, tuple[int, ...]]:
    """Split `ring@4x2`, the ring on ranks in 4 rows of 2, into name and shape; () if none."""
    name, _, shape = algorithm.partition("@")
    return name, tuple(int(size) for size in shape.split("x")) if shape else ()


def exists(collective: str, algorithm: str, *shape: int) -> bool:
    """Whether a collective can run by an algorithm on axes of these sizes."""
    return algorithm in names(collective) and runs(collective, algorithm, shape)


def _all_reduce(name: str, redop: str) -> Case:
    return Case(
        name,
        redop,
        sends=lambda n: 1,
        gets=lambda n: 1,
        busbw=lambda n: 2 * (n - 1) / n,
        reference=references.REFERENCES[name],
        call=lambda lib, x, **options: getattr(lib, name)(x, AXIS, **options),
        best=("ring", "recursive_doubling"),
    )


CASES = (
    Case(
        "all_gather",
        "",
        sends=lambda n: 1,
        gets=lambda n: n,
        busbw=lambda n: (n - 1) / n,
        reference=partial(references.all_gather, tiled=True),
        call=lambda lib, x, **options: lib.all_gather(x, AXIS, tiled=True, **options),
        best=("ring", "bruck"),
    ),
    Case(
        "psum_scatter",
        "sum",
        sends=lambda n: n,
        gets=lambda n: 1,
        busbw=lambda n: (n - 1) / n,
        reference=partial(references.psum_scatter, tiled=True),
        call=lambda lib, x, **options: lib.psum_scatter(x, AXIS, tiled=True, **options),
        best=("ring", "bruck"),
    ),
    _all_reduce("psum", "sum"),
    _all_reduce("pmax", "max"),
    _all_reduce("pmin", "min"),
    Case(
        "all_to_all",
        "",
        sends=lambda n: n,
        gets=lambda n: n,
        busbw=lambda n: (n - 1) / n,
        reference=partial(references.all_to_all, split_axis=0, concat_axis=0, tiled=True),
        call=lambda lib, x, **options: lib.all_to_all(x, AXIS, 0, 0, tiled=True, **options),
        best=("pairwise", "bruck"),
    ),
    Case(
        "ragged_all_to_all",
        "",
        sends=lambda n: n,
        gets=lambda n: n,
        busbw=lambda n: (n - 1) / n,
        reference=partial(references.all_to_all, split_axis=0, concat_axis=0, tiled=True),
        call=lambda lib, x, **options: _in_equal_slices(lib, x, **options),
        best=("pairwise", "bruck"),
    ),
    Case(
        "pbroadcast",
        "",
        sends=lambda n: 1,
        gets=lambda n: 1,
        busbw=lambda n: 1.0,
        reference=partial(references.pbroadcast, source=0),
        call=lambda lib, x, **options: lib.pbroadcast(x, AXIS, 0, **options),
        best=("ring", "recursive_doubling"),
    ),
    Case(
        "ppermute",
        "",
        sends=lambda n: 1,
        gets=lambda n: 1,
        busbw=lambda n: 1.0,
        reference=lambda x: references.ppermute(x, _to_the_next(len(x))),
        call=lambda lib, x: lib.ppermute(x, AXIS, _to_the_next(jax_lax.axis_size(AXIS))),
        best=("hop", "hop"),
    ),
)


def _in_equal_slices(lib: Any, x: Array, **options: Any) -> Array:
    """Equally many rows for every rank; lax's own function takes no bound on them."""
    n = jax_lax.axis_size(AXIS)
    count = len(x) // n
    if lib is our_lax:
        options["max_send"] = count
    return ragged.call(lib, x, AXIS, [[count] * n] * n, **options)


def _to_the_next(n: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % n) for rank in range(n)]
