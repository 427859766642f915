"""From a public call to primitives: refuse in words, leaf by leaf, joined.

A primitive asks lax for the type of its result when it is bound, before anything is sent. What lax
refuses is refused with the same exception type and lax's own words.
What only lax can do (see `Call._is_for_lax`) it does.
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
        said: the further arguments.
        operands: what is said of them in messages.
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
        """The collective of every leaf: by hand, or by lax where only lax can.

        Args:
            x: a pytree.
            collective: as this call means it, but for the algorithm and the dtype of sums.
            dims: which of the arguments are its dimensions, to be counted on every leaf.
        """
        leaves, tree = jax.tree.flatten(x)
        if self.grouped is not None:
            self.ask(check_groups, self.grouped, self.ask(self.rank_count))
        said: Any = self.axis_name  # as it was written, for lax; a bind has the axes as a tuple
        collective = replace(collective, axes=said)
        every = [collective] * len(leaves)
        if dims:
            every = [replace(collective, dims=self._dims(x, collective, dims)) for x in leaves]
        try:
            done = self._done(leaves, every)
        except (*REFUSALS, AssertionError):  # what lax has to say goes first
            self._ask_lax(leaves, every)
            raise
        return jax.tree.unflatten(tree, done)

    def _done(self, leaves: Sequence[Any], every: Sequence[Collective]) -> list[Any]:
        """The results of all leaves; nothing is sent before all are known to be right.

        Of one leaf lax is asked when it is bound, if it is bound as it was given.
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
            collective = replace(every[members[0]], **settings)  # they have no dims where they join
            results = collective.joint(*arrays) if collective.joins else [collective(*arrays)]
            for i, y, to_key in zip(members, results, back, strict=True):
                done[i] = to_key(y)
        return done

    @property
    def wide(self) -> np.dtype | None:
        """The dtype in which sums are accumulated, if it is not that of the operand."""
        return None if self.accumulate_dtype is None else jnp.dtype(self.accumulate_dtype)

    def settled(self, collective: str) -> Algorithm:
        """The algorithm that was given or, for "auto", the one asked for around the call.

        Refused, if a collective cannot run by it on these ranks.
        """
        shape = ranks_of(self.algorithm, self.axes, self.grouped).shape
        return self.ask(choice.settled, self.algorithm, collective, shape)

    def refusal(self, kind: type[Exception], words: str, cure: str = "") -> Exception:
        """What to raise: function, arguments, what is wrong with which value, the cure."""
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

    def ask(self, lax_s: Callable[..., T], *args: Any) -> T:
        """What JAX says, or its refusal as ours."""
        if len(set(self.axes)) < len(self.axes):  # lax aborts the process, or raises this
            raise self.refusal(ValueError, "repeated axis in axis_name", "name each axis once")
        try:
            return lax_s(*args)
        except REFUSALS as error:
            kind = kind_of(error)
            unsupported = kind is NotImplementedError and self.groups is not None  # typed groups
            cure = "pass check_vma=False to jax.shard_map" if unsupported else ""
            raise self.refusal(kind, str(error), cure) from error

    def _ask_lax(self, leaves: Sequence[Any], every: Sequence[Collective]) -> None:
        """Refuse what lax refuses; those of one type are alike."""
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
        except AssertionError:  # it trips over an axis that is not bound, without a word
            for axis in self.axes:
                lax.axis_size(axis)  # this has the words
            raise

    def check_accumulation(self, dtype: Any) -> None:
        """Refuse to accumulate sums of a dtype in what cannot hold them."""
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
        """What only lax can do, or does at no cost; `ringcoll.lax` has the list."""
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
    """Whether every value of a floating (or complex) dtype is one of another."""
    if not jnp.issubdtype(wide, jnp.inexact):
        return False
    if jnp.issubdtype(wide, jnp.complexfloating) != jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    w, d = jnp.finfo(wide), jnp.finfo(dtype)
    return w.nmant >= d.nmant and w.maxexp >= d.maxexp and w.minexp <= d.minexp


def _as_numbers(x: Array) -> tuple[Array, Callable[[Array], Array]]:
    """A random key as the numbers it is made of, in which it travels, and the way back."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x, lambda y: y
    wrap = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(x))
    return jax.random.key_data(x), wrap
