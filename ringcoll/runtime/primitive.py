"""A collective as a JAX primitive, so that its type, gradient and batching are lax's.

A plain ring of `ppermute` cannot have the type of a `psum`: no public cast turns a
varying value into a replicated one. A primitive can. Each subclass of `Collective` is
a primitive. An instance is a collective with all its arguments but the operand. It defines

- `by_lax`: JAX's own collective. It is traced for the *type* of the result, and run only if the
  built-in is chosen or an axis is a `vmap`. So ringcoll's result has lax's shape, dtype, weak type,
  sharding and varying axes, by definition and in every version of JAX;
- `lower`: ringcoll's own code for the ranks. It is traced when the program is lowered: then the
  platform is known, and the type of the result is fixed;
- `transpose`: the collective of the cotangent, by the same algorithm;
- `under_vmap`: the same collective if one of its axes is a `vmap` and not an axis of a mesh.

These are enough for collectives that treat all operands alike. If operands have different roles, a
collective has its own `types`, `jvp`, `pulled_back` and `batch`: the rules of the primitive.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ringcoll.runtime.hosts import Where
from ringcoll.runtime.scopes import line_of_call, takes_plans

#: Called with JAX's context of each program in which a collective is lowered.
on_lowering: list[Callable[[mlir.ModuleContext], None]] = []
_PLATFORMS = {"cpu": "cpu", "tpu": "tpu", "cuda": "gpu", "rocm": "gpu"}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective with all its arguments but the operand. A subclass with a name is a primitive.

    `dims` are its positional dimensions. A call with `tiled=False` adds or removes a dimension. It
    is rewritten as a call with `tiled=True` before the primitive is bound, so that `vmap` only has
    to shift `dims`.
    """

    axes: tuple[Hashable, ...]
    dims: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] | None = None
    tiled: bool = True
    is_only_lax: bool = False  # whether only lax can do it
    line: str = ""  # the user's line of source, if `takes_plans` asks

    primitive: ClassVar[Primitive]
    #: Whether it works element by element, so that several operands may share messages.
    packs: ClassVar[bool] = False
    #: Whether it needs no communication for constants.
    folds_constants: ClassVar[bool] = False
    #: Whether it combines numbers, so that lax refuses random keys.
    adds_numbers: ClassVar[bool] = False
    #: Whether booleans are counted as int32, as lax does in a sum.
    bools_as_int32: ClassVar[bool] = False
    #: Whether, if not `tiled`, the result has one more dimension; `dims` then count in the result.
    adds_dim: ClassVar[bool] = False

    def __init_subclass__(cls, name: str | None = None, differentiable: bool = True) -> None:
        if name is not None:
            cls.primitive = _register(Primitive(f"ringcoll_{name}"), differentiable)

    def __call__(self, *xs: Array) -> list[Array]:
        """The result for each operand; a collective that `packs` may take several together."""
        asked = takes_plans.value is not None and not self.line
        told = replace(self, line=line_of_call()) if asked else self
        return self.primitive.bind(*xs, collective=told)

    def resolved(self, leaves: Sequence[Any], only_lax: Sequence[bool]) -> Self:
        """The same with its options checked, for leaves of which lax alone can do some."""
        return self

    def by_lax(self, x: Array) -> Array:
        """The result by `jax.lax`."""
        raise NotImplementedError

    def by_lax_alone(self, leaf: Any, axis_name: Any) -> Any:
        """The result for a leaf that only lax can handle, over the axes as the user gave them."""
        return replace(self, axes=axis_name).by_lax(leaf)

    def lower(self, where: Where, *xs: Array) -> list[Array]:
        """The results by ringcoll, for one operand or, if it `packs`, for several."""
        raise NotImplementedError

    def transpose(self, cts: Sequence[Array]) -> list[Array]:
        """The linear transpose, applied to the cotangents of all operands."""
        raise NotImplementedError

    def under_vmap(self, x: Array, dim: Any, axis: Any) -> tuple[Array, int | None]:
        """The same if `axis` (its name and size) is a vmap, mapped at `dim` of x.

        All data along that axis is on one device: there is nothing to send, and lax's
        own batching rule says what to compute. A collective that `packs` also gets operands
        that are not mapped: `dim` is None.
        """
        return jax.vmap(self.by_lax, dim, 0, axis_name=axis.name)(x), 0

    def over(self, axes: tuple[Hashable, ...], x: Array) -> Array:
        """The result of the same collective over fewer axes."""
        return replace(self, axes=axes)(x)[0] if axes else x

    def axes_around(self, axis: Any) -> tuple[tuple[Hashable, ...], tuple[Hashable, ...]]:
        """The axes before and after this one."""
        i = self.axes.index(axis.name)
        return self.axes[:i], self.axes[i + 1 :]

    def within(self, axis: Any, x: Array, dim: int | None, out: int | None) -> Array:
        """The collective along only the vmapped axis, at `dim` of x and `out` of the result."""
        along = replace(self, axes=(axis.name,))
        return jax.vmap(along.by_lax, dim, out, axis_name=axis.name, axis_size=axis.size)(x)

    def batched(self, dim: int) -> Self:
        """The same collective for operands with a batch dimension at `dim`."""
        return replace(self, dims=tuple(d + (dim <= d) for d in self.dims))

    def types(self, *avals: Any) -> tuple[list[Any], set[Any]]:
        """The types and effects that lax's own collective would have."""
        programs = {aval: jax.make_jaxpr(self.by_lax)(aval) for aval in dict.fromkeys(avals)}
        effects = set().union(*(p.effects for p in programs.values()))
        return [programs[aval].out_avals[0] for aval in avals], effects

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The collective is linear; tangents that are zero are not sent."""
        results = self(*primals)
        moving = [t for t in tangents if type(t) is not ad.Zero]
        moved = iter(self(*moving) if moving else ())
        return results, [
            ad.Zero(jax.typeof(y).to_tangent_aval()) if type(t) is ad.Zero else next(moved)
            for y, t in zip(results, tangents, strict=True)
        ]

    def pulled_back(self, cts: Sequence[Any], *xs: Any) -> list[Any]:
        """The cotangents of the operands."""
        moving = [ct for ct in cts if type(ct) is not ad.Zero]
        moved = iter(self.transpose(moving) if moving else ())
        return [
            ad.Zero(x.aval) if type(ct) is ad.Zero else next(moved)
            for ct, x in zip(cts, xs, strict=True)
        ]

    def batch(
        self, axis: Any, xs: Sequence[Array], dims: Sequence[int | None]
    ) -> tuple[list[Array], Sequence[int | None]]:
        """The collective under a vmap of operands that are mapped at `dims`."""
        if axis.name in self.axes:
            if self.groups is not None:
                raise NotImplementedError(
                    f"axis_index_groups not supported in vmap collectives: "
                    f"{self.primitive.name} over the vmapped axis {axis.name!r} with "
                    f"axis_index_groups={self.groups}; use a mesh axis, or reshape the batch"
                )
            pairs = [  # lax's all_to_all is wrong for an operand that is not mapped
                (jnp.broadcast_to(x, (axis.size, *jnp.shape(x))), 0)
                if dim is None and not self.packs
                else (jnp.asarray(x), dim)
                for x, dim in zip(xs, dims, strict=True)
            ]
            results = [self.under_vmap(x, dim, axis) for x, dim in pairs]
            return [y for y, _ in results], [dim for _, dim in results]
        # A collective of several operands works element by element, and has no dims to shift.
        collective = self if dims[0] is None else self.batched(dims[0])
        return collective(*xs), dims


def _register(primitive: Primitive, differentiable: bool) -> Primitive:
    """Give a primitive the rules that are the same for every collective."""
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(lambda *xs, collective: collective.types(*xs))
    primitive.def_impl(lambda *xs, collective: _jitted(collective)(*xs))
    # The ordinary batching rule does not get the axis.
    batching.fancy_primitive_batchers[primitive] = lambda *args, collective: collective.batch(*args)
    for platform, kind in _PLATFORMS.items():
        mlir.register_lowering(primitive, partial(_lower, platform=kind), platform=platform)
    if differentiable:
        ad.primitive_jvps[primitive] = lambda *args, collective: collective.jvp(*args)
        ad.primitive_transposes[primitive] = lambda cts, *xs, collective: collective.pulled_back(
            cts, *xs
        )
    return primitive


@lru_cache(maxsize=512)
def _jitted(collective: Collective):
    """Jit a call for eager `shard_map`, so that there is only one way to run."""
    return jax.jit(collective.__call__)


def _lower(ctx, *xs, collective: Collective, platform: str):
    for called in on_lowering:
        called(ctx.module_context)
    lower = partial(collective.lower, Where(platform, ctx.module_context.axis_context))
    return mlir.lower_fun(lower, multiple_results=True)(ctx, *xs)
