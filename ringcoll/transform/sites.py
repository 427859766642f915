"""Where a program gathers before products, or sums after them. Nothing here decides or runs."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from string import ascii_lowercase, ascii_uppercase
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params

from ringcoll.choose.plan import SYMBOLIC
from ringcoll.transform.programs import COLLECTIVES, equations, has_effects, variables


class Dot(NamedTuple):
    """A `dot_general`, the labels of its factors and its result, and the factor that is gathered.

    `gathered` is 0 or 1; at a sum it is -1.
    """

    eqn: Any
    labels: tuple[str, str, str]
    gathered: int = -1

    @property
    def other(self) -> Any:
        """The factor that is not gathered."""
        return self.eqn.invars[1 - self.gathered]


@dataclass(frozen=True, kw_only=True)
class Site:
    """A collective of a program, and the products that it meets.

    Attributes:
        eqn: the collective; or an equation that stays whole, with collectives inside.
        why: why it is left; "" if it can be taken.
        label: of the dimension that is gathered or scattered.
        labels: of the gathered array, or of the sum.
        products: what it meets.
        moves: equations between a gather and all its products that only move numbers; those of one
            step are equal.
        arrays: the variables of the gathered array, after these.
        is_early: whether nothing before makes what it gathers, or its program only returns its sum.
    """

    eqn: Any
    why: str = ""
    label: str = ""
    labels: str = ""
    products: tuple[Dot, ...] = ()
    moves: tuple[Sequence[Any], ...] = ()
    arrays: tuple[Any, ...] = ()
    is_early: bool = False

    @property
    def kind(self) -> str:
        """ "all_gather", "psum_scatter" or "psum"."""
        return COLLECTIVES.get(self.eqn.primitive.name, self.eqn.primitive.name)

    @property
    def axes(self) -> tuple[Any, ...]:
        inner = (e for jaxpr in jaxprs_in_params(self.eqn.params) for e in equations(jaxpr))
        p = next(e.params for e in (self.eqn, *inner) if e.primitive.name in COLLECTIVES)
        axes = p["axes"] if "axes" in p else p["axis_name"]
        return tuple(axes) if isinstance(axes, list | tuple) else (axes,)

    @property
    def key(self) -> str:
        """What the site is, wherever it stands: kind, axes, dtype and shapes.

        The shapes are of its operand, and of its products' factors that are not gathered.
        """
        operand = self.eqn.invars[0].aval
        shapes = [operand.shape]
        for product in self.products:
            factors = enumerate(product.eqn.invars)
            shapes += [x.aval.shape for k, x in factors if k != product.gathered]
        words = " ".join(f"[{','.join(map(str, shape))}]" for shape in shapes)
        return f"{self.kind} over {','.join(map(str, self.axes))}, {operand.dtype}{words}"


class Uses:
    """Which equations of a program use a variable (None: it is a result), and which makes it."""

    def __init__(self, jaxpr: Any) -> None:
        self.maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.of: dict[Any, list[Any]] = defaultdict(list)
        #: What runs at once: its variables, its results, and whether it has an effect.
        self.together = [({*variables(e)}, e.outvars, has_effects(e)) for e in jaxpr.eqns]
        for eqn in jaxpr.eqns:
            for v in variables(eqn):
                self.of[v].append(eqn)
        for v in jaxpr.outvars:
            if not isinstance(v, Literal):
                self.of[v].append(None)

    def after(self, eqn: Any) -> set[Any]:
        """The variables that are known only after an equation; effects do not move either."""
        found, size = {*eqn.outvars}, 0
        while len(found) > size:
            size = len(found)
            for given, made, has_effect in self.together:
                if has_effect or not found.isdisjoint(given):
                    found.update(made)
        return found


def sites(jaxpr: Any, uses: Uses, stored: set[Any]) -> list[Site]:
    """The sites of a program. A product may be in two; the first of them should have it.

    First are gathers of what was just computed, then sums, then gathers of what is stored.
    """
    found: list[Site] = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in COLLECTIVES and not _has_sizes(eqn):
            found.append(Site(eqn=eqn, why=SYMBOLIC))
        elif name == "all_gather":
            found.append(_gather(eqn, uses, stored.issuperset(variables(eqn))))
        elif name == "all_gather_invariant":
            found.append(Site(eqn=eqn, why="what it gathers is the same on all ranks"))
        elif name in ("psum", "psum_invariant", "reduce_scatter"):
            found.append(_sum(eqn, uses))
        elif name.startswith("custom_"):
            inner = (e for one in jaxprs_in_params(eqn.params) for e in equations(one))
            if any(e.primitive.name in COLLECTIVES for e in inner):
                found.append(Site(eqn=eqn, why="a function with its own derivative stays whole"))
    return sorted(found, key=lambda site: 1 if site.kind != "all_gather" else 2 * site.is_early)


def _gather(eqn: Any, uses: Uses, is_early: bool) -> Site:
    dim, n, p = eqn.params["all_gather_dimension"], eqn.params["axis_size"], eqn.params
    if p["axis_index_groups"] is not None or not _is_inexact(eqn.invars[0]):
        return Site(eqn=eqn, why="its ranks are in groups, or it gathers no floats")
    arrays, moves = [eqn.outvars[0]], list[Any]()
    while users := [user for v in arrays for user in uses.of[v]]:
        first = users[0]
        moved = None if None in users else moved_dim(first, dim, n)
        kinds = [(u.primitive, u.params) for u in users if u is not None]
        if moved is None or any(kind != kinds[0] for kind in kinds):
            break
        dim, arrays = moved, [user.outvars[0] for user in users]
        moves.append(users)
    labels = ascii_lowercase[: arrays[0].aval.ndim]
    products = [product for v in arrays for product in _products(v, labels, uses)]
    names = sorted({"returned" if u is None else u.primitive.name for u in users})
    return Site(
        eqn=eqn,
        why="" if products else f"no product takes it: {', '.join(names) or 'unused'}",
        label=labels[dim],
        labels=labels,
        products=tuple(products),
        moves=tuple(moves),
        arrays=tuple(arrays),
        is_early=is_early,
    )


def moved_dim(eqn: Any, dim: int, n: int) -> int | None:
    """Where a dimension of n shards is after an equation that only moves numbers.

    None: it is another equation, or cuts shards.
    """
    name, old, new = eqn.primitive.name, eqn.invars[0].aval, eqn.outvars[0].aval
    if name == "transpose":
        return eqn.params["permutation"].index(dim)
    if name in ("convert_element_type", "pvary"):
        return dim if _is_inexact(eqn.outvars[0]) else None
    if name not in ("reshape", "squeeze") or old.shape[dim] % n:
        return None
    outer = prod(old.shape[:dim])
    fits = (j for j, m in enumerate(new.shape) if prod(new.shape[:j]) == outer and m % n == 0)
    return next(fits, None)


def _products(v: Any, labels: str, uses: Uses) -> Iterator[Dot]:
    """The products of an array, as it is or transposed."""
    for eqn in filter(None, uses.of[v]):
        if _is_product(eqn) and (eqn.invars[0] is v) != (eqn.invars[1] is v):
            which = int(eqn.invars[1] is v)
            yield Dot(eqn, _dot_labels(eqn, which, labels, ascii_uppercase), which)
        elif eqn.primitive.name in ("pvary", "transpose"):
            order = eqn.params.get("permutation", range(len(labels)))
            yield from _products(eqn.outvars[0], "".join(labels[d] for d in order), uses)


def _has_sizes(eqn: Any) -> bool:
    """Whether no size is a symbol of `jax.export`."""
    return all(isinstance(m, int) for v in eqn.invars for m in v.aval.shape)


def _is_inexact(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.inexact)


def _is_product(eqn: Any) -> bool:
    """Whether it is a `dot_general` of two arrays, whose result is sharded as they are."""
    if eqn.primitive.name != "dot_general" or len(variables(eqn)) < 2 or not _has_sizes(eqn):
        return False
    out = eqn.params["out_sharding"]
    return _is_inexact(eqn.outvars[0]) and not (out and any(out.spec))


def _dot_labels(eqn: Any, which: int, labels: str, fresh: str) -> tuple[str, str, str]:
    """The labels of both factors and of the result, if those of factor `which` are known."""
    contracted, batch = eqn.params["dimension_numbers"]
    shared = [(*c, *b) for c, b in zip(contracted, batch, strict=True)]
    known = dict(zip(shared[1 - which], (labels[d] for d in shared[which]), strict=True))
    letters, ndim = iter(fresh), eqn.invars[1 - which].aval.ndim
    other = "".join(known[d] if d in known else next(letters) for d in range(ndim))
    left, right = (labels, other) if which == 0 else (other, labels)
    out = "".join(left[d] for d in batch[0])
    out += "".join(c for d, c in enumerate(left) if d not in shared[0])
    return left, right, out + "".join(c for d, c in enumerate(right) if d not in shared[1])


def _sum(eqn: Any, uses: Uses) -> Site:
    (v, *more), p = eqn.invars, eqn.params
    if more or p.get("axis_index_groups") is not None:
        return Site(eqn=eqn, why="it adds several arrays, or its ranks are in groups")
    labels, dim = ascii_lowercase[: v.aval.ndim], p.get("scatter_dimension", 0)
    products = _terms(v, labels, uses)
    return Site(
        eqn=eqn,
        why="" if products else "not all that it adds are products",
        label=labels[dim : dim + 1],
        labels=labels,
        products=tuple(products),
        is_early=not any(uses.of[eqn.outvars[0]]),
    )


def _sole_maker(v: Any, uses: Uses) -> Any:
    """The equation that makes a variable, if it is used once."""
    return uses.maker.get(v) if not isinstance(v, Literal) and len(uses.of[v]) == 1 else None


def _terms(v: Any, labels: str, uses: Uses) -> list[Dot]:
    """The products whose sum is an array with these labels; [] if something else is in it."""
    eqn: Any = _sole_maker(v, uses) if _is_inexact(v) else None
    name = eqn.primitive.name if eqn else ""
    if name in ("add", "add_any"):
        left, right = (_terms(one, labels, uses) for one in eqn.invars)
        return [*left, *right] if left and right else []
    if name in ("convert_element_type", "pvary"):
        return _terms(eqn.invars[0], labels, uses)
    if name == "transpose":
        before = sorted(zip(eqn.params["permutation"], labels, strict=True))
        return _terms(eqn.invars[0], "".join(c for _, c in before), uses)
    if not eqn or not _is_product(eqn):
        return []
    ndim = eqn.invars[0].aval.ndim
    *factors, out = _dot_labels(eqn, 0, ascii_uppercase[:ndim], ascii_uppercase[ndim:])
    x, w = (own.translate(str.maketrans(out, labels)) for own in factors)
    return [Dot(eqn, (x, w, labels))]
