# %% [markdown]
"""
# Which mesh for a model on N chips

Choose a mesh of data x model for a model on N chips: the modelled time of every factoring of N.

    python -m examples.tutorials.mesh_chooser
    python -m examples.tutorials.mesh_chooser --devices 256 --device v5p --batch 256 --fsdp

Nothing runs. The model is a decoder-only transformer with gated MLPs (by default Llama 3 8B),
trained by Adam in bfloat16 with float32 weights. It is assumed that:

- matmuls run at the published rate; attention is causal; a block keeps only its input, and is
  computed again for the gradient, so a step has the work of 4 forward passes;
- `model` and `data` are closed rings of the torus, with the links of `ringcoll.costs.DEVICES`;
- over `model`, activations are sharded by sequence: each of the four linear layers of a block has a
  collective under its product, or before or after it if that is faster (`overlapped_seconds` and
  `built_in_seconds` of `ringcoll.costs.under_work`);
- over `data`, gradients are summed in float32 by "bidirectional_ring" after the step, exposed; with
  --fsdp weights are gathered and gradients scattered under the products of the next block;
- a device holds 16 bytes per weight (the weight, two moments, the gradient), a copy of the weights
  in bfloat16, the inputs of its blocks, the intermediate results of one block, and the logits.
"""

# %%
import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from ringcoll.algorithms import bidirectional_ring
from ringcoll.costs import DEVICES, Model, price, seconds
from ringcoll.costs.under_work import Work, built_in_seconds, overlapped_seconds, rounds
from ringcoll.learn import show

#: Bytes of memory of a device: docs.cloud.google.com/tpu/docs/v5e, v5p, v6e.
CAPACITY = {"v5e": 16e9, "v5p": 95e9, "v6e": 32e9}
SIZES = {
    "devices": 64, "layers": 32, "width": 4096, "features": 14336, "heads": 32, "kv_heads": 8,
    "vocabulary": 128256, "batch": 64, "sequence": 8192,
}  # fmt: skip


# %% [markdown]
"""
## The model
"""

# %%


@dataclass(frozen=True)
class Step:
    """A step on a device: seconds, and bytes of memory."""

    compute: float
    communication: float
    exposed: float
    bytes: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


class Transformer:
    """Counts the weights of a transformer, and models its step on a mesh."""

    def __init__(self, of: argparse.Namespace) -> None:
        self.of, kv_width = of, of.width // of.heads * of.kv_heads
        attention = of.width * (of.width + 2 * kv_width), of.width**2
        #: Weights of a block's four linear layers: after a gather, before a scatter, and again.
        self.linears = (*attention, 2 * of.width * of.features, of.width * of.features)
        self.block = sum(self.linears)
        norms = (2 * of.layers + 1) * of.width
        self.weights = of.layers * self.block + 2 * of.vocabulary * of.width + norms

    def step(self, data: int, model: int, machine: Model) -> Step:
        """The step of a device on a mesh of data x model."""
        of, fsdp = self.of, self.of.fsdp
        tokens = of.batch * of.sequence // data  # on all ranks along `model` together
        share = tokens / model
        attended = 2 * of.sequence * of.width * of.layers
        forward = share * (2 * (of.layers * self.block + of.vocabulary * of.width) + attended)
        compute = 4 * forward * machine.delta

        # Along `model`: two forward passes, and a backward pass with twice the work.
        shard = 2 * share * of.width
        halves = rounds(bidirectional_ring(model))
        hops = sum(machine.latency + machine.beta * shard * one.load for one in halves[1:])
        wire, exposed = 3 * of.layers * len(self.linears) * hops, 0.0
        for weights in self.linears if model > 1 else ():
            for times, works in ((2, 1), (1, 2)):
                work = Work(works * 2 * share * weights)
                hidden = overlapped_seconds([work], shard, machine, halves)
                bare = built_in_seconds([work], shard, model, machine, gathers=True)
                over = min(hidden, bare) - work.flops * machine.delta
                exposed += times * of.layers * over

        # Along `data`: the sum of all gradients, or a block's messages under the next block.
        def ring(collective: str, weights: float, itemsize: int) -> float:
            paid = price(collective, "bidirectional_ring", (data,), (data,))
            return seconds(paid, weights / model / data * itemsize, machine)

        if fsdp:
            blocks = self.weights / self.block
            gather, scatter = ring("all_gather", self.block, 2), ring("psum_scatter", self.block, 4)
            under = compute / 4 / blocks
            wire += blocks * (2 * gather + scatter)
            exposed += blocks * max(0.0, gather - under)
            exposed += blocks * max(0.0, gather + scatter - 3 * under)
        else:
            summing = ring("psum", self.weights, 4)
            wire, exposed = wire + summing, exposed + summing
        mine = self.weights / model
        kept = 16 * mine / data + 4 * self.block / model if fsdp else 18 * mine
        inputs = 2 * share * of.width * of.layers + 2 * tokens * of.width
        activations = share * (2 * (6 * of.width + 3 * of.features) + 8 * of.vocabulary)
        return Step(compute, wire, exposed, kept + inputs + activations)

    def obstacles(self, data: int, model: int) -> str:
        """Dimensions that this mesh does not divide, in words; "" if none."""
        of = self.of
        cuts = [("batch", of.batch, data)]
        cuts += [
            (name, vars(of)[name], model)
            for name in ("heads", "kv_heads", "features", "vocabulary", "sequence")
        ]
        cuts += [("width", of.width, data)] if of.fsdp else []
        return ", ".join(
            f"{what.replace('_', '-')} {size} by {n}" for what, size, n in cuts if size % n
        )


