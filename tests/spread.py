"""Programs for several processes at once: collectives and matmuls, forward and backward.

    python tests/spread.py FOLDER --coordinator HOST:PORT --num-processes N --process-id I

Each process runs this command. It writes the results of its ranks into the folder.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import conftest  # noqa: F401 (its flags)
import jax
import numpy as np
from cases import LINEAR, MAIN, Case
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matmul_forms import FORMS
from support import data, every_rank, make_mesh, runnable, with_gradients

import ringcoll
from benchmarks.measuring import processes
from ringcoll import psum
from ringcoll.choose.table import Table, TableRow
from ringcoll.runtime import primitive
from ringcoll.schedules.registry import LAX

#: One algorithm between hosts, another within one.
BY_HOSTS = Table(
    (
        TableRow("psum", "cpu", "recursive_doubling", hosts=(2, None)),
        TableRow("psum", "cpu", "direct"),
    )
)
#: How often the programs run on real floats.
REPEATS = 3


class Program(NamedTuple):
    """A program that every rank runs.

    Attributes:
        shapes: the shapes of a rank's operands.
        run: a function of a rank's operands; it returns a pytree.
        right: a function of every rank's operands, stacked; it returns the right results of all
            ranks, stacked too. (Other tests compare matmuls in one process with lax.)
    """

    shapes: Sequence[tuple[int, ...]]
    run: Callable
    right: Callable | None = None


def programs(n: int) -> dict[str, Program]:
    """All programs that run on n ranks, by name."""
    return {**_collectives(n), **_gradients(n), **_matmuls(n), **_by_hosts(n)}


def _collectives(n: int) -> dict[str, Program]:
    """Each collective by all its algorithms; by only one if another case of it came before."""
    results, seen = {}, set()
    for turn, (name, case) in enumerate({**{c.name: c for c in MAIN}, **LINEAR}.items()):
        variants, alike = _variants(case, n), _alike(case)
        every = [*variants, *_builtins(case)]
        for options in [variants[turn % len(variants)]] if alike in seen else every:
            results[_named(name, options)] = _program(case, n, options)
        seen.add(alike)
    return results


def _by_hosts(n: int) -> dict[str, Program]:
    """The programs that depend on the number of processes."""
    return {"psum by hosts": _program(LINEAR["psum"], n, {"algorithm": BY_HOSTS})}


def _program(case: Case, n: int, options: dict[str, Any]) -> Program:
    return Program(
        [case.shape(n)], lambda x: case.ours(ringcoll, x, "x", n, **options), case.expected
    )


def _gradients(n: int) -> dict[str, Program]:
    """Gradients: each collective by one algorithm in turn."""
    results = {}
    for turn, (name, case) in enumerate(LINEAR.items()):
        variants = _variants(case, n)
        options = variants[(turn + n) % len(variants)]
        collective = _program(case, n, options).run
        result = case.expected(np.zeros((n, *case.shape(n)), np.float32)).shape[1:]

        def run(x, ct, collective=collective):
            return jax.vjp(collective, x)[1](ct)[0]

        def right(x, ct, case=case):
            return case.gradient(ct)

        results[_named(f"gradient of {name}", options)] = Program(
            [case.shape(n), result], run, right
        )
    return results


def _matmuls(n: int) -> dict[str, Program]:
    """Matmuls with gradients, each by one algorithm in turn, on two of three numbers of ranks."""
    results, variants = {}, _variants(LINEAR["all_gather"], n)
    for turn, (name, form) in enumerate(FORMS.items()):
        options = variants[(turn + n) % len(variants)]
        if (turn - n) % 3:
            run = with_gradients(partial(form.ours, **options))
            results[_named(name, options)] = Program(form.shapes(n), run)
    return results


def _variants(case: Case, n: int) -> list[dict[str, Any]]:
    """The arguments that choose each algorithm."""
    if not case.takes_algorithm:
        return [{}]
    return [{"algorithm": algorithm} for algorithm in runnable(case.collective, n)]


def _alike(case: Case) -> str:
    """The collective whose algorithms a case runs by, and whose code."""
    return "psum" if case.name in ("pmax", "pmin") else case.collective


def _builtins(case: Case) -> list[dict[str, Any]]:
    """The arguments that choose JAX's built-in collective, for the whole call or a part of it."""
    if not case.takes_algorithm:
        return []
    if case.name == "psum_scatter" and jax.__version_info__ < (0, 11):
        return []  # over gloo it was wrong in 2 of 40 runs of 0.10.2, and no error came
    return [{"algorithm": LAX}]


