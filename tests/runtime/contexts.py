"""Every collective in one context after another in which JAX lowers, compiles and runs programs.

    python tests/runtime/contexts.py auto,ring two_threads exported

A context returns pairs: the rows of all ranks, and what a program of all collectives has made of
them. This must be what `jax.lax` makes of them under `vmap`, where nothing is sent. (Between
devices of a CPU, loops with lax's collectives may hang.) A fault may end the process.
"""

import gc
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax import lax as jax_lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import make_mesh

import ringcoll
from ringcoll import lax
from ringcoll.xla_cpu import loops

N = 4
MESH = make_mesh(N)
X = np.arange(1.0, 1 + N * N * 6, dtype=np.float32).reshape(N * N, 6)

Results = list[tuple[np.ndarray, dict[str, Any]]]
CONTEXTS: dict[str, Callable[[str], Results]] = {}

mapped = partial(jax.shard_map, check_vma=False, in_specs=P("x"), out_specs=P("x"))


def every(by, x):
    """The results of all collectives, and of loops and branches with some of them."""
    module, options = (jax_lax, {}) if by == "jax.lax" else (lax, {"algorithm": by})
    swaps = {"algorithm": "pairwise"} if by == "ring" else options
    psum, pmax, all_gather = (
        partial(getattr(module, name), axis_name="x", **options)
        for name in ("psum", "pmax", "all_gather")
    )

    def turn(x, _):
        return pmax(jnp.sin(x)), all_gather(x[0])

    def matmul(x):
        w = jnp.ones((6, 6))
        if module is jax_lax:
            return all_gather(x, tiled=True) @ w
        return ringcoll.all_gather_matmul(x, w, "x", algorithm=by)

    looped, (*_, last) = jax_lax.scan(turn, x * 2, length=2)
    results = {
        "psum": psum(x),
        "pmax": pmax(x),
        "pmean": module.pmean(x, "x", **options),
        "pmin": module.pmin(x, "x", **options),
        "all_gather": all_gather(x[0]),
        "all_gather of bf16": all_gather(x[0].astype(jnp.bfloat16)).astype(x.dtype),
        "psum_scatter": module.psum_scatter(x, "x", tiled=True, **options),
        "all_to_all": module.all_to_all(x, "x", 0, 0, tiled=True, **swaps),
        "pswapaxes": module.pswapaxes(x, "x", 0, **swaps),
        "ppermute": module.ppermute(x, "x", [(i, (i + 1) % N) for i in range(N)]),
        "pshuffle": module.pshuffle(x, "x", [1, 2, 3, 0]),
        "loop": looped,
        "last turn": last,
        "branch": jax_lax.cond(x[0, 0] >= 0, psum, jnp.negative, x * 3),
        "gradient": jax.grad(lambda x: jnp.sum(psum(x) * x))(x * 4),
        "matmul": matmul(x)[-N:],
        "gradient of a matmul": jax.grad(lambda x: jnp.sum(matmul(x)))(x),
    }
    if module is jax_lax:  # it has these two on GPU only
        results["pbroadcast"] = all_gather(x)[2]
        results["ragged_all_to_all"] = results["all_to_all"]
    else:
        results["pbroadcast"] = lax.pbroadcast(x, "x", 2, **options)
        one, own = jnp.ones(N, jnp.int32), jnp.full(N, jax_lax.axis_index("x"))
        rows = (x, jnp.zeros_like(x), jnp.arange(N), one, own, one)
        results["ragged_all_to_all"] = lax.ragged_all_to_all(*rows, axis_name="x", **swaps)
    return {name: jnp.broadcast_to(y, (N, 6)) for name, y in results.items()}


def step(by, **options):
    return mapped(partial(every, by), mesh=MESH, **options)


def placed(x=X, mesh=MESH, axis="x"):
    return jax.device_put(x, NamedSharding(mesh, P(axis)))


def context(run):
    CONTEXTS[run.__name__] = run
    return run


