"""`ringcoll.overlapped` and `replaced`: a function's program has the same values, types, gradients.

On CPU "auto" takes no site, so sites are taken by a named algorithm.
"""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from support import every_rank, make_mesh, mostly_exhaustive, per_rank

import ringcoll

ROWS, WIDTH = 6, 8
gathered = partial(lax.all_gather, axis_name="x", tiled=True)
scattered = partial(lax.psum_scatter, axis_name="x", tiled=True)


def mlp(x, w):
    h = gathered(x)
    return scattered(jnp.tanh(h @ w) * (h @ w.T) @ w)


def kept(x, w):  # the gathered array, a cast of its transpose, and a product that comes later
    h = gathered(x)
    y = h @ w
    return scattered(y @ (h.T @ y).astype(jnp.float32).astype(x.dtype)) + h.mean() + h[:ROWS]


def casts(x, w):  # a narrow shard travels; a sum is made of narrow products
    h = gathered(x.astype(jnp.float32)).astype(jnp.bfloat16)
    y = lax.dot(h, w.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    narrow = gathered(x.astype(jnp.bfloat16)).astype(jnp.float32)
    y = y + narrow @ w.astype(jnp.float32)
    return scattered((y @ w.astype(y.dtype)).astype(jnp.bfloat16)).astype(x.dtype)


def moved(x, w):  # transposes and reshapes that cut no shard, and an untiled gather and sum
    h = gathered(x.T, axis=1).reshape(2, WIDTH // 2, -1)
    y = jnp.einsum("hks,hkf->sf", h, w.reshape(2, WIDTH // 2, WIDTH))
    z = lax.all_gather(x, "x", axis=1) @ w
    summed = lax.psum_scatter(jnp.einsum("rnf,fd->ndr", z, w).swapaxes(1, 2), "x")
    return scattered(y @ w) + summed + lax.psum_scatter(z @ w, "x", scatter_dimension=1)


def rounded(x, w):  # a sum of integers, and a gathered float of the same size
    y = gathered(x.astype(jnp.bfloat16)).astype(jnp.float16) @ w.astype(jnp.float16)
    return scattered(jnp.round(y * 8).astype(jnp.int32)).astype(x.dtype)


def contracted(x, w):
    return gathered(x, axis=1) @ jnp.concatenate([w] * lax.axis_size("x"))


def weights(x, w):  # the weight's gather stays whole, the sum has the product
    return scattered(jnp.sin(x) @ gathered(w, axis=1), scatter_dimension=1)


def both(x, w):  # the gather of what was just computed has the product
    return scattered(gathered(jnp.sin(x)) @ gathered(w, axis=1)[:, :WIDTH])


def terms(x, w):
    h = jnp.concatenate([x] * lax.axis_size("x"))
    return scattered(h @ w + (w.T @ h.T).T - 0 * x[:1, :1])


def all_reduced(x, w):
    y = lax.psum(jnp.einsum("shk,hkd->sd", x.reshape(ROWS, 2, -1), w.reshape(2, -1, WIDTH)), "x")
    return x + y


def batched(x, w):
    h = gathered(x.reshape(2, -1, WIDTH), axis=1)
    scores = jnp.einsum("bsd,btd->bst", h, h @ w)
    return scattered(scores @ h, scatter_dimension=1).reshape(x.shape)


def crossed(x, w):  # two gathers, whose second products need the first of the other
    a, b = gathered(jnp.sin(x)), gathered(jnp.cos(x))
    first = a @ w
    second = jnp.tanh(b @ (first.T @ first))
    return (a @ (second.T @ second))[:ROWS] / ROWS + (b @ w)[:ROWS]


@jax.custom_vjp
def custom(x, w):
    return scattered(gathered(x) @ w)


custom.defvjp(lambda x, w: (custom(x, w), (x, w)), lambda operands, ct: operands)


GATHER, SCATTER, SUM = "all_gather_einsum", "einsum_reduce_scatter", "psum"
#: Functions of a shard and a weight, and the calls that take their places, with the plan's reason
#: where one is left.
FORMS = {
    mlp: [GATHER, SCATTER],
    kept: [GATHER, SCATTER],
    casts: [GATHER, GATHER, SCATTER],
    moved: [GATHER, GATHER, SCATTER, SCATTER, SCATTER],
    rounded: [GATHER, "psum_scatter: not all that it adds are products"],
    contracted: [GATHER],
    weights: [SCATTER, "all_gather: another collective has its products"],
    both: [GATHER, "all_gather: no product takes it: slice", "psum_scatter: another"],
    terms: ["psum_scatter: not all that it adds are products"],
    all_reduced: [SCATTER, "all_gather"],
    batched: [GATHER, SCATTER],
    crossed: [GATHER, GATHER],
    custom: ["custom_vjp_call: a function with its own derivative stays whole"],
}


def in_scan(f):
    def scanned(x, w):
        stacked = jnp.broadcast_to(w, (2, *w.shape))
        return lax.scan(lambda x, w: (f(x, w), x.sum()), x, stacked)[0]

    return scanned


def in_while(f):
    def body(state):
        i, x, w = state
        return i + 1, f(x, w), w

    return lambda x, w: lax.while_loop(lambda state: state[0] < 2, body, (0, x, w))[1]


def in_cond(f):
    return lambda x, w: lax.cond(lax.psum(x[0, 0], "x") > 0, f, lambda x, w: x * 2 - x, x, w)


def in_vmap(f):
    return lambda x, w: jax.vmap(f)(jnp.stack([x, -x]), jnp.stack([w, w.T])).sum(0)


NESTS = {
    "none": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": in_scan,
    "scan of checkpoint": lambda f: in_scan(jax.checkpoint(f)),
    "cond": in_cond,
    "while": in_while,
    "vmap": in_vmap,
    "scan in jit": lambda f: jax.jit(in_scan(f)),
}


def operands(n, dtype):
    random = np.random.default_rng(n)
    return tuple(
        (random.normal(size=(n, *shape)) / 3).astype(dtype)
        for shape in ((ROWS, WIDTH), (WIDTH, WIDTH))
    )


def gradients(f):
    return lambda x, w: jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1))(x, w)


FACTORS = {
    "form": list(FORMS),
    "nest": list(NESTS),
    "n": [2, 3, 8],
    "dtype": [jnp.float32, jnp.bfloat16],
    "check_vma": [True, False],
    "gradient": ["none", "outside", "inside"],
    "algorithm": ["ring", "bidirectional_ring", "lax"],
}


def cannot(case):
    is_loop = case.get("nest") == "while" and case.get("gradient", "none") != "none"
    is_cut = case.get("form") is crossed and case.get("dtype") == jnp.bfloat16  # cancels
    return is_loop or is_cut


def name(case):
    return "-".join(str(getattr(value, "__name__", value)) for value in case.values())


CASES = covering(FACTORS, cannot)


@pytest.mark.parametrize(
    "case", mostly_exhaustive(CASES, lambda case: CASES.index(case) % 3 == 0), ids=name
)
def test_values_types_and_gradients(case):
    n, xs = case["n"], operands(case["n"], case["dtype"])
    f, mesh = NESTS[case["nest"]](case["form"]), make_mesh(case["n"])
    ours = partial(ringcoll.overlapped, algorithm=case["algorithm"])
    forms = {
        "none": (f, ours(f)),
        "outside": (gradients(f), gradients(ours(f))),
        "inside": (gradients(f), ours(gradients(f))),
    }
    expected, found = forms[case["gradient"]]

    def both(*operands):
        pair = expected(*operands), found(*operands)
        types = [jax.tree.map(jax.typeof, result) for result in pair]
        assert types[0] == types[1]
        return pair

    theirs, mine = per_rank(mesh, both, *xs, check_vma=case["check_vma"])
    eps = float(jnp.finfo(jnp.bfloat16 if case["form"] is casts else case["dtype"]).eps)
    for right, x in zip(jax.tree.leaves(theirs), jax.tree.leaves(mine), strict=True):
        right, x = (np.asarray(one, np.float64) for one in (right, x))
        assert np.abs(x - right).max() <= 16 * n**0.5 * eps * max(np.abs(right).max(), 1)


def calls(f, *xs, n=2, **options):
    """The calls in a function's program after `overlapped`, with the reason where one is left."""
    ours = ringcoll.overlapped(f, **{"algorithm": "ring"} | options)
    plans = ringcoll.explain(every_rank(make_mesh(n), ours, True))(*(xs or operands(n, "f4"))).plans
    found = [(words.split(" over ")[0], plan) for words, plan in plans]
    return [call if plan.algorithm != "lax" else f"{call}: {plan.why}" for call, plan in found]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_taken(form):
    for nest in ("none", "scan of checkpoint"):
        found = calls(NESTS[nest](form))
        assert len(found) == len(FORMS[form]), found
        for call, expected in zip(sorted(found), sorted(FORMS[form]), strict=True):
            assert call.startswith(expected), found
    if form is not custom:
        left = calls(form, algorithm="lax")
        assert all(": " in call for call in left), left


def test_over_several_axes_and_in_groups():
    mesh, xs = make_mesh(2, 2), operands(4, "f4")

    def f(x, w):
        h = lax.all_gather(x, ("y", "x"), tiled=True) @ w
        part = lax.all_gather(x, "x", axis_index_groups=[[1, 0]], tiled=True) @ w
        return lax.psum_scatter(h @ w, ("x", "y"), tiled=True) + part[:ROWS]

    ours = ringcoll.overlapped(f, algorithm="two_ended")
    expected, found = (per_rank(mesh, g, *xs) for g in (gradients(f), gradients(ours)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)
    plans = ringcoll.explain(every_rank(mesh, ours, True))(*xs).plans
    assert [plan.algorithm for _, plan in plans] == ["two_ended", "lax", "two_ended"]
    assert plans[1][1].why.startswith("its ranks are in groups")


def test_only_and_choices(tmp_path):
    assert calls(mlp, only="psum_scatter") == ["all_gather: left by only=", SCATTER]
    key = f"psum_scatter over x, float32[{2 * ROWS},{WIDTH}] [{2 * ROWS},{WIDTH}] [{WIDTH},{WIDTH}]"
    named = [GATHER, "psum_scatter: named by the caller"]
    file = tmp_path / "choices.json"
    file.write_text(json.dumps({key: "lax", "stale": "ring"}), encoding="utf-8")
    with pytest.warns(UserWarning, match="choices= has no place of mlp: stale$"):
        assert calls(mlp, choices=file) == named
    ours = ringcoll.overlapped(mlp, choices={"stale": "ring"})
    with pytest.warns(UserWarning, match="stale"):
        per_rank(make_mesh(2), ours, *operands(2, "f4"))
    per_rank(make_mesh(2), lambda *xs: ours(*xs), *operands(2, "f4"))  # warned already
    assert calls(mlp, algorithm="auto", choices={key: "ring"})[1] == SCATTER
    part = f"all_gather over x, float32[{ROWS},{WIDTH}] [{WIDTH},{WIDTH}] [{2 * ROWS},{WIDTH}]"
    assert calls(kept, choices={part: "lax"}) == ["all_gather: named by the caller", SCATTER]
    assert calls(mlp, n=1) == ["all_gather: there is one rank", "psum_scatter: there is one rank"]


def test_the_function_itself_is_called_if_no_site_is_taken():
    traced = []

    def f(x, w, *, scale, name):
        assert (scale, name) == (2, "f")  # no arrays: they pass as they are
        traced.append(mlp(x, w))
        return {"y": traced[-1] * scale, "name": name}

    mesh, xs = make_mesh(2), operands(2, "f4")
    for algorithm, times in (("auto", 2), ("ring", 1)):
        traced.clear()
        ours = partial(ringcoll.overlapped(f, algorithm=algorithm), scale=2, name="f")
        found = per_rank(mesh, lambda x, w, ours=ours: ours(x, w)["y"], *xs)
        assert len(traced) == times
        expected = per_rank(mesh, lambda x, w: 2 * mlp(x, w), *xs)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_effects_names_and_lines_stay(capfd):
    def f(x, w):
        jax.debug.print("before")
        with jax.named_scope("inner"):
            y = checkpoint_name(mlp(x, w), "kept")
        jax.debug.print("after")
        return jnp.sin(y)

    saved = jax.checkpoint_policies.save_only_these_names("kept")
    f, xs, lines = in_scan(jax.checkpoint(f, policy=saved)), operands(2, "f4"), []
    for g in (f, ringcoll.overlapped(f, algorithm="ring")):
        program = jax.jit(every_rank(make_mesh(2), gradients(g), False)).lower(*xs)
        text = program.as_text(debug_info=True)
        assert "inner" in text
        assert "test_overlapped.py" in text
        program.compile()(*xs)
        jax.effects_barrier()
        lines.append(sorted(capfd.readouterr().out.split()))
    assert lines[0] == lines[1] != []


@pytest.mark.parametrize(
    ("transform", "given", "kind", "words"),
    [
        (ringcoll.overlapped, {"f": 3}, TypeError, "f is a int, no function; pass a function"),
        (ringcoll.overlapped, {"algorithm": "rign"}, ValueError, "choose from auto"),
        (ringcoll.overlapped, {"choices": {"a": "rign"}}, ValueError, "choose from auto"),
        (ringcoll.overlapped, {"choices": ["ring"]}, TypeError, "a list; pass algorithms by place"),
        (ringcoll.overlapped, {"only": "pmax"}, ValueError, "only='pmax': .* from all_gather"),
        (ringcoll.replaced, {"f": 3}, TypeError, "f is a int, no function; pass a function"),
        (ringcoll.replaced, {"only": ["pmean"]}, ValueError, "only='pmean': .* choose from all"),
        (ringcoll.replaced, {"accumulate_dtype": "f33"}, TypeError, "'f33'"),
    ],
)
def test_refusals(transform, given, kind, words):
    with pytest.raises(kind, match=words):
        transform(**{"f": mlp} | given)