# %% [markdown]
"""
## The meshes
"""

# %%


def flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments: sizes of the model, and the machine."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.tutorials.mesh_chooser",
        description="Modelled times of a step, for all meshes of data and model.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="v5e", choices=CAPACITY, help="kind of chip (v5e)")
    parser.add_argument("--fsdp", action="store_true", help="shard the weights over data too")
    for name, size in SIZES.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=size, metavar="N", help=f"({size})")
    args = parser.parse_args(argv)
    for name in SIZES:
        if vars(args)[name] < 1:
            parser.error(f"--{name.replace('_', '-')} {vars(args)[name]}: give 1 or more")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Print the meshes, fastest first."""
    args = flags(argv)
    of, machine = Transformer(args), DEVICES[args.device]
    rows, refused = [], []
    for model in (m for m in range(1, args.devices + 1) if args.devices % m == 0):
        data = args.devices // model
        if why := of.obstacles(data, model):
            refused.append((f"{data} x {model}", *[""] * 5, f"does not divide: {why}"))
            continue
        step, holds = of.step(data, model, machine), CAPACITY[args.device]
        times = step.compute, step.communication, step.exposed, step.seconds
        cells = (*(f"{1e3 * t:.0f}" for t in times[:3]), f"{step.bytes / 1e9:.1f}")
        fits = step.bytes <= holds
        says = "" if fits else f"does not fit into {holds / 1e9:g} GB"
        rows.append(
            (not fits, step.seconds, (f"{data} x {model}", *cells, f"{1e3 * times[3]:.0f}", says))
        )
    rows.sort()
    what = f"{of.weights / 1e9:.2f} G weights, {args.batch} x {args.sequence} tokens a step"
    over = f"{args.devices} x {args.device}{', weights sharded over data' if args.fsdp else ''}"
    heads = (
        "data\nx model",
        "compute\nms",
        "communi-\ncation",
        "\nexposed",
        "memory\nGB",
        "step\nms",
    )
    table = [cells for _, _, cells in rows] + refused
    show(f"Modelled: {what}, {over}", (*heads, ""), table)
    if any(not unfit for unfit, _, _ in rows):
        print("the fastest that fits:", rows[0][2][0])
    elif rows:
        cure = "" if args.fsdp else "shard the weights over data too (--fsdp), or "
        print(f"none fits: {cure}take more devices")
    else:
        print("none divides: change the number of devices or the batch")


# %% tags=["active-ipynb"]
# main([])

# %% tags=["active-py"]
if __name__ == "__main__":
    main()

# %% [markdown]
"""
With `--fsdp`, weights are sharded over `data` too:
"""

# %% tags=["active-ipynb"]
# main(["--fsdp"])

# %% [markdown]
"""
## Exercise 1: how few chips

On how many v5e chips does this model fit, with `--fsdp`? Find the smallest power of two. Use
`Transformer(flags([...])).step(data, model, machine).bytes` for every mesh without `obstacles`.
"""


# %% tags=["solution"]
def least_bytes(devices: int) -> float:
    """The memory of each device on the mesh that needs the least."""
    args = flags(["--fsdp", "--devices", str(devices)])
    of, chips = Transformer(args), DEVICES[args.device]
    meshes = [(devices // model, model) for model in range(1, devices + 1) if devices % model == 0]
    return min(of.step(*mesh, chips).bytes for mesh in meshes if not of.obstacles(*mesh))


fits = {devices: least_bytes(devices) <= CAPACITY["v5e"] for devices in (8, 16, 32, 64)}
print("whether the model fits, by number of chips:", fits)
assert [*fits.values()] == sorted(fits.values())
assert fits[64]

# %% [markdown]
"""
## Exercise 2: a larger batch

Double the batch on the same 64 chips, without `--fsdp`. By how much does the exposed share of the
fastest mesh fall, and why? (This does not check whether the mesh fits in memory. Look at that too.)
"""


# %% tags=["solution"]
def exposed_share(batch: int) -> float:
    """The exposed share of the time, on the fastest mesh."""
    of = Transformer(flags(["--batch", str(batch)]))
    meshes = [(64 // model, model) for model in (1, 2, 4, 8, 16, 32, 64)]
    steps = [of.step(*mesh, DEVICES["v5e"]) for mesh in meshes if not of.obstacles(*mesh)]
    quickest = min(steps, key=lambda step: step.seconds)
    return quickest.exposed / quickest.seconds


shares = exposed_share(64), exposed_share(128)
print(f"exposed: {shares[0]:.1%}, with twice the batch {shares[1]:.1%}")
assert shares[1] < shares[0]  # the gradients of all weights are summed once a step
