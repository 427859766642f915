"""Train a small language model on the sources of Python's standard library.

    python -m examples.train_transformer
    python -m examples.train_transformer --data 1 --fsdp 4 --model 2 --dtype bfloat16
    python -m examples.train_transformer --context 4 --data 1 --sequence 768 --batch 4
    python -m examples.train_transformer --experts 8 --features 192
    python -m examples.train_transformer --steps 100 --algorithm bidirectional_ring --check
    python -m examples.train_transformer --checkpoint results/saved
    python -m examples.train_transformer --checkpoint results/saved --resume 400 --model 3

Over several hosts, start the same command on each. Their devices form one mesh (for CPUs, say how
many devices a host has: JAX_NUM_CPU_DEVICES=4). All hosts must see the same folder of checkpoints:

    python -m examples.train_transformer --coordinator HOST:9999 --num-processes 2 --process-id 0

The model is in `transformer.py`, the training in `training.py`. `check.py` and `plain.py` compare
it with the same model on one device.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.measuring import processes, report
from examples import curve, text, training
from examples.check import Check
from examples.transformer import TOP_K, Config
from examples.writing import write
from ringcoll.costs.wire import CODES
from ringcoll.io import files

#: How many batches of held-out text are averaged after the last step; earlier steps use one.
HELD_OUT = 32


def flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_transformer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(name: str, default: Any, help: str, **options: Any) -> None:
        options = {"type": type(default), "metavar": "N", **options}
        parser.add_argument(name, default=default, help=f"{help} ({default})", **options)

    add("--data", 2, "data-parallel replicas of the model")
    add("--fsdp", 2, "ranks over which the parameters of a replica are sharded")
    add("--context", 1, "ranks over which the sequence is sharded, also inside attention")
    add("--model", 2, "tensor-parallel ranks: of heads, features, vocabulary, sequence")
    add("--layers", 4, "blocks")
    add("--width", 144, "features of a token")
    add("--heads", 6, "heads of attention")
    add("--features", 384, "features of the MLP, or of each expert")
    add("--experts", 0, "MLPs in a block; each token uses 2 of them; 0 for one MLP for all tokens")
    add("--sequence", 192, "tokens in a row")
    add("--batch", 12, "rows in a batch")
    add("--steps", 600, "steps of the optimizer")
    add("--learning-rate", 3e-3, "learning rate of AdamW")
    add("--dropout", 0.1, "rate of dropout, after each half of a block")
    add("--seed", 0, "seed of weights, batches and dropout")
    add("--dtype", "float32", "dtype of activations and messages", choices=["float32", "bfloat16"])
    add("--algorithm", "auto", "algorithm of collectives and collective matmuls", metavar="NAME")
    for name, of in ("--wire", "FSDP's gathers"), ("--gradient-wire", "the sums of gradients"):
        add(name, None, f"codes in the messages of {of}", type=str, choices=CODES)
    add("--output", Path("results/transformer"), "folder for the loss curve", metavar="DIR")
    add("--save-every", 200, "steps between checkpoints")
    option = parser.add_argument
    option("--checkpoint", type=Path, metavar="DIR", help="folder for saved states")
    words = "resume from the state after STEP (the last); later states are deleted at the next save"
    option("--resume", nargs="?", type=int, const=-1, metavar="STEP", help=words)
    option("--check", action="store_true", help="compare with a run on one device; 1 if it differs")
    processes.add_arguments(parser)
    args = parser.parse_args(argv)
    if args.context < 1 or args.sequence % (2 * args.context):
        words = f"an early and a late part for each of --context {args.context}"
        parser.error(f"--sequence {args.sequence}: {words}; use a multiple of {2 * args.context}")
    if args.experts and (args.experts < TOP_K or args.experts % args.model):
        words = f"a token has {TOP_K}, and each rank of --model {args.model} as many as the others"
        parser.error(f"--experts {args.experts}: {words}; use {max(args.model, TOP_K)}, or 0")
    if args.check and args.experts > TOP_K:
        words = "rounding may choose a different expert for a token, and so a different loss"
        parser.error(f"--check --experts {args.experts}: {words}; check --experts {TOP_K}")
    for name in () if args.process_id else ("output", "checkpoint"):  # the first process writes
        try:
            if folder := getattr(args, name):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--{name} {folder}: {error}; name a folder that can be written to")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit status is 1 if --check found a difference."""
    args = flags(argv)
    processes.start(args)
    mesh = training.make_mesh(args.data, args.fsdp, args.context, args.model)
    named = "layers", "width", "heads", "features", "experts"
    sizes = {name: getattr(args, name) for name in named}
    options = {
        name: getattr(args, name)
        for name in ("dropout", "dtype", "algorithm", "wire", "gradient_wire")
    }
    config = Config(text.VOCABULARY, **sizes, **options)
    optimizer = training.adamw(args.learning_rate, args.steps)
    trainer = training.Trainer(config, mesh, optimizer, args.seed)

    saved, first = None, 0
    if args.checkpoint:
        saved = training.Checkpoints(args.checkpoint, args.save_every)
    if args.resume is not None:
        if saved is None:
            raise SystemExit("--resume: name the folder of saved states by --checkpoint DIR")
        try:
            first, trainer.state = saved.restore(args.resume, trainer.state)
        except (FileNotFoundError, ValueError) as error:
            raise SystemExit(f"--resume: {error}") from None
    elif saved and saved.steps():
        raise SystemExit(
            f"--checkpoint {args.checkpoint}: has states of an earlier run, {saved.steps()}; "
            "continue from one by --resume, or name a new folder"
        )
    if first >= args.steps:
        raise SystemExit(f"nothing to do: {first} steps are done, and --steps is {args.steps}")
    ranks = max(args.data * args.fsdp * args.context, args.model)
    cut = args.data * args.fsdp, args.context
    check = Check(config, trainer.state, optimizer, ranks, cut) if args.check else None

    size = sum(x.size for x in jax.tree.leaves(trainer.state.params))
    report.console().print(f"{size:,} parameters over {dict(mesh.shape)}, from step {first}")
    train_losses, held_out_losses = learn(args, trainer, first, saved, check)
    found = {
        "losses": train_losses,
        "held_out": held_out_losses,
        "check": check.rows if check else None,
    }
    if processes.is_first():
        title = f"{size:,} parameters over {dict(mesh.shape)}, {args.dtype}"
        curve.draw(args.output / "loss.png", title, train_losses, held_out_losses)
        files.write(args.output / "losses.json", json.dumps(found, indent=1))
    report.console().print(f"{args.output / 'loss.png'}, {args.output / 'losses.json'}\n")
    for page in write(config, trainer, args.sequence, args.seed)[:2]:
        report.console().print(page, "\n", markup=False)
    return check.verdict() if check else 0