def _named(name: str, options: dict[str, str]) -> str:
    return " ".join([name, *options.values()])


def exact(shape: Sequence[int], ranks: int) -> np.ndarray:
    """Integers that are multiples of the number of ranks, so that means are exact."""
    return ranks * (data(shape, ranks=8 * ranks) % 5 - 2)


def real(shape: Sequence[int], ranks: int) -> np.ndarray:
    """Floats whose sums depend on the order."""
    return np.random.default_rng(ranks).standard_normal(shape, np.float32)


def operands(n: int, make: Callable) -> dict[str, list[np.ndarray]]:
    """The operands of every rank for every program."""
    return {
        name: [make((n, *shape), n) for shape in one.shapes] for name, one in programs(n).items()
    }


def leaves(name: str, results: Any) -> dict[str, Any]:
    """The leaves of a program's results, each with a name."""
    return {f"{name}, {i}": leaf for i, leaf in enumerate(jax.tree.leaves(results))}


def held(n: int) -> dict[str, np.ndarray]:
    """The results on the ranks of this process, by name: `[1 + REPEATS, ranks, ...]` each.

    The first run is on exact data; the others are all on the same real floats.
    """
    if jax.__version_info__ >= (0, 11):
        return _held(n)
    # Here all programs are compiled as one, which has loops in one process but not in several. The
    # code that makes loops wait reads messages; then XLA rounds products elsewhere in JAX 0.10.
    with mock.patch.object(primitive, "on_lowering", []):
        return _held(n)


def _held(n: int) -> dict[str, np.ndarray]:
    mesh, every = make_mesh(n), programs(n)

    def at_once(operands):
        arrays = {}
        for name, factors in operands.items():
            arrays |= leaves(name, every[name].run(*factors))
        return arrays

    def placed(x):
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P("x")), x.__getitem__)

    def own(x):
        shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start)
        return np.concatenate([shard.data for shard in shards])

    def results(operands):
        # The programs that depend on processes are compiled apart. Otherwise they would change how
        # the rest is compiled, and so the last bits of products.
        chosen = {name: operands[name] for name in _by_hosts(n) if name in operands}
        rest = {name: some for name, some in operands.items() if name not in chosen}
        found = [run(jax.tree.map(placed, some)) for some in (rest, chosen) if some]
        return jax.tree.map(own, {name: x for some in found for name, x in some.items()})

    run = jax.jit(every_rank(mesh, at_once, check_vma=False))
    of = [operands(n, exact), *[operands(n, real)] * REPEATS]
    found = [results(some) for some in of]
    return {name: np.stack([one[name] for one in found]) for name in found[0]}


def chosen() -> str:
    """Lines: what "auto" runs between hosts, within each host, and over all ranks."""
    own = jax.local_device_count()
    mesh = make_mesh(jax.process_count(), own)
    x = jax.ShapeDtypeStruct((1024, 1024), np.float32)
    lines = []
    for axes in ("x", ("x", "y"), "y")[: 2 + (own > 1)]:

        def call(x, axes=axes):
            return psum(x[:8], axes, algorithm=BY_HOSTS)

        mapped = jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        text = jax.jit(mapped).lower(x).compile().as_text()
        by = sorted(set(re.findall(r"ringcoll\.\w+\((\w+)\)", text)))
        lines.append(f"psum over {axes}: {', '.join(by)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    processes.add_arguments(parser)
    args = parser.parse_args()
    processes.start(args)
    args.folder.joinpath(f"{jax.process_index()}.txt").write_text(chosen(), encoding="utf-8")
    np.savez(args.folder / f"{jax.process_index()}.npz", **held(jax.device_count()))


if __name__ == "__main__":
    main()
