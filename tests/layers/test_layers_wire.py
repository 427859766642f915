"""Layers with a wire: what is gathered and summed is encoded; what stays exact stays exact."""

import re
from functools import partial
from itertools import cycle

import jax
import jax.numpy as jnp
import layer_references as reference
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import SIZES, make_mesh, mostly_exhaustive

import ringcoll
from ringcoll import Wire, precision
from ringcoll.costs.wire import CODES
from ringcoll.layers import fsdp
from ringcoll.layers import tensor_parallel as tp


@pytest.mark.parametrize("check_vma", [True, False])
def test_fsdp_sends_bytes_and_only_where_it_is_asked_to(check_vma):
    mesh, rng = make_mesh(2, 2), np.random.default_rng(0)
    params = {"w": rng.normal(size=(64, 64)).astype(np.float32), "b": np.ones(64, np.float32)}
    specs = {"w": P(None, "x"), "b": P()}
    x = rng.normal(size=(8, 64)).astype(np.float32)

    def of(fused, arrives, **wires):
        def loss(params, x):
            if arrives:
                y = fsdp.linear({"kernel": params["w"]}, x, "x", replicas="y", **wires)
                return (y**2).sum(keepdims=True)
            gathered = fsdp.gather(params, specs, "x", replicas="y", fused=fused, **wires)
            y = fsdp.linear({"kernel": gathered["w"]}, x, "x") if fused else x @ gathered["w"]
            return ((y + gathered["b"][None]) ** 2).sum(keepdims=True)

        mapped = jax.shard_map(
            loss,
            mesh=mesh,
            in_specs=(specs, P(("x", "y"))),
            out_specs=P(("x", "y"), None),
            check_vma=check_vma,
        )
        return jax.jit(jax.value_and_grad(lambda p: mapped(p, x).sum()))

    for fused, arrives in (False, False), (True, False), (False, True):
        exact = of(fused, arrives)(params)[1]
        for wires in {"wire": "int8"}, {"gradient_wire": Wire("int8", 64)}:
            program = of(fused, arrives, **wires)
            got = program(params)[1]
            off = abs(got["w"] - exact["w"]).max() / abs(exact["w"]).max()
            assert 1e-5 < off < 0.05, (fused, arrives, wires, off)
            if "gradient_wire" in wires:  # the others' gradients are exact
                np.testing.assert_allclose(got["b"], exact["b"], rtol=1e-5)
            assert re.search(
                r"all_gather.*ui8|all_to_all.*ui8", program.lower(params).as_text(), re.S
            )


def test_tensor_parallel_layers_take_both_wires():
    mesh, rng = make_mesh(4), np.random.default_rng(0)
    up, down = (rng.normal(size=s).astype(np.float32) for s in ((16, 32), (32, 16)))
    x = rng.normal(size=(8, 16)).astype(np.float32)

    def loss(wires, up, down, x):
        y = tp.column_linear({"kernel": up}, x, "x", **wires)
        y = tp.row_linear({"kernel": down}, y, "x", **wires)
        return (y**2).sum(keepdims=True)

    def gradients(**wires):
        specs = (P(None, "x"), P("x"), P("x"))
        mapped = jax.shard_map(
            lambda *of: loss(wires, *of), mesh=mesh, in_specs=specs, out_specs=P("x", None)
        )
        return jax.jit(jax.value_and_grad(lambda *of: mapped(*of).sum(), (0, 1, 2)))(up, down, x)

    value, exact = gradients()
    forward, backward = gradients(wire="int8"), gradients(gradient_wire="int8")
    assert backward[0] == value != forward[0]
    for _, grads in forward, backward:
        for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
            assert 1e-6 < abs(got - wanted).max() / abs(wanted).max() < 0.05
    with pytest.raises(ValueError, match="only rounds to nearest"):
        gradients(wire=Wire("int8", stochastic=jax.random.key(0)))
    whole = {"sequence_parallel": False, "gradient_wire": "int3"}  # not used there, yet no wire
    with pytest.raises(ValueError, match="int3"):
        jax.eval_shape(
            jax.shard_map(
                lambda y, down: tp.row_linear({"kernel": down}, y, "x", **whole),
                mesh=mesh,
                in_specs=(P(None, "x"), P("x")),
                out_specs=P(),
            ),
            np.ones((8, 32), np.float32),
            down,
        )
    assert jnp.isfinite(value)