def learn(
    args: argparse.Namespace,
    trainer: training.Trainer,
    first: int,
    saved: training.Checkpoints | None,
    check: Check | None,
) -> tuple[dict[int, float], dict[int, float]]:
    """The losses by step: of the batch, and at some steps of held-out text."""
    seen, held_out = text.read()
    batch = partial(text.batch, rows=args.batch, length=args.sequence + 1, seed=args.seed)
    train_losses: dict[int, float] = {}
    held_out_losses: dict[int, float] = {}
    status, steps = "", range(first, args.steps)

    def last_status(_: int) -> str:
        return status  # of the step before

    for i in report.progress(steps, len(steps), "train", last_status):
        clock = time.perf_counter()
        data = trainer.data(i, batch(seen, step=i))
        losses, grad_norms = trainer.step(*data)
        train_losses[i] = float(losses.mean())
        rate = losses.size / (time.perf_counter() - clock)
        status = f"loss {train_losses[i]:.3f}, {rate:,.0f} tokens/s"
        is_last = i + 1 == args.steps
        if check:
            check(i, losses, grad_norms, *data)
        if saved:
            saved.save(i + 1, trainer.state, is_last)
        if is_last or not (i + 1) % max(1, args.steps // 10):
            unseen = [batch(held_out, step=n) for n in range(HELD_OUT if is_last else 1)]
            held_out_losses[i] = float(np.mean([trainer.losses(some) for some in unseen]))
            report.console().print(f"step {i + 1}: {status}, held out {held_out_losses[i]:.3f}")
    return train_losses, held_out_losses


if __name__ == "__main__":
    sys.exit(main())
