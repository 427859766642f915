"""A call of a public function as the user wrote it. Every refusal of the call names it."""

import math
import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jax import lax

from ringcoll.collectives.axes import AxisName, Grouped, Groups, as_tuples, axes_of, check_groups
from ringcoll.collectives.refusals import REFUSALS, bound_axes, kind_of, refused

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One call of a public function as the user wrote it, without its operand.

    Attributes:
        name: the name of the function.
        axis_name, groups: as the user gave them.
        arguments: other arguments that a refusal shows, by name.
        operands: the text for the operands in error messages.
        axes, grouped: the axes and the groups, as tuples.
    """

    name: str
    axis_name: AxisName
    groups: Groups = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    operands: str = "x"
    axes: tuple[Hashable, ...] = field(init=False)
    grouped: Grouped | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", axes_of(self.axis_name))
        if self.groups is not None:  # read groups only once: they may be iterators
            object.__setattr__(self, "grouped", self.attempt(as_tuples, self.groups))

    def __str__(self) -> str:
        args = {"axis_name": self.axis_name, **self.arguments}
        if self.groups is not None:
            args["axis_index_groups"] = self.groups
        shown = [self.operands, *(f"{name}={value!r}" for name, value in args.items())]
        return f"{self.name}({', '.join(filter(None, shown))})"  # some functions have no operand

    def refusal(self, kind: type[Exception], words: str, cure: str = "") -> Exception:
        """The exception to raise; it names the call, the wrong value and the cure."""
        return refused(kind, self, words, cure)

    def integer(self, name: str, ndim: int | None = None) -> int:
        """The value of an argument that must be a whole number, or a refusal.

        With `ndim` it is one of `ndim` dimensions, and is returned as a number from 0.
        """
        value = self.arguments[name]
        try:
            number = operator.index(value)
        except TypeError as error:
            words = f"{name}={value!r} is not an integer"
            raise self.refusal(TypeError, words, "pass a Python int") from error
        if ndim is None:
            return number
        if not -ndim <= number < ndim:
            words = f"{name}: axis {number} is out of bounds for array of dimension {ndim}"
            cure = "count dimensions from 0, or from the last with -1"
            raise self.refusal(ValueError, words, cure)
        return number % ndim

    def attempt(self, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)`; an exception of lax is raised again as a refusal of this call."""
        try:
            if len(set(self.axes)) < len(self.axes):  # lax may abort the process instead of raising
                raise ValueError("repeated axis in axis_name; name each axis once")
            return function(*args)
        except REFUSALS as error:
            kind = kind_of(error)
            # lax has no groups under check_vma=True.
            unsupported = kind is NotImplementedError and self.groups is not None
            cure = "pass check_vma=False to jax.shard_map" if unsupported else ""
            cure = bound_axes() if kind is NameError else cure
            # Some words of lax go on: "To fix this, please call psum under `jax.shard_map`."
            words = str(error).removeprefix("Found an ").partition(". To fix this")[0]
            words = words or f"not supported by jax.lax.{self.name}"
            raise self.refusal(kind, words, cure) from error

    def check_ranks(self) -> None:
        """Refuse an axis that is not bound or is given by its position, and groups that differ."""
        for axis in self.axes:
            if isinstance(axis, int):
                words = f"{axis} is not a name; axes by position are lax's own"
                raise self.refusal(ValueError, words, "name an axis of the mesh")
            self.attempt(lax.axis_size, axis)
        if self.grouped is not None:
            self.attempt(check_groups, self.grouped, self.rank_count())
            if len(set(map(len, self.grouped))) > 1:
                cure = "give all groups equally many ranks"
                raise self.refusal(ValueError, "axis_index_groups are of several sizes", cure)

    def rank_count(self) -> int:
        """The number of ranks over the axes."""
        return math.prod(lax.axis_size(axis) for axis in self.axes)
