"""The forms that "auto" may choose on other machines compute the same results."""

import re
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support import assert_same, crossed, data, make_mesh, mostly_exhaustive, per_rank
from test_matmuls import FORMS

import ringcoll
from ringcoll.matmuls import auto, forms
from ringcoll.matmuls.forms import Form, by_platform
from ringcoll.runtime import barriers, hosts


def operands(n):
    """Operands of every form, whose sizes any n divides.

    Shards have one row, so some lanes are empty.
    """
    shapes = {
        "rows gathered": ((1, 3), (3, 4)),
        "contraction gathered": ((5, 1), (n, 4)),
        "weight gathered": ((5, n), (1, 4)),
        "columns of the weight gathered": ((5, 3), (3, 1)),
        "several weights": ((1, 3), (3, 4)),
        "rows scattered": ((n, 3), (3, 4)),
    }
    return {
        name: [data((n, *shape), ranks=2 * n) % 5 - 2 for shape in pair]
        for name, pair in shapes.items()
    }


def compared(n, *variants, check_vma=True):
    """Compare results and gradients of all forms, in each variant, with those of the plain form."""

    def both(call, x, w):
        y, pull = jax.vjp(call, x, w)
        return y, pull(y)

    def program(pairs):
        return {
            name: (
                [both(partial(FORMS[name].ours, **options), *pair) for options in variants],
                both(FORMS[name].plain, *pair),
            )
            for name, pair in pairs.items()
        }

    for ours, plain in per_rank(make_mesh(n), program, operands(n), check_vma=check_vma).values():
        # + 0, because a sum that begins with a zero has no -0.0.
        assert_same(*jax.tree.map(lambda x: x + 0, (ours, [plain] * len(variants))))


@pytest.mark.parametrize(
    ("n", "joining"),
    mostly_exhaustive(
        product([2, 3, 4], ["apart", "fused", "copied"]),
        lambda n, joining: n == {"apart": 2, "fused": 3, "copied": 4}[joining],
    ),
)
def test_however_the_lanes_of_a_round_are_multiplied(n, joining, monkeypatch):
    monkeypatch.setattr(auto, "joining", lambda *_: joining)
    compared(n, {"algorithm": "bidirectional_ring"}, {"algorithm": "two_ended"})


@pytest.mark.parametrize(("n", "check_vma"), crossed([2, 3, 4, 8], [True, False]))
def test_gathers_in_a_loop_of_two_rounds_a_turn(n, check_vma, monkeypatch):
    """On an odd number of ranks, the rounds are as usual."""
    monkeypatch.setattr(auto, "pairs_pay", lambda *_: True)
    form, pair = FORMS["rows gathered"], operands(n)["rows gathered"]
    chosen = ("ring", "bidirectional_ring", "two_ended")

    def program(x, w):
        ours = [form.ours(x, w, algorithm=name) for name in chosen]
        return ours, [form.plain(x, w)] * len(chosen)

    results = per_rank(make_mesh(n), program, *pair, check_vma=check_vma)
    # + 0, because a sum that begins with a zero has no -0.0.
    assert_same(*jax.tree.map(lambda x: x + 0, results))


@pytest.mark.parametrize(("algorithm", "loops"), [("bidirectional_ring", 1), ("two_ended", 0)])
def test_only_rounds_that_forward_all_are_such_a_loop(algorithm, loops, monkeypatch):
    monkeypatch.setattr(auto, "pairs_pay", lambda *_: True)
    ours = partial(ringcoll.all_gather_matmul, axis_name="x", algorithm=algorithm)
    program = jax.shard_map(ours, mesh=make_mesh(8), in_specs=(P("x"), P()), out_specs=P("x"))
    text = str(jax.make_jaxpr(program)(jnp.zeros((8, 4)), jnp.zeros((4, 4))))
    assert text.count("unroll=2") == text.count(" scan[") == loops


@pytest.mark.parametrize(
    ("n", "check_vma"),
    mostly_exhaustive(
        [(2, True), (3, False), (4, True), (5, False), (8, True)],
        lambda n, check_vma: n == 3,
    ),
)
def test_sums_that_are_made_by_turns(n, check_vma, monkeypatch):
    """Shards have one row, so most halves are empty. On two ranks there are no turns."""
    monkeypatch.setattr(auto, "turns_pay", lambda *_: True)
    variants = [{"algorithm": algorithm} for algorithm in ("ring", "bidirectional_ring")]
    compared(n, *variants, check_vma=check_vma)


#: Which products: none, one, all.
LATE = [lambda i: False, lambda i: i == 1, lambda i: True]


@pytest.mark.parametrize(
    ("n", "check_vma", "late"),
    mostly_exhaustive(
        product([1, 3, 4], [True, False], LATE),
        lambda n, check_vma, late: n == 3 and check_vma == (late == LATE[1]),
    ),
)
def test_whichever_products_are_made_late(n, check_vma, late, monkeypatch):
    def to_gather(gather, *_):
        return auto.HIDDEN, tuple(filter(late, range(len(gather.products))))

    monkeypatch.setattr(forms, "PLAIN_ON", ())
    monkeypatch.setattr(auto, "to_gather", to_gather)
    monkeypatch.setattr(auto, "to_scatter", lambda *_: auto.HIDDEN)
    compared(n, {}, check_vma=check_vma)


@pytest.mark.parametrize(
    ("n", "check_vma"),
    mostly_exhaustive(
        product([1, 2, 3, 4, 5], [True, False]),
        lambda n, check_vma: n in (2, 3) and check_vma == (n == 3),
    ),
)
def test_sums_in_a_loop_without_barriers(n, check_vma, monkeypatch):
    """TPUs get this form. On CPUs there are barriers."""
    monkeypatch.setattr(barriers, "device_kind", lambda: None)
    assert isinstance(barriers.order_of_work(sums=True), barriers.Summing)
    compared(n, {"algorithm": "bidirectional_ring"}, check_vma=check_vma)


def test_processes_of_one_host_have_the_form_of_one_process(monkeypatch):
    """The mesh, not the number of processes, tells whether there are several hosts."""
    for module in (forms, hosts):
        monkeypatch.setattr(module, "are_cpu_processes", lambda: True)

    def call(x):
        def run(form, x):
            return (
                x + {"bidirectional_ring": 1, "ring": 1, "lax": 2, "two_ended": 3}[form.algorithm]
            )

        tpus, gpus, between = map(Form, ("bidirectional_ring", "ring", "two_ended"))
        return by_platform(("x",), tpus, gpus, between, run, x)

    run = jax.shard_map(call, mesh=make_mesh(2), in_specs=P(), out_specs=P())
    assert jax.jit(run)(jnp.float32(0)) == 2


@pytest.mark.parametrize(
    ("platform", "algorithm"),
    [("tpu", "bidirectional_ring"), ("cuda", "ring"), ("rocm", "ring"), ("cpu", "lax")],
)
def test_every_platform_has_its_form(platform, algorithm):
    """On one host. Each form adds a number of its own, which is read from the program."""
    numbers = {"bidirectional_ring": 11, "ring": 22, "lax": 33, "two_ended": 44}

    def run(form, x):
        return x + numbers[form.algorithm]

    def call(x):
        tpus, gpus = Form("bidirectional_ring", (1,)), Form("ring")
        return by_platform(("x",), tpus, gpus, Form("two_ended"), run, x)

    text = jax.jit(call).trace(1).lower(lowering_platforms=(platform,)).as_text()
    found = {*map(int, re.findall(r"dense<(\d+)>", text))}
    assert found & {*numbers.values()} == {numbers[algorithm]}
