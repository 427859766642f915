"""Plans of matmuls with a collective, from labels and shapes; nothing here knows an array.

On TPUs the cheapest form by price runs; elsewhere the plain one.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ringcoll.choose.plan import SYMBOLIC, Plan, Swapped, cheapest
from ringcoll.choose.under_work import gather_plans, scatter_plans
from ringcoll.costs.model import Model
from ringcoll.costs.under_work import all_to_all_seconds, built_in_seconds, nbytes
from ringcoll.matmuls import exchange
from ringcoll.matmuls.labels import Gather, Product, Scatter
from ringcoll.matmuls.work import are_known, ratio, summed, works_of


def to_gather(
    gather: Gather,
    x: Any,
    others: Sequence[Any],
    sizes: tuple[int, ...],
    model: Model,
    may_exchange: bool = True,
) -> Plan:
    """The plan of a gather with its products on TPUs.

    If the gathered operand is kept (`gather.keeps`), it is for the gradient by the other operand.
    Then that gradient costs a gather only a product, but rows would be exchanged again for it.

    Args:
        gather, x, others: as for `overlapped.gather_and_multiply`.
        sizes: the sizes of the axes.
        model: the rates of the machine.
        may_exchange: whether rows may travel in place of x.
    """
    if not are_known(x, *others):
        return SYMBOLIC
    forms = gather_forms(gather, x, others, sizes, model, may_exchange)
    plan = _cheapest(forms)
    if not (plan.then and gather.keeps):
        return plan
    (product,), (other,), n = gather.products, others, prod(sizes)
    lengths = exchange.whole_sizes(gather, product, x, other, n)
    ct = exchange.shape_of(lengths, product.out, product.dtype)
    back = replace(gather, products=(Product(product.out, product.other, other.dtype),))
    again = _cheapest(_rows(back, x, ct, sizes, model)).seconds
    late = built_in_seconds(works_of(gather, x, others, n), 0.0, n, model, gathers=False)
    kept = cheapest(form for form in forms if not form.then)
    return plan if plan.seconds + again < kept.seconds + late else kept


def _cheapest(forms: Sequence[Plan]) -> Plan:
    """The cheapest form. Where rows travel, the plan between them is the cheapest on its own.

    (So the built-in runs there too, within the error of the price.)
    """
    then = [form.then for form in forms if form.then]
    chosen = cheapest(then).name if then else ""
    return cheapest(form for form in forms if not form.then or form.then.name == chosen)


def gather_forms(
    gather: Gather,
    x: Any,
    others: Sequence[Any],
    sizes: tuple[int, ...],
    model: Model,
    may_exchange: bool = True,
) -> list[Plan]:
    """The forms of a gather with its products, with their prices; arguments as for `to_gather`."""
    n = prod(sizes)
    works, sent = works_of(gather, x, others, n), ratio(gather.wire, x.dtype)
    plans = gather_plans(works, nbytes(x), sizes, model, sent)
    # Several products share one gather, but rows would travel for each.
    may_exchange = may_exchange and len(sizes) == 1 == len(others) and not gather.wire
    rows = _rows(gather, x, others[0], sizes, model) if may_exchange else []
    return plans + rows


def _rows(gather: Gather, x: Any, other: Any, sizes: tuple[int, ...], model: Model) -> list[Plan]:
    """The forms in which x stays and rows travel; none if that is not possible."""
    (product,), n = gather.products, prod(sizes)
    after = exchange.swap_of(gather, product, other)
    if after is None:
        return []
    sent, factor = exchange.exchanged(gather, product, x, other, after, n)
    if isinstance(after, Scatter):
        then = scatter_forms(after, [(x, factor)], sizes, model)
    else:
        then = gather_forms(after, factor, [x], sizes, model, may_exchange=False)
    swap = all_to_all_seconds(nbytes(sent), n, model)
    return [Plan(one.algorithm, swap + one.seconds, form=Swapped(one)) for one in then]


def to_scatter(
    scatter: Scatter,
    pairs: Sequence[tuple[Any, Any]],
    sizes: tuple[int, ...],
    model: Model,
) -> Plan:
    """The plan of a scattered sum of products on TPUs; arguments as for `to_gather`."""
    if not are_known(*(x for pair in pairs for x in pair)):
        return SYMBOLIC
    return cheapest(scatter_forms(scatter, pairs, sizes, model))


def scatter_forms(
    scatter: Scatter, pairs: Sequence[tuple[Any, Any]], sizes: tuple[int, ...], model: Model
) -> list[Plan]:
    """The forms of a scattered sum, with their prices; arguments as for `to_gather`."""
    return scatter_plans(*summed(scatter, pairs, prod(sizes)), sizes, model)
