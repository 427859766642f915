"""Benchmarks of sharded layers and of a block: their programs agree, and wrong ones are seen."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from support import check_doubling, doubling_times, make_mesh

from benchmarks.__main__ import main
from benchmarks.compiled import block, fsdp, layers, stack
from benchmarks.compiled.programs import COMPILER, PLAIN
from benchmarks.measuring import side_by_side

SHAPE = "3x8x64x96"
TOLERANCE = fsdp.tolerance(SHAPE, 4)
SHARDED = f"fsdp --shape {SHAPE} -g 4 -n 3"
BLOCK = "layers --shape 1x16x16x4x4x32 -g 4 -n 3 --mesh data=2,model=2"
IN_SHARDED = [PLAIN, COMPILER, *stack.OURS]
IN_BLOCK = [PLAIN, COMPILER, "ring", "auto+recursive_doubling"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("command", "names", "timed", "tolerance"),
    [
        (SHARDED, IN_SHARDED, IN_SHARDED * 2, TOLERANCE),  # nothing is kept, or products
        # Without data, nothing is summed.
        (f"{BLOCK} --mesh model=2,inner=2", IN_BLOCK, IN_BLOCK + IN_BLOCK[:-1], layers.TOLERANCE),
    ],
)
def test_programs_are_compared_and_timed(
    command, names, timed, tolerance, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(side_by_side, "interleave", doubling_times)
    path = tmp_path / "json"
    chosen = ["--algorithm", ",".join(["plain/tuned", *names[1:]]), "-J", str(path)]
    assert main([*command.split(), *chosen]) == 0
    rows = json.loads(path.read_text())["rows"]
    check_doubling(rows, capsys.readouterr().out)
    assert [row["algorithm"] for row in rows] == timed
    if command is SHARDED:
        assert [row["kept"] for row in rows] == ["nothing"] * 5 + ["products"] * 5
    assert max(row["error"] for row in rows) < tolerance <= 1e-4


@pytest.mark.parametrize(
    ("module", "name", "command", "tolerance"),
    [
        (stack.fsdp, "linear", f"{SHARDED} --kept nothing --algorithm compiler,linear", TOLERANCE),
        (block.tp, "gated_mlp", f"{BLOCK} --direction forward --algorithm compiler,ring",
         layers.TOLERANCE),
    ],
)  # fmt: skip
def test_a_wrong_program_is_seen(module, name, command, tolerance, monkeypatch, capsys):
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *of, **options: right(*of, **options) * 1.001)
    assert main(command.split()) == 1
    *_, by_shardings, ours, _, _ = capsys.readouterr().out.split("\n")
    assert float(by_shardings.split()[-1]) < tolerance < float(ours.split()[-1])


@pytest.mark.parametrize("kept", stack.POLICIES)
def test_plain_is_right(kept):
    """The other programs are compared with plain. It is compared with a loop in float64."""
    function, (x, weights) = stack.stack(SHAPE, kept, PLAIN, make_mesh(4), jnp.float32)
    rng = np.random.default_rng(1)
    values = {
        name: rng.standard_normal(of.shape) / of.shape[-2] ** 0.5 for name, of in weights.items()
    }
    y = start = rng.standard_normal(x.shape)
    for gate, up, down in zip(*(values[name] for name in ("gate", "up", "down")), strict=True):
        y = y + (y @ gate / (1 + np.exp(-y @ gate)) * (y @ up)) @ down
    mine = function(jnp.float32(start), {name: jnp.float32(of) for name, of in values.items()})
    np.testing.assert_allclose(mine, y, rtol=0, atol=TOLERANCE * np.abs(y).max())


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(SystemExit, match="none of data=2,model=2 is of the 8 devices"):
        main(["layers", "--mesh", "data=2,model=2"])