@context
def custom_partition(by):
    """XLA calls the partitioning function, in a thread of its own."""
    names = sorted(jax.eval_shape(step(by), X))

    @custom_partitioning
    def whole(x):
        return [jnp.zeros_like(x)] * len(names)

    def partition(mesh, operands, results):
        def on_a_device(x):
            results = every(by, x)
            return [results[name] for name in names]

        inputs = tuple(x.sharding for x in operands)
        return mesh, on_a_device, [y.sharding for y in results], inputs

    whole.def_partition(
        partition,
        infer_sharding_from_operands=lambda mesh, *_: [NamedSharding(mesh, P("x"))] * len(names),
        propagate_user_sharding=lambda _, users: [y.sharding for y in users],
        sharding_rule="i j -> " + ", ".join(["i j"] * len(names)),
    )
    by_rank = NamedSharding(MESH, P("x"))
    program = jax.jit(whole, in_shardings=by_rank, out_shardings=[by_rank] * len(names))
    return [(X, dict(zip(names, program(placed()), strict=True)))]


@context
def without_results(by):
    seen = []

    @partial(mapped, mesh=MESH, out_specs=None)
    def log(x):
        jax.debug.callback(seen.append, every(by, x))

    @jax.jit
    def program(x):
        log(x)
        return step(by)(x)

    results = program(placed())
    jax.effects_barrier()
    of_sums = {"psum": np.concatenate([np.asarray(results["psum"]) for results in seen])}
    return [(X, results), (X, of_sums)]


@context
def two_threads(by):
    start, pairs = threading.Barrier(2), []

    def run(number):
        start.wait()
        pairs.append((X + number, jax.jit(step(by))(placed(X + number))))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pairs) == 2
    return pairs


fails = Primitive("fails_to_lower")
fails.def_abstract_eval(lambda x: x)


def _fail(context, x):
    raise ZeroDivisionError


mlir.register_lowering(fails, _fail)


@context
def a_lowering_that_raises(by):
    program = jax.jit(mapped(lambda x: jax.tree.map(fails.bind, every(by, x)), mesh=MESH))
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            program.lower(X)
    results = jax.jit(step(by))(placed())
    gc.collect()
    assert not loops._programs, "a program is kept after its lowering"
    return [(X, results)]


@context
def exported(by):
    def program(x):  # without lax's own ragged_all_to_all for TPU, which CPU cannot compile
        return {name: y for name, y in every(by, x).items() if name != "ragged_all_to_all"}

    one, several = (
        export.export(jax.jit(mapped(program, mesh=MESH)), platforms=platforms)(X)
        for platforms in (["cpu"], ["cpu", "tpu"])
    )
    again = export.deserialize(several.serialize())
    return [(X, jax.jit(program.call)(placed())) for program in (one, again)]


@context
def cleared_listeners(by):
    """They are cleared while a program is traced, while one is lowered, and between two."""

    def program(x):
        jax.monitoring.clear_event_listeners()
        return jax.tree.map(clears.bind, every(by, x))

    def clear(context, x):
        jax.monitoring.clear_event_listeners()
        return [x]

    clears = Primitive("clears_listeners")
    clears.def_abstract_eval(lambda x: x)
    mlir.register_lowering(clears, clear)
    lowered = jax.jit(mapped(program, mesh=MESH)).lower(X)
    text = lowered.as_text()
    results = jax.jit(step(by))(placed())
    assert lowered.as_text() == text
    return [(X, results)]


expected_of_ranks = jax.jit(jax.vmap(partial(every, "jax.lax"), axis_name="x"))


def expected(rows):
    results = expected_of_ranks(rows.reshape(N, N, 6))
    return {name: np.asarray(y).reshape(N * N, 6) for name, y in results.items()}


if __name__ == "__main__":
    algorithms, *names = sys.argv[1:]
    for name in names:
        for by in algorithms.split(","):
            pairs = CONTEXTS[name](by)
            assert pairs
            for rows, results in pairs:
                assert results
                right = expected(rows)
                for collective, y in results.items():
                    np.testing.assert_array_equal(y, right[collective], f"{collective} by {by}")
        print(f"{name}: as jax.lax", flush=True)
