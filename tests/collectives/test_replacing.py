"""`with ringcoll.replacing(jax.lax):`: which calls become ours, where, and that lax is restored."""

from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import MAIN
from sent import permutes
from support import assert_same, data, every_rank, make_mesh, per_rank

import ringcoll
from ringcoll import debug, lax
from ringcoll.choose.table import Table, TableRow
from ringcoll.runtime import built_in

N = 3
MESH = make_mesh(N)
NAMES = lax.__all__


def test_accumulate_dtype():
    x = np.array([[1], [256], [1]], jnp.bfloat16)  # the ring adds them up from the second
    for wide, sums in ((None, 256), ("float32", 258)):
        with ringcoll.replacing(jax.lax, algorithm="ring", accumulate_dtype=wide):
            results = per_rank(MESH, lambda x: jax.lax.psum(x, "x"), x)
            greatest = per_rank(MESH, lambda x: jax.lax.pmax(x, "x"), x)  # takes no such argument
        assert float(results[0, 0]) == sums
        assert float(greatest[1, 0]) == 256


def library(source):
    """A module of someone else's."""
    module = ModuleType("library")
    exec(source, vars(module))
    return module


BY_MODULE = library(
    "import jax\nfrom jax import lax\n"
    "def total(x): return jax.lax.psum(x, 'x')\n"
    "def mean(x): return lax.pmean(x, 'x')\n"
)
WITH_A_COPY = "from jax.lax import psum as add\ndef total(x): return add(x, 'x')\n"
BY_NAME = library(WITH_A_COPY)


def elsewhere(call):
    """The result of a call on another thread."""
    with ThreadPoolExecutor() as threads:
        return threads.submit(call).result(60)


@pytest.fixture(autouse=True)
def _is_put_back():
    yield
    for name in NAMES:
        assert getattr(jax.lax, name) is getattr(built_in, name)
    assert BY_NAME.add is built_in.psum


RING = 2 * (N - 1)  # messages of an all-reduce


def test_a_module_with_a_copy():
    with ringcoll.replacing(jax.lax, algorithm="ring"):
        assert permutes(BY_NAME.total) == 0
        with ringcoll.replacing(jax.lax, BY_NAME, algorithm="ring"):
            assert permutes(BY_NAME.total) == RING
        imported_inside = library(WITH_A_COPY)
        assert permutes(imported_inside.total) == RING
    assert permutes(imported_inside.total) == 0
    with ringcoll.replacing(BY_NAME, algorithm="ring"):
        assert permutes(BY_NAME.total) == RING
        assert permutes(BY_MODULE.total) == 0


def test_nested_regions():
    assert permutes(BY_MODULE.total) == 0
    with ringcoll.replacing(jax.lax, algorithm="ring"):
        with ringcoll.replacing(jax.lax, algorithm="recursive_doubling", only="pmean"):
            assert permutes(BY_MODULE.mean) == 2
            assert permutes(BY_MODULE.total) == RING
            with ringcoll.replacing(jax.lax, algorithm="lax", only=["psum"]):
                assert permutes(BY_MODULE.total) == 0
        assert permutes(BY_MODULE.mean) == RING
    with ringcoll.replacing(jax.lax, algorithm="ring", only=iter(["pmean"])):
        assert jax.lax.psum is built_in.psum
        assert permutes(BY_MODULE.total) == 0
        assert permutes(BY_MODULE.mean) == RING


def test_which_algorithm_is_used():
    with ringcoll.replacing(jax.lax):
        assert permutes(BY_MODULE.total) == 0
        with ringcoll.algorithm("ring"):
            assert permutes(BY_MODULE.total) == RING
    with ringcoll.replacing(jax.lax, algorithm="ring"):
        with ringcoll.algorithm("bruck"):
            assert permutes(BY_MODULE.total) == RING
        assert permutes(lambda x: jax.lax.psum(x, "x", algorithm="recursive_doubling")) == 2
        assert permutes(lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True)) == 0
    row = TableRow("psum", "*", "ring", ranks=(N, N + 1))
    with ringcoll.replacing(jax.lax, algorithm=Table((row,))):
        assert permutes(BY_MODULE.total) == RING
        assert permutes(lambda x: jax.lax.ppermute(x, "x", [(0, 1)])) == 1


def test_exceptions_and_decorators():
    with pytest.raises(ZeroDivisionError), ringcoll.replacing(jax.lax, BY_NAME):
        raise ZeroDivisionError
    assert jax.lax.psum is built_in.psum

    @ringcoll.replacing(jax.lax, BY_NAME, algorithm="ring")
    def totals(x, depth=1):
        return totals(x, depth - 1) if depth else BY_MODULE.total(x) + BY_NAME.total(x)

    x = np.arange(N * 2.0, dtype=np.float32).reshape(N, 2)
    for _ in range(2):
        np.testing.assert_array_equal(per_rank(MESH, totals, x)[1], 2 * x.sum(0))
    assert permutes(lambda x: totals(x * 2) + x) == 2 * RING
    assert permutes(BY_MODULE.total) == 0


def waiting(**options):
    """A generator that waits inside a region."""
    with ringcoll.replacing(jax.lax, **options):
        while True:
            yield permutes(BY_MODULE.total), permutes(BY_MODULE.mean)