def test_the_wire_of_a_gradient_may_be_that_of_its_layer():
    mesh, x, kernel, ids = make_mesh(4), np.ones((8, 16)), np.ones((16, 32)), np.arange(8)
    columns, rows = P(None, "x"), P("x")
    layers = {
        "column_linear": (  # a gradient of x, which types say is the same on all ranks
            lambda x, w, **options: tp.column_linear(w, x, "x", sequence_parallel=False, **options),
            (x, kernel),
            (P(), columns),
            columns,
        ),
        "embed": (
            lambda w, ids, **options: tp.embed({"embedding": w}, ids, "x", **options),
            (kernel, ids),
            (rows, P()),
            rows,
        ),
        "gather": (
            lambda w, **options: fsdp.gather(w, columns, "x", **options),
            (kernel,),
            (columns,),
            P(),
        ),
        "linear": (
            lambda w, x, **options: fsdp.linear({"kernel": w}, x, "x", replicas="x", **options),
            (kernel, x),
            (columns, rows),
            rows,
        ),
    }
    for name, (layer, operands, in_specs, out_specs) in layers.items():
        operands = [jnp.asarray(x, jnp.float32 if x.ndim > 1 else None) for x in operands]
        programs = []
        for gradient_wire in "same", "int8", None:
            mapped = jax.shard_map(
                partial(layer, wire="int8", gradient_wire=gradient_wire),
                mesh=mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                check_vma=name == "column_linear",
            )
            gradient = jax.grad(lambda first, *rest, mapped=mapped: mapped(first, *rest).sum())
            programs.append(str(jax.make_jaxpr(gradient)(*operands)))
        same, given, floats = programs
        assert same == given != floats, name


D, K = 8, 4
#: Layers that gather, compute and scatter, and the same on one device.
LAYERS = {
    "mlp": (tp.mlp, reference.mlp),
    "gated_mlp": (tp.gated_mlp, reference.gated_mlp),
    "attention": (partial(tp.attention, attend=reference.attend), reference.attention),
}


