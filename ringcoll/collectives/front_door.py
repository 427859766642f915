"""From a public call to primitives: checks the arguments, and binds a primitive for every leaf.

A primitive asks lax for the type of its result when it is bound, before anything is sent. An error
of lax is raised again with the same exception type and lax's own words. Calls that only lax can
handle go to lax (see `Call._is_for_lax`).
Small leaves of a pytree are bound together, so that they share messages.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from ringcoll.collectives import choice
from ringcoll.collectives.axes import AxisName, Grouped, Groups, as_tuples, axes_of, check_groups
from ringcoll.collectives.by_schedule import ScheduledCollective, ranks_of
from ringcoll.collectives.refusals import REFUSALS, cure_of, kind_of
from ringcoll.collectives.table import LAX, Algorithm, Table
from ringcoll.runtime.joining import is_small
from ringcoll.runtime.primitive import Collective
from ringcoll.runtime.value_types import is_unreduced_or_reduced, varying

Pytree = Any
T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One call of a public function, without its operand, as it was written.

    Attributes:
        name: of the function.
        axis_name, groups, algorithm, accumulate_dtype: as the user gave them.
        said: the other arguments, by name.
        operands: the text for the operands in error messages.
        axes, grouped: the axes and the groups, as tuples.
    """

    name: str
    axis_name: AxisName
    groups: Groups = None
    algorithm: Algorithm = "auto"
    accumulate_dtype: DTypeLike | None = None
    said: Mapping[str, Any] = field(default_factory=dict)
    operands: str = "x"
    axes: tuple[Hashable, ...] = field(init=False)
    grouped: Grouped | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", axes_of(self.axis_name))
        if self.groups is not None:  # read once: they may be iterators
            object.__setattr__(self, "grouped", self.ask(as_tuples, self.groups))

    def each(self, x: Pytree, collective: Collective, dims: Sequence[str] = ()) -> Pytree:
        """The collective of every leaf: by ringcoll, or by lax where only lax can.

        Args:
            x: a pytree.
            collective: that of this call, still without the algorithm and the dtype of sums.
            dims: the names of the arguments that are dimensions; negative ones count from each
                leaf's last.
        """
        leaves, tree = jax.tree.flatten(x)
        if self.grouped is not None:
            self.ask(check_groups, self.grouped, self.ask(self.rank_count))
        as_written: Any = self.axis_name  # for lax; a primitive is bound with a tuple of axes
        collective = replace(collective, axes=as_written)
        every = [collective] * len(leaves)
        if dims:
            every = [replace(collective, dims=self._dims(x, collective, dims)) for x in leaves]
        try:
            done = self._done(leaves, every)
        except (*REFUSALS, AssertionError):  # an error of lax comes first
            self._ask_lax(leaves, every)
            raise
        return jax.tree.unflatten(tree, done)

    def _done(self, leaves: Sequence[Any], every: Sequence[Collective]) -> list[Any]:
        """The results of all leaves; nothing is sent before all are known to be right.

        For a single leaf, bound as it was given, the bind itself asks lax.
        """
        if len(leaves) > 1 or isinstance(self.axis_name, list):  # which it may not take
            self._ask_lax(leaves, every)
        for leaf in leaves:
            self.check_accumulation(self.ask(jax.typeof, leaf).dtype)
        for_lax = [self._is_for_lax(leaf, c) for leaf, c in zip(leaves, every, strict=True)]
        settings: dict[str, Any] = {"axes": self.axes}
        if not all(for_lax) and isinstance(every[0], ScheduledCollective):
            settings["algorithm"] = self.settled(every[0].collective)
            settings["accumulate_dtype"] = self.wide
        done: list[Any] = []
        together: dict[Hashable, list[int]] = defaultdict(list)
        for i, (leaf, collective) in enumerate(zip(leaves, every, strict=True)):
            if for_lax[i]:
                done.append(self._by_lax(leaf, collective))
                continue
            done.append(varying(jnp.asarray(leaf), self.axes))
            if len(leaves) == 1 and jax.typeof(done[i]) != jax.typeof(leaf):
                self._ask_lax(leaves, every)  # it may refuse what is the same on all ranks
            together[done[i].dtype if collective.joins and is_small(done[i]) else i].append(i)
        for members in together.values():
            arrays, back = zip(*(_as_numbers(done[i]) for i in members), strict=True)
            collective = replace(every[members[0]], **settings)  # joined ones have no dims
            results = collective.joint(*arrays) if collective.joins else [collective(*arrays)]
            for i, y, to_key in zip(members, results, back, strict=True):
                done[i] = to_key(y)
        return done

    @property
    def wide(self) -> np.dtype | None:
        """The dtype of partial sums, or None for that of the operand."""
        return None if self.accumulate_dtype is None else jnp.dtype(self.accumulate_dtype)

    def settled(self, collective: str) -> Algorithm:
        """The algorithm that was given or, for "auto", the one asked for around the call.

        Raises a refusal if the collective cannot run by it on these ranks.
        """
        shape = ranks_of(self.algorithm, self.axes, self.grouped).shape
        return self.ask(choice.settled, self.algorithm, collective, shape)

    def refusal(self, kind: type[Exception], words: str, cure: str = "") -> Exception:
        """The exception to raise; it names the call, the wrong value and the cure."""
        groups = {} if self.groups is None else {"axis_index_groups": self.groups}
        args = {"axis_name": self.axis_name, **self.said, **groups}
        call = ", ".join([self.operands, *(f"{name}={value!r}" for name, value in args.items())])
        cure = cure or cure_of(words)
        words = words or f"not supported by jax.lax.{self.name}"
        if "{n}" in cure:
            n = len(self.grouped[0]) if self.grouped else self.rank_count()
            cure = cure.format(n=n)
        if "{mesh}" in cure:
            mesh = jax.sharding.get_abstract_mesh().axis_names
            cure = cure.format(mesh=", ".join(map(repr, mesh)) or "none")
        return kind(f"ringcoll.{self.name}({call}): {words}" + (f"; {cure}" if cure else ""))

    def integer(self, name: str) -> int:
        """The value of an argument that has to be a whole number, or a refusal."""
        value = self.said[name]
        try:
            return operator.index(value)
        except TypeError as error:
            words = f"{name}={value!r} is not an integer"
            raise self.refusal(TypeError, words, "pass a Python int") from error

    def _dims(self, leaf: Any, collective: Collective, names: Sequence[str]) -> tuple[int, ...]:
        """The dimensions, counted from 0, or refused."""
        ndim = self.ask(jax.typeof, leaf).ndim + collective.adds_dim
        dims = [self.integer(name) for name in names]
        for name, dim in zip(names, dims, strict=True):
            if not -ndim <= dim < ndim:
                words = f"axis {dim} is out of bounds for array of dimension {ndim}"
                raise self.refusal(ValueError, f"{name}: {words}")
        return tuple(dim % ndim for dim in dims)

    def ask(self, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)`; an exception of lax is raised again as a refusal of this call."""
        if len(set(self.axes)) < len(self.axes):  # lax aborts the process, or raises this
            raise self.refusal(ValueError, "repeated axis in axis_name", "name each axis once")
        try:
            return function(*args)
        except REFUSALS as error:
            kind = kind_of(error)
            unsupported = kind is NotImplementedError and self.groups is not None  # typed groups
            cure = "pass check_vma=False to jax.shard_map" if unsupported else ""
            raise self.refusal(kind, str(error), cure) from error

    def _ask_lax(self, leaves: Sequence[Any], every: Sequence[Collective]) -> None:
        """Refuse what lax refuses; leaves of one type are asked about once."""
        types = {
            (collective.dims, self.ask(jax.typeof, leaf)): collective
            for leaf, collective in zip(leaves, every, strict=True)
            if not self._is_constant(leaf)
        }
        for (_, aval), collective in types.items():
            self.ask(self._let_lax_type, collective, aval)

    def _let_lax_type(self, collective: Collective, aval: Any) -> None:
        try:
            jax.make_jaxpr(collective.by_lax)(aval)
        except AssertionError:  # an axis is not bound; the error has no message
            for axis in self.axes:
                lax.axis_size(axis)  # raises one with a message
            raise

    def check_accumulation(self, dtype: Any) -> None:
        """Refuse an `accumulate_dtype` that cannot hold every value of a dtype."""
        if self.accumulate_dtype is None:
            return
        try:
            wide = jnp.dtype(self.accumulate_dtype)
        except TypeError as error:
            words = f"accumulate_dtype={self.accumulate_dtype!r} is no dtype"
            raise self.refusal(TypeError, words, "pass one such as jnp.float32") from error
        if jnp.issubdtype(dtype, jnp.inexact) and not _holds(wide, dtype):
            words = f"accumulate_dtype={wide.name} cannot hold every {dtype.name}"
            raise self.refusal(ValueError, words, "pass one with as many digits and exponents")

    def _is_constant(self, leaf: Any) -> bool:
        """Whether its sum needs no communication."""
        return self.name in ("psum", "pmean") and not isinstance(leaf, jax.core.Tracer)

    def _is_for_lax(self, leaf: Any, collective: Collective) -> bool:
        """Whether only lax can do it, or does it at no cost; `ringcoll.lax` has the list."""
        if self._is_constant(leaf) or is_unreduced_or_reduced(leaf) or collective.is_only_lax_s:
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


def _as_numbers(x: Array) -> tuple[Array, Callable[[Array], Array]]:
    """A random key as its numbers, which are sent in its place, and the function back to a key."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x, lambda y: y
    wrap = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(x))
    return jax.random.key_data(x), wrap