def test_regions_of_generators():
    first, second = waiting(algorithm="ring"), waiting(algorithm="recursive_doubling", only="psum")
    assert next(first) == (RING, RING)
    assert next(second) == (2, RING)
    third = waiting(algorithm="ring")  # equal to the first
    assert next(third) == (RING, RING)
    third.close()
    assert next(second) == (2, RING)
    elsewhere(first.close)
    assert next(second) == (2, 0)  # of the first, nothing is left
    with ringcoll.replacing(jax.lax, algorithm="ring", only="pmean"):
        second.close()
        assert permutes(BY_MODULE.total) == 0
        assert permutes(BY_MODULE.mean) == RING


def test_assignments_inside_stay():
    def own(x, axis_name):
        return x

    with ringcoll.replacing(BY_NAME, algorithm="ring"):
        with ringcoll.replacing(BY_NAME):
            BY_NAME.add = own
        assert BY_NAME.add is own
    assert BY_NAME.add is own
    BY_NAME.add = built_in.psum


def test_jit_traces_again():
    """On all threads, once for each region's arguments. What is compiled stays as it was."""
    traced = []

    @jax.jit
    def inner(x):
        traced.append("inner")
        return BY_MODULE.total(x)

    @jax.jit
    def program(x):
        traced.append("program")
        scanned = lambda x: jax.lax.scan(lambda c, x: (c, inner(x)), 0, x[None])[1][0]  # noqa: E731
        return every_rank(MESH, scanned, check_vma=False)(x)

    def sends():
        return program.lower(x).as_text().count("stablehlo.collective_permute")

    x = jnp.ones((N, 2))
    compiled = program.lower(x).compile()
    for _ in range(2):  # the second time, both are known
        assert elsewhere(sends) == sends() == 0
        with ringcoll.replacing(jax.lax, algorithm="ring"):
            assert elsewhere(sends) == sends() == RING
            np.testing.assert_array_equal(program(x), N * x)
            assert "collective-permute" not in compiled.as_text()
    assert traced.count("program") == traced.count("inner") == 2
    with ringcoll.replacing(BY_NAME, algorithm="ring"):  # only the modules differ
        assert sends() == 0


def test_algorithms_of_gradients():
    @jax.custom_vjp
    def own(x):
        return jax.lax.psum(x, "x")

    own.defvjp(lambda x: (own(x), None), lambda _, ct: (jax.lax.psum(ct, "x"),))

    def later(call):
        def both(x):
            with ringcoll.replacing(jax.lax, algorithm="ring"):
                _, pull_back = jax.vjp(call, x)
            return pull_back(x)[0]

        return both

    assert permutes(later(BY_MODULE.total)) == RING  # of the forward sum nothing is left
    assert permutes(later(own)) == 0
    with ringcoll.replacing(jax.lax, algorithm="ring"):
        assert permutes(later(own)) == RING


@pytest.mark.parametrize("algorithm", ["bruck", "lax"])
def test_every_function(algorithm, monkeypatch):
    """Forward, backward, and under a deadline, whose check of all ranks gathers too."""
    n = 4
    mesh = make_mesh(n)
    # lax's own of the rest do not run on CPU.
    cases = [case for case in MAIN if case.name not in ("pbroadcast", "ragged_all_to_all")]
    operands = [data((n, *case.shape(n)), ranks=n) for case in cases]

    def calls(*xs):
        pairs = list(zip(cases, xs, strict=True))
        y = [case.by_lax(x, "x", n) for case, x in pairs]
        gathered, pull_back = jax.vjp(lambda x: jax.lax.all_gather(x, "x"), xs[0])
        return y, pull_back(gathered)

    expected = per_rank(mesh, calls, *operands)
    with ringcoll.replacing(jax.lax, algorithm=algorithm):
        for name in NAMES:
            assert getattr(jax.lax, name) is not getattr(built_in, name)
        assert_same(per_rank(mesh, calls, *operands), expected)
        jaxpr = str(jax.make_jaxpr(lambda *xs: per_rank(mesh, calls, *xs))(*operands))
        for name in (case.name for case in cases):
            if name not in ("pmean", "pswapaxes", "pshuffle"):  # made of others
                assert f"ringcoll_{name}" in jaxpr
        monkeypatch.setattr(jax, "process_count", lambda: 2)  # then ranks compare what they begin
        with debug.deadline(300):
            total = per_rank(mesh, lambda x: jax.lax.psum(x, "x"), operands[0])
        if algorithm != "lax":  # which does not run on CPU
            sent = per_rank(mesh, lambda x: jax.lax.pbroadcast(x, "x", 2), operands[0])
            assert_same(sent[1], jnp.asarray(operands[0][2]))
    assert_same(total[1], jnp.asarray(operands[0].sum(0)))


@pytest.mark.parametrize(
    ("module", "options", "kind", "words"),
    [
        ("jax.lax", {}, TypeError, r"'jax.lax'\): not a module; pass jax.lax"),
        (jnp, {}, ValueError, r"replacing\(jax.numpy\): .* none of jax.lax's all_gather"),
        (BY_NAME, {"only": "pmax"}, ValueError, "none of jax.lax's pmax; pass jax.lax"),
        (jax.lax, {"only": ["psum", "psums"]}, ValueError, "'psums'.* not a collective; pass "),
        (jax.lax, {"only": [jax.lax.psum]}, TypeError, "only=<function psum.*; pass one"),
        (jax.lax, {"only": jax.lax.psum}, TypeError, "only=<function psum.*; pass one"),
        (jax.lax, {"algorithm": "rign"}, ValueError, "algorithm='rign'.* choose from auto"),
        (jax.lax, {"accumulate_dtype": "f33"}, TypeError, "='f33'.* not a dtype"),
    ],
)
def test_refusals(module, options, kind, words):
    with pytest.raises(kind, match=words), ringcoll.replacing(module, **options):
        raise AssertionError
