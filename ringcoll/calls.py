"""From a public call to primitives: ask lax, refuse in words, leaf by leaf, joined.

Every call first asks lax for the type of its own result, abstractly. What lax refuses is
refused here, before anything is sent, with the same exception type and lax's own words.
What only lax can do (see `Call._is_for_lax`) it does.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from ringcoll import choice
from ringcoll.axes import AxisName, Grouped, Groups, as_tuples, axes_of, check_groups
from ringcoll.joining import is_small
from ringcoll.manual import is_unreduced_or_reduced, varying
from ringcoll.refusals import REFUSALS, cure_of, kind_of
from ringcoll.scheduled import ranks_of
from ringcoll.table import LAX, Algorithm, Table

Pytree = Any
Collect = Callable[..., Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One call of a public function, without its operand.

    Attributes:
        name: of the function.
        collective: as algorithms and table know it; "" has no algorithms.
        axis_name, groups, algorithm, accumulate_dtype: as the user gave them.
        dims: the arguments that are dimensions.
        adds_dim: whether they are dimensions of a result with one more.
        said: the further arguments, for messages.
        lax_only: whether it is of a kind that only lax can do.
        operands: what is said of them in messages.
        grouped: the groups, as tuples.
    """

    name: str
    collective: str
    axis_name: AxisName
    groups: Groups = None
    algorithm: Algorithm = "auto"
    accumulate_dtype: DTypeLike | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    adds_dim: bool = False
    said: Mapping[str, Any] = field(default_factory=dict)
    lax_only: bool = False
    operands: str = "x"
    grouped: Grouped | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.groups is not None:  # read once: they may be iterators
            object.__setattr__(self, "grouped", self.ask(as_tuples, self.groups))

    @property
    def axes(self) -> tuple[Hashable, ...]:
        return axes_of(self.axis_name)

    @property
    def params(self) -> dict[str, Any]:
        """What every primitive with a schedule needs to know."""
        wide = self.accumulate_dtype
        return {
            "axes": self.axes,
            "groups": self.grouped,
            "algorithm": self.chosen(),
            "accumulate_dtype": None if wide is None else jnp.dtype(wide),
        }

    def integer(self, name: str, value: Any) -> int:
        """The value of an argument that has to be a whole number, or a refusal."""
        try:
            return operator.index(value)
        except TypeError as error:
            words = f"{name}={value!r} is not an integer"
            raise self.refusal(TypeError, words, "pass a Python int") from error

    def refusal(self, kind: type[Exception], words: str, cure: str = "") -> Exception:
        """What to raise: function, arguments, what is wrong with which value, the cure."""
        groups = {} if self.groups is None else {"axis_index_groups": self.groups}
        args = {"axis_name": self.axis_name, **self.dims, **self.said, **groups}
        call = ", ".join([self.operands, *(f"{name}={value!r}" for name, value in args.items())])
        cure = cure or cure_of(words)
        words = words or f"not supported by jax.lax.{self.name}"
        if "{n}" in cure:
            cure = cure.format(n=self.group_size())
        if "{mesh}" in cure:
            mesh = jax.sharding.get_abstract_mesh().axis_names
            cure = cure.format(mesh=", ".join(map(repr, mesh)) or "none")
        return kind(f"ringcoll.{self.name}({call}): {words}" + (f"; {cure}" if cure else ""))

    def each(self, x: Pytree, by_lax: Collect, by_hand: Collect, *, joins: bool = False) -> Pytree:
        """The collective of every leaf: by hand, or by lax where only lax can.

        Args:
            x: a pytree.
            by_lax: the collective by lax, of an operand and its dims, counted from 0.
            by_hand: the same by hand, of an array that varies over the axes; if it joins,
                of several arrays, as a list.
            joins: whether it works element by element, so that small leaves of a dtype
                can share their messages.
        """
        leaves, tree = jax.tree.flatten(x)
        if self.grouped is not None:
            self.ask(check_groups, self.grouped, self.ask(self.rank_count))
        for leaf in leaves:  # all of them, before anything is sent
            if not self._is_constant(leaf):
                self._check(leaf, partial(by_lax, **self._dims(leaf)))
        done: list[Any] = []
        together: dict[Hashable, list[int]] = defaultdict(list)
        for i, leaf in enumerate(leaves):
            if self._is_for_lax(leaf):
                done.append(self._by_lax(leaf, partial(by_lax, **self._dims(leaf))))
                continue
            done.append(varying(jnp.asarray(leaf), self.axes))
            together[done[i].dtype if joins and is_small(done[i]) else i].append(i)
        for members in together.values():
            arrays, back = zip(*(_as_numbers(done[i]) for i in members), strict=True)
            dims = self._dims(leaves[members[0]])  # none where leaves join
            results = by_hand(*arrays, **dims) if joins else [by_hand(*arrays, **dims)]
            for i, y, to_key in zip(members, results, back, strict=True):
                done[i] = to_key(y)
        return jax.tree.unflatten(tree, done)

    def _dims(self, leaf: Any) -> dict[str, int]:
        """The dims counted from 0, or refused."""
        ndim = self.ask(jax.typeof, leaf).ndim + self.adds_dim
        counted = {}
        for name, given in self.dims.items():
            dim = self.integer(name, given)
            if not -ndim <= dim < ndim:
                words = f"axis {dim} is out of bounds for array of dimension {ndim}"
                raise self.refusal(ValueError, f"{name}: {words}")
            counted[name] = dim % ndim
        return counted

    def _check(self, leaf: Any, by_lax: Callable[[Any], Any]) -> None:
        """Refuse, before anything is sent, what lax refuses and what no schedule can do."""
        self.ask(self._ask, leaf, by_lax)
        self.check_accumulation(jax.typeof(leaf).dtype)
        if not isinstance(self.algorithm, str) or self.algorithm not in ("auto", LAX):
            self._check_algorithm(leaf)

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

    def _ask(self, leaf: Any, by_lax: Callable[[Any], Any]) -> None:
        """Let lax type its own result."""
        try:
            jax.make_jaxpr(by_lax)(jax.typeof(leaf))
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

    def _check_algorithm(self, leaf: Any) -> None:
        if self._is_uneven() and not isinstance(self.algorithm, Table):
            raise self.refusal(
                ValueError,
                f"algorithm={self.algorithm!r} needs axis_index_groups of one size",
                "pass algorithm='lax', or groups of one size",
            )
        if not self._is_for_lax(leaf):
            self.check_algorithm()

    def check_algorithm(self) -> None:
        """Refuse an algorithm by which this cannot be done on these ranks."""
        shape = ranks_of(self.algorithm, self.axes, self.grouped).shape
        self.ask(choice.check, self.algorithm, self.collective, shape)

    def chosen(self) -> Algorithm:
        """The algorithm that was given or, for "auto", the one asked for around the call."""
        shape = ranks_of(self.algorithm, self.axes, self.grouped).shape
        return self.ask(choice.chosen, self.algorithm, self.collective, shape)

    def _is_constant(self, leaf: Any) -> bool:
        """Whether its sum needs no communication."""
        return self.name in ("psum", "pmean") and not isinstance(leaf, jax.core.Tracer)

    def _is_for_lax(self, leaf: Any) -> bool:
        """What only lax can do, or does at no cost; `ringcoll.lax` has the list."""
        return (
            self.lax_only
            or not self.axes
            or any(isinstance(axis, int) for axis in self.axes)
            or self._is_constant(leaf)
            or is_unreduced_or_reduced(leaf)
            or self._is_uneven()
        )

    def _by_lax(self, leaf: Any, by_lax: Collect) -> Any:
        dtype = jax.typeof(leaf).dtype
        if self.accumulate_dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            return by_lax(leaf)
        return by_lax(jnp.astype(leaf, self.accumulate_dtype)).astype(dtype)

    def _is_uneven(self) -> bool:
        return self.grouped is not None and len(set(map(len, self.grouped))) > 1

    def group_size(self) -> int:
        """How many ranks take part: of a group, if there are groups."""
        return len(self.grouped[0]) if self.grouped else self.rank_count()

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
