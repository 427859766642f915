"""A call with all that may vary: where it runs, on what, how, and what is right."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import prod
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case, Teams, teams_of
from jax import lax
from jax.sharding import Mesh
from sent import price
from support import make_mesh

from ringcoll import Table, Tree, algorithms
from ringcoll.choose.table import TableRow
from ringcoll.collectives.sums import ByTree, Exchanged
from ringcoll.schedules.registry import LAX

SUMS = ("psum", "pmean", "psum_scatter")
ALL_REDUCES = ("psum", "pmean", "pmax", "pmin", "pbroadcast")
PERMUTES = ("ppermute", "pshuffle")
#: The collective that sends the gradient, if it is a different one.
BACK = {"all_gather": "psum_scatter", "psum_scatter": "all_gather", "pbroadcast": "psum"}
#: Ranks in an order that no mesh has.
SHUFFLED = (3, 0, 5, 6, 2, 7, 4, 1)
#: Meshes of two axes, by the number of ranks.
TWO_AXES = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2), 5: (1, 5), 6: (2, 3), 8: (2, 4)}
#: The axes of a call, in its order, on a mesh of x or of x and y.
AXES = {"x": ("x",), "xy": ("x", "y"), "yx": ("y", "x"), "y of two": ("y",), "none": ()}

#: What "auto" picks here. No two collectives do the same, nor do all dtypes of one.
AUTO = Table(
    (
        TableRow("all_gather", "cpu", "lax", dtypes=("bfloat16", "float8")),
        TableRow("all_gather", "cpu", "two_ended"),
        TableRow("psum_scatter", "cpu", "bruck", dtypes=("bfloat16", "float8", "int")),
        TableRow("psum_scatter", "cpu", "ring"),
        TableRow("psum", "cpu", "ring", dtypes=("bfloat16", "float8")),
        TableRow("psum", "cpu", "recursive_doubling", dtypes=("float", "int")),
        TableRow("pbroadcast", "cpu", "direct"),
        TableRow("all_to_all", "cpu", "pairwise", dtypes=("float32",)),
    )
)


def _of_the_last(f: Callable, x: Any) -> Any:
    """Each element of a batch that is the last dimension of operands and results."""

    def moved(tree: Any, source: int, to: int) -> Any:
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, source, to), tree)

    return moved(jax.vmap(f, -1, -1)(moved(x, 0, -1)), -1, 0)


#: From a function of one operand, and an operand, to the result.
MODES: dict[str, Callable] = {
    "plain": lambda f, x: f(x),
    "vmap": _of_the_last,
    "vmap of x": lambda f, x: jax.vmap(f, axis_name="x")(x),
    "vmap of y": lambda f, x: jax.vmap(f, axis_name="y")(x),
    "scan": lambda f, x: lax.map(f, x),
    "remat": lambda f, x: jax.checkpoint(f)(x),
}
#: The modes in which the operand is a batch of two.
BATCHED = ("vmap", "scan")
OF_THE_AXIS = ("vmap of x", "vmap of y")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call: a row of a covering array.

    Attributes:
        case: the function and lax's arguments of it.
        ranks: how many run it together (in a group).
        axes: one of `AXES`.
        groups: "none", "even" (consecutive), "scattered" or "uneven".
        dtype: of the operand; "key", or "mixed": a tree of several dtypes.
        size: "usual" or "zero".
        algorithm: a name, or one of one's own (see `given`); None: the function takes none.
        accumulate, order: ours; None: not given.
        mode: one of `MODES`.
        derivative: "forward" or "reverse".
        check_vma: whether types are checked.
        program: "usual", "loops" (no long stretch is unrolled) or "x64" (`jax_enable_x64`).
    """

    case: Case
    ranks: int
    axes: str = "x"
    groups: str = "none"
    dtype: str = "float32"
    size: str = "usual"
    algorithm: str | None = None
    accumulate: str | None = None
    order: Tree | None = None
    mode: str = "plain"
    derivative: str = "reverse"
    check_vma: bool = False
    program: str = "usual"

    def __str__(self) -> str:
        shown = (f"{field.name}={getattr(self, field.name)!s}" for field in fields(self))
        return f"Call({', '.join(shown)})"

    # Where it runs.

    @property
    def members(self) -> list[list[int]] | None:
        """The groups."""
        if self.groups == "none":
            return None
        count = self.ranks if self.groups == "uneven" or 2 * self.ranks > 8 else 2 * self.ranks
        order = [*range(count)] if self.groups == "even" else [r for r in SHUFFLED if r < count]
        if self.groups == "uneven":
            return [order[:1], order[1:]]
        return [order[i : i + self.ranks] for i in range(0, count, self.ranks)]

    @property
    def mesh(self) -> tuple[int, ...]:
        """The sizes of the axes; one of them may be the axis of a vmap."""
        n = sum(map(len, self.members)) if self.members else self.ranks
        if self.axes == "none":
            return (2,)
        if self.axes == "x":
            return (n,)
        return (2 if n <= 4 else 1, n) if self.axes == "y of two" else TWO_AXES[n]

    @property
    def vmapped(self) -> int:
        """The size of the axis that is a vmap; it is the last of the mesh."""
        return self.mesh[-1] if self.mode in OF_THE_AXIS else 1

    def make_mesh(self) -> Mesh:
        sizes = self.mesh[:-1] if self.mode in OF_THE_AXIS else self.mesh
        return make_mesh(*sizes) if sizes else make_mesh(1, names="w")

    @property
    def teams(self) -> Teams:
        """The ranks that call it together."""
        return teams_of(self.mesh, AXES[self.axes], self.members)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes on which the algorithm runs."""
        if self.members:
            return (len(self.members[0]),)
        sizes = tuple(self.mesh["xy".index(axis)] for axis in AXES[self.axes])
        if self.algorithm in ("own function", "own schedule", "own stages"):
            return sizes
        return tuple(n for n in sizes if n > 1) or (1,)

    # What it is given.

    def options(self) -> dict[str, Any]:
        """Our keyword arguments, and the groups."""
        every = {
            "axis_index_groups": self.members,
            "algorithm": self.given(),
            "accumulate_dtype": self.accumulate,
            "order": self.order,
        }
        return {name: value for name, value in every.items() if value is not None}

    def given(self) -> Any:
        """The value of `algorithm`."""
        collective, n = self.case.collective, prod(self.shape)
        exchanges = collective == "all_to_all"
        if self.algorithm == "own function":
            return algorithms.pairwise if exchanges else partial(algorithms.ring, direction=-1)
        if self.algorithm == "own schedule":  # of one digit, whatever the axes are
            return algorithms.bruck_all_to_all(n) if exchanges else algorithms.two_ended(n)
        if self.algorithm == "own stages":
            return algorithms.recursive_doubling_all_reduce(n)
        if self.algorithm == "own table":
            row = "psum" if collective in ("pmean", "pmax", "pmin") else collective
            return Table((TableRow(row, "cpu", algorithms.names(row)[-1]),))
        return self.algorithm

    def leaves(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtypes and shapes of the leaves of one rank's operand, by name."""
        shape = self.case.shape(self.ranks)
        if self.size == "zero":
            given = self.case.options(self.ranks).values()
            named = {value % len(shape) for value in given if type(value) is int}
            free = max(d for d in range(len(shape)) if d not in named)
            shape = (*shape[:free], 0, *shape[free + 1 :])
        if self.dtype != "mixed":
            return {"x": (self.dtype, shape)}
        dtypes = {"a": "bfloat16", "b": "int32", "c": "bool", "d": "bfloat16"}
        shapes = {"a": shape, "b": shape, "c": shape}
        if self.case.name in (*ALL_REDUCES, *PERMUTES):  # there, leaves of one dtype are joined
            shapes |= {"b": (5,), "c": (), "d": (5,)}
        if self.case.name == "psum_scatter" or self.axes == "none":
            del shapes["c"]  # lax adds no booleans, or does not count them
        return {name: (dtypes[name], shapes[name]) for name in shapes}

    def operands(self, seed: str) -> dict[str, np.ndarray]:
        """All ranks' leaves, `[ranks, *shape]`; with a batch `[ranks, 2, *shape]`."""
        before = (prod(self.mesh), *((2,) if self.mode in BATCHED else ()))
        return {
            name: numbers(
                (*before, *shape),
                dtype,
                "normal" if self.order else self.how(dtype),
                f"{seed} {name} {self.case}",
            )
            for name, (dtype, shape) in self.leaves().items()
        }

    @property
    def is_added_by_jax(self) -> bool:
        """Whether JAX itself adds cotangents, in their own dtype: those of a replicated result."""
        is_replicated = self.case.name in ("psum", "pmean") or "to" in self.case.options(1)
        return self.mode in OF_THE_AXIS or (self.check_vma and is_replicated)

    def how(self, dtype: str) -> str:
        """The data for sums that JAX may add: see `numbers`."""
        if self.is_added_by_jax or dtype == "key":
            return "exact"
        if self.order:
            return "normal"
        wide = self.accumulate or dtype
        return "exact wide" if jnp.dtype(wide).itemsize > jnp.dtype(dtype).itemsize else "exact"

    def is_differentiated(self, name: str) -> bool:
        """Whether a leaf has a derivative."""
        dtype = self.leaves()[name][0]
        inexact = dtype != "key" and jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)
        return inexact and self.case.name not in ("pmax", "pmin")

    # What is right.

    def right(self, of: Callable, x: np.ndarray) -> np.ndarray:
        """All ranks' right results of `case.expected` or `case.gradient`, of each of a batch."""
        if self.axes == "none" and self.case.name != "pmean":
            return x  # as in lax, which then adds no dimension
        wide = x
        if self.accumulate and jnp.issubdtype(x.dtype, jnp.floating):
            wide = x.astype(self.accumulate)
        name = self.case.name
        name = BACK.get(name, name) if of == self.case.gradient else name
        if self.order and name in SUMS and jnp.issubdtype(x.dtype, jnp.inexact):
            wide = wide.copy()
            for team in self.teams:  # one rank has their sum, and the others nothing
                wide[team] = [of_tree(wide[team]), *(0 * wide[team[1:]])]
        if self.mode not in BATCHED:
            result = of(wide, self.teams)
        else:
            result = np.stack([of(each, self.teams) for each in np.moveaxis(wide, 1, 0)], 1)
        return result if wide is x else result.astype(x.dtype)

    def picked(self, collective: str, dtype: str) -> Any:
        """The algorithm by which a collective of this call runs on operands of this dtype."""
        given = self.given()
        table = AUTO if given == "auto" else given
        if not isinstance(table, Table):
            return given
        row = "psum" if collective in ("pmean", "pmax", "pmin") else collective
        picked = table.pick(row, "cpu", prod(self.shape), 0, dtype, jax.__version__)
        by_tree = ByTree(order=self.order) if self.order and collective in SUMS else Exchanged()
        return LAX if by_tree.refusal(picked, collective, self.shape) else picked

    def price(self, names: Sequence[str], back: bool = False) -> Counter[str]:
        """The messages and bytes for some leaves: forward, or of the transpose."""
        collective = self.case.collective
        if back:
            collective = BACK.get(collective, collective)
        batch = 2 if self.mode == "vmap" else 1
        packs: dict[str, tuple[str, int]] = {}
        for name in names:
            dtype, shape = self.leaves()[name]
            if dtype == "bool" and collective in ("psum", "pmean"):
                dtype = "int32"  # in which they are counted
            place = dtype if collective in ALL_REDUCES else name  # there, leaves are joined
            packs[place] = dtype, packs.get(place, (dtype, 0))[1] + batch * prod(shape)
        paid = Counter(messages=0, bytes=0)
        if self.axes == "none":
            return paid
        for dtype, size in packs.values():
            itemsize = 4 if dtype == "key" else jnp.dtype(dtype).itemsize
            size = 2 * size if dtype == "key" else size
            if collective in PERMUTES:
                paid.update(messages=1, bytes=size * itemsize)
                continue
            wide, parts = None, 1
            if dtype == "complex64" and collective == "pbroadcast":
                parts = 2  # its bits, of real and imaginary parts
            is_float = dtype != "key" and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
            if self.accumulate and collective in SUMS and is_float:
                wide = jnp.dtype(self.accumulate).itemsize
                # A mean is rounded after the division.
                itemsize = wide if collective == "pmean" else itemsize
            if back and collective != self.case.collective:  # the operand has the result's size
                n = prod(self.shape)
                size = {"psum_scatter": size * n, "all_gather": size // n}.get(collective, size)
            by, sent = self.picked(collective, dtype), collective
            if by == "ring" != self.algorithm and sent in ALL_REDUCES and is_float and itemsize < 4:
                sent = "psum_scatter"  # after it there is a built-in
            for _ in range(parts):
                paid.update(price(sent, by, self.shape, size, itemsize // parts, wide))
        return paid


def of_tree(x: np.ndarray) -> np.ndarray:
    """The sum of rows, neighbours first, rounded to their dtype each time."""
    while len(x) > 1:
        x = x[::2] + x[1::2]
    return x[0]


def numbers(shape: Sequence[int], dtype: str, how: str, seed: str) -> np.ndarray:
    """Data of all ranks; integers have any bits, and a key is its two numbers, as one uint64.

    Floats are "exact": whole numbers whose sums over 8 ranks are so; "exact wide": only in a wider
    dtype; or "normal": their sums show in which order they were added.
    """
    rng = np.random.default_rng(crc32(seed.encode()))
    if dtype == "complex64":
        real, imaginary = (numbers(shape, "float32", how, seed + part) for part in "ri")
        return (real + 1j * imaginary).astype(dtype)
    kind = np.dtype(np.uint64) if dtype == "key" else jnp.dtype(dtype)
    if kind.kind in "iub":
        bits = rng.integers(0, 256, (*shape, kind.itemsize), np.uint8)
        return (bits % 2 == 1)[..., 0] if dtype == "bool" else bits.view(kind)[..., 0]
    if how == "normal":
        return rng.standard_normal(shape, np.float32).astype(kind)
    most = 2 ** (int(jnp.finfo(kind).nmant) + 1)
    most = most if how == "exact wide" else min(most // 8, 1000)
    return rng.integers(-most, most, shape, endpoint=True).astype(kind)
