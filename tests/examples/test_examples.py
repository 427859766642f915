"""The examples do what they claim, over several meshes; each in a process of its own.

Each example compares its results itself, with its own tolerance, and its exit status says whether
they hold.
"""

import json
from importlib.util import find_spec

import pytest
from processes import together
from support import mostly_exhaustive, python

MISSING = [name for name in ("optax", "orbax", "flax", "equinox") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"no {', '.join(MISSING)}: pip install -e '.[examples]'"
)
#: Sizes for which FSDP still shards the weights, and 2 and 3 ranks share the heads.
TINY = "--layers 2 --width 72 --heads 6 --features 144 --sequence 48 --batch 12 --save-every 3"


def train(folder, flags):
    """Train a few steps with --check; return the losses and the errors that --check allowed."""
    arguments = f"--check --output {folder} --checkpoint {folder / 'saved'} {TINY} {flags}".split()
    done = python("-W", "error", "-m", "examples.train_transformer", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    return found["losses"], {str(row["step"]): row["losses_allowed"] for row in found["check"]}


@pytest.mark.exhaustive
def test_training_is_that_of_one_device_and_goes_on_over_another_mesh(tmp_path):
    whole, allowed = train(tmp_path, "--steps 6")
    assert list(whole) == list(allowed) == list("012345")
    resumed, then_allowed = train(
        tmp_path,
        "--steps 6 --resume 3 --data 2 --fsdp 1 --model 3 --algorithm bidirectional_ring",
    )
    assert list(resumed) == list(then_allowed) == list("345")
    for step, loss in resumed.items():  # each may be so far from the exact one
        assert abs(loss - whole[step]) <= allowed[step] + then_allowed[step]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "flags",
    [
        "--model 3 --dtype bfloat16",
        "--fsdp 2 --context 2 --model 3",
        "--fsdp 2 --context 2 --model 2 --experts 2",  # and so the load-balancing loss
    ],
)
def test_training_in_other_ways_is_that_of_one_device(flags, tmp_path):
    train(tmp_path, f"--steps 3 --data 1 --algorithm ring {flags}")


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ("--sequence 50 --context 2", "--sequence 50: an early and a late part"),
        ("--experts 6 --model 4", "--experts 6: a token has 2, and each rank of --model 4 as many"),
        ("--experts 1", "--experts 1: a token has 2"),
        ("--experts 4 --check", "--check --experts 4: rounding may choose a different expert"),
    ],
)
def test_what_cannot_be_cut_or_checked_is_refused(refused, words, capsys):
    from examples.train_transformer import flags

    with pytest.raises(SystemExit):
        flags(refused.split())
    assert words in capsys.readouterr().err


@pytest.mark.exhaustive
def test_training_over_processes_is_that_of_one_to_the_last_bit(tmp_path):
    """Over two processes: the ranks of a model are in one process, those of FSDP are in two."""
    sizes = "--layers 1 --width 72 --heads 2 --features 144 --sequence 12 --batch 4 --steps 3"
    flags = f"{sizes} --data 1 --algorithm ring".split()
    train = "-W", "error", "-m", "examples.train_transformer", *flags
    saved = tmp_path / "saved"
    together((2, 2), *train, "--output", tmp_path / "several", "--checkpoint", saved)
    assert (saved / "3").is_dir()
    done = python(*train, "--output", str(tmp_path / "one"))
    assert done.returncode == 0, done.stdout + done.stderr
    several, one = ((tmp_path / name / "losses.json").read_text() for name in ("several", "one"))
    assert several == one


#: What a program prints, with which flags, and its exit status.
PROGRAMS = [
    ("data_parallel", (), 0, ("lax, leaf by leaf                     25 ", "28  as by lax")),
    ("decoder_step", (), 0, ("step 0: loss 5.", "step 59: loss")),
    ("decode", (), 0, ("one_shot                                18                 9",)),
    ("equinox_block", (), 0, ("gradients as on one device",)),
    ("flax_block", (), 0, ("gradients as on one device",)),
    ("fsdp_equinox", (), 0, ("54272 B of weights on a device", "the losses are equal, except")),
    ("fsdp_nnx", (), 0, ("52096 B of weights on a device", "the losses are equal, except")),
    ("overlap_budget", (), 0, ("within the budget",)),
    ("same_losses", (), 0, ("by the tree         0 of 100 losses differ",)),
    ("overlap_budget", ("--plain",), 1, ("overlap_budget.py", "more than the 5.0% allowed")),
]


@pytest.mark.parametrize(
    ("name", "flags", "status", "words"),
    mostly_exhaustive(PROGRAMS, lambda name, *_: name == "data_parallel"),
)
def test_a_program_agrees_with_the_built_in_and_says_so(name, flags, status, words):
    if name == "overlap_budget" and find_spec("libtpu") is None:
        pytest.skip("no libtpu: pip install -e '.[tpu]'")
    done = python("-W", "error", "-m", f"examples.{name}", *flags)
    assert done.returncode == status, done.stdout + done.stderr
    assert [each for each in words if each not in done.stdout + done.stderr] == []
