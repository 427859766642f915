"""Run random calls and compare results: several in one program, or one by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives import ragged
from benchmarks.collectives.references import OTHERS
from benchmarks.measuring import processes
from benchmarks.measuring.data import count_wrong
from benchmarks.soak import expected
from benchmarks.soak.random_calls import RandomCall
from ringcoll import lax as our_lax

#: Options with which LLVM does not optimise: a program that runs once need not be fast.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class Fault:
    """A wrong call.

    Attributes:
        call: the call.
        words: what is wrong.
        shown_by: the numbers of the calls whose program shows the fault; only its own number if it
            is wrong by itself.
    """

    call: RandomCall
    words: str
    shown_by: Sequence[int]

    def __str__(self) -> str:
        together = "" if len(self.shown_by) == 1 else "right alone; together with its neighbours: "
        return f"call {self.call.number}: {together}{self.words}: {self.call}"


def faults(calls: Sequence[RandomCall]) -> list[Fault]:
    """Run calls of one setting in one program; then run each call with a wrong result by itself."""
    together = attempt(calls)
    suspects = [(call, words) for call, words in zip(calls, together, strict=True) if words]
    if len(calls) == 1:
        return [Fault(call, words, [call.number]) for call, words in suspects]
    alone = [fault for call, _ in suspects for fault in faults([call])]
    if alone and len(set(together)) == 1:  # these calls are why the program raised
        return alone
    found = {fault.call.number for fault in alone}
    numbers = [call.number for call in calls]
    others = [Fault(c, words, numbers) for c, words in suspects if c.number not in found]
    return [*alone, *others]


def attempt(calls: Sequence[RandomCall]) -> list[str]:
    """What is wrong with each call, in words; "" if nothing is."""
    try:
        return _compare(calls)
    except Exception as error:  # any exception is a finding
        return [f"{type(error).__name__}: {error}"] * len(calls)


def _compare(calls: Sequence[RandomCall]) -> list[str]:
    setting = calls[0].setting
    mesh = setting.mesh()
    with jax.enable_x64(setting.x64):
        operands, expected = zip(*map(_data, calls), strict=True)
        options = QUICKLY if mesh.devices.flat[0].platform == "cpu" else None

        def run(operands: Any) -> list[Any]:
            return [_one(call, mesh, *of) for call, of in zip(calls, operands, strict=True)]

        program = jax.jit(run, compiler_options=options)
        results = program(jax.tree.map(partial(_place, mesh), operands))
        wrong = [_count_wrong(*both) for both in zip(results, expected, strict=True)]
    if not processes.total(sum(wrong)):
        return [""] * len(calls)
    words = []
    for mine, right in zip(wrong, expected, strict=True):
        k = processes.total(mine)
        of = sum(y.size for y in jax.tree.leaves(right[0]))
        words.append(f"{k} of {of} elements are wrong" if k else "")
    return words


def _data(call: RandomCall) -> tuple[Any, list[Any]]:
    """All ranks' operands and cotangents, and the results that count as right."""
    xs = expected.operands(call)
    ys = expected.results(call, xs)
    cts = expected.cotangents(call, ys)
    right = [(ys, expected.gradients(call, cts))]
    if call.name in OTHERS:
        right.append((expected.results(call, xs, OTHERS), expected.gradients(call, cts, OTHERS)))
    return (xs, cts), right


def _place(mesh: Mesh, x: np.ndarray) -> Array:
    """Put each rank's part on its device."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _one(call: RandomCall, mesh: Mesh, xs: list[Array], cts: list[Array]) -> tuple[Any, Any]:
    """All ranks' results and gradients.

    The gradient is taken outside `shard_map`, so it is that of all ranks' results by all ranks'
    operands.
    """

    def one_rank(xs: list[Array]) -> list[Array]:
        function = partial(_call, call)
        if call.batch is not None:
            function = jax.vmap(function, call.batch, 0)
        return [y[None] for y in function([x[0] for x in xs])]

    spec = P(mesh.axis_names)
    mapped = jax.shard_map(
        one_rank, mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=call.setting.check_vma
    )
    if not call.pulls_back:
        return mapped(xs), []
    ys, back = jax.vjp(mapped, xs)
    return ys, back(cts)[0]


def _call(call: RandomCall, xs: list[Array]) -> list[Array]:
    if call.name == "ragged_all_to_all":  # it takes only arrays, not pytrees
        return [ragged.call(our_lax, x, call.axes, **call.arguments) for x in xs]
    return getattr(our_lax, call.name)(xs, call.axes, **call.arguments)


def _count_wrong(result: Any, right: Sequence[Any]) -> int:
    """The number of wrong elements on the ranks of this process.

    Ranks may match different ones of the results that count as right.
    """
    arrays = zip(*map(jax.tree.leaves, (result, *right)), strict=True)
    return sum(
        min(count_wrong(np.asarray(shard.data), truth[shard.index]) for truth in these)
        for y, *these in arrays
        for shard in y.addressable_shards
    )
