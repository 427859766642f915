"""From a public call to primitives: check the arguments, and bind a primitive for every leaf.

When a primitive is bound, it asks lax for the type of its result, before anything is sent. An error
of lax is raised again with the same exception type and lax's own words. Calls that only lax can
handle go to lax (see `Call._is_for_lax`).
Small leaves of a pytree are bound together, so that they share messages.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from ringcoll.collectives import choice, wires
from ringcoll.collectives.axes import AxisName, Grouped, Groups, as_tuples, axes_of, check_groups
from ringcoll.collectives.by_schedule import ScheduledCollective
from ringcoll.collectives.refusals import REFUSALS, cure_of, kind_of
from ringcoll.collectives.table import LAX, Algorithm, Table
from ringcoll.collectives.tree_order import leaves_of_tree
from ringcoll.runtime.joining import is_small
from ringcoll.runtime.primitive import Collective
from ringcoll.runtime.value_types import typed_alike, varying

Pytree = Any
#: The functions that need no communication for constants.
_OF_CONSTANTS = ("psum", "pmean")
#: The leaves of the tree of `order="tree"`, if the caller does not say.
LEAVES = 8
T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One call of a public function as the user wrote it, without its operand.

    Attributes:
        name: the name of the function.
        axis_name, groups, algorithm, accumulate_dtype: as the user gave them.
        said: the other arguments, by name.
        operands: the text for the operands in error messages.
        tree: `order` and `leaves`, as the user gave them.
        wire: what messages hold, as the user gave it.
        axes, grouped: the axes and the groups, as tuples.
    """

    name: str
    axis_name: AxisName
    groups: Groups = None
    algorithm: Algorithm = "auto"
    accumulate_dtype: DTypeLike | None = None
    said: Mapping[str, Any] = field(default_factory=dict)
    operands: str = "x"
    tree: tuple[str | None, int] = (None, LEAVES)
    wire: wires.WireLike | None = None
    axes: tuple[Hashable, ...] = field(init=False)
    grouped: Grouped | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", axes_of(self.axis_name))
        if self.groups is not None:  # read groups only once: they may be iterators
            object.__setattr__(self, "grouped", self.ask(as_tuples, self.groups))

    def each(
        self,
        x: Pytree,
        collective: Collective,
        dims: Sequence[str] = (),
        *,
        is_only_lax_s: bool = False,
    ) -> Pytree:
        """The results for every leaf: by ringcoll, or by lax if only lax can do it.

        Args:
            x: a pytree.
            collective: the collective of this call, still without the algorithm and the dtype of
                sums.
            dims: the names of the arguments that are dimensions; negative dimensions count from
                the last dimension of each leaf.
            is_only_lax_s: whether only lax can do it, for any leaf.
        """
        leaves, tree = jax.tree.flatten(x)
        if self.grouped is not None:
            self.ask(check_groups, self.grouped, self.ask(self.rank_count))
        # For lax, the axes as the user wrote them; a primitive is bound with a tuple of axes.
        as_written: Any = self.axis_name
        collective = replace(collective, axes=as_written)
        every = [collective] * len(leaves)
        if dims:
            added = collective.stacks and not collective.tiled
            ndims = [self.ask(jax.typeof, leaf).ndim + added for leaf in leaves]
            of_leaves = [tuple(self.integer(name, ndim) for name in dims) for ndim in ndims]
            every = [replace(collective, dims=of_leaf) for of_leaf in of_leaves]
        try:
            done = self._done(leaves, every, is_only_lax_s)
        except (*REFUSALS, AssertionError):  # if lax refuses the call too, raise lax's error
            self._ask_lax(leaves, every)
            raise
        return jax.tree.unflatten(tree, done)

    def together(self, xs: Sequence[Any], collective: ScheduledCollective) -> Array:
        """The result of a collective whose operands have different roles.

        lax is asked before anything is sent. If only lax can do the call, lax does it.
        """
        if self.grouped is not None:
            self.ask(check_groups, self.grouped, self.ask(self.rank_count))
        if any(self._is_for_lax(x) for x in xs):
            return self.ask(collective.by_lax, *xs)
        call = self.algorithm, collective.collective, self.axes, self.grouped
        collective = replace(collective, algorithm=self.ask(choice.settled, *call))
        if self.wire is not None:
            self.ask(wires.check_operands, xs[:1], [False])
            collective = replace(collective, wire=self.ask(wires.settled, self.wire))
        return self.ask(collective, *typed_alike(list(map(jnp.asarray, xs)), self.axes))[0]

    def ask_lax(self, xs: Sequence[Any], collective: Collective) -> None:
        """Refuse operands with different roles if lax refuses them."""
        as_written: Any = self.axis_name
        avals = [self.ask(jax.typeof, x) for x in xs]
        self.ask(self._let_lax_type, replace(collective, axes=as_written), *avals)

    def _done(
        self, leaves: Sequence[Any], every: Sequence[Collective], is_only_lax_s: bool
    ) -> list[Any]:
        """The results of all leaves. Nothing is sent before all leaves are known to be right.

        For a single leaf, binding the primitive asks lax.
        """
        if len(leaves) > 1 or isinstance(self.axis_name, list):  # lax may refuse a list of axes
            self._ask_lax(leaves, every)
        settings: dict[str, Any] = {"axes": self.axes}
        dtypes = [self.ask(jax.typeof, leaf).dtype for leaf in leaves]
        if self.accumulate_dtype is not None:
            settings["accumulate_dtype"] = self.wide(*dtypes)
        in_order = None if self.tree[0] is None else self.tree_leaves()
        if in_order is not None and isinstance(every[0], ScheduledCollective):
            settings |= dict.fromkeys(every[0].in_order, in_order)
        for_lax = [is_only_lax_s or self._is_for_lax(leaf) for leaf in leaves]
        if not all(for_lax) and isinstance(every[0], ScheduledCollective):
            call = self.algorithm, every[0].collective, self.axes, self.grouped
            settings["algorithm"] = self.ask(choice.settled, *call, in_order)
        if self.wire is not None:
            settings["wire"] = self.ask(wires.settled, self.wire)
            self.ask(wires.check_operands, leaves, for_lax)
        done: list[Any] = []
        together: dict[Hashable, list[int]] = defaultdict(list)
        for i, (leaf, collective) in enumerate(zip(leaves, every, strict=True)):
            if for_lax[i]:
                done.append(self._by_lax(leaf, collective))
                continue
            x = jnp.asarray(leaf)
            counted = x.astype(jnp.int32) if collective.counts and x.dtype == bool else x
            done.append(varying(counted, self.axes))
            if len(leaves) == 1 and jax.typeof(done[i]) != jax.typeof(leaf):
                self._ask_lax(leaves, every)  # it may refuse what is the same on all ranks
            # With a wire, leaves do not share messages: in one message, they would share scales.
            joins = collective.joins and self.wire is None and is_small(done[i])
            together[done[i].dtype if joins else i].append(i)
        for members in together.values():
            collective = replace(every[members[0]], **settings)  # joined ones have no dims
            if jnp.issubdtype(done[members[0]].dtype, jax.dtypes.prng_key):
                done[members[0]] = _of_key(collective, done[members[0]])
                continue
            for i, y in zip(members, collective(*(done[i] for i in members)), strict=True):
                done[i] = y
        return done

    def refusal(self, kind: type[Exception], words: str, cure: str = "") -> Exception:
        """The exception to raise; it names the call, the wrong value and the cure."""
        groups = {} if self.groups is None else {"axis_index_groups": self.groups}
        tree = {} if self.tree[0] is None else {"order": self.tree[0], "leaves": self.tree[1]}
        args = {"axis_name": self.axis_name, **self.said, **groups, **tree}
        said = [self.operands, *(f"{name}={value!r}" for name, value in args.items())]
        call = ", ".join(filter(None, said))  # some functions have no operand
        cure = cure or cure_of(words)
        words = words or f"not supported by jax.lax.{self.name}"
        if "{n}" in cure:
            n = len(self.grouped[0]) if self.grouped else self.rank_count()
            cure = cure.format(n=n)
        if "{mesh}" in cure:
            mesh = jax.sharding.get_abstract_mesh().axis_names
            cure = cure.format(mesh=", ".join(map(repr, mesh)) or "none")
        return kind(f"ringcoll.{self.name}({call}): {words}" + (f"; {cure}" if cure else ""))

    def integer(self, name: str, ndim: int | None = None) -> int:
        """The value of an argument that must be a whole number, or a refusal.

        With `ndim` it is one of `ndim` dimensions, and is returned as a number from 0.
        """
        value = self.said[name]
        try:
            number = operator.index(value)
        except TypeError as error:
            words = f"{name}={value!r} is not an integer"
            raise self.refusal(TypeError, words, "pass a Python int") from error
        if ndim is None:
            return number
        if not -ndim <= number < ndim:
            words = f"{name}: axis {number} is out of bounds for array of dimension {ndim}"
            raise self.refusal(ValueError, words)
        return number % ndim

    def ask(self, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)`; an exception of lax is raised again as a refusal of this call."""
        if len(set(self.axes)) < len(self.axes):  # lax may abort the process instead of raising
            raise self.refusal(ValueError, "repeated axis in axis_name", "name each axis once")
        try:
            return function(*args)
        except REFUSALS as error:
            kind = kind_of(error)
            unsupported = kind is NotImplementedError and self.groups is not None  # typed groups
            cure = "pass check_vma=False to jax.shard_map" if unsupported else ""
            raise self.refusal(kind, str(error), cure) from error

    def _ask_lax(self, leaves: Sequence[Any], every: Sequence[Collective]) -> None:
        """Refuse leaves that lax refuses. For each type of leaves, lax is asked only once."""
        types = {
            (collective.dims, self.ask(jax.typeof, leaf)): collective
            for leaf, collective in zip(leaves, every, strict=True)
            if self.name not in _OF_CONSTANTS or isinstance(leaf, jax.core.Tracer)
        }
        for (_, aval), collective in types.items():
            self.ask(self._let_lax_type, collective, aval)

    def _let_lax_type(self, collective: Collective, *avals: Any) -> None:
        try:
            jax.make_jaxpr(collective.by_lax)(*avals)
        except AssertionError:  # an axis is not bound; the error has no message
            for axis in self.axes:
                lax.axis_size(axis)  # raises one with a message
            raise

    def wide(self, *dtypes: Any) -> np.dtype | None:
        """The dtype of partial sums, or None for that of the operands.

        It is refused if it cannot hold every value of `dtypes`.
        """
        if self.accumulate_dtype is None:
            return None
        try:
            wide = jnp.dtype(self.accumulate_dtype)
        except TypeError as error:
            words = f"accumulate_dtype={self.accumulate_dtype!r} is not a dtype"
            raise self.refusal(TypeError, words, "pass one such as jnp.float32") from error
        for dtype in dtypes:
            if jnp.issubdtype(dtype, jnp.inexact) and not _holds(wide, dtype):
                words = f"accumulate_dtype={wide.name} cannot hold every {dtype.name}"
                raise self.refusal(ValueError, words, "pass one with as many digits and exponents")
        return wide

    def tree_leaves(self) -> int | None:
        """The leaves of the tree by which floats are added; None if any order will do."""
        if self.tree[0] is None:
            return None
        if any(isinstance(axis, int) for axis in self.axes) or not self.axes:
            words = f"order='tree' over {self.axis_name!r}"
            raise self.refusal(ValueError, words, "name an axis of the mesh or of a vmap")
        if self.grouped and len(set(map(len, self.grouped))) > 1:
            words = "order='tree' needs axis_index_groups of one size"
            raise self.refusal(ValueError, words, "pass groups of one size")
        n = len(self.grouped[0]) if self.grouped else self.ask(self.rank_count)
        return self.ask(leaves_of_tree, *self.tree, n, self.wire)

    def _is_for_lax(self, leaf: Any) -> bool:
        """Whether only lax can do it, or lax need not send; `ringcoll.lax` lists these calls."""
        if self.name in _OF_CONSTANTS and not isinstance(leaf, jax.core.Tracer):
            return True
        mat = getattr(jax.typeof(leaf), "mat", None)
        if mat is not None and (mat.unreduced or mat.reduced):  # only lax handles these types
            return True
        if not self.axes or any(isinstance(axis, int) for axis in self.axes):
            return True
        if self.grouped is None or len(set(map(len, self.grouped))) <= 1:
            return False
        if not isinstance(self.algorithm, Table) and self.algorithm not in ("auto", LAX):
            words = f"algorithm={self.algorithm!r} needs axis_index_groups of one size"
            raise self.refusal(ValueError, words, "pass algorithm='lax', or groups of one size")
        return True

    def _by_lax(self, leaf: Any, collective: Collective) -> Any:
        dtype = jax.typeof(leaf).dtype
        if self.accumulate_dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            return self.ask(collective.by_lax, leaf)
        return self.ask(collective.by_lax, jnp.astype(leaf, self.accumulate_dtype)).astype(dtype)

    def rank_count(self) -> int:
        """How many ranks there are over the axes."""
        return math.prod(lax.axis_size(axis) for axis in self.axes)


def _holds(wide: Any, dtype: Any) -> bool:
    """Whether every value of `dtype`, floating or complex, is a value of `wide`."""
    if not jnp.issubdtype(wide, jnp.inexact):
        return False
    if jnp.issubdtype(wide, jnp.complexfloating) != jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    w, d = jnp.finfo(wide), jnp.finfo(dtype)
    return w.nmant >= d.nmant and w.maxexp >= d.maxexp and w.minexp <= d.minexp


def _of_key(collective: Collective, key: Array) -> Array:
    """The collective for a random key: its numbers are sent in its place."""
    (numbers,) = collective(jax.random.key_data(key))
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(key))