def parameters(n):
    rng = np.random.default_rng(n)
    shapes = {"gate": (D, 3 * n), "up": (D, 3 * n), "down": (3 * n, D)}
    shapes |= {"query": (D, 2 * n, K), "key": (D, n, K), "value": (D, n, K), "out": (2 * n, K, D)}
    shapes |= {"embedding": (4 * n, D), "unembedding": (D, 4 * n)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def of_ranks(params, n):
    """Each rank's part. The results for these parts add up to the result of the layer."""
    dims = {**tp.COLUMNS, **tp.ROWS}
    parts = {name: np.split(x, n, dims[name] % x.ndim) for name, x in params.items()}
    return [{name: part[r] for name, part in parts.items()} for r in range(n)]


def bound(collective, n, wire):
    """Relative to the sum of the ranks' largest magnitudes: one encoding, and float32 roundings."""
    if n == 1:
        return 2.0**-18
    return precision.error_bound(collective, "direct", (n,), 2.0**-23, wire=wire) + 2.0**-18


def check(got, terms, most, what):
    """Assert that `got` is the sum of the terms, up to `most` times the sum of their magnitudes."""
    off, allowed = np.abs(got - sum(terms)).max(), most * sum(np.abs(x).max() for x in terms)
    assert off <= allowed, (what, off, allowed)


def cases():
    """Every number of ranks in both modes, with codes and types in turn; on two ranks all types."""
    modes = [(n, parallel) for n in SIZES for parallel in (True, False)]
    turns = zip(modes, cycle(CODES), cycle((True, True, False, False)), strict=False)
    some = [(n, codes, parallel, check_vma) for (n, parallel), codes, check_vma in turns]
    usual = [(3, "int8", True, True), (2, "float8_e4m3fn", False, False)]
    others = [(2, "int8", True, False), (2, "float8_e5m2", True, True), (2, "int8", False, True)]
    return mostly_exhaustive(dict.fromkeys([*usual, *others, *some]), lambda *case: case in usual)


@pytest.mark.parametrize(("n", "codes", "sequence_parallel", "check_vma"), cases())
def test_layers_are_their_collectives_with_a_wire(n, codes, sequence_parallel, check_vma):
    """What is gathered is what `all_gather` decodes; what is summed is within the sum's bound."""
    wires = {"wire": Wire(codes, 8), "gradient_wire": Wire(codes, 4)}
    wire, back = wires.values()
    mode = {"axis_name": "z", "sequence_parallel": sequence_parallel, **wires}
    mesh, params, rng = make_mesh(n, names="z"), parameters(n), np.random.default_rng(1)
    x, ct = rng.normal(size=(2, 3, 2 * n, D)).astype(np.float32)
    tokens = rng.integers(0, 4 * n, (3, 2 * n))
    spec = P(None, "z") if sequence_parallel else P()

    def program(params, x, ct):
        def decoded(x, wire):
            return ringcoll.all_gather(x, "z", axis=1, tiled=True, wire=wire)

        by_layers = {
            name: jax.vjp(partial(call, **mode), params, x) for name, (call, _) in LAYERS.items()
        }
        by_layers["embed"] = jax.vjp(lambda params: tp.embed(params, tokens, **mode), params)
        logits, pull = jax.vjp(partial(tp.unembed, **mode), params, x)
        if sequence_parallel or check_vma:  # else a gradient is a rank's own share
            done = {name: (y, pull_back(ct)) for name, (y, pull_back) in by_layers.items()}
            done["unembed"] = logits, pull(jnp.cos(logits))
        else:
            done = {name: (y, None) for name, (y, _) in by_layers.items()} | {
                "unembed": (logits, None)
            }
        if not sequence_parallel:
            return done, jnp.zeros(n), jnp.zeros(n)
        return done, decoded(x, wire)[None], decoded(ct, back)[None]

    specs = tp.partition_specs(params, "z")
    gradients = (specs, spec) if sequence_parallel or check_vma else None
    outs = dict.fromkeys(LAYERS, (spec, gradients))
    outs |= {"embed": (spec, gradients and gradients[:1])}
    outs |= {"unembed": (P(None, None, "z"), gradients)}
    mapped = jax.shard_map(
        program,
        mesh=mesh,
        in_specs=(specs, spec, spec),
        out_specs=(outs, P("z"), P("z")),
        check_vma=check_vma,
    )
    with jax.numpy_rank_promotion("allow"):
        done, xs, cts = jax.device_get(jax.jit(mapped)(params, x, ct))
        gathered, ct_gathered = (xs[0], cts[0]) if sequence_parallel else (x, ct)
        for each in (xs, cts):
            assert (each == each[:1]).all()
        collective = "psum_scatter" if sequence_parallel else "psum"
        parts = of_ranks(params, n)

        def check_gradients(name, calls, gradients, of_parts):
            """Compare with the gradients of each rank's part, for its part of the cotangent."""
            of_params, of_x = gradients
            pulled = [
                jax.vjp(call, part, gathered)[1](ct)
                for call, part, ct in zip(calls, parts, of_parts, strict=True)
            ]
            got = of_ranks(of_params, n)
            for r, (wanted, _) in enumerate(pulled):
                for leaf in wanted:
                    check(got[r][leaf], [wanted[leaf]], 2.0**-16, (name, leaf))
            check(of_x, [term for _, term in pulled], bound(collective, n, back), (name, "x"))

        for name, (_, call) in LAYERS.items():
            y, gradients = done[name]
            terms = [np.asarray(call(part, gathered)) for part in parts]
            check(y, terms, bound(collective, n, wire), name)
            assert (np.abs(y - call(params, x)).max() > 1e-3) == (n > 1)
            if gradients is not None:
                check_gradients(name, [call] * n, gradients, [ct_gathered] * n)

        y, gradients = done["embed"]
        owners = [tokens // 4 == r for r in range(n)]
        terms = [params["embedding"][tokens] * mine[..., None] for mine in owners]
        check(y, terms, bound(collective, n, wire), "embed")
        if gradients is not None:
            wanted = np.zeros_like(params["embedding"])
            np.add.at(wanted, tokens, ct_gathered)
            check(gradients[0]["embedding"], [wanted], 2.0**-16, "embedding")
        logits, gradients = done["unembed"]
        check(logits, [gathered @ params["unembedding"]], 2.0**-16, "unembed")
        if gradients is not None:
            of_parts = np.split(np.cos(logits), n, -1)
            check_gradients("unembed", [reference.unembed] * n, gradients, of_parts)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("argument", ["wire", "gradient_wire"])
@pytest.mark.parametrize("name", ["column_linear", "row_linear", *LAYERS, "embed", "unembed"])
def test_what_is_no_wire_is_refused(name, argument, sequence_parallel):
    params = {**parameters(1), "kernel": np.ones((D, D), np.float32)}
    x = np.zeros((2, 4), int) if name == "embed" else np.ones((2, 4, D), np.float32)
    refused = [("int3", ValueError, "int3"), (8, TypeError, "not a wire")]
    refused += [(Wire("int8", stochastic=jax.random.key(0)), ValueError, "only rounds to nearest")]
    for wire, kind, words in refused:
        options = {"sequence_parallel": sequence_parallel, argument: wire}
        call = partial(getattr(tp, name), axis_name="z", **options)
        mapped = jax.shard_map(
            call, mesh=make_mesh(2, names="z"), in_specs=P(), out_specs=P(), check_vma=False
        )
        with pytest.raises(kind, match=words):
            jax.eval_shape(mapped, params, x)
