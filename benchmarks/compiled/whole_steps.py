"""Whole training steps as programs: a loss of four layers and its gradients.

A scan runs the layers, each under `jax.checkpoint`. All forms of a step have the same layers. They
differ in the functions that move data: one gathers the weights of a layer, one multiplies by
columns, one by rows, one attends. Over an axis `data` the batch is sharded, over `fsdp` the batch
and the weights, over `tp` the model and the sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ringcoll
from benchmarks.compiled import block, block_halves, experts
from benchmarks.compiled.programs import COMPILER, PLAIN, by_shardings
from ringcoll.layers import context_parallel, fsdp
from ringcoll.layers import tensor_parallel as tp
from ringcoll.schedules.registry import LAX

PIECES, ALL_TO_ALLS = "plain in 4 pieces", "plain all-to-alls"
#: Ours by "auto"; ours by the algorithm that follows.
OURS, BY = "ours", "ours by "
#: The plain program, under `ringcoll.overlapped`.
OVERLAPPED = "ours overlapped"
BLOCK, CONTEXT, EXPERTS = "block", "context", "experts"
DATA, FSDP, TP = "data", "fsdp", "tp"
LAYERS, HEAD, GROUPS, TOP_K = 4, 128, 8, 8


@dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        layer: one of `block_halves.FORMS`, or `BLOCK`, `CONTEXT` or `EXPERTS`.
        axes: the axes of the mesh.
        tokens: sequences x tokens of each, of all devices.
        width, hidden: features between layers, and inside.
        vocabulary: the words of the loss; with 0 it is a sum of squares.
        forward: whether the program is one layer, without gradients.
    """

    layer: str
    axes: Mapping[str, int]
    tokens: tuple[int, int]
    width: int
    hidden: int
    vocabulary: int = 0
    forward: bool = False

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms that are different programs."""
        if self.layer == EXPERTS:
            return PLAIN, OURS
        if self.layer == CONTEXT:
            return PLAIN, ALL_TO_ALLS, OURS
        pieces = (PIECES,) if TP in self.axes and self.layer != BLOCK else ()
        overlapped = (OVERLAPPED,) if TP in self.axes else ()
        return PLAIN, *pieces, COMPILER, OURS, *overlapped

    def parameters(self) -> dict[str, Any]:
        """The shapes of the weights of a layer."""
        d, f = self.width, self.hidden
        if self.layer in block_halves.FORMS:
            return block_halves.shapes_of(self.layer, d, f)
        if self.layer == EXPERTS:
            e = 8 * self.axes[FSDP]
            return {"router": (d, e), "gate": (e, d, f), "up": (e, d, f), "down": (e, f, d)}
        return block.parameters(d, d // HEAD, GROUPS, f)

    def specs(self, weights: Any, mesh: Mesh) -> Any:
        """How the weights are sharded. Without `tp` kernels are by columns, for `fsdp.linear`."""
        if self.layer == EXPERTS:
            return {name: P() if name == "router" else P(None, FSDP) for name in weights}
        if TP not in self.axes:
            columns = {**tp.COLUMNS, "out": -1, "down": -1}
            return tp.partition_specs(weights, FSDP, columns=columns, rows={})
        specs = tp.partition_specs(weights, TP)
        if FSDP in self.axes:
            specs = fsdp.specs(weights, FSDP, mesh=mesh, base=specs, leading=1, min_size=2**14)
        return specs


def program(step: Step, form: str, mesh: Mesh, dtype: Any = jnp.bfloat16) -> tuple[Callable, tuple]:
    """A step as a function of weights and x, and these operands, for `overlap.compile_for`."""
    if form == OVERLAPPED:
        function, operands = program(step, PLAIN, mesh, dtype)
        return ringcoll.overlapped(function), operands
    batch = next((axis for axis in (DATA, FSDP) if axis in step.axes), None)
    model = (TP,) if TP in step.axes else ()
    x_spec = P(None, FSDP) if step.layer == CONTEXT else P(batch, *model)

    def operand(of: tuple[int, ...], spec: P = x_spec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(of, dtype, sharding=NamedSharding(mesh, spec))

    def stacked(of: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(of if step.forward else (LAYERS, *of), dtype)

    shapes = jax.tree.map(stacked, step.parameters(), is_leaf=lambda of: isinstance(of, tuple))
    specs = step.specs(shapes, mesh)
    weights = {"layers": jax.tree.map(lambda of, spec: operand(of.shape, spec), shapes, specs)}
    if step.vocabulary:
        weights["words"] = operand((step.width, step.vocabulary), P(None, *model))
    x = operand((*step.tokens, step.width))
    of_layer = jax.tree.map(lambda spec: P(*list(spec)[1:]), specs)
    if form == COMPILER:
        constraints = partial(_place, mesh, of_layer), *block.by_constraints(mesh, batch, model)
        function = partial(_step, step, form, constraints, ())
        return by_shardings(function, (weights, x)), (weights, x)
    moves = _moves(form, model, of_layer if FSDP in step.axes else None)
    function = partial(_step, step, form, moves, mesh.axis_names)
    ins = jax.tree.map(lambda of: of.sharding.spec, (weights, x))
    out = ins[1] if step.forward else (P(), ins[0])
    return jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=out), (weights, x)


def _place(mesh: Mesh, specs: Any, weights: Any) -> Any:
    """Constrain weights to be whole over `fsdp`, so that XLA gathers them."""

    def place(leaf: Array, spec: P) -> Array:
        kept = (None if axis == FSDP else axis for axis in spec)
        return lax.with_sharding_constraint(leaf, NamedSharding(mesh, P(*kept)))

    return jax.tree.map(place, weights, specs)


def _moves(form: str, model: tuple[str, ...], specs: Any) -> tuple[Callable, Callable, Callable]:
    """What gathers weights, what multiplies by columns and what by rows, inside `shard_map`."""
    ours, algorithm = form.startswith(OURS), _algorithm(form)
    if ours and not model:
        linear = partial(fsdp.linear, axis_name=FSDP, algorithm=algorithm)

        def multiply(x: Array, kernels: Sequence[Array]) -> list[Array]:
            return [linear(kernel, x) for kernel in kernels]

        def rows(x: Array, kernel: Array) -> Array:
            flat = x.reshape(*x.shape[:2], -1)
            return linear(kernel.reshape(flat.shape[-1], -1), flat)

        return _same, partial(block.by_matrices, multiply), rows
    if ours:
        how = {"specs": specs, "axis_name": FSDP, "algorithm": algorithm}
        gather = partial(fsdp.gather, **how) if specs else _same
        return gather, *block.by_ours(model, {"algorithm": algorithm})
    gather = partial(jax.tree.map, _gathered, specs) if specs else _same
    if model:
        return gather, partial(block.gather_matmul, model), partial(block.matmul_scatter, model)
    products = lambda x, kernels: [block.product(x, kernel) for kernel in kernels]  # noqa: E731
    return gather, products, block.product


def _gathered(spec: P, leaf: Array) -> Array:
    dims = list(spec)
    return lax.all_gather(leaf, FSDP, axis=dims.index(FSDP), tiled=True) if FSDP in dims else leaf


def _same(of: Any) -> Any:
    return of


def _step(
    step: Step, form: str, moves: tuple, axes: tuple[str, ...], weights: Any, x: Array
) -> Any:
    """The loss and the gradients of all weights; or one layer."""
    layer = partial(_layer, step, form, moves)
    if step.forward:
        return layer(x, weights["layers"])

    def loss(weights: Any) -> Array:
        y, _ = lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), x, weights["layers"])
        if step.vocabulary:
            of = _of_words(moves[1], form, y, weights["words"])
        else:
            of = (y.astype(jnp.float32) ** 2).sum()
        over = tuple(axis for axis in axes if axis != TP or not step.vocabulary)
        return lax.psum(of, over) if over else of

    return jax.value_and_grad(loss)(weights)


def _of_words(columns: Callable, form: str, y: Array, words: Array) -> Array:
    """A loss of the next words; each rank of `tp` has the logits of some of them, for all rows."""
    (logits,) = columns(y, [words])
    labels = jnp.broadcast_to(jnp.arange(logits.shape[1]), logits.shape[:2])
    if form != COMPILER:
        return tp.cross_entropy(logits, labels, TP, algorithm=_algorithm(form)).sum()
    logits = logits.astype(jnp.float32)
    at_label = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - at_label).sum()


def _algorithm(form: str) -> str:
    """The algorithm of calls of ringcoll in a form."""
    if form.startswith(BY):
        return form.removeprefix(BY)
    return "auto" if form.startswith(OURS) else LAX


def _layer(step: Step, form: str, moves: tuple, x: Array, weights: Any) -> Array:
    gather, columns, rows = moves
    algorithm = _algorithm(form)
    if step.layer == EXPERTS:
        tokens, mixture = x.reshape(-1, x.shape[-1]), experts.all_to_alls
        if form.startswith(OURS):
            sent = len(tokens) * TOP_K // step.axes[FSDP]
            mixture = partial(experts.ours, algorithm=algorithm, max_send=sent)
        operands = (weights[name] for name in ("router", "gate", "up", "down"))
        return x + mixture(tokens, *operands, axis_name=FSDP, top_k=TOP_K).reshape(x.shape)
    weights = gather(weights)
    if step.forward and form.startswith(OURS):

        def hidden(part: Array) -> Array:
            return jax.nn.silu(part @ weights["gate"]) * (part @ weights["up"])

        mapped = ringcoll.all_gather_map(hidden, x, TP, dim=1, algorithm=algorithm)
        return rows(mapped, weights["down"])
    if step.layer in block_halves.FORMS:
        half = partial(block_halves.by_parts, step.layer, columns, rows, weights=weights)
        parts = jnp.split(x, 4 if form == PIECES else 1, axis=1)
        y = jnp.concatenate([half(x=part) for part in parts], 1)
        return y if step.forward else x + y
    attend = block.attend
    if step.layer == CONTEXT:
        algorithm = context_parallel.ULYSSES if form == ALL_TO_ALLS else algorithm
        zigzag = partial(context_parallel.attention, causal=True, layout="zigzag")
        attend = partial(zigzag, axis_name=FSDP, algorithm=algorithm)
    return block.by_parts(columns, rows, attend, x, weights)
