"""`overlapped`: products hide the gathers before them, and the sums after them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from itertools import chain
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any
from warnings import warn

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringcoll.choose.plan import Plan
from ringcoll.choose.table import Table
from ringcoll.collectives import choice
from ringcoll.collectives.axes import rank_count
from ringcoll.collectives.public import check_function, public
from ringcoll.io.strict_json import parsed
from ringcoll.matmuls import labels
from ringcoll.matmuls.all_reduce import matmul_all_reduce
from ringcoll.matmuls.options import DEFAULTS, Options
from ringcoll.matmuls.overlapped import (
    gather_and_multiply,
    multiply_and_scatter,
    plan_of_gather,
    plan_of_scatter,
)
from ringcoll.runtime.scopes import record_plan_at_lowering, takes_plans
from ringcoll.runtime.value_types import with_common_axes
from ringcoll.schedules.registry import LAX
from ringcoll.transform.programs import Call, bound, results_of, transformed, variables
from ringcoll.transform.sites import Site, Uses, moved_dim, sites

KINDS = ("all_gather", "psum_scatter", "psum")


@public()
def overlapped(
    f: Callable[..., Any],
    *,
    algorithm: str | Table = "auto",
    only: str | Iterable[str] | None = None,
    choices: Mapping[str, str] | str | PathLike[str] | None = None,
) -> Callable[..., Any]:
    """f, with products that hide the gathers before them and the sums after them.

    `loss = ringcoll.overlapped(loss)` changes nothing else in a step: `jax.value_and_grad(loss)`,
    `jit` and `shard_map` stay where they are, outside of f or inside. f is traced, and three forms
    are found in its program, also inside `scan`, `while`, `cond`, `jit`, `checkpoint` and
    `shard_map`, through casts, transposes and reshapes that cut no shard:

    - an `all_gather` and products of what it gathers: an `all_gather_einsum`. Products share it;
      if something else needs the gathered array, that is kept as it arrives;
    - products, or a sum of them, and a `psum_scatter`: an `einsum_reduce_scatter`;
    - a product x @ w and a `psum`: a `matmul_all_reduce`.

    If both factors of a product are gathered, the one that was just computed is taken. The other,
    such as a weight, stays whole, so that it can travel earlier. By "auto" a site is taken if
    another form than the built-in is priced as cheaper by more than the error of prices; a `psum`
    that the program only returns is left. If no site is taken, f itself is called.
    `ringcoll.explain(overlapped(f))` lists every site, and why it was left. Results have f's types,
    and sums another order of additions.

    Python code of f runs once more, and so do its prints. A function with its own derivative
    (`custom_vjp`, `custom_jvp`) stays whole.

    Shapes: those of f. Steps, bytes and gradient: those of the functions above. JAX refuses forward
    mode (`jvp`) where a site is taken. If f takes gradients itself, their gathers and sums are
    sites too.

    Args:
        f: a function of arrays or pytrees; leaves that are no arrays pass as they are.
        algorithm: a name, for all sites. Where it cannot run, it is "auto".
        only: the kinds of sites to take, of "all_gather", "psum_scatter" and "psum"; None: all.
        choices: algorithms of single sites, by `ringcoll.transform.Site.key`; "lax" leaves one.
            Or the path of a JSON file of these, as `python -m ringcoll try --write` writes it. A
            warning names, once, those that no site of f has; other sites run by `algorithm`.

    Raises:
        TypeError: f is no function; an algorithm is neither a name nor a `Table`; choices are no
            mapping.
        ValueError: there is no algorithm, or no kind of site, of a name; the file is not JSON.
        OSError: the file cannot be read.

    Source: Wang et al., "Overlap communication with dependent computation via decomposition
    in large deep learning models", ASPLOS (2023), a pass of a compiler.

    >>> def layer(x, w):
    ...     return jax.lax.all_gather(x, "x", tiled=True) @ w
    >>> ours = ranks(ringcoll.overlapped(layer, algorithm="ring"), (P("x"), P(None, "x")))
    >>> ours.lower(jnp.ones((8, 2)), jnp.ones((2, 4))).as_text().count("collective_permute")
    3
    """
    check_function("f", f)
    if isinstance(choices, str | PathLike):
        choices = parsed(Path(choices).read_text(encoding="utf-8"))
    choices = {} if choices is None else choices
    if not isinstance(choices, Mapping):
        raise TypeError(f"choices: a {type(choices).__name__}; pass algorithms by places")
    for name in (algorithm, *choices.values()):
        choice.check_name_or_table(name)
    overlap = _Overlap(algorithm, checked_names(only, KINDS), choices, {*choices})
    ours = transformed(f, overlap.calls)

    @wraps(f)
    def called(*args: Any, **kwargs: Any) -> Any:
        results = ours(*args, **kwargs)
        if overlap.stale:
            stale = "; ".join(sorted(overlap.stale))
            overlap.stale.clear()
            own = getattr(f, "__name__", "f")
            warn(f"ringcoll.overlapped: choices= has no place of {own}: {stale}", stacklevel=2)
        return results

    return called


def checked_names(only: str | Iterable[str] | None, known: Sequence[str]) -> Sequence[str]:
    """The names of `only=`; all that are known for None."""
    names = known if only is None else (only,) if isinstance(only, str) else tuple(only)
    for name in names:
        if name not in known:
            raise ValueError(f"only={name!r}: not one of them; choose from {', '.join(known)}")
    return names


@dataclass(frozen=True)
class _Overlap:
    """The arguments of a call of `overlapped`; `stale`: choices whose site was not seen yet."""

    algorithm: str | Table
    only: Sequence[str]
    choices: Mapping[str, str]
    stale: set[str]

    def calls(self, jaxpr: Any, stored: set[Any]) -> dict[int, Call]:
        """The calls for a program; if `explain` asks, also those that only record a plan."""
        uses, taken, found = Uses(jaxpr), set[int](), dict[int, Call]()
        at = {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
        for site in sites(jaxpr, uses, stored):
            free = [product for product in site.products if id(product.eqn) not in taken]
            if site.kind == "all_gather" and free:
                after, exact = uses.after(site.eqn), free[0].eqn.params["precision"]
                free = [p for p in free if p.eqn.params["precision"] == exact]
                free = [p for p in free if p.other not in after]
            elif len(free) < len(site.products):
                free = []
            algorithm = self.choices.get(site.key, self.algorithm)
            self.stale.discard(site.key)
            plan, call = Plan(LAX, why=self.why_left(site, free, algorithm)), None
            if not plan.why:
                plan, call = _called(replace(site, products=tuple(free)), algorithm)
            if plan.algorithm != LAX and call is not None:
                products = [product.eqn for product in free]
                taken.update(map(id, products))
                uses.together.append(({*variables(call)}, call.outvars, False))
                gone = [site.eqn]
                if site.kind == "all_gather":
                    gone += [*chain(*site.moves), *products]
                found |= {at[id(eqn)]: call for eqn in gone}
            elif takes_plans.value is not None:
                found[at[id(site.eqn)]] = _recording(site, plan, jaxpr)
        return found

    def why_left(self, site: Site, free: Sequence[Any], algorithm: str | Table) -> str:
        """Why a site is left, if not for its price; `free`: the products that it can have."""
        if site.why:
            return site.why
        if site.kind not in self.only:
            return "left by only="
        if not {*site.axes} <= {*jax.sharding.get_abstract_mesh().manual_axes}:
            return "its axis is no axis of a mesh"
        if rank_count(site.axes) == 1:
            return "there is one rank"
        if not free:
            return "another collective has its products, or they need each other"
        if site.kind == "psum" and site.is_early and algorithm == "auto":
            return "its program only returns it"
        return ""


def _called(site: Site, algorithm: str | Table) -> tuple[Plan, Call | None]:
    """The plan of a site, and the call that it is for."""
    options: Any = DEFAULTS | {"algorithm": "auto", "accumulate_dtype": None}
    options["precision"] = site.products[0].eqn.params["precision"]
    with nullcontext() if algorithm == "auto" else choice.algorithm(algorithm):
        checked = Options.of(site.axes, options)
    make = {"all_gather": _gather, "psum": _all_reduce, "psum_scatter": _scatter}[site.kind]
    return make(site, replace(checked, early=site.is_early))


def _gather(site: Site, options: Options) -> tuple[Plan, Call]:
    """An `all_gather` and its products; one more, with 1, is the gathered array."""
    eqn, p, dots = site.eqn, site.eqn.params, [product.eqn for product in site.products]
    others = [product.other for product in site.products]
    specs = [
        labels.Product(own.labels[1 - own.gathered], own.labels[2], dot.outvars[0].aval.dtype)
        for own, dot in zip(site.products, dots, strict=True)
    ]
    gather = labels.Gather(site.label, site.labels, tuple(specs))

    def shard_of(x: Array) -> Array:
        x = x if p["tiled"] else jnp.expand_dims(x, p["all_gather_dimension"])
        return _moved(x, site.moves, p["all_gather_dimension"], p["axis_size"])

    def run(needed: set[Any], x: Array, *others: Array) -> list[Any]:
        x = shard_of(x)
        is_kept = not needed.isdisjoint(site.arrays)
        one = [jnp.ones((), x.dtype)] * is_kept
        products = (*specs, *[labels.Product("", site.labels, x.dtype)] * is_kept)
        x, *factors = with_common_axes([x, *others, *one], options.axes)
        results = gather_and_multiply(options, replace(gather, products=products), x, factors)
        kept = results[-1] if is_kept else None
        return [*results[: len(others)], *[kept] * len(site.arrays)]

    shard = jax.eval_shape(shard_of, eqn.invars[0].aval)
    plan = plan_of_gather(options, gather, shard, [v.aval for v in others])
    outvars = [*(dot.outvars[0] for dot in dots), *site.arrays]
    return plan, Call(eqn, [eqn.invars[0], *others], outvars, run)


def _moved(x: Array, moves: Sequence[Any], dim: int, n: int) -> Array:
    """A shard, as equations move the numbers of the whole array. Casts to wider dtypes can wait."""
    for eqn, *_ in moves:
        new, dim = eqn.outvars[0].aval, moved_dim(eqn, dim, n) or 0
        if eqn.primitive.name == "transpose":
            x = lax.transpose(x, eqn.params["permutation"])
        elif eqn.primitive.name == "convert_element_type":
            x = x.astype(new.dtype) if new.dtype.itemsize <= x.dtype.itemsize else x
        else:
            x = x.reshape([m // n if d == dim else m for d, m in enumerate(new.shape)])
    return x


def _scatter(site: Site, options: Options) -> tuple[Plan, Call]:
    """Products and a `psum_scatter` of their sum."""
    eqn = site.eqn
    factors = [v for product in site.products for v in product.eqn.invars]
    terms = tuple(product.labels[:2] for product in site.products)
    scatter = labels.Scatter(site.label, site.labels, terms, eqn.invars[0].aval.dtype)

    def run(needed: set[Any], *factors: Array) -> list[Array]:
        pairs = _pairs(with_common_axes(factors, options.axes))
        return [multiply_and_scatter(options, scatter, pairs).reshape(eqn.outvars[0].aval.shape)]

    plan = plan_of_scatter(options, scatter, _pairs([v.aval for v in factors]))
    return plan, Call(eqn, factors, eqn.outvars, run)


def _pairs(factors: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(factors[::2], factors[1::2], strict=True))


def _all_reduce(site: Site, options: Options) -> tuple[Plan, Call | None]:
    """A product x @ w and a `psum` of it, perhaps with several dimensions in place of one."""
    eqn, (product, *more) = site.eqn, site.products
    x, w = product.eqn.invars
    (left, right), batch = product.eqn.params["dimension_numbers"]
    rows, inner = x.aval.ndim - len(left), len(left)
    is_matmul = left == tuple(range(rows, x.aval.ndim)) and right == tuple(range(inner))
    is_matmul &= batch == ((), ()) and product.labels[2] == site.labels
    if more or not is_matmul or not rows:
        return Plan(LAX, why="its product is no x @ w"), None
    dtype, shapes = eqn.invars[0].aval.dtype, (x.aval.shape[:rows], w.aval.shape[:inner])
    m, k, f = map(prod, (*shapes, w.aval.shape[inner:]))

    def run(needed: set[Any], x: Array, w: Array) -> list[Array]:
        exact: Any = {"precision": options.precision, "preferred_element_type": dtype}
        x, w = x.reshape(m, k), w.reshape(k, f)
        y = matmul_all_reduce(x, w, options.axes, algorithm=options.algorithm, **exact)
        return [y.reshape(eqn.outvars[0].aval.shape)]

    types = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, k), (k, f))]
    scatter = labels.Scatter("m", "mf", (("mk", "kf"),), dtype)
    return plan_of_scatter(options, scatter, _pairs(types)), Call(eqn, [x, w], eqn.outvars, run)


def _recording(site: Site, plan: Plan, jaxpr: Any) -> Call:
    """A collective as it is, whose plan is recorded."""

    def run(needed: set[Any], *xs: Any) -> list[Any]:
        xs = record_plan_at_lowering(site.kind, site.axes, xs, plan)
        return bound(jaxpr, site.eqn, xs)

    return Call(site.eqn, variables(site.eqn), results_of(site.eqn), run)
